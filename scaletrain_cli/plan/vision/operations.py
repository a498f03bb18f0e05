"""Operations of vision networks: products, memory traffic and saved activations of each.

All figures are for one sample; an element is one value in the training precision.

``kept`` follows autograd. A tensor is saved if the backward pass of the operation that reads it needs it, and is
counted once, at the operation that produces it. Convolutions, linear layers and layer scale need their input, ReLU its
output, GELU its input, BatchNorm and LayerNorm their input with a mean and an inverse root; additions, mean pooling and
views need nothing. In-place ReLU and addition change no count, because what they overwrite would not be saved.

``kept_for_weights`` is the part of it that only the gradient of a weight needs, so that frozen weights spare it.

``autocast``: torch.autocast over fp32 weights. LayerNorm and softmax then compute in fp32 (torch/amp, "CUDA Ops that
can autocast to float32"), and so do sums and products with their results. The next matrix product makes a 16-bit copy
of its input, and saves it. An fp32 value counts as two elements.
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
    channels_last: bool = True,
    of_images: bool = False,
    kept: bool = True,
) -> Operation:
    """Return a dense convolution with a ``kernel`` x ``kernel`` filter, from ``pixels`` to ``out_pixels``.

    cuDNN converts other memory formats to and from channels-last. ``of_images``: the input needs no gradient.
    """
    inputs, outputs, depth = channels * pixels, features * out_pixels, channels * kernel**2
    return Operation(
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
    """Return a depthwise convolution, one filter per channel, with bias.

    torch's kernels need channels-first images, while the matrix products around them use channels-last, so each pass
    copies the images before and after.
    """
    size = channels * pixels
    return Operation(
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


def linear(
    rows: int, channels: int, features: int, *, bias: bool = True, kept: bool = True, scaled: bool = False
) -> Operation:
    """Return a linear layer on ``rows`` rows, from ``channels`` to ``features``; ``kept``: its output is saved.

    ``scaled``: a layer scale follows, which needs the output for its own gradient only.
    """
    inputs, outputs = rows * channels, rows * features
    return Operation(
        rows=rows,
        columns=features,
        depth=channels,
        kept=outputs if kept else 0,
        kept_for_weights=outputs if scaled else 0,
        inputs=inputs,
        outputs=outputs,
        moved_back=2 * (inputs + outputs) + (outputs if bias else 0),
        kernels=4 if bias else 3,
    )


def batch_norm(channels: int, pixels: int) -> Operation:
    """Return a BatchNorm. Forward reads its input twice (statistics, values), backward reads two tensors twice."""
    size = channels * pixels
    return Operation(kept_once_bytes=2 * _FP32 * channels, inputs=2 * size, outputs=size, moved_back=5 * size)


def layer_norm(channels: int, rows: int, *, autocast: bool = False) -> Operation:
    """Return a LayerNorm, with one saved mean and inverse root per row. Backward: input gradient, two weight sums."""
    size = channels * rows
    return Operation(
        kept=size,
        kept_for_weights=size,
        kept_bytes=2 * _FP32 * rows,
        inputs=size * (4 if autocast else 1),
        outputs=size * (3 if autocast else 1),
        moved_back=size * (13 if autocast else 5),
        kernels=5 if autocast else 3,
    )


def activation(size: int, kept: int = 1, *, before_linear: bool = False) -> Operation:
    """Return an activation function on ``size`` elements; ``kept`` is 2 for QuickGELU, a sigmoid and a product.

    ``before_linear``: only the linear layer that follows saves its result, as of GELU and of QuickGELU's product.
    """
    return Operation(
        pointwise=True,
        kept=kept * size,
        kept_for_weights=size if before_linear else 0,
        inputs=kept * size,
        outputs=kept * size,
        moved_back=3 * kept * size,
    )


def addition(size: int, *, kept: bool = True, autocast: bool = False, scaled: bool = False) -> Operation:
    """Return a residual addition; backward adds the gradients of both branches. ``scaled``: one branch is fp32."""
    if autocast:
        branch = 2 if scaled else 1
        back = 6 + (0 if scaled else 3)  # the sum of gradients, and the cast of the branch's gradient to 16 bits
        return Operation(kept=2 * size, inputs=(2 + branch) * size, outputs=2 * size, moved_back=back * size, kernels=3)
    return Operation(pointwise=True, kept=size if kept else 0, inputs=2 * size, outputs=size, moved_back=3 * size)


def layer_scale(channels: int, rows: int, *, autocast: bool = False) -> Operation:
    """Return a layer scale: a learned factor per channel."""
    size = channels * rows
    outputs = size * (2 if autocast else 1)
    return Operation(inputs=size, outputs=outputs, moved_back=2 * outputs + 2 * size, kernels=4)


def max_pool(channels: int, pixels: int, out_pixels: int) -> Operation:
    """Return a max pooling; it saves its indices, and the next convolution its output."""
    inputs, outputs = channels * pixels, channels * out_pixels
    indices = _INDEX // 2 * outputs  # in 16-bit elements
    return Operation(
        kept=outputs,
        kept_for_weights=outputs,
        kept_bytes=_INDEX * outputs,
        inputs=inputs,
        outputs=outputs + indices,
        moved_back=2 * inputs + outputs + indices,
    )


def mean_pool(channels: int, pixels: int) -> Operation:
    """Return the mean over an image, whose input is not saved for it."""
    size = channels * pixels
    return Operation(kept=channels, reads_input=False, inputs=size, outputs=channels, moved_back=size)


def attention(rows: int, heads: int, width: int, *, fused: bool, autocast: bool = False) -> tuple[Operation, ...]:
    """Return the scores, softmax and weighted sum of ``heads`` heads of size ``width``, without projections.

    Without a fused kernel, torch.matmul makes contiguous copies of queries, keys and values per head, and saves the
    copies; another copy restores the layout of the output.
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
    """One operation, forward and backward.

    A matrix product is ``batches`` times (``rows`` x ``depth``) by (``depth`` x ``columns``). A convolution is a
    product too, as implicit GEMM with its output pixels as rows (cuDNN, arXiv:1410.0759).
    """

    rows: int = 0
    columns: int = 0
    depth: int = 0
    batches: int = 1
    convolution: bool = False
    taps: int = 1  # elements of a convolution's filter per channel; a factor of its depth
    has_input_gradient: bool = True
    fused_attention: bool = False  # both products and the softmax in one kernel
    depthwise: bool = False  # each channel separately, without tensor cores
    pointwise: bool = False  # each output element needs only the input element at its position
    reads_input: bool = True  # its backward pass needs its input
    kept: int = 0  # elements saved for the backward pass
    kept_for_weights: int = 0  # those of them that only the gradient of a weight needs
    kept_bytes: int = 0  # bytes saved in fixed types: statistics and indices
    kept_once_bytes: int = 0  # the same, per micro-batch instead of per sample
    inputs: int = 0  # elements read in the forward pass
    outputs: int = 0  # elements written in the forward pass
    moved_back: int = 0  # elements read and written in the backward pass
    copied: int = 0  # elements moved in the forward pass to change the memory format; twice as many backward
    kernels: int = 2  # kernels launched, forward and backward together

    @property
    def macs(self) -> int:
        """Multiply-accumulate operations of the forward pass."""
        return self.batches * self.rows * self.columns * self.depth

    @property
    def moved(self) -> int:
        """Elements read and written in the forward pass, whose gradients exist at once in the backward pass."""
        return self.inputs + self.outputs


