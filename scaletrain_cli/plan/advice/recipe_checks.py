"""Whether a training recipe makes sense: batch, learning rate, warm-up, data, precision, dimensions. Plans nothing."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from scaletrain_cli.plan.catalogue.hardware import Accelerator
from scaletrain_cli.plan.result import Layout, ModelSize, Sanity
from scaletrain_cli.spec import ModelSpec, RunSpec

# Learning rate and batch size against the recipe that a model's authors published, and the critical batch size.


_LINEAR = ("sgd", "momentum")
# Learning rates are tuned to about a factor of two; beyond four something is likely to be wrong.
_NEAR, _FAR = 2.0, 4.0
# Goyal et al. scale a batch of 256 linearly up to 8,192; at 16,384 the error rises (section 5.2, figure 1).
_LINEAR_SCALING_LIMIT = 32.0
# Full fine-tuning of language models: TRL's default is 2e-5; LIMA (arXiv:2305.11206) and Llama 2 chat
# (arXiv:2307.09288, section 3.1) took 1e-5 and 2e-5. Ten times as much is of the order of pre-training.
_FINE_TUNING_LR, _PRE_TRAINING_LR = 2e-5, 2e-4


@dataclass(frozen=True)
class Recipe:
    """What the authors of a preset trained it with: ``batch`` in tokens, images or pairs."""

    batch: int
    unit: str
    lr: float
    optimizer: str
    source: str


def published_recipe(preset: str | None) -> Recipe | None:
    """The recipe of a preset, or None where its authors published none."""
    row = _recipes().get(preset or "")
    return None if row is None else Recipe(**row)


def scaled_lr(recipe: Recipe, batch: float, optimizer: str) -> float | None:
    """The recipe's learning rate for another batch size; None between SGD and Adam, whose rates do not compare."""
    if (optimizer in _LINEAR) != (recipe.optimizer in _LINEAR):
        return None
    ratio = batch / recipe.batch
    return recipe.lr * (ratio if optimizer in _LINEAR else math.sqrt(ratio))


def critical_batch_tokens(parameters: int, tokens: float) -> float:
    """Tokens per step at which twice as many tokens are needed as with small batches.

    Kaplan et al., arXiv:2001.08361: B_crit = 2e8 L^(-1/0.21) (eq. 1.4), at the loss that so many parameters and tokens
    reach, L = ((6.4e13 / N)^(0.076/0.103) + 1.8e13 / D)^0.103 (eq. 1.5, table 2). An order of magnitude: their data.
    """
    loss = ((6.4e13 / max(1, parameters)) ** (0.076 / 0.103) + 1.8e13 / max(1.0, tokens)) ** 0.103
    return float(2e8 * loss ** (-1 / 0.21))


def check_learning_rate(spec: RunSpec) -> Iterator[Sanity]:
    """Return the learning rate beside that of the published recipe at this batch size, or beside fine-tuning."""
    if getattr(spec.model, "weights", None) is not None:
        yield _fine_tuning(spec)
        return
    optimizer, batch = spec.training.optimizer, spec.training.global_batch_size * spec.units_per_sample
    recipe = published_recipe(spec.model.preset)
    value = f"{optimizer.lr:g}"
    if recipe is None:
        preset = spec.model.preset or "these dimensions"
        message = f"no published recipe for {preset} to compare with; when the batch size changes by k, scale the "
        rule = (
            "by k, shown for k up to 32 (arXiv:1706.02677)"
            if optimizer.name in _LINEAR
            else "by the square root of k (arXiv:2205.10287)"
        )
        yield Sanity("learning rate", value, "ok", f"{message}learning rate {rule}.")
        return
    origin = f"{recipe.lr:g} at {recipe.batch:,} {recipe.unit} ({recipe.source})"
    suggested = scaled_lr(recipe, batch, optimizer.name)
    if suggested is None:
        yield Sanity("learning rate", value, "note", f"the recipe has {recipe.optimizer}, with {origin}.")
        return
    off = optimizer.lr / suggested
    verdict = "ok" if 1 / _NEAR <= off <= _NEAR else "warning" if off > _FAR else "note"
    if optimizer.name in _LINEAR and batch / recipe.batch > _LINEAR_SCALING_LIMIT:
        limit = f"linear scaling is shown up to a batch {_LINEAR_SCALING_LIMIT:.0f} times as large (arXiv:1706.02677); "
        message = f"{limit}this one is {batch / recipe.batch:.3g} times the recipe's, {origin}. Try lower rates first."
        yield Sanity("learning rate", value, "warning", message)
        return
    yield Sanity(
        "learning rate", value, verdict, f"the recipe scales to {suggested:.2g}: {_rule(spec, recipe, batch)}{origin}."
    )


