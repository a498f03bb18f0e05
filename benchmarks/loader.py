"""Tokens per second of the engine's loader, beside torch's DataLoader over the same files. Prints a table.

Both draw sequences in random order from the same shards, in batches of the same size, as fast as they can be taken. The
``Dataset`` of torch is a plain memory map of the shards, without hashes; the first pass of the engine's also compares
the files with their hashes. The ways take turns; figures are medians. ``--run DIR``: instead, the share of its steps
that a real run waited for data, from its ``metrics.jsonl``.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from scaletrain_cli.data.chunk_hashes import HashedFile
from scaletrain_cli.data.token_files import NumberFiles, Split
from scaletrain_cli.engine.data.batches import BatchReader
from scaletrain_cli.engine.data.dataset import SourceSequences
from scaletrain_cli.engine.data.loader import Loader
from scaletrain_cli.engine.parallel.mesh import Mesh
from scaletrain_cli.plan.result import Layout
from scaletrain_cli.rundir.paths import RunDir

SHARDS, DOCUMENT = 8, 1000


def write_shards(folder: Path, tokens: int) -> list[Path]:
    """Write shards of random tokens with hashes, and the ends of documents of 1,000 tokens; return the token files."""
    draw, paths = np.random.default_rng(0), []
    for number in range(SHARDS):
        values = draw.integers(0, 32_000, tokens // SHARDS).astype(np.uint16)
        ends = np.arange(DOCUMENT - 1, len(values), DOCUMENT, dtype=np.int64)
        for name, part in (("bin", values), ("ends", ends)):
            with HashedFile(folder / f"{number}.{name}") as file:
                file.write(part.tobytes())
                file.finish()
        paths.append(folder / f"{number}.bin")
    return paths


def reader(paths: Sequence[Path], seq_len: int, batch: int, packed: bool) -> BatchReader:
    """Return the engine's reader of one rank."""
    layout = Layout(
        world_size=1,
        data_parallel=1,
        tensor_parallel=1,
        pipeline_parallel=1,
        virtual_pipeline=1,
        sequence_parallel=1,
        context_parallel=1,
        expert_parallel=1,
        zero_stage=0,
        micro_batch_size=batch,
        gradient_accumulation_steps=1,
        global_batch_size=batch,
        activation_checkpointing="none",
        offload="none",
    )
    files = {
        name: NumberFiles(
            [path.with_suffix(f".{name}") for path in paths],
            [path.with_suffix(f".{name}").stat().st_size // np.dtype(dtype).itemsize for path in paths],
            dtype,
        )
        for name, dtype in (("bin", "uint16"), ("ends", "int64"))
    }
    sequences = SourceSequences(Split(files["bin"], files["ends"]), seq_len)
    return BatchReader(sequences, layout, Mesh(), 0, mask_document_starts=False, within_documents=packed)


class Mapped(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """The sequences of memory-mapped shards, as a plain loop over a corpus has them."""

    def __init__(self, paths: Sequence[Path], seq_len: int) -> None:
        self._shards = [np.memmap(path, np.uint16, "r") for path in paths]
        self._seq_len = seq_len
        self._per_shard = (len(self._shards[0]) - 1) // seq_len

    def __len__(self) -> int:
        return self._per_shard * len(self._shards)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        shard, place = divmod(index, self._per_shard)
        start = place * self._seq_len
        row = torch.from_numpy(self._shards[shard][start : start + self._seq_len + 1].astype(np.int64))
        return row[:-1], row[1:]


def of_engine(read: Callable[[int], Any], workers: int, batches: int, prefetch: int) -> float:
    """Return the seconds in which ``batches`` are taken, after as many as warm up the processes."""
    loader = Loader(read, torch.device("cpu"), workers=workers)
    try:
        ahead = max(prefetch, 2 * workers)
        began = 0.0
        for number in range(1, batches + ahead + 1):
            loader.take(number, range(number + 1, number + 1 + ahead))
            if number == ahead:
                began = time.perf_counter()
        return time.perf_counter() - began
    finally:
        loader.close()


def in_loop(read: Callable[[int], Any], batches: int) -> float:
    """Return the seconds in which the calling thread reads ``batches``."""
    read(1)
    began = time.perf_counter()
    for number in range(2, batches + 2):
        read(number)
    return time.perf_counter() - began


def of_torch(dataset: Mapped, workers: int, batches: int, batch: int, prefetch: int) -> float:
    """Return the same for torch's DataLoader."""
    ahead = max(prefetch, 2 * workers)
    loader = DataLoader(
        dataset,
        batch_size=batch,
        sampler=torch.randint(len(dataset), ((batches + ahead) * batch,)).tolist(),
        num_workers=workers,
        prefetch_factor=2 if workers else None,
        multiprocessing_context="spawn" if workers else None,
    )
    began = 0.0
    for number, _ in enumerate(loader, start=1):
        if number == ahead:
            began = time.perf_counter()
    return time.perf_counter() - began


def rows(options: argparse.Namespace, folder: Path) -> Iterator[str]:
    """Return a line of the table for each way to read."""
    paths = write_shards(folder, options.tokens)
    plain, packed = (reader(paths, options.seq_len, options.batch, kind) for kind in (False, True))
    dataset, count = Mapped(paths, options.seq_len), options.batches
    first = [in_loop(reader(paths, options.seq_len, options.batch, False).batch, count) for _ in range(options.rounds)]
    for each in (plain, packed):
        assert isinstance(each.sequences, SourceSequences)
        each.sequences.rows(list(range(len(each.sequences))))  # compares every chunk, which the pickle remembers
    ways: dict[tuple[str, str, int], Callable[[], float]] = {}
    for workers in options.workers:
        how = f"{workers} processes" if workers else "the loop itself"
        ways["torch DataLoader", how, workers] = partial(of_torch, dataset, workers, count, options.batch, 2)
        for name, each in (("engine", plain), ("engine, packed documents", packed)):
            if workers:
                ways[name, how, workers] = partial(of_engine, each.batch, workers, count, 2)
            else:
                ways[name, how, 0] = partial(in_loop, each.batch, count)
                ways[name, "a thread", 0] = partial(of_engine, each.batch, 0, count, 2)
    seconds: dict[tuple[str, str, int], list[float]] = {key: [] for key in ways}
    for _ in range(options.rounds):
        for key, way in ways.items():
            seconds[key].append(way())
    seconds = {("engine, first pass with hashes", "the loop itself", 0): first, **seconds}
    for (name, how, workers), found in seconds.items():
        rate = count * options.batch * options.seq_len / statistics.median(found) / 1e6
        yield f"| {name} | {how} | {rate:.1f} | {rate / max(1, workers):.1f} |"


def waits(run: RunDir) -> str:
    """Return the share of the time of a run's steps that they waited for data, without the first of each attempt."""
    lines = [json.loads(line) for line in run.metrics.read_text(encoding="utf-8").splitlines()]
    steps = [line for line in lines if "data_wait" in line]
    later = [b for a, b in itertools.pairwise(steps) if a["attempt"] == b["attempt"]]
    waited, total = (sum(line[name] for line in later) for name in ("data_wait", "step_seconds"))
    slowest = max(later, key=lambda line: line["data_wait"] / line["step_seconds"])
    share = slowest["data_wait"] / slowest["step_seconds"]
    return (
        f"{run.path.name}: {len(later)} steps of {total / len(later):.3f} s waited {100 * waited / total:.3f} % of "
        f"their time for data; step {slowest['step']} most, {100 * share:.2f} %"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=64_000_000)
    parser.add_argument("--seq-len", type=int, default=2048)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--batches", type=int, default=200)
    parser.add_argument("--workers", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--run", type=Path, nargs="*", default=[])
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.run:
        for run in options.run:
            print(waits(RunDir(run)))
        return
    print(f"torch {torch.__version__}, {os.cpu_count()} cores, {platform.machine()}; sequences of {options.seq_len}\n")
    print("| loader | readers | million tokens/s | per process |\n|-|-|-|-|")
    with tempfile.TemporaryDirectory() as folder:
        for line in rows(options, Path(folder)):
            print(line, flush=True)


if __name__ == "__main__":
    main()
