"""The training and layout sections: batch, precision, optimizer, schedule and parallelism.

The learning rate of a step, and when to stop early, are pure functions of them, for engine and launcher.
"""

import contextlib
import math
from collections.abc import Iterable, Iterator
from typing import Annotated, Any, Literal

from pydantic import Field, PlainValidator, WithJsonSchema, model_validator

from scaletrain_cli.plugins import OPTIMIZERS, PluginError
from scaletrain_cli.spec.adapter import Targets
from scaletrain_cli.spec.extensions import (
    BUILT_IN_OPTIMIZERS,
    OptimizerTraits,
    optimizer_extension,
    optimizer_traits,
    optimizers_that_read,
    or_plugin,
)
from scaletrain_cli.spec.losses import LOSSES_OF, LossSpec
from scaletrain_cli.spec.quantities import (
    AutoWhole,
    Count,
    Epochs,
    Fraction,
    NonNegative,
    Positive,
    SomeShare,
    Text,
    Whole,
    WholeOrZero,
    valid_if,
)
from scaletrain_cli.spec.section import LEFT_OUT, Section, used_when, where, where_not

ZeroStage = Annotated[
    int | Literal["auto"],
    PlainValidator(
        valid_if(
            lambda value: value == "auto" or (type(value) is int and 0 <= value <= 3), "must be 0, 1, 2, 3 or auto"
        )
    ),
    WithJsonSchema({"enum": [0, 1, 2, 3, "auto"]}),
]
SwitchOrAuto = Annotated[
    bool | Literal["auto"],
    PlainValidator(valid_if(lambda value: value == "auto" or isinstance(value, bool), "must be true, false or auto")),
    WithJsonSchema({"enum": [True, False, "auto"]}),
]


_SELECTIVE = used_when(where("layout.activation_checkpointing", "selective", "auto"))


class LayoutSpec(Section):
    """Degrees of parallelism; world_size = data x tensor x pipeline x sequence x context."""

    data_parallel: AutoWhole = "auto"
    tensor_parallel: AutoWhole = "auto"
    pipeline_parallel: AutoWhole = "auto"
    pipeline_split: tuple[Whole, ...] = Field(
        default=(), description="number of blocks on each pipeline stage; []: balanced by time"
    )
    virtual_pipeline: AutoWhole = 1
    sequence_parallel: AutoWhole = "auto"
    context_parallel: AutoWhole = 1
    expert_parallel: AutoWhole = "auto"
    zero_stage: ZeroStage = "auto"
    zero_shard_size: Annotated[Whole | None, used_when(where("layout.zero_stage", 2, 3))] = Field(
        default=None,
        description="ZeRO-2 and 3: neighboring ranks over which states are sharded; other groups have copies of them "
        "(MiCS, arXiv:2205.00119); null: all",
    )
    zero_secondary_shard_size: Annotated[Whole, used_when(where("layout.zero_stage", 3))] = Field(
        default=1,
        description="ZeRO-3: neighboring ranks that have all weights a second time between them, from which every pass "
        "but the first of a step gathers them (hpZ, arXiv:2306.10209); 1: none",
    )
    activation_checkpointing: Literal["auto", "none", "selective", "full"] = "auto"
    selective_scope: Annotated[Literal["block", "attention"], _SELECTIVE] = Field(
        default="block", description="recomputed by selective checkpointing: whole blocks or their attention"
    )
    selective_every: Annotated[Whole, _SELECTIVE] = Field(
        default=2, description="selective: every n-th block, starting with the first"
    )
    activation_offload: bool = Field(
        default=False, description="keep activations in host memory until the backward pass"
    )
    tensor_sequence_parallel: Annotated[SwitchOrAuto, used_when(where_not("layout.tensor_parallel", 1))] = Field(
        default="auto", description="split norms and dropout over the tensor ranks (Megatron-LM, arXiv:2205.05198)"
    )
    expert_tensor_parallel: Annotated[AutoWhole, used_when(where_not("model.num_experts", 0, None))] = "auto"
    offload: Literal["auto", "none", "optimizer", "optimizer+params"] = "none"
    offload_device: Annotated[Literal["cpu", "nvme"], used_when(where_not("layout.offload", "none"))] = "cpu"


