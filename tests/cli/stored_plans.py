"""Stored plans, and the output of a screen for them. No tests here.

Stored, so that a better planner does not change what is claimed about views.
"""

import dataclasses
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter
from rich.console import Console

from scaletrain_cli.plan.result import Alternative, Layout, RunPlan, with_reasons
from scaletrain_cli.reasons import recorded
from scaletrain_cli.spec import RunSpec

STORED = sorted((Path(__file__).parent / "plans").glob("*.json"))


def stored(path: Path) -> tuple[RunSpec, RunPlan]:
    data: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    fields = [field.name for field in dataclasses.fields(Layout)]
    others = tuple(
        Alternative(
            Layout(**{field: row[field] for field in fields if field in row}),  # younger fields have defaults
            row["time"]["step"],
            row["memory"]["peak"],
            row["fits"],
            recorded(row["why"]),
        )
        for row in data["plan"].pop("alternatives")
    )
    plan = TypeAdapter(RunPlan).validate_python(with_reasons(data["plan"]))
    return RunSpec.model_validate(data["spec"]), dataclasses.replace(plan, alternatives=others)


def printed(view: Callable[[Console], None], width: int, encoding: str = "utf-8") -> str:
    """Return the text that ``view`` prints on a console of ``width`` columns, without colors."""
    written = io.BytesIO()
    stream = io.TextIOWrapper(written, encoding=encoding, errors="replace")
    view(Console(file=stream, width=width, highlight=False, markup=False, emoji=False))
    return written.getvalue().decode(encoding)
