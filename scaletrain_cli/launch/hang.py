"""A node whose ranks have come to a stand: ask each for its stacks, and say who holds the others up.

Decides nothing: node_run ends the ranks, judgement weighs what the nodes found.
"""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from scaletrain_cli.launch.heartbeats import Beat
from scaletrain_cli.launch.processes import process_state
from scaletrain_cli.launch.ranks import Gang
from scaletrain_cli.safe_files import make_folder, replace_file

DUMP_SECONDS = 2.0  # for stacks that a C handler writes to memory
_POLL_SECONDS = 0.05
_STATES = {
    "T": "stopped by a signal (state T)",
    "t": "stopped by a debugger (state t)",
    "D": "asleep in the kernel (state D: a disk, network file system or driver)",
    "R": "busy outside Python's reach (state R)",
    "S": "asleep and deaf to signals (state S)",
}


@dataclass(frozen=True)
class RankView:
    """One rank of a node that has come to a stand."""

    rank: int
    beat: Beat
    silent_seconds: float
    dumped: bool
    state: str  # the kernel's letter

    @property
    def place(self) -> str:
        return f"step {self.beat.step} ({self.beat.phase})"


@dataclass(frozen=True)
class Finding:
    """Who holds the others up, if it shows on this node; in words for people."""

    suspect: int | None
    message: str
    sure: bool = True  # a rank that is behind may itself wait for another node


def look_into(gang: Gang, folder: Path) -> list[RankView]:
    """Have each living rank dump its stacks, kept in ``folder``; those that answer do so within DUMP_SECONDS."""
    now, beats, alive = time.monotonic(), gang.listen(), list(gang.alive)
    gang.forward(signal.SIGUSR2)
    deadline = now + DUMP_SECONDS
    while time.monotonic() < deadline and not all(gang.channels[rank.rank].stacks() for rank in alive):
        time.sleep(_POLL_SECONDS)
    time.sleep(_POLL_SECONDS)  # the last of them may still be writing
    views = []
    for rank in alive:
        stacks, beat = gang.channels[rank.rank].stacks(), beats[rank.rank]
        if stacks:
            _keep(folder / f"{rank.rank:05d}.txt", stacks)
        views.append(RankView(rank.rank, beat, now - beat.heard, bool(stacks), process_state(rank.pid)))
    return views


def find_suspect(views: Sequence[RankView], several_nodes: bool) -> Finding:
    """Pure: a rank that did not answer, else the one that is behind the others, else nobody here."""
    silent = [view for view in views if not view.dumped]
    if silent:
        worst = max(silent, key=lambda view: (view.state in "TtD", view.silent_seconds))
        others = f", as {len(silent) - 1} more" if len(silent) > 1 else ""
        why = _STATES.get(worst.state, f"state {worst.state}")
        told = f"rank {worst.rank} did not answer{others}: {why}, since {worst.place}"
        return Finding(worst.rank, told, sure=worst.state != "D")  # a network file system is not the node's fault
    behind = min(views, key=lambda view: view.beat.progress)
    ahead = [view for view in views if (view.beat.step, view.beat.phase) != (behind.beat.step, behind.beat.phase)]
    if ahead:
        furthest = max(ahead, key=lambda view: view.beat.progress)
        return Finding(
            behind.rank,
            f"rank {behind.rank} is behind: in {behind.place} while rank {furthest.rank} is in {furthest.place}",
            sure=False,
        )
    if several_nodes:
        return Finding(None, f"all ranks wait in {behind.place}, for another node")
    return Finding(None, f"no rank stands out: all answered from {behind.place}")


def _keep(path: Path, stacks: bytes) -> None:
    with contextlib.suppress(OSError):  # the file system may be what hangs or is full; the verdict does without
        make_folder(path.parent)
        replace_file(path, stacks)
