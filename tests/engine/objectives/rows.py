"""Rows of examples and preference pairs of chance tokens, and training on them in any layout."""

from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from scaletrain_cli.engine.compose import compose
from scaletrain_cli.engine.data.batches import BatchReader, padded_to
from scaletrain_cli.engine.data.rows import RowSequences
from scaletrain_cli.engine.data.sample_order import sample_at
from scaletrain_cli.engine.objectives.reference import ReferencePass
from scaletrain_cli.engine.parallel.mesh import build_mesh
from scaletrain_cli.engine.process_group import RankConsensus
from scaletrain_cli.engine.stages import trained_at
from scaletrain_cli.engine.step import build_stepper
from scaletrain_cli.plan import make_plan
from scaletrain_cli.rundir.paths import RunDir
from scaletrain_cli.spec import RunSpec, parse_spec
from scaletrain_cli.spec.training import learning_rate
from tests.engine.alone import context_of

VOCAB, LENGTH, STEPS = 64, 24, 20
SPEC = f"""
schema: scaletrain/v1
name: examples
model: {{family: llama, hidden_size: 32, num_hidden_layers: 2, num_attention_heads: 4, num_key_value_heads: 4,
        intermediate_size: 48, vocab_size: {VOCAB}, seq_len: {LENGTH}, initializer_range: 0.2}}
data: {{source: examples.jsonl, tokenizer: {{vocab_size: {VOCAB}}}}}
training:
  global_batch_size: 8
  micro_batch_size: 2
  steps: {STEPS}
  precision: fp32
  optimizer: {{lr: 2.0e-3, weight_decay: 0.0}}
  schedule: {{name: constant}}
cluster: {{gpu: cpu, gpus_per_node: 1}}
layout: {{zero_stage: 0}}
"""


def spec_of(*overrides: str, text: str = SPEC) -> RunSpec:
    return parse_spec(text, file="examples.yaml", base_dir=Path(), overrides=overrides)


@dataclass(frozen=True)
class Example:
    """Tokens of a prompt and of an answer, which the loss counts."""

    prompt: list[int]
    answer: list[int]

    @property
    def tokens(self) -> list[int]:
        return self.prompt + self.answer


def examples(count: int, seed: int = 0) -> list[Example]:
    """Return examples of 5 to 24 tokens; in each the answer repeats the prompt with gaps, so that it can be learned."""
    draw = np.random.default_rng(seed)
    found = []
    for _ in range(count):
        prompt = draw.integers(2, VOCAB, draw.integers(3, 12)).tolist()
        answer = [token for token in prompt if draw.random() < 0.7] or [2]
        found.append(Example(prompt, [*answer, 1]))
    return found


def pairs(count: int, seed: int = 0) -> list[tuple[Example, Example]]:
    """Return chosen and rejected answers, of different lengths, to the same prompts."""
    draw = np.random.default_rng(seed)
    found = []
    for chosen in examples(count, seed):
        rejected = draw.integers(2, VOCAB, draw.integers(1, 12)).tolist()
        found.append((chosen, Example(chosen.prompt, [*rejected, 1])))
    return found


def row_sequences(rows: list[list[Example]], *, is_pairs: bool = False, weights: bool = False) -> RowSequences:
    """Return rows of one or several examples each. ``weights``: of the answers' tokens, in turn 1, 0.5 and 2."""
    documents = [example for row in rows for example in row]
    factors = np.resize(np.array([1.0, 0.5, 2.0]) if weights else np.ones(1), sum(len(d.tokens) for d in documents))
    counts = np.concatenate([[0.0] * len(d.prompt) + [1.0] * len(d.answer) for d in documents])
    row_ends = np.cumsum([len(row) for row in rows])
    weight = (counts * factors).astype(np.float32)
    ends = np.cumsum([len(d.tokens) for d in documents])
    by_row = np.split(weight, ends[row_ends - 1])[:-1]
    return RowSequences(
        tokens=np.concatenate([d.tokens for d in documents]).astype(np.uint16),
        weights=weight,
        document_ends=ends.astype(np.int64),
        row_ends=row_ends.astype(np.int64),
        totals=np.array([part.astype(np.float64).sum() for part in by_row]),
        seq_len=LENGTH,
        pairs=is_pairs,
        packed=any(len(row) > 1 for row in rows),
        weighted=weights,
    )


def order(spec: RunSpec, count: int) -> list[int]:
    total = spec.training.global_batch_size * spec.total_steps
    return [sample_at(place, seed=spec.training.seed, samples=count) for place in range(total)]


@dataclass(frozen=True)
class Course:
    """The measures of a training on one rank, by step, and the reference that it used."""

    losses: list[float]
    norms: list[float]
    measures: list[dict[str, float]]
    reference: Tensor | None


def train(spec: RunSpec, rows: RowSequences, folder: Path) -> Course:
    """Train on rows on this rank of a process group; preference pairs with a reference from the first weights."""
    layout, device = make_plan(spec).layout, torch.device("cpu")
    mesh = build_mesh(layout)
    composed = compose(spec, layout, mesh, device, trained=trained_at(spec, 1))
    stepper = build_stepper(composed, mesh, device, spec.training)
    reader = BatchReader(rows, layout, mesh, spec.training.seed, False, padded_to=padded_to(layout), padding_multiple=4)
    if composed.objective.reads_pairs:
        context = context_of(RunDir(folder), SimpleNamespace(spec=spec), consensus=RankConsensus(600.0))
        reference = ReferencePass(context, mesh, stepper, {"data": ("tokens",)}, lambda: True)
        found = reference.with_reference(reader, "train", 0)
        assert found is not None
        reader = found
        reference.check(reader.batch(1).micro_batches())
    losses, norms, measures = [], [], []
    for step in range(1, spec.total_steps + 1):
        for group in composed.optimizer.param_groups:
            group["lr"] = learning_rate(step, spec.total_steps, spec.training)
        result = stepper.train(reader.batch(step).micro_batches())
        losses.append(result.loss.item())
        norms.append(float(result.grad_norm))
        measures.append({name: value.item() for name, value in result.measures.items()})
    kept = None if reader.reference is None else torch.from_numpy(reader.reference.copy())
    return Course(losses, norms, measures, kept)


def largest_difference(found: list[float], expected: list[float]) -> float:
    return max(abs(a - b) / max(abs(b), 1e-12) for a, b in zip(found, expected, strict=True))


def rank() -> int:
    return dist.get_rank()
