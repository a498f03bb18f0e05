"""Attention of packed rows on the CPU: with a mask of all pairs of positions, and by document. Prints a table.

Forward and backward pass of one attention layer; the two ways take turns, and the figures are medians of CPU time.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from scaletrain_cli.engine.model.attention import AttentionSettings, TokenContext, causal_attention, masked_attention

HEADS, KV_HEADS, HEAD_DIM = 8, 8, 64
Attend = Callable[..., Tensor]


def documents(length: int, mean: int) -> Tensor:
    """Return the document of each position of one row, of lengths from 1 to twice the mean."""
    generator = torch.Generator().manual_seed(length)
    lengths = torch.randint(1, 2 * mean, (length,), generator=generator)
    return torch.repeat_interleave(torch.arange(length), lengths)[:length].unsqueeze(0)


def seconds(attend: Attend, inputs: list[Tensor], context: TokenContext, settings: AttentionSettings) -> float:
    """Return the CPU seconds of a forward and a backward pass, with what a micro-batch prepares for its layers."""
    start = time.process_time()
    torch.autograd.backward(attend(*inputs, context, settings).sum())
    return time.process_time() - start


def rows(lengths: list[int], rounds: int) -> Iterator[str]:
    """Return a line of the table for each length of a row and kind of its documents."""
    for length in lengths:
        for mean, window in ((128, None), (512, None), (length, 256)):
            shapes = [(1, heads, length, HEAD_DIM) for heads in (HEADS, KV_HEADS, KV_HEADS)]
            inputs = [torch.randn(shape).requires_grad_() for shape in shapes]
            context = TokenContext(torch.arange(length), torch.arange(1), documents(length, mean))
            settings = AttentionSettings(window=window)
            taken: dict[Attend, list[float]] = {masked_attention: [], causal_attention: []}
            for _ in range(rounds + 1):
                for attend, found in taken.items():
                    found.append(seconds(attend, inputs, context, settings))
            mask, ours = (statistics.median(found[1:]) for found in taken.values())
            what = f"documents of {mean} on average" if window is None else f"window of {window}"
            yield (
                f"| {length:,} | {what} | {1000 * mask:.0f} | {1000 * ours:.0f} | {mask / ours:.1f} | "
                f"{4 * length**2 / 1e6:.0f} |"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lengths", type=int, nargs="+", default=[2048, 4096, 8192])
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print("# Attention of packed rows\n")
    print(
        f"Made by `python benchmarks/packed_attention.py --rounds {arguments.rounds}` on one core of {os.cpu_count()} "
        f"({platform.machine()}), torch {torch.__version__}: {HEADS} heads of {HEAD_DIM}, fp32, one row, forward and "
        f"backward pass of one layer.\n"
    )
    print("| tokens | row | mask, ms | by document, ms | times as fast | mask, MB |")
    print("|---:|---|---:|---:|---:|---:|")
    for line in rows(arguments.lengths, arguments.rounds):
        print(line, flush=True)


if __name__ == "__main__":
    main()
