"""Where an attempt begins: never at step 0 while there is, or should be, something to resume from."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from scaletrain_cli.engine.beginning import Beginning, find_beginning
from scaletrain_cli.engine.process_group import Ranks
from scaletrain_cli.errors import UsageError
from scaletrain_cli.rundir import committing
from scaletrain_cli.rundir.journal import append_line, record_event
from scaletrain_cli.rundir.paths import RunDir


class Alone:
    """The agreement of a single rank."""

    def gather(self, item: object) -> list[object]:
        return [item]

    def follow_rank_zero(self, item: object) -> object:
        return item


def beginning(run: RunDir) -> Beginning:
    return find_beginning(run, run.checkpoints, 1, Ranks(0, 1, 0), Alone())  # type: ignore[arg-type]


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir(tmp_path)


def commit(run: RunDir, step: int, *, event: bool = True) -> Path:
    committing.open_attempt(run.checkpoints, 1)
    writer = committing.HashingWriter(committing.begin_staging(run.checkpoints, 1, step) / "shard.pt")
    writer.write(b"weights" * 100)
    path = committing.commit(run.checkpoints, step, {"shard.pt": writer.close()}, world_size=2, clean=True, attempt=1)
    if event:
        record_event(run, "checkpoint", step=step)
    return path


def damage(checkpoint: Path) -> None:
    (checkpoint / "shard.pt").write_bytes(b"cut")


def test_a_new_run_begins_at_step_0(run: RunDir) -> None:
    begin = beginning(run)
    assert (begin.checkpoint, begin.step, begin.evaluated, begin.lost_steps) == (None, 0, False, 0)


def test_the_newest_sound_checkpoint_is_taken_and_the_damaged_one_named(run: RunDir) -> None:
    commit(run, 10)
    damage(commit(run, 20))
    for step in range(1, 24):
        append_line(run.metrics, {"step": step, "loss": float(step)})
    append_line(run.metrics, {"step": 10, "validation_loss": 3.0})
    append_line(run.metrics, {"step": 23, "loss": 23.0})
    begin = beginning(run)
    assert (begin.step, begin.evaluated, begin.lost_steps) == (10, True, 13)
    assert "step-00000020/shard.pt" in begin.passed_over[0]


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
def test_a_run_whose_only_checkpoint_is_damaged_does_not_start_over_by_itself(run: RunDir, event: bool) -> None:
    damage(commit(run, 10, event=event))
    with pytest.raises(UsageError, match="no sound checkpoint: step-00000010/shard"):
        beginning(run)
    assert (run.checkpoints / "step-00000010").is_dir()


def test_a_run_whose_checkpoints_are_gone_does_not_start_over_by_itself(run: RunDir) -> None:
    committing.delete(commit(run, 10))
    with pytest.raises(UsageError, match="are gone"):
        beginning(run)


def test_told_to_it_starts_over_and_sets_the_damaged_aside(run: RunDir) -> None:
    damage(commit(run, 10))
    record_event(run, "from-scratch")
    assert beginning(run).step == 0
    assert (run.checkpoints / "damaged-step-00000010").is_dir()
