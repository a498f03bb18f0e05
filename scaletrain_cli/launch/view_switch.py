"""End a view that shows what the cluster reports once the files of its run can be read.

A view that follows a run whose files are elsewhere may begin while none of its pods runs. It ends with
NowReachableError as soon as one does, and the verb begins again where the files are (cli/elsewhere.py).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from scaletrain_cli.errors import ScaletrainError
from scaletrain_cli.reasons import Reason

if TYPE_CHECKING:
    from scaletrain_cli.launch.run_status import RunStatus


class NowReachableError(ScaletrainError):
    """The files of a run, whose view began while none of its pods ran, can be read now. ``lines``: already shown."""

    def __init__(self, lines: int = 0) -> None:
        super().__init__(Reason("launch.view-now"))
        self.lines = lines


_awaited = False


def await_files(value: bool) -> None:
    """Let switch_if_reachable() end views of this process, or not."""
    global _awaited
    _awaited = value


def switch_if_reachable(status: RunStatus, lines: int = 0) -> None:
    """Raise NowReachableError if a view that waits for the files of its run can read them: its pods run, or it is over.

    ``lines``: those that the view has printed.
    """
    from scaletrain_cli.launch.run_status import OVER

    if _awaited and not status.files_seen and (status.state == "running" or status.state in OVER):
        raise NowReachableError(lines)
