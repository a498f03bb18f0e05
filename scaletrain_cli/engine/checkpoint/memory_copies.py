"""Copy the state to the host memory of the node every few steps, so that a killed rank loses no more than these steps.

A thread writes each copy, with the files of a checkpoint, to tmpfs, which outlives the rank. Another one writes the
checkpoints to disk, so that neither waits for the other. When the next copy is due, the ranks wait for the last one: it
is complete on every rank then, and the one before is removed.
"""

import contextlib
import logging
import math
import os
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from scaletrain_cli.available_memory import available_bytes
from scaletrain_cli.engine.checkpoint.resume_point import ResumePoint
from scaletrain_cli.engine.checkpoint.shard_file import Entry, ShardHeader, Slice, StateReader, shard_name, write_shard
from scaletrain_cli.engine.metrics.reporting import report_event
from scaletrain_cli.engine.process_group import RankConsensus, Ranks
from scaletrain_cli.plan.reliability.durability import MEMORY_COST, MEMORY_SHARE
from scaletrain_cli.reasons import Reason
from scaletrain_cli.rundir.checkpoints import STATE_FILE, FileDigest, checkpoint_path
from scaletrain_cli.rundir.journal import record_event
from scaletrain_cli.rundir.paths import MEMORY, RunDir, copies_folder
from scaletrain_cli.rundir.record import RunRecord
from scaletrain_cli.safe_files import make_folder
from scaletrain_cli.worker.checkpoint_commit import HashingWriter
from scaletrain_cli.worker.memory_copies import complete_copy, drop_copies, open_copies, remove_copies

EVENT, OFF_EVENT = "memory-copies", "memory-copies-off"
logger = logging.getLogger(__name__)


class MemoryCopies:
    """The copies of one rank. Methods are called by all ranks at the same step boundary, unless stated otherwise."""

    def __init__(
        self,
        run: RunDir,
        record: RunRecord,
        ranks: Ranks,
        consensus: RankConsensus,
        resume_point: ResumePoint,
        *,
        attempt: int,
        delay_seconds: float = 0.0,
    ) -> None:
        """Remove the copies of earlier attempts, except the one that this attempt resumes from. Raises OSError."""
        self._run, self._ranks, self._consensus, self._attempt = run, ranks, consensus, attempt
        self._key, self._delay_seconds = resume_point.copies_key, delay_seconds
        self._auto, self._nodes = record.spec.checkpoint.in_memory == "auto", record.spec.cluster.nodes
        self._groups = record.plan.layout.local_sgd_groups
        self._every = record.plan.durability.memory_copy_steps
        self.folder = copies_folder(run)
        self._lock = open_copies(self.folder)
        self._last = resume_point.step  # the step of the last copy, or at which the attempt begins
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="memory-copies")
        self._write: Future[float] | None = None
        self._blocked_seconds = 0.0  # by the last copy
        self._tried = self._failed = False
        self._reports = 2 if self._auto else 1  # left: of the first copy, and of the first interval by measured times
        kept = resume_point.step if resume_point.in_memory else None
        if ranks.local_rank == 0:
            for path in self.folder.glob("step-*"):
                if path != checkpoint_path(self.folder, -1 if kept is None else kept):
                    remove_copies(path)

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
                report_off(self._run, self._attempt, why, rank=self._ranks.rank)

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
        drop_copies(self.folder, self._ranks.rank, before=self._last)
        self._last, self._blocked_seconds = step, blocked_seconds
        self._write = self._thread.submit(self._write_all, step, header, entries, state, before_complete)
        if self._tried or self._nodes == 1 or self._covers(step, needed):
            self._tried = True
            if self._reports:
                self._reports -= 1
                details = {"attempt": self._attempt, "every": self._every, "blocked_seconds": round(blocked_seconds, 4)}
                report_event(self._run, self._ranks.rank, EVENT, step=step, **details)
            return
        self._every = None
        drop_copies(self.folder, self._ranks.rank, before=math.inf)
        if self._ranks.rank == 0:
            report_off(self._run, self._attempt, Reason("engine.memory-copies-spread"))

    def _covers(self, step: int, needed: list[Slice]) -> bool:
        """Return whether each node has what its ranks need; waits for the first copy."""
        self._wait()
        self._consensus.barrier()
        path = checkpoint_path(self.folder, step)
        here = [] if self._failed else [file.name for file in path.glob("rank-*.safetensors")]
        covered = self._groups == 1 and bool(here)
        covered = covered and StateReader(path, self._ranks.rank, [], here).lacking(needed) is None
        return self._consensus.least(float(covered)) > 0

    def forget(self, step: int) -> None:
        """Remove the copies of later steps: the run goes back to ``step``, or they may be corrupt."""
        self._wait()
        self._consensus.barrier()
        drop_copies(self.folder, self._ranks.rank, after=step)
        self._last = min(self._last, step)

    def close(self) -> None:
        """Wait for the thread, at the end of the attempt; the node agent removes the folder."""
        self._thread.shutdown()
        os.close(self._lock)

    def _write_all(
        self, step: int, header: ShardHeader, entries: list[Entry], state: str, before_complete: Callable[[], None]
    ) -> float:
        """Write the files of this rank and its manifest, in the thread; return the seconds."""
        began, path, name = time.monotonic(), checkpoint_path(self.folder, step), shard_name(self._ranks.rank)
        make_folder(path, mode=0o700)
        digests: dict[str, FileDigest] = {name: write_shard(path / name, header, entries)}
        if self._ranks.local_rank == 0:
            file = HashingWriter(path / STATE_FILE)
            file.write(state.encode())
            digests[STATE_FILE] = file.close()
        time.sleep(self._delay_seconds)
        before_complete()
        # Without a key, no attempt uses it: of several nodes, the first one is checked when it is written.
        key = self._key if self._tried or self._nodes == 1 else ""
        of_job = (step, self._ranks.rank, digests)
        complete_copy(self.folder, *of_job, key=key, world_size=self._ranks.world_size, attempt=self._attempt)
        return time.monotonic() - began


