"""Learning rate and batch size against the recipe that a model's authors published, and the critical batch size.

Scaling rules: linear for SGD (Goyal et al., arXiv:1706.02677), square root for Adam (Malladi et al., arXiv:2205.10287).
A run that starts from weights is compared with fine-tuning instead.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from scaletrain_cli.plan.result import Sanity
from scaletrain_cli.spec import RunSpec

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
