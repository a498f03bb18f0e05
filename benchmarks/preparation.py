"""Measure a whole preparation beside datatrove's LocalPipelineExecutor: the same filters, tokenizer, input and workers.

Both read jsonl files, apply the rules of Gopher (repetition, quality), C4 and FineWeb, and write tokens. The documents
are random sentences of words of the standard library's docstrings. datatrove gets a word tokenizer that splits at
whitespace, as ours does; its own ones take several times as long. Fails if ours is slower.

    pip install --target DIR datatrove orjson
    python benchmarks/preparation.py [--datatrove DIR] [--megabytes 100] [--workers 2]
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from document_steps import documents

FILES = 16
VOCABULARY = 16_000
_WORD = re.compile(r"[a-z]{1,14}")
_COMMON = ("the", "of", "and", "to", "be", "that", "have", "with", "a", "in")
_SENTENCE_END = re.compile(r"(?<=[.!?])\s+")


def write_input(folder: Path, megabytes: int) -> None:
    """Write documents of 60 to 900 words; some are short, and some have lines without an end."""
    folder.mkdir()
    words = [word for text in documents(1500) for word in _WORD.findall(text.lower())]
    draw = random.Random(3)
    for file in range(FILES):
        size = 0
        with (folder / f"{file:02d}.jsonl").open("w", encoding="utf-8") as opened:
            while size < megabytes * 1_000_000 // FILES:
                text = _document(draw, words)
                size += len(text)
                opened.write(json.dumps({"text": text, "id": str(size)}) + "\n")


def _document(draw: random.Random, words: list[str]) -> str:
    lines = []
    for _ in range(draw.randint(3, 40)):
        count = draw.randint(8, 24)
        chosen = [draw.choice(_COMMON if draw.random() < 0.4 else words) for _ in range(count)]
        lines.append(" ".join(chosen).capitalize() + draw.choice([".", ".", ".", "?", "", "; then..."]))
    return "\n".join(lines)


def train(path: Path) -> None:
    from scaletrain_cli.data.tokenizers.files import train_tokenizer

    path.write_text(train_tokenizer(iter(documents(3000)), VOCABULARY, ["<|endoftext|>"]).to_str(), encoding="utf-8")


def measure_ours(tokenizer: Path, folder: Path, workers: int) -> dict[str, Any]:
    """Return documents and tokens that are left."""
    from pydantic import TypeAdapter

    from scaletrain_cli.data.pipeline.prepare import Preparation, prepare
    from scaletrain_cli.data.pipeline.tasks import Source
    from scaletrain_cli.data.sources.records import SourceFile
    from scaletrain_cli.spec.preparation import AnyStep

    rules = ("gopher_repetition", "gopher_quality", "c4", "fineweb")
    section: TypeAdapter[Any] = TypeAdapter(AnyStep)
    steps = tuple(section.validate_python({"step": "quality", "rules": name}) for name in rules)
    files = tuple(SourceFile(str(path), path.stat().st_size, "jsonl") for path in sorted(folder.glob("*.jsonl")))
    given = Preparation((Source("web", files, "benchmark"),), steps, tokenizer.read_text(encoding="utf-8"), 0.01)
    done = prepare(given, folder.parent / "ours", workers, lambda *_: None)["web"]
    found = json.loads((done / "dataset.json").read_text(encoding="utf-8"))
    return {name: found[f"train_{name}"] + found[f"validation_{name}"] for name in ("documents", "tokens")}


def measure_datatrove(tokenizer: Path, folder: Path, workers: int) -> dict[str, Any]:
    """Return documents and tokens that are left."""
    trove: Callable[[str], Any] = importlib.import_module
    filters = trove("datatrove.pipeline.filters")
    base = trove("datatrove.utils.word_tokenizers").WordTokenizer
    words = type("Words", (base,), {
        "word_tokenize": lambda _, text: text.split(),
        "sent_tokenize": lambda _, text: _SENTENCE_END.split(text),
        "span_tokenize": lambda _, text: [(0, len(text))],
    })("eng")  # fmt: skip
    output = folder.parent / "datatrove"
    steps = [
        trove("datatrove.pipeline.readers").JsonlReader(str(folder)),
        filters.GopherRepetitionFilter(language=words),
        filters.GopherQualityFilter(language=words),
        filters.C4QualityFilter(language=words),
        filters.FineWebQualityFilter(language=words, char_duplicates_ratio=0.1),
        trove("datatrove.pipeline.tokens").DocumentTokenizer(
            str(output), str(tokenizer), eos_token="<|endoftext|>", shuffle_documents=False, batch_size=1000
        ),
    ]
    executor = trove("datatrove.executor").LocalPipelineExecutor(
        steps, tasks=FILES, workers=workers, logging_dir=str(folder.parent / "logs")
    )
    executor.run()
    found = {"documents": 0, "tokens": 0}
    for path in output.glob("*.ds.index"):
        found["documents"] += path.stat().st_size // 8
        found["tokens"] += path.with_suffix("").stat().st_size // 2
    return found


def run(which: str, arguments: list[str]) -> dict[str, Any]:
    """Return what a process of this program has measured."""
    words = [sys.executable, __file__, "--run", which, *arguments]
    environment = os.environ | {"TOKENIZERS_PARALLELISM": "false"}
    done = subprocess.run(words, check=False, capture_output=True, text=True, env=environment)
    if done.returncode:
        raise SystemExit(f"{which} failed:\n{done.stderr[-3000:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--megabytes", type=int, default=100)
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--datatrove", help="folder in which datatrove is installed, if not where this program runs")
    parser.add_argument("--run", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.datatrove:
        sys.path.append(options.datatrove)
    if options.run:
        which, tokenizer, folder = options.run
        measure = {"ours": measure_ours, "datatrove": measure_datatrove}[which]
        before = time.perf_counter()
        found = measure(Path(tokenizer), Path(folder), options.workers)
        print(json.dumps(found | {"seconds": time.perf_counter() - before}))
        return 0
    if importlib.util.find_spec("datatrove") is None:
        print("not measured: datatrove is missing; pip install --target DIR datatrove orjson, and give --datatrove DIR")
        return 0
    more = ["--workers", str(options.workers), *(["--datatrove", options.datatrove] if options.datatrove else [])]
    with tempfile.TemporaryDirectory() as name:
        tokenizer, folder = Path(name) / "tokenizer.json", Path(name) / "input"
        train(tokenizer)
        write_input(folder, options.megabytes)
        size = sum(path.stat().st_size for path in folder.iterdir())
        print(f"{size / 1e6:,.0f} MB in {FILES} files, {options.workers} workers")
        found = {}
        for which in ("datatrove", "ours"):
            found[which] = run(which, [str(tokenizer), str(folder), *more])
            each = found[which]
            print(
                f"{which:10} {each['seconds']:8.1f} s {size / each['seconds'] / 1e6:7.2f} MB/s; "
                f"{each['documents']:,} documents and {each['tokens']:,} tokens left",
                flush=True,
            )
    if {**found["ours"], "seconds": 0} != {**found["datatrove"], "seconds": 0}:
        print("WHAT IS LEFT DIFFERS")
        return 1
    ratio = found["datatrove"]["seconds"] / found["ours"]["seconds"]
    print(f"ours takes 1/{ratio:.2f} of the time: " + ("target met" if ratio >= 1 else "TARGET MISSED"))
    return 0 if ratio >= 1 else 1


if __name__ == "__main__":
    sys.exit(main())
