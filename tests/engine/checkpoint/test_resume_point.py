import errno
import math
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest

from scaletrain_cli.engine.checkpoint import resume_point as beginning_module
from scaletrain_cli.engine.checkpoint.resume_point import (
    OtherNodeUnfitError,
    ResumePoint,
    UnreadableCheckpointsError,
    find_resume_point,
)
from scaletrain_cli.engine.process_group import RankConsensus, Ranks
from scaletrain_cli.errors import ScaletrainError, UsageError, WrongNodesError
from scaletrain_cli.rundir import journal
from scaletrain_cli.rundir.checkpoints import (
    STATE_FILE,
    Checkpoint,
    Defect,
    checkpoint_path,
    find_defects,
    read_checkpoint,
)
from scaletrain_cli.rundir.journal import append_line, record_event
from scaletrain_cli.rundir.paths import RunDir
from scaletrain_cli.worker import checkpoint_commit
from scaletrain_cli.worker.failures import failure_of, failure_reason_of
from scaletrain_cli.worker.memory_copies import complete_copy, open_copies
from tests.engine.alone import context_of
from tests.launch.conftest import make_spec

SPEC = make_spec("training.steps=30", "evaluation.every=10")


def beginning(run: RunDir) -> ResumePoint:
    return find_resume_point(context_of(run, SimpleNamespace(spec=SPEC, revision=0)), run.checkpoints)


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir(tmp_path)


def commit(run: RunDir, step: int, *, event: bool = True) -> Path:
    checkpoint_commit.open_attempt(run.checkpoints, 1)
    writer = checkpoint_commit.HashingWriter(checkpoint_commit.stage_checkpoint(run.checkpoints, 1, step) / "shard.pt")
    writer.write(b"weights" * 100)
    path = checkpoint_commit.commit_checkpoint(
        run.checkpoints, step, {"shard.pt": writer.close()}, world_size=2, clean=True, attempt=1
    )
    if event:
        record_event(run, "checkpoint", step=step)
    return path


def damage(checkpoint: Path) -> None:
    (checkpoint / "shard.pt").write_bytes(b"cut")


def test_a_new_run_begins_at_step_0(run: RunDir) -> None:
    begin = beginning(run)
    assert (begin.checkpoint, begin.step, begin.evaluated, begin.lost_steps) == (None, 0, False, 0)


def test_the_latest_valid_checkpoint_is_used_and_the_corrupt_one_is_reported(run: RunDir) -> None:
    commit(run, 10)
    damage(commit(run, 20))
    for step in range(1, 24):
        append_line(run.metrics, {"step": step, "loss": float(step)})
    append_line(run.metrics, {"step": 10, "validation_loss": 3.0})
    append_line(run.metrics, {"step": 23, "loss": 23.0})
    begin = beginning(run)
    assert (begin.step, begin.evaluated, begin.lost_steps) == (10, True, 13)
    assert "step-00000020/shard.pt" in begin.passed_over[0]


def test_a_checkpoint_beyond_the_last_step_is_refused(run: RunDir) -> None:
    commit(run, 31)
    with pytest.raises(UsageError, match="of step 31, and the run has 30 steps"):
        beginning(run)


def test_the_evaluation_at_the_former_end_of_a_longer_run_does_not_count_for_early_stopping(run: RunDir) -> None:
    commit(run, 20)
    for step, loss in ((10, 3.0), (15, 2.5), (20, 2.0)):  # with 15 steps first
        append_line(run.metrics, {"step": step, "validation_loss": loss})
    assert beginning(run).validations == [{"validation_loss": 3.0}, {"validation_loss": 2.0}]


def test_a_validation_loss_that_was_not_finite_counts_for_early_stopping_after_a_resume(run: RunDir) -> None:
    commit(run, 20)
    for step, loss in ((10, 3.0), (20, None)):
        append_line(run.metrics, {"step": step, "validation_loss": loss, "validation_top1": "damaged"})
    first, second = beginning(run).validations
    assert (first, second.keys()) == ({"validation_loss": 3.0}, {"validation_loss"})
    assert math.isnan(second["validation_loss"])


