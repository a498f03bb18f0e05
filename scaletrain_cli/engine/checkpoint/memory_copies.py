"""Copy the state to the host memory of the node every few steps, so that a killed rank loses no more than these steps.

A thread writes each copy, with the files of a checkpoint, to tmpfs, which outlives the rank, and sends it to another
node if a lost one can be replaced in the job. Another thread writes the checkpoints to disk, so that neither waits for
the other. When the next copy is due, the ranks wait for the last one: it is complete on every rank then, and the one
before is removed.
"""

import contextlib
import itertools
import logging
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path

from scaletrain_cli.engine.checkpoint.copy_transfer import Content, Transfer, transfer_copies, transfers_to_partners
from scaletrain_cli.engine.checkpoint.resume_point import ResumePoint
from scaletrain_cli.engine.checkpoint.shard_file import (
    Entry,
    ShardHeader,
    Slice,
    overlaps,
    shard_name,
    shard_parts,
    write_parts,
)
from scaletrain_cli.engine.context import RankContext
from scaletrain_cli.engine.process_group import RankConsensus
from scaletrain_cli.plan.reliability.durability import MEMORY_COST, MEMORY_SHARE, without_partners
from scaletrain_cli.reasons import Reason
from scaletrain_cli.rundir.checkpoints import STATE_FILE, checkpoint_path
from scaletrain_cli.rundir.journal import record_event
from scaletrain_cli.rundir.paths import copies_folder
from scaletrain_cli.safe_files import make_folder
from scaletrain_cli.worker.memory_copies import (
    complete_copy,
    drop_copies,
    free_bytes,
    open_copies,
    place_of,
    read_manifest,
    remove_copies,
)

_TRANSFER_SECONDS = 600.0  # for a chunk of a copy to reach another node
EVENT, OFF_EVENT = "memory-copies", "memory-copies-off"
logger = logging.getLogger(__name__)


