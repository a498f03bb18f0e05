"""Runs to launch: a small spec, a plan whose figures nobody reads, and children that find this package."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any

import pytest

from scaletrain_cli.launch.local import LocalScheduler
from scaletrain_cli.launch.submission import create_run
from scaletrain_cli.plan import result
from scaletrain_cli.rundir.journal import read_events
from scaletrain_cli.rundir.paths import RunDir
from scaletrain_cli.rundir.record import RunRecord
from scaletrain_cli.spec import RunSpec, parse_spec

PROJECT = Path(__file__).parent.parent.parent
ENGINE = "tests.launch.fake_engine"
LOCAL = LocalScheduler(engine=ENGINE)

SPEC = """
schema: scaletrain/v1
name: fake
model: {family: llama, hidden_size: 8, num_hidden_layers: 1, num_attention_heads: 1, intermediate_size: 8,
        vocab_size: 64, seq_len: 8}
data: {source: python-stdlib, tokenizer: {kind: bpe, vocab_size: 64}}
training: {global_batch_size: 4, micro_batch_size: 1, steps: 20, precision: fp32}
cluster: {scheduler: local, nodes: 1, gpus_per_node: 2, gpu: cpu, grace_seconds: 20}
"""


@dataclass(frozen=True)
class MadeRun:
    run: RunDir
    record: RunRecord

    def log(self, attempt: int, rank: int) -> str:
        paths = list((self.run.attempt(attempt) / "logs").glob(f"*-{rank:05d}.log"))
        return paths[0].read_text(encoding="utf-8") if paths else ""

    def events(self, name: str) -> list[dict[str, Any]]:
        return [event for event in read_events(self.run) if event["event"] == name]


def make_spec(*overrides: str, env: dict[str, str] | None = None, fake: dict[str, Any] | None = None) -> RunSpec:
    spec = parse_spec(SPEC, file="fake.yaml", base_dir=PROJECT, overrides=overrides)
    return spec.model_copy(update={"env": {**(env or {}), "FAKE": json.dumps(fake or {})}})


def make_plan(spec: RunSpec) -> result.RunPlan:
    """A plan of the right shape."""
    stage = {field.name: 1 for field in fields(result.StageMemory)}
    layout = {field.name: 1 for field in fields(result.Layout)}
    layout |= {  # type: ignore[dict-item]
        "world_size": spec.world_size,
        "activation_checkpointing": "none",
        "offload": "none",
        "cross_entropy": "whole",
    }
    return result.RunPlan(
        model=result.ModelSize(1, 1, 6.0),
        layout=result.Layout(**layout),  # type: ignore[arg-type]
        memory=result.Memory(**stage, capacity=2, fits=True, by_stage=(result.StageMemory(**stage),)),
        time=result.Time(**{field.name: 1.0 for field in fields(result.Time) if field.default is MISSING}),
        network=result.Network(result.PerStepBytes(0, 0, 0, 0, 0)),
        durability=result.Durability(1, 1.0, 1, 1.0, 1.0, True),
        cost=result.Cost(None, "none", None, None, None),
    )


def wait_until(condition: Callable[[], Any], what: str, seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds} s: {what}"
        time.sleep(0.02)


def is_running(pid: int) -> bool:
    """Whether the process lives; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.fixture(autouse=True)
def children_find_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    inherited = os.environ.get("PYTHONPATH")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(PROJECT), *([inherited] if inherited else [])]))


@pytest.fixture
def make_run() -> Callable[..., MadeRun]:
    def make(*overrides: str, run_id: str | None = None, env: dict[str, str] | None = None, **fake: Any) -> MadeRun:
        spec = make_spec(*overrides, env=env, fake=fake)
        made = create_run(spec, make_plan(spec), run_id)
        return MadeRun(made.run, made.record)

    return make
