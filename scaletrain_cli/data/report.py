"""The report of prepared data: the reports of its datasets in one document, with totals and the mixture of a run."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from scaletrain_cli.errors import UsageError
from scaletrain_cli.reasons import Reason
from scaletrain_cli.rundir.documents import read_document

SCHEMA = "scaletrain.data-report/v1"
IMAGE_REPORT = "scaletrain.image-report/v1"
_OF_DATASET = "scaletrain.dataset-report/v1"
_SPLITS = ("train", "validation")
ROWS = ("read", "truncated", "without_target", "too_long", "unusable")


def read_report(datasets: Mapping[str, Path], mixture: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the report of prepared data, given the folder of each source. Raises UsageError."""
    sources = [_source(name, folder) for name, folder in datasets.items()]
    duplicates = {duplicate["key"]: duplicate for source in sources for duplicate in source.pop("duplicates")}
    # A sum is None where a source does not have the count.
    sizes = [source["bytes"] for source in sources]
    size = None if None in sizes else sum(sizes)
    tokens = {split: sum(source["tokens"][split] for source in sources) for split in _SPLITS}
    read = [source["steps"][0]["documents"] if source["steps"] else None for source in sources]
    return {
        "schema": SCHEMA,
        "sources": sources,
        "duplicates": list(duplicates.values()),
        "totals": {
            "documents_read": None if None in read else sum(read),
            "documents": {split: sum(source["documents"][split] for source in sources) for split in _SPLITS},
            "tokens": tokens,
            "bytes": size,
            "tokens_per_byte": sum(tokens.values()) / size if size else None,
        },
        "mixture": mixture,
    }


def _source(name: str, folder: Path) -> dict[str, Any]:
    """Return what is known of a dataset; ``steps`` is empty without a report of its preparation."""
    if (dataset := read_document(folder / "dataset.json")) is None:
        params = {"folder": str(folder), "error": "there is no dataset.json"}
        raise UsageError(Reason("engine.not-a-dataset", params))
    report = read_document(folder / "report.json") or {}
    report = report if report.get("schema") == _OF_DATASET else {}
    try:
        # not known where they are tokens, as for tokenized sources
        size = dataset.get("bytes")
        has_tokens = any(dataset[f"{split}_tokens"] for split in _SPLITS)
        return {
            "source": name,
            "dataset": str(folder),
            "dataset_schema": dataset["schema"],
            "fingerprint": dataset["fingerprint"],
            "tokenizer": dataset.get("tokenizer") if isinstance(dataset.get("tokenizer"), dict) else None,
            "documents": {split: dataset[f"{split}_documents"] for split in _SPLITS},
            "tokens": {split: dataset[f"{split}_tokens"] for split in _SPLITS},
            "bytes": None if size is None or (has_tokens and not size) else int(size),
            "rows": _rows(dataset),
            "images": images_in_rows(dataset),
            **{name: report.get(name) for name in _MEASURED},
            "steps": report.get("steps", []),
            "duplicates": report.get("duplicates", []),
        }
    except (KeyError, TypeError) as error:
        params = {"folder": str(folder), "error": f"dataset.json has no {error}"}
        raise UsageError(Reason("engine.not-a-dataset", params)) from error


_MEASURED = ("bytes_read", "files", "languages", "tokens_per_byte", "unknown_tokens", "characters", "lengths")


def _rows(dataset: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the counts of rows for fine-tuning; None for text."""
    if "rows_read" not in dataset:
        return None
    counts = {name: int(dataset[f"rows_{name}"]) for name in ROWS}
    return {**counts, "target_tokens": int(dataset["targets"]), "lost": json.loads(dataset["lost"])}


def images_in_rows(dataset: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the counts of the images of rows; None for rows without images.

    ``distinct``: stored once in a split. ``places``: images of all rows. ``bad``: the first rows that were left out
    because of a bad image, of ``rows_left_out``.
    """
    if not dataset.get("tokens_per_image"):
        return None
    counts: dict[str, Any] = {"tokens_per_image": int(dataset["tokens_per_image"])}
    for name, field in (("distinct", "images"), ("places", "image_uses"), ("bytes", "image_bytes")):
        counts[name] = {split: int(dataset[f"{split}_{field}"]) for split in _SPLITS}
    return counts | {"rows_left_out": int(dataset["rows_with_bad_images"]), "bad": dataset["bad_images"].splitlines()}
