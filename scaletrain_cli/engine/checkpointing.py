"""Saving and restoring the full state of a run, without holding up the training thread or ever half-committing.

A save copies the state off the device, then a writer thread hashes it to disk. Once every rank's writer is done (the
step agreement says so), rank 0 commits. DeepSpeed decides what the state is; the protocol is rundir.checkpoints.
"""

from __future__ import annotations

import copy
import random
import shutil
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from scaletrain_cli.engine.parallel.expert import experts_in_shards, take_experts_from_shards
from scaletrain_cli.engine.process_group import Agreement, Ranks
from scaletrain_cli.errors import ScaletrainError
from scaletrain_cli.rundir import checkpoints
from scaletrain_cli.rundir.checkpoints import Checkpoint, FileDigest, HashingWriter
from scaletrain_cli.rundir.journal import record_event
from scaletrain_cli.rundir.paths import RunDir


class SnapshotWriter:
    """What DeepSpeed calls to store its shards: copies to host memory at once, writes and hashes in a thread.

    Has the shape of DeepSpeed's CheckpointEngine, without inheriting from it, so that only one file imports DeepSpeed.
    """

    def __init__(self, delay_seconds: float = 0.0) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint-writer")
        self._writes: dict[Path, Future[FileDigest]] = {}
        self._delay_seconds = delay_seconds

    @property
    def writing(self) -> bool:
        """Whether a write is under way. Raises what a finished write raised."""
        finished = [write for write in self._writes.values() if write.done()]
        for write in finished:
            write.result()
        return len(finished) < len(self._writes)

    def take_digests(self, folder: Path) -> dict[str, FileDigest]:
        """Wait for all writes and return their digests by name below ``folder``. Raises what a write raised."""
        digests = {str(path.relative_to(folder)): write.result() for path, write in self._writes.items()}
        self._writes = {}
        return digests

    def save(self, state_dict: Any, path: str | Path) -> None:
        """Queue a write of the state as it is now."""
        path = Path(path)
        self._writes[path] = self._thread.submit(self._write, _host_copy(state_dict), path)

    def _write(self, state: Any, path: Path) -> FileDigest:
        time.sleep(self._delay_seconds)
        writer = HashingWriter(path)
        torch.save(state, writer)  # type: ignore[arg-type]
        return writer.close()

    def load(self, path: str, map_location: Any = None) -> Any:
        """Read a shard back. Our own file, verified by hash before: safe to unpickle."""
        return torch.load(path, map_location=map_location, weights_only=False)

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """Part of DeepSpeed's interface."""
        Path(path).mkdir(parents=True, exist_ok=exist_ok)

    def create(self, info: object) -> None:
        """Part of DeepSpeed's interface: a save begins."""

    def commit(self, info: object) -> bool:
        """Part of DeepSpeed's interface: it has handed over its shards. The real commit is Checkpointer's."""
        return True

    def is_data_parallel_writer(self, dp_rank: int) -> bool:
        """Part of DeepSpeed's interface: replicated state is written once."""
        return dp_rank == 0

    def is_decoupled(self) -> bool:
        """Part of DeepSpeed's interface: no, or DeepSpeed would wait for the writes in its next step."""
        return False

    def preserves_storage_sharing(self) -> bool:
        """Part of DeepSpeed's interface: copies are separate, so views need no cloning first."""
        return False

    def cleanup(self) -> None:
        """Part of DeepSpeed's interface."""


class Stateful(Protocol):
    """What a checkpoint keeps of a part that DeepSpeed does not know."""

    def state_dict(self) -> dict[str, Any]:
        """Its state; tensors need not be copies."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from that."""


@dataclass
class _Save:
    step: int
    started: float
    blocked_seconds: float


