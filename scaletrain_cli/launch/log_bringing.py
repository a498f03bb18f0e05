"""Logs that are elsewhere, brought into the run directory: who reads them there needs to know no scheduler."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path

from scaletrain_cli.errors import SchedulerError, UsageError
from scaletrain_cli.launch.logs import LogFile
from scaletrain_cli.rundir.paths import RunDir
from scaletrain_cli.rundir.record import read_record


@contextlib.contextmanager
def logs_brought(run: RunDir, *, follow: bool = False) -> Iterator[str]:
    """What there is of them is here once this is entered; with ``follow``, what is printed meanwhile comes, too.

    Yields why they could not be had: what was brought before can be read all the same.
    """
    record = read_record(run)
    if record.spec.cluster.scheduler != "kubernetes":  # the ranks of the others write where this is read
        yield ""
        return
    from scaletrain_cli.launch.kubernetes.scheduler import KubernetesScheduler

    why, following = "", contextlib.ExitStack()
    try:
        logs = KubernetesScheduler().logs(run, record)
        if logs is not None:
            logs.bring()
            if follow:
                following.enter_context(logs.following())
    except (SchedulerError, UsageError) as error:
        why = error.message
    with following:
        yield why


class FirstWords:
    """Hands out what pods say before their attempt begins, as it is brought: some end before any attempt does."""

    def __init__(self, run: RunDir, since: Sequence[LogFile]) -> None:
        """Leave out what is older than the logs of an attempt, ``since``."""
        self._folder = run.path / "pods"
        news = first_words(run, since)
        self._read = {path: path.stat().st_size for path in self._folder.glob("*.log") if path not in news}

    def new_lines(self) -> list[tuple[str, str]]:
        """Return the pod and the text of each line that is new."""
        found = []
        for path in sorted(self._folder.glob("*.log")):
            with path.open("rb") as file:
                file.seek(self._read.get(path, 0))
                data = file.read()
            data = data[: data.rfind(b"\n") + 1]
            self._read[path] = self._read.get(path, 0) + len(data)
            found += [(path.stem, line) for line in data.decode(errors="replace").splitlines()]
        return found


def first_words(run: RunDir, since: Sequence[LogFile]) -> list[Path]:
    """What pods said before their attempt began, if it is news: of an image without the package, of a full volume."""
    newest = max((file.path.stat().st_mtime for file in since), default=0.0)
    return [path for path in sorted((run.path / "pods").glob("*.log")) if path.stat().st_mtime > newest]
