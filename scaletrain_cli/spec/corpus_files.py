"""The files that ``data.source`` names, their splits, and problems with them that need no library to detect.

Splits of a data set are found by the names of files and folders, as the library datasets does. Uses the standard
library only, because verbs that only read a spec import it; the engine uses it too.
"""

import glob
import itertools
import os
import re
import stat
import sysconfig
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from scaletrain_cli.errors import UsageError
from scaletrain_cli.reasons import Reason
from scaletrain_cli.safe_files import expand_home

# Digits of 8 x 8 pixels in 17 shades of gray, which the library scikit-learn contains.
SKLEARN_DIGITS = "sklearn-digits"
FOLDER, SHARDS, TABLES = "image_folder", "webdataset", "parquet"
IMAGE_FORMATS = (FOLDER, SHARDS, TABLES)
IMAGE_SUFFIXES = ("jpg", "jpeg", "png", "webp", "bmp", "gif", "tif", "tiff", "ppm", "pgm", "avif", "jp2")
SHARD_SUFFIX, TABLE_SUFFIX = "tar", "parquet"
_BRACES = re.compile(r"\{([^{}]*)\}")
_NUMBERS = re.compile(r"(\d{1,18})\.\.(\d{1,18})")
_MOST_NAMES = 1_000_000


def format_of_file(name: str) -> str:
    """Return the format of a source that a file of this name belongs to; empty for other files."""
    suffix = PurePosixPath(name).suffix.lower().removeprefix(".")
    if suffix == SHARD_SUFFIX:
        return SHARDS
    if suffix == TABLE_SUFFIX:
        return TABLES
    return FOLDER if suffix in IMAGE_SUFFIXES else ""


def is_hidden(name: str) -> bool:
    """Return True if a part of a relative path begins with a dot, or belongs to an archive of macOS."""
    return any(part.startswith(".") or part == "__MACOSX" for part in name.split("/"))


def expanded_braces(path: str) -> list[str]:
    """Return the paths of ``a-{000..099}.tar`` and ``{a,b}.tar``, in order. Raises UsageError for too many."""
    names: list[str] = []
    for name in _expanded(path):
        if len(names) == _MOST_NAMES:
            raise UsageError(Reason("images.too-many-names", {"path": path, "most": _MOST_NAMES}))
        names.append(name)
    return names


def _expanded(path: str) -> Iterator[str]:
    for match in _BRACES.finditer(path):
        if (values := _values(match[1])) is not None:
            for value in values:
                yield from _expanded(f"{path[: match.start()]}{value}{path[match.end() :]}")
            return
    yield path


def _values(text: str) -> Iterator[str] | None:
    """Return the values of the text between braces; None if it is a part of a name."""
    if (numbers := _NUMBERS.fullmatch(text)) is not None:
        first, last = int(numbers[1]), int(numbers[2])
        padded = any(digits[0] == "0" and len(digits) > 1 for digits in numbers.groups())
        width = max(map(len, numbers.groups())) if padded else 0
        order = range(first, last + 1) if first <= last else range(first, last - 1, -1)
        return (f"{number:0{width}d}" for number in order)
    return iter(text.split(",")) if "," in text else None


def split_of_folder(name: str) -> str:
    """Return the split that the first folder of a relative path names: train, validation or test; else empty."""
    first, separator, _ = name.partition("/")
    return the_one(named_splits(first)) if separator else ""


def splits_of_file(name: str) -> tuple[str, ...]:
    """Return the splits that a path below a source names: those of its last part that names one.

    A word counts where no letter is beside it: train in ``cc3m-train-0001.tar``, ``train2017/a.tar`` and
    ``a_train.parquet``, not in ``trainable.tar``. A name with words of two splits has both.
    """
    by_part = (named_splits(part) for part in reversed(name.split("/")))
    return next((splits for splits in by_part if splits), ())


def splits_by_folder(first_folders: Collection[str]) -> bool:
    """Return True if the first folders of images are splits, one of them for training, and none is a class.

    Folders such as ``bullet_train`` are classes unless another one names a validation split.
    """
    named = {name: the_one(named_splits(name)) for name in first_folders}
    whole = all(name.lower() in SPLITS for name in first_folders)
    return TRAIN in named.values() and all(named.values()) and (whole or VALIDATION in named.values())


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