class Checkpointer:
    """At most one save in flight. Every method is collective: all ranks call it at the same step boundary."""

    def __init__(
        self,
        run: RunDir,
        folder: Path,
        engine: Any,
        ranks: Ranks,
        agreement: Agreement,
        *,
        keep: int,
        attempt: int,
        delay_seconds: float,
        beside: dict[str, Stateful],
    ) -> None:
        """``beside``: what each rank keeps besides DeepSpeed's state, by name."""
        self._run, self.folder, self._engine, self._ranks, self._agreement = run, folder, engine, ranks, agreement
        self._keep, self._attempt, self._beside = keep, attempt, beside
        self._writer = SnapshotWriter(delay_seconds)
        self._in_flight: _Save | None = None
        self.committed_step: int | None = None
        # Of the committed checkpoints that are not known to be clean; none are if None. 0: look what there is.
        self._first_unmarked: int | None = 0
        engine.checkpoint_engine = self._writer
        engine._copy_recovery_script = lambda path: None  # a conversion script per save; `export` will be a verb

    @property
    def _own_file(self) -> str:
        return f"rank-{self._ranks.rank:05d}.pt"

    @property
    def writing(self) -> bool:
        """Whether this rank still writes. Raises what the writer raised, so a failed save surfaces at the next step."""
        return self._in_flight is not None and self._writer.writing

    def settle(self, anyone_writing: bool) -> None:
        """Commit the save in flight once no rank writes any more."""
        if self._in_flight is not None and not anyone_writing:
            self._commit()

    def finish(self) -> None:
        """Wait for the save in flight, if any, and commit it."""
        if self._in_flight is not None:
            self._commit()

    def save(self, step: int, client_state: dict[str, Any], *, wait: bool) -> None:
        """Begin a save of the state after ``step`` steps; with ``wait`` it is committed on return."""
        if self._in_flight is not None and self._in_flight.step != step:
            self.finish()
        if self._in_flight is None and self.committed_step != step:
            self._begin(step, client_state)
        if wait:
            self.finish()

    def _begin(self, step: int, client_state: dict[str, Any]) -> None:
        started = time.monotonic()
        staging = checkpoints.staging_path(self.folder, step)
        if self._ranks.rank == 0:
            shutil.rmtree(staging, ignore_errors=True)
            staging.mkdir(parents=True)
        self._agreement.barrier()
        with experts_in_shards(self._engine):
            self._engine.save_checkpoint(
                str(staging.parent), tag=staging.name, save_latest=False, client_state={"scaletrain": client_state}
            )
        state = {name: part.state_dict() for name, part in self._beside.items()}
        self._writer.save({"random": _random_state(self._engine.device), **state}, staging / self._own_file)
        self._in_flight = _Save(step, started, time.monotonic() - started)

    def _commit(self) -> None:
        save, folder, began = self._in_flight, self.folder, time.monotonic()
        assert save is not None
        digests = self._agreement.gather(self._writer.take_digests(checkpoints.staging_path(folder, save.step)))
        if digests is not None:
            files = {name: digest for part in digests for name, digest in part.items()}
            world_size = self._ranks.world_size
            checkpoints.commit(folder, save.step, files, world_size=world_size, clean=False, attempt=self._attempt)
            now = time.monotonic()
            record_event(
                self._run,
                "checkpoint",
                step=save.step,
                attempt=self._attempt,
                bytes=sum(digest.size for digest in files.values()),
                seconds=round(now - save.started, 4),
                blocked_seconds=round(save.blocked_seconds + now - began, 4),
            )
            checkpoints.prune(folder, self._keep)
            self._first_unmarked = save.step if self._first_unmarked is None else self._first_unmarked
        self._in_flight, self.committed_step = None, save.step

    def mark_clean_up_to(self, step: int) -> None:
        """Mark what was committed up to ``step`` as clean; costs nothing where all of it is."""
        if self._ranks.rank != 0 or self._first_unmarked is None or step < self._first_unmarked:
            return
        unmarked = [checkpoint for checkpoint in checkpoints.list_checkpoints(self.folder) if not checkpoint.clean]
        for checkpoint in unmarked:
            if checkpoint.step <= step:
                checkpoints.mark_clean(checkpoint)
        self._first_unmarked = min((checkpoint.step for checkpoint in unmarked if checkpoint.step > step), default=None)

    def restore(self, checkpoint: Checkpoint) -> dict[str, Any]:
        """Load weights, optimizer and this rank's random state; returns the client state that was saved with them."""
        if checkpoint.world_size != self._ranks.world_size:
            raise ScaletrainError(
                f"{checkpoint.path.name} was written by {checkpoint.world_size} ranks and this job has "
                f"{self._ranks.world_size}: resuming at another size is not supported yet. Use the same size."
            )
        with experts_in_shards(self._engine):
            path, client_state = self._engine.load_checkpoint(str(checkpoint.path.parent), tag=checkpoint.path.name)
        if path is None:  # DeepSpeed only warns and trains on from scratch
            raise ScaletrainError(f"DeepSpeed found nothing to load in {checkpoint.path}")
        take_experts_from_shards(self._engine)
        state = self._writer.load(str(checkpoint.path / self._own_file))
        _restore_random_state(state["random"])
        for name, part in self._beside.items():
            part.load_state_dict(state[name])
        self.committed_step, self._first_unmarked = checkpoint.step, 0
        return dict(client_state["scaletrain"])


def _host_copy(value: Any) -> Any:
    """The same structure with every tensor copied to host memory, so that training may go on changing the original."""
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, dict):
        copied = {key: _host_copy(item) for key, item in value.items()}
        return copied if type(value) is dict else type(value)(copied)
    if isinstance(value, list | tuple) and type(value) in (list, tuple):
        return type(value)(_host_copy(item) for item in value)
    return copy.copy(value)  # DeepSpeed's loss scaler is an object that goes on changing


def _random_state(device: torch.device | str) -> dict[str, Any]:
    state: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
    }
    if torch.device(device).type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def _restore_random_state(state: dict[str, Any]) -> None:
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    if "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"])
