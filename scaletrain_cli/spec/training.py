"""The training section: batch, precision, optimizer and schedule."""

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from scaletrain_cli.spec.quantities import AutoWhole, Count, Fraction, NonNegative, Positive, Whole, WholeOrZero
from scaletrain_cli.spec.section import LEFT_OUT, Section


class OptimizerSpec(Section):
    """AdamW (arXiv:1711.05101) or another. Weight decay applies to matrices, not to norms and biases."""

    name: Literal["adamw", "adam", "sgd", "momentum", "adamw_8bit"] = "adamw"
    lr: Positive = 3.0e-4
    betas: tuple[Fraction, Fraction] = (0.9, 0.95)
    eps: Positive = 1.0e-8
    weight_decay: NonNegative = 0.1


class ScheduleSpec(Section):
    """Learning rate as a pure function of the step: linear warm-up, then the named decay to ``min_lr``."""

    name: Literal["cosine", "linear", "step", "onecycle", "constant", "wsd"] = "cosine"
    warmup_steps: WholeOrZero = 0
    min_lr: NonNegative = 0.0


class TrainingSpec(Section):
    """What is optimised and for how long. ``global_batch_size`` counts sequences over the whole job."""

    global_batch_size: Whole
    micro_batch_size: AutoWhole = "auto"
    steps: Whole | None = None
    tokens: Count | None = None
    precision: Literal["fp32", "tf32", "bf16", "fp16", "fp8"] = "bf16"
    grad_dtype: Literal["fp32", "bf16", "fp16"] = "fp32"
    optimizer: OptimizerSpec = LEFT_OUT
    schedule: ScheduleSpec = LEFT_OUT
    gradient_clipping: NonNegative = Field(default=1.0, description="largest gradient norm; 0 turns clipping off")
    seed: Annotated[int, Field(strict=True, ge=0, lt=2**63)] = 42
    compile: bool = False

    def inconsistencies(self) -> Iterator[tuple[str, str]]:
        """(key, message) for each setting that contradicts another one."""
        if (self.steps is None) == (self.tokens is None):
            yield "steps", "give exactly one of steps and tokens; null takes one away."
        if self.micro_batch_size != "auto" and self.global_batch_size % self.micro_batch_size:
            yield "micro_batch_size", f"must divide global_batch_size = {self.global_batch_size}."
        if self.schedule.min_lr > self.optimizer.lr:
            yield "schedule.min_lr", f"must not exceed optimizer.lr = {self.optimizer.lr:g}."
        if self.steps is not None and self.schedule.warmup_steps > self.steps:
            yield "schedule.warmup_steps", f"must not exceed steps = {self.steps}."
        if self.precision in ("fp32", "tf32") and self.grad_dtype != "fp32":
            yield "grad_dtype", f"must be fp32 with precision: {self.precision}."


class EvaluationSpec(Section):
    """Validation loss every ``every`` steps over ``batches`` global batches; ``every: 0`` turns it off."""

    every: WholeOrZero = 500
    batches: Whole = 20