class MuonSpec(Section):
    """Muon (arXiv:2502.16982): the matrices of the blocks are orthogonalized, AdamW updates all other parameters."""

    adjust_lr: Literal["match_rms_adamw", "original"] = Field(
        default="match_rms_adamw",
        description="factor of the learning rate of a matrix. match_rms_adamw: 0.2 sqrt(max(rows, columns)), for which "
        "rates of AdamW fit; original: sqrt(max(1, rows / columns))",
    )
    adamw_lr: Positive | None = Field(
        default=None, description="peak learning rate of the parameters that AdamW updates; null: optimizer.lr"
    )
    nesterov: bool = True
    newton_schulz_steps: Annotated[int, Field(strict=True, ge=1, le=20)] = Field(
        default=5, description="iterations that orthogonalize a matrix"
    )
    newton_schulz_dtype: Literal["bf16", "fp32"] = Field(
        default="bf16", description="bf16, as torch.optim.Muon; fp32: slower, with less rounding"
    )


_OPTIMIZER = "training.optimizer.name"


def _read(key: str) -> Any:
    return used_when(where_not(_OPTIMIZER, *optimizers_that_read(key, False)))


class OptimizerSpec(Section):
    """AdamW (arXiv:1711.05101) or another. Weight decay applies to matrices, not to norms and biases."""

    name: Annotated[
        str,
        or_plugin(OPTIMIZERS, BUILT_IN_OPTIMIZERS, optimizer_extension),
        WithJsonSchema({"type": "string", "enum": [*BUILT_IN_OPTIMIZERS]}),
    ] = "adamw"
    lr: Positive = 3.0e-4
    betas: Annotated[tuple[Fraction, Fraction], _read("betas")] = (
        0.9,
        0.95,
    )
    eps: Annotated[Positive, _read("eps")] = 1.0e-8
    weight_decay: NonNegative = Field(
        default=0.1, description="default 0.1 if decoupled; 0 with adam, sgd and momentum, which add it to the gradient"
    )
    decay_embeddings: Annotated[
        bool, used_when(where_not("training.optimizer.weight_decay", 0.0), where_not("training.trainable", ()))
    ] = Field(default=True, description="apply weight decay to token and position embeddings and a tied head")
    layer_decay: SomeShare = Field(
        default=1.0, description="factor of the learning rate per block, from the head down (arXiv:2106.08254)"
    )
    momentum: Annotated[Fraction, used_when(where(_OPTIMIZER, *optimizers_that_read("momentum")))] = Field(
        default=0.9, description="coefficient of momentum and muon; default 0.95 with muon"
    )
    state_dtype: Annotated[Literal["fp32", "bf16", "fp8"], _read("state_dtype")] = Field(
        default="fp32", description="dtype of the moments; the engine has fp32, others are planned"
    )
    master_weights: Annotated[bool, used_when(where("training.precision", "bf16", "fp16", "fp8", "fp4"))] = Field(
        default=True, description="fp32 copy of 16-bit weights, which is updated; the engine has it, false is planned"
    )
    muon: Annotated[MuonSpec, used_when(where(_OPTIMIZER, "muon"))] = LEFT_OUT

    @model_validator(mode="before")
    @classmethod
    def _defaults_by_optimizer(cls, value: Any) -> Any:
        if isinstance(value, dict) and (traits := BUILT_IN_OPTIMIZERS.get(str(value.get("name")))) is not None:
            return {**traits.defaults, **value}
        return value

    @property
    def traits(self) -> OptimizerTraits:
        """Return what is known of the optimizer; of one that cannot be loaded here, that no layout excludes it."""
        with contextlib.suppress(PluginError):  # reported with the line of the spec that names it
            if (traits := optimizer_traits(self.name)) is not None:
                return traits
        return OptimizerTraits(offload=("cpu", "nvme"))


