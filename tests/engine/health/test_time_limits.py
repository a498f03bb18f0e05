import json
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from scaletrain_cli.engine import assembly
from scaletrain_cli.engine.trainer import Trainer
from scaletrain_cli.plan import make_plan
from scaletrain_cli.spec import load_spec
from scaletrain_cli.worker.heartbeat import IMPORT_SECONDS, Heartbeat
from tests.cli.command_line import SMALL


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    reads, writes = os.pipe()
    os.set_blocking(reads, False)
    yield reads, writes
    os.close(reads)
    os.close(writes)


def beats(reads: int) -> list[tuple[int, str, float]]:
    lines = os.read(reads, 1 << 16).splitlines()
    return [(beat["step"], beat["phase"], beat["allowed"]) for beat in map(json.loads, lines)]


@pytest.mark.parametrize("frozen", [False, True])
def test_a_node_that_reads_and_hashes_a_frozen_base_has_longer_for_its_set_up(
    monkeypatch: pytest.MonkeyPatch, pipe: tuple[int, int], tmp_path: Path, *, frozen: bool
) -> None:
    """Two readings of all weights in fp32, at 50 MB/s, and the checkpoint that the node loads."""
    joined: list[float] = []
    monkeypatch.setattr(assembly, "connect", lambda device, seconds: joined.append(seconds))
    monkeypatch.setattr(assembly, "RankConsensus", lambda seconds: seconds)
    some = [f"model.weights={tmp_path}", "training.trainable=[{match: 'model.layers.7.*'}]"] if frozen else []
    spec = load_spec(SMALL, some)
    plan = make_plan(spec)
    record: Any = SimpleNamespace(spec=spec, plan=plan)
    heart = Heartbeat(pipe[1])
    steps, _ = assembly._connect(record, torch.device("cpu"), heart)
    base_bytes = 2 * 4 * plan.model.parameters if frozen else 0
    expected = 600.0 + (plan.durability.checkpoint_bytes + base_bytes) / 50e6
    assert heart.set_up_seconds == pytest.approx(expected)
    assert beats(pipe[0]) == [(0, "connect", pytest.approx(IMPORT_SECONDS + expected, abs=1e-3))]
    assert joined == [steps]
    assert joined[0] > heart.longest_seconds  # the agent reports a silent rank before its peers give up


def test_a_new_training_stage_has_the_limits_of_a_set_up_and_of_a_first_step(pipe: tuple[int, int]) -> None:
    """Although the median of the steps before it is known, and a step of it may take no longer than 30 s."""
    now = [0.0]
    heart = Heartbeat(pipe[1], clock=lambda: now[0])
    heart.allow(hang_seconds=None, step_seconds=2.0, bytes_per_node=5e9, compiled=False)
    entered: list[int] = []
    forgotten: list[int] = []
    stages = SimpleNamespace(
        is_due=lambda step: step == 7, enter=lambda step, rate: entered.append(step), summary=lambda: {"stage": 2}
    )
    trainer: Any = SimpleNamespace(
        context=SimpleNamespace(heartbeat=heart, report=lambda event, **values: None),
        stages=stages,
        profiler=SimpleNamespace(allowed_seconds=None),
        step_sync=SimpleNamespace(state_check=SimpleNamespace(forget=forgotten.append)),
    )
    for step in range(1, 10):
        Trainer._enter_stage(trainer, step, 1e-4)
        now[0] += 1.0
    found = beats(pipe[0])
    assert entered == list(range(1, 10))
    assert forgotten == [6]  # what a check of the state compares with the next update
    assert found[5] == (6, "step", 30.0)
    assert found[6:8] == [(7, "set-up", 700.0), (7, "step", 340.0)]
    assert found[8] == (8, "step", 30.0)
