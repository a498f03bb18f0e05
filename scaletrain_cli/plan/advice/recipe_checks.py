"""Checks of the training recipe: batch, learning rate, warm-up, data, precision and dimensions.

Scaling rules: linear for SGD (Goyal et al., arXiv:1706.02677), square root for Adam (Malladi et al., arXiv:2205.10287).
A run that starts from weights is compared with fine-tuning instead (fine_tuning_checks.py).
"""

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from scaletrain_cli.plan.advice.fine_tuning_checks import (
    check_fine_tuning,
    check_rate,
    check_what_trains,
    starts_from_weights,
)
from scaletrain_cli.plan.catalogue.hardware import Accelerator
from scaletrain_cli.plan.result import Layout, ModelSize, Sanity
from scaletrain_cli.plan.workloads.registry import workload_of
from scaletrain_cli.reasons import Reason
from scaletrain_cli.spec import RunSpec

_LINEAR = ("sgd", "momentum")
# Learning rates are tuned to about a factor of two; a factor above four suggests a mistake.
_NEAR, _FAR = 2.0, 4.0
# Goyal et al. scale a batch of 256 linearly up to 8,192; at 16,384 the error rises (section 5.2, figure 1).
_LINEAR_SCALING_LIMIT = 32.0


@dataclass(frozen=True)
class Recipe:
    """The published training settings of a preset: ``batch`` in tokens, images or pairs."""

    batch: int
    unit: str
    lr: float
    optimizer: str
    source: str


def published_recipe(preset: str | None) -> Recipe | None:
    """Return the published recipe of a preset, or None if its authors published none."""
    row = _recipes().get(preset or "")
    return None if row is None else Recipe(**row)


def scaled_lr(recipe: Recipe, batch: float, optimizer: str) -> float | None:
    """Return the recipe's learning rate scaled to another batch size; None if one uses SGD and the other Adam."""
    if (optimizer in _LINEAR) != (recipe.optimizer in _LINEAR):
        return None
    ratio = batch / recipe.batch
    return recipe.lr * (ratio if optimizer in _LINEAR else math.sqrt(ratio))


def critical_batch_tokens(parameters: int, tokens: float) -> float:
    """Return the critical batch size in tokens, at which training needs twice the tokens that small batches would need.

    Kaplan et al., arXiv:2001.08361: B_crit = 2e8 L^(-1/0.21) (eq. 1.4), at the loss that N parameters and D tokens
    reach, L = ((6.4e13 / N)^(0.076/0.103) + 1.8e13 / D)^0.103 (eq. 1.5, table 2). An order of magnitude, because the
    constants depend on their data.
    """
    loss = ((6.4e13 / max(1, parameters)) ** (0.076 / 0.103) + 1.8e13 / max(1.0, tokens)) ** 0.103
    return float(2e8 * loss ** (-1 / 0.21))


def check_learning_rate(spec: RunSpec) -> Iterator[Sanity]:
    """Yield the learning rate compared with the published recipe at this batch size, or with fine-tuning."""
    if starts_from_weights(spec):
        if workload_of(spec.model).counts_tokens:  # the published rates are of language models
            yield check_rate(spec)
        return
    if not spec.is_from_scratch:
        return
    optimizer, batch = spec.training.optimizer, spec.training.global_batch_size * spec.units_per_sample
    recipe = published_recipe(spec.model.preset)
    value, linear = f"{optimizer.lr:g}", optimizer.name in _LINEAR
    if recipe is None:
        code = "plan.no-recipe-linear" if linear else "plan.no-recipe-square-root"
        reason = Reason(code, {"model": spec.model.preset or "these dimensions"})
        yield Sanity("learning rate", value, "ok", reason)
        return
    origin = {"lr": recipe.lr, "batch": recipe.batch, "unit": recipe.unit, "source": recipe.source}
    suggested = scaled_lr(recipe, batch, optimizer.name)
    if suggested is None:
        reason = Reason("plan.recipe-of-another-optimizer", {"optimizer": recipe.optimizer, **origin})
        yield Sanity("learning rate", value, "note", reason)
        return
    ratio = batch / recipe.batch
    if linear and ratio > _LINEAR_SCALING_LIMIT:
        reason = Reason("plan.beyond-linear-scaling", {"limit": _LINEAR_SCALING_LIMIT, "ratio": ratio, **origin})
        yield Sanity("learning rate", value, "warning", reason)
        return
    off = optimizer.lr / suggested
    verdict = "ok" if 1 / _NEAR <= off <= _NEAR else "warning" if off > _FAR else "note"
    scaled = {"suggested": suggested, "ratio": ratio, **origin}
    if 0.9 <= ratio <= 1.1:
        reason = Reason("plan.recipe-rate", scaled)
    elif linear:
        reason = Reason("plan.recipe-rate-linear", scaled)
    else:
        reason = Reason("plan.recipe-rate-square-root", {**scaled, "eps_ratio": 1 / math.sqrt(ratio)})
    yield Sanity("learning rate", value, verdict, reason)


