"""Seconds of one kernel on a device: matrix products by size, attention, and memory-bound kernels.

The shares of a device's rates that kernels reach are in kernel_rates.json, by GPU generation, with sources.
"""

from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any, NamedTuple

from scaletrain_cli.plan.catalogue.hardware import Accelerator
from scaletrain_cli.project_files import packaged_data

# Tile sizes of a matrix product: divisors of the largest tile's rows and columns, and the share of the rate that such a
# tile reaches. Smaller tiles read more bytes per FLOP (CUTLASS, "Efficient GEMM in CUDA"; order of magnitude).
_TILES = ((1, 1, 1.0), (2, 1, 0.93), (2, 2, 0.8), (4, 2, 0.6))
# Share of the rate by alignment: rows of 16-bit elements whose length is a multiple of 64, 8, 2 or 1 (NVIDIA, Matrix
# Multiplication Background User's Guide, figures 3 and 4, A100; order of magnitude). nanoGPT's author reports that
# padding the vocabulary of GPT-2 124M from 50,257 to 50,304 saves a quarter of the step, which means that the head
# without padding runs at about half the rate.
_ALIGNMENT = ((64, 1.0), (8, 0.9), (2, 0.6), (1, 0.5))
# Sequence length at which fused causal attention reaches half of its rate: it wastes half of the blocks on the
# diagonal, and short sequences have too few blocks to fill the GPU (FlashAttention-2, arXiv:2307.08691, figures 5 and
# 6, for lengths from 512 to 16k).
_ATTENTION_HALF_LENGTH = 500
# Share of the rate that fused attention reaches by head size (same figures: head size 64 compared with 128).
_SMALL_HEAD = ((128, 1.0), (96, 0.97), (64, 0.9), (0, 0.65))
# Rate of FlashAttention-3 relative to FlashAttention-2 on an H100 by head size, (forward, backward): from 4k tokens on
# 579 to 616 of 319 to 335 TFLOP/s forward and 542 to 561 of 310 to 322 backward for 128, 420 to 473 of 284 to 299 and
# 453 to 474 of 279 to 291 for 64 (arXiv:2407.08608, figures 5 and 6; forward causal, backward without a mask). With 512
# tokens both are 1.5.
_FLASH_3 = ((128, (1.8, 1.75)), (0, (1.55, 1.63)))
# Share of the rate that fused attention with a bias (ALiBi) reaches: it used flash-attn's first Triton kernel, which in
# the same figures has half to two thirds of FlashAttention-2's rate.
_BIASED_SHARE = 0.55
# Bytes per score that dropout adds to unfused attention, (forward, backward), in 16 bits, with its mask.
_DROPOUT_BYTES = (5, 5)
# Bytes per input element of an fp8 product that its cast moves. Transformer Engine writes the input in fp8 and
# transposed in fp8: 2 bytes read, 1 + 1 written, of which a part is fused with the kernel before.
_CAST_BYTES = 3
# Streaming multiprocessors of a device whose description lacks them.
_USUAL_MULTIPROCESSORS = 100
# Shares of a CPU's nominal rate: matrix products, attention forward, attention backward (order of magnitude).
_CPU_SHARES = (0.5, 0.25, 0.25)
# Share of the rate of large products that the batched per-head products of unfused attention reach; calibrated on half
# of the runs of vTrain, BigScience and Megatron-LM without fused attention.
_BATCHED_SHARE = 0.65
# Further share if the head size is not a multiple of 8, so that tensor cores cannot be used: the fp32 units of an A100
# have a sixteenth of the rate. BigScience measured that 14400 channels in 96 heads of 150 are a third slower than 14336
# channels in 112 heads of 128 (chronicles of the 104B and 176B models).
_ODD_HEAD_SHARE = 1 / 16