END_OF_TEXT = "<|endoftext|>"
# GPT-2 and Qwen, Llama 3, Gemma, DeepSeek, Kimi, Hunyuan, Llama 2 and Mistral. The last two are other tokens elsewhere:
# of Gemma </s> is HTML, and of Kimi <|im_end|> is the end of a turn.
ENDS_OF_TEXT = (
    *(END_OF_TEXT, "<|end_of_text|>", "<eos>", "<｜end▁of▁sentence｜>", "[EOS]", "<|eos|>"),
    *("</s>", "<|im_end|>"),
)
LFS_POINTER = "version https://git-lfs.github.com/spec/"  # how a file begins that git lfs pull would replace
# Files beside a tokenizer.json that state tokens, and settings that change them.
TOKEN_FILES = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")


PYTHON_STDLIB = "python-stdlib"
PYTHON_DOCSTRINGS = "python-docstrings"
EMBEDDED = (PYTHON_STDLIB, PYTHON_DOCSTRINGS)
# Those and the images of scikit-learn: sources that name no file.
EMBEDDED_SOURCES = (*EMBEDDED, SKLEARN_DIGITS)
SOURCES = f"Give {' or '.join(EMBEDDED)}, a prepared dataset, or a path or glob of files."
FORMATS = ("txt", "md", "py", "jsonl", "parquet")
ROW_FORMATS = ("jsonl", "json", "parquet", "arrow")  # of rows for fine-tuning
COMPRESSED = ("txt.gz", "md.gz", "py.gz", "jsonl.gz", "jsonl.zst", "json.gz", "json.zst")
# What text for pretraining is read from: the format by the suffix of a file.
TEXT_SUFFIXES = {
    "txt": "txt",
    "text": "txt",
    "md": "md",
    "py": "code",
    "jsonl": "jsonl",
    "ndjson": "jsonl",
    "parquet": "parquet",
    "arrow": "arrow",
    "idx": "megatron",
    "bin": "megatron",
    "npy": "npy",
}
COMPRESSIONS = ("gz", "zst")
# Formats whose files are text, which may be compressed.
COMPRESSIBLE = ("txt", "md", "code", "jsonl")
# The library itself: no installed packages, and no tests, whose generated tables are poor training text.
_SKIPPED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
# Files that describe a corpus: read only if a path or a glob names them.
_ABOUT_THE_CORPUS = ("readme", "license", "licence", "notice", "changelog", "dataset_card", "datasheet")
_LOOKED_INTO = 32  # number of a corpus's files whose beginning is read before a run
_PARQUET_MAGIC = b"PAR1"
# Maximum share of replaced characters: a few stray bytes are accepted, another encoding or binary data is not.
MOST_REPLACED = 0.001
FEW_REPLACED = 3  # per text, however short


@dataclass(frozen=True)
class CorpusFiles:
    """``files`` in a fixed order; ``not_read``: the number of files in a folder that are not read, by suffix."""

    files: tuple[Path, ...]
    not_read: dict[str, int]


def kind_of(path: Path) -> str:
    """Return ``jsonl`` for ``a.jsonl``, ``a.ndjson`` and ``a.jsonl.gz``; for other files the suffix, if any."""
    name = path.name.lower()
    if any(name.endswith(f".{kind}") for kind in COMPRESSED):
        return name.split(".")[-2]
    suffix = path.suffix.lstrip(".").lower()
    return "jsonl" if suffix == "ndjson" else suffix


class NoCorpusError(UsageError):
    """The source has no files that can be read (exit 2); ``why`` is the reason without the source.

    ``other_formats``: it has files, and none is of the format that the spec gives.
    """

    def __init__(self, source: str, why: str, key: str = "data.source", *, other_formats: bool = False) -> None:
        remedy = "Set the format to that of the files, or give another path." if other_formats else SOURCES
        super().__init__(f"{key} = {source}: {why}. {remedy}")
        self.why, self.other_formats = why, other_formats