def report_off(run: RunDir, attempt: int, why: Reason, **details: int) -> None:
    """Record why an attempt makes no copies, or no further ones."""
    logger.warning("no copies in host memory: %s", why)
    with contextlib.suppress(OSError):  # training does not depend on them
        record_event(run, OFF_EVENT, attempt=attempt, message=str(why), **why.to_document(), **details)


def open_memory_copies(
    run: RunDir,
    record: RunRecord,
    ranks: Ranks,
    consensus: RankConsensus,
    resume_point: ResumePoint,
    *,
    attempt: int,
    delay_seconds: float,
) -> MemoryCopies | None:
    """Return the copies of the run; None if it makes none, or a node has no room for them. Collective."""
    planned = record.plan.durability
    if planned.memory_copy_steps is None:
        return None
    found: MemoryCopies | None = None
    problem: Reason | None = None
    try:
        if ranks.local_rank == 0:
            problem = _too_little_room(copies_folder(run), planned.memory_copy_bytes_per_node)
        if problem is None:
            places = (run, record, ranks, consensus, resume_point)
            found = MemoryCopies(*places, attempt=attempt, delay_seconds=delay_seconds)
    except OSError as error:
        problem = Reason("engine.memory-copies-failed", {"error": str(error)})
    problems = consensus.gather(problem)
    problem = consensus.follow_rank_zero(next((each for each in problems or () if each is not None), None))
    if problem is None:
        return found
    if ranks.rank == 0:
        report_off(run, attempt, problem)
    return None


def _too_little_room(folder: Path, needed: int) -> Reason | None:
    """Return why the copies do not fit in their share of the free host memory; what is in the folder counts as free."""
    about = os.statvfs(MEMORY)
    held = sum(path.stat().st_size for path in folder.glob("step-*/*"))
    free = min(about.f_bavail * about.f_frsize, available_bytes() or 0) + held
    if needed <= MEMORY_SHARE * free:
        return None
    return Reason("engine.memory-copies-no-room", {"needed_bytes": needed, "free_bytes": free, "share": MEMORY_SHARE})
