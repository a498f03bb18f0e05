"""The run spec as a whole (schema scaletrain/v1), its smaller sections, and the checks that span sections."""

import math
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Discriminator, Field, PrivateAttr, StringConstraints, Tag, WithJsonSchema, model_validator

from scaletrain_cli.errors import Problem, UsageError
from scaletrain_cli.spec.cluster import ClusterSpec
from scaletrain_cli.spec.corpus_files import EMBEDDED, EMBEDDED_SOURCES, PYTHON_STDLIB
from scaletrain_cli.spec.data import DataSpec
from scaletrain_cli.spec.evaluation import ZERO_SHOT, EvaluationSpec, cluster_problems
from scaletrain_cli.spec.extensions import BUILT_IN_FAMILIES
from scaletrain_cli.spec.image_files import IMAGE_FORMATS, SKLEARN_DIGITS
from scaletrain_cli.spec.losses import LOSSES_OF
from scaletrain_cli.spec.model import ModelSpec
from scaletrain_cli.spec.model_consistency import divisors
from scaletrain_cli.spec.notify import NotifySpec, notify_inconsistencies
from scaletrain_cli.spec.quantities import (
    LARGEST_WHOLE,
    AutoSeconds,
    AutoWhole,
    EnvName,
    EnvValue,
    Matching,
    Positive,
    PositiveBytes,
    PositiveSeconds,
    Text,
    Whole,
    WholeOrZero,
    or_word,
    parse_whole,
)
from scaletrain_cli.spec.section import LEFT_OUT, Section, used_when, where, where_not
from scaletrain_cli.spec.source import Key, Source, key_of
from scaletrain_cli.spec.sources import format_inconsistencies, stage_order_problems
from scaletrain_cli.spec.tracking import TrackingSpec
from scaletrain_cli.spec.training import LayoutSpec, TrainingSpec
from scaletrain_cli.spec.vision_model import (
    VISION,
    ClipSpec,
    ConvNextSpec,
    LlavaSpec,
    ResNetSpec,
    VitSpec,
    image_channels,
)

_NAME = r"[A-Za-z_][A-Za-z0-9_]*"
ModuleName = Annotated[
    str,
    Matching(rf"{_NAME}(\.{_NAME})*", 256, "must be the dotted name of a Python module, such as train or my.train"),
]
RelativeFolder = Annotated[
    str, Matching(r"[^/\x00\n][^\x00\n]*", 4096, "must be a relative path of a folder, on one line")
]
AbsoluteFolder = Annotated[str, Matching(r"/[^\x00\n]*", 4096, "must be the absolute path of a folder, on one line")]


_WITH_A_FOLDER = used_when(where_not("code.path", None))


class CodeSpec(Section):
    """A folder of a git working tree, copied into the run at submission; ``engine`` or ``command`` run this copy.

    Files ignored by git or by ``.scaletrainignore`` (gitignore syntax) are left out.
    """

    path: Text | None = Field(default=None, description="folder of a git working tree; null: no code is kept")
    uncommitted: Annotated[Literal["patch", "refuse"], _WITH_A_FOLDER] = Field(
        default="patch",
        description="patch: include uncommitted changes and keep them as a patch too; refuse: reject them",
    )
    max_size: Annotated[PositiveBytes, _WITH_A_FOLDER] = Field(
        default=50_000_000, description="maximum total size of the files, before compression"
    )
    on_nodes: AbsoluteFolder | None = Field(
        default=None,
        description="folder of the image or a volume that already holds the code; compared, not copied",
    )
    engine: ModuleName | None = Field(
        default=None,
        description="module that each rank runs instead of the built-in engine: python -P -m MODULE RUN_DIR",
    )
    command: tuple[EnvValue, ...] | None = Field(
        default=None,
        description="words of the command line that each rank runs instead of the built-in engine",
    )
    processes_per_node: Annotated[Literal["auto", 1], used_when(where_not("code.command", None))] = Field(
        default="auto", description="auto: one process per rank; 1: one that starts its ranks, such as torchrun"
    )
    import_root: RelativeFolder = Field(
        default=".", description="folder below path that is added to sys.path, e.g. src"
    )

    @property
    def own_program(self) -> bool:
        """Return whether the ranks run a program of the user's instead of the built-in engine."""
        return self.engine is not None or self.command is not None

    def inconsistencies(self) -> Iterator[tuple[str, str]]:
        """Yield (key, message) for each setting without effect, or that points outside of the tree."""
        if self.engine is not None and self.command is not None:
            yield "command", "cannot be combined with code.engine. Remove one of them."
        if self.command is not None and (not self.command or not self.command[0]):
            yield "command", "must begin with a program, such as [python, train.py]."
        if self.on_nodes is not None and self.path is None:
            yield "on_nodes", "requires code.path, with which it is compared. Set code.path."
        if self.import_root != "." and self.path is None:
            yield "import_root", "is a folder below code.path. Set code.path."
        if ".." in self.import_root.split("/"):
            yield "import_root", "must be below code.path. Remove '..'."


