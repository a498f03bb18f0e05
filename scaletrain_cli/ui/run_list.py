"""All runs in a table, one line each."""

from __future__ import annotations

import time
from collections.abc import Sequence

from rich.table import Table
from rich.text import Text

from scaletrain_cli.errors import UsageError
from scaletrain_cli.launch.status import RunStatus
from scaletrain_cli.rundir.paths import RunDir
from scaletrain_cli.ui.console import answer, plain, show, words
from scaletrain_cli.ui.status_view import STYLES

_TITLES = ("run", "state", "step", "loss", "attempts", "submitted")


def show_runs(rows: Sequence[tuple[RunDir, RunStatus | UsageError]]) -> None:
    """Newest first, as given. Which point of its sweep a run is stands there where one is; the sweep begins its id."""
    of_sweeps = any(not isinstance(status, UsageError) and status.sweep is not None for _, status in rows)
    titles = (*_TITLES, "of sweep") if of_sweeps else _TITLES
    table = Table.grid(padding=(0, 2, 0, 0))
    for title in titles:
        right = title in ("step", "loss", "attempts")
        table.add_column(justify="right" if right else "left", no_wrap=title != "run", overflow="fold")
    table.add_row(*(Text(title, "dim") for title in titles))
    for run, status in rows:
        created = time.strftime("%Y-%m-%d %H:%M", time.localtime(run.record.stat().st_mtime))
        if isinstance(status, UsageError):
            table.add_row(words(run.run_id), Text("damaged", "red"), "", "", "", created)
            continue
        table.add_row(
            words(status.run_id),
            Text(plain(status.state), STYLES.get(status.state, "")),
            f"{status.step}/{status.total_steps}",
            "" if status.loss is None else f"{status.loss:.4f}",
            str(status.attempt),
            created,
            *([] if status.sweep is None else [f"{status.sweep.number} of {status.sweep.points}"]),
        )
    show(answer(), table)