class ScheduleSpec(Section):
    """Learning rate as a pure function of the step: linear warm-up, then the named decay to ``min_lr``."""

    name: Literal["cosine", "linear", "step", "onecycle", "constant", "wsd"] = "cosine"
    warmup_steps: WholeOrZero = 0
    min_lr: Annotated[NonNegative, used_when(where_not("training.schedule.name", "constant"))] = 0.0
    step_size: Annotated[WholeOrZero, used_when(where("training.schedule.name", "step"))] = Field(
        default=0, description="step: number of steps between drops"
    )
    gamma: Annotated[Fraction, used_when(where("training.schedule.name", "step"))] = Field(
        default=0.1, description="step: factor of each drop"
    )
    cooldown_steps: Annotated[WholeOrZero, used_when(where("training.schedule.name", "wsd"))] = Field(
        default=0, description="wsd: number of final decay steps; 0: a tenth of all steps"
    )


class LossScaleSpec(Section):
    """Dynamic loss scaling of fp16 (arXiv:1710.03740): an overflow skips the step and halves the scale."""

    initial: Whole = Field(default=65536, description="a power of two")
    window: Whole = Field(default=1000, description="steps without overflow before the scale is doubled")
    minimum: Whole = 1
    hysteresis: Whole = Field(default=2, description="overflows before the scale is halved")


class EarlyStoppingSpec(Section):
    """Ends the run when the validation no longer improves; ``patience: 0`` turns it off."""

    patience: WholeOrZero = Field(
        default=0, description="evaluations without improvement before training stops; 0: off"
    )
    metric: Annotated[Text, used_when(where_not("training.early_stopping.patience", 0))] = Field(
        default="validation_loss", description="a metric of the validation, such as validation_top1"
    )
    min_delta: Annotated[NonNegative, used_when(where_not("training.early_stopping.patience", 0))] = Field(
        default=0.0, description="minimum change of the metric that counts as an improvement"
    )


class AveragingSpec(Section):
    """A second set of weights: their exponential average, or the mean of recent ones."""

    name: Literal["none", "ema", "checkpoints"] = "none"
    decay: Annotated[Fraction, used_when(where("training.averaging.name", "ema"))] = Field(
        default=0.999, description="ema: decay of the average per update"
    )
    every: Annotated[Whole, used_when(where_not("training.averaging.name", "none"))] = Field(
        default=1, description="steps between updates of the average"
    )


_OF_GROUPS = used_when(where_not("training.local_sgd.groups", 1))


class LocalSGDSpec(Section):
    """Groups of data-parallel ranks that train alone and meet in outer steps (DiLoCo, arXiv:2311.08105)."""

    groups: Whole = Field(default=1, description="groups, each with its own optimizer states; 1: ordinary training")
    inner_steps: Annotated[Whole, _OF_GROUPS] = Field(
        default=100, description="steps from one outer step to the next; there is one after the last step, too"
    )
    outer_optimizer: Annotated[Literal["nesterov", "sgd"], _OF_GROUPS] = Field(
        default="nesterov",
        description="sgd: without momentum; with a rate of 1 it takes the mean of the groups' weights",
    )
    outer_learning_rate: Annotated[Positive, _OF_GROUPS] = Field(
        default=0.7, description="default 0.7 with nesterov, 1 with sgd"
    )
    outer_momentum: Annotated[Fraction, used_when(where("training.local_sgd.outer_optimizer", "nesterov"))] = 0.9

    @model_validator(mode="before")
    @classmethod
    def _rate_by_optimizer(cls, value: Any) -> Any:
        """Return an outer learning rate of 1 for sgd, unless it is set."""
        if isinstance(value, dict) and value.get("outer_optimizer") == "sgd":
            return {"outer_learning_rate": 1.0, **value}
        return value


