"""The run spec as a whole (schema scaletrain/v1), and the checks that span sections."""

import math
from collections.abc import Iterator
from functools import partial
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, PrivateAttr, StringConstraints, Tag, WithJsonSchema

from scaletrain_cli.errors import Problem, UsageError
from scaletrain_cli.spec.cluster import ClusterSpec
from scaletrain_cli.spec.code import CodeSpec
from scaletrain_cli.spec.layout import LayoutSpec
from scaletrain_cli.spec.model import ModelSpec, divisors
from scaletrain_cli.spec.quantities import (
    AutoSeconds,
    AutoWhole,
    Fraction,
    Matching,
    Positive,
    Text,
    Whole,
    WholeOrZero,
    or_word,
    parse_whole,
)
from scaletrain_cli.spec.section import LEFT_OUT, Section, used_when, where, where_not
from scaletrain_cli.spec.source import Source
from scaletrain_cli.spec.training import EvaluationSpec, TrainingSpec
from scaletrain_cli.spec.vision import VISION, ClipSpec, ConvNextSpec, ResNetSpec, VitSpec

SCHEMA = "scaletrain/v1"
EnvName = Annotated[
    str,
    Matching(
        r"[A-Za-z_][A-Za-z0-9_]*",
        256,
        "must be the name of an environment variable: letters, digits and _, not starting with a digit",
    ),
]
EnvValue = Annotated[str, StringConstraints(pattern=r"^[^\x00]*$", max_length=100_000)]

Budget = Annotated[
    int | Literal["unlimited"],
    or_word("unlimited", partial(parse_whole, minimum=0)),
    WithJsonSchema({"anyOf": [{"type": "integer", "minimum": 0}, {"const": "unlimited"}]}),
]

# Kinds of model by the name that pydantic gives them in errors; both families of ModelSpec are one kind.
MODELS: dict[str, type[Section]] = {"transformer": ModelSpec, **VISION}
FAMILIES = ["llama", "gpt", *VISION]


def model_kind(model: Any) -> str:
    """The key in MODELS of a model section, raw or validated; what names no family is read as a transformer."""
    family = model.get("family") if isinstance(model, dict) else getattr(model, "family", None)
    return family if isinstance(family, str) and family in VISION else "transformer"


AnyModel = Annotated[
    Annotated[ModelSpec, Tag("transformer")]
    | Annotated[ResNetSpec, Tag("resnet")]
    | Annotated[ConvNextSpec, Tag("convnext")]
    | Annotated[VitSpec, Tag("vit")]
    | Annotated[ClipSpec, Tag("clip")],
    Discriminator(model_kind),
]


class TokenizerSpec(Section):
    """``bpe`` is trained on the corpus itself; ``file`` reads a Hugging Face ``tokenizer.json``."""

    kind: Literal["bpe", "file"] = "bpe"
    vocab_size: Annotated[Whole, used_when(where("data.tokenizer.kind", "bpe"))] = 32000
    path: Text | None = None


class DataSpec(Section):
    """Text to train on: ``python-stdlib``, a prepared dataset, or text / jsonl / parquet files (path or glob)."""

    source: Text
    tokenizer: TokenizerSpec = LEFT_OUT
    validation_split: Fraction = 0.05
    loss_mask: Literal["none", "document_starts"] = Field(
        default="none", description="document_starts: no document's first token is predicted from the one before"
    )
    skip: tuple[tuple[Whole, Whole], ...] = Field(
        default=(), description="windows of batches that are not trained on: [[first, last], ...], counted from 1"
    )

    def inconsistencies(self) -> Iterator[tuple[str, str]]:
        """(key, message) for each setting that contradicts another one."""
        if (self.tokenizer.kind == "file") != (self.tokenizer.path is not None):
            yield "tokenizer.path", "is needed with kind: file, and only there."
        for first, last in self.skip:
            if first > last:
                yield "skip", f"[{first}, {last}] begins after it ends. Write [{last}, {first}]."


