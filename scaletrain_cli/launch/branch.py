"""`scaletrain resume --branch`: a new run that continues a checkpoint of another one, which is left as it is.

Everything is put into the hidden folder from which create_run() makes the run directory by one rename. The files of the
checkpoint are hard links where the file system allows that: they never change, and deleting one name keeps the other.
"""

import shutil
from dataclasses import dataclass, replace
from pathlib import Path

from scaletrain_cli.data.stages import MIXTURE_EVENT
from scaletrain_cli.errors import UsageError
from scaletrain_cli.reasons import Reason
from scaletrain_cli.rundir.checkpoints import (
    MANIFEST,
    Checkpoint,
    checkpoint_path,
    committed_folders,
    latest_valid,
    list_checkpoints,
    read_checkpoint,
    verify,
)
from scaletrain_cli.rundir.journal import (
    BRANCH_EVENT,
    ROLLBACK_EVENT,
    append_lines,
    read_events,
    read_metrics,
    record_event,
)
from scaletrain_cli.rundir.paths import RunDir
from scaletrain_cli.rundir.record import BranchPoint, RunRecord, checkpoint_folder, code_file, is_elsewhere
from scaletrain_cli.rundir.shared_datasets import datasets_file
from scaletrain_cli.safe_files import copy_file, link_or_copy, make_folder

_STAGING = "attempt-0000.tmp"  # is removed by the first attempt if this process is killed


@dataclass(frozen=True)
class Branch:
    """A verified checkpoint of ``run``, which has the record ``parent``, from which a new run continues."""

    run: RunDir
    parent: RunRecord
    checkpoint: Checkpoint
    passed_over: tuple[str, ...] = ()  # a line for each newer checkpoint that is not valid

    @property
    def point(self) -> BranchPoint:
        """The run and the step that the record of the new run names as its origin."""
        return BranchPoint(self.run.run_id, str(self.run.path), self.checkpoint.step)

    def fill(self, draft: RunDir, final: RunDir, record: RunRecord) -> None:
        """Put the checkpoint and the history up to it into ``draft``, the hidden folder of the new run ``final``.

        The history is what decides about later samples and validations. Raises UsageError if the checkpoint was deleted
        meanwhile, or if the folder of ``checkpoint.dir`` has others, and OSError.
        """
        is_inside = record.spec.checkpoint.dir == "auto"
        self._copy_checkpoint(draft.checkpoints if is_inside else checkpoint_folder(final, record.spec))
        if self.run.reference.is_dir():
            for path in sorted(self.run.reference.rglob("*")):
                if path.is_file():
                    target = draft.reference / path.relative_to(self.run.reference)
                    make_folder(target.parent, parents=True)
                    link_or_copy(path, target)
        files = [datasets_file(self.run)]
        if record.code is not None and record.code == self.parent.code:
            files += [code_file(self.run, record.code, suffix) for suffix in ("tar.gz", "sha256", "patch")]
        for path in files:
            if path.is_file():
                target = draft.path / path.relative_to(self.run.path)
                make_folder(target.parent)
                copy_file(path, target)
        step = self.checkpoint.step
        append_lines(draft.metrics, [line for line in read_metrics(self.run) if line["step"] <= step])
        append_lines(draft.events, _inherited_events(self.run, step))
        record_event(draft, BRANCH_EVENT, step=step, from_run=self.run.run_id, from_run_dir=str(self.run.path))

    def _copy_checkpoint(self, folder: Path) -> None:
        target = checkpoint_path(folder, self.checkpoint.step)
        there = committed_folders(folder)
        if there:
            existing = read_checkpoint(target)
            same = isinstance(existing, Checkpoint) and existing.files == self.checkpoint.files
            if not same or there != [target]:
                raise UsageError(Reason("launch.branch-folder-used", {"folder": str(folder)}))
            return  # of a process that was killed before it had made the run directory
        staged = folder / _STAGING / target.name
        shutil.rmtree(staged.parent, ignore_errors=True)
        copied = []
        try:
            for name in (*self.checkpoint.files, MANIFEST):
                make_folder((staged / name).parent, parents=True)
                if not link_or_copy(self.checkpoint.path / name, staged / name) and name != MANIFEST:
                    copied.append(name)
        except FileNotFoundError as error:
            params = {"run": self.run.run_id, "step": self.checkpoint.step, "path": str(error.filename)}
            raise UsageError(Reason("launch.branch-checkpoint-gone", params)) from error
        if problems := verify(replace(self.checkpoint, path=staged), copied):
            params = {"step": self.checkpoint.step, "problems": "; ".join(problems)}
            raise UsageError(Reason("launch.branch-checkpoint-invalid", params))
        staged.rename(target)
        staged.parent.rmdir()


def find_branch(run: RunDir, parent: RunRecord, step: int | None) -> Branch:
    """Return the branch from the checkpoint of ``step``, by default the latest valid one. Every byte of it is read.

    Raises UsageError, with the steps that are there, if there is none or if it is not valid.
    """
    if is_elsewhere(run, parent) or not parent.spec.cluster.traits.shared_run_directory:
        raise UsageError(Reason("launch.branch-unseen", {"run": run.run_id}))
    folder = checkpoint_folder(run, parent.spec)
    if step is None:
        latest, passed_over = latest_valid(folder)
        if latest is None:
            raise _no_checkpoint(run, folder, step)
        return Branch(run, parent, latest, tuple(passed_over))
    checkpoint = read_checkpoint(checkpoint_path(folder, step))
    if not isinstance(checkpoint, Checkpoint) and not checkpoint_path(folder, step).is_dir():
        raise _no_checkpoint(run, folder, step)
    problems = verify(checkpoint) if isinstance(checkpoint, Checkpoint) else [str(checkpoint)]
    if problems or not isinstance(checkpoint, Checkpoint):
        raise UsageError(Reason("launch.branch-checkpoint-invalid", {"step": step, "problems": "; ".join(problems)}))
    return Branch(run, parent, checkpoint)


def _no_checkpoint(run: RunDir, folder: Path, step: int | None) -> UsageError:
    steps = [checkpoint.step for checkpoint in list_checkpoints(folder)]
    if not steps:
        return UsageError(Reason("launch.branch-no-checkpoint", {"run": run.run_id, "folder": str(folder)}))
    return UsageError(Reason("launch.branch-other-steps", {"run": run.run_id, "step": step or 0, "steps": steps}))


def _inherited_events(run: RunDir, step: int) -> list[dict[str, object]]:
    """Return the mixtures and rollbacks that a run had when it committed the checkpoint of ``step``."""
    events = read_events(run)
    places = [
        place
        for place, event in enumerate(events)
        if event["event"] in ("checkpoint", BRANCH_EVENT) and event["step"] == step
    ]
    events = events[: places[-1]] if places else events
    starts = [place for place, event in enumerate(events) if event["event"] == "from-scratch"]
    return [
        # The lines of metrics.jsonl that a rollback has discarded are left out, and its steps were lost elsewhere.
        {key: value for key, value in event.items() if key != "lost_steps"} | {"metrics_bytes": 0}
        for event in events[max(starts, default=0) :]
        if event["event"] in (MIXTURE_EVENT, ROLLBACK_EVENT)
    ]
