"""Vision networks as blocks of operations, each with its parameters, products, traffic and what it keeps.

Everything counts one sample; ``elements`` are values of the training precision. What is kept follows autograd: an
operation's output, where the backward pass of any consumer reads it; it is counted where it is produced, once.
Convolutions, linear layers and layer scale read their input again, ReLU its output, GELU its input, BatchNorm and
LayerNorm theirs and one mean and root; additions, pooling by the mean and views read nothing. A ReLU or an addition in
place changes no count, since what it overwrites would not be kept.

``autocast``: torch.autocast over fp32 weights. LayerNorm and softmax then compute in fp32 and what they add to or scale
by a weight stays fp32, so every product behind them first makes a 16-bit copy of its input, which it keeps
(torch/amp, "CUDA Ops that can autocast to float32"). An fp32 value counts as two elements.
"""

from __future__ import annotations

from dataclasses import dataclass

_FP32 = 4
_INDEX = 8  # max pooling keeps the index of each maximum, as int64


def convolution(
    channels: int,
    features: int,
    kernel: int,
    pixels: int,
    out_pixels: int,
    *,
    bias: bool,
    channels_last: bool = True,
    of_images: bool = False,
    kept: bool = True,
) -> Operation:
    """Return a dense convolution. cuDNN converts to and from channels-last order where needed."""
    inputs, outputs, depth = channels * pixels, features * out_pixels, channels * kernel**2
    return Operation(
        parameters=depth * features + (features if bias else 0),
        rows=out_pixels,
        columns=features,
        depth=depth,
        convolution=True,
        taps=kernel**2,
        has_input_gradient=not of_images,
        kept=outputs if kept else 0,
        inputs=inputs,
        outputs=outputs,
        moved_back=(1 if of_images else 2) * (inputs + outputs),
        copied=0 if channels_last else 2 * (inputs + outputs),
        kernels=3,
    )


def depthwise_convolution(channels: int, kernel: int, pixels: int) -> Operation:
    """Return a depthwise convolution, one filter per channel, with bias; its output is kept.

    torch's kernels take images whose channels come first, and the products around them leave them last: a copy in and
    a copy out, each way.
    """
    size = channels * pixels
    return Operation(
        parameters=channels * (kernel**2 + 1),
        rows=pixels,
        columns=channels,
        depth=kernel**2,
        depthwise=True,
        kept=size,
        inputs=size,
        outputs=size,
        moved_back=4 * size,
        copied=4 * size,
        kernels=7,
    )


def linear(rows: int, channels: int, features: int, *, bias: bool = True, kept: bool = True) -> Operation:
    """Return a projection of each of ``rows``."""
    inputs, outputs = rows * channels, rows * features
    return Operation(
        parameters=channels * features + (features if bias else 0),
        rows=rows,
        columns=features,
        depth=channels,
        kept=outputs if kept else 0,
        inputs=inputs,
        outputs=outputs,
        moved_back=2 * (inputs + outputs) + (outputs if bias else 0),
        kernels=4 if bias else 3,
    )


def batch_norm(channels: int, pixels: int) -> Operation:
    """Return a BatchNorm: forward reads twice (statistics, then values), backward twice two tensors."""
    size = channels * pixels
    return Operation(
        parameters=2 * channels,
        kept_once_bytes=2 * _FP32 * channels,
        inputs=2 * size,
        outputs=size,
        moved_back=5 * size,
    )


def layer_norm(channels: int, rows: int, *, autocast: bool = False) -> Operation:
    """Return a LayerNorm; its output is kept, and one mean and root per row. Backward: dx, then two weight sums."""
    size = channels * rows
    return Operation(
        parameters=2 * channels,
        kept=size,
        kept_bytes=2 * _FP32 * rows,
        inputs=size * (4 if autocast else 1),
        outputs=size * (3 if autocast else 1),
        moved_back=size * (13 if autocast else 5),
        kernels=5 if autocast else 3,
    )


def activation(size: int, kept: int = 1) -> Operation:
    """Return ReLU, GELU, or QuickGELU, which is a sigmoid and a product of its own (``kept`` 2)."""
    return Operation(
        pointwise=True, kept=kept * size, inputs=kept * size, outputs=kept * size, moved_back=3 * kept * size
    )


def addition(size: int, *, kept: bool = True, autocast: bool = False, scaled: bool = False) -> Operation:
    """Return a residual addition; backward sums the gradients of both paths. ``scaled``: of an fp32 branch."""
    if autocast:
        branch = 2 if scaled else 1
        back = 6 + (0 if scaled else 3)  # the sum, and the branch's gradient in 16 bits
        return Operation(kept=2 * size, inputs=(2 + branch) * size, outputs=2 * size, moved_back=back * size, kernels=3)
    return Operation(pointwise=True, kept=size if kept else 0, inputs=2 * size, outputs=size, moved_back=3 * size)


def layer_scale(channels: int, rows: int, *, autocast: bool = False) -> Operation:
    """Return a learned factor per channel."""
    size = channels * rows
    outputs = size * (2 if autocast else 1)
    return Operation(parameters=channels, inputs=size, outputs=outputs, moved_back=2 * outputs + 2 * size, kernels=4)