class CheckpointSpec(Section):
    """When the full state is saved and how many are kept. ``dir: auto`` is the run directory."""

    every: AutoWhole = "auto"
    keep: Whole = 3
    keep_every: Whole | None = Field(default=None, description="also kept, for ever: each whose step is a multiple")
    asynchronous: bool = Field(default=True, alias="async")
    dir: Text = "auto"


class SpikeSpec(Section):
    """Loss above ``factor`` times its median, or loss or gradient norm far beyond its spread, and what to do about it.

    After ``retries`` rollbacks to the same checkpoint the run stops for good.
    """

    factor: Positive = 3.0
    patience: Whole = Field(default=3, description="steps in a row that make a spike")
    action: Literal["warn", "rollback"] = "rollback"
    retries: Annotated[
        WholeOrZero, used_when(where("guard.spike.action", "rollback"), where("guard.nan", "rollback"))
    ] = Field(default=3, description="rollbacks to one checkpoint before the run stops")


class GuardSpec(Section):
    """What ends or mends a run that goes wrong. ``hang`` is how long a rank may be silent in a step.

    ``preflight``: whether ranks measure their devices and links before step 1; ``auto`` does on GPUs.
    """

    nan: Literal["stop", "rollback"] = "stop"
    spike: SpikeSpec = LEFT_OUT
    hang: AutoSeconds = "auto"
    preflight: Literal["auto", "always", "never"] = "auto"


class RestartsSpec(Section):
    """How often a run may be restarted, by reason of its end."""

    preemption: Budget = "unlimited"
    node: WholeOrZero = 10
    crash: WholeOrZero = 3
    oom: WholeOrZero = 0


class WandbSpec(Section):
    """Mirror of metrics.jsonl in Weights & Biases; one run over all attempts."""

    project: Annotated[Text, used_when(where_not("tracking.wandb.mode", "disabled"))] = "scaletrain"
    mode: Literal["online", "offline", "disabled"] = "disabled"


class TrackingSpec(Section):
    """Where metrics are mirrored besides the run directory."""

    wandb: WandbSpec = LEFT_OUT
    log_every: Whole = 1


class PlannerSpec(Section):
    """Whose memory and overlap habits are modelled; only ``deepspeed`` can be submitted.

    ``attention``: whether the scores are kept as a matrix; ``auto`` follows the framework and the device.
    ``autocast``: of vision networks, whether torch.autocast computes in 16 bits over fp32 weights.
    ``search``: what ``auto`` in the layout may become: what this engine runs, or everything that can be modelled.
    """

    framework: Literal["deepspeed", "fsdp", "megatron", "nanotron"] = "deepspeed"
    attention: Literal["auto", "flash", "materialised"] = "auto"
    autocast: bool = False
    search: Literal["engine", "everything"] = "engine"