def _fine_tuning(spec: RunSpec) -> Sanity:
    rate = spec.training.optimizer.lr
    usual = f"fine-tuning from given weights usually takes about {_FINE_TUNING_LR:g} with Adam (TRL's default)"
    if spec.training.optimizer.name in _LINEAR:
        return Sanity("learning rate", f"{rate:g}", "note", f"{usual}; for SGD there is no usual value.")
    if rate < _PRE_TRAINING_LR:
        return Sanity("learning rate", f"{rate:g}", "ok", f"{usual}.")
    message = f"{usual}; this one is of the order of pre-training, and may undo what the weights have learned."
    return Sanity("learning rate", f"{rate:g}", "note", message)


def check_critical_batch(spec: RunSpec, parameters: int) -> Iterator[Sanity]:
    """Return the batch size beside the critical one, for transformers of text that are trained from the start."""
    if spec.unit != "tokens" or getattr(spec.model, "weights", None) is not None:
        return
    batch = spec.training.global_batch_size * spec.units_per_sample
    critical = critical_batch_tokens(parameters, float(batch) * spec.total_steps)
    verdict = "ok" if batch <= critical else "note" if batch <= _FAR * critical else "warning"
    yield Sanity(
        "critical batch size",
        f"about {critical:.2g} tokens",
        verdict,
        f"{batch:.3g} tokens per step need about {1 + batch / critical:.2g} times the tokens that small batches would "
        "(arXiv:1812.06162, arXiv:2001.08361; an order of magnitude).",
    )


def _rule(spec: RunSpec, recipe: Recipe, batch: int) -> str:
    ratio = batch / recipe.batch
    if 0.9 <= ratio <= 1.1:
        return ""
    if spec.training.optimizer.name in _LINEAR:
        return f"linearly with a batch {ratio:.3g} times as large (arXiv:1706.02677), from "
    return (
        f"with the square root of a batch {ratio:.3g} times as large (arXiv:2205.10287, which also scales 1 - beta by "
        f"{ratio:.3g} and eps by {1 / math.sqrt(ratio):.2g}), from "
    )


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
# A validation set this many times as large as an evaluation reads, and this large, is worth a word.
_SPARE_EVALUATIONS = 20
_LARGE_VALIDATION_TOKENS = 1e9
_PETAFLOP_DAY = 1e15 * 86400


def check_recipe(spec: RunSpec, layout: Layout, size: ModelSize, device: Accelerator) -> tuple[Sanity, ...]:
    """Every check that applies, in the order in which a recipe is written."""
    return (
        _batch(spec, layout),
        *check_critical_batch(spec, size.parameters),
        *check_learning_rate(spec),
        _warmup(spec),
        *_data(spec, size),
        *_validation(spec),
        _work(spec, size),
        *_precision(spec, device),
        *_dimensions(spec, layout, device),
    )


def _batch(spec: RunSpec, layout: Layout) -> Sanity:
    samples = layout.global_batch_size
    units = samples * spec.units_per_sample
    value = f"{samples:,} sequences, {units:,} tokens" if spec.unit == "tokens" else f"{samples:,} {spec.unit}"
    parts = f"{layout.micro_batch_size} per GPU x {layout.gradient_accumulation_steps} accumulated"
    return Sanity("effective batch size", value, "ok", f"{parts} x {layout.data_parallel} data-parallel ranks.")


def _warmup(spec: RunSpec) -> Sanity:
    steps, total = spec.training.schedule.warmup_steps, spec.total_steps
    share = steps / total
    value = f"{steps:,} steps, {100 * share:.2g} %"
    if not steps:
        message = "large batches and Adam's first steps need one (arXiv:1706.02677, arXiv:1908.03265)."
        return Sanity("warm-up", value, "note", message)
    if share > _MOST_WARMUP:
        return Sanity("warm-up", value, "warning", "the learning rate rises for most of the run.")
    if share > _LONG_WARMUP:
        return Sanity("warm-up", value, "note", "long: published recipes take from 0.1 % to 11 % of the steps.")
    return Sanity("warm-up", value, "ok", "within what published recipes take, 0.1 % to 11 % of the steps.")


