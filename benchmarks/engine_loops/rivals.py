"""Minimal loops that train the same model: on DeepSpeed with the engine's configuration, and on plain torch DDP.

They use the same weights and batches in the same order; batches are in memory before the first step. No schedule, no
metrics, no checks, nothing between steps: a lower bound for any real loop.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from scaletrain_cli.engine.model import outline
from scaletrain_cli.engine.model.causal_lm import CausalLM
from scaletrain_cli.engine.trainer import Trainer
from scaletrain_cli.spec import RunSpec

Batches = Sequence[Sequence[tuple[Tensor, Tensor]]]  # by step and micro-batch: tokens and labels


@dataclass
class Loop:
    """A rival, which trains one step after the other. ``train_step`` returns the loss of each micro-batch.

    ``first_loss``: of its first batch, before any update, as the mean over the ranks.
    """

    batches: Batches
    train_step: Callable[[Sequence[tuple[Tensor, Tensor]]], list[Tensor]]
    first_loss: float | None = None
    _step: int = 0

    def train(self, steps: int) -> None:
        """Train ``steps`` steps."""
        for _ in range(steps):
            losses = self.train_step(self.batches[self._step % len(self.batches)])  # one block more than the run has
            self._step += 1
            if self.first_loss is None:
                mean = torch.stack(losses).detach().float().mean()
                dist.all_reduce(mean)
                self.first_loss = mean.item() / dist.get_world_size()


def bare_deepspeed(trainer: Trainer) -> Loop:
    """Return a loop of ``deepspeed.initialize`` and its three calls, with the engine's configuration."""
    import deepspeed

    spec, engine = trainer.record.spec, trainer.plan_check.composed.engine
    config = copy.deepcopy(engine._config._param_dict)
    model = _model(trainer)
    bare, *_ = deepspeed.initialize(model=model, optimizer=_optimizer(spec, model, trainer.device), config=config)

    def train_step(micro_batches: Sequence[tuple[Tensor, Tensor]]) -> list[Tensor]:
        losses: list[Tensor] = []
        for batch in micro_batches:
            losses.append(bare(*batch))
            bare.backward(losses[-1])
            bare.step()
        return losses

    return Loop(_batches(trainer), train_step)


def plain_ddp(trainer: Trainer) -> Loop:
    """Return a loop of DistributedDataParallel in fp32 or bf16, with clipping as configured."""
    spec, device = trainer.record.spec, trainer.device
    model = _model(trainer).to(torch.bfloat16 if spec.training.precision == "bf16" else torch.float32)
    alone = dist.get_world_size() == 1
    wrapped = model if alone else nn.parallel.DistributedDataParallel(model)
    optimizer = _optimizer(spec, model, device)

    def train_step(micro_batches: Sequence[tuple[Tensor, Tensor]]) -> list[Tensor]:
        losses: list[Tensor] = []
        for number, batch in enumerate(micro_batches, start=1):
            last = number == len(micro_batches)
            with contextlib.nullcontext() if last or alone else wrapped.no_sync():  # type: ignore[operator]
                losses.append(wrapped(*batch))
                (losses[-1] / len(micro_batches)).backward()  # type: ignore[no-untyped-call]
        if spec.training.gradient_clipping:
            nn.utils.clip_grad_norm_(model.parameters(), spec.training.gradient_clipping)
        optimizer.step()
        optimizer.zero_grad()
        return losses

    return Loop(_batches(trainer), train_step)


def _model(trainer: Trainer) -> CausalLM:
    """Return an fp32 copy of the engine's model, whose weights are whole on each rank below ZeRO-3."""
    model = outline(trainer.record.spec.transformer).to_empty(device=trainer.device)
    own = dict(trainer.composed.model.named_parameters(remove_duplicate=False))  # tied weights under both names
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(own[name])
    return model


def _optimizer(spec: RunSpec, model: nn.Module, device: torch.device) -> torch.optim.Optimizer:
    settings = spec.training.optimizer
    groups: list[dict[str, Any]] = [
        {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": settings.weight_decay},
        {"params": [p for p in model.parameters() if p.ndim == 1], "weight_decay": 0.0},
    ]
    fused = True if device.type == "cuda" else None
    return torch.optim.AdamW(groups, lr=settings.lr, betas=settings.betas, eps=settings.eps, fused=fused)


def _batches(trainer: Trainer) -> Batches:
    """Return this rank's part of every batch of the run, as the engine reads it."""
    read = trainer.training.batch
    steps = range(1, trainer.record.spec.total_steps + 1)
    read_ahead = ([batch.to(trainer.device) for batch in read(step).micro_batches()] for step in steps)
    return [[(batch.tokens, batch.labels) for batch in batches] for batches in read_ahead]
