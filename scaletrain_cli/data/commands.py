"""``data prepare`` for text and images, in a process of its own; without torch."""

import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from scaletrain_cli.data.chunk_hashes import CorruptDataError
from scaletrain_cli.data.images.reading import describe_index
from scaletrain_cli.data.pipeline.report import NAME as REPORT
from scaletrain_cli.data.pipeline.shards import SCHEMA
from scaletrain_cli.data.prepared import prepare_data, prepare_run_datasets
from scaletrain_cli.data.token_files import open_source
from scaletrain_cli.errors import ScaletrainError, UsageError
from scaletrain_cli.reasons import Reason, reason_from
from scaletrain_cli.rundir.documents import read_document
from scaletrain_cli.rundir.shared_datasets import DATASET, owner_of_dataset
from scaletrain_cli.spec import RunSpec
from scaletrain_cli.spec.evaluation import ZERO_SHOT
from scaletrain_cli.text import counted, whole_text

_SECONDS_BETWEEN_LINES = 2.0
_LEFT_OUT = ("documents_read", "documents_removed", "documents_unusable")
_OF_IMAGES = ("train_samples", "validation_samples", "bad_samples", "train_image_bytes", "validation_image_bytes")
_SPLITS = {"train": "training", "validation": "validation"}


def prepare_text(spec: RunSpec, runs_root: Path, workers: int = 0) -> dict[str, Any]:
    """Prepare the text of a spec and return what there is of each source. ``workers``: 0 for one on each CPU core.

    Progress goes to stderr. Raises UsageError, other ScaletrainErrors and OSError.
    """
    started = time.monotonic()
    names = ", ".join(path for _, path in spec.data.paths())
    print(f"preparing {names} ({spec.data.tokenizer.kind} tokenizer)", file=sys.stderr, flush=True)
    datasets = prepare_data(spec.data, runs_root, workers or len(os.sched_getaffinity(0)), ProgressLines())
    try:
        sources = [_described(name, dataset, spec.transformer.seq_len) for name, dataset in datasets.items()]
    except CorruptDataError as error:  # the exit code 93 is for runs
        raise ScaletrainError(error.reason or str(error)) from error
    for source in sources:
        print(f"{_line(source)} ({source['path']})", file=sys.stderr)
        if spec.data.validation_split and spec.evaluation.every and not source["validation_sequences"]:
            print(
                f"{source['name']}: the validation split is shorter than one sequence of {spec.transformer.seq_len} "
                "tokens, so runs keep training sequences of this source for validation; raise data.validation_split",
                file=sys.stderr,
            )
    if any(source["documents_removed"] or source["documents_unusable"] for source in sources):
        print("why documents were left out: scaletrain data stats", file=sys.stderr)
    for dataset in datasets.values():
        if (owner := owner_of_dataset(dataset)) is not None:
            print(f"{dataset} was prepared by {owner}; using it as it is", file=sys.stderr)
    print(f"ready in {time.monotonic() - started:.1f} s", file=sys.stderr)
    counts = ("documents", "train_tokens", "validation_tokens", "train_sequences", "validation_sequences")
    left_out = {name: [source[name] for source in sources] for name in _LEFT_OUT}
    return {
        "path": sources[0]["path"] if len(sources) == 1 else None,
        **{name: sum(source[name] for source in sources) for name in counts},
        **{name: None if None in known else sum(known) for name, known in left_out.items()},
        "vocab_size": max(source["vocab_size"] for source in sources),
        "dtype": sources[0]["dtype"],
        "sources": sources,
    }


