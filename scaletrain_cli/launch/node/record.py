"""The record of a node in an attempt, attempts/NNNN/nodes/<node>.json, and the marker files that agents exchange."""

import dataclasses
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from scaletrain_cli.rundir.documents import documents_in, read_as, write_document
from scaletrain_cli.rundir.paths import RunDir
from scaletrain_cli.safe_files import make_folder, touch
from scaletrain_cli.text import signal_text

if TYPE_CHECKING:
    from scaletrain_cli.launch.node.processes import ProcessIdentity


@dataclass(frozen=True)
class RankRecord:
    """One rank's process. ``exit_code`` is minus the signal number if one killed it, None while it runs."""

    rank: int
    pid: int
    started: float
    ended: float | None = None
    exit_code: int | None = None
    signal: str | None = None
    killed_by_agent: bool = False
    ranks: int = 1  # how many ranks the process starts itself, this one is the first of them

    def holds(self, rank: int | None) -> bool:
        """Return whether a rank is this process, or one that it started."""
        return rank is not None and self.rank <= rank < self.rank + self.ranks

    def end(self, exit_code: int, now: float, killed_by_agent: bool) -> "RankRecord":
        """Return the record of the same rank with its end."""
        name = signal_text(-exit_code) if exit_code < 0 else None
        return dataclasses.replace(self, ended=now, exit_code=exit_code, signal=name, killed_by_agent=killed_by_agent)


@dataclass(frozen=True)
class NodeRecord:
    """One node in an attempt. Without ``ended`` the agent still runs, or was lost with its node."""

    node: str
    hostname: str
    node_rank: int
    agent_pid: int
    agent_start_ticks: int
    started: float
    ranks: tuple[RankRecord, ...] = ()
    ended: float | None = None
    exit_code: int | None = None
    first_failure: int | None = None  # the first rank that failed
    agent_boot: str = ""  # of the machine: pids and start times come again after a reboot

    @property
    def name(self) -> str:
        """The scheduler's name of the node."""
        return self.node.removeprefix(f"node-{self.node_rank:04d}-")

    @property
    def agent(self) -> "ProcessIdentity":
        """The agent's process; valid only on the host of this record."""
        from scaletrain_cli.launch.node.processes import ProcessIdentity

        return ProcessIdentity(self.agent_pid, self.agent_start_ticks, self.agent_boot)


def write_node_record(run: RunDir, attempt: int, record: NodeRecord) -> None:
    """Create or replace the node's record. Raises OSError when the run directory cannot be written."""
    folder = run.attempt(attempt) / "nodes"
    make_folder(folder)
    write_document(folder / f"{record.node}.json", dataclasses.asdict(record))


def read_node_records(run: RunDir, attempt: int) -> list[NodeRecord]:
    """Return the records of an attempt's nodes, by node rank. Raises UsageError for a damaged one."""
    records = [read_as(NodeRecord, path) for path in documents_in(run.attempt(attempt) / "nodes")]
    return sorted(filter(None, records), key=lambda record: record.node_rank)


# The attempt has failed; the ranks of a node hang, and all agents look for the hung one; all nodes have ended; nothing
# but lost nodes is left of the attempt.
Mark = Literal["failed", "hung", "ended", "abandoned"]


def announce(run: RunDir, attempt: int, mark: Mark) -> None:
    """Inform the agents of the other nodes. Raises OSError."""
    touch(run.attempt(attempt) / mark)


def is_announced(run: RunDir, attempt: int, *marks: Mark) -> bool:
    """Return whether an agent has announced one of these. False for a file system that does not answer now."""
    return any(os.path.exists(run.attempt(attempt) / mark) for mark in marks)
