"""Checks of the training recipe: batch, learning rate, warm-up, data, precision and dimensions.

Scaling rules: linear for SGD (Goyal et al., arXiv:1706.02677), square root for Adam (Malladi et al., arXiv:2205.10287).
A run that starts from weights is compared with fine-tuning instead: learning rate, epochs, batch, weight decay and
adapter. Its figures are those of runs and examples that others published: Tulu 3 (arXiv:2411.15124;
allenai/open-instruct, docs/tulu3.md), Zephyr (rates: arXiv:2310.16944; batches and epochs, which differ there:
alignment-handbook's recipe, huggingface/alignment-handbook, recipes/zephyr-7b-beta), QLoRA (arXiv:2305.14314;
artidoro/qlora, scripts), the defaults of TRL, and the Llama 3 examples of Axolotl (examples/llama-3/lora-8b.yml) and
LLaMA-Factory (examples/train_lora/llama3_lora_sft.yaml).
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scaletrain_cli.plan.catalogue.hardware import Accelerator
from scaletrain_cli.plan.data_size import data_size
from scaletrain_cli.plan.result import Layout, ModelSize, Sanity
from scaletrain_cli.plan.workloads.registry import workload_of
from scaletrain_cli.project_files import packaged_data
from scaletrain_cli.reasons import Reason
from scaletrain_cli.spec import ModelSpec, RunSpec
from scaletrain_cli.spec.extensions import BUILT_IN_OPTIMIZERS
from scaletrain_cli.spec.loading import complete
from scaletrain_cli.spec.starting_spec import GivenPreset

# Learning rates of large models are lower in Tulu 3 and QLoRA; "large" begins between their 13B and 33B.
_LARGE_PARAMETERS = 30e9
# Full fine-tuning of language models: TRL's default and Zephyr are 2e-5; Tulu 3 took 5e-6 for 8B and 2e-6 for 70B. Ten
# times the highest is of the order of pre-training (Llama 2 7B: 3e-4, 70B: 1.5e-4, arXiv:2307.09288).
_RATE, _LARGE_RATE = 2e-5, 2e-6
_PRE_TRAINING_RATE, _LARGE_PRE_TRAINING_RATE = 2e-4, 1e-4
# LoRA: QLoRA (table 9) took 2e-4 up to 13B and 1e-4 for 33B and 65B. About ten times the rate of full fine-tuning is
# best for an adapter (Schulman et al., LoRA Without Regret, Thinking Machines Lab, 2025).
_ADAPTER_RATE, _LARGE_ADAPTER_RATE = 2e-4, 1e-4
_LOW_ADAPTER_RATE, _HIGH_ADAPTER_RATE = 2e-5, 2e-3
# DPO: Zephyr 7B and Tulu 3 8B took 5e-7, Tulu 3 70B and 405B 2e-7; the authors (arXiv:2305.18290) 1e-6. With an adapter
# about ten times as much.
_PREFERENCE_RATE, _LARGE_PREFERENCE_RATE = 5e-7, 2e-7
_HIGH_PREFERENCE_RATE, _LARGE_HIGH_PREFERENCE_RATE = 5e-6, 2e-6
# Epochs: alignment-handbook's recipe for Zephyr 1, Tulu 3 2, TRL's and LLaMA-Factory's defaults 3, Axolotl's example 4;
# of DPO the recipe for Zephyr and Tulu 3 1, Zephyr itself up to 3 (arXiv:2310.16944),
# OLMo 7B Instruct 3 (its model card). Repeated text is almost as good as new up to 4 epochs (arXiv:2305.16264).
# By objective: the code for a usual number, that for more, and the most that is usual.
_EPOCHS = {
    "sft": ("plan.usual-epochs", "plan.epochs-many", 5.0),
    "dpo": ("plan.preference-epochs", "plan.preference-epochs-many", 3.0),
    "causal_lm": ("plan.repeated-text", "plan.repeated-text-many", 4.0),
}
_FEWEST_EPOCHS = 0.5  # below, the run reads a part of the data, and published numbers of epochs say nothing
# Samples per batch: Tulu 3 and alignment-handbook's recipe for Zephyr 128, for both objectives. With LoRA, QLoRA 16,
# Axolotl and LLaMA-Factory 8, and below 32 is recommended, because large batches hurt more (LoRA Without Regret). A
# note begins at several times these.
_MOST_SAMPLES, _MOST_SAMPLES_OF_ADAPTER, _FEWEST_SAMPLES = 1024, 128, 8
# Weight decay: Tulu 3, Zephyr, QLoRA and Axolotl 0, torchtune 0.01, Llama 2 chat 0.1.
_MOST_DECAY = 0.1
# alpha / rank: QLoRA 16 / 64, Axolotl 16 / 32, PEFT 8 / 8, LLaMA-Factory and torchtune 2; 16 / 256 in TRL's guide to
# LoRA Without Regret.
_LEAST_SCALE, _MOST_SCALE = 1 / 32, 8.0
# A language model stores about 2 bits per parameter (arXiv:2404.05405); at a loss of 0.7 nats a token has one bit.
_BITS_PER_PARAMETER, _BITS_PER_TOKEN = 2.0, 1.0
_HIGHEST_RANK = 256  # that is advised, as in TRL's guide to LoRA Without Regret
# The Llama whose recipe a model without one takes: below as many active parameters.
_LIKE = {"llama-7b": _LARGE_PARAMETERS, "llama-3-70b": 100e9, "llama-405b": math.inf}
_ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj", "c_attn"}


def _noted(topic: str, value: str, note: str | None, ok: str, params: Mapping[str, object] | None = None) -> Sanity:
    """Return a check: a note with the code ``note``, or without one that all is well, with the code ``ok``."""
    return Sanity(topic, value, "note" if note else "ok", Reason(note or ok, params or {}))


def check_fine_tuning(spec: RunSpec, size: ModelSize) -> Iterator[Sanity]:
    """Yield the checks of a language model that starts from weights, without its learning rate."""
    yield from _epochs(spec)
    if spec.language_weights is None:
        return
    yield from _fine_tuning_batch(spec)
    decay = spec.training.optimizer.weight_decay
    if decay > _MOST_DECAY:
        yield Sanity("weight decay", f"{decay:g}", "note", Reason("plan.fine-tuning-decay-high"))
    yield from _adapter(spec, size)


def check_rate(spec: RunSpec) -> Sanity:
    """Return the learning rate compared with published ones for the objective, the method and the size."""
    rate, large = spec.training.optimizer.lr, workload_of(spec.model).parameter_count(spec.model) > _LARGE_PARAMETERS
    usual = {"usual": _LARGE_RATE if large else _RATE}
    with_adapter = getattr(spec.model, "adapter", None) is not None
    if spec.training.optimizer.traits.kind == "sgd":
        note, ok = "plan.fine-tuning-sgd", ""
    elif spec.training.objective == "dpo":
        times = 10 if with_adapter else 1
        high = rate > times * (_LARGE_HIGH_PREFERENCE_RATE if large else _HIGH_PREFERENCE_RATE)
        usual = {"usual": times * (_LARGE_PREFERENCE_RATE if large else _PREFERENCE_RATE)}
        note, ok = "plan.preference-rate-high" if high else "", "plan.preference-rate"
    elif with_adapter:
        usual = {"usual": _LARGE_ADAPTER_RATE if large else _ADAPTER_RATE}
        high, low = rate > _HIGH_ADAPTER_RATE, rate < _LOW_ADAPTER_RATE
        note, ok = "plan.adapter-rate-low" if low else "plan.adapter-rate-high" if high else "", "plan.adapter-rate"
    else:
        high = rate >= (_LARGE_PRE_TRAINING_RATE if large else _PRE_TRAINING_RATE)
        note, ok = "plan.fine-tuning-rate-high" if high else "", "plan.fine-tuning-rate"
    return _noted("learning rate", f"{rate:g}", note, ok, usual)


def check_what_trains(spec: RunSpec, size: ModelSize) -> Iterator[Sanity]:
    """Yield the share of the parameters that trains, and a note if an adapter leaves the MLPs out."""
    if not size.trainable_parameters or size.trainable_parameters == size.parameters:
        return
    share = size.trainable_parameters / size.parameters
    value = f"{size.trainable_parameters:,}, {100 * share:.2g} % of {size.parameters:,}"
    adapter = getattr(spec.model, "adapter", None)
    without_mlp = adapter is not None and set(adapter.targets) <= _ATTENTION
    yield _noted(
        "trained parameters", value, "plan.adapter-without-mlp" if without_mlp else None, "plan.trained-parameters"
    )


def _epochs(spec: RunSpec) -> Iterator[Sanity]:
    """Yield the number of epochs, where the size of the data is known here."""
    known, objective = data_size(spec), spec.training.objective
    if known is None or not known.train:
        return
    epochs = spec.total_steps * spec.training.global_batch_size / known.train
    counted = "" if known.exact else "about "
    figure = f"{epochs:.2g}" if epochs < 10 else f"{epochs:,.0f}"  # not 3e+02
    value = f"{counted}{figure} over {counted}{known.train:,} {spec.samples}"
    if known.rows:
        value += f" of {spec.transformer.seq_len:,} tokens with {known.rows:,} rows"
    usual, many, most = _EPOCHS[objective]
    usual = usual if epochs >= _FEWEST_EPOCHS else "plan.part-of-the-data"
    yield _noted("epochs", value, many if epochs > most else None, usual)


def _fine_tuning_batch(spec: RunSpec) -> Iterator[Sanity]:
    """Yield the samples per batch; a packed sequence counts as at least one."""
    samples, objective = spec.training.global_batch_size, spec.training.objective
    if objective == "causal_lm":
        return
    usual, large, small = (
        ("plan.preference-batch", "plan.preference-batch-large", "plan.preference-batch-small")
        if objective == "dpo"
        else ("plan.fine-tuning-batch", "plan.fine-tuning-batch-large", "plan.fine-tuning-batch-small")
    )
    most, is_small = _MOST_SAMPLES, samples < _FEWEST_SAMPLES and spec.data.packing == "none"
    if getattr(spec.model, "adapter", None) is not None and objective == "sft":
        usual, large, most, is_small = "plan.adapter-batch", "plan.adapter-batch-large", _MOST_SAMPLES_OF_ADAPTER, False
    note = large if samples > most else small if is_small else None
    yield _noted("fine-tuning batch", f"{samples:,} {spec.samples}", note, usual)


def _adapter(spec: RunSpec, size: ModelSize) -> Iterator[Sanity]:
    """Yield the scale of an adapter, and what it can store compared with what the data have."""
    if (adapter := getattr(spec.model, "adapter", None)) is None:
        return
    scale = adapter.alpha / adapter.rank
    if not adapter.rslora:
        value = f"alpha / rank = {adapter.alpha:g} / {adapter.rank}"
        unusual = None if _LEAST_SCALE <= scale <= _MOST_SCALE else "plan.adapter-scale-unusual"
        yield _noted("adapter scale", value, unusual, "plan.adapter-scale")
    known = data_size(spec)
    if known is None or spec.training.objective == "dpo":  # a pair has one bit: which answer is preferred
        return
    stored, held = _BITS_PER_PARAMETER * size.trainable_parameters, _BITS_PER_TOKEN * known.tokens
    tokens = {"tokens": known.tokens, "parameters": size.trainable_parameters}
    note = None
    if held > 2 * stored:
        tokens["enough"] = min(2 ** max(0, round(adapter.rank * held / stored) - 1).bit_length(), _HIGHEST_RANK)
        note = "plan.adapter-rank-low" if tokens["enough"] > adapter.rank else "plan.adapter-rank-highest"
    yield _noted("adapter rank", f"{adapter.rank}", note, "plan.adapter-rank", tokens)


# Learning rates are tuned to about a factor of two; a factor above four suggests a mistake.
_NEAR, _FAR = 2.0, 4.0
# Goyal et al. scale a batch of 256 linearly up to 8,192; at 16,384 the error rises (section 5.2, figure 1).
_LINEAR_SCALING_LIMIT = 32.0


@dataclass(frozen=True)
class Recipe:
    """The published training settings of a preset: ``batch`` in tokens, images or pairs; ``final``: rate at the end
    as a share of ``lr``. What is left out is that of Llama 2, arXiv:2307.09288, section 2.2.
    """

    batch: int
    unit: str
    lr: float
    optimizer: str
    source: str
    warmup_steps: int = 2000
    schedule: str = "cosine"
    final: float = 0.1


def published_recipe(preset: str | None) -> Recipe | None:
    """Return the published recipe of a preset, or None if its authors published none."""
    row = packaged_data("plan/catalogue/recipes.json")["recipes"].get(preset or "")
    return None if row is None else Recipe(**row)


def scaled_lr(recipe: Recipe, batch: float, linear: bool) -> float | None:
    """Return the recipe's learning rate scaled to another batch size; None if one uses SGD and the other Adam."""
    if linear != (BUILT_IN_OPTIMIZERS[recipe.optimizer].kind == "sgd"):
        return None
    ratio = batch / recipe.batch
    return recipe.lr * (ratio if linear else math.sqrt(ratio))


