"""Profile a few steps of a living run with torch.profiler, on chosen ranks, when the file ``profile`` requests it.

Rank 0 looks for the file at most once a second, and its finding travels with the all-reduce of the step, so the other
ranks read no files. Nothing here ends training: a failure is written to the figures of the rank.
"""

import contextlib
import dataclasses
import logging
import os
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.profiler import ProfilerActivity, record_function, schedule
from torch.profiler import profile as torch_profile

from scaletrain_cli.engine.context import RankContext
from scaletrain_cli.engine.metrics.out_of_memory import forget_allocations, remember_allocations, write_memory_snapshot
from scaletrain_cli.engine.metrics.trace import END
from scaletrain_cli.engine.process_group import RankConsensus
from scaletrain_cli.errors import ScaletrainError
from scaletrain_cli.own_processes import SAFE_CHILDREN, absolute_paths, python_command
from scaletrain_cli.reasons import Reason
from scaletrain_cli.rundir.documents import write_document
from scaletrain_cli.rundir.profiles import (
    PLANNED,
    Profile,
    ProfileRequest,
    profile_folder,
    rank_file,
    read_request,
    write_profile,
    write_summary,
)
from scaletrain_cli.safe_files import make_folder

_CHECK_SECONDS = 1.0  # between two looks for a request
# To wait at the end for the processes that summarize traces; after a preemption only a grace period is left.
_SUMMARY_SECONDS, _PREEMPTED_SECONDS = 60.0, 1.0
_POLL_SECONDS = 0.05
logger = logging.getLogger(__name__)

_recording = False
_NOTHING: AbstractContextManager[Any] = contextlib.nullcontext()


def profiled(name: str) -> AbstractContextManager[Any]:
    """Return a context that marks a range of a step in the trace, or does nothing while no trace is recorded."""
    return record_function(name) if _recording else _NOTHING


