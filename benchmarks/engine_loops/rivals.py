"""Minimal loops that train the same model: on DeepSpeed with the engine's configuration, and on plain torch DDP.

They use the same model code, weights, optimizer, and batches in the same order, which are in memory before the first
step. No schedule, no metrics, no checks, nothing between steps, and the loss is never read: a lower bound for any real
loop. Of what the spec asks for, the DDP loop clips the gradient; DeepSpeed's has only its norm, which ZeRO computes.
``same_work.py`` has loops that do all of it.
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
from scaletrain_cli.engine.model.base import CausalLM
from scaletrain_cli.engine.trainer import Trainer
from scaletrain_cli.spec import RunSpec

MicroBatches = Sequence[tuple[Tensor, Tensor]]  # tokens and labels of each


@dataclass
class Loop:
    """A rival, which trains one step after the other. ``train_step`` returns the loss of each micro-batch.

    ``batches``: returns those of a step (1-based). ``elements``: numbers that it trains. ``first_loss``: of its first
    batch, before any update, as the mean over the ranks.
    """

    batches: Callable[[int], MicroBatches]
    train_step: Callable[[MicroBatches], list[Tensor]]
    elements: int = 0
    first_loss: float | None = None
    _step: int = 0

    def train(self, steps: int) -> None:
        """Train ``steps`` steps."""
        for _ in range(steps):
            self._step += 1
            losses = self.train_step(self.batches(self._step))
            if self.first_loss is None:
                mean = torch.stack(losses).detach().float().mean()
                dist.all_reduce(mean)
                self.first_loss = mean.item() / dist.get_world_size()


def bare_deepspeed(trainer: Trainer) -> Loop:
    """Return a loop of ``deepspeed.initialize`` and its three calls, with the engine's configuration."""
    bare, model = deepspeed_around(trainer, clipping=0.0)

    def train_step(micro_batches: MicroBatches) -> list[Tensor]:
        losses: list[Tensor] = []
        for batch in micro_batches:
            losses.append(bare(*batch))
            bare.backward(losses[-1])
            bare.step()
        return losses

    return Loop(batches_in_memory(trainer), train_step, elements_of(model))


def plain_ddp(trainer: Trainer) -> Loop:
    """Return a loop of DistributedDataParallel in fp32 or bf16, with clipping as configured."""
    model, forward_and_backward = ddp_around(trainer)
    optimizer, clipping = optimizer_of(trainer, model), trainer.context.spec.training.gradient_clipping

    def train_step(micro_batches: MicroBatches) -> list[Tensor]:
        losses = forward_and_backward(micro_batches)
        if clipping:
            nn.utils.clip_grad_norm_(model.parameters(), clipping)
        optimizer.step()
        optimizer.zero_grad()
        return losses

    return Loop(batches_in_memory(trainer), train_step, elements_of(model))


def deepspeed_around(trainer: Trainer, clipping: float) -> tuple[Any, CausalLM]:
    """Return DeepSpeed's engine with the configuration of this project's, and its model. ``clipping``: 0 for none."""
    import deepspeed

    config = copy.deepcopy(trainer.composed.engine._config._param_dict) | {"gradient_clipping": clipping}
    model = model_of(trainer)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer_of(trainer, model), config=config)
    return engine, model


def ddp_around(trainer: Trainer) -> tuple[CausalLM, Callable[[MicroBatches], list[Tensor]]]:
    """Return a model, and a function that adds the gradient of a global batch to it with DDP and returns the losses.

    DDP does not copy gradients out of its buckets, and does not broadcast buffers, which are constants here.
    """
    spec = trainer.context.spec
    model = model_of(trainer).to(torch.bfloat16 if spec.training.precision == "bf16" else torch.float32)
    alone = dist.get_world_size() == 1
    wrapped = model if alone else _distributed(model)

    def forward_and_backward(micro_batches: MicroBatches) -> list[Tensor]:
        losses: list[Tensor] = []
        for number, batch in enumerate(micro_batches, start=1):
            last = number == len(micro_batches)
            with contextlib.nullcontext() if last or alone else wrapped.no_sync():  # type: ignore[operator]
                losses.append(wrapped(*batch))
                loss = losses[-1] if len(micro_batches) == 1 else losses[-1] / len(micro_batches)
                loss.backward()  # type: ignore[no-untyped-call]
        return losses

    return model, forward_and_backward


def _distributed(model: nn.Module) -> nn.Module:
    return nn.parallel.DistributedDataParallel(model, broadcast_buffers=False, gradient_as_bucket_view=True)


def model_of(trainer: Trainer) -> CausalLM:
    """Return an fp32 copy of the engine's model, whose weights are whole on each rank below ZeRO-3."""
    spec = trainer.context.spec.transformer
    model = outline(spec).to_empty(device=trainer.context.device)
    if spec.tie_word_embeddings:
        model.tie()  # to_empty() makes two parameters of a tied one
    own = dict(trainer.composed.model.named_parameters())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(own[name])
    return model


def elements_of(model: nn.Module) -> int:
    """Return how many numbers of a model train."""
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)


def optimizer_of(trainer: Trainer, model: nn.Module) -> torch.optim.Optimizer:
    """Return the optimizer of the spec, AdamW, as the engine builds it: fused on a GPU, torch's default on a CPU."""
    spec: RunSpec = trainer.context.spec
    settings = spec.training.optimizer
    groups: list[dict[str, Any]] = [
        {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": settings.weight_decay},
        {"params": [p for p in model.parameters() if p.ndim == 1], "weight_decay": 0.0},
    ]
    fused = True if trainer.context.device.type == "cuda" else None
    return torch.optim.AdamW(groups, lr=settings.lr, betas=settings.betas, eps=settings.eps, fused=fused)


def batches_in_memory(trainer: Trainer) -> Callable[[int], MicroBatches]:
    """Return this rank's part of every batch of the run, read now, as the engine reads it."""
    read = trainer.training.batch
    steps = range(1, trainer.context.spec.total_steps + 1)
    read_ahead = ([batch.to(trainer.context.device) for batch in read(step).micro_batches()] for step in steps)
    found = [[(batch.tokens, batch.labels) for batch in batches] for batches in read_ahead]
    return lambda step: found[(step - 1) % len(found)]  # the rivals train one block more than the run has
