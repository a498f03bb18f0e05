"""Save and restore the full state of a run without blocking the training thread for the write.

A save copies the state to host memory (``snapshot``); a thread writes and hashes it (``shard_file``). When the step
consensus shows that all ranks have written, rank 0 commits it (``worker.checkpoint_commit``). An interrupted save
leaves no committed checkpoint.
"""

import json
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from scaletrain_cli.engine.checkpoint.exchange import HeldState, exchange
from scaletrain_cli.engine.checkpoint.flat_shards import ShardedState
from scaletrain_cli.engine.checkpoint.memory_copies import MemoryCopies
from scaletrain_cli.engine.checkpoint.resume_point import find_latest_valid
from scaletrain_cli.engine.checkpoint.shard_file import (
    RANDOM,
    Entry,
    ShardHeader,
    StateReader,
    open_here,
    shard_name,
    shard_parts,
    write_parts,
)
from scaletrain_cli.engine.checkpoint.snapshot import (
    Snapshot,
    counters,
    random_state,
    restore_random_state,
    restore_state,
    set_counters,
)
from scaletrain_cli.engine.compose import Composed
from scaletrain_cli.engine.context import RankContext
from scaletrain_cli.engine.faults import Faults
from scaletrain_cli.engine.optim.averaging import WeightAverage
from scaletrain_cli.engine.optim.clipping import AdaptiveClip
from scaletrain_cli.engine.optim.local_sgd import LocalSGD
from scaletrain_cli.engine.parallel.mesh import Mesh
from scaletrain_cli.engine.process_group import RankConsensus, Ranks
from scaletrain_cli.errors import UsageError
from scaletrain_cli.plan.trained_parameters import base_names
from scaletrain_cli.reasons import Reason
from scaletrain_cli.rundir.checkpoints import (
    STATE_FILE,
    Checkpoint,
    Digests,
    FileDigest,
    check_same_base,
    checkpoints_to_prune,
    digests_of,
    list_checkpoints,
    to_document,
    weight_files,
)
from scaletrain_cli.rundir.evaluations import steps_to_keep
from scaletrain_cli.rundir.record import checkpoint_folder
from scaletrain_cli.safe_files import expand_home
from scaletrain_cli.spec import RunSpec
from scaletrain_cli.worker import checkpoint_commit
from scaletrain_cli.worker.remote_run import RemoteRun


@dataclass(frozen=True)
class SaveCost:
    """Seconds that a save blocked the training thread, and seconds until it was committed."""

    blocked_seconds: float
    seconds: float


class BaseFiles(NamedTuple):
    """The folder of ``model.weights``, and the digests of its files."""

    folder: Path
    digests: Digests


def identify_base(spec: RunSpec, ranks: Ranks, consensus: RankConsensus) -> BaseFiles | None:
    """Return the files with weights that checkpoints do not store; None if they store all. Collective.

    Each rank reads a share of the files. Raises UsageError if a file cannot be read.
    """
    if spec.weights is None or not base_names(spec):
        return None
    folder = expand_home(spec.weights)
    names = consensus.from_rank_zero(lambda: weight_files(folder))
    parts = consensus.gather_everywhere(digests_of(folder, names[ranks.rank :: ranks.world_size]))
    return BaseFiles(folder, {name: digest for part in parts for name, digest in part.items()})


class _Written(NamedTuple):
    """The digests of the files that one rank has written, and the seconds of the write."""

    digests: dict[str, FileDigest]
    seconds: float


@dataclass
class _Save:
    """One save in flight. ``commit`` is set on rank 0 once all ranks have written."""

    step: int
    copy_seconds: float
    write: Future[_Written]
    blocked_seconds: float = 0.0
    all_written: bool = False
    commit: Future[float] | None = None  # returns its seconds


