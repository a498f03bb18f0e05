"""Pipeline parallelism: the part of a model on one stage, in the form of DeepSpeed's pipeline.

Each stage is one layer to DeepSpeed, with blocks balanced by the planner, so that recomputation, names and ties are the
same as without a pipeline. The schedule (1F1B, arXiv:2104.04473) and its messages are DeepSpeed's.
"""

import contextlib
import sys
from collections import deque
from collections.abc import Collection, Sequence
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Function

from scaletrain_cli.engine.data.batches import MicroBatch
from scaletrain_cli.engine.model.base import CausalLM
from scaletrain_cli.engine.objectives.base import Objective
from scaletrain_cli.engine.parallel.mesh import Axis, Mesh
from scaletrain_cli.plan.parameters import model_parameters
from scaletrain_cli.plan.stages import blocks_per_stage
from scaletrain_cli.spec import ModelSpec


def keep_stage(model: CausalLM, axis: Axis, split: tuple[int, ...] = ()) -> None:
    """Remove the parts of other stages from a model on the meta device. ``split``: ``Layout.pipeline_split``.

    The last stage of a tied model keeps the embedding as the weight of its head.
    """
    if axis.size == 1:
        return
    ends = list(accumulate(split or blocks_per_stage(model.spec, axis.size), initial=0))
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
    """This rank's part of the model, as DeepSpeed calls it: tokens or hidden states in, hidden states out.

    ``output``: computes the loss on the last stage, from the model, the hidden states and the micro-batch.

    DeepSpeed needs a gradient of the inputs on every stage, and as many parameter groups as on the others, because it
    sums the gradient norm of each group over the stages. ``anchors`` are numbers without an effect, for groups that
    this stage lacks. No backward pass runs below the first trained parameter.
    """

    def __init__(
        self, model: CausalLM, axis: Axis, objective: Objective, *, trains_before: bool = True, anchors: int = 0
    ) -> None:
        """``trains_before``: a parameter of an earlier stage trains, so that it needs the gradient of the inputs."""
        super().__init__()
        self.model = model
        self.output = objective.loss
        self._first = axis.rank == 0
        self._trains_before = trains_before and axis.rank > 0
        like = next(model.parameters()).detach()
        self.anchors = nn.ParameterList([nn.Parameter(like.new_zeros(1)) for _ in range(anchors)])
        self._expected: deque[MicroBatch] = deque()
        self._current: MicroBatch | None = None
        # fault injection: NaN output of this stage, and a factor of the last stage's loss
        self.nan_gradient, self.loss_factor = False, 1.0

    def expect(self, batches: Sequence[MicroBatch]) -> None:
        """Set the next micro-batches, in the order of every stage; DeepSpeed passes on only some of their tensors."""
        self._expected = deque(batches)

    def forward(self, inputs: Tensor) -> Tensor:
        """Run the stage: tokens [batch, length] on the first one, hidden states [batch, length, hidden] on others."""
        batch = self._current = self._expected.popleft()
        if self._first:
            hidden = self.model.embed(inputs, batch.context)
        else:
            hidden = inputs if self._trains_before else inputs.detach()
        hidden = self.model.transform(hidden, self.model.with_masks(batch.context, hidden))
        beside = [*self.anchors] if self._first or self._trains_before else [inputs, *self.anchors]
        if beside:
            hidden = _Bridge.apply(hidden, *beside)  # type: ignore[no-untyped-call]
        return hidden * torch.nan if self.nan_gradient else hidden

    def loss(self, hidden: Tensor, _: Tensor) -> Tensor:
        """Return the loss on the last stage, which DeepSpeed calls after each forward pass with the labels."""
        assert self._current is not None
        loss = self.output(self.model, hidden, self._current)
        return loss if self.loss_factor == 1 else loss * self.loss_factor


class _Bridge(Function):
    """Returns ``hidden``, and gives tensors that have no effect on it a gradient of zeros."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, *others: Tensor) -> Tensor:
        ctx.others = [(other.shape, {"dtype": other.dtype, "device": other.device}) for other in others]
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, ...]:
        return gradient, *(torch.zeros(shape, **options) for shape, options in ctx.others)


def missing_groups(own: int, axis: Axis, device: torch.device) -> int:
    """Return by how many parameter groups this stage has fewer than the stage with most. Collective."""
    most = torch.tensor(own, device=device)
    dist.all_reduce(most, op=dist.ReduceOp.MAX, group=axis.group)
    return int(most) - own


def trains_before(model: ModelSpec, axis: Axis, trained: Collection[str], split: tuple[int, ...] = ()) -> bool:
    """Return True if a parameter of a pipeline stage before this one trains. ``split``: ``Layout.pipeline_split``."""
    first_block = list(accumulate(split or blocks_per_stage(model, axis.size), initial=0))[axis.rank]
    return axis.rank > 0 and any(
        parameter.name in trained
        for parameter in model_parameters(model)
        if parameter.place == "embedding" or (parameter.block is not None and parameter.block < first_block)
    )


def pipeline_module(stage: PipelineStage, mesh: Mesh) -> nn.Module:
    """Return DeepSpeed's pipeline module with this stage. Collective."""
    from deepspeed.pipe import LayerSpec, PipelineModule
    from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology

    class Stages(PipelineModule):  # type: ignore[misc]
        """Reports the tied embedding, the only weight that two stages share."""

        def get_tied_weights_and_groups(self) -> list[tuple[_TiedGradient, Any]]:
            return [] if tied is None else [tied]

    axis = mesh.pipeline
    layers = [stage if index == axis.rank else LayerSpec(nn.Identity) for index in range(axis.size)]
    topology = PipeModelDataParallelTopology(axis.size, mesh.tensor.size, mesh.replicas.size)
    with contextlib.redirect_stdout(sys.stderr):  # DeepSpeed prints its topology to stdout
        module = Stages(layers, topology=topology, loss_fn=stage.loss, partition_method="uniform")
    tied = _share_tied_weight(stage.model, mesh)
    return module


class _TiedGradient:
    """Stands for the tied weight where DeepSpeed sums its gradient over the stages that share it.

    DeepSpeed reads ``grad`` (pipe/engine.py, _exec_reduce_tied_grads). Where ZeRO-1 sums fp16 gradients in fp32, they
    are in ``grad_accum`` and ``grad`` is empty: the copies would diverge silently.
    """

    def __init__(self, weight: nn.Parameter) -> None:
        self._weight: Any = weight

    @property
    def grad(self) -> Tensor | None:
        accumulated: Tensor | None = getattr(self._weight, "grad_accum", None)
        return self._weight.grad if accumulated is None else accumulated

    @property
    def _hp_grad(self) -> Tensor:
        """The gradient in bf16, where DeepSpeed accumulates in an optimizer of its own."""
        return self._weight._hp_grad  # type: ignore[no-any-return]


def _share_tied_weight(model: CausalLM, mesh: Mesh) -> tuple[_TiedGradient, Any] | None:
    """Return the embedding that the first and the last stage share, and the group that sums its gradients.

    The copy on the last stage is marked as a replica; otherwise it would count twice in the gradient norm.
    """
    if not model.spec.tie_word_embeddings or mesh.pipeline_ends.size == 1:
        return None
    weight = model.token_embedding.weight
    assert isinstance(weight, nn.Parameter)
    weight.ds_pipe_replicated = mesh.pipeline_ends.rank > 0  # type: ignore[attr-defined]
    if not weight.requires_grad:
        return None
    return _TiedGradient(weight), mesh.pipeline_ends.group
