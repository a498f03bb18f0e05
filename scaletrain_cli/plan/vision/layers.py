"""The operations that vision networks are made of, each with its parameters, products, traffic and what it keeps.

What is kept follows autograd: an operation's output, where the backward pass of any consumer reads it; it is counted
where it is produced, once. Convolutions, linear layers and layer scale read their input again, ReLU its output, GELU
its input, BatchNorm and LayerNorm theirs and one mean and root; additions, pooling by the mean and views read nothing.
A ReLU or an addition in place changes no count, since what it overwrites would not be kept.

``autocast``: torch.autocast over fp32 weights. LayerNorm and softmax then compute in fp32 and what they add to or scale
by a weight stays fp32, so every product behind them first makes a 16-bit copy of its input, which it keeps
(torch/amp, "CUDA Ops that can autocast to float32"). An fp32 value counts as two elements.
"""

from __future__ import annotations

from scaletrain_cli.plan.vision.operations import Operation

_FP32 = 4
_INDEX = 8  # max pooling keeps where each maximum stood, as int64


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
    """A dense convolution. cuDNN turns images around whose channels do not come last, and what it computes back."""
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
    """One filter per channel, with bias; its output is kept.

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
    """A projection of each of ``rows``."""
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
    """Forward reads twice (statistics, then values), backward twice two tensors; one mean and root per channel."""
    size = channels * pixels
    return Operation(
        parameters=2 * channels,
        kept_once_bytes=2 * _FP32 * channels,
        inputs=2 * size,
        outputs=size,
        moved_back=5 * size,
    )


def layer_norm(channels: int, rows: int, *, autocast: bool = False) -> Operation:
    """Its output feeds a product and is kept; one mean and root per row. Backward: dx, then the two weights' sums."""
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
    """ReLU, GELU, or QuickGELU, which is a sigmoid and a product of its own (``kept`` 2)."""
    return Operation(
        pointwise=True, kept=kept * size, inputs=kept * size, outputs=kept * size, moved_back=3 * kept * size
    )


def addition(size: int, *, kept: bool = True, autocast: bool = False, scaled: bool = False) -> Operation:
    """A skip connection; backward, the gradients of both ways are summed. ``scaled``: of a branch that is fp32."""
    if autocast:
        branch = 2 if scaled else 1
        back = 6 + (0 if scaled else 3)  # the sum, and the branch's gradient in 16 bits
        return Operation(kept=2 * size, inputs=(2 + branch) * size, outputs=2 * size, moved_back=back * size, kernels=3)
    return Operation(pointwise=True, kept=size if kept else 0, inputs=2 * size, outputs=size, moved_back=3 * size)


def layer_scale(channels: int, rows: int, *, autocast: bool = False) -> Operation:
    """A learned factor per channel."""
    size = channels * rows
    outputs = size * (2 if autocast else 1)
    return Operation(parameters=channels, inputs=size, outputs=outputs, moved_back=2 * outputs + 2 * size, kernels=4)


def max_pool(channels: int, pixels: int, out_pixels: int) -> Operation:
    """Its output is kept by the convolution that follows, its indices by itself."""
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
    """Scores, softmax and weighted sum over ``heads`` of ``width``; the queries, keys and values are kept before it.

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
