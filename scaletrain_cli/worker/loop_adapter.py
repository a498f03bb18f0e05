"""A run whose training loop belongs to a library: what the callbacks for Hugging Face Trainer and Lightning share.

torch is imported by the functions that use it.
"""

import contextlib
import enum
import json
import math
import shutil
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

from scaletrain_cli.errors import DoNotRequeueError, ExitCode
from scaletrain_cli.reasons import Reason
from scaletrain_cli.rundir.checkpoints import FileDigest
from scaletrain_cli.worker.checkpoint_commit import SupersededAttemptError
from scaletrain_cli.worker.heartbeat import DATA_SECONDS, LONG_SECONDS
from scaletrain_cli.worker.progress import progress_line
from scaletrain_cli.worker.rank import Rank, StagedCheckpoint
from scaletrain_cli.worker.signals import own_exit_seconds

_CHECK_SECONDS = 1.0  # between two checks for a file that requests a save
Value = TypeVar("Value")


class NotFiniteError(DoNotRequeueError):
    """The loss or the gradient norm is infinite or not a number (exit 93)."""

    failure_reason = "nan"


class StepDecision(enum.IntEnum):
    """The request of a rank at the end of a step. All ranks follow the largest one."""

    CONTINUE = 0
    SAVE = 1
    PREEMPT = 2


class LoopAdapter:
    """One rank's part in a run whose loop belongs to a library. Methods marked "collective" are called by all ranks.

    ``preempted``: all ranks have agreed to save and exit. ``step``: optimizer steps that are done; ``saved_step``: that
    of the checkpoint which this attempt has resumed from or saved last.
    """

    def __init__(self, rank: Rank) -> None:
        self.rank, self.step, self.saved_step, self.preempted = rank, 0, 0, False
        self._trackers: Any = None
        self._checked = self._logged_at = time.monotonic()
        self._tokens: float | None = None
        self._opened = False
        self._waits_since: float | None = None  # for data; None: it does something else

    def resume_folder(self) -> Path | None:
        """Return the folder of the latest valid checkpoint; None if there is none. Collective.

        From here on no earlier attempt can commit a checkpoint. All bytes are verified: by rank 0, or by every rank
        where the library has not created a process group yet.
        """
        path: str | None = None
        place = self.rank.environment
        self.rank.heartbeat.beat(0, "restore", DATA_SECONDS)
        if place.rank == 0 or _group() is None:
            latest = self.rank.checkpoints.latest()
            path = str(latest.path) if latest is not None else None
        if place.rank == 0:
            self.rank.checkpoints.open()
        self._opened = True
        path = from_first_rank(path)
        return Path(path) if path is not None else None

    def begin(self, step: int) -> None:
        """Record that training starts after ``step`` steps, and start the trackers. Collective."""
        rank = self.rank
        if not self._opened:  # the caller restores a checkpoint of its own
            if rank.environment.rank == 0:
                rank.checkpoints.open()
            wait_for_all()
            self._opened = True
        self.step = self.saved_step = step
        hang = rank.resolved.spec["guard"]["hang"]
        rank.heartbeat.hang_seconds = None if hang == "auto" else float(hang)
        seconds = own_exit_seconds(float(rank.resolved.spec["cluster"]["grace_seconds"]))
        rank.preemption.call_after(seconds, lambda: rank.exit(ExitCode.PREEMPTED))
        if rank.environment.rank == 0 and any(name != "jsonl" for name in rank.resolved.spec["tracking"]):
            from scaletrain_cli.rundir.record import read_record  # pydantic, which rank 0 of such a run needs
            from scaletrain_cli.worker.trackers import start_trackers

            run = self.rank.environment.run
            self._trackers = start_trackers(run, read_record(run), self.rank.environment.attempt)
        rank.record_event("resumed" if step else "started", step=step)

    def begin_work(self, step: int) -> None:
        """Report that the batch of ``step`` (1-based) is here and its work begins; of several, once for each."""
        if self._waits_since is not None:
            self.rank.add_telemetry(data_wait_seconds=time.perf_counter() - self._waits_since)
            self._waits_since = None
        self.rank.heartbeat.beat(step, "step")

    def end_work(self) -> None:
        """Report that the work on a batch has ended: what passes until the next begins is a wait for data.

        Unless another phase begins before.
        """
        self._waits_since = time.perf_counter()

    def request_after(self, step: int, *, last: bool) -> StepDecision:
        """Return what all ranks do after ``step`` steps; ``last``: training ends with this step. Collective."""
        self.step = step
        own = StepDecision.CONTINUE
        if last or step % self.rank.resolved.checkpoint_interval_steps == 0 or self._asked_by_file():
            own = StepDecision.SAVE
        if self.rank.preemption.raised and not last:
            own = StepDecision.PREEMPT
        self.rank.heartbeat.wait_for_ranks()
        agreed = StepDecision(largest(int(own)))
        self.preempted = agreed is StepDecision.PREEMPT
        return agreed

    def _asked_by_file(self) -> bool:
        """Return whether a user has created the file that requests a save, and remove it. Rank 0 looks."""
        if self.rank.environment.rank != 0 or time.monotonic() - self._checked < _CHECK_SECONDS:
            return False
        self._checked = time.monotonic()
        try:
            self.rank.environment.run.save_file.unlink()
        except OSError:
            return False
        return True

    def beat(self, phase: str) -> None:
        """Report a phase whose duration the library decides, with a generous limit."""
        self._waits_since = None
        self.rank.heartbeat.beat(self.step, phase, max(LONG_SECONDS, self.rank.heartbeat.hang_seconds or 0.0))

    def scratch(self) -> Path:
        """Return a folder for the library's checkpoints, on the file system of the run's checkpoints. Collective."""
        if self.rank.environment.rank == 0:
            self.rank.checkpoints.scratch()
        wait_for_all()
        return self.rank.checkpoints.scratch()

    def remove_scratch(self) -> None:
        """Remove what the library has left in the folder."""
        if self.rank.environment.rank == 0:
            with contextlib.suppress(OSError, SupersededAttemptError):  # must not hide the error that ended training
                shutil.rmtree(self.rank.checkpoints.scratch(), ignore_errors=True)

    def commit(self, step: int, written: Path) -> None:
        """Commit the folder ``written``, below ``scratch()``, as the checkpoint of ``step``. Collective.

        Every rank hashes its share of the files.
        """
        checkpoints, place = self.rank.checkpoints, self.rank.environment
        wait_for_all()  # all ranks have written their files
        staged: StagedCheckpoint | None = None
        names: list[str] | None = None
        if place.rank == 0:
            staged = checkpoints.adopt(step, written)
            names = sorted(staged.names(), key=lambda name: (checkpoints.staged(step).folder / name).stat().st_size)
        names = from_first_rank(names)
        staged = staged or checkpoints.staged(step)
        assert names is not None
        for name in names[place.rank :: place.world_size]:
            staged.add(name)
        parts = from_all_ranks({name: asdict(digest) for name, digest in staged.digests.items()})
        if place.rank == 0:
            checkpoints.commit(step, {name: FileDigest(**digest) for part in parts for name, digest in part.items()})
        self.rank.record_event("checkpoint", step=step)
        self.saved_step = step
        wait_for_all()

    def log(self, step: int, total_steps: int, values: Mapping[str, Any]) -> None:
        """Record the numbers of a step in metrics.jsonl and the trackers, on rank 0."""
        numbers = {name: float(value) for name, value in values.items() if isinstance(value, int | float)}
        if not numbers or self.rank.environment.rank != 0:
            return
        if "loss" in numbers:
            numbers = self.rank.step_times.means() | numbers
        self.rank.log_metrics(step, **numbers)
        if self._trackers is not None:
            attempt = self.rank.environment.attempt
            self._trackers.log({"step": step, **numbers, "attempt": attempt, "time": round(time.time(), 3)})
        if "loss" in numbers:
            print(progress_line(step, total_steps, numbers["loss"], numbers.get("tokens_per_second")), flush=True)
        if self._waits_since is not None:
            self.end_work()  # what was recorded here is no wait for data

    def tokens_per_second(self, tokens: float | None) -> dict[str, float]:
        """Return the throughput since the last call, from the number of tokens trained so far; empty if not known."""
        now, before, since = time.monotonic(), self._tokens, self._logged_at
        self._tokens, self._logged_at = tokens, now
        if tokens is None or before is None or tokens <= before or now <= since:
            return {}
        return {"tokens_per_second": round((tokens - before) / (now - since), 1)}

    def check_finite(self, step: int, loss: float | None, grad_norm: float | None) -> None:
        """Raise NotFiniteError if one of the values is infinite or not a number."""
        if loss is not None and not math.isfinite(loss):
            raise NotFiniteError(Reason("engine.loss-not-finite", {"step": step}))
        if grad_norm is not None and not math.isfinite(grad_norm):
            raise NotFiniteError(Reason("engine.norm-not-finite", {"step": step, "loss": loss}))

    def end(self) -> ExitCode:
        """Record the end of training, finish the trackers, and return the exit code. Collective."""
        self.rank.record_event("preempted" if self.preempted else "finished", step=self.step)
        self.finish_trackers("preempted" if self.preempted else "finished")
        self.beat("end")
        wait_for_all()
        return ExitCode.PREEMPTED if self.preempted else ExitCode.DONE

    def finish_trackers(self, outcome: str) -> None:
        """Send what is left to the trackers."""
        if self._trackers is not None:
            self._trackers.finish(outcome)
            self._trackers = None


