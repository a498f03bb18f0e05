"""All that was asked about one run, one block after the other: the cluster, the plan, the trace, the explanation."""

from __future__ import annotations

from rich.console import Console

from scaletrain_cli.plan.advice.answer import Answer
from scaletrain_cli.ui.plan_view import show_plan


def show_answer(found: Answer, *, everything: bool = False, console: Console | None = None) -> None:
    """On stdout unless ``console`` says otherwise; what was not asked costs no import."""
    if found.sizing is not None:
        from scaletrain_cli.ui.plan_sizing import show_sizing

        show_sizing(found.sizing, console)
    show_plan(found.spec, found.plan, everything=everything, console=console)
    if found.outcome is not None:
        from scaletrain_cli.ui.plan_trace import show_trace

        show_trace(found.outcome, console)
    if found.explanation is not None:
        from scaletrain_cli.ui.plan_explain import show_explanation

        show_explanation(found.explanation, console)