def max_pool(channels: int, pixels: int, out_pixels: int) -> Operation:
    """Return a max pooling; its output is kept by the next convolution, its indices by itself."""
    inputs, outputs = channels * pixels, channels * out_pixels
    indices = _INDEX // 2 * outputs  # in 16-bit elements
    return Operation(
        kept=outputs,
        kept_bytes=_INDEX * outputs,
        inputs=inputs,
        outputs=outputs + indices,
        moved_back=2 * inputs + outputs + indices,
    )


def attention(rows: int, heads: int, width: int, *, fused: bool, autocast: bool = False) -> tuple[Operation, ...]:
    """Return scores, softmax and weighted sum over ``heads`` of ``width``; queries, keys and values are kept before.

    Without a fused kernel, torch.matmul copies queries, keys and values, whose heads do not lie one behind the other,
    and keeps the copies instead; the output's heads are put back by another copy.
    """
    size, scores, outputs = 3 * heads * rows * width, heads * rows * rows, heads * rows * width
    if fused:
        return (
            Operation(
                rows=rows,
                columns=rows,
                depth=2 * width,
                batches=heads,
                fused_attention=True,
                kept=outputs,
                kept_bytes=_FP32 * heads * rows,  # log-sum-exps
                inputs=size,
                outputs=outputs,
                moved_back=2 * size + 2 * outputs,
            ),
        )
    return (
        Operation(
            rows=rows,
            columns=rows,
            depth=width,
            batches=heads,
            inputs=6 * outputs,
            outputs=scores,
            moved_back=8 * outputs + 2 * scores,
            kernels=7,
        ),
        Operation(
            kept=scores, inputs=2 * scores, outputs=2 * scores, moved_back=6 * scores, kernels=4
        ),  # scale, softmax
        Operation(
            rows=rows,
            columns=width,
            depth=rows,
            batches=heads,
            kept=outputs,
            inputs=scores + 4 * outputs,
            outputs=2 * outputs,
            moved_back=2 * scores + 8 * outputs,
            kernels=7,
        ),
    )


@dataclass(frozen=True)
class Operation:
    """One forward operation and its two backward ones.

    A product is ``batches`` times ``rows`` x ``depth`` by ``depth`` x ``columns``; a convolution is one as implicit
    GEMM, with the pixels of its output as rows (cuDNN, arXiv:1410.0759).
    """

    parameters: int = 0
    rows: int = 0
    columns: int = 0
    depth: int = 0
    batches: int = 1
    convolution: bool = False
    taps: int = 1  # of a convolution's filter, among its depth
    has_input_gradient: bool = True  # images have none
    fused_attention: bool = False  # two products and their softmax in one kernel
    depthwise: bool = False  # no matrix units: each channel separately
    pointwise: bool = False  # each output element needs only the input element at its position
    kept: int = 0  # elements
    kept_bytes: int = 0  # of fixed types: statistics and indices
    kept_once_bytes: int = 0  # the same, per micro-batch and not per sample
    inputs: int = 0  # elements read once, and
    outputs: int = 0  # written once, forward
    moved_back: int = 0  # elements read and written by the backward operations
    copied: int = 0  # elements moved forward to reorder images for matrix units; backward twice as many
    kernels: int = 2  # kernels launched forward and backward

    @property
    def macs(self) -> int:
        """Multiply-accumulate operations, forward."""
        return self.batches * self.rows * self.columns * self.depth

    @property
    def moved(self) -> int:
        """Elements read and written forward."""
        return self.inputs + self.outputs

    @property
    def gradients(self) -> int:
        """Elements of the gradients alive while its backward runs: of its output and its input."""
        return self.inputs + self.outputs


@dataclass(frozen=True)
class Block:
    """Operations that activation checkpointing recomputes as one; ``count`` such blocks follow one another."""

    operations: tuple[Operation, ...]
    count: int = 1
    input: int = 0  # elements that a checkpointed block keeps; 0: it is never checkpointed

    @property
    def parameters(self) -> int:
        """Parameters of one block."""
        return sum(operation.parameters for operation in self.operations)

    @property
    def macs(self) -> int:
        """Multiply-accumulate operations of one block and sample, forward."""
        return sum(operation.macs for operation in self.operations)


@dataclass(frozen=True, eq=False)  # compared by identity, so that it is a cheap cache key
class VisionNetwork:
    """Blocks in the order of the forward pass, and the inputs of the loss."""

    blocks: tuple[Block, ...]
    features: int = 0  # elements per sample that contrastive learning gathers from all ranks; 0: a classifier
    classes: int = 0

    @property
    def parameters(self) -> int:
        """All trainable parameters."""
        scale = 1 if self.features else 0  # CLIP learns the temperature of its logits
        return scale + sum(block.parameters * block.count for block in self.blocks)

    @property
    def macs(self) -> int:
        """Multiply-accumulate operations of a forward pass per sample, with unmasked attention, without the loss."""
        return sum(block.macs * block.count for block in self.blocks)
