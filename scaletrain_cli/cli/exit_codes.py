"""What each exit code means, as `--help` says it; docs/exit-codes.md has the whole story."""

from __future__ import annotations

from collections.abc import Sequence

from scaletrain_cli.errors import ExitCode

MEANINGS = {
    ExitCode.DONE: "done",
    ExitCode.CRASHED: "crashed",
    ExitCode.USAGE: "usage or spec error",
    ExitCode.INFEASIBLE: "the plan is infeasible",
    ExitCode.SCHEDULER: "the scheduler refused or cannot be reached",
    ExitCode.WRONG_NODES: "the nodes are not what was planned",
    ExitCode.PREEMPTED: "stopped early, checkpoint committed",
    ExitCode.DO_NOT_REQUEUE: "a verdict that a retry cannot cure",
}


def describe(codes: Sequence[ExitCode]) -> str:
    """``Exit codes: 0 done; 2 usage or spec error.``"""
    return f"Exit codes: {'; '.join(f'{code.value} {MEANINGS[code]}' for code in codes)}."
