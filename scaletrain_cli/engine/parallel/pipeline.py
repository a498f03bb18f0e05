"""Pipeline parallelism: the part of a model that one stage keeps, in the form that DeepSpeed's pipeline wants.

Each stage is a single layer to DeepSpeed, cut by the planner's own balance of blocks, so that recomputation, names and
ties are the same as without a pipeline. The schedule (1F1B, arXiv:2104.04473) and its messages are DeepSpeed's.
"""

from __future__ import annotations

import contextlib
import sys
from collections import deque
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from scaletrain_cli.engine.data.batches import MicroBatch
from scaletrain_cli.engine.model.causal_lm import CausalLM
from scaletrain_cli.engine.parallel.mesh import Axis, Mesh
from scaletrain_cli.plan.stages import blocks_per_stage


def keep_stage(model: CausalLM, axis: Axis) -> None:
    """Take from a model on the meta device what other stages have.

    The last stage of a tied model keeps the embedding as the weight of its head.
    """
    if axis.size == 1:
        return
    ends = list(accumulate(blocks_per_stage(model.spec, axis.size), initial=0))
    mine = range(ends[axis.rank], ends[axis.rank + 1])
    for number in list(model.blocks):
        if int(number) not in mine:
            del model.blocks[number]
    first, last = axis.rank == 0, axis.rank == axis.size - 1
    for path in () if first else model.opening[1:] if last and model.spec.tie_word_embeddings else model.opening:
        _drop(model, path)
    for path in () if last else model.closing:
        _drop(model, path)


def _drop(model: nn.Module, path: str) -> None:
    parent, _, name = path.rpartition(".")
    setattr(model.get_submodule(parent), name, None)


class PipelineStage(nn.Module):
    """This rank's part of the model, as DeepSpeed calls it: tokens or hidden states in, hidden states out."""

    def __init__(self, model: CausalLM, axis: Axis) -> None:
        super().__init__()
        self.model = model
        self._first = axis.rank == 0
        self._expected: deque[MicroBatch] = deque()
        # Faults on purpose: what leaves this stage is not a number; the last stage's loss is another one.
        self.poisoned, self.loss_factor = False, 1.0

    def expect(self, batches: Sequence[MicroBatch]) -> None:
        """The micro-batches to come. They pass every stage in this order, and tell it what their tensors do not."""
        self._expected = deque(batches)

    def forward(self, inputs: Tensor) -> Tensor:
        """Tokens [batch, length] on the first stage, hidden states [batch, length, hidden] elsewhere."""
        batch = self._expected.popleft()
        hidden = self.model.embed(inputs, batch.positions, batch.samples) if self._first else inputs
        hidden = self.model.transform(hidden, batch.positions, batch.samples)
        return hidden * torch.nan if self.poisoned else hidden

    def loss(self, hidden: Tensor, labels: tuple[Tensor, Tensor]) -> Tensor:
        """Of the last stage; ``labels`` [batch, length] come with the divisor of their summed loss."""
        loss = self.model.loss(hidden, *labels)
        return loss if self.loss_factor == 1 else loss * self.loss_factor


def pipeline_module(stage: PipelineStage, mesh: Mesh) -> nn.Module:
    """DeepSpeed's module around this stage. Collective."""
    from deepspeed.pipe import LayerSpec, PipelineModule
    from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology

    class Stages(PipelineModule):  # type: ignore[misc]
        """Knows the one weight that two stages share: the tied embedding."""

        def get_tied_weights_and_groups(self) -> list[tuple[_TiedGradient, Any]]:
            return [] if tied is None else [tied]

    axis = mesh.pipeline
    layers = [stage if index == axis.rank else LayerSpec(nn.Identity) for index in range(axis.size)]
    topology = PipeModelDataParallelTopology(axis.size, mesh.tensor.size, mesh.replicas.size)
    with contextlib.redirect_stdout(sys.stderr):  # it describes its topology to stdout
        module = Stages(layers, topology=topology, loss_fn=stage.loss, partition_method="uniform")
    tied = _share_tied_weight(stage.model, mesh)
    return module


class _TiedGradient:
    """What DeepSpeed takes for the weight when it adds up a gradient over the stages that share it.

    It looks at ``grad`` (pipe/engine.py, _exec_reduce_tied_grads). Where ZeRO-1 adds up fp16 gradients in fp32, they
    are in ``grad_accum`` by then and ``grad`` is empty: the copies would drift apart, silently.
    """

    def __init__(self, weight: nn.Parameter) -> None:
        self._weight: Any = weight

    @property
    def grad(self) -> Tensor | None:
        accumulated: Tensor | None = getattr(self._weight, "grad_accum", None)
        return self._weight.grad if accumulated is None else accumulated

    @property
    def _hp_grad(self) -> Tensor:
        """In bf16, where DeepSpeed accumulates in an optimizer of its own."""
        return self._weight._hp_grad  # type: ignore[no-any-return]


def _share_tied_weight(model: CausalLM, mesh: Mesh) -> tuple[_TiedGradient, Any] | None:
    """The embedding that the first and the last stage both hold, and the group to add its gradients over.

    Its copy on the last stage is marked as a replica, or it would count twice in the gradient norm.
    """
    if not model.spec.tie_word_embeddings or mesh.pipeline_ends.size == 1:
        return None
    weight = model.token_embedding.weight
    assert isinstance(weight, nn.Parameter)
    weight.ds_pipe_replicated = mesh.pipeline_ends.rank > 0  # type: ignore[attr-defined]
    return _TiedGradient(weight), mesh.pipeline_ends.group
