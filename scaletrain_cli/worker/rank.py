"""The API of one rank for a user's training program. No torch; Rank.start() must precede the import of torch.

``Checkpoints`` is for training programs that write their own files.
"""

import contextlib
import os
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from scaletrain_cli.errors import PreemptedError
from scaletrain_cli.rundir.checkpoints import (
    Checkpoint,
    FileDigest,
    checkpoint_path,
    checkpoints_to_prune,
    latest_valid,
)
from scaletrain_cli.rundir.documents import json_number
from scaletrain_cli.rundir.evaluations import steps_to_keep
from scaletrain_cli.rundir.journal import append_line, record_event
from scaletrain_cli.worker.agent_watch import AgentWatch
from scaletrain_cli.worker.checkpoint_commit import (
    HashingWriter,
    adopt_folder,
    commit_checkpoint,
    digest_file,
    open_attempt,
    remove_checkpoint,
    scratch_folder,
    stage_checkpoint,
    staging_path,
)
from scaletrain_cli.worker.failures import report_exception
from scaletrain_cli.worker.heartbeat import Heartbeat, install_stack_dump
from scaletrain_cli.worker.run_environment import RUN_DIR_VARIABLE, ResolvedRun, RunEnvironment, read_resolved_run
from scaletrain_cli.worker.signals import PreemptionFlag, die_with_agent
from scaletrain_cli.worker.telemetry import RankTelemetry, StepTimes