class MemoryCopies:
    """The copies of one rank. Methods are called by all ranks at the same step boundary, unless stated otherwise."""

    def __init__(
        self, context: RankContext, resume_point: ResumePoint, places: Sequence[str], delay_seconds: float
    ) -> None:
        """Remove the copies of earlier attempts, except the one that this attempt resumes from. Raises OSError.

        ``places``: that of each rank's copies.
        """
        self._context, self._ranks, self._consensus = context, context.ranks, context.long_consensus
        self._key, self._delay_seconds = resume_point.copies_key, delay_seconds
        self._auto = context.spec.checkpoint.in_memory == "auto"
        self._groups = context.layout.local_sgd_groups
        self._every = context.record.plan.durability.memory_copy_steps
        self.folder = copies_folder(context.run)
        self._lock = open_copies(self.folder)
        self._is_first_of_place = places.index(places[self._ranks.rank]) == self._ranks.rank
        self._has_others = len(set(places)) > 1
        self._needs: tuple[int, ...] | None = None  # other ranks; None before the first copy
        self._transfers: Sequence[Transfer] = ()
        self._to_partners: RankConsensus | None = None
        self._last = resume_point.step  # the step of the last copy, or at which the attempt begins
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="memory-copies")
        self._write: Future[float] | None = None
        self._blocked_seconds = 0.0  # by the last copy
        self._failed = False
        self._reports = 2 if self._auto else 1  # left: of the first copy, and of the first interval by measured times
        kept = resume_point.step if resume_point.in_memory else None
        if self._is_first_of_place:
            for path in self.folder.glob("step-*"):
                if path != checkpoint_path(self.folder, -1 if kept is None else kept):
                    remove_copies(path)

    def send_to_partners(self, transfers: Sequence[Transfer]) -> None:
        """Send each copy to another place, too."""
        self._transfers = transfers
        self._to_partners = RankConsensus(_TRANSFER_SECONDS)  # of its own, because the thread uses it

    def is_due(self, step: int) -> bool:
        """Return True if the state after ``step`` steps is to be copied; the same on every rank."""
        return self._every is not None and step >= self._last + self._every

    def ready(self, step_seconds: float | None) -> bool:
        """Wait for the last copy of every rank; return False if one failed: then there are no further ones.

        ``auto`` sets its interval by what the last copy took; ``step_seconds``: the time of a step, if known.
        """
        self._wait()
        wanted = float(self._every or 1)
        if self._auto and self._write is not None and step_seconds and not self._failed:
            wanted = max(self._blocked_seconds / MEMORY_COST, self._write.result()) / step_seconds
        wanted = -self._consensus.least(-math.inf if self._failed else -wanted)
        self._every = None if math.isinf(wanted) else max(1, math.ceil(wanted))
        return self._every is not None

    def _wait(self) -> None:
        if self._write is not None and not self._failed:
            try:
                self._write.result()
            except OSError as error:
                self._failed = True
                why = Reason("engine.memory-copies-failed", {"error": str(error)})
                report_off(self._context, why, rank=self._ranks.rank)

    def begin(
        self,
        step: int,
        header: ShardHeader,
        entries: list[Entry],
        state: str,
        *,
        needed: list[Slice],
        blocked_seconds: float,
        before_complete: Callable[[], None],
    ) -> None:
        """Write a copy in the thread, once the ranks are ``ready``.

        ``entries`` must not change until they are again. ``needed``: the slices that this rank reads in a resume.
        ``before_complete``: called in the thread before the copy counts as complete.
        """
        if self._needs is None:
            self._needs = self._needed_ranks(header, needed) if self._has_others else ()
        self._drop(before=self._last)
        self._last, self._blocked_seconds = step, blocked_seconds
        work = (step, header, entries, state, self._needs, before_complete)
        self._write = self._thread.submit(self._write_all, *work)
        if self._reports:
            self._reports -= 1
            details = {"every": self._every, "blocked_seconds": round(blocked_seconds, 4)}
            details |= {"nodes": 2} if self._transfers else {}
            self._context.report(EVENT, step=step, attempt=self._context.attempt, **details)

    def _needed_ranks(self, header: ShardHeader, needed: list[Slice]) -> tuple[int, ...]:
        """Return the other ranks whose files this rank reads in a resume. Collective.

        Ranks tell each other the slices of the matrices of which some rank does not save all that it needs; those of
        groups of local SGD, each with a state of its own, that of all matrices.
        """
        own = header.slices
        lacking = [part for part in needed if self._groups > 1 or _shared(own, part) < part.numel]
        parts = self._consensus.gather(sorted({part.name for part in lacking}))
        names = self._consensus.follow_rank_zero({name for part in parts or () for name in part})
        everyone = self._consensus.gather_everywhere({name: part for name, part in own.items() if name in names})
        others = (rank for rank in range(self._ranks.world_size) if rank != self._ranks.rank)
        return tuple(rank for rank in others if any(_shared(everyone[rank], part) for part in lacking))

    def layout_changed(self) -> None:
        """Find out again whose files a resume needs: other parameters are trained now."""
        self._needs = None

    def forget(self, step: int) -> None:
        """Remove the copies of later steps: the run goes back to ``step``, or they may be corrupt."""
        self._wait()
        self._consensus.barrier()
        self._drop(after=step)
        self._last = min(self._last, step)

    def _drop(self, *, before: float = -math.inf, after: float = math.inf) -> None:
        """Remove copies that no rank is writing, on the first rank of each place."""
        if self._is_first_of_place:
            drop_copies(self.folder, before=before, after=after)

    def close(self) -> None:
        """Wait for the thread, at the end of the attempt; the node agent removes the folder."""
        self._thread.shutdown()
        os.close(self._lock)

    def _write_all(
        self,
        step: int,
        header: ShardHeader,
        entries: list[Entry],
        state: str,
        needs: tuple[int, ...],
        before_complete: Callable[[], None],
    ) -> float:
        """Write the files of this rank and its manifest, and send them meanwhile; return the seconds."""
        began, rank = time.monotonic(), self._ranks.rank
        path, files = checkpoint_path(self.folder, step), {shard_name(rank): shard_parts(header, entries)}
        if rank == 0:
            files[STATE_FILE] = [memoryview(state.encode())]

        def write() -> None:
            make_folder(path, mode=0o700)
            digests = {name: write_parts(path / name, parts) for name, parts in files.items()}
            time.sleep(self._delay_seconds)
            before_complete()
            complete_copy(
                self.folder,
                step,
                rank,
                digests,
                key=self._key,
                world_size=self._ranks.world_size,
                attempt=self._context.attempt,
                needs=needs,
            )

        if self._to_partners is None:
            write()
            return time.monotonic() - began
        with ThreadPoolExecutor(max_workers=1, thread_name_prefix="own-copy") as thread:
            own = thread.submit(write)

            def manifest() -> bytes:
                wait([own])
                return read_manifest(path, rank)

            sizes = {name: sum(map(len, parts)) for name, parts in files.items()}
            content = Content(sizes, itertools.chain(*files.values()), manifest)
            try:  # also if nothing can be written here: the partner waits for it, and another rank's copy comes here
                transfer_copies(path, self._transfers, rank, self._to_partners, content)
            except RuntimeError as error:  # of gloo: a rank is lost
                raise OSError(str(error)) from error
            own.result()
        return time.monotonic() - began


