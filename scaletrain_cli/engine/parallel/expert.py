"""Expert parallelism (GShard, arXiv:2006.16668): experts are sharded over ranks, and tokens travel by all-to-all.

Also marks the experts for DeepSpeed, which reduces and shards them over other ranks than the rest of the model.
"""

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function

from scaletrain_cli.engine.model.moe import Experts, Routing, by_expert, combine, moe_layers_of, rows_of
from scaletrain_cli.engine.parallel.mesh import (
    Axis,
    Mesh,
    ShardSpec,
    copy_to_ranks,
    group_of,
    mark_sharded,
    shard_spec_of,
    sum_over_ranks,
)


def shard_experts(model: nn.Module, mesh: Mesh) -> None:
    """Keep this rank's experts of a model on the meta device, and its share of their channels. Collective."""
    expert, tensor = mesh.expert, mesh.tensor
    shards = None  # the ranks that ZeRO shards a rank's experts over; a group even for one rank
    if expert.group is not None:
        shards = _own_group(1) if mesh.expert_replicas.group is None else mesh.expert_replicas.group
    for layer in moe_layers_of(model):
        held = len(layer.experts.members) // expert.size
        layer.experts.members = layer.experts.members[expert.rank * held : (expert.rank + 1) * held]
        biases = {"gate_up_proj_bias": 1, "down_proj_bias": 1} if layer.experts.has_bias else {}
        for name, dim in {"gate_up_proj": 1, "down_proj": 2, **biases}.items():
            shard = getattr(layer.experts, name)[layer.experts.members.start : layer.experts.members.stop]
            parts = len(layer.experts.joined[name.removesuffix("_bias")]) if dim == 1 else 1
            spec = ShardSpec(dim, tensor.size, tensor.rank, parts)
            parameter = nn.Parameter(spec.take(shard))
            if tensor.group is not None:
                mark_sharded(parameter, spec)
            if shards is not None:
                _mark_for_deepspeed(parameter, expert, shards)
            setattr(layer.experts, name, parameter)
        if tensor.group is not None:  # each rank adds its columns of the bias to its part of the sum
            layer.experts.share_bias = partial(_in_columns, axis=tensor)
        layer.dispatch, layer.replicas = DispatchOverRanks(expert, tensor), mesh.replicas.group
        if mesh.parts.group is not None:
            layer.tally, layer.sequence_ranks = TallyOverRanks(mesh.parts), mesh.parts.size


def _in_columns(part: Tensor, axis: Axis) -> Tensor:
    """Return a rank's columns [n, width / ranks] in their place among all [n, width], zero elsewhere."""
    width = part.shape[-1]
    return F.pad(part, (axis.rank * width, (axis.size - axis.rank - 1) * width))


class DispatchOverRanks:
    """Sends tokens to the ranks of their experts and back, and sums the results over tensor ranks."""

    def __init__(self, expert: Axis, tensor: Axis) -> None:
        self._expert, self._tensor = expert, tensor

    def __call__(self, experts: Experts, tokens: Tensor, routing: Routing) -> Tensor:
        """Return the weighted sum of each token's expert outputs; tokens and result [n, hidden]."""
        # Each tensor rank has part of every expert, so its gradients of tokens and weights are partial, too.
        tokens = copy_to_ranks(tokens, self._tensor)
        routing = routing._replace(weights=copy_to_ranks(routing.weights, self._tensor))
        order, counts = by_expert(routing, len(experts.members) * self._expert.size)
        rows = self._through(experts, rows_of(tokens, order, routing), counts)
        return sum_over_ranks(combine(rows, order, routing), self._tensor)

    def _through(self, experts: Experts, rows: Tensor, counts: Tensor) -> Tensor:
        """Return the outputs of rows sorted by expert; ``counts`` [experts] are the rows of each expert."""
        if self._expert.group is None:
            return experts(rows, counts)  # type: ignore[no-any-return]
        held = len(experts.members)
        outgoing = counts.view(self._expert.size, held)
        incoming = torch.empty_like(outgoing)
        dist.all_to_all_single(incoming, outgoing, group=self._expert.group)
        # waits for the device, as ``by_expert`` does where assignments are dropped or rows have padding
        send, receive = torch.stack((outgoing.sum(1), incoming.sum(1))).tolist()
        arrived = _send(rows, send, receive, self._expert)
        # rows arrive rank by rank, and from each rank sorted by expert
        numbers = torch.arange(held, device=rows.device).repeat(self._expert.size)
        order = numbers.repeat_interleave(incoming.flatten(), output_size=len(arrived)).argsort(stable=True)
        done = experts(arrived.index_select(0, order), incoming.sum(0))
        return _send(done.index_select(0, order.argsort()), receive, send, self._expert)


class TallyOverRanks:
    """Counts loads of sequences that are spread over sequence ranks."""

    def __init__(self, axis: Axis) -> None:
        self._axis = axis

    def __call__(self, load: Tensor) -> tuple[Tensor, Tensor]:
        """Return the loads [batch, experts] of earlier parts of the sequences, and of whole sequences.

        Context ranks have no part that is earlier than another; only capacities, which they do not support, read that.
        """
        parts = [torch.empty_like(load) for _ in range(self._axis.size)]
        dist.all_gather(parts, load, group=self._axis.group)
        loads = torch.stack(parts)
        return loads[: self._axis.rank].sum(0), loads.sum(0)