class StagedCheckpoint:
    """The files of one rank in a checkpoint that is not committed yet; ``digests``: those of durable files.

    File names are relative to ``folder``, with / between folders.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.digests: dict[str, FileDigest] = {}

    @contextlib.contextmanager
    def file(self, name: str) -> Iterator[HashingWriter]:
        """Yield a file object for ``torch.save`` and the like: it hashes what is written, and is fsynced on exit.

        Raises OSError.
        """
        writer = HashingWriter(self.folder / name)
        yield writer
        self.digests[name] = writer.close()

    def add(self, name: str) -> None:
        """Make a file that is already in the folder durable and hash it. Raises OSError."""
        self.digests[name] = digest_file(self.folder / name)

    def names(self) -> list[str]:
        """Return the names of all files in the folder, also in folders below it."""
        paths = (path for path in self.folder.rglob("*") if path.is_file() and not path.is_symlink())
        return sorted(path.relative_to(self.folder).as_posix() for path in paths)


class Checkpoints:
    """The checkpoint folder of a run, as one attempt uses it.

    Every call that writes raises SupersededAttemptError once a later attempt has begun.
    """

    def __init__(
        self, folder: Path, attempt: int, world_size: int, *, keep: int = 3, keep_every: int | None = None
    ) -> None:
        self.folder, self.attempt, self.world_size = folder, attempt, world_size
        self._keep, self._keep_every = keep, keep_every
        self._also_kept: Callable[[], Collection[int]] = tuple  # steps; Rank sets those of its run

    def latest(self) -> Checkpoint | None:
        """Return the latest valid checkpoint; None if there is none. Reads and verifies all of its bytes."""
        return latest_valid(self.folder)[0]

    def open(self) -> None:
        """Make this attempt the only writer. Call once, on one rank, before any save. Raises OSError."""
        open_attempt(self.folder, self.attempt)

    def folder_of(self, step: int) -> Path:
        """Return the folder of the committed checkpoint of ``step``, for ranks that did not call latest()."""
        return checkpoint_path(self.folder, step)

    def stage(self, step: int) -> StagedCheckpoint:
        """Begin the checkpoint of ``step``. Call on every rank that writes to it. Raises OSError."""
        return StagedCheckpoint(stage_checkpoint(self.folder, self.attempt, step))

    def staged(self, step: int) -> StagedCheckpoint:
        """Return the checkpoint of ``step`` that another rank has staged or adopted."""
        return StagedCheckpoint(staging_path(self.folder, self.attempt, step))

    def scratch(self) -> Path:
        """Return a folder of this attempt for files of a library; the next attempt removes it. Raises OSError."""
        return scratch_folder(self.folder, self.attempt)

    def adopt(self, step: int, folder: Path) -> StagedCheckpoint:
        """Take ``folder``, which a library wrote below ``scratch()``, as the files of the checkpoint of ``step``.

        Call on one rank, after all ranks have written. Then ``add`` each of ``names()``, on any ranks, and commit.
        """
        return StagedCheckpoint(adopt_folder(self.folder, self.attempt, step, folder))

    def commit(self, step: int, files: Mapping[str, FileDigest], *, clean: bool = True) -> Checkpoint:
        """Commit the staged files as a checkpoint, and delete checkpoints that retention does not keep. Raises OSError.

        Call on one rank, after all ranks' files are durable, with the digests of all. ``clean``: training was healthy
        up to here, so a rollback may use this checkpoint.
        """
        path = commit_checkpoint(
            self.folder, step, files, world_size=self.world_size, clean=clean, attempt=self.attempt
        )
        for old in checkpoints_to_prune(self.folder, self._keep, self._keep_every, self._also_kept()):
            remove_checkpoint(old.path, self.attempt)
        return Checkpoint(path, step, self.world_size, clean, self.attempt, files)


class Rank:
    """This process as one rank of a run: its environment, signals, heartbeat, checkpoints and records.

    ``preemption.raised`` is true once the run must save and exit. Only rank 0 writes metrics and events.
    """

    def __init__(self, environment: RunEnvironment, resolved: ResolvedRun) -> None:
        self.environment, self.resolved = environment, resolved
        self.preemption = PreemptionFlag()
        self.heartbeat = Heartbeat.from_environment(os.environ)
        settings = resolved.spec.get("telemetry") or {}
        interval = float(settings.get("interval", 1.0))
        enabled = settings.get("enabled", True)
        sender = RankTelemetry.from_environment(os.environ, interval_seconds=interval) if enabled else None
        self.step_times = StepTimes(sender, interval_seconds=interval)
        self.heartbeat.observer = self.step_times.beat
        retention = resolved.spec["checkpoint"]
        self.checkpoints = Checkpoints(
            resolved.checkpoint_folder,
            environment.attempt,
            environment.world_size,
            keep=retention["keep"],
            keep_every=retention.get("keep_every"),
        )
        folder, best, mirror = resolved.checkpoint_folder, retention.get("keep_best"), retention.get("mirror", {})
        also_kept = partial(steps_to_keep, environment.run, folder, keep_best=best, mirror_to=mirror.get("to"))
        self.checkpoints._also_kept = also_kept
        self._watch = AgentWatch.of_rank(environment.run, environment.attempt)

    @classmethod
    def start(cls, run_dir: str | Path | None = None) -> "Rank":
        """Install the signal handlers and return the rank. Raises UsageError for a damaged run directory.

        ``run_dir`` is the argument of the program, or by default the variable SCALETRAIN_RUN_DIR.
        Call it before torch is imported: the agent starts ranks with the signals blocked, and this unblocks them.
        """
        die_with_agent()
        environment = RunEnvironment.read(os.environ.get(RUN_DIR_VARIABLE, "") if run_dir is None else run_dir)
        rank = cls(environment, read_resolved_run(environment.run, environment.attempt))
        rank.preemption.install()
        install_stack_dump(os.environ)
        rank._watch.start()
        return rank

    def log_metrics(self, step: int, **values: float | None) -> None:
        """Append a line to metrics.jsonl on rank 0; ``loss`` and ``tokens_per_second`` are shown by ``status``.

        NaN and infinity become null, for which JSON has no number; `scaletrain diagnose` reports such a loss.
        """
        if self.environment.rank == 0:
            finite = {name: json_number(value) if isinstance(value, float) else value for name, value in values.items()}
            line = {"step": step, **finite, "attempt": self.environment.attempt, "time": round(time.time(), 3)}
            append_line(self.environment.run.metrics, line)

    def add_telemetry(self, **values: float) -> None:
        """Add values of the present step of this rank, such as ``data_wait_seconds``, to those sent to the node agent.

        On every rank. Its step times, from one beat of the phase ``step`` to the next, and its memory are sent anyway.
        Names are those of the telemetry (docs/run-directory.md) or others, in SI units. Never waits and never fails.
        """
        self.step_times.add(values)

    def record_event(self, event: str, **details: Any) -> None:
        """Append an event to events.jsonl on rank 0.

        ``status`` and the count of lost steps use ``started`` or ``resumed`` (with the step), ``checkpoint``,
        ``preempted`` and ``finished``.
        """
        if self.environment.rank == 0:
            record_event(self.environment.run, event, **details)

    def run(self, train: Callable[[], int]) -> NoReturn:
        """Call ``train``, which returns an exit code, and end the process with that code.

        An exception is printed, recorded as the failure of this rank and turned into an exit code; values of secret
        variables are hidden in both texts. The process ends without interpreter shutdown: a process group whose peer
        has died may abort in its destructor.
        """
        try:
            code = int(train())
        except PreemptedError as error:
            code = int(error.exit_code)
        except Exception as error:
            code = report_exception(self.environment.run, self.environment.attempt, self.environment.rank, error)
        self.step_times.close()
        self.exit(code)

    def exit(self, code: int) -> NoReturn:
        """End the process with an exit code at once, without interpreter shutdown."""
        self._watch.leave()
        with contextlib.suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)
