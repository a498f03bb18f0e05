"""Copies in host memory as one rank makes them: which are kept, how often, and what ends them."""

from __future__ import annotations

import contextlib
import errno
import io
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from scaletrain_cli.engine import assembly
from scaletrain_cli.engine.checkpoint import memory_copies
from scaletrain_cli.engine.checkpoint.memory_copies import MemoryCopies, open_memory_copies
from scaletrain_cli.engine.checkpoint.resume_point import ResumePoint
from scaletrain_cli.engine.checkpoint.shard_file import Entry, ShardHeader, Slice
from scaletrain_cli.engine.process_group import RankConsensus, Ranks
from scaletrain_cli.rundir.checkpoints import list_checkpoints, verify
from scaletrain_cli.rundir.journal import read_events
from scaletrain_cli.rundir.paths import RunDir
from scaletrain_cli.worker.checkpoint_commit import open_attempt
from scaletrain_cli.worker.memory_copies import read_copies
from tests.engine.alone import context_of
from tests.engine.parity.layouts import assembled, begun_run
from tests.engine.parity.rows import Row
from tests.engine.ranks import on_ranks

SLICE = Slice("w", (4,), None, 0, 4)
KEY = "key"


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    monkeypatch.setattr(memory_copies, "copies_folder", lambda run: tmp_path / "memory")
    return RunDir(tmp_path)


def opened(
    run: RunDir, in_memory: object = 1, *, step: int = 0, from_copy: bool = False, partners: bool = False
) -> Any:
    spec = SimpleNamespace(checkpoint=SimpleNamespace(in_memory=in_memory))
    planned = SimpleNamespace(memory_copy_steps=1, memory_copy_bytes_per_node=100, memory_copies_on_partners=partners)
    plan = SimpleNamespace(durability=planned, layout=SimpleNamespace(local_sgd_groups=1))
    point = ResumePoint(None, step, False, [], 0, [], in_memory=from_copy, copies_key=KEY)
    return open_memory_copies(context_of(run, SimpleNamespace(spec=spec, plan=plan)), point, 0.0)


def copied(copies: MemoryCopies, step: int, *, blocked: float = 0.0, seconds: float = 1.0) -> bool:
    """Copy the state after a step; return whether it was begun."""
    if not copies.ready(seconds):
        return False
    header = ShardHeader(0, {"w": SLICE}, {})
    entries = [Entry("weight/w", torch.full((4,), float(step)))]
    copies.begin(step, header, entries, "{}", needed=[SLICE], blocked_seconds=blocked, before_complete=lambda: None)
    return True


def complete(copies: MemoryCopies) -> list[int]:
    copies.ready(1.0)
    return sorted(read_copies(copies.folder, KEY))


def test_the_two_newest_copies_are_kept_and_verify(run: RunDir) -> None:
    copies = opened(run)
    for step in (1, 2, 3, 4):
        assert copies.is_due(step)
        assert copied(copies, step)
        assert not copies.is_due(step)
    assert complete(copies) == [3, 4]
    assert [verify(copy[0]) for copy in read_copies(copies.folder, KEY).values()] == [[], []]


def test_an_attempt_keeps_the_copy_that_it_resumes_from_and_no_other(run: RunDir) -> None:
    copies = opened(run)
    for step in (1, 2):
        copied(copies, step)
    copies.close()
    assert complete_after(opened(run, step=2, from_copy=True)) == [2]
    assert complete_after(opened(run, step=2)) == []  # from disk


def complete_after(copies: MemoryCopies) -> list[int]:
    copies.close()
    return sorted(read_copies(copies.folder, KEY))


def test_a_rollback_removes_the_copies_of_later_steps(run: RunDir) -> None:
    copies = opened(run)
    for step in (1, 2):
        copied(copies, step)
    copies.forget(1)
    assert complete(copies) == [1]
    assert copies.is_due(2)


def test_auto_copies_as_often_as_one_percent_of_the_time_permits(run: RunDir) -> None:
    copies = opened(run, "auto")
    copied(copies, 1, blocked=0.05, seconds=1.0)
    assert copies.ready(1.0)
    assert [step for step in range(2, 9) if copies.is_due(step)] == [6, 7, 8]