def prepare_images(spec: RunSpec, runs_root: Path, workers: int = 0) -> dict[str, Any]:
    """Index the images of a spec and return what there is of each source. ``workers``: 0 for one on each CPU core.

    Progress goes to stderr. Raises UsageError, other ScaletrainErrors and OSError.
    """
    started = time.monotonic()
    print(f"indexing the images of {', '.join(path for _, path in spec.data_paths())}", file=sys.stderr, flush=True)
    datasets = prepare_run_datasets(spec, runs_root, {}, workers or len(os.sched_getaffinity(0)), ProgressLines())
    try:
        documents = {name: describe_index(dataset) for name, dataset in datasets.items()}
    except CorruptDataError as error:  # the exit code 93 is for runs
        raise ScaletrainError(error.reason or str(error)) from error
    sources = []
    for name, document in documents.items():
        for bad in document["bad"]:
            first = bad["places"][0]
            problem = reason_from(first["problem"])
            count = counted(bad["samples"], "sample")
            print(f"left out {count}, the first one: {first['place']}: {problem}", file=sys.stderr)
        counts = {key: document[key] for key in (*_OF_IMAGES, "num_classes", "target_size", "left_out")}
        sources.append({"name": name, "path": str(datasets[name]), "format": document["format"], **counts})
        if (owner := owner_of_dataset(datasets[name])) is not None:
            print(f"{datasets[name]} was prepared by {owner}; using it as it is", file=sys.stderr)
    training = [source for source in sources if source["name"] != ZERO_SHOT]
    for source in sources[len(training) :]:
        count = counted(source["train_samples"] + source["validation_samples"], "image")
        print(f"{ZERO_SHOT}: {count} of {counted(source['num_classes'], 'class', 'classes')}", file=sys.stderr)
    print(f"ready in {time.monotonic() - started:.1f} s", file=sys.stderr)
    return {
        "path": sources[0]["path"] if len(sources) == 1 else None,
        **{key: sum(source[key] for source in training) for key in _OF_IMAGES},
        "sources": sources,
    }


def _line(source: Mapping[str, Any]) -> str:
    left = counted(source["documents"], "document")
    if source["documents_read"] is not None:
        removed, unusable = whole_text(source["documents_removed"]), whole_text(source["documents_unusable"])
        left = (
            f"{counted(source['documents_read'], 'document')} read, {removed} removed by data.prepare, {unusable} that "
            f"cannot be used, {whole_text(source['documents'])} left"
        )
    tokens = (f"{whole_text(source[f'{split}_tokens'])} {name} tokens" for split, name in _SPLITS.items())
    return f"{source['name']}: {left}; {', '.join(tokens)}"


def _left_out(dataset: Path) -> dict[str, int | None]:
    """Return the documents that were read, removed by steps and left out as bad; None in data without a report."""
    if not (steps := (read_document(dataset / REPORT) or {}).get("steps")):
        return dict.fromkeys(_LEFT_OUT)
    removed, bad = (sum(entry["documents"] for step in steps for entry in step[kind]) for kind in ("removed", "bad"))
    return dict(zip(_LEFT_OUT, (steps[0]["documents"], removed, bad), strict=True))


def _described(name: str, dataset: Path, seq_len: int) -> dict[str, Any]:
    """Return the counts of a dataset. Raises UsageError if it is too small, and CorruptDataError."""
    document = read_document(dataset / DATASET) or {}
    tokenizer = document
    if document.get("schema") == SCHEMA:
        open_source(dataset)  # compares the hashes of the shards
        tokenizer = document["tokenizer"]
    tokens = {split: int(document[f"{split}_tokens"]) for split in ("train", "validation")}
    sequences = {split: max(0, count - 1) // seq_len for split, count in tokens.items()}
    if not sequences["train"]:
        sizes = {"tokens": tokens["train"], "length": seq_len}
        raise UsageError(Reason("engine.dataset-too-small", {"folder": str(dataset), **sizes}))
    return {
        "name": name,
        "path": str(dataset),
        "documents": sum(int(document[f"{split}_documents"]) for split in tokens),
        **_left_out(dataset),
        **{f"{split}_tokens": count for split, count in tokens.items()},
        **{f"{split}_sequences": count for split, count in sequences.items()},
        "vocab_size": int(tokenizer["vocab_size"]),
        "dtype": str(tokenizer["dtype"]),
    }


class ProgressLines:
    """Writes progress to stderr: each stage when it begins and ends, and in between from time to time what is new."""

    def __init__(self) -> None:
        self._line, self._stage, self._shown = "", "", 0.0

    def __call__(self, stage: str, done: int, total: int) -> None:
        now, line = time.monotonic(), f"{stage}: {done} of {total}" if total > 1 else stage
        is_due = stage != self._stage or done == total or now - self._shown >= _SECONDS_BETWEEN_LINES
        if is_due and line != self._line:
            print(line, file=sys.stderr, flush=True)
            self._line, self._stage, self._shown = line, stage, now
