"""The barest loops that train the same model: on DeepSpeed with the engine's own configuration, and on plain torch DDP.

No data to read, no schedule, no metrics, no checks, nothing decided between steps: what any real loop must add to.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from scaletrain_cli.engine.model import outline
from scaletrain_cli.engine.model.causal_lm import CausalLM
from scaletrain_cli.engine.trainer import Trainer
from scaletrain_cli.spec import RunSpec

Loop = Callable[[int], None]  # trains so many optimizer steps


def bare_deepspeed(trainer: Trainer) -> Loop:
    """``deepspeed.initialize`` and its three calls, with the very configuration of the engine's own."""
    import deepspeed

    spec, layout, engine = trainer.record.spec, trainer.record.plan.layout, trainer.plan_check.composed.engine
    config = copy.deepcopy(engine._config._param_dict)
    model = _model(spec, trainer.device)
    bare, *_ = deepspeed.initialize(model=model, optimizer=_optimizer(spec, model, trainer.device), config=config)
    batches = _batches(spec, layout.micro_batch_size, trainer.device)

    def train(steps: int) -> None:
        for step in range(steps * layout.gradient_accumulation_steps):
            loss = bare(*batches[step % len(batches)])
            bare.backward(loss)
            bare.step()

    return train


def plain_ddp(trainer: Trainer) -> Loop:
    """torch's DistributedDataParallel in fp32 or, whole, in bf16; clipping as configured."""
    spec, layout, device = trainer.record.spec, trainer.record.plan.layout, trainer.device
    model = _model(spec, device).to(torch.bfloat16 if spec.training.precision == "bf16" else torch.float32)
    alone = dist.get_world_size() == 1
    wrapped = model if alone else nn.parallel.DistributedDataParallel(model)
    optimizer = _optimizer(spec, model, device)
    batches, accumulation = _batches(spec, layout.micro_batch_size, device), layout.gradient_accumulation_steps

    def train(steps: int) -> None:
        for _ in range(steps):
            for micro in range(accumulation):
                last = micro == accumulation - 1
                with contextlib.nullcontext() if last or alone else wrapped.no_sync():  # type: ignore[operator]
                    (wrapped(*batches[micro % len(batches)]) / accumulation).backward()
            if spec.training.gradient_clipping:
                nn.utils.clip_grad_norm_(model.parameters(), spec.training.gradient_clipping)
            optimizer.step()
            optimizer.zero_grad()

    return train


def _model(spec: RunSpec, device: torch.device) -> CausalLM:
    model = outline(spec.transformer).to_empty(device=device)
    torch.manual_seed(spec.training.seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(1.0) if parameter.ndim == 1 else parameter.normal_(0.0, 0.02)
    return model


def _optimizer(spec: RunSpec, model: nn.Module, device: torch.device) -> torch.optim.Optimizer:
    settings = spec.training.optimizer
    groups: list[dict[str, Any]] = [
        {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": settings.weight_decay},
        {"params": [p for p in model.parameters() if p.ndim == 1], "weight_decay": 0.0},
    ]
    fused = True if device.type == "cuda" else None
    return torch.optim.AdamW(groups, lr=settings.lr, betas=settings.betas, eps=settings.eps, fused=fused)


def _batches(spec: RunSpec, size: int, device: torch.device, count: int = 8) -> list[tuple[Tensor, Tensor]]:
    """Tokens and labels that are there already, another set on each rank."""
    draw = torch.Generator().manual_seed(dist.get_rank())
    model = spec.transformer
    rows = torch.randint(model.vocab_size, (count, size, model.seq_len + 1), generator=draw).to(device)
    return [(row[:, :-1].contiguous(), row[:, 1:].contiguous()) for row in rows]