class RunSpec(Section):
    """One training run, from model to restart policy."""

    schema_version: Literal["scaletrain/v1"] = Field(alias="schema")
    name: Annotated[Text, StringConstraints(max_length=200)]
    model: AnyModel
    data: DataSpec
    training: TrainingSpec
    evaluation: EvaluationSpec = LEFT_OUT
    layout: LayoutSpec = LEFT_OUT
    cluster: ClusterSpec = LEFT_OUT
    checkpoint: CheckpointSpec = LEFT_OUT
    guard: GuardSpec = LEFT_OUT
    restarts: RestartsSpec = LEFT_OUT
    tracking: TrackingSpec = LEFT_OUT
    planner: PlannerSpec = LEFT_OUT
    code: CodeSpec = LEFT_OUT
    env: dict[EnvName, EnvValue] = {}
    secret_env: list[EnvName] = Field(default=[], description="names only; values come from the submitter's shell")
    _source: Source | None = PrivateAttr(default=None)

    def __eq__(self, other: object) -> bool:
        """Two runs are the same wherever they are written down."""
        return isinstance(other, RunSpec) and self.__dict__ == other.__dict__

    def read_from(self, source: Source) -> None:
        """Remember where each key stands, for problems that show later."""
        self._source = source

    def where(self, key: str) -> str:
        """``file:line`` of a dotted key, or of the section that lacks it; ``run spec`` without a file."""
        return self._source.place(tuple(key.split("."))) if self._source else "run spec"

    @property
    def transformer(self) -> ModelSpec:
        """The model, where only a transformer will do. Raises UsageError for a vision network."""
        if isinstance(self.model, ModelSpec):
            return self.model
        problem = Problem("run spec", "model.family", "is not a transformer of text.", self.model.family)
        raise UsageError(f"{self.model.family} can be planned, but not used here", (problem,))

    @property
    def unit(self) -> str:
        """What training consumes and rates count: ``tokens``, ``images``, or ``pairs`` of image and text."""
        return {"transformer": "tokens", "clip": "pairs"}.get(model_kind(self.model), "images")

    @property
    def units_per_sample(self) -> int:
        """Units in one of the samples that ``training.global_batch_size`` counts."""
        return self.model.seq_len if isinstance(self.model, ModelSpec) else 1

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
        return math.ceil(self.training.tokens / (self.training.global_batch_size * self.transformer.seq_len))

    def inconsistencies(self) -> Iterator[tuple[str, str]]:
        """(dotted key, message) for each contradiction between sections."""
        yield from (
            self._transformer_inconsistencies() if isinstance(self.model, ModelSpec) else self._vision_inconsistencies()
        )
        if self.training.early_stopping.patience and not self.evaluation.every:
            yield "training.early_stopping.patience", "needs a validation loss. Set evaluation.every above 0."
        both = sorted(set(self.secret_env) & self.env.keys())
        if both:
            yield "secret_env", f"{', '.join(both)} also stands in env, in clear; remove it there."
        if self.cluster.scheduler == "kubernetes":
            yield from self._secret_inconsistencies()

    def _secret_inconsistencies(self) -> Iterator[tuple[str, str]]:
        secrets = self.cluster.kubernetes.secrets
        if unknown := sorted(set(self.secret_env) - secrets.keys()):
            yield (
                "secret_env",
                f"{', '.join(unknown)} must also stand in cluster.kubernetes.secrets: pods get secrets from Secret "
                f"objects alone. Write cluster.kubernetes.secrets.{unknown[0]}: {{secret: NAME, key: KEY}}.",
            )
        if both := sorted(self.env.keys() & secrets.keys()):
            yield "cluster.kubernetes.secrets", f"{', '.join(both)} also stands in env, in clear; remove it there."

    def _transformer_inconsistencies(self) -> Iterator[tuple[str, str]]:
        model, layout, schedule = self.transformer, self.layout, self.training.schedule
        if self.training.tokens is not None:
            ramps = schedule.warmup_steps + (schedule.cooldown_steps if schedule.name == "wsd" else 0)
            if schedule.warmup_steps > self.total_steps:
                message = f"must not exceed {self.total_steps} steps, which make the tokens."
                yield "training.schedule.warmup_steps", message
            elif ramps > self.total_steps:
                message = f"must not exceed {self.total_steps} steps together with warmup_steps."
                yield "training.schedule.cooldown_steps", message
        if self.planner.autocast:
            yield "planner.autocast", "must be false for a transformer of text, which is planned with 16-bit weights."
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

    def _vision_inconsistencies(self) -> Iterator[tuple[str, str]]:
        family = self.model.family
        if self.training.tokens is not None:
            yield "training.tokens", f"counts tokens of text; give training.steps with family: {family}."
        axes = ("tensor", "pipeline", "sequence", "context", "expert")
        for key in (*(f"{axis}_parallel" for axis in axes), "virtual_pipeline"):
            if getattr(self.layout, key) not in ("auto", 1):
                yield f"layout.{key}", f"must be 1 or auto: {family} is planned with data parallelism and ZeRO alone."
        if self.layout.offload not in ("auto", "none"):
            yield "layout.offload", f"must be none or auto: {family} is planned with all states on the device."
        if self.layout.activation_offload:
            yield "layout.activation_offload", f"must be false: {family} is planned with activations on the device."
        if self.layout.activation_checkpointing == "selective":
            yield "layout.activation_checkpointing", f"must be none, full or auto with family: {family}."