class DPOSpec(Section):
    """Direct preference optimization (arXiv:2305.18290) against the weights that training starts from.

    x is the log-ratio of the chosen answer to the reference minus that of the rejected one, times beta. sigmoid:
    -log s(x). conservative: -(1-e) log s(x) - e log s(-x). robust: (-(1-e) log s(x) + e log s(-x)) / (1-2e)
    (arXiv:2403.00409). ipo: (x/beta - 1/(2 beta))^2 of the log-ratios per token (arXiv:2310.12036).
    """

    beta: Positive = Field(default=0.1, description="weight of the reference; smaller values allow larger differences")
    loss: Literal["sigmoid", "robust", "conservative", "ipo"] = "sigmoid"
    label_smoothing: Annotated[Fraction, used_when(where("training.dpo.loss", "robust", "conservative"))] = Field(
        default=0.0, description="e: the assumed share of pairs with swapped answers, below 0.5"
    )
    length_normalized: Annotated[bool, used_when(where_not("training.dpo.loss", "ipo"))] = Field(
        default=False, description="divide each log-ratio by the number of tokens of its answer, as ipo always does"
    )


class TrainableGroup(Section):
    """Parameters that train from ``start_step`` to ``end_step``, with a learning rate and weight decay of their own.

    ``match``: shell patterns over Hugging Face parameter names; ``*`` also matches dots.
    """

    match: Targets
    lr: Positive | None = Field(default=None, description="peak learning rate; null: optimizer.lr")
    weight_decay: NonNegative | None = Field(
        default=None, description="of the group's matrices; null: optimizer.weight_decay"
    )
    start_step: Whole = Field(default=1, description="first step that trains the group")
    end_step: Whole | None = Field(default=None, description="last step that trains the group; null: the last one")


# With this micro-batch or a larger one, the statistics of one rank are as good as those of several: the size at which
# arXiv:1803.08494, figure 5, compares BatchNorm with GroupNorm.
_ENOUGH_IMAGES = 32


