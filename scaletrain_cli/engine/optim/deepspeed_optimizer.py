"""The fp32 master weights and the fp16 loss scale (arXiv:1710.03740) inside DeepSpeed's optimizers.

DeepSpeed has no common access to the master weights: zero/stage_1_and_2.py, zero/stage3.py and bf16_optimizer.py name
their flat partitions differently, and without ZeRO they are the parameters themselves.
"""

import functools
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from scaletrain_cli.engine.parallel.mesh import Axis
from scaletrain_cli.errors import DoNotRequeueError
from scaletrain_cli.reasons import Reason


@contextmanager
def in_memory(optimizer: Any, index: int) -> Generator[Tensor]:
    """Yield flat part ``index`` of the fp32 weights of DeepSpeed's stage 3, with its states in memory.

    Changes are kept. Parts below a megabyte are never swapped to NVMe.
    """
    swapped = optimizer._swappable_optimizer_subgroup(index)
    if swapped:
        optimizer._optimizer_states_and_gradient_swap_in(index)
    yield optimizer.fp32_partitioned_groups_flat[index]
    if swapped:
        optimizer._optimizer_states_and_gradient_swap_out(index)


def master_weights(engine: Any) -> list[Tensor]:
    """Return this rank's flat parts of the fp32 weights, which the optimizer updates; the ranks together have all."""
    optimizer = engine.optimizer
    for name in ("single_partition_of_fp32_groups", "fp32_groups_flat_partition", "fp32_partitioned_groups_flat"):
        if hasattr(optimizer, name):
            return list(getattr(optimizer, name))
    return [parameter for parameter in engine.module.parameters() if parameter.requires_grad]


def counter_names(optimizer: torch.optim.Optimizer) -> set[str]:
    """Return the names of the states that count steps and are the same for all elements of a weight.

    All other states have a value for each element. A weight without dimensions has states without dimensions, like
    counters; the states of other weights show which of them count steps.
    """
    names = {"step"}
    for weight, states in optimizer.state.items():
        names |= {
            name for name, state in states.items() if not isinstance(state, Tensor) or state.dim() == 0 < weight.dim()
        }
    return names


@torch.no_grad()
def use_master_weights(engine: Any) -> None:
    """Copy the present master weights into the model on every rank, as after a step. Collective."""
    optimizer, stage = engine.optimizer, engine.zero_optimization_stage()
    if stage == 3:
        optimizer._partition_all_parameters()
        for parameter in engine.module.parameters():
            parameter.ds_secondary_tensor = None  # a second copy of what the weights were (hpZ)
        for index in range(len(optimizer.fp32_partitioned_groups_flat)):
            with in_memory(optimizer, index):
                optimizer._reassign_or_swap_out_partitioned_parameters(index)
        if optimizer.persistent_parameters:  # small parameters are whole on every rank
            optimizer.persistent_parameters[0].all_gather(optimizer.persistent_parameters)
    elif stage > 0:
        optimizer.update_lp_params()


def average_over_copies(engine: Any, copies: Axis) -> None:
    """Let ZeRO-2 and 3 average the gradients of a rank's shards over the ranks with the same ones, before each update.

    DeepSpeed has then averaged them over the ranks over which it shards.
    """
    optimizer, update = engine.optimizer, engine.optimizer.step
    if copies.group is None:
        return

    @functools.wraps(update)
    @torch.no_grad()
    def step(*arguments: Any, **named: Any) -> Any:
        for gradients in optimizer.averaged_gradients.values():
            if gradients:
                flat = torch.cat([gradient.flatten() for gradient in gradients])
                flat /= copies.size  # before the sum, which could overflow in fp16
                dist.all_reduce(flat, group=copies.group)
                for gradient, values in zip(gradients, torch.split(flat, [g.numel() for g in gradients]), strict=True):
                    gradient.copy_(values.view_as(gradient))
        return update(*arguments, **named)

    optimizer.step = step


class LossScaleAtFloorError(DoNotRequeueError):
    """The gradient overflows at the smallest loss scale that the spec allows (exit 93)."""

    failure_reason = "nan"


def allow_fp16_on_cpu() -> None:
    """Let DeepSpeed accept fp16 on a CPU without fp16 instructions, where torch computes it slowly."""
    from deepspeed.accelerator import get_accelerator

    get_accelerator().is_fp16_supported = lambda: True


def loss_scale(engine: Any) -> float:
    """Return the factor of the loss before the next backward pass; 1 without fp16."""
    return float(getattr(engine.optimizer, "loss_scale", 1.0))


def step_was_skipped(engine: Any) -> bool:
    """Return True if the last step was not applied because its gradient was not finite. The same on every rank."""
    return not engine.was_step_applied()


def fix_loss_scale(engine: Any) -> None:
    """Increase the loss scale after the step that used it, and raise LossScaleAtFloorError at the minimum.

    DeepSpeed updates the scale before it divides the gradient by it (zero/stage_1_and_2.py and stage3.py, step): in the
    step that ends a window the gradient is divided by a scale twice too large. Does nothing without fp16.
    """
    if not engine.fp16_enabled():
        return
    optimizer, grown = engine.optimizer, 0.0

    def update_scale(has_overflow: bool = False) -> None:
        nonlocal grown
        scaler = optimizer.loss_scaler
        before = scaler.cur_scale
        if has_overflow and before <= scaler.min_scale and scaler.cur_hysteresis <= 1:
            raise LossScaleAtFloorError(Reason("engine.loss-scale-at-floor", {"loss_scale": before}))
        scaler.update_scale(has_overflow)
        if scaler.cur_scale > before:
            grown, scaler.cur_scale = scaler.cur_scale, before

    step = optimizer.step

    def step_then_grow(*args: Any, **kwargs: Any) -> Any:
        nonlocal grown
        grown = 0.0
        result = step(*args, **kwargs)
        if grown:
            optimizer.loss_scaler.cur_scale = grown
        return result

    optimizer._update_scale, optimizer.step = update_scale, step_then_grow
