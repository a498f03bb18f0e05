"""Time of a kernel on a device: matrix products by size, attention, and memory-bound kernels.

Rates by GPU generation, with sources, are in kernel_rates.json.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache, lru_cache
from importlib.resources import files
from typing import Any

from scaletrain_cli.plan.catalogue.hardware import Accelerator

# Tiles that a multiprocessor may work on, as parts of the largest: rows, columns, and the share of the rate that the
# smaller one keeps, because it reads more for each product (CUTLASS, "Efficient GEMM in CUDA"; order of magnitude).
_TILES = ((1, 1, 1.0), (2, 1, 0.93), (2, 2, 0.8), (4, 2, 0.6))
# 16-bit rows that are a multiple of 64, 8, 2 or 1 elements long (NVIDIA, Matrix Multiplication Background User's Guide,
# figures 3 and 4, A100: order of magnitude). nanoGPT's author reports a quarter off the step of GPT-2 124M from padding
# 50,257 entries to 50,304, which is about half the rate in the head.
_ALIGNMENT = ((64, 1.0), (8, 0.9), (2, 0.6), (1, 0.5))
# A causal kernel wastes half of the blocks on the diagonal and starves on short sequences: the length at which it runs
# at half its rate (FlashAttention-2, arXiv:2307.08691, figures 5 and 6: 512 to 16k).
_ATTENTION_HALF_LENGTH = 500
# Share of its rate that attention keeps at a smaller head (the same figures: head size 64 against 128).
_SMALL_HEAD = ((128, 1.0), (96, 0.97), (64, 0.9), (0, 0.65))
# What a kernel that adds a bias to the scores keeps: ALiBi ran on flash-attn's first Triton kernel, which the same
# figures put at a half to two thirds of FlashAttention-2.
_BIASED_SHARE = 0.55
# Bytes per score that dropout adds to unfused attention, forward and backward, in 16 bits, with its mask.
_DROPOUT_BYTES = (5, 5)
# Transformer Engine casts each input of an fp8 product and keeps it transposed too: read 16 bits, write 8 twice; a part
# is fused with the kernel before.
_CAST_BYTES = 3
# For a device described without them.
_USUAL_MULTIPROCESSORS = 100
# Of a CPU's nominal rate: products, attention forward and backward. An order of magnitude.
_CPU_SHARES = (0.5, 0.25, 0.25)
# A batch of small products per head runs at this share of the rate of large ones, beside what it moves; calibrated on
# half of the runs of vTrain, BigScience and Megatron-LM that kept their scores.
_BATCHED_SHARE = 0.65
# What is left of that where heads are no multiple of 8 elements, and no tensor core takes them: an A100's fp32 units do
# a sixteenth. BigScience measured 14400 channels in 96 heads of 150 a third slower than 14336 in 112 of 128 (chronicles
# of the 104B and 176B models).
_ODD_HEAD_SHARE = 1 / 16


@dataclass(frozen=True)
class Rates:
    """Sustained rates of a device at one precision: FLOP/s and bytes/s."""

    matmul: float
    multiprocessors: int
    tile_rows: int
    tile_columns: int
    depth: int
    attention_forward: float
    attention_backward: float
    memory: float
    kernel_seconds: float
    element_bytes: int
    cast_bytes: int  # per element of a product's input, to cast it to 8 bits and transpose it
    is_cpu: bool


def rates(device: Accelerator, precision: str) -> Rates:
    """Return the device's rates at a precision. fp8 accelerates matrix products, not attention, which has 16 bits."""
    row = _generation(device.name)
    peak = device.peak_flops(precision)
    attention_peak = device.peak_flops("bf16" if precision == "fp8" and "fp8" in device.flops else precision)
    if device.is_cpu:
        share = _CPU_SHARES
    else:
        share = row["matmul"], row["attention_forward"], row["attention_backward"]
    return Rates(
        matmul=peak * share[0],
        multiprocessors=device.multiprocessors or _USUAL_MULTIPROCESSORS,
        tile_rows=row["tile"][0],
        tile_columns=row["tile"][1],
        depth=row["depth"],
        attention_forward=attention_peak * share[1],
        attention_backward=attention_peak * share[2],
        memory=device.memory_bandwidth * row["memory"],
        kernel_seconds=0.0 if device.is_cpu else row["kernel_seconds"],
        element_bytes=4 if precision in ("fp32", "tf32") else 2,
        cast_bytes=_CAST_BYTES if precision == "fp8" else 0,
        is_cpu=device.is_cpu,
    )


