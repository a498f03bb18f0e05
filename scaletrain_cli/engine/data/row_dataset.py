"""Prepared rows on disk, read as memory-mapped arrays; row_writing.py writes them."""

import hashlib
import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from scaletrain_cli.data.chunk_hashes import CheckedFile, CorruptDataError
from scaletrain_cli.data.images.prepared import is_of_images
from scaletrain_cli.data.prepared import find_run_datasets
from scaletrain_cli.data.token_files import DTYPES
from scaletrain_cli.data.tokenizers.chat_templates import TemplateFiles, template_files
from scaletrain_cli.data.tokenizers.load import tokenizer_identity
from scaletrain_cli.engine.data.dataset import SPLITS, DatasetInfo, map_numbers, seal_of
from scaletrain_cli.engine.data.row_source import rows_content
from scaletrain_cli.engine.data.rows import LARGE_FILES, RowSequences, open_row_images
from scaletrain_cli.errors import UsageError
from scaletrain_cli.reasons import Reason
from scaletrain_cli.rundir.documents import read_document
from scaletrain_cli.rundir.shared_datasets import is_readable, place_of
from scaletrain_cli.safe_files import expand_home
from scaletrain_cli.spec import LlavaSpec, RunSpec
from scaletrain_cli.spec.data import SETTINGS_OF_ROWS
from scaletrain_cli.text import lost_text

SCHEMA = "scaletrain.rows/v1"
_RENDERING = "rendering/v4"  # raised with every change of what rows become
# The files of a split, and their types; tokens have the type of the dataset.
PARTS = {"bin": "", "weights.bin": "float32", "ends.bin": "int64", "rows.bin": "int64", "totals.bin": "float64"}


@dataclass(frozen=True)
class RowsInfo(DatasetInfo):
    """The contents of dataset.json of rows, beside those of text.

    Of each split there are five files, each with the hashes of its chunks: tokens (``.bin``), their weights
    (``.weights.bin``, fp32), the ends of documents (``.ends.bin``) and the number of documents up to each row
    (``.rows.bin``), both int64, and the sum of the weights of each row (``.totals.bin``, fp64). Rows with images have
    five more, see row_images. ``images``: distinct ones; ``image_uses``: those of all rows.
    """

    objective: str = ""
    format: str = ""
    seq_len: int = 0
    packing: str = ""
    weighted: bool = False  # some weights are neither 0 nor 1
    train_rows: int = 0
    validation_rows: int = 0
    rows_read: int = 0
    rows_without_target: int = 0
    rows_too_long: int = 0
    rows_truncated: int = 0
    targets: int = 0
    template_date: str = ""
    template: str = ""  # SHA-256 of the special tokens and the chat templates
    loss_on: str = ""
    truncation: str = ""
    chat_template: str = ""  # as DataSpec.recorded_template
    chat_template_kwargs: str = ""  # as DataSpec.recorded
    fields: str = ""  # as DataSpec.recorded
    rows_unusable: int = 0  # left out by data.on_bad: skip
    unusable: str = ""  # the first ones, a line each
    lost: str = "{}"  # JSON: the number of rows whose tokens lack something of them, by its name
    stop_tokens: str = ""  # ids of the tokens at which trained turns end, with commas
    tokens_per_image: int = 0  # 0: rows have no images
    image_token: int = 0
    image_folder: str = ""
    train_images: int = 0
    validation_images: int = 0
    train_image_uses: int = 0
    validation_image_uses: int = 0
    train_image_bytes: int = 0
    validation_image_bytes: int = 0
    train_image_place_bytes: int = 0
    validation_image_place_bytes: int = 0
    rows_with_bad_images: int = 0  # which were left out
    bad_images: str = ""  # the first ones, a line each


def rows_folder(spec: RunSpec, runs_root: Path) -> Path:
    """Return the folder of the prepared rows: the source itself if it is one, else a folder below the runs root.

    ``spec``: of one source, see RunSpec.of_sources.
    """
    data = spec.data
    source = expand_home(data.only_source)
    if (source / "dataset.json").is_file():
        if data.validation_source is not None:
            raise UsageError(Reason("data.validation-rows-of-prepared"))
        return source
    identity = [
        SCHEMA,
        _RENDERING,
        spec.training.objective,
        str(spec.language_model.seq_len),
        rows_content(data.only_source, runs_root),
        tokenizer_identity(data.tokenizer),
        template_hash(template_files(spec)),
        json.dumps(data.model_dump(mode="json", include=SETTINGS_OF_ROWS), sort_keys=True),
        repr(data.validation_split),
        "" if data.validation_source is None else rows_content(data.validation_source, runs_root, validation=True),
    ]
    if isinstance(spec.model, LlavaSpec):
        folder = "" if data.images.folder is None else str(expand_home(data.images.folder).absolute())
        identity += [folder, str(spec.model.image_token_index), str(spec.model.tokens_per_image)]
    key = hashlib.sha256("\n".join(identity).encode()).hexdigest()[:16]
    return place_of(runs_root / "datasets", key, partial(_open, spec.language_model.seq_len))