def _shared(saved: Mapping[str, Slice], part: Slice) -> int:
    """Return how many elements of a slice are among those that a rank saves."""
    return sum(shared.length for shared in overlaps(saved[part.name], part)) if part.name in saved else 0


def report_off(context: RankContext, why: Reason, **details: int) -> None:
    """Record why an attempt makes no copies, no further ones, or none on a second node."""
    logger.warning("checkpoint.in_memory: %s", why)
    with contextlib.suppress(OSError):  # training does not depend on them
        record_event(context.run, OFF_EVENT, attempt=context.attempt, message=str(why), **why.to_document(), **details)


def open_memory_copies(context: RankContext, resume_point: ResumePoint, delay_seconds: float) -> MemoryCopies | None:
    """Return the copies of the run; None if it makes none, or a node has no room for them. Collective."""
    planned, ranks, consensus = context.record.plan.durability, context.ranks, context.long_consensus
    if planned.memory_copy_steps is None:
        return None
    folder = copies_folder(context.run)
    places = consensus.gather_everywhere(place_of(folder))
    on_partners, bytes_per_node = planned.memory_copies_on_partners, planned.memory_copy_bytes_per_node
    transfers = transfers_to_partners(places) if on_partners else []
    alone = without_partners(bytes_per_node) if on_partners else bytes_per_node

    def first_problem(problem: Reason | None) -> Reason | None:
        problems = consensus.gather(problem)
        return consensus.follow_rank_zero(next((reason for reason in problems or () if reason is not None), None))

    def lacks_room(needed: int) -> Reason | None:
        return first_problem(_too_little_room(folder, needed) if ranks.local_rank == 0 else None)

    problem = lacks_room(bytes_per_node if transfers else alone)
    if problem is not None and transfers:
        if ranks.rank == 0:
            report_off(context, Reason("engine.memory-copies-on-one-node", dict(problem.params)))
        transfers, problem = [], lacks_room(alone)
    copies: MemoryCopies | None = None
    if problem is None:
        try:
            copies = MemoryCopies(context, resume_point, places, delay_seconds)
        except OSError as error:
            problem = Reason("engine.memory-copies-failed", {"error": str(error)})
        problem = first_problem(problem)
    if problem is None and copies is not None:
        if transfers:
            copies.send_to_partners(transfers)
        return copies
    if copies is not None:
        copies.close()
    if places.index(places[ranks.rank]) == ranks.rank:
        drop_copies(folder, before=math.inf)
    if ranks.rank == 0 and problem is not None:
        report_off(context, problem)
    return None


def _too_little_room(folder: Path, needed: int) -> Reason | None:
    """Return why the copies do not fit in their share of the free host memory; what is in the folder counts as free."""
    free = free_bytes() + sum(path.stat().st_size for path in folder.glob("step-*/*"))
    if needed <= MEMORY_SHARE * free:
        return None
    return Reason("engine.memory-copies-no-room", {"needed_bytes": needed, "free_bytes": free, "share": MEMORY_SHARE})