Budget = Annotated[
    int | Literal["unlimited"],
    or_word("unlimited", partial(parse_whole, minimum=0)),
    WithJsonSchema({"anyOf": [{"type": "integer", "minimum": 0}, {"const": "unlimited"}]}),
]


class CheckpointSpec(Section):
    """Checkpoint interval and retention. ``dir: auto`` is the run directory."""

    every: AutoWhole = "auto"
    keep: Whole = 3
    keep_every: Whole | None = Field(default=None, description="also keep checkpoints whose step is a multiple of this")
    keep_best: Text | None = Field(
        default=None,
        description="metric, such as validation_loss or TASK/loss: also keep the checkpoint with its best value",
    )
    asynchronous: bool = Field(default=True, alias="async")
    dir: Text = "auto"


class SpikeSpec(Section):
    """Spike detection: loss above ``factor`` times its median, or loss or gradient norm far outside its spread.

    After ``retries`` rollbacks to the same checkpoint the run stops.
    """

    factor: Positive = 3.0
    patience: Whole = Field(default=3, description="consecutive steps above the threshold that count as a spike")
    action: Literal["warn", "rollback"] = "rollback"
    retries: Annotated[
        WholeOrZero, used_when(where("guard.spike.action", "rollback"), where("guard.nan", "rollback"))
    ] = Field(default=3, description="rollbacks to the same checkpoint before the run stops")


class GuardSpec(Section):
    """Reactions to NaN, spikes and hangs. ``hang`` is the maximum time without a heartbeat in a step.

    ``preflight``: measure devices and links before step 1; ``auto`` does so on GPUs.
    """

    nan: Literal["stop", "rollback"] = "stop"
    spike: SpikeSpec = LEFT_OUT
    hang: AutoSeconds = "auto"
    preflight: Literal["auto", "always", "never"] = "auto"


class RestartsSpec(Section):
    """Maximum number of restarts, by the reason of the failure."""

    preemption: Budget = "unlimited"
    node: WholeOrZero = 10
    crash: WholeOrZero = 3
    oom: WholeOrZero = 0


_MEASURED = used_when(where("telemetry.enabled", True))
_SHORTEST_INTERVAL_SECONDS = 0.1


class TelemetrySpec(Section):
    """Measured values of ranks, GPUs, nodes and layers over time, kept in the run directory."""

    enabled: bool = True
    interval: Annotated[PositiveSeconds, _MEASURED] = Field(
        default=1.0, description="time between two measurements of a node, and between two rows of a rank"
    )
    layers_every: Annotated[
        int | Literal["auto"],
        or_word("auto", partial(parse_whole, minimum=0)),
        WithJsonSchema({"anyOf": [{"type": "integer", "minimum": 0, "maximum": LARGEST_WHOLE}, {"const": "auto"}]}),
        _MEASURED,
    ] = Field(default="auto", description="steps between two measurements of all layers; 0: never")
    noise_scale: Annotated[bool, _MEASURED] = Field(
        default=True, description="estimate the gradient noise scale where the ranks' gradients show it"
    )

    def inconsistencies(self) -> Iterator[tuple[str, str]]:
        """Yield (key, message) if the interval is too short to measure in."""
        if self.interval < _SHORTEST_INTERVAL_SECONDS:
            yield "interval", f"must be at least {_SHORTEST_INTERVAL_SECONDS} s."


