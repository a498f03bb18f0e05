"""DeepSpeed's settings for each precision. Pure: a spec in, a part of its configuration out."""

from __future__ import annotations

from typing import Any

import torch

from scaletrain_cli.spec import RunSpec


def precision_config(spec: RunSpec) -> dict[str, Any]:
    """The sections ``bf16`` or ``fp16`` and ``data_types``; nothing for fp32 and tf32. fp8 products have bf16 weights.

    16 bits need ZeRO-1 or higher, to which the planner maps stage 0: without ZeRO DeepSpeed accumulates and clips in
    16 bits (fp16/unfused_optimizer.py) or refuses.
    """
    training = spec.training
    if training.precision in ("fp32", "tf32"):
        return {}
    config: dict[str, Any] = {"data_types": {"grad_accum_dtype": training.grad_dtype}}
    if training.precision == "fp16":
        scale = training.loss_scale
        config["fp16"] = {
            "enabled": True,
            "loss_scale": 0,  # dynamic
            "initial_scale_power": scale.initial.bit_length() - 1,
            "loss_scale_window": scale.window,
            "hysteresis": scale.hysteresis,
            "min_loss_scale": scale.minimum,
        }
    else:
        # Without check_grad_overflow a NaN gradient would go into the weights; without immediate_grad_update stage 1
        # keeps the bf16 gradients beside the fp32 ones.
        config["bf16"] = {"enabled": True, "check_grad_overflow": True, "immediate_grad_update": True}
    return config


def forward_dtype(precision: str) -> torch.dtype:
    """Of weights and activations in the forward pass."""
    return {"fp32": torch.float32, "tf32": torch.float32, "fp16": torch.float16}.get(precision, torch.bfloat16)
