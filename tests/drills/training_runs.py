"""Small real runs for the drills: submitted to the local scheduler, disturbed, and compared bit by bit."""

import json
import math
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from scaletrain_cli.launch.backends.local.backend import LocalBackend, live_agents
from scaletrain_cli.launch.node.record import read_node_records
from scaletrain_cli.launch.submit import create_run, submit_run
from scaletrain_cli.plan import make_plan
from scaletrain_cli.rundir.checkpoints import list_checkpoints, verify
from scaletrain_cli.rundir.journal import read_events, read_metrics
from scaletrain_cli.rundir.paths import RunDir
from scaletrain_cli.spec import RunSpec, parse_spec
from tests.engine.checkpoint.whole_state import whole_state
from tests.waiting import wait_until

STEPS = 40
_SPEC = """
schema: scaletrain/v1
name: drill
model: {{family: llama, hidden_size: 64, num_hidden_layers: 2, num_attention_heads: 4, num_key_value_heads: 2,
        intermediate_size: 128, vocab_size: 512, seq_len: 32, tie_word_embeddings: true}}
data: {{source: {dataset}, tokenizer: {{vocab_size: 512}}}}
training:
  {{global_batch_size: 8, micro_batch_size: 2, steps: {steps}, precision: fp32,
    optimizer: {{lr: 1.0e-3}}, schedule: {{warmup_steps: 5}}}}
evaluation: {{every: 20, batches: 1}}
layout: {{zero_stage: 2, activation_checkpointing: none}}
cluster: {{gpu: cpu, gpus_per_node: 2, grace_seconds: 60}}
checkpoint: {{every: 10, keep: 2}}
"""


@dataclass(frozen=True)
class Drill:
    """One submitted run, and the faults that a test may inject into it."""

    run: RunDir
    scheduler: LocalBackend

    def active(self) -> bool:
        return self.scheduler.job(self.run, None).state == "running"  # type: ignore[arg-type]

    def wait_for(self, reached: Callable[[], Any]) -> Any:
        """Return the first true result of the condition; fail if the run ends before."""
        while True:
            goes_on = self.active()  # which takes longer than most conditions
            for _ in range(5):
                if answer := reached():
                    return answer
                time.sleep(0.02)
            if not goes_on:
                break
        raise AssertionError(f"did not happen; events: {self.events()}; log: {self.log()[-3000:]}")

    def wait_for_step(self, step: int) -> None:
        self.wait_for(lambda: self.step() >= step)

    def wait_for_end(self) -> None:
        wait_until(lambda: not self.active(), "the run has ended")

    def step(self) -> int:
        lines = read_metrics(self.run)
        return lines[-1]["step"] if lines else 0

    def agent_pid(self) -> int:
        return int(self.wait_for(lambda: live_agents(self.run))[0].pid)

    def preempt(self, number: int = signal.SIGTERM) -> None:
        """Signal the node agent, as a scheduler does."""
        os.kill(self.agent_pid(), number)

    def rank_pids(self) -> list[int]:
        """Return the process ids of the latest attempt, by rank, once it has started them."""
        attempt = self.wait_for(self.run.attempts)[-1]
        return self.wait_for(lambda: [rank.pid for node in read_node_records(self.run, attempt) for rank in node.ranks])

    def events(self, name: str | None = None) -> list[dict[str, Any]]:
        return [event for event in read_events(self.run) if name in (None, event["event"])]

    def beginnings(self) -> list[dict[str, Any]]:
        """Return the event of the start of training of each attempt, new or resumed."""
        return [event for event in self.events() if event["event"] in ("started", "resumed")]

    def log(self) -> str:
        return "\n".join(path.read_text() for path in sorted(self.run.path.glob("attempts/*/logs/*-00000.log")))

    def losses(self) -> list[float]:
        return [line["loss"] for line in read_metrics(self.run)]

    def validation_losses(self) -> list[float]:
        return [line["validation_loss"] for line in read_metrics(self.run) if "validation_loss" in line]

    def final_state(self) -> dict[str, Any]:
        """Return the last checkpoint: every matrix of every kind, the common state of all ranks, each rank's file."""
        newest = list_checkpoints(self.run.checkpoints)[-1]
        assert newest.step == STEPS
        assert verify(newest) == []
        alike = json.loads((newest.path / "state.json").read_text())
        return {
            "alike": alike,
            "files": {name: file.sha256 for name, file in newest.files.items()},
            **whole_state(newest.path),
        }


def spec_text(dataset: Path) -> str:
    """Return the text of the spec of a small run on this machine."""
    return _SPEC.format(dataset=dataset, steps=STEPS)


def drill_spec(dataset: Path, **overrides: Any) -> RunSpec:
    """Return the spec of a small run; keys of ``overrides`` are dotted spec keys with ``__`` for the dot."""
    sets = [f"{key.replace('__', '.')}={value}" for key, value in overrides.items()]
    return parse_spec(spec_text(dataset), file="drill.yaml", base_dir=Path(), overrides=sets)


def slowed(steps: dict[int, int]) -> str:
    """Return faults for $SCALETRAIN_FAULT that slow each attempt down from its step on.

    A test that strikes before that step loses no time by it, and one that a busy machine delays still strikes in time.
    """
    return "; ".join(f"slow-rank attempt={attempt} step={step} seconds=1" for attempt, step in steps.items())


def submit_drill(dataset: Path, **overrides: Any) -> Drill:
    """Submit a small run to the local scheduler; ``overrides`` as in ``drill_spec``."""
    spec = drill_spec(dataset, **overrides)
    created = create_run(spec, make_plan(spec))
    scheduler = LocalBackend()
    submit_run(created.run, created.record, scheduler)
    return Drill(created.run, scheduler)


def differences(first: Any, second: Any, path: str = "") -> list[str]:
    """Return the places at which two nested states differ, to the bit."""
    if isinstance(first, torch.Tensor):
        same = isinstance(second, torch.Tensor) and first.dtype == second.dtype and torch.equal(first, second)
        return [] if same else [path]
    if isinstance(first, dict):
        if list(first) != list(second):
            return [f"{path}: keys"]
        return [found for key in first for found in differences(first[key], second[key], f"{path}/{key}")]
    if isinstance(first, list | tuple):
        if len(first) != len(second):
            return [f"{path}: length"]
        pairs = enumerate(zip(first, second, strict=True))
        return [found for index, (a, b) in pairs for found in differences(a, b, f"{path}/{index}")]
    if isinstance(first, float) and isinstance(second, float) and math.isnan(first) and math.isnan(second):
        return []
    simple = isinstance(first, int | float | str | bytes | bool | None.__class__)
    return [path] if simple and first != second else []


def assert_same_run(hurt: Drill, undisturbed: Drill) -> None:
    """Assert the same losses, weights, optimizer state and random state, to the bit."""
    assert hurt.events("finished"), hurt.events()
    left = {path.name.partition("step-")[0] for path in hurt.run.checkpoints.iterdir()}
    assert left <= {"", "damaged-"}, left
    assert hurt.losses() == undisturbed.losses()
    assert hurt.validation_losses() == undisturbed.validation_losses()
    assert differences(hurt.final_state(), undisturbed.final_state()) == []
