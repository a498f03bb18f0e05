"""The telemetry part of a node agent for forked ranks: read their pipes and write the file of the node."""

import os
import time
from dataclasses import dataclass, field
from pathlib import Path

from scaletrain_cli.rundir.paths import RunDir
from scaletrain_cli.telemetry.run import node_file
from scaletrain_cli.telemetry.series import SeriesWriter
from scaletrain_cli.worker.heartbeat import HEARTBEAT_VARIABLE
from scaletrain_cli.worker.telemetry import read_telemetry_line
from tests.drills.campaign.forked_attempts import Attempt

NODE = "node-0000-here"
_SECONDS = 0.05


def connect_rank(run: RunDir, attempt: int, rank: int) -> None:
    """Give this rank a pipe for its heartbeats and telemetry."""
    path = _pipe(run, attempt, rank)
    os.mkfifo(path)
    # Not blocking, although nobody may read yet: this rank holds both ends.
    os.environ[HEARTBEAT_VARIABLE] = str(os.open(path, os.O_RDWR | os.O_NONBLOCK))


@dataclass
class Collector:
    """Reads the pipes of an attempt's ranks until it is over."""

    attempt: Attempt
    _open: dict[int, int] = field(default_factory=dict)
    _rest: dict[int, bytes] = field(default_factory=dict)

    def __call__(self) -> None:
        """Write what ranks send to the file of the node, until the attempt is over."""
        writer = SeriesWriter(node_file(self.attempt.run, self.attempt.number, NODE))
        over = False
        while not over:
            over = self.attempt.over.wait(_SECONDS)
            self._read(writer)
            writer.flush()
        for descriptor in self._open.values():
            os.close(descriptor)
        writer.close()

    def _read(self, writer: SeriesWriter) -> None:
        for rank in range(self.attempt.world_size):
            path = _pipe(self.attempt.run, self.attempt.number, rank)
            if rank not in self._open and path.exists():
                self._open[rank] = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
            if rank not in self._open:
                continue
            try:
                data = self._rest.get(rank, b"") + os.read(self._open[rank], 1 << 16)
            except BlockingIOError:
                continue
            *lines, self._rest[rank] = data.split(b"\n")
            for row in filter(None, map(read_telemetry_line, lines)):
                spread = {"count": row.count, "lowest": row.lowest, "highest": row.highest}
                writer.add(f"rank {rank}", row.time, row.step, row.mean, **spread)


def _pipe(run: RunDir, attempt: int, rank: int) -> Path:
    return run.attempt(attempt) / f"rank-{rank}.fifo"


def sample_host(run: RunDir, attempt: int, seconds: float) -> None:
    """Write the use of this process's node to a file of its own, every ``seconds``, in a thread of a rank."""
    from scaletrain_cli.launch.node.telemetry import HostSampler

    sampler, writer = HostSampler(), SeriesWriter(node_file(run, attempt, "node-0001-here"))
    while True:
        if values := sampler.sample():
            writer.add("node", time.time(), _newest_step(run), values)
            writer.flush()
        time.sleep(seconds)


def _newest_step(run: RunDir) -> int:
    from scaletrain_cli.rundir.journal import read_metrics

    lines = read_metrics(run)
    return int(lines[-1]["step"]) if lines else 0
