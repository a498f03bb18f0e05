"""Measure tokenization from jsonl files to shards beside bare ``tokenizers.encode_batch``, and its memory.

Both use the same texts and the same number of cores. The bare loop has its texts in memory and throws its tokens away;
ours reads and parses the files, encodes, divides into splits, and writes tokens, hashes and statistics. Fails if ours
has less than 0.9 of the bare speed, or if the memory of a process grows with the input.

    python benchmarks/tokenization.py [--megabytes 100 2000] [--workers 2]
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from document_steps import documents

LEAST_RATIO = 0.9
MOST_GROWTH = 1.15  # of the peak memory of a process, from the smallest to the largest input
FILE_BYTES = 64 << 20
VOCABULARY = 16_000
TEXTS_PER_CALL = 1000


def texts(megabytes: int) -> Iterator[str]:
    """Yield texts of this size: pieces of the standard library, each with numbers of its own."""
    pieces, size, number = documents(6000), 0, 0
    while size < megabytes * 1_000_000:
        piece = pieces[number % len(pieces)]
        text = f"{number * 7919} {piece} {hashlib.sha256(str(number).encode()).hexdigest()}"
        size += len(text.encode())
        number += 1
        yield text


def write_input(folder: Path, megabytes: int) -> None:
    """Write the texts as files of JSON lines."""
    folder.mkdir()
    file, written, number = None, FILE_BYTES, 0
    for text in texts(megabytes):
        line = json.dumps({"text": text}) + "\n"
        if written + len(line) > FILE_BYTES:
            if file is not None:
                file.close()
            file = (folder / f"{number:04d}.jsonl").open("w", encoding="utf-8")
            written, number = 0, number + 1
        assert file is not None
        file.write(line)
        written += len(line)
    if file is not None:
        file.close()


def train(path: Path) -> None:
    from scaletrain_cli.data.tokenizers.files import train_tokenizer

    path.write_text(train_tokenizer(iter(documents(3000)), VOCABULARY, ["<|endoftext|>"]).to_str(), encoding="utf-8")


def measure_bare(tokenizer: Path, megabytes: int) -> None:
    """Print the seconds of ``encode_batch`` alone; the process has as many threads as ours has workers."""
    from tokenizers import Tokenizer

    loaded, spent, batch, size, cpu = Tokenizer.from_file(str(tokenizer)), 0.0, [], 0, 0.0
    for text in [*texts(megabytes), None]:
        if text is not None:
            batch.append(text)
        if len(batch) == TEXTS_PER_CALL or text is None:
            size += sum(len(each.encode()) for each in batch)
            before, cpu_before = time.perf_counter(), time.process_time()
            loaded.encode_batch(batch)
            spent += time.perf_counter() - before
            cpu += time.process_time() - cpu_before
            batch = []
    print(json.dumps({"seconds": spent, "bytes": size, "cpu": cpu}))


def measure_ours(tokenizer: Path, folder: Path, workers: int) -> None:
    """Print the seconds of the preparation, and the peak memory of this process and of a worker."""
    from scaletrain_cli.data.pipeline.prepare import Preparation, prepare
    from scaletrain_cli.data.pipeline.tasks import Source
    from scaletrain_cli.data.sources.records import SourceFile

    files = tuple(SourceFile(str(path), path.stat().st_size, "jsonl") for path in sorted(folder.glob("*.jsonl")))
    given = Preparation((Source("web", files, "benchmark"),), (), tokenizer.read_text(encoding="utf-8"), 0.01)
    peaks: dict[int, int] = {}
    stop = threading.Event()
    watch = threading.Thread(target=_watch, args=(peaks, stop))
    watch.start()
    before = time.perf_counter()
    done = prepare(given, folder.parent / f"data-{folder.name}", workers, lambda *_: None)["web"]
    seconds = time.perf_counter() - before
    stop.set()
    watch.join()
    size = json.loads((done / "dataset.json").read_text(encoding="utf-8"))["bytes"]
    own = peaks.pop(os.getpid())
    found = {"seconds": seconds, "bytes": size, "cpu": sum(os.times()[:4]), "own": own}
    print(json.dumps(found | {"worker": max(peaks.values(), default=own)}))


def _watch(peaks: dict[int, int], stop: threading.Event) -> None:
    """Keep the peak memory of this process and of its children, in bytes."""
    while not stop.wait(0.2):
        children = Path(f"/proc/self/task/{os.getpid()}/children").read_text(encoding="ascii").split()
        for process in (os.getpid(), *map(int, children)):
            try:
                status = Path(f"/proc/{process}/status").read_text(encoding="ascii")
            except OSError:
                continue
            line = next((line for line in status.splitlines() if line.startswith("VmHWM:")), None)
            if line is not None:
                peaks[process] = int(line.split()[1]) << 10


def run(arguments: list[str], **environment: str) -> dict[str, Any]:
    """Return what a process of this program has printed."""
    words = [sys.executable, __file__, *arguments]
    done = subprocess.run(words, check=True, capture_output=True, text=True, env=os.environ | environment)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--megabytes", type=int, nargs="+", default=[100, 2000], help="sizes of the input, ascending")
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--bare", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--ours", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.bare:
        measure_bare(Path(options.bare[0]), int(options.bare[1]))
        return 0
    if options.ours:
        measure_ours(Path(options.ours[0]), Path(options.ours[1]), options.workers)
        return 0
    workers, passed, first = str(options.workers), True, 0
    with tempfile.TemporaryDirectory() as name:
        tokenizer = Path(name) / "tokenizer.json"
        train(tokenizer)
        print(f"{workers} cores; vocabulary of {VOCABULARY:,} tokens; documents of about 3,500 characters")
        for megabytes in options.megabytes:
            folder = Path(name) / f"{megabytes}"
            write_input(folder, megabytes)
            ours = run(["--ours", str(tokenizer), str(folder), "--workers", workers])
            speed = ours["bytes"] / ours["seconds"] / 1e6
            peak = max(ours["own"], ours["worker"])
            text = f"{megabytes:6,} MB: {speed:6.2f} MB/s from files to shards"
            if megabytes == options.megabytes[0]:
                first = peak
                bare = run(
                    ["--bare", str(tokenizer), str(megabytes)], RAYON_NUM_THREADS=workers, TOKENIZERS_PARALLELISM="true"
                )
                ratio = speed / (bare["bytes"] / bare["seconds"] / 1e6)
                passed = passed and ratio >= LEAST_RATIO
                text += f", {bare['bytes'] / bare['seconds'] / 1e6:6.2f} MB/s bare, ratio {ratio:.2f}"
                text += f" (by CPU seconds {bare['cpu'] / ours['cpu']:.2f}: {bare['cpu']:.0f} and {ours['cpu']:.0f})"
            print(f"{text}; peak RSS {ours['own'] / 1e6:.0f} MB, of a worker {ours['worker'] / 1e6:.0f} MB", flush=True)
            passed = passed and peak <= first * MOST_GROWTH
    print("targets met" if passed else "TARGETS MISSED")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