def test_a_full_memory_ends_the_copies_with_an_event_and_leaves_the_last_whole_one(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    copies = opened(run)
    copied(copies, 1)
    assert copies.ready(1.0)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(memory_copies, "write_parts", full)
    assert copied(copies, 2)
    assert not copied(copies, 3)
    assert not copies.is_due(4)
    assert complete(copies) == [1]
    (event,) = [event for event in read_events(run) if event["event"] == "memory-copies-off"]
    assert "No space left on device" in event["message"]


def test_a_node_without_room_makes_no_copies(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_copies, "free_bytes", lambda: 150)
    assert opened(run) is None
    (event,) = read_events(run)
    assert event["code"] == "engine.memory-copies-no-room"
    assert opened(run, partners=True) is not None, "all nodes share one memory: none takes copies of another one"
    monkeypatch.setattr(memory_copies, "free_bytes", lambda: 250)
    assert opened(run) is not None


def save_on_its_own_node(root: Path) -> list[tuple[int, ...]]:
    """Be one of two ranks on two nodes that save halves of ``w`` and need all of it; return the needs of two copies."""
    rank, both = int(os.environ["RANK"]), RankConsensus(600.0)
    plan = SimpleNamespace(durability=SimpleNamespace(memory_copy_steps=1), layout=SimpleNamespace(local_sgd_groups=1))
    spec = SimpleNamespace(checkpoint=SimpleNamespace(in_memory=1))
    memory_copies.copies_folder = lambda run: root / f"node {rank}"  # type: ignore[attr-defined,assignment]
    point = ResumePoint(None, 0, False, [], 0, [], copies_key=KEY)
    record: Any = SimpleNamespace(spec=spec, plan=plan)
    copies = MemoryCopies(context_of(RunDir(root), record, Ranks(rank, 2, 0), both), point, ["a", "b"], 0.0)
    needs = []
    for step, needed in ((1, [SLICE]), (2, [])):
        assert copies.ready(1.0)
        header = ShardHeader(rank, {"w": Slice("w", (4,), None, 2 * rank, 2 * rank + 2)}, {})
        entries = [Entry("weight/w", torch.zeros(2))]
        copies.begin(step, header, entries, "{}", needed=needed, blocked_seconds=0.0, before_complete=lambda: None)
        copies.layout_changed()
        copies.ready(1.0)
        needs.append(read_copies(copies.folder, KEY)[step][rank].needs)
    return needs


def test_a_copy_states_of_which_other_ranks_a_resume_needs_the_files(tmp_path: Path) -> None:
    """Replicas save a share each. Once the layout has changed it is found out again."""
    (tmp_path / "attempts").mkdir()
    assert on_ranks(2, save_on_its_own_node, tmp_path) == [[(1,), ()], [(0,), ()]]


def train_and_copy(path: Path, attempt: int) -> tuple[int, int | None]:
    """Save after step 1, and copy after step 2; or resume and mark step 1 as clean. Return both steps."""
    assembly.copies_folder = memory_copies.copies_folder = lambda run: path / "memory"
    with contextlib.redirect_stdout(io.StringIO()):
        trainer = assembled(path, attempt)
        step, checkpointer = trainer.resume().step, trainer.checkpointer
        if attempt == 1:
            assert trainer.prepare_batches(0)
            for number in (1, 2):
                trainer.optimizer_step(number)
                if number == 1:
                    trainer.save(1, wait=True)
            checkpointer.copy_to_memory(2, trainer._client_state(2), 1.0, lambda: None)
            assert checkpointer.copies is not None
            checkpointer.copies.close()
        checkpointer.mark_clean_up_to(1 if attempt == 2 else 0)
        checkpointer.clean_up()
    return step, checkpointer.committed_step


def test_a_resume_from_a_copy_marks_the_checkpoint_before_it_once_training_was_healthy(dataset: Path) -> None:
    run = begun_run(Row(overrides=("checkpoint.in_memory=1",)).spec(dataset, steps=10))
    assert on_ranks(1, train_and_copy, run.path, 1, connected=False) == [(0, 1)]
    assert [(each.step, each.clean) for each in list_checkpoints(run.checkpoints)] == [(1, False)]
    open_attempt(run.checkpoints, 2)
    assert on_ranks(1, train_and_copy, run.path, 2, connected=False) == [(2, 1)]
    assert [(each.step, each.clean) for each in list_checkpoints(run.checkpoints)] == [(1, True)]