@dataclass(frozen=True)
class Rates:
    """Sustained rates of a device at one precision."""

    matmul: float  # FLOP/s of large matrix products
    multiprocessors: int
    tile_rows: int  # of the largest tile of a matrix product
    tile_columns: int
    depth: int  # inner dimension whose time equals that of filling a tile's pipeline
    attention_forward: float  # FLOP/s of fused attention
    attention_backward: float
    memory: float  # bytes/s
    kernel_seconds: float  # fixed cost of one kernel
    element_bytes: int
    cast_bytes: int  # bytes per input element of a product to cast it to 8 bits and transpose it
    is_cpu: bool


def rates(device: Accelerator, precision: str) -> Rates:
    """Return the device's rates at a precision. With fp8 and fp4, attention still computes in 16 bits.

    Shares that the spec states replace those of the catalogue; the backward pass of attention keeps its ratio to the
    forward pass.
    """
    row = _generations()[generation(device.name)]
    peak = device.peak_flops(precision)
    narrow = precision in ("fp8", "fp4")
    attention_peak = device.peak_flops("bf16" if narrow and precision in device.flops else precision)
    if device.is_cpu:
        share = _CPU_SHARES
    else:
        share = row["matmul"], row["attention_forward"], row["attention_backward"]
    matmul, attention, memory = device.efficiency
    backward = share[2] if attention is None else attention * share[2] / share[1]
    share = matmul or share[0], attention or share[1], backward
    return Rates(
        matmul=peak * share[0],
        multiprocessors=device.multiprocessors or _USUAL_MULTIPROCESSORS,
        tile_rows=row["tile"][0],
        tile_columns=row["tile"][1],
        depth=row["depth"],
        attention_forward=attention_peak * share[1],
        attention_backward=attention_peak * share[2],
        memory=device.memory_bandwidth * (memory or row["memory"]),
        kernel_seconds=0.0 if device.is_cpu else row["kernel_seconds"],
        element_bytes=4 if precision in ("fp32", "tf32") else 2,
        cast_bytes=_CAST_BYTES if narrow else 0,
        is_cpu=device.is_cpu,
    )


@lru_cache(maxsize=16384)
def matmul_seconds(rows: int, inner: int, columns: int, rate: Rates) -> float:
    """Return the seconds of one matrix product, (rows x inner) by (inner x columns).

    The output is divided into tiles, and each wave computes one tile per multiprocessor; the last wave leaves some
    idle. A short inner dimension does not hide filling the tile's pipeline. Thin products are bound by memory bandwidth
    (NVIDIA, Matrix Multiplication Background User's Guide).
    """
    return _tiled_seconds(rows, inner, columns, min(_aligned(inner), _aligned(columns)), rate)


class LinearSeconds(NamedTuple):
    """Seconds of the three matrix products of a linear layer."""

    forward: float
    of_input: float  # gradient of the input
    of_weight: float  # gradient of the weight


@lru_cache(maxsize=16384)
def linear_products(rows: int, inner: int, columns: int, compiled: bool, rate: Rates) -> LinearSeconds:
    """Return the seconds of a linear layer on ``rows`` rows, from ``inner`` to ``columns`` features.

    In all three products the rows in memory have the length of one of the weight's dimensions; torch.compile pads
    these, so that they are aligned.
    """
    aligned = 1.0 if compiled else min(_aligned(inner), _aligned(columns))
    return LinearSeconds(
        _tiled_seconds(rows, inner, columns, aligned, rate),
        _tiled_seconds(rows, columns, inner, aligned, rate),
        _tiled_seconds(inner, rows, columns, aligned, rate),
    )


