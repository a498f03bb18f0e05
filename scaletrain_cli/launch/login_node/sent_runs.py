"""The runs that this machine has submitted through login nodes, so that verbs for them run there.

One line per submission in ``~/.local/state/scaletrain/runs-on-login-nodes.jsonl``; the last line of a run counts.
"""

import dataclasses
import json
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scaletrain_cli.errors import UsageError
from scaletrain_cli.reasons import Reason
from scaletrain_cli.safe_files import closing_descriptor, expand_home, make_folder, open_to_append, open_to_read


@dataclass(frozen=True)
class SentRun:
    """A run on a cluster with a login node. ``submitted``: Unix time; ``code``: the section of its spec, or None.

    The path in ``code`` is the absolute one on this machine. ``secrets``: names of its ``secret_env``. ``sweep``: the
    name is that of a sweep, and the ids of its runs begin with it. ``removed``: it is there no more.
    """

    run_id: str
    cluster: str
    submitted: float
    code: dict[str, Any] | None = None
    secrets: Sequence[str] = ()
    sweep: bool = False
    removed: bool = False


def sent_runs_file() -> Path:
    """Return the path of the list, in ``$XDG_STATE_HOME`` or ``~/.local/state``."""
    folder = Path(os.environ.get("XDG_STATE_HOME") or expand_home("~/.local/state"))
    return folder / "scaletrain" / "runs-on-login-nodes.jsonl"


def remember(run: SentRun) -> None:
    """Add a run to the list. Raises OSError."""
    file = sent_runs_file()
    make_folder(file.parent)
    with closing_descriptor(open_to_append(file)) as descriptor:
        os.write(descriptor, (json.dumps(dataclasses.asdict(run)) + "\n").encode())


def forget(run: SentRun) -> None:
    """Take a run off the list. Raises OSError."""
    remember(dataclasses.replace(run, submitted=time.time(), removed=True))


def sent_runs() -> list[SentRun]:
    """Return the runs on the list, oldest first. Lines that cannot be read are left out."""
    try:
        with open_to_read(sent_runs_file()) as file:
            lines = file.read().splitlines()
    except OSError:
        return []
    latest: dict[str, SentRun] = {}
    for line in lines:
        try:
            run = SentRun(**json.loads(line))
        except (ValueError, TypeError):
            continue
        latest.pop(run.run_id, None)
        latest[run.run_id] = run
    return [run for run in latest.values() if not run.removed]


def find_sent_run(name: str) -> SentRun | None:
    """Return the run with this id or unique prefix, or the sweep that it belongs to; None if the list has none.

    Raises UsageError for a prefix of several.
    """
    known = sent_runs()
    exact = [run for run in known if run.run_id == name or (run.sweep and name.startswith(f"{run.run_id}-"))]
    matches = exact or [run for run in known if name and run.run_id.startswith(name)]
    if len(matches) > 1:
        raise UsageError(Reason("login_node.several-runs", {"name": name, "runs": [run.run_id for run in matches]}))
    return matches[0] if matches else None