def starting_preset(name: str) -> GivenPreset:
    """Return how to train a preset of a language model on 20 tokens per active parameter.

    As its authors, or as Llama does a model of as many active parameters. A batch above the critical one, which that of
    a longer run may be, is cut to it, and the rate with it.
    """
    model = ModelSpec.model_validate(complete({"preset": name}, Path(), {}))
    size = workload_of(model).size(model)
    tokens = float(f"{_OPTIMAL_TOKENS_PER_PARAMETER * size.active_parameters:.2g}")
    recipe, like = published_recipe(name), next(llama for llama, most in _LIKE.items() if size.active_parameters < most)
    near = recipe or Recipe(**packaged_data("plan/catalogue/recipes.json")["recipes"][like])
    batch = min(near.batch, critical_batch_tokens(size.parameters, tokens))
    lr = near.lr * math.sqrt(batch / near.batch)
    source = near.source if recipe else f"no recipe is published: that of {like}, {near.source}"
    if batch < near.batch:
        source += f"; cut from {near.lr:g} at {near.batch / 1e6:.1f}M tokens to the critical batch size of this length"
    return GivenPreset(
        name,
        batch,
        tokens,
        lr,
        lr * near.final,
        near.warmup_steps,
        near.schedule,
        f"Learning rate, batch and schedule: {source}.",
    )


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
    if spec.language_weights is not None:  # compared with fine-tuning instead of pre-training
        if workload_of(spec.model).counts_tokens:  # the published rates are of language models
            yield check_rate(spec)
        return
    if not spec.is_from_scratch:
        return
    optimizer, batch = spec.training.optimizer, spec.training.global_batch_size * spec.units_per_sample
    recipe = published_recipe(spec.model.preset)
    value, linear = f"{optimizer.lr:g}", optimizer.traits.kind == "sgd"
    if recipe is None:
        code = "plan.no-recipe-linear" if linear else "plan.no-recipe-square-root"
        reason = Reason(code, {"model": spec.model.preset or "these dimensions"})
        yield Sanity("learning rate", value, "ok", reason)
        return
    origin = {"lr": recipe.lr, "batch": recipe.batch, "unit": recipe.unit, "source": recipe.source}
    if (suggested := scaled_lr(recipe, batch, linear)) is None:
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
    value = f"{samples:,} {spec.samples}"
    value += f", {samples * spec.units_per_sample:,} tokens" if workload_of(spec.model).counts_tokens else ""
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
    if share > _MOST_WARMUP:
        return Sanity("warm-up", value, "warning", Reason("plan.warm-up-most-of-the-run"))
    note = "plan.no-warm-up" if not steps else "plan.long-warm-up" if share > _LONG_WARMUP else None
    return _noted("warm-up", value, note, "plan.usual-warm-up")


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
    named: dict[str, object] = {"device": device.name, "precision": precision}
    if precision not in device.flops:
        reason = Reason("plan.precision-emulated", {**named, "known": ", ".join(device.flops)})
        yield Sanity("precision", precision, "warning", reason)
        return
    note, has_bf16 = None, "bf16" in device.flops
    if precision == "fp16":
        note = "plan.loss-scaling-or-bf16" if has_bf16 else "plan.loss-scaling"
    elif precision == "fp32" and has_bf16:
        note, named = "plan.bf16-is-faster", {**named, "ratio": device.flops["bf16"] / device.flops["fp32"]}
    yield _noted("precision", precision, note, "plan.precision-supported", named)


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
    if "vocab_size per tensor rank" in widths and vocabulary % (_TILE * t):
        params["padded"] = -(-vocabulary // (_TILE * t)) * _TILE * t
    code = "plan.padded-tiles-and-vocabulary" if "padded" in params else "plan.padded-tiles"
    yield Sanity(topic, f"{len(odd)} odd", "note", Reason(code, params))