def _open(seq_len: int, folder: Path) -> None:
    """Open the rows of another user, without reading them. Raises ScaletrainError for damaged ones."""
    open_rows(folder, read_document(folder / "dataset.json") or {}, seq_len, 1, sys.maxsize)


def find_datasets(spec: RunSpec, runs_root: Path, known: Mapping[str, Path]) -> dict[str, Path] | None:
    """Return the dataset of each source of text, rows or images by its name; None if one is missing.

    ``known``: datasets that the run has recorded. Raises UsageError.
    """
    if spec.training.objective == "causal_lm" or is_of_images(spec):
        return find_run_datasets(spec, runs_root, known)
    folders = {name: known.get(name) or rows_folder(alone, runs_root) for name, alone in spec.of_sources().items()}
    return folders if all(map(is_readable, folders.values())) else None


def template_hash(files: TemplateFiles) -> str:
    """Return the SHA-256 of special tokens and chat templates."""
    return hashlib.sha256(json.dumps([*vars(files).values()], sort_keys=True).encode()).hexdigest()


def open_rows(
    folder: Path, document: dict[str, Any], seq_len: int, rank: int, ranks: int
) -> tuple[RowsInfo, RowSequences, RowSequences]:
    """Return info, training rows and validation rows of a folder with the contents ``document`` of dataset.json.

    Compares this rank's share of the indices with their hashes; tokens and weights are compared when they are first
    read. Raises UsageError, and CorruptDataError if a file has changed since it was written.
    """
    try:
        info = RowsInfo(**document)
    except TypeError as error:
        raise UsageError(Reason("engine.not-a-dataset", {"folder": str(folder), "error": str(error)})) from error
    wrong = [field.name for field in fields(info) if type(getattr(info, field.name)) is not field.type]
    if wrong or info.dtype not in DTYPES:
        raise CorruptDataError(
            folder / "dataset.json", f"{', '.join(wrong) or 'dtype'} has a value that is not allowed"
        )
    if info.seq_len != seq_len:
        params = {"folder": str(folder), "found": info.seq_len, "seq_len": seq_len}
        raise UsageError(Reason("data.prepared-for-other-length", params))
    splits, checked = [], []
    for split in SPLITS:
        files, sequences = _open_split(folder, split, info)
        checked += files
        splits.append(sequences)
    if info.seal != seal_of(info, [file.hashes for file in checked]):
        raise CorruptDataError(folder / "dataset.json", "it does not match the hashes beside it")
    width = len(checked) // len(SPLITS)
    large = (0, 1, *range(len(PARTS), len(PARTS) + LARGE_FILES))  # compared when they are first read
    for number, file in enumerate(checked):
        if number % width not in large:
            file.check_share(rank, ranks)
    if not len(splits[0]):
        sizes = {"tokens": info.train_tokens, "length": seq_len}
        raise UsageError(Reason("engine.dataset-too-small", {"folder": str(folder), **sizes}))
    return info, splits[0], splits[1]


def _open_split(folder: Path, split: str, info: RowsInfo) -> tuple[list[CheckedFile], RowSequences]:
    tokens, documents, rows = (getattr(info, f"{split}_{name}") for name in ("tokens", "documents", "rows"))
    counts = dict(zip(PARTS, (tokens, tokens, documents, rows, rows), strict=True))
    mapped, checked = [], []
    for part, count in counts.items():
        path = folder / f"{split}.{part}"
        mapped.append(map_numbers(path, PARTS[part] or info.dtype, count))
        checked.append(CheckedFile(path, mapped[-1].view(np.uint8)))
    images = None
    if info.tokens_per_image:
        names = ("images", "image_bytes", "image_place_bytes", "image_uses")
        sizes = {name: getattr(info, f"{split}_{name}") for name in names}
        images = open_row_images(folder, split, sizes, documents)
        checked += images.files
    sequences = RowSequences(
        tokens=mapped[0],
        weights=mapped[1],
        document_ends=mapped[2],
        row_ends=mapped[3],
        totals=mapped[4],
        seq_len=info.seq_len,
        pairs=info.objective == "dpo",
        packed=info.packing != "none",
        weighted=info.weighted,
        files=(checked[0], checked[1]),
        images=images,
    )
    return checked, sequences


def left_out(info: RowsInfo) -> list[str]:
    """Return lines that say how many rows were truncated or left out, and what their tokens lack; none if all is in."""
    lines = []
    bad, unusable = info.rows_with_bad_images, info.rows_unusable
    if info.rows_truncated or info.rows_without_target or info.rows_too_long or bad or unusable:
        of_images = f", {bad} with bad images, the first at {info.bad_images.partition(chr(10))[0]}" if bad else ""
        first = info.unusable.partition("\n")[0]
        of_rows = f", {unusable} that cannot be used, the first: {first}" if unusable else ""
        lines.append(
            f"of {info.rows_read} rows {info.rows_truncated} were truncated to {info.seq_len} tokens; "
            f"left out: {info.rows_without_target} without a token in the loss, {info.rows_too_long} for their length"
            f"{of_images}{of_rows}"
        )
    if lost := json.loads(info.lost):
        lines.append(f"not in the tokens: {lost_text(lost)}")
    return lines