def find_files(
    source: str, folder: Path = Path(), kinds: Collection[str] = FORMATS, *, evaluation: bool = False
) -> CorpusFiles:
    """Return the files of a source, relative to ``folder``. Raises NoCorpusError if there are none to read.

    ``kinds``: the formats to read. The .json files of a folder are left out, which often describe the others, and so
    are those of a split that is not for training, or for an ``evaluation`` that is (see read_split).
    """
    if source == PYTHON_STDLIB:
        return CorpusFiles(_standard_library(), {})
    path = folder / expand_home(source)
    entries = _entries(source, folder)
    files, not_read = [], Counter[str]()
    for entry in entries:
        if kind_of(entry) in kinds and not (kind_of(entry) == "json" and path.is_dir()):
            files.append(entry)
        else:
            not_read[entry.suffix or entry.name] += 1
    if not files:
        known = [kind for kind in kinds if kind != "json" or not path.is_dir()]
        known += [kind for kind in COMPRESSED if kind.partition(".")[0] in known]
        raise NoCorpusError(source, _nothing_to_read(source, path, entries, known))
    if path.is_dir():
        names, of_splits = read_split(list(map(str, files)), str(path), evaluation=evaluation)
        files, not_read = list(map(Path, names)), not_read + of_splits
    return CorpusFiles(tuple(files), dict(not_read))


def find_text(
    source: str, folder: Path = Path(), named: str = "auto", key: str = "data.source", *, evaluation: bool = False
) -> CorpusFiles:
    """Return the files of a source of text, relative to ``folder``. Raises NoCorpusError if there are none to read.

    ``named``: the format that the spec gives, or auto; ``key``: of the path in the spec. A Megatron-LM set is listed
    by its .idx file. ``evaluation``: which split of a folder is read, as of find_files().
    """
    if source == PYTHON_STDLIB:
        return CorpusFiles(_standard_library(), {})
    path = folder / expand_home(source)
    entries = _entries(source, folder, key)
    names = chosen_text(list(map(str, entries)), named, in_folder=path.is_dir())
    if not names:
        alone = next((entry for entry in entries if entry.suffix == ".bin" and _fits("megatron", named)), None)
        if alone is not None:
            index = alone.with_suffix(".idx").name
            raise NoCorpusError(source, f"{alone.name} has no {index} beside it, the index of a Megatron-LM set", key)
        why = _nothing_to_read(source, path, entries, suffixes_of(named))
        raise NoCorpusError(source, why, key, other_formats=bool(entries) and named != "auto")
    read = {Path(name) for name in names}
    read |= {name.with_suffix(".bin") for name in read if name.suffix == ".idx"}
    not_read = Counter(entry.suffix or entry.name for entry in entries if entry not in read)
    if path.is_dir():
        names, of_splits = read_split(names, str(path), evaluation=evaluation)
        not_read += of_splits
    return CorpusFiles(tuple(map(Path, names)), dict(not_read))


def chosen_text(names: Sequence[str], named: str = "auto", *, in_folder: bool) -> list[str]:
    """Return the paths of text among ``names``, in their order; of a Megatron-LM set that of its .idx file.

    ``named``: the format that the spec gives, or auto. Files that a path or a glob names have that format whatever they
    are called; those of a folder only if their suffix does not say another one.
    """
    paths: dict[str, None] = {}
    known = set(names)
    for name in names:
        kind, _ = format_by_name(name, "auto" if in_folder else named)
        if not kind or not _fits(kind, named):
            continue
        if (named if named != "auto" else kind) == "megatron":
            name = f"{name.rpartition('.')[0]}.idx"
            if in_folder and name not in known:  # a .bin file of something else
                continue
        paths[name] = None
    return list(paths)


def suffixes_of(named: str) -> list[str]:
    """Return the suffixes of the files that are read as the format that the spec gives."""
    return [suffix for suffix, kind in TEXT_SUFFIXES.items() if _fits(kind, named)]


def format_by_name(name: str, named: str = "auto") -> tuple[str, str]:
    """Return (format, compression) of a file of text; an empty format if it cannot be read. ``named``: by the spec."""
    suffixes = name.rsplit("/", 1)[-1].lower().split(".")[1:]
    compression = suffixes.pop() if suffixes and suffixes[-1] in COMPRESSIONS else ""
    kind = named if named != "auto" else TEXT_SUFFIXES.get(suffixes[-1] if suffixes else "", "")
    return ("" if compression and kind not in COMPRESSIBLE else kind), compression


def _fits(kind: str, named: str) -> bool:
    """Return whether a file whose suffix says ``kind`` is read as the format that the spec gives."""
    return named in ("auto", kind) or (named.startswith("raw_") and kind in ("npy", "megatron"))