@lru_cache(maxsize=16384)
def matmul_seconds(rows: int, inner: int, columns: int, rate: Rates) -> float:
    """Return the seconds of one product of (rows x inner) by (inner x columns).

    Work comes in tiles and tiles in waves of one per multiprocessor, so the last wave idles; a short inner dimension
    does not hide filling the pipeline; thin products are bound by memory (NVIDIA, Matrix Multiplication Background
    User's Guide).
    """
    if rate.is_cpu:
        return 2.0 * rows * inner * columns / rate.matmul
    return _tiled_seconds(rows, inner, columns, min(_aligned(inner), _aligned(columns)), rate)


@lru_cache(maxsize=16384)
def linear_seconds(rows: int, inner: int, columns: int, compiled: bool, rate: Rates) -> tuple[float, float]:
    """Return the forward and backward seconds of a linear layer: output, gradient of the input, gradient of the weight.

    In all three the rows of memory are as wide as the weight's two dimensions, which torch.compile pads.
    """
    if rate.is_cpu:
        once = 2.0 * rows * inner * columns / rate.matmul
        return once, 2 * once
    aligned = 1.0 if compiled else min(_aligned(inner), _aligned(columns))
    return (
        _tiled_seconds(rows, inner, columns, aligned, rate),
        _tiled_seconds(rows, columns, inner, aligned, rate) + _tiled_seconds(inner, rows, columns, aligned, rate),
    )


def _tiled_seconds(rows: int, inner: int, columns: int, aligned: float, rate: Rates) -> float:
    best = float("inf")
    for cut_rows, cut_columns, share in _TILES:
        tile_rows, tile_columns = rate.tile_rows // cut_rows, rate.tile_columns // cut_columns
        tiles = -(-rows // tile_rows) * -(-columns // tile_columns)
        waves = -(-tiles // rate.multiprocessors)
        # Large products balance their last wave by splitting it (stream-K, arXiv:2301.03598); small ones cannot.
        waves_run = waves if waves <= 2 else tiles / rate.multiprocessors + 0.5
        best = min(best, waves_run * tile_rows * tile_columns / share)
    flops = 2.0 * best * rate.multiprocessors * (inner + rate.depth) / aligned
    moved = rate.element_bytes * (rows * inner + inner * columns + rows * columns)
    return max(flops / rate.matmul, moved / rate.memory) + rate.kernel_seconds


def _aligned(width: int) -> float:
    """Return the share of the rate for rows of ``width`` elements, which may not be aligned for tensor cores."""
    return next(share for multiple, share in _ALIGNMENT if width % multiple == 0)


def memory_seconds(moved_bytes: float, kernels: float, rate: Rates) -> float:
    """Return the seconds of kernels that read and write ``moved_bytes`` in total."""
    return moved_bytes / rate.memory + kernels * rate.kernel_seconds


def flash_attention_seconds(
    queries: int, keys: int, heads: int, score_size: int, value_size: int, biased: bool, rate: Rates
) -> tuple[float, float]:
    """Return the forward and backward seconds of fused causal attention: ``queries`` rows, each against ``keys``
    positions.

    Forward two products over the causal half, backward five of the same size (arXiv:2307.08691, section 4.1).
    """
    flops = 1.0 * queries * keys * heads * (score_size + value_size)
    if rate.is_cpu:
        return flops / rate.attention_forward, 2.5 * flops / rate.attention_backward
    share = keys / (keys + _ATTENTION_HALF_LENGTH)
    share *= next(kept for size, kept in _SMALL_HEAD if score_size >= size) * (_BIASED_SHARE if biased else 1.0)
    forward = flops / (rate.attention_forward * share) + rate.kernel_seconds
    return forward, 2.5 * flops / (rate.attention_backward * share) + 3 * rate.kernel_seconds


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
    """Return the forward and backward of attention that keeps its matrix of scores; nothing of the masked half is
    saved.

    ``score_bytes``: what its kernels move per score, forward and backward, in 16 bits and without dropout.
    """
    scores = 1.0 * queries * keys * heads
    scale = rate.element_bytes / 2
    share = _BATCHED_SHARE * (_aligned(score_size) if score_size % 8 == 0 else _ODD_HEAD_SHARE)
    flops = 2.0 * scores * (score_size + value_size) / (rate.matmul * share)
    moved = [count + (extra if dropout else 0) for count, extra in zip(score_bytes, _DROPOUT_BYTES, strict=True)]
    forward = flops + memory_seconds(scale * moved[0] * scores, 4, rate)
    return forward, 2 * flops + memory_seconds(scale * moved[1] * scores, 7, rate)


@cache
def _generation(name: str) -> dict[str, Any]:
    text = files("scaletrain_cli.plan.speed").joinpath("kernel_rates.json").read_text(encoding="utf-8")
    generations: dict[str, dict[str, Any]] = json.loads(text)["generations"]
    return next(row for row in generations.values() if name.startswith(tuple(row["prefixes"])))
