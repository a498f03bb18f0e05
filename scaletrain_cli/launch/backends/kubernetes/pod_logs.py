"""Fetch the pods' output into the run directory, since a restart deletes the logs of a gang.

Only for pods whose volume is not mounted here; otherwise their files are used. Lines are assigned to the attempt that
the pod has announced; earlier lines go to a file of the pod in pods/.
"""

import contextlib
import os
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace

from scaletrain_cli.errors import SchedulerError
from scaletrain_cli.launch.backends.kubernetes.api import Cluster, RefusedError
from scaletrain_cli.launch.backends.kubernetes.api_kinds import POD, Object
from scaletrain_cli.launch.backends.kubernetes.job_ref import JobRef, shares_volume
from scaletrain_cli.launch.backends.kubernetes.names import INSTANCE_LABEL, NODE
from scaletrain_cli.launch.backends.kubernetes.observation import Observation, index_of, own_container, reports
from scaletrain_cli.launch.backends.kubernetes.pod_output import progress_in, rank_of, read_pod_line
from scaletrain_cli.rundir.documents import read_as, write_document
from scaletrain_cli.rundir.paths import RunDir
from scaletrain_cli.safe_files import locked, make_folder, open_to_append

_LINES_READ = 200  # of pod 0's log, for the newest progress
_LOOK_EVERY_SECONDS = 3.0
_SAVE_EVERY_SECONDS = 1.0
_LAST_LINES_SECONDS = 2.0
_MOST_STREAMS = 256  # each is a thread here and a connection to the API server


@dataclass(frozen=True)
class _Source:
    """One pod's log: ``since`` is the time of the last line that was read, ``attempt`` the one that the pod named.

    ``same``: how many lines of that time were read. CRI-O gives all lines that it reads at once the same time.
    """

    name: str
    node: str
    first_rank: int
    since: str = ""
    same: int = 0
    attempt: int | None = None