def _tiled_seconds(rows: int, inner: int, columns: int, aligned: float, rate: Rates) -> float:
    if rate.is_cpu:
        return 2.0 * rows * inner * columns / rate.matmul
    best = float("inf")
    for cut_rows, cut_columns, share in _TILES:
        tile_rows, tile_columns = rate.tile_rows // cut_rows, rate.tile_columns // cut_columns
        tiles = -(-rows // tile_rows) * -(-columns // tile_columns)
        waves = -(-tiles // rate.multiprocessors)
        # Large products divide the last wave over all multiprocessors (stream-K, arXiv:2301.03598); small ones cannot.
        waves_run = waves if waves <= 2 else tiles / rate.multiprocessors + 0.5
        best = min(best, waves_run * tile_rows * tile_columns / share)
    flops = 2.0 * best * rate.multiprocessors * (inner + rate.depth) / aligned
    moved = rate.element_bytes * (rows * inner + inner * columns + rows * columns)
    return max(flops / rate.matmul, moved / rate.memory) + rate.kernel_seconds


def _aligned(width: int) -> float:
    """Return the share of the rate that products reach with rows of ``width`` elements, by their alignment."""
    return next(share for multiple, share in _ALIGNMENT if width % multiple == 0)


def memory_seconds(moved_bytes: float, kernels: float, rate: Rates) -> float:
    """Return the seconds of ``kernels`` memory-bound kernels that read and write ``moved_bytes`` in total."""
    return moved_bytes / rate.memory + kernels * rate.kernel_seconds


def flash_attention_seconds(
    queries: int, keys: int, heads: int, score_size: int, value_size: int, biased: bool, rate: Rates
) -> tuple[float, float]:
    """Return the (forward, backward) seconds of fused causal attention: ``queries`` rows x ``keys`` positions per head.

    Forward has two matrix products over the causal half, backward five of the same size (arXiv:2307.08691, section
    4.1). ``score_size`` and ``value_size``: head sizes of queries and values. ``biased``: the kernel adds a bias
    (ALiBi).
    """
    flops = 1.0 * queries * keys * heads * (score_size + value_size)
    if rate.is_cpu:
        return flops / rate.attention_forward, 2.5 * flops / rate.attention_backward
    share = keys / (keys + _ATTENTION_HALF_LENGTH)
    share *= next(kept for size, kept in _SMALL_HEAD if score_size >= size) * (_BIASED_SHARE if biased else 1.0)
    forward = flops / (rate.attention_forward * share) + rate.kernel_seconds
    return forward, 2.5 * flops / (rate.attention_backward * share) + 3 * rate.kernel_seconds


def flash_3_speed(head_size: int) -> tuple[float, float]:
    """Return the (forward, backward) rate of FlashAttention-3 on Hopper, relative to FlashAttention-2."""
    return next(speed for size, speed in _FLASH_3 if head_size >= size)


def materialized_attention_seconds(
    queries: int,
    keys: int,
    heads: int,
    score_size: int,
    value_size: int,
    score_bytes: tuple[float, float],
    dropout: bool,
    rate: Rates,
) -> tuple[float, float]:
    """Return the (forward, backward) seconds of unfused attention, which stores its matrix of scores.

    Unlike fused attention it also computes the masked half. ``score_bytes``: the bytes per score that its kernels move,
    (forward, backward), in 16 bits and without dropout.
    """
    scores = 1.0 * queries * keys * heads
    scale = rate.element_bytes / 2
    share = _BATCHED_SHARE * (_aligned(score_size) if score_size % 8 == 0 else _ODD_HEAD_SHARE)
    flops = 2.0 * scores * (score_size + value_size) / (rate.matmul * share)
    moved = [count + (extra if dropout else 0) for count, extra in zip(score_bytes, _DROPOUT_BYTES, strict=True)]
    forward = flops + memory_seconds(scale * moved[0] * scores, 4, rate)
    return forward, 2 * flops + memory_seconds(scale * moved[1] * scores, 7, rate)


@cache
def generation(name: str) -> str:
    """Return the key in kernel_rates.json of a device: its architecture, in some cases with its power."""
    return next(key for key, row in _generations().items() if name.startswith(tuple(row["prefixes"])))


def _generations() -> dict[str, dict[str, Any]]:
    generations: dict[str, dict[str, Any]] = packaged_data("plan/speed/kernel_rates.json")["generations"]
    return generations
