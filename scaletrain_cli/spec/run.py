"""The run spec as a whole (schema scaletrain/v1), and its smaller sections."""

import math
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Discriminator, Field, PrivateAttr, Tag, WithJsonSchema, model_validator

from scaletrain_cli.errors import Problem, UsageError
from scaletrain_cli.reasons import Reason
from scaletrain_cli.spec.cluster import ClusterSpec
from scaletrain_cli.spec.code import CodeSpec
from scaletrain_cli.spec.data import NO_DATA, DataSpec
from scaletrain_cli.spec.evaluation import ZERO_SHOT, EvaluationSpec
from scaletrain_cli.spec.extensions import BUILT_IN_FAMILIES
from scaletrain_cli.spec.mirror import MirrorSpec
from scaletrain_cli.spec.model import ModelSpec
from scaletrain_cli.spec.notify import NotifySpec
from scaletrain_cli.spec.quantities import (
    AutoSeconds,
    AutoWhole,
    AutoWholeOrOff,
    AutoWholeOrZero,
    EnvName,
    EnvValue,
    Positive,
    PositiveSeconds,
    Text,
    Title,
    Whole,
    WholeOrZero,
    or_word,
    parse_whole,
)
from scaletrain_cli.spec.section import LEFT_OUT, Section, used_when, where, where_not
from scaletrain_cli.spec.source import Key, Source, key_of
from scaletrain_cli.spec.tracking import TrackingSpec
from scaletrain_cli.spec.training import LayoutSpec, TrainingSpec
from scaletrain_cli.spec.vision_model import (
    OBJECTIVES_OF,
    VISION,
    ClipSpec,
    ConvNextSpec,
    LlavaSpec,
    ResNetSpec,
    VitSpec,
)

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
    in_memory: AutoWholeOrOff = Field(
        default="off",
        description="steps between copies in the host memory of the nodes, from which killed ranks resume; auto: as "
        "often as 1 % of the time permits",
    )
    dir: Text = "auto"
    mirror: MirrorSpec = LEFT_OUT

    def inconsistencies(self) -> Iterator[tuple[str, str]]:
        """Yield (key, message) if the mirror is at no place that can be written to."""
        yield from ((f"mirror.{key}", message) for key, message in self.mirror.inconsistencies())


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
    """Reactions to NaN, spikes, hangs and corruption. ``hang`` is the maximum time without a heartbeat in a step.

    ``preflight``: measure devices and links before step 1; ``auto`` does so on GPUs.
    """

    nan: Literal["stop", "rollback"] = "stop"
    spike: SpikeSpec = LEFT_OUT
    hang: AutoSeconds = "auto"
    checksum: AutoWholeOrZero = Field(
        default="auto",
        description="steps between two comparisons of the state of the ranks; auto: as often as 0.5 % of the time "
        "permits, 0: never",
    )
    replay: Annotated[WholeOrZero, used_when(where_not("guard.checksum", 0))] = Field(
        default=0,
        description="steps between two repetitions of one micro-batch by all replicas, whose outputs must be equal; "
        "0: never",
    )
    preflight: Literal["auto", "always", "never"] = "auto"


class RestartsSpec(Section):
    """Maximum number of restarts, by the reason of the failure."""

    preemption: Budget = "unlimited"
    node: WholeOrZero = 10
    crash: WholeOrZero = 3
    oom: WholeOrZero = 0
    lost: WholeOrZero = Field(
        default=0, description="resumes by scaletrain recover, if the job was lost or the nodes did not match (code 5)"
    )


_MEASURED = used_when(where("telemetry.enabled", True))
_SHORTEST_INTERVAL_SECONDS = 0.1