def check_critical_batch(spec: RunSpec, parameters: int) -> Iterator[Sanity]:
    """Yield the batch size compared with the critical batch size, for language models trained from random weights."""
    if not workload_of(spec.model).counts_tokens or not spec.is_from_scratch:
        return
    batch = spec.training.global_batch_size * spec.units_per_sample
    critical = critical_batch_tokens(parameters, float(batch) * spec.total_steps)
    verdict = "ok" if batch <= critical else "note" if batch <= _FAR * critical else "warning"
    reason = Reason("plan.critical-batch", {"tokens": batch, "times": 1 + batch / critical})
    yield Sanity("critical batch size", f"about {critical:.2g} tokens", verdict, reason)


@cache
def _recipes() -> dict[str, dict[str, Any]]:
    text = files("scaletrain_cli.plan.catalogue").joinpath("recipes.json").read_text(encoding="utf-8")
    return dict(json.loads(text)["recipes"])


# Tensor cores work on tiles: 128 bytes of 16-bit numbers is the width at which A100 and later run at full rate
# (NVIDIA, Matrix Multiplication Background User's Guide, section 3).
_TILE = 64
# Published warm-ups take from 0.1 % (GPT-3) to 11 % (ViT on ImageNet) of the steps.
_LONG_WARMUP = 0.15
_MOST_WARMUP = 0.5
# Chinchilla (arXiv:2203.15556) is compute-optimal at about 20 tokens per parameter.
_OPTIMAL_TOKENS_PER_PARAMETER = 20
_FEW_TOKENS_PER_PARAMETER = 5
# A validation set is reported if it is this many times larger than an evaluation reads, and at least this large.
_SPARE_EVALUATIONS = 20
_LARGE_VALIDATION_TOKENS = 1e9
# Published trainings take 0.0001 (DeepSeek-V3) to 0.02 (Mixtral 8x7B).
_LARGE_BALANCE = 0.1
_PETAFLOP_DAY = 1e15 * 86400


def check_recipe(spec: RunSpec, layout: Layout, size: ModelSize, device: Accelerator) -> tuple[Sanity, ...]:
    """Return every check that applies, in the order of the sections of a spec."""
    flops = size.flops_per_token * spec.total_steps * spec.training.global_batch_size * spec.units_per_sample
    reason = Reason("plan.total-flops", {"petaflop_days": flops / _PETAFLOP_DAY})
    return (
        _batch(spec, layout),
        *check_critical_batch(spec, size.parameters),
        *check_learning_rate(spec),
        *check_what_trains(spec, size),
        *(check_fine_tuning(spec, size) if workload_of(spec.model).counts_tokens else ()),
        _warmup(spec),
        *_router_balance(spec),
        *_data(spec, size),
        *_validation(spec),
        Sanity("total FLOPs", f"{flops:.3g}", "ok", reason),
        *_precision(spec, device),
        *_dimensions(spec, layout, device),
    )


def _batch(spec: RunSpec, layout: Layout) -> Sanity:
    """Return the global batch size, and the factors that it is made of."""
    samples = layout.global_batch_size
    units = samples * spec.units_per_sample
    workload = workload_of(spec.model)
    value = f"{samples:,} {spec.samples}"
    value += f", {units:,} tokens" if workload.counts_tokens else ""
    parts = {
        "micro_batch": layout.micro_batch_size,
        "accumulation": layout.gradient_accumulation_steps,
        "data": layout.data_parallel,
    }
    return Sanity("effective batch size", value, "ok", Reason("plan.effective-batch", parts))


def _warmup(spec: RunSpec) -> Sanity:
    """Return the check of the warm-up, as a share of all steps."""
    steps, total = spec.training.schedule.warmup_steps, spec.total_steps
    share = steps / total
    value = f"{steps:,} steps, {100 * share:.2g} %"
    if not steps:
        return Sanity("warm-up", value, "note", Reason("plan.no-warm-up"))
    if share > _MOST_WARMUP:
        return Sanity("warm-up", value, "warning", Reason("plan.warm-up-most-of-the-run"))
    if share > _LONG_WARMUP:
        return Sanity("warm-up", value, "note", Reason("plan.long-warm-up"))
    return Sanity("warm-up", value, "ok", Reason("plan.usual-warm-up"))