class StepProfiler:
    """One rank's part in the profiles of an attempt. All ranks call each method at the same steps."""

    def __init__(
        self,
        context: RankContext,
        *,
        preempted: Callable[[], bool] = lambda: False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``preempted``: whether a signal has asked this rank to end."""
        self._context, self._clock = context, clock
        self._preempted, self._ends_soon = preempted, False
        self._looked = float("-inf")
        self._profile: Profile | None = None  # scheduled or being recorded
        self._request = ProfileRequest()
        self._recorder: _Recorder | None = None  # on the ranks that are profiled
        self._trained: int | None = None  # steps since the warm-up step began, with it; None before
        self._summaries: list[_Summary] = []

    def is_requested(self) -> bool:
        """Return True on rank 0 if a request waits. Looks at most once a second, and not while one is served."""
        if self._context.rank != 0 or self._profile is not None or self._clock() - self._looked < _CHECK_SECONDS:
            return False
        self._looked = self._clock()
        try:
            os.stat(self._context.run.profile_file)
        except OSError:
            return False
        return True

    def accept(self, step: int, consensus: RankConsensus) -> None:
        """Take the request of rank 0 after ``step`` steps, and schedule its profile. Collective."""
        request = consensus.from_rank_zero(lambda: self._take(step))
        if request is None:
            return
        time_of_plan = self._context.record.plan.time
        self._request = request
        self._profile = Profile(
            request=request.id,
            attempt=self._context.attempt,
            state="scheduled",
            first_step=request.step or step + 2,  # the next step warms up
            steps=request.steps,
            ranks=list(request.ranks),
            device=self._context.device.type,
            planned={name: getattr(time_of_plan, name) for name in PLANNED} | {"step": time_of_plan.step},
        )
        if self._context.rank == 0:
            self._write("scheduled")

    @property
    def allowed_seconds(self) -> float | None:
        """Return the limit of the next step in seconds, if the profile makes it slow; None: the usual limit."""
        return None if self._trained is None else self._context.heartbeat.first_step_seconds

    def before_step(self, step: int) -> None:
        """Start the profiler before its warm-up step."""
        if self._profile is None or self._trained is not None or step < self._profile.first_step - 1:
            return
        self._trained = 0
        if self._context.rank in self._profile.ranks:
            self._recorder = _Recorder(self._context.device, self._request)
            self._recorder.start()

    def after_step(self, step: int) -> None:
        """Go on to the next step of the trace; write the trace after the last."""
        if self._profile is None or self._trained is None:
            return
        self._trained += 1
        if self._trained <= self._profile.steps:
            if self._recorder is not None:
                self._recorder.next_step()
            return
        self._context.heartbeat.beat(step, "profile")
        if self._recorder is not None:
            self._finish(self._recorder)
        if self._context.rank == 0:
            self._write("recorded")
            profile = self._profile
            details = {"attempt": self._context.attempt, "steps": profile.steps, "ranks": list(profile.ranks)}
            with contextlib.suppress(OSError):
                self._context.report("profiled", step=profile.first_step, **details)
        self._profile = self._recorder = self._trained = None

    def end_soon(self) -> None:
        """Let ``close`` wait briefly: the ranks end for a preemption, whose signal this one may not have."""
        self._ends_soon = True

    def close(self) -> None:
        """At the end of an attempt, report a profile that was not reached; wait for summaries, for a limited time."""
        if self._recorder is not None:
            self._recorder.stop()
        if self._profile is not None and self._context.rank == 0:
            self._write("not-reached")
        self._profile = self._recorder = self._trained = None
        deadline = time.monotonic() + _SUMMARY_SECONDS
        for summary in self._summaries:
            while summary.process.poll() is None and time.monotonic() < deadline:
                if self._ends_soon or self._preempted():
                    deadline = min(deadline, time.monotonic() + _PREEMPTED_SECONDS)
                time.sleep(_POLL_SECONDS)
            if summary.process.poll() is None:
                summary.process.kill()
                with contextlib.suppress(subprocess.TimeoutExpired):  # it may wait for a dead file server
                    summary.process.wait(_PREEMPTED_SECONDS)
                summary.raw.unlink(missing_ok=True)
                self._write_failure(summary.folder, "the attempt ended before the trace was summarized")

    def _take(self, step: int) -> ProfileRequest | None:
        """Remove the request file, and return the request; None if it cannot be served, which is reported."""
        request, refusal = None, None
        try:
            request = read_request(self._context.run)
        except (OSError, ValueError) as error:
            refusal = Reason("engine.profile-request-invalid", {"message": str(error)})
        try:
            self._context.run.profile_file.unlink(missing_ok=True)
        except OSError:  # a folder, or a run directory that is read-only: this attempt looks no more
            self._looked = float("inf")
        if request is None and refusal is None:
            return None  # withdrawn
        if request is not None:
            refusal = self._refusal(request, step)
        if refusal is None:
            return request
        details = {"request": "" if request is None else request.id, "message": str(refusal), **refusal.to_document()}
        with contextlib.suppress(OSError):
            self._context.report("profile-refused", step=step, **details)
        return None

    def _refusal(self, request: ProfileRequest, step: int) -> Reason | None:
        first, total = request.step or step + 2, self._context.spec.total_steps
        if first < step + 2:
            return Reason("engine.profile-step-passed", {"step": first, "next": step + 1, "earliest": step + 2})
        if first + request.steps - 1 > total:
            return Reason("engine.profile-beyond-end", {"last": first + request.steps - 1, "total": total})
        if (highest := max(request.ranks)) >= self._context.ranks.world_size:
            return Reason("engine.profile-unknown-rank", {"rank": highest, "ranks": self._context.ranks.world_size})
        if request.nvtx and self._context.device.type != "cuda":
            return Reason("engine.profile-nvtx-on-cpu")
        return None

    def _write(self, state: str) -> None:
        """Write ``profile.json`` with this state; a full disk loses it and does not stop the run."""
        assert self._profile is not None
        self._profile = dataclasses.replace(self._profile, state=state)
        with contextlib.suppress(OSError, ScaletrainError, LookupError, ValueError, TypeError):  # or files are damaged
            folder = profile_folder(self._context.run, self._context.attempt, self._profile.first_step)
            write_profile(folder, self._profile)
            write_summary(folder)

    def _finish(self, recorder: "_Recorder") -> None:
        """Stop the profiler, and start the process that summarizes its trace."""
        assert self._profile is not None
        folder = profile_folder(self._context.run, self._context.attempt, self._profile.first_step)
        rank = self._context.rank
        raw: Path | None = None
        try:
            make_folder(folder)
            raw = recorder.save(rank_file(folder, rank, ".memory.pickle"))
            if raw is not None:
                layout = "pipelined" if self._context.layout.pipeline_parallel > 1 else "whole"
                words = (str(raw), str(folder), str(rank), layout)
                process = subprocess.Popen(
                    python_command("scaletrain_cli.engine.metrics.trace", *words),
                    env=absolute_paths(os.environ) | SAFE_CHILDREN,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    cwd=folder,
                )
                self._summaries.append(_Summary(process, raw, folder))
                return
        except Exception as error:  # of CUPTI, of a full disk
            recorder.error = recorder.error or f"{type(error).__name__}: {error}"
            if raw is not None:
                raw.unlink(missing_ok=True)
        self._write_failure(folder, recorder.error)

    def _write_failure(self, folder: Path, error: str | None) -> None:
        """Write the figures of this rank for a profile without a trace. Never raises."""
        figures: dict[str, Any] = {"host": socket.gethostname(), "nvtx": self._request.nvtx}
        if error is not None:
            logger.warning("the profile of rank %d failed: %s", self._context.rank, error)
            figures["error"] = error[:500]
        with contextlib.suppress(OSError, ScaletrainError, LookupError, ValueError, TypeError):
            write_document(rank_file(folder, self._context.rank), figures)
            write_summary(folder)


class _Summary(NamedTuple):
    """The process that summarizes the trace ``raw`` for the profile in ``folder``."""

    process: subprocess.Popen[bytes]
    raw: Path
    folder: Path


class _Recorder:
    """torch.profiler on one rank, from before its warm-up step until after its last. Only ``save`` raises.

    A failure is kept in ``error``.
    """

    def __init__(self, device: torch.device, request: ProfileRequest) -> None:
        self.error: str | None = None
        self._device, self._request = device, request
        self._profiler: torch_profile | None = None
        self._contexts = contextlib.ExitStack()

    def start(self) -> None:
        """Start to warm up; NVTX ranges begin at once."""
        with self._keeping_errors():
            if self._request.nvtx:
                torch.cuda.profiler.start()  # type: ignore[no-untyped-call]
                self._contexts.callback(torch.cuda.profiler.stop)
                self._contexts.enter_context(torch.autograd.profiler.emit_nvtx())  # type: ignore[no-untyped-call]
                self._mark_ranges(True)
                return
            if self._request.memory and self._device.type == "cuda":
                remember_allocations(self._device)
                self._contexts.callback(forget_allocations, self._device)
            gpu = self._device.type == "cuda"
            self._profiler = torch_profile(
                activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if gpu else [])],
                schedule=schedule(wait=0, warmup=1, active=self._request.steps, repeat=1),
                profile_memory=self._request.memory,
                with_stack=self._request.stacks,
            )
            self._profiler.start()

    def next_step(self) -> None:
        """Go on to the first step of the trace, or to the next."""
        with self._keeping_errors():
            if self._profiler is None:
                return
            if not _recording:
                self._synchronize()  # the work of the warm-up step is not part of the trace
            self._profiler.step()
            self._mark_ranges(True)

    def stop(self) -> None:
        """Stop without a trace."""
        self._mark_ranges(False)
        with self._keeping_errors():
            self._contexts.close()
            if self._profiler is not None:
                self._profiler.stop()

    def save(self, snapshot: Path) -> Path | None:
        """Stop, and return a new file with the trace; None without one. Raises OSError and errors of torch.

        On a GPU with ``memory``, ``snapshot`` is written for https://pytorch.org/memory_viz.
        """
        with self._keeping_errors():
            self._synchronize()
            with profiled(END):
                pass
        if self._profiler is not None and self.error is None:
            self._profiler.step()  # ends the trace
        if self._request.memory and self._device.type == "cuda":
            write_memory_snapshot(snapshot)
        self.stop()
        if self._profiler is None or self.error is not None:
            return None
        descriptor, name = tempfile.mkstemp(prefix="scaletrain-trace-", suffix=".json")
        os.close(descriptor)
        self._profiler.export_chrome_trace(name)
        return Path(name)

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def _mark_ranges(self, recording: bool) -> None:
        global _recording
        _recording = recording

    @contextlib.contextmanager
    def _keeping_errors(self) -> Any:
        try:
            yield
        except Exception as error:
            self.error = self.error or f"{type(error).__name__}: {error}"
            self._mark_ranges(False)
