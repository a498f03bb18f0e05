"""Synthesized runs: a healthy one, and what changes it. No tests here."""

import functools
import math
import random
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from scaletrain_cli.diagnosis.case import Case
from scaletrain_cli.diagnosis.checks import diagnose
from scaletrain_cli.diagnosis.findings import Finding
from scaletrain_cli.diagnosis.history import History, Validation
from scaletrain_cli.plan import make_plan
from scaletrain_cli.plan.result import RunPlan
from scaletrain_cli.spec import RunSpec
from scaletrain_cli.spec.loading import parse_spec
from scaletrain_cli.telemetry.run import Telemetry
from scaletrain_cli.telemetry.series import Series

TEXT = """
schema: scaletrain/v1
name: synthesized
model: {family: llama, hidden_size: 512, num_hidden_layers: 4, num_attention_heads: 8, intermediate_size: 1024,
  vocab_size: 32000, seq_len: 512}
data: {source: python-stdlib, tokenizer: {kind: bpe, vocab_size: 32000}}
training:
  global_batch_size: 64
  steps: 2000
  optimizer: {name: adamw, lr: 6.0e-4, betas: [0.9, 0.95]}
  schedule: {name: cosine, warmup_steps: 100}
  gradient_clipping: 1.0
evaluation: {every: 200, batches: 4}
cluster: {scheduler: slurm, nodes: 1, gpus_per_node: 2, gpu: h100-sxm-80gb}
checkpoint: {every: 200}
"""
IMAGES = """
schema: scaletrain/v1
name: images
model: {family: resnet, preset: resnet-50}
data: {source: /data/imagenet}
training: {global_batch_size: 256, steps: 2000, optimizer: {name: momentum, lr: 0.1},
  schedule: {name: cosine, warmup_steps: 100}}
cluster: {scheduler: slurm, nodes: 1, gpus_per_node: 2, gpu: h100-sxm-80gb}
"""
LINES = "run.yaml"
Values = Callable[[int], float]


@functools.cache
def planned(text: str = TEXT, overrides: tuple[str, ...] = ()) -> tuple[RunSpec, RunPlan]:
    """Return a spec and its plan."""
    spec = parse_spec(text, file=LINES, base_dir=Path(), overrides=overrides)
    return spec, make_plan(spec)


def falling(start: float, end: float, noise: float = 0.02, seed: int = 0) -> Values:
    """Return a loss that falls from ``start`` to ``end`` over 2,000 steps by a power law, with noise."""
    chance = random.Random(seed)
    exponent = math.log(start / end) / math.log(2000)
    return lambda step: start * step**-exponent * (1 + chance.gauss(0, noise))


def rate_at(spec: RunSpec, step: int) -> float:
    warm_up = spec.training.schedule.warmup_steps
    return spec.training.optimizer.lr * min(1.0, step / max(1, warm_up))


def case(
    *overrides: str,
    text: str = TEXT,
    steps: Sequence[int] = range(1, 1001),
    events: Sequence[Mapping[str, Any]] = (),
    validations: Sequence[float] = (),
    more: Mapping[str, Values] | None = None,
    **columns: Values,
) -> Case:
    """Return a healthy run with other ``columns``, by step. ``validations``: losses, every 200 steps."""
    spec, plan = planned(text, overrides)
    chance = random.Random(1)
    planned_seconds = plan.time.step
    healthy: dict[str, Values] = {
        "loss": falling(10.4, 3.2),
        "grad_norm": lambda step: 0.4 * math.exp(chance.gauss(0, 0.1)) + 1.5 / step,
        "learning_rate": lambda step: rate_at(spec, step),
        "data_wait": lambda step: 0.001 * planned_seconds,
        "step_seconds": lambda step: planned_seconds * (1.02 + 0.01 * chance.random()),
        "memory_bytes": lambda step: 5e9 + min(step, 20) * 1e7,
        "attempt": lambda step: 1.0,
        "time": lambda step: 1e9 + step * planned_seconds,
    }
    made = healthy | columns | dict(more or {})
    filled = {name: array("d", [values(step) for step in steps]) for name, values in made.items()}
    found = [Validation(200 * number, loss, 256, {}) for number, loss in enumerate(validations, 1)]
    return Case(spec, plan, History(list(steps), filled, found, True, 1), events, spec_lines=spec.lines)


def rows(subject: str, steps: Sequence[int] = range(25, 1001, 25), **columns: float | Values) -> Series:
    """Return a series with a row for each of ``steps``; a column is a value, or a function of the step."""
    values = {name: [value(step) if callable(value) else value for step in steps] for name, value in columns.items()}
    times = [1e9 + step for step in steps]
    return Series(subject, times, list(steps), [1] * len(steps), values, values, values)


def observed(
    given: Case,
    *,
    ranks: Sequence[Mapping[str, float | Values]] = (),
    gpus: Sequence[Mapping[str, float | Values]] = (),
    node: Mapping[str, float | Values] | None = None,
    layers: Mapping[str, Mapping[str, float | Values]] | None = None,
) -> Case:
    """Return the case with telemetry: columns by rank, by GPU, of one node, and by layer."""
    telemetry = Telemetry(
        1,
        {rank: rows(f"rank {rank}", **columns) for rank, columns in enumerate(ranks)},
        {f"gpu07/{index}": rows(f"gpu {index}", **columns) for index, columns in enumerate(gpus)},
        {} if node is None else {"gpu07": rows("node", **node)},
        {name: rows(f"layer {name}", **columns) for name, columns in (layers or {}).items()},
    )
    return replace(given, telemetry=telemetry)


def findings(given: Case) -> dict[str, Finding]:
    """Return the findings of a case by their code, without the table's name; no check may fail."""
    found = diagnose("r", given)
    assert [str(reason) for reason in found.not_concluded if reason.code == "diagnosis.check-failed"] == []
    return {finding.code.removeprefix("diagnosis."): finding for finding in found.findings}