def _group() -> Any:
    """Return torch.distributed if a process group exists, else None: the run has one rank."""
    import torch.distributed as dist

    return dist if dist.is_available() and dist.is_initialized() else None


def _device(dist: Any) -> Any:
    import torch

    backend = str(dist.get_backend())
    if "gloo" in backend or backend == "mpi":
        return torch.device("cpu")
    return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")


def largest(value: int) -> int:
    """Return the largest value of all ranks."""
    if (dist := _group()) is None:
        return value
    import torch

    maximum = torch.tensor(value, dtype=torch.int64, device=_device(dist))
    dist.all_reduce(maximum, dist.ReduceOp.MAX)
    return int(maximum.item())


def from_first_rank(value: Value) -> Value:
    """Return the JSON value of rank 0 on all ranks; the values of others are ignored."""
    return from_all_ranks(value)[0]


def from_all_ranks(value: Value) -> list[Value]:
    """Return the JSON values of all ranks, by rank. As text, since torch's collectives for objects unpickle them."""
    if (dist := _group()) is None:
        return [value]
    import torch

    text, device = json.dumps(value).encode(), _device(dist)
    longest = largest(len(text))
    own = torch.frombuffer(bytearray(text.ljust(longest)), dtype=torch.uint8).to(device)
    by_rank = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(by_rank, own)
    return [json.loads(bytes(one.tolist())) for one in by_rank]


def wait_for_all() -> None:
    """Wait until all ranks are here. An all-reduce: a barrier of NCCL would guess the device."""
    largest(0)
