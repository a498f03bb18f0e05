"""The few numbers that DeepSpeed counts besides what it trains, as a checkpoint keeps them: steps, loss scale."""

from __future__ import annotations

from typing import Any

_ENGINE = ("global_steps", "global_samples", "skipped_steps")
_LOSS_SCALER = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")


def counters(engine: Any) -> dict[str, dict[str, float]]:
    """As they are now, the same on every rank and in every layout. The loss scale is that of fp16, else empty."""
    found = {"engine": {name: getattr(engine, name) for name in _ENGINE}, "loss_scaler": {}}
    if engine.fp16_enabled():
        found["loss_scaler"] = {name: getattr(engine.optimizer.loss_scaler, name) for name in _LOSS_SCALER}
    return found


def set_counters(engine: Any, saved: dict[str, dict[str, float]]) -> None:
    """Go on from what ``counters`` found."""
    for name, value in saved["engine"].items():
        setattr(engine, name, value)
    for name, value in saved["loss_scaler"].items():
        setattr(engine.optimizer.loss_scaler, name, value)
