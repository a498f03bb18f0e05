"""Read what another machine sent with this command: variables, and the state of a run for a view of its files.

Pods have no access to the scheduler, and the run directory of the submitter has files that theirs lacks. The machine
that asks for the view sends both: the job as the scheduler reports it, whether the run was cancelled, its own events,
and its small documents. They are in one file (launch/node/view.py), which is replaced while the view lasts.
"""

import functools
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class SentRun:
    """``run_dir``: the run directory here; ``documents``: by their path in it; ``received``: Unix time of the file."""

    run_dir: str
    job: Mapping[str, Any]
    is_cancelled: bool
    events: Sequence[dict[str, Any]]
    documents: Mapping[str, dict[str, Any]]
    received: float


_read: tuple[tuple[int, int], SentRun] | None = None


def sent_run(folder: Path) -> SentRun | None:
    """Return what was sent about the run with this run directory; None for any other run, and where nothing was."""
    known = _read_run()
    return known if known is not None and known.run_dir == str(folder) else None


def sent_run_folder() -> Path | None:
    """Return the run directory of the run that is shown; None where nothing was sent."""
    known = _read_run()
    return None if known is None else Path(known.run_dir)


def _read_run() -> SentRun | None:
    global _read
    path = sent().run
    if path is None:
        return None
    status = os.stat(path)
    state = (status.st_ino, status.st_mtime_ns)
    if _read is None or _read[0] != state:
        _read = (state, SentRun(**json.loads(path.read_bytes()), received=status.st_mtime))
    return _read[1]


def sent_document(path: Path) -> dict[str, Any] | None:
    """Return the document that was sent for this path in a run directory; None if there is none."""
    if sent().run is None:
        return None
    for folder in list(path.parents)[:2]:
        if (run := sent_run(folder)) is not None:
            return run.documents.get(str(path.relative_to(folder)))
    return None


ON_LOGIN_NODE = "SCALETRAIN_ON_LOGIN_NODE"
SENT_CLUSTERS = "SCALETRAIN_SENT_CLUSTERS"
SENT_SPEC = "SCALETRAIN_SENT_SPEC"
SENT_RUN = "SCALETRAIN_SENT_RUN"


@dataclass(frozen=True)
class Sent:
    """The variables of a command line that another machine may have sent.

    ``here``: another machine has sent it. That machine has this ``version`` and calls this one the login node of
    ``cluster``. ``clusters``: a clusters file with the cluster that the user named, which replaces that of this one.
    ``spec``: the path of the spec on that machine, for errors. ``run``: a file with the run as that machine has it
    (SentRun).
    """

    here: bool
    clusters: Path | None
    spec: str | None
    run: Path | None = None
    version: str | None = None
    cluster: str = ""


@functools.cache
def sent() -> Sent:
    """Return what was sent, and remove its variables from the environment: the files are gone before a job starts."""
    names = (ON_LOGIN_NODE, SENT_CLUSTERS, SENT_SPEC, SENT_RUN)
    here, clusters, spec, run = (os.environ.pop(name, None) for name in names)
    is_here = here is not None or bool(run)
    version, _, cluster = (here or "").partition(" ")
    files = (Path(clusters) if clusters else None, spec or None, Path(run) if run else None)
    return Sent(is_here, *files, version or None, cluster)
