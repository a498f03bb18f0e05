"""The splits of a data set by the names of its files and folders, as the library datasets finds them. Reads no file."""

import re
from collections import Counter
from collections.abc import Sequence

TRAIN, VALIDATION, TEST = "train", "validation", "test"
SPLITS = {
    **{"train": TRAIN, "training": TRAIN},
    **{"validation": VALIDATION, "valid": VALIDATION, "val": VALIDATION, "dev": VALIDATION},
    **{"test": TEST, "testing": TEST, "eval": TEST, "evaluation": TEST},
}
# Programs and prose are called test.py and training.md for other reasons than a split.
_PROSE = frozenset({"txt", "text", "md", "py"})


def named_splits(part: str) -> tuple[str, ...]:
    """Return the splits whose words are in a name of a file or folder, where no letter is beside them."""
    return tuple(dict.fromkeys(SPLITS[word] for word in re.findall(r"[^\W\d_]+", part.lower()) if word in SPLITS))


def the_one(splits: tuple[str, ...]) -> str:
    return splits[0] if len(splits) == 1 else ""


def read_split(names: Sequence[str], below: str = "", *, evaluation: bool = False) -> tuple[list[str], Counter[str]]:
    """Return the files of a folder that are read, and how many are not, by what they are of.

    Read is the train split, or for an ``evaluation`` the validation split or else the test split. Folders name splits,
    or else the files do (``data/train-00000-of-00002.parquet``, ``test.jsonl``); all files are read if these are not a
    train split and another one. ``below``: the folder, without which ``names`` are read.
    """
    parts = {name: name.removeprefix(below).lstrip("/").split("/") for name in names}
    splits = {name: next(filter(None, map(the_one, map(named_splits, path[:-1]))), "") for name, path in parts.items()}
    if not any(splits.values()):
        splits = {name: the_one(named_splits(path[-1])) for name, path in parts.items()}
    there = set(splits.values())
    unnamed = (path[-1].lower().split(".")[1:] for name, path in parts.items() if not splits[name])
    unnamed_prose = any(not _PROSE.isdisjoint(suffixes) for suffixes in unnamed)
    if TRAIN not in there or len(there - {""}) < 2 or unnamed_prose:
        return list(names), Counter()
    wanted = (VALIDATION if VALIDATION in there else TEST) if evaluation else TRAIN
    left_out = Counter(f"of {f'the {split}' if split else 'no'} split" for split in splits.values() if split != wanted)
    return [name for name in names if splits[name] == wanted], left_out