def _standard_library() -> tuple[Path, ...]:
    root = Path(sysconfig.get_paths()["stdlib"])
    files = list[Path]()
    for folder, below, names in os.walk(root):
        below[:] = set(below) - _SKIPPED_FOLDERS  # not read: site-packages may have a hundred thousand files
        files += [Path(folder, name) for name in names if name.endswith(".py")]
    return tuple(sorted(files))


def _entries(source: str, folder: Path, key: str = "data.source") -> list[Path]:
    """Return what a path, folder or glob names, in a fixed order. Raises NoCorpusError if it cannot be read."""
    path = folder / expand_home(source)
    try:
        if _is_whole_machine(path):
            raise NoCorpusError(source, "means all files of this machine", key)
        if path.is_dir():
            entries = [entry for entry in _files_below(path) if not is_about_the_corpus(entry.relative_to(path))]
        elif os.path.lexists(path):  # a name may contain glob characters
            entries = [path]
        else:
            names = glob.glob(str(expand_home(source)), root_dir=folder, recursive=True)
            entries = [entry for name in names if not (entry := folder / name).is_dir()]
    except OSError as error:
        raise NoCorpusError(source, f"cannot be read: {error}", key) from error
    return sorted(entries)


def _is_whole_machine(path: Path) -> bool:
    """Return whether a folder or a glob such as ``/**`` names all files below the root of the file system."""
    if "**" in path.parts and not os.path.lexists(path):
        path = Path(*itertools.takewhile(lambda part: set(part) != {"*"}, path.parts))
    return path.is_dir() and path.samefile("/")


def _nothing_to_read(source: str, path: Path, entries: Collection[Path], known: Collection[str]) -> str:
    if not entries and not path.is_dir():
        return "no file matches" if glob.has_magic(source) else "no such file or folder"
    return f"the {'folder' if path.is_dir() else 'source'} has no {', '.join(known)} file"


def sample_of(files: tuple[Path, ...]) -> tuple[Path, ...]:
    """Return the files whose beginning is read before a run."""
    return files[:: max(1, len(files) // _LOOKED_INTO)]


def unreadable_among(files: tuple[Path, ...], source: Path | None = None) -> str:
    """Return the first file that cannot be opened, with the reason; empty if there is none.

    ``source``: the path of the source, whose own name is left out.
    """
    reasons = [why if path == source else f"{path}: {why}" for path in files if (why := _unreadable(path))]
    return reasons[0] + (f" (and {len(reasons) - 1} more)" if len(reasons) > 1 else "") if reasons else ""


def parquet_names(path: Path, columns: Collection[str]) -> list[str]:
    """Return those of ``columns`` whose names are in the footer of a valid parquet file. Raises OSError."""
    with path.open("rb") as file:
        file.seek(-8, os.SEEK_END)
        length = int.from_bytes(file.read(4), "little")
        file.seek(-8 - length, os.SEEK_END)
        footer = file.read(length)
    return [column for column in columns if column.encode() in footer]


def parquet_problem(path: Path) -> str:
    """Return the problem of a parquet file by the magic bytes at both ends; empty for a valid one. Raises OSError."""
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size < 12 or file.read(4) != _PARQUET_MAGIC:
            return "is not a parquet file"
        file.seek(size - 8)
        length, magic = int.from_bytes(file.read(4), "little"), file.read(4)
    if magic != _PARQUET_MAGIC or length > size - 12:
        return "is an incomplete parquet file: its footer is missing"
    return ""


def _unreadable(path: Path) -> str:
    try:
        is_file = stat.S_ISREG(path.stat().st_mode)
    except OSError:
        is_file = False
    if is_file:
        return "" if os.access(path, os.R_OK) else "is not readable by this user"
    if path.is_symlink() and not path.exists():
        return "is a link to a file that does not exist"
    return "is not a regular file" if path.exists() else "does not exist"


def _files_below(folder: Path) -> Iterator[Path]:
    """Yield all files below a folder, without hidden ones; links to folders are not followed."""

    def stop(error: OSError) -> None:
        raise error

    for parent, folders, names in os.walk(folder, onerror=stop):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        yield from (Path(parent, name) for name in names if not name.startswith("."))


def is_about_the_corpus(path: Path) -> bool:
    """Return whether a file describes a corpus, such as its README."""
    return path.name.lower().partition(".")[0] in _ABOUT_THE_CORPUS