def _send(rows: Tensor, send: list[int], receive: list[int], axis: Axis) -> Tensor:
    return _Send.apply(rows, send, receive, axis.group)  # type: ignore[no-any-return, no-untyped-call]


class _Send(Function):
    """Sends ``send`` rows to each rank and receives ``receive`` rows from each; gradients travel back."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, send: list[int], receive: list[int], group: dist.ProcessGroup) -> Tensor:
        ctx.send, ctx.receive, ctx.group = send, receive, group
        return _swap(rows, send, receive, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return _swap(gradient, ctx.receive, ctx.send, ctx.group), None, None, None


def _swap(rows: Tensor, send: list[int], receive: list[int], group: dist.ProcessGroup) -> Tensor:
    arrived = rows.new_empty(sum(receive), rows.shape[-1])
    dist.all_to_all_single(arrived, rows.contiguous(), receive, send, group=group)
    return arrived


def is_sharded_over_experts(parameter: nn.Parameter) -> bool:
    """Return True if other expert ranks have other experts in this parameter, so that all count in a norm."""
    return not getattr(parameter, "allreduce", True)


def with_expert_groups(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return parameter groups with experts apart, because DeepSpeed shards them over fewer ranks; no empty groups."""
    split: list[dict[str, Any]] = []
    for sharded in (False, True):
        for group in groups:
            members = [parameter for parameter in group["params"] if is_sharded_over_experts(parameter) == sharded]
            if members:
                expert = {"moe": True, "name": members[0].group_name} if sharded else {}
                split.append({**group, "params": members, **expert})
    return split


def mark_experts_for_deepspeed(model: nn.Module, mesh: Mesh) -> None:
    """Mark sharded experts for DeepSpeed, with their ranks, before ``deepspeed.initialize``. Collective."""
    if mesh.expert.group is None:
        return
    from deepspeed.module_inject.auto_ep_layer import AutoEPMoELayer
    from deepspeed.utils import groups

    class Sign(AutoEPMoELayer):  # type: ignore[misc]
        """Marks the model as MoE: DeepSpeed checks only for an instance of this class; ZeRO-3 rejects the older MoE."""

        def __init__(self) -> None:
            nn.Module.__init__(self)
            self.num_experts = mesh.expert.size

        def set_deepspeed_parallelism(self, *_: Any, **__: Any) -> None:
            """Do nothing: the groups exist."""

    name = _group_name(mesh.expert)
    # The ranks that together have all experts: tensor ranks are neighbors, and expert ranks are next to them.
    assert mesh.expert.group is not None
    groups._get_expert_parallel_group_dict()[name] = (
        mesh.expert.group if mesh.tensor.group is None else _own_group(mesh.expert.size * mesh.tensor.size)
    )
    sharded = next(parameter for parameter in model.parameters() if is_sharded_over_experts(parameter))
    groups._get_expert_data_parallel_group_dict()[name] = sharded.__dict__["ds_zero_partition_process_group"]
    if not any(p.requires_grad for p in model.parameters() if is_sharded_over_experts(p)):
        return  # DeepSpeed requires a parameter group of experts in an MoE model
    model.add_module("deepspeed_expert_parallel", Sign())


def count_replicated_experts_once(engine: Any, mesh: Mesh) -> None:
    """Let ZeRO-3 count tensors of experts that every tensor rank has, such as factors of adapters, once in the norm.

    For experts it sums the norms of all ranks, as if tensor ranks shared each tensor (stage3.py
    _grad_norm_counts_every_rank); here it gets no gradient of them from tensor ranks other than the first.
    """
    if engine.zero_optimization_stage() != 3 or mesh.expert.group is None or mesh.tensor.rank == 0:
        return
    optimizer = engine.optimizer
    norm, offloaded_norms = optimizer.get_grad_norm_direct, optimizer.complete_grad_norm_calculation_for_cpu_offload

    def is_copy(parameter: nn.Parameter) -> bool:
        return is_sharded_over_experts(parameter) and shard_spec_of(parameter) is None

    def direct(gradients: list[Tensor], parameters: list[nn.Parameter], *others: Any) -> Any:
        pairs = zip(gradients, parameters, strict=True)
        return norm([torch.zeros_like(g) if is_copy(p) else g for g, p in pairs], parameters, *others)

    def offloaded(parameters: list[nn.Parameter]) -> Any:
        for parameter in filter(is_copy, parameters):
            optimizer.norm_for_param_grads.pop(optimizer.get_param_id(parameter), None)
        return offloaded_norms(parameters)

    optimizer.get_grad_norm_direct = direct
    optimizer.complete_grad_norm_calculation_for_cpu_offload = offloaded


def _mark_for_deepspeed(shard: nn.Parameter, expert: Axis, shards: dist.ProcessGroup) -> None:
    """Set DeepSpeed's attributes: the first two for stages 0 to 2, the others for stage 3."""
    name = _group_name(expert)
    shard.__dict__.update(
        allreduce=False,
        group_name=name,
        ds_zero_placement_family="autoep_expert",
        ds_zero_partition_group_name=name,
        ds_zero_partition_process_group=shards,
    )


def _group_name(expert: Axis) -> str:
    return f"ep_size_{expert.size}"


def _own_group(size: int) -> dist.ProcessGroup:
    """Return a group of ``size`` neighboring ranks that includes this one."""
    first = dist.get_rank() // size * size
    return group_of(list(range(first, first + size)))