class Checkpointer:
    """Keeps at most one save in flight. Every method is collective: all ranks call it at the same step boundary."""

    def __init__(
        self,
        context: RankContext,
        composed: Composed,
        mesh: Mesh,
        *,
        faults: Faults,
        average: WeightAverage | None,
        local_sgd: LocalSGD | None = None,
        adaptive_clip: AdaptiveClip | None,
        base: BaseFiles | None = None,
        copies: MemoryCopies | None = None,
    ) -> None:
        """``base``: the files with the weights that checkpoints do not store.

        ``copies``: of the state in host memory.
        """
        self._context, self._ranks, self._consensus = context, context.ranks, context.long_consensus
        self.folder = checkpoint_folder(context.run, context.spec)
        self._remote = RemoteRun.from_environment(context.run)
        self._composed, self._mesh, self._base = composed, mesh, base
        self._not_stored = base_names(context.spec)
        self._average, self._attempt, self._adaptive_clip = average, context.attempt, adaptive_clip
        self.copies = copies
        self._local_sgd = local_sgd
        self.engine_was_built()
        self._faults = faults
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint-writer")
        self._in_flight: _Save | None = None
        self._background: list[Future[None]] = []  # tasks that mark and delete checkpoints
        self._costs: list[SaveCost] = []
        self._unmarked: set[int] = set()
        self.committed_step: int | None = None
        # The last step at which the outputs of replicas were equal; None if they are not compared.
        self.compared_step: int | None = None
        # Of a save until it is committed: planned, and after the first save measured.
        self.expected_seconds = context.record.plan.durability.save_seconds

    def engine_was_built(self) -> None:
        """Save and restore the present engine from now on."""
        self.states = ShardedState(self._composed.engine, self._composed.model, self._mesh, self._not_stored)
        self._snapshot = Snapshot(self.states, self._average, self._local_sgd)
        self._copied = Snapshot(self.states, self._average, self._local_sgd)  # a save may still read the other one
        self._allocated = False
        if self.copies is not None:
            self.copies.layout_changed()

    def state_in_memory(self) -> HeldState:
        """Return the state of the optimizer on this rank, in host memory; finishes the save in flight."""
        self.finish()
        entries, counts = self._snapshot.take()
        trained = {placed.slice.name: placed.slice for shard in self.states.shards for placed in shard.owned}
        return HeldState(
            trained, {entry.key: entry.values for entry in entries}, counts, counters(self._composed.engine)
        )

    def restore_from_memory(self, held: HeldState) -> None:
        """Continue the present engine from the state of an earlier one, for the parameters that both train."""
        needed = {placed.slice.name: placed.slice for shard in self.states.shards for placed in shard.slices}
        state = exchange(held, needed, self._consensus, self.states.device)
        restore_state(state, self.states, None, self._composed.engine)
        set_counters(self._composed.engine, held.counters)

    def allocate(self) -> None:
        """Allocate the host memory of a save, so that the first save takes as long as later ones.

        Call it after an update. Does nothing on later calls, and while a save is in flight.
        """
        if not self._allocated and self._in_flight is None:
            self._allocated = True
            self._snapshot.take()
            if self.copies is not None:
                self._copied.take()

    def take_costs(self) -> list[SaveCost]:
        """Return the costs of the saves that were committed since the last call."""
        costs, self._costs = self._costs, []
        return costs

    @property
    def in_flight_step(self) -> int | None:
        """The step that is being saved; None if no save is in flight."""
        return None if self._in_flight is None else self._in_flight.step

    @property
    def writing(self) -> bool:
        """True while this rank writes or commits. Raises the error of the writing thread at the next step boundary."""
        for task in [task for task in self._background if task.done()]:
            self._background.remove(task)
            task.result()
        save = self._in_flight
        if save is None:
            return False
        job: Future[Any] = save.commit or save.write
        if job.done():
            job.result()
        return not job.done()

    def advance(self, anyone_writing: bool) -> None:
        """Advance the save in flight once no rank writes: start its commit, or finish it after the commit."""
        save = self._in_flight
        if save is None or anyone_writing:
            return
        if save.all_written:
            self._conclude(save)
        else:
            self._begin_commit(save)

    def finish(self) -> None:
        """Wait until the save in flight, if any, is committed."""
        save = self._in_flight
        if save is None:
            return
        if not save.all_written:
            self._begin_commit(save)
        began = time.monotonic()
        if save.commit is not None:
            save.commit.result()
        self._consensus.barrier()
        save.blocked_seconds += time.monotonic() - began
        self._conclude(save)

    def clean_up(self) -> None:
        """Wait for background deletions and remove staging folders, after the last save of a finished run."""
        self._finish_background()
        if self._ranks.rank == 0:
            checkpoint_commit.close_attempt(self.folder, self._attempt)

    def save(self, step: int, client_state: dict[str, Any], *, wait: bool) -> None:
        """Start a save of the state after ``step`` steps; with ``wait``, return when it is committed."""
        if self._in_flight is not None and self._in_flight.step != step:
            self.finish()
        if self._in_flight is None and self.committed_step != step:
            self._begin(step, client_state)
        if wait:
            self.finish()

    def _finish_background(self) -> None:
        while self._background:
            self._background.pop(0).result()

    def _begin(self, step: int, client_state: dict[str, Any]) -> None:
        started = time.monotonic()
        header, entries, state = self._take(self._snapshot, client_state)
        copied = time.monotonic()
        write = self._thread.submit(self._write, step, header, entries, state)
        self._in_flight = _Save(step, copied - started, write, time.monotonic() - started)

    def _take(self, snapshot: Snapshot, client_state: dict[str, Any]) -> tuple[ShardHeader, list[Entry], str]:
        """Copy the state by ``snapshot``; return what the file of this rank has, and the content of ``STATE_FILE``."""
        entries, counts = snapshot.take()
        header = ShardHeader(self._ranks.rank, self.states.owned, counts.usual, counts.others)
        entries.append(Entry(RANDOM, random_state(self.states.device)))
        parts = {} if self._adaptive_clip is None else {"adaptive_clip": self._adaptive_clip.state_dict()}
        if self._average is not None:
            parts["average"] = {"taken": self._average.taken}
        if self._local_sgd is not None:
            parts["local_sgd"] = {"groups": self._local_sgd.groups.size}
        saved = {"client": client_state, "counters": counters(self._composed.engine), "parts": parts}
        if self.compared_step is not None:
            parts["outputs"] = {"compared_step": self.compared_step}
        if self._base is not None:
            saved["base"] = to_document(self._base.folder, self._base.digests)
        return header, entries, json.dumps(saved)

    def copy_to_memory(
        self,
        step: int,
        client_state: dict[str, Any],
        step_seconds: float | None,
        before_complete: Callable[[], None],
    ) -> None:
        """Start a copy in host memory of the state after ``step`` steps; see ``MemoryCopies``."""
        assert self.copies is not None
        if not self.copies.ready(step_seconds):
            return
        began = time.monotonic()
        taken = self._take(self._copied, client_state)
        self.copies.begin(
            step,
            *taken,
            needed=self.states.needed,
            blocked_seconds=time.monotonic() - began,
            before_complete=before_complete,
        )

    def forget_copies(self, step: int) -> None:
        """Remove the copies in host memory of later steps than ``step``."""
        if self.copies is not None:
            self.copies.forget(step)

    def _write(self, step: int, header: ShardHeader, entries: list[Entry], state: str) -> _Written:
        """Write and fsync the files of this rank, in the writing thread."""
        began = time.monotonic()
        files = {shard_name(self._ranks.rank): shard_parts(header, entries)}
        if self._ranks.rank == 0:
            files[STATE_FILE] = [memoryview(state.encode())]
        staging = checkpoint_commit.staging_path(self.folder, self._attempt, step)
        if self._remote is None:
            checkpoint_commit.stage_checkpoint(self.folder, self._attempt, step)
        time.sleep(self._faults.save_delay_seconds)
        write = (
            partial(write_parts, before_write=self._faults.before_write) if self._remote is None else self._remote.store
        )
        digests = {name: write(staging / name, parts) for name, parts in files.items()}
        return _Written(digests, time.monotonic() - began)

    def _begin_commit(self, save: _Save) -> None:
        began = time.monotonic()
        written = self._consensus.gather(save.write.result())
        save.all_written = True
        if written is not None:
            files = {name: digest for part in written for name, digest in part.digests.items()}
            slowest = max(part.seconds for part in written)
            save.blocked_seconds += time.monotonic() - began
            save.commit = self._thread.submit(self._commit, save, files, slowest)
            self._background.append(self._thread.submit(self._prune))

    def _commit(self, save: _Save, files: dict[str, FileDigest], write_seconds: float) -> float:
        """Commit in rank 0's thread; return the seconds of the save, without the wait for the end of a step."""
        began, world_size = time.monotonic(), self._ranks.world_size
        self._faults.before_write()
        checkpoint_commit.commit_checkpoint(
            self.folder, save.step, files, world_size=world_size, clean=False, attempt=self._attempt
        )
        self._context.report(
            "checkpoint",
            step=save.step,
            attempt=self._attempt,
            bytes=sum(digest.size for digest in files.values()),
            seconds=round(seconds := save.copy_seconds + write_seconds + time.monotonic() - began, 4),
            blocked_seconds=round(save.blocked_seconds, 4),
            copy_seconds=round(save.copy_seconds, 4),
        )
        return seconds

    def _prune(self) -> None:
        """Delete checkpoints that retention does not keep, in rank 0's thread."""
        kept = self._context.spec.checkpoint
        also_kept = steps_to_keep(self._context.run, self.folder, keep_best=kept.keep_best, mirror_to=kept.mirror.to)
        if (compared := self.compared_step) is not None:  # to resume from, if they differ the next time
            before = [saved.step for saved in list_checkpoints(self.folder) if saved.step <= compared]
            also_kept |= {max(before, default=compared)}
        for checkpoint in checkpoints_to_prune(self.folder, kept.keep, kept.keep_every, also_kept):
            checkpoint_commit.remove_checkpoint(checkpoint.path, self._attempt)

    def _conclude(self, save: _Save) -> None:
        self._in_flight, self.committed_step = None, save.step
        self._unmarked.add(save.step)
        own = save.copy_seconds + save.write.result().seconds
        self.expected_seconds = own if save.commit is None else save.commit.result()
        self._costs.append(SaveCost(save.blocked_seconds, self.expected_seconds))

    def mark_clean_up_to(self, step: int) -> None:
        """Mark committed checkpoints up to ``step`` as clean: training was healthy after them."""
        healthy = {saved for saved in self._unmarked if saved <= step}
        self._unmarked -= healthy
        if healthy and self._ranks.rank == 0:
            self._background.append(self._thread.submit(self._mark, healthy))

    def _mark(self, steps: set[int]) -> None:
        """Mark checkpoints in rank 0's thread, unless retention has deleted them."""
        for checkpoint in list_checkpoints(self.folder):
            if checkpoint.step in steps and not checkpoint.clean:
                checkpoint_commit.mark_clean(checkpoint, self._attempt)

    def latest_clean(self) -> Checkpoint | None:
        """Return the latest valid checkpoint that is marked clean; None if there is none."""
        self._finish_background()
        return find_latest_valid(self.folder, self._ranks, self._consensus, clean=True).checkpoint

    def delete_newer(self, step: int) -> None:
        """Delete checkpoints that are newer than ``step``. Call it on rank 0 only."""
        for checkpoint in list_checkpoints(self.folder):
            if checkpoint.step > step:
                checkpoint_commit.remove_checkpoint(checkpoint.path, self._attempt)

    def restore(self, checkpoint: Checkpoint, saved_step: int | None = None) -> dict[str, Any]:
        """Load the whole state, saved by any layout, and return the client state that was saved with it.

        Works in a new engine and in one that has trained. ``saved_step``: of a copy in the host memory of this node,
        which is still to be saved: the step of the latest checkpoint, 0 without one. Raises UsageError for state that
        only the layout that saved it can read.
        """
        self.finish()
        owned = list(self.states.owned.values())
        open_file = open_here if self._remote is None or saved_step is not None else self._remote.open
        reader = StateReader(checkpoint.path, self._ranks.rank, owned, checkpoint.files, open_file)
        with open_file(checkpoint.path / STATE_FILE) as file:
            state = json.load(file)
        if self._base is not None:
            check_same_base(checkpoint.path.name, state.get("base"), self._base.folder, self._base.digests)
        if self._average is not None:
            self._average.taken = state["parts"]["average"]["taken"]
        saved_groups = state["parts"].get("local_sgd", {}).get("groups", 1)
        groups = 1 if self._local_sgd is None else self._local_sgd.groups.size
        if saved_groups != groups:
            params = {"checkpoint": checkpoint.path.name, "saved": saved_groups, "groups": groups}
            raise UsageError(Reason("engine.local-sgd-groups-differ", params))
        restore_state(reader, self.states, self._average, self._composed.engine, self._local_sgd)
        self._snapshot.frozen_changed()
        self._copied.frozen_changed()
        set_counters(self._composed.engine, state["counters"])
        if self._adaptive_clip is not None:
            self._adaptive_clip.load_state_dict(state["parts"]["adaptive_clip"])
        if self.compared_step is not None:
            self.compared_step = state["parts"].get("outputs", {}).get("compared_step", checkpoint.step)
        if (saved := reader.random_state()) is not None:
            restore_random_state(saved, self.states.device)
        self.committed_step = checkpoint.step if saved_step is None else saved_step
        self._unmarked = {self.committed_step}  # one that is marked is passed over
        client: dict[str, Any] = state["client"]
        return client