class TrainingSpec(Section):
    """Training objective and duration. ``global_batch_size`` counts sequences over the whole job, with dpo pairs."""

    objective: Literal["causal_lm", "sft", "dpo", "classification", "regression", "contrastive"] = Field(
        default="causal_lm",
        description="causal_lm: next token of text; sft: weighted tokens of examples; dpo: preference pairs; "
        "classification, the default of networks for images, and regression: labels of images; contrastive, the "
        "default of clip: pairs of image and text, or two views of an image. llava has sft",
    )
    dpo: Annotated[DPOSpec, used_when(where("training.objective", "dpo"))] = LEFT_OUT
    loss: Annotated[LossSpec, used_when(where("training.objective", *LOSSES_OF))] = LEFT_OUT

    global_batch_size: Whole
    micro_batch_size: AutoWhole = "auto"
    steps: Whole | None = None
    tokens: Count | None = None
    samples: Count | None = Field(
        default=None, description="images, pairs, or sequences of llava, of the whole run, in place of steps"
    )
    epochs: Epochs | None = Field(
        default=None, description="passes over the training data, such as 3 or 0.5, in place of steps"
    )
    precision: Literal["fp32", "tf32", "bf16", "fp16", "fp8", "fp4"] = "bf16"
    weight_dtype: Literal["auto", "fp8", "mxfp8", "mxfp4", "nvfp4"] = Field(
        default="auto", description="stored matrices of the blocks; auto: by precision; the engine has auto"
    )
    grad_dtype: Literal["fp32", "bf16", "fp16"] = "fp32"
    loss_scale: Annotated[LossScaleSpec, used_when(where("training.precision", "fp16"))] = LEFT_OUT
    trainable: tuple[TrainableGroup, ...] = Field(
        default=(), description="what trains, at each step by the first active group that matches; []: everything"
    )
    optimizer: OptimizerSpec = LEFT_OUT
    schedule: ScheduleSpec = LEFT_OUT
    gradient_clipping: NonNegative = Field(default=1.0, description="maximum gradient norm; 0: no clipping")
    gradient_clipping_by: Annotated[
        Literal["norm", "value", "adaptive"],
        used_when(where_not("training.gradient_clipping", 0.0), where("training.gradient_clipping_by", "adaptive")),
    ] = Field(
        default="norm",
        description="norm: global norm; value: each element; adaptive: global norm against its history (ZClip)",
    )
    label_smoothing: Fraction = 0.0
    sync_batch_norm: Annotated[
        SwitchOrAuto, used_when(where("model.family", "resnet")), used_when(where("model.norm", "batch"))
    ] = Field(
        default="auto",
        description="statistics of BatchNorm over all data-parallel ranks; auto: with a micro-batch below 32",
    )
    cross_entropy: Literal["auto", "whole", "chunked", "liger"] = Field(
        default="auto", description="whole: all logits of a micro-batch at once; chunked: in parts; liger: fused kernel"
    )
    early_stopping: EarlyStoppingSpec = LEFT_OUT
    averaging: AveragingSpec = LEFT_OUT
    local_sgd: LocalSGDSpec = LEFT_OUT
    seed: Annotated[int, Field(strict=True, ge=0, lt=2**63)] = 42
    compile: bool | Literal["auto"] = Field(
        default="auto",
        description="torch.compile of the blocks; auto: on GPUs, except with experts, fp8 and short runs",
    )

    def synchronizes_batch_norm(self, micro_batch_size: int, data_parallel: int) -> bool:
        """Return whether BatchNorm has the statistics of the micro-batches of all data-parallel ranks together."""
        wanted = micro_batch_size < _ENOUGH_IMAGES if self.sync_batch_norm == "auto" else self.sync_batch_norm
        return data_parallel > 1 and wanted

    def inconsistencies(self) -> Iterator[tuple[str, str]]:
        if [self.steps, self.tokens, self.samples, self.epochs].count(None) != 3:
            yield "steps", "exactly one of steps, tokens, samples and epochs must be set; null unsets one."
        if self.objective in LOSSES_OF:
            allowed = LOSSES_OF[self.objective]
            if self.loss.name not in ("auto", *allowed):
                yield "loss.name", f"must be one of auto, {', '.join(allowed)} with objective: {self.objective}."
            if self.objective != "classification" and self.label_smoothing:
                yield "label_smoothing", f"smooths classes, which objective: {self.objective} does not have. Set 0."
        if self.micro_batch_size != "auto" and self.global_batch_size % self.micro_batch_size:
            yield "micro_batch_size", f"must divide global_batch_size = {self.global_batch_size}."
        if self.schedule.min_lr > self.optimizer.lr:
            yield "schedule.min_lr", f"must not exceed optimizer.lr = {self.optimizer.lr:g}."
        if self.steps is not None and self.schedule.warmup_steps > self.steps:
            yield "schedule.warmup_steps", f"must not exceed steps = {self.steps}."
        schedule, steps = self.schedule, self.steps
        if schedule.name == "step" and not schedule.step_size:
            yield "schedule.step_size", "must be at least 1 with schedule.name: step."
        if (
            schedule.name == "wsd"
            and steps is not None
            and schedule.warmup_steps <= steps < schedule.warmup_steps + schedule.cooldown_steps
        ):
            yield "schedule.cooldown_steps", f"must not exceed steps = {steps} together with warmup_steps."
        for number, group in enumerate(self.trainable):
            if group.end_step is not None and group.end_step < group.start_step:
                yield f"trainable.{number}.end_step", f"must not be below start_step = {group.start_step}."
        if self.loss_scale.initial & (self.loss_scale.initial - 1):
            below = 1 << self.loss_scale.initial.bit_length() - 1
            yield "loss_scale.initial", f"must be a power of two. Use {below} or {2 * below}."
        if self.loss_scale.minimum > self.loss_scale.initial:
            yield "loss_scale.minimum", f"must not exceed loss_scale.initial = {self.loss_scale.initial}."
        if self.dpo.label_smoothing >= 0.5:
            yield "dpo.label_smoothing", "must be below 0.5."
        if self.objective == "dpo" and self.label_smoothing:
            yield "label_smoothing", "smooths tokens, which dpo does not. Set 0, or training.dpo.label_smoothing."
        if self.objective == "dpo" and self.cross_entropy == "liger":
            yield "cross_entropy", "must be auto, whole or chunked with objective: dpo."
        if self.precision in ("fp32", "tf32") and self.grad_dtype != "fp32":
            yield "grad_dtype", f"must be fp32 with precision: {self.precision}."