def test_steps_are_lost_once_even_if_the_next_attempt_logs_none(run: RunDir) -> None:
    commit(run, 10)
    for step in range(1, 14):
        append_line(run.metrics, {"step": step, "loss": float(step), "time": time.time()})
    assert beginning(run).lost_steps == 3
    record_event(run, "resumed", step=10)
    assert beginning(run).lost_steps == 0
    append_line(run.metrics, {"step": 11, "loss": 11.0, "time": time.time() + 1})
    assert beginning(run).lost_steps == 1


@pytest.mark.parametrize("event", [True, False], ids=["with its event", "whose event was lost"])
def test_a_run_whose_only_checkpoint_is_corrupt_does_not_start_over_by_itself(run: RunDir, event: bool) -> None:
    damage(commit(run, 10, event=event))
    with pytest.raises(UsageError, match=r"no valid checkpoint in .*: step-00000010/shard"):
        beginning(run)
    assert (run.checkpoints / "step-00000010").is_dir()


def test_a_run_whose_checkpoints_are_gone_does_not_start_over_by_itself(run: RunDir) -> None:
    checkpoint_commit.delete_checkpoint(commit(run, 10))
    with pytest.raises(UsageError, match="are missing"):
        beginning(run)


def test_from_scratch_starts_over_and_moves_corrupt_checkpoints_aside(run: RunDir) -> None:
    damage(commit(run, 10))
    record_event(run, "from-scratch")
    assert beginning(run).step == 0
    assert (run.checkpoints / "damaged-step-00000010").is_dir()


def test_a_file_system_that_fails_for_a_moment_ends_the_attempt_and_not_the_run(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit(run, 10)

    def fail(path: object) -> NoReturn:
        raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))

    for failing, said in ((os, "listdir"), (journal, "open_to_read")):  # the checkpoints; the events
        with monkeypatch.context() as patched:
            patched.setattr(failing, said, fail)
            with pytest.raises(ScaletrainError, match="Input/output error") as caught:
                beginning(run)
        failure = failure_of(caught.value, 0)
        assert (failure.reason, failure.exit_code) == ("unreadable", 1)
    assert beginning(run).step == 10


PATTERN = "rank-0000{}.safetensors"


def commit_shards(run: RunDir, step: int) -> Path:
    checkpoint_commit.open_attempt(run.checkpoints, 1)
    files = {}
    for rank in range(4):
        writer = checkpoint_commit.HashingWriter(
            checkpoint_commit.stage_checkpoint(run.checkpoints, 1, step) / PATTERN.format(rank)
        )
        writer.write(b"weights" * 100)
        files[PATTERN.format(rank)] = writer.close()
    record_event(run, "checkpoint", step=step)
    return checkpoint_commit.commit_checkpoint(run.checkpoints, step, files, world_size=4, clean=True, attempt=1)


