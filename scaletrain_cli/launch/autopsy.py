"""What a rank that was killed or aborted had no time to say: read by its agent from the kernel and the rank's log."""

from __future__ import annotations

from pathlib import Path

from scaletrain_cli.errors import ExitCode
from scaletrain_cli.launch.logs import end_of
from scaletrain_cli.launch.memory_kills import memory_kills
from scaletrain_cli.launch.node_record import RankRecord
from scaletrain_cli.rundir.evidence import reason_in
from scaletrain_cli.rundir.failures import Failure

_ABORTS = ("SIGABRT", "SIGBUS", "SIGSEGV")  # NCCL's watchdog, a library's assertion, memory that went away


class Autopsies:
    """Of the ranks of one node, from now on: only what the kernel kills later concerns them."""

    def __init__(self) -> None:
        self._kills_before = memory_kills() or 0

    def failure(self, rank: RankRecord, node: str, log: Path) -> Failure | None:
        """What a rank that no agent killed died of; None when nothing more is known than the signal."""
        if rank.signal == "SIGKILL" and (memory_kills() or 0) > self._kills_before:
            why = "killed by the kernel: the host, or the job's share of it, was out of memory"
            return _failure(rank, "host-oom", node, why)
        if rank.signal in _ABORTS and (reason := reason_in(end_of(log))) is not None:
            return _failure(rank, reason, node, f"ended by {rank.signal}; the end of {log.name} says why")
        return None


def _failure(rank: RankRecord, reason: str, node: str, why: str) -> Failure:
    return Failure(rank.rank, reason, f"rank {rank.rank} on {node}: {why}", int(ExitCode.CRASHED), node)
