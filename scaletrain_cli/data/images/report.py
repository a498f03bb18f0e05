"""The report of prepared images: sizes, classes, captions and duplicates, from their indexes alone."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from scaletrain_cli.data.images.index_units import SAMPLE, short_sides
from scaletrain_cli.data.images.reading import describe_index
from scaletrain_cli.data.pipeline.shards import SPLITS
from scaletrain_cli.data.report import IMAGE_REPORT

_SHARES = {"least": 0.0, "tenth": 0.1, "median": 0.5, "nine_tenths": 0.9, "most": 1.0}
MOST_CAPTIONS = 100_000  # that are tokenized
_MOST_EXAMPLES = 10
# captions -> their tokens, of which a longer caption keeps as many as the model has positions for
CountTokens = Callable[[Sequence[str]], Sequence[int]]


@dataclass(frozen=True)
class _Split:
    """The records of a split of a source, and its texts."""

    source: str
    split: str
    records: npt.NDArray[Any]
    text: npt.NDArray[np.uint8]

    def name(self, number: int) -> str:
        """Return the path of an image within its folder or file."""
        about = self.records[number]
        start = int(about["text"])
        return bytes(self.text[start : start + int(about["key"]) + int(about["suffix"])]).decode()

    def captions(self, numbers: Iterable[int]) -> list[str]:
        texts = []
        for about in (self.records[number] for number in numbers):
            start = int(about["text"]) + int(about["key"]) + int(about["suffix"])
            texts.append(bytes(self.text[start : start + int(about["caption"])]).decode())
        return texts


def image_report(
    datasets: Mapping[str, Path],
    mixture: Mapping[str, Any] | None = None,
    *,
    image_size: int | None = None,
    count_tokens: CountTokens | None = None,
    positions: int | None = None,
) -> dict[str, Any]:
    """Return the report of the indexes of some sources, given by name.

    ``image_size``: side of the images of the model, ``count_tokens``, ``positions``: of its captions; None if they are
    not known. Raises UsageError, and CorruptDataError for a damaged index.
    """
    documents = {name: describe_index(folder) for name, folder in datasets.items()}
    splits = [
        _Split(name, split, _numbers(folder / f"{split}.samples.bin", SAMPLE), _numbers(folder / f"{split}.text.bin"))
        for name, folder in datasets.items()
        for split in SPLITS
    ]
    sources = []
    for name, document in documents.items():
        own = {part.split: part for part in splits if part.source == name}
        captions = document["settings"]["captions"]
        sources.append(
            {
                "source": name,
                "dataset": str(datasets[name]),
                "location": document["source"],
                "format": document["format"],
                "fingerprint": document["fingerprint"],
                "images": {split: len(part.records) for split, part in own.items()},
                "bytes": {split: int(document[f"{split}_image_bytes"]) for split in SPLITS},
                "pixels": {split: int(document[f"{split}_pixels"]) for split in SPLITS},
                "bytes_per_image": _quantiles(np.concatenate([part.records["length"] for part in own.values()])),
                "short_side": _short_sides(document, image_size),
                "classes": _classes(datasets[name], document, own),
                "captions": _captions(list(own.values()), count_tokens, positions) if captions else None,
                "left_out": {"samples": document["bad_samples"], "reasons": document["bad"]},
            }
        )
    return {
        "schema": IMAGE_REPORT,
        "sources": sources,
        "images": {split: sum(source["images"][split] for source in sources) for split in SPLITS},
        "image_size": image_size,
        "duplicates": _duplicates(splits),
        "mixture": mixture,
    }


def _numbers(path: Path, kind: Any = np.uint8) -> npt.NDArray[Any]:
    return np.memmap(path, kind, mode="r") if path.stat().st_size else np.empty(0, kind)


def _quantiles(values: npt.NDArray[Any]) -> dict[str, float] | None:
    """Return the least, greatest and middle values; None without values."""
    if not len(values):
        return None
    quantiles = np.quantile(values, list(_SHARES.values()), method="inverted_cdf")
    return {name: value.item() for name, value in zip(_SHARES, quantiles, strict=True)}


def _short_sides(document: Mapping[str, Any], image_size: int | None) -> dict[str, Any]:
    """Return quantiles of the shorter sides in pixels, and their histogram.

    ``smaller``: share of the images that are enlarged, because the side is less than ``image_size``.
    """
    counts = short_sides([document], SPLITS)
    sides, images = np.array([*map(int, counts)]), np.array([*counts.values()])
    smaller = None if image_size is None else float(images[sides < image_size].sum() / images.sum())
    return {"quantiles": _quantiles(np.repeat(sides, images)), "smaller": smaller, "images": counts}


def _classes(folder: Path, document: Mapping[str, Any], splits: Mapping[str, _Split]) -> dict[str, Any] | None:
    number, targets = document["num_classes"], document["settings"]["targets"]
    if number is None:
        return None
    counts = {}
    for split, part in splits.items():
        labels = part.records["label"] if targets == "class" else _numbers(folder / f"{split}.targets.bin", "<i4")
        counts[split] = np.bincount(labels, minlength=number).tolist()
    names = document["classes"] or [str(label) for label in range(number)]
    train = counts["train"]
    there = [count for count in train if count]
    return {
        "classes": [
            {"name": name, **{split: counts[split][label] for split in splits}} for label, name in enumerate(names)
        ],
        "imbalance": max(there) / min(there) if there else None,
        "without_training": [name for name, count in zip(names, train, strict=True) if not count],
    }


def _captions(splits: Sequence[_Split], count_tokens: CountTokens | None, positions: int | None) -> dict[str, Any]:
    """Return lengths of captions: of all in bytes, and of some in tokens with the share of those that are cut."""
    section: dict[str, Any] = {
        "bytes": _quantiles(np.concatenate([part.records["caption"] for part in splits])),
        "counted": None,
        "tokens": None,
        "cut": None,
    }
    if count_tokens is None:
        return section
    apart = -(-sum(len(part.records) for part in splits) // MOST_CAPTIONS)
    lengths = np.array([n for part in splits for n in count_tokens(part.captions(range(0, len(part.records), apart)))])
    cut = None if positions is None else float((lengths > positions).mean())
    return section | {"counted": len(lengths), "tokens": _quantiles(lengths), "cut": cut}


def _duplicates(splits: Sequence[_Split]) -> dict[str, Any]:
    """Return how many images have the bytes of another one, by the hash of the index.

    ``train``, ``validation``: images beyond the first of their content in all sources. ``leaked``: images for
    validation that are for training, too. ``other_labels``: contents whose images have different classes.
    """
    digests = np.concatenate([part.records["digest"] for part in splits])
    labels = np.concatenate([part.records["label"] for part in splits])
    owner = np.repeat(np.arange(len(splits)), [len(part.records) for part in splits])
    number = np.concatenate([np.arange(len(part.records)) for part in splits])
    trained = np.array([part.split == "train" for part in splits], bool)[owner]
    parts = {"train": digests[trained], "validation": digests[~trained]}
    both = np.intersect1d(parts["train"], parts["validation"])
    is_leaked = ~trained & np.isin(digests, both)
    order = np.lexsort((labels, digests))
    equal = digests[order][1:] == digests[order][:-1]
    differ = equal & (labels[order][1:] != labels[order][:-1])
    examples = []
    for place in np.flatnonzero(is_leaked)[:_MOST_EXAMPLES]:
        twin = np.flatnonzero(trained & (digests == digests[place]))[0]
        pair = {}
        for split, at in (("train", twin), ("validation", place)):
            part = splits[owner[at]]
            pair[split] = {"source": part.source, "image": part.name(int(number[at]))}
        examples.append(pair)
    return {
        **{split: len(hashes) - len(np.unique(hashes)) for split, hashes in parts.items()},
        "leaked": int(is_leaked.sum()),
        "other_labels": len(np.unique(digests[order][1:][differ])),
        "examples": examples,
    }
