"""BatchNorm (arXiv:1502.03167) whose statistics are fp32 in every precision, of one rank's images or of several ranks'.

With images on several ranks each computes the mean and the squares around it of its own images, and two sums over the
ranks join them (Chan, Golub and LeVeque 1983, equation 2.1), so that no difference of large squares is taken. Ranks may
have different numbers of values. Layers that are not synchronized get the same running statistics on all ranks.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from scaletrain_cli.engine.eager import never_compiled
from scaletrain_cli.engine.model.materialization import ExactBuffers, stored_buffers
from scaletrain_cli.engine.parallel.mesh import Axis
from scaletrain_cli.plan.result import Layout
from scaletrain_cli.spec import RunSpec

_PIXELS = (0, 2, 3)  # the dimensions that statistics are of


class Statistics(NamedTuple):
    """Mean and unbiased variance [channels] of a batch, fp32, which no gradient flows into."""

    mean: Tensor
    variance: Tensor


class BatchNorm2d(ExactBuffers):
    """Normalizes each channel of images [batch, channels, height, width], in fp32, and returns the dtype of its input.

    In training by the mean and the variance over images and pixels, of all ranks of ``axis``; in evaluation, and while
    neither weight nor bias trains, by the running ones. These are buffers that keep fp32 when a model is cast, because
    they would stall in 16 bits. ``update_statistics`` updates them.
    """

    running_mean: Tensor
    running_var: Tensor
    num_batches_tracked: Tensor

    def __init__(self, channels: int, eps: float = 1e-5, momentum: float = 0.1) -> None:
        super().__init__()
        self.eps, self.momentum, self.axis = eps, momentum, Axis()
        self.latest: Statistics | None = None
        self.weight = nn.Parameter(torch.ones(channels))
        self.bias = nn.Parameter(torch.zeros(channels))
        self.register_buffer("running_mean", torch.zeros(channels, dtype=torch.float32))
        self.register_buffer("running_var", torch.ones(channels, dtype=torch.float32))
        self.register_buffer("num_batches_tracked", torch.zeros((), dtype=torch.int64))

    @property
    def uses_batch(self) -> bool:
        """True if images are normalized by the statistics of their batch, which the running ones follow."""
        return self.training and (self.weight.requires_grad or self.bias.requires_grad)

    def forward(self, x: Tensor) -> Tensor:
        """Return the normalized images times ``weight`` plus ``bias``. Keep the statistics of the batch in training.

        A recomputed forward pass overwrites them with the same ones, after ``update_statistics`` has used them.
        """
        weight, bias = self.weight.float(), self.bias.float()
        if not self.uses_batch:
            return F.batch_norm(x, self.running_mean, self.running_var, weight, bias, eps=self.eps)
        if self.axis.group is not None:
            over_ranks: tuple[Tensor, Statistics] = self._over_ranks(x, weight, bias)
            self.latest = over_ranks[1]
            return over_ranks[0]
        values = x.numel() // x.shape[1]
        if values < 2:
            raise ValueError("BatchNorm needs at least two values per channel in training: larger images or batches")
        y, mean, scale = torch.native_batch_norm(x, weight, bias, None, None, True, self.momentum, self.eps)
        variance = (scale.detach().pow(-2) - self.eps) * (values / (values - 1))
        self.latest = Statistics(mean.detach(), variance)
        return y

    @never_compiled
    def _over_ranks(self, x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Statistics]:
        mean, variance, values = _joint_statistics(x.detach(), self.axis)
        unbiased = variance * (values / (values - 1).clamp(min=1))
        settings = _Settings(mean.float(), variance.float(), values, self.eps, self.axis)
        y: Tensor = _Normalized.apply(x, weight, bias, settings)  # type: ignore[no-untyped-call]
        return y, Statistics(settings.mean, unbiased.float())


class _Settings(NamedTuple):
    """The joint mean and biased variance [channels], fp32; the number of values per channel, a scalar."""

    mean: Tensor
    variance: Tensor
    values: Tensor
    eps: float
    axis: Axis


class _Normalized(Function):
    """Images normalized by joint statistics, which the gradient of the images takes into account.

    Gradients of weight and bias are those of this rank's images, as of all other parameters.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, settings: _Settings) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.settings = settings
        return F.batch_norm(x, settings.mean, settings.variance, weight, bias, eps=settings.eps)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor, Tensor, None]:
        x, weight = ctx.saved_tensors
        mean, variance, values, eps, axis = ctx.settings
        scale = torch.rsqrt(variance + eps)
        wide, centered = gradient.float(), x.float() - _channels(mean)
        total, product = wide.sum(_PIXELS), (wide * centered).sum(_PIXELS)
        of_weight, of_x = product * scale, None
        if ctx.needs_input_grad[0]:
            sums = torch.stack((total, product)).double()
            dist.all_reduce(sums, group=axis.group)
            shift, slope = (sums / values).float()
            centered.mul_(_channels(slope * scale.square())).add_(_channels(shift))
            of_x = ((wide - centered) * _channels(weight * scale)).to(x.dtype)
        return of_x, of_weight, total, None


def _joint_statistics(x: Tensor, axis: Axis) -> tuple[Tensor, Tensor, Tensor]:
    """Return mean and biased variance [channels] of the images of all ranks, and the number of values, fp64."""
    count = x.numel() // x.shape[1]
    if count:
        variance, mean = torch.var_mean(x.float(), _PIXELS, correction=0)
    else:
        variance = mean = torch.zeros(x.shape[1], device=x.device)
    mean, variance = mean.double(), variance.double()
    sums = torch.cat((mean * count, mean.new_full((1,), count)))
    dist.all_reduce(sums, group=axis.group)
    joint, total = sums[:-1] / sums[-1], sums[-1]
    squares = (variance + (mean - joint).square()) * count
    dist.all_reduce(squares, group=axis.group)
    return joint, squares / total, total


def _channels(values: Tensor) -> Tensor:
    return values.view(1, -1, 1, 1)


def batch_norms(model: nn.Module) -> Iterator[BatchNorm2d]:
    yield from (module for module in model.modules() if isinstance(module, BatchNorm2d))


@torch.no_grad()
@never_compiled
def update_statistics(model: nn.Module) -> None:
    """Move the running statistics of the batch norms that train towards those of the latest batch.

    Called at the end of a model's forward pass, so that a block that activation checkpointing recomputes in the
    backward pass counts once. ``num_batches_tracked`` counts the updates.
    """
    norms = [norm for norm in batch_norms(model) if norm.uses_batch and norm.latest is not None]
    for momentum in {norm.momentum for norm in norms}:
        chosen = [(norm, norm.latest) for norm in norms if norm.momentum == momentum and norm.latest is not None]
        running = [buffer for norm, _ in chosen for buffer in (norm.running_mean, norm.running_var)]
        torch._foreach_lerp_(running, [values for _, latest in chosen for values in latest], momentum)
        torch._foreach_add_([norm.num_batches_tracked for norm, _ in chosen], 1)
    for norm in norms:
        norm.latest = None


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