class PlannerSpec(Section):
    """Framework and search space of the planner; only ``deepspeed`` can be submitted.

    ``attention``: kernel that is modeled; ``auto`` follows the framework and the device.
    ``autocast``: vision networks compute in 16 bits over fp32 weights (torch.autocast).
    ``search``: values of ``auto`` in the layout: those the engine runs, or all that can be modeled.
    """

    framework: Literal["deepspeed", "fsdp", "megatron", "nanotron"] = "deepspeed"
    attention: Literal["auto", "flash", "materialised"] = "auto"
    autocast: bool = False
    search: Literal["engine", "everything"] = "engine"


NO_DATA = "none"  # data.source of a program of the user's whose spec has no data section
SCHEMA = "scaletrain/v1"
# Kinds of models by the name in pydantic errors; llama and gpt are one kind.
MODELS: dict[str, type[Section]] = {"transformer": ModelSpec, **VISION}
FAMILIES = [*BUILT_IN_FAMILIES, *VISION]


# The objectives of each family of models of images, its default first.
OBJECTIVES_OF: dict[str, tuple[str, ...]] = {
    "resnet": ("classification", "regression", "contrastive"),
    "convnext": ("classification", "regression", "contrastive"),
    "vit": ("classification", "regression", "contrastive"),
    "clip": ("contrastive",),
    "llava": ("sft",),
}


def model_kind(model: Any) -> str:
    """Return the key in MODELS of a raw or validated model section; ``transformer`` if it names no vision family."""
    family = model.get("family") if isinstance(model, dict) else getattr(model, "family", None)
    return family if isinstance(family, str) and family in VISION else "transformer"


AnyModel = Annotated[
    Annotated[ModelSpec, Tag("transformer")]
    | Annotated[ResNetSpec, Tag("resnet")]
    | Annotated[ConvNextSpec, Tag("convnext")]
    | Annotated[VitSpec, Tag("vit")]
    | Annotated[ClipSpec, Tag("clip")]
    | Annotated[LlavaSpec, Tag("llava")],
    Discriminator(model_kind),
]


class InitialWeights(NamedTuple):
    """A key with initial weights, its value, and the section of the model, or of the part of it in the files."""

    key: str
    path: str
    model: Any

    @property
    def section(self) -> str:
        """Return the path of the section within that of the model, such as ``text_config.``; empty for the whole."""
        part = self.key.removeprefix("model.").removesuffix("weights").removesuffix("_")
        return f"{part}_config." if part else ""

    @property
    def may_lack_tokens(self) -> bool:
        """Return True if embedding and head may have fewer rows than the model, see ``model.text_weights``."""
        return self.key == "model.text_weights"


