"""Contrastive losses on the CPU: in chunks, and with the whole matrix of similarities. Prints a table.

Forward and backward pass of one process that has all pairs, or its share of them. Each figure is of a process of its
own: the CPU time, the median of the rounds, and the growth of its memory at the peak. Linux only.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from scaletrain_cli.engine.losses.contrastive import row_losses, sigmoid_loss
from scaletrain_cli.engine.parallel.mesh import Axis

SIZE, SCALE, BIAS = 512, 14.3, -10.0


def whole(loss: str, image: Tensor, text: Tensor) -> Tensor:
    """Return the loss of the first images among all texts, from all similarities at once."""
    logits = SCALE * image @ text.T
    if loss == "info_nce":
        return F.cross_entropy(logits, torch.arange(len(image)))
    signs = 2 * torch.eye(len(image)) - 1
    return -F.logsigmoid(signs * (logits + BIAS)).sum() / len(image)


def chunked(loss: str, image: Tensor, text: Tensor, chunk_size: int) -> Tensor:
    """Return the same in chunks."""
    scale = torch.tensor(SCALE)
    if loss == "info_nce":
        return row_losses(image, text, scale, 0, chunk_size).mean()
    return sigmoid_loss(image, text, scale.log(), torch.tensor(BIAS), Axis(), chunk_size)


def measure(loss: str, way: str, rows: int, pairs: int, chunk_size: int, rounds: int) -> dict[str, float]:
    """Return the CPU seconds of a forward and a backward pass, and the bytes of memory that they need."""
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(pairs)
    image, text = (
        F.normalize(torch.randn(count, SIZE, generator=generator)).requires_grad_() for count in (rows, pairs)
    )
    of: Callable[[], Tensor] = (
        (lambda: whole(loss, image, text)) if way == "whole" else (lambda: chunked(loss, image, text, chunk_size))
    )
    torch.autograd.backward((image[:8] @ text[:8].T).sum())  # loads the libraries
    image.grad = text.grad = None
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew at the memory that is in use
    before, taken = peak_bytes(), []
    for _ in range(rounds):
        start = time.process_time()
        value = of()
        torch.autograd.backward(value)
        taken.append(time.process_time() - start)
        image.grad = text.grad = None
    return {"seconds": statistics.median(taken), "bytes": peak_bytes() - before, "loss": value.item()}


def peak_bytes() -> int:
    """Return the peak of this process's memory."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return 1024 * int(line.split()[1])


def in_its_own_process(loss: str, way: str, rows: int, pairs: int, chunk_size: int, rounds: int) -> dict[str, float]:
    """Return the figures of ``measure``, without the memory of earlier ones."""
    asked = json.dumps([loss, way, rows, pairs, chunk_size, rounds])
    done = subprocess.run([sys.executable, __file__, "--measure", asked], check=True, capture_output=True, text=True)
    found: dict[str, float] = json.loads(done.stdout)
    return found


def lines(asked: argparse.Namespace) -> Iterator[str]:
    """Return a line of the table for each loss and number of pairs."""
    chunk_size, rounds, largest_bytes = asked.chunk_size, asked.rounds, 1e9 * asked.largest_gb
    cases = [("info_nce", rows, pairs) for rows in asked.local for pairs in asked.pairs if rows <= pairs]
    for loss, rows, pairs in cases + [("sigmoid", pairs, pairs) for pairs in asked.sigmoid_pairs]:
        ours = in_its_own_process(loss, "chunked", rows, pairs, chunk_size, rounds)
        cells = f"| {loss} | {rows:,} | {pairs:,} | {ours['seconds']:.2f} | {ours['bytes'] / 1e6:,.0f} |"
        if 5 * 4 * rows * pairs > largest_bytes:
            yield f"{cells} | | |"
            continue
        other = in_its_own_process(loss, "whole", rows, pairs, chunk_size, rounds)
        assert abs(ours["loss"] - other["loss"]) < 1e-5 * other["loss"], (ours, other)
        yield f"{cells} {other['seconds']:.2f} | {other['bytes'] / 1e6:,.0f} | {other['bytes'] / ours['bytes']:.1f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, nargs="+", default=[1024, 4096, 16384, 32768], help="of the global batch")
    parser.add_argument(
        "--local", type=int, nargs="+", default=[512, 4096], help="of these, rows of this rank for info_nce"
    )
    parser.add_argument("--sigmoid-pairs", type=int, nargs="+", default=[1024, 4096], help="the same, all of this rank")
    parser.add_argument("--chunk-size", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--largest-gb", type=float, default=4.0, help="leave out whole matrices that need more")
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        print(json.dumps(measure(*json.loads(arguments.measure))))
        return
    print("# Contrastive losses in chunks\n")
    print(
        f"Made by `python benchmarks/contrastive_loss.py --rounds {arguments.rounds}` on one core of {os.cpu_count()} "
        f"({platform.machine()}), torch {torch.__version__}: features of {SIZE} in fp32, chunks of "
        f"{arguments.chunk_size:,}, forward and backward pass; memory with the gradients of the features.\n"
    )
    print("| loss | rows | pairs | chunks, s | chunks, MB | whole, s | whole, MB | times as much |")
    print("|---|---:|---:|---:|---:|---:|---:|---:|")
    for line in lines(arguments):
        print(line, flush=True)


if __name__ == "__main__":
    main()