def _router_balance(spec: RunSpec) -> Iterator[Sanity]:
    """Yield the coefficient of the balance loss of routers."""
    if spec.unit != "tokens" or not spec.language_model.moe_layers:
        return
    model = spec.language_model
    coefficient, code = model.router_aux_loss_coef, "plan.router-balance"
    if coefficient > _LARGE_BALANCE:
        code = "plan.router-balance-large"
    elif not coefficient and not model.bias_update_speed and spec.is_from_scratch:
        code = "plan.router-balance-none"
    verdict = "warning" if coefficient > _LARGE_BALANCE else "note"  # shown always: files state it, or leave it out
    yield Sanity("router balance loss", f"{coefficient:g}", verdict, Reason(code))


def _data(spec: RunSpec, size: ModelSize) -> Iterator[Sanity]:
    if not workload_of(spec.model).counts_tokens or not spec.is_from_scratch:
        return  # the ratio does not apply to a run that starts from pretrained weights
    tokens = spec.total_steps * spec.training.global_batch_size * spec.units_per_sample
    ratio = tokens / max(1, size.active_parameters)
    params = {"tokens": tokens, "parameters": size.active_parameters, "optimal": _OPTIMAL_TOKENS_PER_PARAMETER}
    verdict = "note" if ratio < _FEW_TOKENS_PER_PARAMETER else "ok"
    yield Sanity("tokens per parameter", f"{ratio:.3g}", verdict, Reason("plan.tokens-per-parameter", params))


def _validation(spec: RunSpec) -> Iterator[Sanity]:
    """Yield a note if ``data.validation_split`` reserves far more tokens than the evaluations read."""
    split = spec.data.validation_split
    if not workload_of(spec.model).counts_tokens or not spec.evaluation.every or not 0 < split < 1:
        return
    tokens = spec.total_steps * spec.training.global_batch_size * spec.units_per_sample
    held = tokens * split / (1 - split)
    read = spec.evaluation.batches * spec.training.global_batch_size * spec.units_per_sample
    if held <= max(_SPARE_EVALUATIONS * read, _LARGE_VALIDATION_TOKENS):
        return
    enough = float(f"{_SPARE_EVALUATIONS * read / tokens:.1g}")
    reason = Reason("plan.large-validation-split", {"held": held, "read": read, "enough": enough})
    yield Sanity("validation split", f"{100 * split:.3g} %", "note", reason)


def _precision(spec: RunSpec, device: Accelerator) -> Iterator[Sanity]:
    precision = spec.training.precision
    if device.is_cpu:
        return
    named = {"device": device.name, "precision": precision}
    if precision not in device.flops:
        reason = Reason("plan.precision-emulated", {**named, "known": ", ".join(device.flops)})
        yield Sanity("precision", precision, "warning", reason)
    elif precision == "fp16":
        reason = Reason("plan.loss-scaling-or-bf16" if "bf16" in device.flops else "plan.loss-scaling", named)
        yield Sanity("precision", precision, "note", reason)
    elif precision == "fp32" and "bf16" in device.flops:
        faster = device.flops["bf16"] / device.flops["fp32"]
        yield Sanity("precision", precision, "note", Reason("plan.bf16-is-faster", {**named, "ratio": faster}))
    else:
        yield Sanity("precision", precision, "ok", Reason("plan.precision-supported", named))


def _dimensions(spec: RunSpec, layout: Layout, device: Accelerator) -> Iterator[Sanity]:
    """Yield the widths of the matrices on one tensor rank that are not a multiple of a tile."""
    t, widths = layout.tensor_parallel, workload_of(spec.model).matrix_widths(spec, layout.tensor_parallel)
    if device.is_cpu or not widths:
        return
    odd = [f"{name} = {width:,}" for name, width in widths.items() if width % _TILE]
    topic, value = "matrix dimensions", f"multiples of {_TILE}"
    if not odd:
        yield Sanity(topic, value, "ok", Reason("plan.whole-tiles"))
        return
    params: dict[str, Any] = {"tile": _TILE, "widths": "; ".join(odd)}
    vocabulary = spec.transformer.vocab_size
    if vocabulary % (_TILE * t):
        params["padded"] = -(-vocabulary // (_TILE * t)) * _TILE * t
    code = "plan.padded-tiles-and-vocabulary" if "padded" in params else "plan.padded-tiles"
    yield Sanity(topic, f"{len(odd)} odd", "note", Reason(code, params))
