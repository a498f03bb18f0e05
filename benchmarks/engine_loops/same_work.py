"""Loops on DeepSpeed and DDP that do in each step all that the spec asks of the engine.

They add to the minimal loops:

* A thread reads the next batch from the tokenized file while a step trains.
* The learning rate follows the schedule, and the gradient is clipped to the same norm.
* A gradient that is not finite ends the run before the update.
* One all-reduce averages the loss, which each rank reads, and tells all ranks whether one of them has to stop.
* Rank 0 writes loss, norm, rate and time to a JSON file and to its log.

They have no heartbeat, no checkpoint of any kind, and no further measurement.
"""

from __future__ import annotations

import json
import logging
import math
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from engine_loops.rivals import Loop, MicroBatches, ddp_around, deepspeed_around, elements_of, optimizer_of
from scaletrain_cli.engine.data.loader import Loader
from scaletrain_cli.engine.trainer import Trainer
from scaletrain_cli.spec.training import learning_rate

logger = logging.getLogger(__name__)


def deepspeed_same_work(trainer: Trainer) -> Loop:
    """Return a loop on DeepSpeed with the engine's configuration. It clips, in stage 0 before DeepSpeed's step."""
    clipping = trainer.context.spec.training.gradient_clipping
    sharded = trainer.composed.engine.zero_optimization_stage() > 0
    engine, model = deepspeed_around(trainer, clipping if sharded else 0.0)
    around = _Around(trainer, engine.optimizer, "deepspeed")

    def train_step(micro_batches: MicroBatches) -> list[Tensor]:
        around.begin()
        losses: list[Tensor] = []
        norm = 0.0
        for number, batch in enumerate(micro_batches, start=1):
            losses.append(engine(*batch))
            engine.backward(losses[-1])
            if not sharded and number == len(micro_batches):  # in fp32 DeepSpeed neither checks nor reports the norm
                norm = float(nn.utils.clip_grad_norm_(model.parameters(), clipping or math.inf))
            if math.isfinite(norm):
                engine.step()  # from stage 1 on it clips, and applies no gradient that is not finite
        around.end(losses, float(engine.get_global_grad_norm()) if sharded else norm)
        return losses

    return Loop(around.batches, train_step, elements_of(model))


def ddp_same_work(trainer: Trainer) -> Loop:
    """Return a loop on DDP."""
    model, forward_and_backward = ddp_around(trainer)
    optimizer, clipping = optimizer_of(trainer, model), trainer.context.spec.training.gradient_clipping
    around = _Around(trainer, optimizer, "ddp")

    def train_step(micro_batches: MicroBatches) -> list[Tensor]:
        around.begin()
        losses = forward_and_backward(micro_batches)
        norm = float(nn.utils.clip_grad_norm_(model.parameters(), clipping or math.inf))
        if math.isfinite(norm):
            optimizer.step()
        optimizer.zero_grad()
        around.end(losses, norm)
        return losses

    return Loop(around.batches, train_step, elements_of(model))


class _Around:
    """The work of these loops around a step. ``optimizer``: its learning rates are set."""

    def __init__(self, trainer: Trainer, optimizer: torch.optim.Optimizer, name: str) -> None:
        self._spec, self._device, self._optimizer = trainer.context.spec, trainer.context.device, optimizer
        self._total, self._tokens = self._spec.total_steps, self._spec.training.global_batch_size
        self._tokens *= self._spec.transformer.seq_len
        read = trainer.training.without_groups().batch
        self._loader = Loader(read, trainer.context.device, workers=trainer.readers)
        self._ahead = self._spec.data.loader.read_ahead(trainer.readers)
        self._step, self._began, self._stops = 0, 0.0, False
        self._file = None
        if dist.get_rank() == 0:
            path = Path(trainer.context.run.path, f"{name}.jsonl")
            self._file = path.open("a", encoding="utf-8", buffering=1)

    def batches(self, step: int) -> MicroBatches:
        """Return the batches of a step, which a thread has read."""
        taken = self._loader.take(step, range(step + 1, step + 1 + self._ahead))
        return [(batch.tokens, batch.labels) for batch in taken.micro_batches()]

    def begin(self) -> None:
        """Set the learning rate of the next step."""
        self._step, self._began = self._step + 1, time.perf_counter()
        self._rate = learning_rate(min(self._step, self._total), self._total, self._spec.training)
        for group in self._optimizer.param_groups:
            group["lr"] = self._rate

    def end(self, losses: list[Tensor], norm: float) -> None:
        """Average the loss over the ranks, agree on an end, and log. Raises FloatingPointError; collective."""
        mean = losses[0].detach() if len(losses) == 1 else torch.stack(losses).detach().mean()
        agreed = torch.stack((mean.float(), mean.new_full((), float(self._stops), dtype=torch.float32)))
        dist.all_reduce(agreed)
        loss, stops = agreed.tolist()
        loss /= dist.get_world_size()
        if not (math.isfinite(loss) and math.isfinite(norm)):
            raise FloatingPointError(f"step {self._step}: loss {loss}, gradient norm {norm}")
        if stops:
            raise SystemExit(0)
        if self._file is not None:
            seconds = time.perf_counter() - self._began
            line = {"step": self._step, "loss": loss, "grad_norm": norm, "learning_rate": self._rate}
            line |= {"tokens_per_second": round(self._tokens / seconds, 1), "step_seconds": round(seconds, 5)}
            self._file.write(json.dumps(line | {"time": round(time.time(), 3)}) + "\n")
            logger.info("step %d/%d  loss %.4f  grad norm %.3f", self._step, self._total, loss, norm)