def _data(spec: RunSpec, size: ModelSize) -> Iterator[Sanity]:
    if spec.unit != "tokens" or getattr(spec.model, "weights", None) is not None:
        return  # the ratio says nothing about a run that starts from weights
    tokens = spec.total_steps * spec.training.global_batch_size * spec.units_per_sample
    ratio = tokens / max(1, size.active_parameters)
    message = f"{_count(tokens)} tokens for {_count(size.active_parameters)} active parameters; about "
    message += f"{_OPTIMAL_TOKENS_PER_PARAMETER} is compute-optimal (arXiv:2203.15556)."
    verdict = "note" if ratio < _FEW_TOKENS_PER_PARAMETER else "ok"
    yield Sanity("tokens per parameter", f"{ratio:.3g}", verdict, message)


def _validation(spec: RunSpec) -> Iterator[Sanity]:
    """Return a note where ``data.validation_split`` holds back far more tokens than the evaluations read."""
    split = spec.data.validation_split
    if spec.unit != "tokens" or not spec.evaluation.every or not 0 < split < 1:
        return
    tokens = spec.total_steps * spec.training.global_batch_size * spec.units_per_sample
    held = tokens * split / (1 - split)
    read = spec.evaluation.batches * spec.training.global_batch_size * spec.units_per_sample
    if held <= max(_SPARE_EVALUATIONS * read, _LARGE_VALIDATION_TOKENS):
        return
    enough = float(f"{_SPARE_EVALUATIONS * read / tokens:.1g}")
    message = f"holds back about {_count(held)} tokens of a corpus that is read once; one evaluation reads "
    message += f"{_count(read)}. data.validation_split: {enough:g} is enough."
    yield Sanity("validation split", f"{100 * split:.3g} %", "note", message)


def _count(number: float) -> str:
    """``164 k``, ``6.74 B``: three figures, as the plan has them elsewhere."""
    power = min(4, max(0, math.floor(math.log10(max(1.0, float(f"{number:.2e}"))) / 3)))
    scaled = number / 1000**power
    figures = f"{scaled:,.0f}" if power == 0 or scaled >= 99.95 else f"{scaled:.3g}"
    return f"{figures} {'kMBT'[power - 1]}" if power else figures


def _work(spec: RunSpec, size: ModelSize) -> Sanity:
    flops = size.flops_per_token * spec.total_steps * spec.training.global_batch_size * spec.units_per_sample
    message = f"{flops / _PETAFLOP_DAY:.3g} PFLOP/s-days, forward and backward, without recomputation."
    return Sanity("total FLOPs", f"{flops:.3g}", "ok", message)


def _precision(spec: RunSpec, device: Accelerator) -> Iterator[Sanity]:
    precision = spec.training.precision
    if device.is_cpu:
        return
    if precision not in device.flops:
        known = ", ".join(device.flops)
        message = f"{device.name} has no {precision} units: it would be emulated, slowly. It has {known}."
        yield Sanity("precision", precision, "warning", message)
    elif precision == "fp16":
        better = f" {device.name} has bf16, which needs none." if "bf16" in device.flops else ""
        message = "needs loss scaling (arXiv:1710.03740); steps whose gradients overflow are skipped." + better
        yield Sanity("precision", precision, "note", message)
    elif precision == "fp32" and "bf16" in device.flops:
        faster = device.flops["bf16"] / device.flops["fp32"]
        yield Sanity("precision", precision, "note", f"bf16 has {faster:.3g} times the peak rate on {device.name}.")
    else:
        yield Sanity("precision", precision, "ok", f"{device.name} has units for it.")


def _dimensions(spec: RunSpec, layout: Layout, device: Accelerator) -> Iterator[Sanity]:
    """Widths of the matrices on one tensor rank."""
    model, t = spec.model, layout.tensor_parallel
    if device.is_cpu or not isinstance(model, ModelSpec):
        return
    widths = {
        "hidden_size": model.hidden_size,
        "intermediate_size per tensor rank": model.intermediate_size // t or 1,
        "attention width per tensor rank": model.num_attention_heads * model.head_dim // t or 1,
        "vocab_size per tensor rank": model.vocab_size // t or 1,
    }
    if model.num_experts:
        widths["expert_size per tensor rank"] = model.expert_size // t or 1
    odd = [f"{name} = {width:,}" for name, width in widths.items() if width % _TILE]
    topic, value = "matrix dimensions", f"multiples of {_TILE}"
    if not odd:
        yield Sanity(topic, value, "ok", "tensor cores work on whole tiles.")
        return
    message = f"not a multiple of {_TILE}, so tensor cores work on padding: {'; '.join(odd)}."
    if model.vocab_size % (_TILE * t):
        message += f" A vocab_size of {-(-model.vocab_size // (_TILE * t)) * _TILE * t:,} would be one."
    yield Sanity(topic, f"{len(odd)} odd", "note", message)