class PodLogs:
    """Fetches the logs of a job's pods, each line once, also over several commands in sequence."""

    def __init__(self, run: RunDir, cluster: Cluster, ref: JobRef, ranks_per_pod: int) -> None:
        self._run, self._cluster, self._ref = run, cluster, ref
        self._ranks_per_pod = ranks_per_pod
        self._stopped = threading.Event()
        self._streams: dict[str, threading.Thread] = {}

    def fetch(self) -> None:
        """Fetch new lines of every pod that the API server still has. Raises SchedulerError after the last pod."""
        first_error: RefusedError | None = None
        with self._exclusive() as exclusive:
            for pod in self._pods() if exclusive else ():
                try:
                    self._read(pod, follow=False)
                except RefusedError as error:  # an unresponsive node must not hide the output of others
                    gone = error.status == 404
                    first_error = first_error if gone or first_error is not None else error
        if first_error is not None:
            raise first_error

    @contextlib.contextmanager
    def following(self) -> Iterator[None]:
        """Return a context in which logs are fetched continuously, also from pods of later gangs."""
        with self._exclusive() as exclusive:
            if not exclusive:
                yield
                return
            starter = threading.Thread(target=self._start_readers, name="pod-logs", daemon=True)
            starter.start()
            try:
                yield
            finally:
                self._stopped.set()
                starter.join(2 * _LOOK_EVERY_SECONDS)
                deadline = time.monotonic() + _LAST_LINES_SECONDS
                for stream in self._streams.values():  # the streams of pods that have ended also end
                    stream.join(max(0.0, deadline - time.monotonic()))

    @contextlib.contextmanager
    def _exclusive(self) -> Iterator[bool]:
        """Yield whether no other command fetches this run's logs now: two would write every line twice."""
        folder = self._run.path / "pods"
        make_folder(folder)
        with locked(folder / "lock", wait_seconds=0) as exclusive:
            yield exclusive and not shares_volume(self._run)

    def _start_readers(self) -> None:
        """Start a reader for every pod that is new or whose stream was closed."""
        streams = self._streams
        while not shares_volume(self._run):
            with contextlib.suppress(SchedulerError):  # the server may answer the next request
                for pod in self._pods():
                    uid = pod["metadata"]["uid"]
                    active = sum(thread.is_alive() for thread in streams.values())
                    if (uid not in streams or not streams[uid].is_alive()) and active < _MOST_STREAMS:
                        streams[uid] = threading.Thread(target=self._stream, args=(pod,), name=uid, daemon=True)
                        streams[uid].start()
            if self._stopped.wait(_LOOK_EVERY_SECONDS):
                return

    def _stream(self, pod: Object) -> None:
        with contextlib.suppress(SchedulerError):
            self._read(pod, follow=True)

    def _pods(self) -> list[Object]:
        """Return the pods whose container has started, the oldest first."""
        pods = self._cluster.find(POD, self._ref.namespace, labels=f"{INSTANCE_LABEL}={self._ref.name}")
        # The server refuses to return the log of a waiting container.
        started = [pod for pod in pods if {"running", "terminated"} & own_container(pod).get("state", {}).keys()]
        return sorted(started, key=lambda pod: str(pod["metadata"].get("creationTimestamp")))

    def _read(self, pod: Object, *, follow: bool) -> None:
        """Append the pod's new lines to their files, and remember how far it was read."""
        state = self._run.path / "pods" / f"{pod['metadata']['uid']}.json"
        if (source := read_as(_Source, state)) is None:
            name, node = pod["metadata"]["name"], pod.get("spec", {}).get("nodeName", "unknown")
            source = _Source(name, node, index_of(pod) * self._ranks_per_pod)
        before, repeated, saved = source, 0, time.monotonic()
        lines = self._cluster.log(self._ref.namespace, source.name, NODE, since=source.since, follow=follow)
        try:
            for line in lines:
                stamp, _, text = line.partition(" ")
                repeated += stamp == before.since
                # The server's ``sinceTime`` has a resolution of one second. An error of the kubelet has no time.
                is_known = stamp < before.since or (stamp == before.since and repeated <= before.same)
                if is_known or not stamp[:1].isdigit():
                    continue
                if (about := read_pod_line(text)) is None:
                    self._write(source, text)
                elif about.get("shared"):
                    return
                else:
                    source = replace(source, attempt=about["attempt"])
                source = replace(source, since=stamp, same=source.same + 1 if stamp == source.since else 1)
                if time.monotonic() - saved > _SAVE_EVERY_SECONDS:
                    write_document(state, asdict(source))
                    saved = time.monotonic()
                if self._stopped.is_set():
                    return
        finally:
            write_document(state, asdict(source))

    def _write(self, source: _Source, text: str) -> None:
        """Append a line to the log of its rank; a line of the agent goes to the log of its first rank."""
        rank, line = rank_of(text)
        if source.attempt is None:
            path = self._run.path / "pods" / f"{source.name}.log"
        else:
            folder = self._run.attempt(source.attempt) / "logs"
            make_folder(folder)
            path = folder / f"{source.node}-{source.first_rank if rank is None else rank:05d}.log"
        with os.fdopen(open_to_append(path), "a", encoding="utf-8") as file:
            file.write(f"{line}\n")


def newest_progress(cluster: Cluster, ref: JobRef, seen: Observation) -> dict[str, float]:
    """Return the newest progress that pod 0 printed; empty if it cannot be read."""
    started = [pod for pod in seen.pods if index_of(pod) == 0 and "waiting" not in own_container(pod).get("state", {})]
    first = [pod for pod in started if reports(pod)]  # a request to a dead node would time out
    if not first:
        return {}
    with contextlib.suppress(SchedulerError):
        lines = cluster.log(ref.namespace, first[-1]["metadata"]["name"], NODE, last_lines=_LINES_READ)
        return progress_in(line.partition(" ")[2] for line in lines)
    return {}