class TelemetrySpec(Section):
    """Measured values of ranks, GPUs, nodes and layers over time, kept in the run directory."""

    enabled: bool = True
    interval: Annotated[PositiveSeconds, _MEASURED] = Field(
        default=1.0, description="time between two measurements of a node, and between two rows of a rank"
    )
    layers_every: Annotated[AutoWholeOrZero, _MEASURED] = Field(
        default="auto", description="steps between two measurements of all layers; 0: never"
    )
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
    ``attention``: its kernel; ``flash3``: FlashAttention-3, on Hopper; ``masked``: torch's kernel that takes a mask, as
    programs run that pass one.
    ``search``: values of ``auto`` in the layout: those the engine runs, or all that can be modeled.
    """

    framework: Literal["deepspeed", "fsdp", "megatron", "nanotron"] = "deepspeed"
    attention: Literal["auto", "flash", "flash3", "masked", "materialised"] = "auto"
    autocast: bool = False
    search: Literal["engine", "everything"] = "engine"


SCHEMA = "scaletrain/v1"
# Kinds of models by the name in pydantic errors; llama and gpt are one kind.
MODELS: dict[str, type[Section]] = {"transformer": ModelSpec, **VISION}
FAMILIES = [*BUILT_IN_FAMILIES, *VISION]


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
    name: Title
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
    notify: tuple[NotifySpec, ...] = Field(default=(), description="receivers of findings, failures and the end")
    telemetry: TelemetrySpec = LEFT_OUT
    planner: PlannerSpec = LEFT_OUT
    code: CodeSpec = LEFT_OUT
    env: dict[EnvName, EnvValue] = {}
    secret_env: list[EnvName] = Field(
        default=[], description="names only; values are read from the environment at submission"
    )
    _source: Source | None = PrivateAttr(default=None)
    _folder: Path = PrivateAttr(default=Path())
    _counted_data: tuple[int, int, int, bool, int] | None = PrivateAttr(default=None)

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
        """Set the objective of a model of images where it is left out."""
        model = value.get("model") if isinstance(value, dict) else None
        default = OBJECTIVES_OF.get(model_kind(model), ("",))[0]
        training = value.get("training") if default else None
        if isinstance(training, dict) and training.get("objective") is None:
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

    @property
    def counted_data(self) -> tuple[int, int, int, bool, int] | None:
        """The size of the data as in ``plan.data_size.DataSize``, if it was counted before the plan."""
        return self._counted_data

    def set_counted_data(self, size: tuple[int, int, int, bool, int]) -> None:
        """Store the size of the prepared data, which a plan of this spec then does not estimate."""
        self._counted_data = size

    def where(self, key: str) -> str:
        """Return ``file:line`` of a dotted key, or of the section that lacks it; ``run spec`` without a file."""
        return self._source.place(key_of(key)) if self._source else "run spec"

    @property
    def places(self) -> dict[Key, str]:
        """The location of each key that was read from a file: ``file:line`` or ``--set``; empty without a file."""
        return dict(self._source.places) if self._source else {}

    @property
    def ignored_config_keys(self) -> tuple[str, ...]:
        """The keys of ``model.hf_config`` that transformers does not read for this model."""
        return self._source.ignored_config_keys if self._source else ()

    @property
    def lines(self) -> dict[str, str]:
        """Return ``file:line`` (or ``--set``) of each key that was read from a file, by its dotted name."""
        return {".".join(map(str, key)): str(place) for key, place in self.places.items()}

    @property
    def keeps_run_in_mirror(self) -> bool:
        """Return whether, in pods, the run directory is lost with its pod, and each pod continues from the mirror."""
        on_volume = self.cluster.kubernetes.runs.per_pod and self.checkpoint.dir == "auto"
        return on_volume and self.checkpoint.mirror.to is not None

    @property
    def storing_nodes(self) -> int:
        """The nodes that write a checkpoint to storage: all, but in pods without a shared volume the first one."""
        return 1 if self.cluster.kubernetes.runs.per_pod else self.cluster.nodes

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
        model, weights = self.model, []
        parts: dict[str, Any] = {"": model}
        if isinstance(model, LlavaSpec):
            parts |= {"vision_": model.vision_config, "text_": model.text_config}
        for name, part in parts.items():
            if (path := getattr(model, f"{name}weights", None)) is not None:
                weights.append(InitialWeights(f"model.{name}weights", path, part))
        return tuple(weights)

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
    def allocated_devices(self) -> int:
        """Return the number of accelerators that the job holds, with those of spare nodes."""
        return self.cluster.allocated_nodes * self.cluster.gpus_per_node

    @property
    def total_steps(self) -> int:
        """Return the number of optimizer steps: ``training.steps``, or ``tokens`` or ``samples`` rounded up.

        Raises UsageError while ``epochs`` are not counted in steps, see launch/epochs.py.
        """
        if self.training.steps is not None:
            return self.training.steps
        if self.training.samples is not None:
            return math.ceil(self.training.samples / self.training.global_batch_size)
        if self.training.tokens is None:
            raise UsageError(Reason("preparation.epochs-not-counted", {"epochs": self.training.epochs}))
        return math.ceil(self.training.tokens / (self.training.global_batch_size * self.units_per_sample))

    def with_changes(self, section: str, **changes: Any) -> "RunSpec":
        """Return the spec with some settings of a section changed; they are not validated."""
        return self.model_copy(update={section: getattr(self, section).model_copy(update=changes)})

    def of_sources(self) -> dict[str, "RunSpec"]:
        """Return this spec with each source of rows alone, by the name of the source."""
        specs = {}
        for section in self.data.all_sources:
            alone: dict[str, Any] = {"source": section.path, "sources": (), "stages": ()}
            if section.validation_path is not None:
                alone |= {"validation_source": section.validation_path, "validation_split": 0.0}
            specs[section.name] = self.with_changes("data", **alone)
        return specs

    def evaluates_after(self, step: int) -> bool:
        """Return whether the validation loss is measured after ``step`` steps."""
        every = self.evaluation.every
        return every > 0 and step > 0 and (step % every == 0 or step == self.total_steps)

    def data_paths(self) -> Iterator[tuple[str, str]]:
        """Yield (dotted key, path) of each source that is prepared: of training, then of validation rows alone.

        The last one is that of ``evaluation.zero_shot``.
        """
        yield from self.data.paths()
        yield from self.data.validation_paths()
        if self.evaluation.zero_shot is not None and self.evaluation.every:
            yield f"{ZERO_SHOT}.source", self.evaluation.zero_shot.source