# torch's OneCycleLR: the rate starts at 1/25 of the peak and by default rises for 30 % of the run.
_ONE_CYCLE_DIVISOR = 25.0
_ONE_CYCLE_RISE = 0.3
_COOLDOWN_DIVISOR = 10  # wsd without cooldown_steps
_LAST_SHARE = 0.25  # of the steps, whose weights are averaged


def learning_rate(step: int, total_steps: int, training: TrainingSpec) -> float:
    """Return the rate of optimizer step ``step`` (1-based), which reaches the peak at the end of the warm-up.

    The warm-up is linear, except for ``onecycle``, where it is the rise of the cycle. Decays that end reach ``min_lr``
    in the last step.
    """
    schedule, peak = training.schedule, training.optimizer.lr
    warmup = schedule.warmup_steps
    if schedule.name == "onecycle":
        warmup = warmup or round(_ONE_CYCLE_RISE * total_steps)
        if step < warmup:
            return _between(peak / _ONE_CYCLE_DIVISOR, peak, 1 - _cosine((step - 1) / (warmup - 1)))
    elif step <= warmup:
        return peak * step / warmup
    done, after = step - warmup, max(1, total_steps - warmup)
    if schedule.name == "constant":
        return peak
    if schedule.name == "step":
        return max(schedule.min_lr, peak * schedule.gamma ** ((done - 1) // schedule.step_size))
    if schedule.name == "wsd":
        cooldown = min(schedule.cooldown_steps or max(1, total_steps // _COOLDOWN_DIVISOR), after)
        cooled = max(0, step - (total_steps - cooldown)) / cooldown
        return _between(schedule.min_lr, peak, 1 - math.sqrt(cooled))  # the best form of arXiv:2405.18392
    share = 1 - done / after if schedule.name == "linear" else _cosine(done / after)
    return _between(schedule.min_lr, peak, share)


def averaged_from(total_steps: int) -> int:
    """Return the first step (1-based) whose weights the mean of ``averaging: checkpoints`` includes.

    A mean of all weights would include those of the beginning, so it covers the last quarter of the run, as in
    stochastic weight averaging (arXiv:1803.05407).
    """
    return 1 + total_steps - max(1, int(_LAST_SHARE * total_steps))


def _cosine(progress: float) -> float:
    """Return the cosine decay from 1 to 0: SGDR, arXiv:1608.03983, eq. 5, without restarts."""
    return 0.5 * (1 + math.cos(math.pi * progress))


def _between(low: float, high: float, share: float) -> float:
    return low + (high - low) * share


def should_stop(values: Iterable[float], spec: EarlyStoppingSpec) -> bool:
    """Return True if none of the last ``patience`` values is lower than the best one before by more than ``min_delta``.

    ``values``: validation losses, or another metric, negated if its greatest is the best; of the whole run, so that the
    result is the same after a resume. NaN is no improvement.
    """
    best, since = float("inf"), 0
    for value in values:
        improved = value < best - spec.min_delta
        best, since = (value, 0) if improved else (best, since + 1)
    return 0 < spec.patience <= since