@dataclass(frozen=True)
class Block:
    """Operations that activation checkpointing recomputes together; the network has ``count`` such blocks in a row.

    ``tower``, ``place`` and ``first``, the number of the first of the blocks, find its parameters (parameters.py).
    ``training``: ``trained``; ``passed``, if its weights are frozen and gradients pass through it; ``frozen``, if
    neither, so that nothing is saved and there is no backward pass.
    """

    operations: tuple[Operation, ...]
    count: int = 1
    input: int = 0  # elements that a checkpointed block saves; 0: the block is never checkpointed
    place: str = "opening"
    first: int = 0
    tower: str = ""
    training: str = "trained"

    @property
    def macs(self) -> int:
        """Multiply-accumulate operations of one block and sample, forward."""
        return sum(operation.macs for operation in self.operations)


@dataclass(frozen=True, eq=False)  # compared by identity, so that it is a cheap cache key
class VisionNetwork:
    """A network: its blocks in the order of the forward pass, and the size of what the loss reads."""

    blocks: tuple[Block, ...]
    features: int = 0  # elements per sample that contrastive learning gathers from all ranks; 0: a classifier
    classes: int = 0
    pooled: int = 0  # elements of the features before the classifier

    @property
    def macs(self) -> int:
        """Multiply-accumulate operations of a forward pass per sample, with unmasked attention, without the loss."""
        return sum(block.macs * block.count for block in self.blocks)

    @property
    def training_flops(self) -> int:
        """FLOPs of one sample: 2 per product with addition forward, and 2 for each of the two gradients computed."""
        passes = {"trained": 6, "passed": 4, "frozen": 2}
        return sum(passes[block.training] * block.macs * block.count for block in self.blocks)
