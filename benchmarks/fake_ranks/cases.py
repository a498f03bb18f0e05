"""The layouts of 8B and 70B models that are held beside their plans, and one row of the table."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from scaletrain_cli.plan import find_accelerator, make_plan
from scaletrain_cli.plan.result import Layout, RunPlan
from scaletrain_cli.plan.speed.step_time import stage_bytes
from scaletrain_cli.spec import RunSpec, parse_spec

_SPEC = """
schema: scaletrain/v1
name: fake-ranks
model: {preset: llama-3.1-8b, seq_len: 4096}
data: {source: python-stdlib, tokenizer: {kind: bpe, vocab_size: 1000}}
training: {global_batch_size: 1, steps: 1000, precision: bf16, compile: false, gradient_clipping: 1.0}
cluster: {nodes: 1, gpus_per_node: 8, gpu: mi355x-288gb, scheduler: slurm}
"""


@dataclass(frozen=True)
class Case:
    """A layout of a model on ``ranks`` ranks.

    ``shard``: layout.zero_shard_size (MiCS); ``secondary_shard``: layout.zero_secondary_shard_size (hpZ).
    """

    model: str
    ranks: int
    zero: int
    tensor: int = 1
    pipeline: int = 1
    sequence: int = 1
    context: int = 1
    recompute: str = "full"
    micro_batch: int = 1
    accumulation: int = 2
    shard: int = 0
    secondary_shard: int = 0
    others: tuple[str, ...] = ()

    @property
    def data(self) -> int:
        return self.ranks // (self.tensor * self.pipeline * self.sequence * self.context)

    def spec(self) -> RunSpec:
        """Return the run; its layout is given completely."""
        overrides = {
            "model.preset": self.model,
            "training.global_batch_size": self.data * self.micro_batch * self.accumulation,
            "training.micro_batch_size": self.micro_batch,
            "cluster.nodes": max(1, self.ranks // 8),
            "cluster.gpus_per_node": min(8, self.ranks),
            "layout.zero_stage": self.zero,
            "layout.tensor_parallel": self.tensor,
            "layout.pipeline_parallel": self.pipeline,
            "layout.sequence_parallel": self.sequence,
            "layout.context_parallel": self.context,
            "layout.activation_checkpointing": self.recompute,
        }
        if self.shard:
            overrides["layout.zero_shard_size"] = self.shard
        if self.secondary_shard:
            overrides["layout.zero_secondary_shard_size"] = self.secondary_shard
        given = [f"{key}={value}" for key, value in overrides.items()]
        return parse_spec(_SPEC, file="fake-ranks.yaml", base_dir=Path(), overrides=[*given, *self.others])

    def __str__(self) -> str:
        degrees = {"tp": self.tensor, "pp": self.pipeline, "sp": self.sequence, "cp": self.context, "dp": self.data}
        parts = [f"zero{self.zero}", *(f"{name}{degree}" for name, degree in degrees.items() if degree > 1)]
        shards = {"mics": self.shard, "hpz": self.secondary_shard}
        parts += [f"{name}{size}" for name, size in shards.items() if size]
        return " ".join([*parts, self.recompute])


def planned(case: Case) -> tuple[RunSpec, RunPlan]:
    """Return the run of a case and its plan."""
    spec = case.spec()
    plan = make_plan(spec)
    assert plan.layout.world_size == case.ranks
    return spec, plan


def planned_bytes(spec: RunSpec, layout: Layout, stage: int) -> dict[str, int]:
    """Return the bytes by axis that the plan expects a rank of a stage to send, those above 0."""
    found = stage_bytes(spec, layout, find_accelerator(spec.cluster), stage)
    return {axis: size for axis, size in vars(found).items() if size}


_8B, _70B = "llama-3.1-8b", "llama-3.1-70b"


def cases() -> Iterator[Case]:
    """Yield the cases of the table."""
    for zero in (1, 2, 3):
        for recompute in ("none", "full"):
            yield Case(_8B, 8, zero, recompute=recompute)
        yield Case(_8B, 512, zero)
        yield Case(_8B, 64, zero, tensor=4)
        yield Case(_8B, 64, zero, sequence=4, recompute="none")
        yield Case(_8B, 64, zero, tensor=2, sequence=2)
        yield Case(_70B, 64, zero, tensor=8)
    for recompute in ("none", "full"):
        yield Case(_8B, 64, 1, pipeline=4, recompute=recompute, accumulation=8)
    yield Case(_8B, 64, 1, tensor=2, pipeline=2, sequence=2, accumulation=4)
    yield Case(_8B, 8, 3, recompute="selective")
    yield Case(_8B, 8, 1, recompute="selective", others=("layout.selective_scope=attention",))
    for sequence in (1, 8):
        yield Case(_8B, 64, 3, sequence=sequence, secondary_shard=8)
    for zero in (2, 3):
        yield Case(_8B, 64, zero, shard=8)
    yield Case(_8B, 64, 1, context=4)
    yield Case(_8B, 64, 1, sequence=2, context=4, recompute="none")
    yield Case(_8B, 64, 3, tensor=2, context=2)
    yield Case(_70B, 64, 3)
    yield Case(_70B, 512, 3, sequence=8)
    yield Case(_70B, 512, 1, tensor=8, pipeline=8, accumulation=16)
    yield Case(_70B, 4096, 1, tensor=8, pipeline=8, accumulation=16)
    yield Case(_70B, 4096, 3)


def smaller(case: Case, *others: str) -> Case:
    """Return the case with more overrides of the spec."""
    return replace(case, others=(*case.others, *others))
