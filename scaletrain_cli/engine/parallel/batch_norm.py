"""BatchNorm over data-parallel ranks: synchronized layers, or the same running statistics on all ranks."""

import torch
import torch.distributed as dist
from torch import Tensor, nn

from scaletrain_cli.engine.model.materialization import stored_buffers
from scaletrain_cli.engine.model.vision.batch_norm import batch_norms
from scaletrain_cli.engine.parallel.mesh import Axis
from scaletrain_cli.plan.result import Layout
from scaletrain_cli.spec import RunSpec


def images_of_statistics(model: nn.Module, spec: RunSpec, layout: Layout) -> int | None:
    """Return the number of images that a BatchNorm layer normalizes together in training; None without such layers."""
    if not any(True for _ in batch_norms(model)):
        return None
    ranks = (
        layout.data_parallel
        if spec.training.synchronizes_batch_norm(layout.micro_batch_size, layout.data_parallel)
        else 1
    )
    views = 2 if spec.training.loss.name == "nt_xent" else 1
    return views * layout.micro_batch_size * ranks


def synchronize(model: nn.Module, axis: Axis) -> None:
    """Let the BatchNorm layers, which have an attribute ``axis``, use the statistics of all ranks of that axis.

    Their forward and backward passes are collective then.
    """
    for module in model.modules():
        if isinstance(getattr(module, "axis", None), Axis):
            module.axis = axis  # type: ignore[assignment]


def statistics_of(model: nn.Module) -> list[Tensor]:
    """Return the running statistics: the buffers with fractions that belong to the weights."""
    return [buffer for buffer, _ in stored_buffers(model) if buffer.is_floating_point()]


@torch.no_grad()
def average_statistics(model: nn.Module, axis: Axis) -> None:
    """Replace the running statistics by their mean over the ranks of an axis. Collective.

    Layers that are not synchronized see other images on each rank. Without this a checkpoint would have the statistics
    of one of them, and an evaluation another model on each. Equal ones do not change, not by a bit.
    """
    buffers = statistics_of(model)
    if not buffers or axis.group is None:
        return
    flat = torch.cat([buffer.view(-1) for buffer in buffers]).double()  # exact sums of equal values
    dist.all_reduce(flat, group=axis.group)
    flat /= axis.size
    for buffer, values in zip(buffers, torch.split(flat, [buffer.numel() for buffer in buffers]), strict=True):
        buffer.copy_(values.view_as(buffer))
