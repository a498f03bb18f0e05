"""The run spec as a whole (schema scaletrain/v1), and the checks that span sections."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from typing import Annotated, Literal

from pydantic import Field, StringConstraints, WithJsonSchema

from scaletrain_cli.spec.cluster import ClusterSpec
from scaletrain_cli.spec.layout import LayoutSpec
from scaletrain_cli.spec.model import ModelSpec, divisors
from scaletrain_cli.spec.quantities import (
    AutoSeconds,
    AutoWhole,
    Fraction,
    Positive,
    Text,
    Whole,
    WholeOrZero,
    or_word,
    parse_whole,
)
from scaletrain_cli.spec.section import Section
from scaletrain_cli.spec.training import EvaluationSpec, TrainingSpec

SCHEMA = "scaletrain/v1"
EnvName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z_][A-Za-z0-9_]{0,255}$")]
EnvValue = Annotated[str, StringConstraints(pattern=r"^[^\x00]*$", max_length=100_000)]

Budget = Annotated[
    int | Literal["unlimited"],
    or_word("unlimited", partial(parse_whole, minimum=0)),
    WithJsonSchema({"anyOf": [{"type": "integer", "minimum": 0}, {"const": "unlimited"}]}),
]


class TokenizerSpec(Section):
    """``bpe`` is trained on the corpus itself; ``file`` reads a Hugging Face ``tokenizer.json``."""

    kind: Literal["bpe", "file"] = "bpe"
    vocab_size: Whole = 32000
    path: Text | None = None


class DataSpec(Section):
    """Text to train on: ``python-stdlib``, a prepared dataset, or text / jsonl / parquet files (path or glob)."""

    source: Text
    tokenizer: TokenizerSpec = TokenizerSpec()
    validation_split: Fraction = 0.05

    def inconsistencies(self) -> Iterator[tuple[str, str]]:
        """(key, message) for each setting that contradicts another one."""
        if (self.tokenizer.kind == "file") != (self.tokenizer.path is not None):
            yield "tokenizer.path", "is needed with kind: file, and only there."


class CheckpointSpec(Section):
    """When the full state is saved and how many are kept. ``dir: auto`` is the run directory."""

    every: AutoWhole = "auto"
    keep: Whole = 3
    asynchronous: bool = Field(default=True, alias="async")
    dir: Text = "auto"


class SpikeSpec(Section):
    """Loss above ``factor`` times the running median, and what to do about it."""

    factor: Positive = 3.0
    action: Literal["warn", "rollback"] = "warn"


class GuardSpec(Section):
    """What ends or mends a run that goes wrong. ``hang`` is the longest wait for a collective."""

    nan: Literal["stop"] = "stop"
    spike: SpikeSpec = SpikeSpec()
    hang: AutoSeconds = "auto"


class RestartsSpec(Section):
    """How often a run may be restarted, by reason of its end."""

    preemption: Budget = "unlimited"
    node: WholeOrZero = 10
    crash: WholeOrZero = 3
    oom: WholeOrZero = 0


class WandbSpec(Section):
    """Mirror of metrics.jsonl in Weights & Biases; one run over all attempts."""

    project: Text = "scaletrain"
    mode: Literal["online", "offline", "disabled"] = "disabled"


class TrackingSpec(Section):
    """Where metrics are mirrored besides the run directory."""

    wandb: WandbSpec = WandbSpec()
    log_every: Whole = 1


class PlannerSpec(Section):
    """Whose memory and overlap habits are modelled; only ``deepspeed`` can be submitted.

    ``attention``: whether the scores are kept as a matrix; ``auto`` follows the framework and the device.
    """

    framework: Literal["deepspeed", "fsdp", "megatron", "nanotron"] = "deepspeed"
    attention: Literal["auto", "flash", "materialised"] = "auto"


class RunSpec(Section):
    """One training run, from model to restart policy."""

    schema_version: Literal["scaletrain/v1"] = Field(alias="schema")
    name: Annotated[Text, StringConstraints(max_length=200)]
    model: ModelSpec
    data: DataSpec
    training: TrainingSpec
    evaluation: EvaluationSpec = EvaluationSpec()
    layout: LayoutSpec = LayoutSpec()
    cluster: ClusterSpec = ClusterSpec()
    checkpoint: CheckpointSpec = CheckpointSpec()
    guard: GuardSpec = GuardSpec()
    restarts: RestartsSpec = RestartsSpec()
    tracking: TrackingSpec = TrackingSpec()
    planner: PlannerSpec = PlannerSpec()
    env: dict[EnvName, EnvValue] = {}
    secret_env: list[EnvName] = Field(
        default=[], description="names only; values come from the submitter's environment"
    )

    @property
    def transformer(self) -> ModelSpec:
        """The model, where only a transformer will do."""
        return self.model

    @property
    def world_size(self) -> int:
        """Number of ranks, one per accelerator."""
        return self.cluster.nodes * self.cluster.gpus_per_node

    @property
    def total_steps(self) -> int:
        """Optimizer steps, from ``training.steps`` or rounded up from ``training.tokens``."""
        if self.training.steps is not None:
            return self.training.steps
        assert self.training.tokens is not None
        return math.ceil(self.training.tokens / (self.training.global_batch_size * self.model.seq_len))

    def inconsistencies(self) -> Iterator[tuple[str, str]]:
        """(dotted key, message) for each contradiction between sections."""
        model, layout = self.model, self.layout
        if self.training.tokens is not None and self.training.schedule.warmup_steps > self.total_steps:
            yield "training.schedule.warmup_steps", f"must not exceed {self.total_steps} steps, which make the tokens."
        if self.data.tokenizer.kind == "bpe" and self.data.tokenizer.vocab_size > model.vocab_size:
            yield "data.tokenizer.vocab_size", f"must not exceed model.vocab_size = {model.vocab_size}."
        for key in ("tensor_parallel", "sequence_parallel"):
            degree = getattr(layout, key)
            if degree != "auto" and model.num_attention_heads % degree:
                yield (
                    f"layout.{key}",
                    f"must divide {model.num_attention_heads} attention heads. "
                    f"Use {divisors(model.num_attention_heads)}.",
                )
        if layout.pipeline_parallel != "auto" and layout.pipeline_parallel > model.num_hidden_layers:
            yield "layout.pipeline_parallel", f"must not exceed {model.num_hidden_layers} layers."
        if layout.expert_parallel not in ("auto", 1) and model.num_experts % int(layout.expert_parallel or 1):
            yield "layout.expert_parallel", f"must divide num_experts = {model.num_experts}."
        both = sorted(set(self.secret_env) & self.env.keys())
        if both:
            yield "secret_env", f"{', '.join(both)} also stands in env, in clear; remove it there."