class RunSpec(Section):
    """The complete spec of a training run."""

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
    notify: tuple[NotifySpec, ...] = Field(default=(), description="whom to tell of findings, failures and the end")
    telemetry: TelemetrySpec = LEFT_OUT
    planner: PlannerSpec = LEFT_OUT
    code: CodeSpec = LEFT_OUT
    env: dict[EnvName, EnvValue] = {}
    secret_env: list[EnvName] = Field(
        default=[], description="names only; values are read from the environment at submission"
    )
    _source: Source | None = PrivateAttr(default=None)
    _folder: Path = PrivateAttr(default=Path())

    @model_validator(mode="before")
    @classmethod
    def _own_program_reads_its_data(cls, value: Any) -> Any:
        """Add the section ``data`` where it is left out and the ranks run a program of the user's."""
        code = value.get("code") if isinstance(value, dict) and value.get("data") is None else None
        if isinstance(code, dict) and (code.get("engine") is not None or code.get("command") is not None):
            return {**value, "data": {"source": NO_DATA}}
        return value

    @model_validator(mode="before")
    @classmethod
    def _objective_by_family(cls, value: Any) -> Any:
        """Set the objective of a model of images where it is left out; causal_lm stood there in earlier versions."""
        model = value.get("model") if isinstance(value, dict) else None
        default = OBJECTIVES_OF.get(model_kind(model), ("",))[0]
        training = value.get("training") if default else None
        if isinstance(training, dict) and training.get("objective") in (None, "causal_lm"):
            return {**value, "training": {**training, "objective": default}}
        return value

    def __eq__(self, other: object) -> bool:
        """Compare the settings, ignoring the files that they were read from."""
        return isinstance(other, RunSpec) and self.__dict__ == other.__dict__

    def read_from(self, source: Source) -> None:
        """Store the source, so that later problems can name the line of a key."""
        self._source = source

    @property
    def folder(self) -> Path:
        """The folder to which the paths of the spec are relative; by default the working folder of this process."""
        return self._folder

    def set_folder(self, folder: Path) -> None:
        """Store the folder to which the paths are relative: for a recorded run the one that it was submitted in."""
        self._folder = folder

    def where(self, key: str) -> str:
        """Return ``file:line`` of a dotted key, or of the section that lacks it; ``run spec`` without a file."""
        return self._source.place(key_of(key)) if self._source else "run spec"

    @property
    def places(self) -> dict[Key, str]:
        """The location of each key that was read from a file: ``file:line`` or ``--set``; empty without a file."""
        return dict(self._source.places) if self._source else {}

    @property
    def lines(self) -> dict[str, str]:
        """Return ``file:line`` (or ``--set``) of each key that was read from a file, by its dotted name."""
        return {".".join(map(str, key)): str(place) for key, place in self.places.items()}

    @property
    def transformer(self) -> ModelSpec:
        """Return the model of a transformer. Raises UsageError for a vision network."""
        if isinstance(self.model, ModelSpec):
            return self.model
        family = self.model.family
        problem = Problem(self.where("model.family"), "model.family", "must be that of a language model here.", family)
        raise UsageError(f"{family} is not a language model", (problem,))

    @property
    def language_model(self) -> ModelSpec:
        """Return the model that predicts tokens: a transformer, or that of a LLaVA. Raises UsageError without one."""
        return self.model.text_config if isinstance(self.model, LlavaSpec) else self.transformer

    @property
    def weights(self) -> str | None:
        """Return the path of the initial weights; None if they are random."""
        return getattr(self.model, "weights", None)

    @property
    def initial_weights(self) -> "tuple[InitialWeights, ...]":
        """Return the files with initial weights: of the whole model, or of its parts."""
        model, found = self.model, []
        parts: dict[str, Any] = {"": model}
        if isinstance(model, LlavaSpec):
            parts |= {"vision_": model.vision_config, "text_": model.text_config}
        for name, part in parts.items():
            if (path := getattr(model, f"{name}weights", None)) is not None:
                found.append(InitialWeights(f"model.{name}weights", path, part))
        return tuple(found)

    @property
    def language_weights(self) -> str | None:
        """Return the path of the initial weights of the language model; None if they are random, or there is none."""
        return getattr(self.model, "text_weights", None) or self.weights

    @property
    def is_from_scratch(self) -> bool:
        """Return whether all weights begin at random: none are given, and no adapter or preference tunes others."""
        adapter = getattr(self.model, "adapter", None)
        return not self.initial_weights and adapter is None and self.training.objective != "dpo"

    @property
    def unit(self) -> str:
        """Return the unit of training data and throughput: ``tokens``, ``images``, or ``pairs`` of image and text.

        ``sequences`` of a LLaVA, which have any number of images.
        """
        return {"transformer": "tokens", "clip": "pairs", "llava": "sequences"}.get(model_kind(self.model), "images")

    @property
    def samples(self) -> str:
        """Return what ``training.global_batch_size`` counts: ``sequences``, ``images`` or ``pairs``."""
        if isinstance(self.model, ModelSpec):
            return "pairs" if self.training.objective == "dpo" else "sequences"
        return self.unit

    @property
    def units_per_sample(self) -> int:
        """Return the number of units in one sample of ``training.global_batch_size``; a pair has two sequences."""
        if isinstance(self.model, ModelSpec):
            return self.model.seq_len * (2 if self.training.objective == "dpo" else 1)
        return 1

    @property
    def world_size(self) -> int:
        """Return the number of ranks, one per accelerator."""
        return self.cluster.nodes * self.cluster.gpus_per_node

    @property
    def total_steps(self) -> int:
        """Return the number of optimizer steps: ``training.steps``, or ``tokens`` or ``samples`` rounded up."""
        if self.training.steps is not None:
            return self.training.steps
        if self.training.samples is not None:
            return math.ceil(self.training.samples / self.training.global_batch_size)
        assert self.training.tokens is not None
        return math.ceil(self.training.tokens / (self.training.global_batch_size * self.units_per_sample))

    def data_paths(self) -> Iterator[tuple[str, str]]:
        """Yield (dotted key, path) of each source that is prepared: of training, and of ``evaluation.zero_shot``."""
        yield from self.data.paths()
        if self.evaluation.zero_shot is not None and self.evaluation.every:
            yield f"{ZERO_SHOT}.source", self.evaluation.zero_shot.source

    def inconsistencies(self) -> Iterator[tuple[str, str]]:
        """Yield (dotted key, message) for each contradiction between sections."""
        yield from (
            self._transformer_inconsistencies() if isinstance(self.model, ModelSpec) else self._vision_inconsistencies()
        )
        yield from self._group_inconsistencies()
        if self.training.early_stopping.patience and not self.evaluation.every:
            yield "training.early_stopping.patience", "requires a validation loss. Set evaluation.every above 0."
        elif self.training.early_stopping.patience:
            yield from self._early_stopping_inconsistencies(self.training.early_stopping.metric)
        if self.evaluation.tasks:
            yield from self._evaluation_inconsistencies()
        if self.checkpoint.keep_best is not None:
            yield from self._keep_best_inconsistencies(self.checkpoint.keep_best)
        both = sorted(set(self.secret_env) & self.env.keys())
        if both:
            yield "secret_env", f"{', '.join(both)} is also in env, where its value is visible; remove it from env."
        yield from notify_inconsistencies(self.notify, self.env, own_program=self.code.own_program)
        yield from self.cluster.section.run_inconsistencies(env=self.env, secret_env=self.secret_env)

    def _group_inconsistencies(self) -> Iterator[tuple[str, str]]:
        for number, group in enumerate(self.training.trainable):
            for key in ("start_step", "end_step"):
                if (step := getattr(group, key)) is not None and step > self.total_steps:
                    yield (
                        f"training.trainable.{number}.{key}",
                        f"must not exceed the {self.total_steps} steps of the run.",
                    )

    def _evaluation_inconsistencies(self) -> Iterator[tuple[str, str]]:
        if not isinstance(self.model, ModelSpec):
            yield "evaluation.tasks", "are for language models. Remove them."
        if self.code.own_program:
            key = "code.command" if self.code.command else "code.engine"
            yield "evaluation.tasks", f"need checkpoints of the built-in engine. Remove them, or {key}."
        yield from cluster_problems(self.cluster, self.evaluation.job)

    def _metric_names(self) -> tuple[str, ...]:
        objective = self.training.objective
        loss = self.training.loss.of(objective) if objective in LOSSES_OF else ""
        return self.evaluation.metric_names(objective, loss, getattr(self.model, "num_labels", 0))

    def _early_stopping_inconsistencies(self, metric: str) -> Iterator[tuple[str, str]]:
        names = [name for name in self._metric_names() if name.startswith("validation_")]
        if metric not in names:
            yield "training.early_stopping.metric", f"must be a metric of the validation. Use {' or '.join(names)}."

    def _keep_best_inconsistencies(self, metric: str) -> Iterator[tuple[str, str]]:
        names = self._metric_names()
        if not any(metric == name or (name.endswith("/") and metric.startswith(name)) for name in names):
            known = ", ".join(f"{name}..." if name.endswith("/") else name for name in names) or "none"
            yield "checkpoint.keep_best", f"must be a metric of an evaluation. This spec has: {known}."

    def _transformer_inconsistencies(self) -> Iterator[tuple[str, str]]:
        model, layout, schedule = self.transformer, self.layout, self.training.schedule
        if self.training.tokens is not None:
            ramps = schedule.warmup_steps + (schedule.cooldown_steps if schedule.name == "wsd" else 0)
            if schedule.warmup_steps > self.total_steps:
                message = f"must not exceed {self.total_steps} steps, derived from training.tokens."
                yield "training.schedule.warmup_steps", message
            elif ramps > self.total_steps:
                message = f"must not exceed {self.total_steps} steps together with warmup_steps."
                yield "training.schedule.cooldown_steps", message
        if self.training.objective in LOSSES_OF:
            yield "training.objective", f"must be causal_lm, sft or dpo with family: {model.family}."
            return
        if SKLEARN_DIGITS in (path for _, path in self.data.paths()):
            yield "data.source", f"is a source of images. Use {PYTHON_STDLIB} or files with text."
        if self.training.samples is not None:
            yield "training.samples", "counts images. Set training.steps or training.tokens for a language model."
        yield from self.data.objective_inconsistencies(self.training.objective)
        yield from self._mixture_inconsistencies()
        if self.training.objective == "dpo":
            for key in ("hidden_dropout", "attention_dropout"):
                if getattr(model, key):
                    yield f"model.{key}", "must be 0 with training.objective: dpo, whose reference has no dropout."
        if self.planner.autocast:
            yield "planner.autocast", "must be false for a language model, which is planned with 16-bit weights."
        if model.block_types and (self.training.trainable or self.training.optimizer.layer_decay != 1):
            key = "trainable" if self.training.trainable else "optimizer.layer_decay"
            yield f"training.{key}", "must be left out with model.block_types, whose blocks are planned as a whole."
        trains_tokenizer = self.data.source != NO_DATA and not self.data.may_be_prepared  # else checked with the files
        if trains_tokenizer and self.data.tokenizer.kind == "bpe" and self.data.tokenizer.vocab_size > model.vocab_size:
            yield "data.tokenizer.vocab_size", f"must not exceed model.vocab_size = {model.vocab_size}."
        for key in ("tensor_parallel", "sequence_parallel"):
            degree = getattr(layout, key)
            if degree != "auto" and model.num_attention_heads % degree:
                yield (
                    f"layout.{key}",
                    f"must divide {model.num_attention_heads} attention heads. "
                    f"Use {divisors(model.num_attention_heads)}.",
                )
        if layout.pipeline_split:
            yield from self._split_inconsistencies(model)
        elif layout.pipeline_parallel != "auto" and layout.pipeline_parallel > model.num_hidden_layers:
            yield "layout.pipeline_parallel", f"must not exceed {model.num_hidden_layers} layers."
        if layout.expert_parallel not in ("auto", 1) and model.num_experts % int(layout.expert_parallel or 1):
            yield "layout.expert_parallel", f"must divide num_experts = {model.num_experts}."

    def _split_inconsistencies(self, model: ModelSpec) -> Iterator[tuple[str, str]]:
        split, layers = self.layout.pipeline_split, model.num_hidden_layers
        if self.layout.pipeline_parallel != len(split):
            yield "layout.pipeline_parallel", f"must be {len(split)}, as many as layout.pipeline_split has stages."
        if sum(split) != layers:
            yield "layout.pipeline_split", f"must add up to num_hidden_layers = {layers}; it has {sum(split)} blocks."
        if self.layout.virtual_pipeline != 1:
            yield "layout.virtual_pipeline", "must be 1 with layout.pipeline_split."

    def _vision_inconsistencies(self) -> Iterator[tuple[str, str]]:
        family = self.model.family
        allowed = OBJECTIVES_OF[family]
        if self.training.objective not in allowed:
            yield "training.objective", f"must be {' or '.join(allowed)} with family: {family}."
        yield from self._image_inconsistencies()
        if self.data.prepare:
            yield "data.prepare", f"must be empty: {family} is not trained on text."
        pairs = isinstance(self.model, ClipSpec)
        labels = ("label",) if self.training.objective != "contrastive" else ()
        if self.data.sources and isinstance(self.model, LlavaSpec):
            yield "data.sources", "must be empty: rows have one source. Set data.source."
        else:
            yield from self._mixture_inconsistencies("image", *labels, *(("caption",) if pairs else ()))
        for key, path in self.data_paths():
            if isinstance(self.model, LlavaSpec) and path in EMBEDDED_SOURCES:
                yield key, f"has no conversations about images. Use files with rows, with family: {family}."
            elif path in EMBEDDED:
                message = f"is a source of text. Use {SKLEARN_DIGITS}, or files with images, with family: {family}."
                yield key, message
        if self.training.tokens is not None:
            yield "training.tokens", f"counts tokens of text. Set training.samples with family: {family}."
        if self.training.samples is not None and self.training.schedule.warmup_steps > self.total_steps:
            message = f"must not exceed {self.total_steps} steps, derived from training.samples."
            yield "training.schedule.warmup_steps", message
        if self.training.precision in ("fp8", "fp4"):
            precision = self.training.precision
            yield "training.precision", f"must be bf16, fp16, tf32 or fp32: {family} has no layers in {precision}."
        if self.training.weight_dtype != "auto":
            yield "training.weight_dtype", f"must be auto with family: {family}."
        if self.layout.pipeline_split:
            yield "layout.pipeline_split", f"must be [] with family: {family}."
        if self.training.cross_entropy != "auto":
            why = "" if isinstance(self.model, LlavaSpec) else ", which has no logits of tokens"
            yield "training.cross_entropy", f"must be auto with family: {family}{why}."
        axes = ("tensor", "pipeline", "sequence", "context", "expert")
        for key in (*(f"{axis}_parallel" for axis in axes), "virtual_pipeline"):
            if getattr(self.layout, key) not in ("auto", 1):
                yield f"layout.{key}", f"must be 1 or auto: {family} is planned with data parallelism and ZeRO only."
        if self.layout.offload not in ("auto", "none"):
            yield "layout.offload", f"must be none or auto: {family} is planned with all states on the device."
        if self.layout.activation_offload:
            yield "layout.activation_offload", f"must be false: {family} is planned with activations on the device."
        if self.layout.activation_checkpointing == "selective":
            yield "layout.activation_checkpointing", f"must be none, full or auto with family: {family}."

    def _mixture_inconsistencies(self, *parts: str) -> Iterator[tuple[str, str]]:
        """``parts``: of a sample of images that the run reads; none for text."""
        found = [
            *format_inconsistencies(self.data.sources, parts),
            *stage_order_problems(self.data.stages, self.total_steps),
        ]
        yield from ((f"data.{key}", message) for key, message in found)

    def _image_inconsistencies(self) -> Iterator[tuple[str, str]]:
        model, training, images = self.model, self.training, self.data.images
        assert not isinstance(model, ModelSpec)
        channels, size = image_channels(model), training.micro_batch_size
        yield from ((f"data.images.{key}", message) for key, message in images.inconsistencies(channels))
        if isinstance(model, LlavaSpec):
            yield from self.data.conversation_inconsistencies()
            if self.data.loss_on == "all" and self.evaluation.sample_answers:
                yield "evaluation.sample_answers", "must be 0 with data.loss_on: all, which has no answers."
            return
        if self.data.format not in ("auto", *IMAGE_FORMATS):
            yield "data.format", f"must be auto, {', '.join(IMAGE_FORMATS)} with family: {model.family}."
        mixes = images.augment.mixes
        if mixes and training.objective != "classification":
            yield "data.images.augment", "mixes classes. Set mixup and cutmix to 0, or objective: classification."
        if mixes and size != "auto" and size % 2:
            yield "training.micro_batch_size", "must be even with mixup or cutmix, which mix pairs of images."
        if mixes and training.global_batch_size % 2:
            yield "training.global_batch_size", "must be even with mixup or cutmix, which mix pairs of images."
        if training.objective == "contrastive":
            name, pairs = training.loss.of("contrastive"), isinstance(model, ClipSpec)
            allowed = ("auto", "info_nce", "sigmoid") if pairs else ("nt_xent",)
            if training.loss.name not in allowed:
                yield "training.loss.name", f"must be {' or '.join(allowed)} with family: {model.family}."
            elif name == "nt_xent" and self.evaluation.every:
                yield "evaluation.every", "must be 0 with training.loss: nt_xent: images have one view in evaluation."
            if pairs and name == "sigmoid" and getattr(model, "logit_bias_init_value", None) is None:
                yield "model.logit_bias_init_value", "is required with training.loss: sigmoid. SigLIP has -10."
        weights = training.loss.pos_weight
        labels = getattr(model, "num_labels", 0)
        if isinstance(weights, tuple) and len(weights) != labels:
            yield "training.loss.pos_weight", f"must have {labels} numbers, one for each label, or be one number."
