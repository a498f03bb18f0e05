"""Whether a training recipe makes sense: batch, learning rate, warm-up, data, precision, dimensions. Plans nothing."""

from __future__ import annotations

import math
from collections.abc import Iterator

from scaletrain_cli.plan.advice.learning_rate import check_critical_batch, check_learning_rate
from scaletrain_cli.plan.catalogue.hardware import Accelerator
from scaletrain_cli.plan.result import Layout, ModelSize, Sanity
from scaletrain_cli.spec import ModelSpec, RunSpec

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