class Job:
    """Four ranks on two nodes as threads, some of whose nodes cannot read some files."""

    def __init__(self, run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
        self.run, self.unreadable = run, dict[str, set[str]]()
        self.memory: Path | None = None  # folder of the nodes' copies
        self.revision = 0
        self._here, self._barrier = threading.local(), threading.Barrier(4)
        self._items: list[Any] = [None] * 4
        monkeypatch.setattr(beginning_module, "_own_node", lambda: self._here.node)
        monkeypatch.setattr(beginning_module, "find_defects", self._find_defects)
        monkeypatch.setattr(beginning_module, "read_checkpoint", self._read_checkpoint)

    def _cannot_read(self, path: Path) -> bool:
        node = getattr(self._here, "node", "")  # copies in memory are read in another thread
        return f"{path.parent.name}/{path.name}" in self.unreadable.get(node, ())

    def _find_defects(self, checkpoint: Checkpoint, names: list[str] | None = None) -> dict[str, Defect]:
        names = list(checkpoint.files) if names is None else names
        blind = {name: Defect("unreadable", "Input/output error") for name in names}
        readable = [name for name in names if not self._cannot_read(checkpoint.path / name)]
        return {name: blind[name] for name in names if name not in readable} | find_defects(checkpoint, readable)

    def _read_checkpoint(self, path: Path) -> Checkpoint | Defect:
        if self._cannot_read(path / "manifest.json"):
            return Defect("unreadable", "manifest.json: Permission denied")
        return read_checkpoint(path)

    def begin(self) -> list[ResumePoint | Exception]:
        with ThreadPoolExecutor(4) as threads:
            return list(threads.map(self._rank, range(4)))

    def _rank(self, rank: int) -> ResumePoint | Exception:
        self._here.node, self._here.rank = f"node {rank // 2}", rank
        try:
            ranks = Ranks(rank, 4, rank % 2)
            copies = None if self.memory is None else self.memory / self._here.node
            record = SimpleNamespace(spec=SPEC, revision=self.revision)
            return find_resume_point(context_of(self.run, record, ranks, self), self.run.checkpoints, copies)
        except ScaletrainError as error:
            return error

    def _share(self, item: Any) -> list[Any]:
        self._items[self._here.rank] = item
        self._barrier.wait()
        found = list(self._items)
        self._barrier.wait()
        return found

    from_rank_zero, gather_everywhere = RankConsensus.from_rank_zero, RankConsensus.gather_everywhere

    @property
    def leads(self) -> bool:
        return self._here.rank == 0

    def gather(self, item: Any) -> list[Any] | None:
        found = self._share(item)
        return found if self.leads else None

    def follow_rank_zero(self, item: Any) -> Any:
        return self._share(item)[0]

    def barrier(self) -> None:
        self._share(None)


@pytest.fixture
def job(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> Job:
    for step in (10, 20):
        commit_shards(run, step)
    return Job(run, monkeypatch)


@pytest.mark.parametrize("file", ["manifest.json", PATTERN.format(2)])
def test_a_checkpoint_that_no_node_can_read_is_skipped_for_the_one_before(job: Job, file: str) -> None:
    job.unreadable = {node: {f"step-00000020/{file}"} for node in ("node 0", "node 1")}
    for found in job.begin():
        assert isinstance(found, ResumePoint), found
        assert found.step == 10
        assert f"step-00000020/{file}: " in found.passed_over[0]
    assert (job.run.checkpoints / "damaged-step-00000020" / PATTERN.format(0)).is_file()


@pytest.mark.parametrize("file", ["manifest.json", PATTERN.format(0)])
def test_a_node_that_cannot_read_what_others_can_is_rejected_and_no_other(job: Job, file: str) -> None:
    job.unreadable = {"node 0": {f"step-00000020/{file}"}}
    found = job.begin()
    assert [type(each) for each in found] == [WrongNodesError] * 2 + [OtherNodeUnfitError] * 2
    reasons = [failure_reason_of(each) for each in found if isinstance(each, Exception)]
    assert reasons == ["wrong-nodes"] * 2 + ["crash"] * 2
    assert (job.run.checkpoints / "step-00000020").is_dir()


def test_a_file_that_could_not_be_read_once_is_used_after_the_second_read(job: Job) -> None:
    job.unreadable = {"node 1": {f"step-00000020/{PATTERN.format(3)}"}}
    read, calls = job._find_defects, []

    def once(checkpoint: Checkpoint, names: list[str]) -> dict[str, Defect]:
        if PATTERN.format(3) in names:
            calls.append(1)
            if len(calls) > 1:
                job.unreadable = {}
        return read(checkpoint, names)

    beginning_module.find_defects = once  # type: ignore[assignment]  # restored by the fixture
    assert [each.step for each in job.begin() if isinstance(each, ResumePoint)] == [20] * 4


def test_unreadable_checkpoints_suggest_no_restart_from_scratch_and_reject_no_node(job: Job) -> None:
    everything = {f"step-000000{step}/manifest.json" for step in (10, 20)}
    job.unreadable = {"node 0": everything, "node 1": everything}
    for found in job.begin():
        assert isinstance(found, UnreadableCheckpointsError)
        assert "from-scratch" not in str(found)
        assert (found.exit_code, failure_reason_of(found)) == (1, "unreadable")
    assert (job.run.checkpoints / "step-00000020").is_dir()


def copy(
    job: Job, step: int, *, ranks: int = 4, world_size: int = 4, start: int = 0, attempts: tuple[int, int] = (1, 1)
) -> None:
    """Copy the state after a step to the memory of both nodes, by the first ranks, in an attempt on each node."""
    job.memory = job.run.path / "memory"
    for rank in range(ranks):
        folder = job.memory / f"node {rank // 2}"
        os.close(open_copies(folder))
        place = checkpoint_path(folder, step)
        place.mkdir(exist_ok=True)
        writer = checkpoint_commit.HashingWriter(place / PATTERN.format(rank))
        writer.write(b"weights" * 100)
        files, key = {PATTERN.format(rank): writer.close()}, f"revision 0, start {start}"
        if rank == 0:
            state = checkpoint_commit.HashingWriter(place / STATE_FILE)
            state.write(b"{}")
            files[STATE_FILE] = state.close()
        complete_copy(folder, step, rank, files, key=key, world_size=world_size, attempt=attempts[rank // 2])


def resumed(job: Job) -> tuple[int, bool]:
    """Return the step, the same on every rank, and whether its state is in memory."""
    found = job.begin()
    assert all(isinstance(each, ResumePoint) for each in found), found
    (answer,) = {(each.step, each.in_memory) for each in found if isinstance(each, ResumePoint)}
    return answer


def test_a_newer_copy_in_memory_is_used_by_each_rank_from_its_own_node(job: Job) -> None:
    copy(job, 23)
    copy(job, 24)
    copy(job, 25, ranks=3)  # a rank was killed while it wrote
    assert resumed(job) == (24, True)
    for rank, begin in enumerate(job.begin()):
        assert isinstance(begin, ResumePoint)
        assert begin.checkpoint is not None
        assert begin.checkpoint.path == checkpoint_path(job.run.path / f"memory/node {rank // 2}", 24)
        of_node = {PATTERN.format(each) for each in (rank // 2 * 2, rank // 2 * 2 + 1)}
        assert set(begin.checkpoint.files) - {STATE_FILE} == of_node
        assert (begin.checkpoint.path / STATE_FILE).read_bytes() == b"{}", "rank 0 has it for all"
        assert begin.saved_step == 20


def test_a_flipped_bit_in_one_copy_leaves_the_one_before(job: Job) -> None:
    copy(job, 23)
    copy(job, 24)
    file = checkpoint_path(job.run.path / "memory/node 1", 24) / PATTERN.format(3)
    file.write_bytes(bytes([file.read_bytes()[0] ^ 1]) + file.read_bytes()[1:])
    assert resumed(job) == (23, True)
    assert all(f"copy of step 24 in host memory, {PATTERN.format(3)}" in each.passed_over[0] for each in job.begin())  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "settings",
    [{"world_size": 8}, {"ranks": 2}, {"start": 1}, {"attempts": (1, 2)}],
    ids=[
        "of another layout",
        "of one node alone",
        "from before a start from scratch",
        "of another attempt on each node",
    ],
)
def test_another_copy_is_not_used(job: Job, settings: dict[str, Any]) -> None:
    copy(job, 24, **settings)
    assert resumed(job) == (20, False)


def test_a_copy_from_before_a_change_of_settings_is_not_used(job: Job) -> None:
    copy(job, 24)
    job.revision = 1
    assert resumed(job) == (20, False)


def test_a_copy_that_is_not_newer_than_the_checkpoint_is_not_used(job: Job) -> None:
    copy(job, 20)
    assert resumed(job) == (20, False)


def test_a_damaged_copy_of_a_run_without_a_checkpoint_does_not_stop_it(run: RunDir, job: Job) -> None:
    copy(job, 24)
    for path in run.checkpoints.glob("step-*"):
        checkpoint_commit.delete_checkpoint(path)
    run.events.unlink()
    (checkpoint_path(run.path / "memory/node 0", 24) / PATTERN.format(0)).write_bytes(b"")
    assert resumed(job) == (0, False)


def test_a_copy_replaces_damaged_checkpoints_and_these_are_set_aside(run: RunDir, job: Job) -> None:
    copy(job, 24)
    for step in (10, 20):
        (run.checkpoints / f"step-000000{step}" / PATTERN.format(1)).write_bytes(b"cut")
    assert resumed(job) == (24, True)
    assert (run.checkpoints / "damaged-step-00000020").is_dir()


def test_the_validation_after_a_copy_is_repeated(job: Job) -> None:
    """The save of the best checkpoint, which follows it, may be missing."""
    copy(job, 30)
    for step in (10, 20, 30):
        append_line(job.run.metrics, {"step": step, "loss": 1.0, "validation_loss": float(step)})
    begin = job.begin()[0]
    assert isinstance(begin, ResumePoint)
    assert (begin.step, begin.evaluated, begin.lost_steps) == (30, False, 0)
    assert [each["validation_loss"] for each in begin.validations] == [10.0, 20.0]
