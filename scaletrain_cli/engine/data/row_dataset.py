"""Rows on disk: encoded, truncated and packed once, then read as memory-mapped arrays."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass, fields, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from scaletrain_cli.data.chunk_hashes import CheckedFile, CorruptDataError, HashedFile
from scaletrain_cli.data.tokenizers.files import train_tokenizer
from scaletrain_cli.data.tokenizers.given import given_tokenizer, tokenizer_identity
from scaletrain_cli.engine.data.chat_template import CHATML_TOKENS
from scaletrain_cli.engine.data.chat_tokenizer import ChatTokenizer, Encoded, TemplateFiles, template_files
from scaletrain_cli.engine.data.dataset import (
    DTYPES,
    SPLITS,
    DatasetInfo,
    draw,
    map_numbers,
    seal_of,
)
from scaletrain_cli.engine.data.packing import Piece, pack
from scaletrain_cli.engine.data.row_source import Row, Tally, row_error, rows_content, rows_of
from scaletrain_cli.engine.data.rows import RowSequences
from scaletrain_cli.errors import UsageError
from scaletrain_cli.reasons import Reason
from scaletrain_cli.rundir.documents import write_document
from scaletrain_cli.rundir.shared_datasets import dataset_place
from scaletrain_cli.safe_files import create_file, expand_home
from scaletrain_cli.spec import DataSpec, RunSpec
from scaletrain_cli.spec.corpus_files import END_OF_TEXT
from scaletrain_cli.spec.row_formats import Conversation, Example, Pair, PlainText, RowError

SCHEMA = "scaletrain.rows/v1"
_ROWS_PER_ENCODE = 256
# The files of a split, and their types; tokens have the type of the dataset.
_PARTS = {"bin": "", "weights.bin": "float32", "ends.bin": "int64", "rows.bin": "int64", "totals.bin": "float64"}


@dataclass(frozen=True)
class RowCounts:
    """Numbers of rows read, left out and truncated, and of tokens kept. ``targets``: tokens in the loss."""

    read: int = 0
    without_target: int = 0  # left out: no token in the loss, or none after truncation
    too_long: int = 0  # left out by data.truncation: drop
    truncated: int = 0
    tokens: int = 0
    targets: int = 0


@dataclass(frozen=True)
class RowsInfo(DatasetInfo):
    """The contents of dataset.json of rows, beside those of text.

    Of each split there are five files, each with the hashes of its chunks: tokens (``.bin``), their weights
    (``.weights.bin``, fp32), the ends of documents (``.ends.bin``) and the number of documents up to each row
    (``.rows.bin``), both int64, and the sum of the weights of each row (``.totals.bin``, fp64).
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
    loss_on: str = ""  # empty in earlier versions, as the next ones
    truncation: str = ""
    chat_template: str = ""  # as DataSpec.recorded_template
    fields: str = ""  # as DataSpec.recorded_fields

    @property
    def samples(self) -> tuple[int, int]:
        """Return the numbers of training and of validation sequences, or pairs."""
        width = 2 if self.objective == "dpo" else 1
        return self.train_rows // width, self.validation_rows // width


def rows_folder(spec: RunSpec, runs_root: Path) -> Path:
    """Return the folder of the prepared rows: the source itself if it is one, else a folder below the runs root."""
    data = spec.data
    source = expand_home(data.only_source)
    if (source / "dataset.json").is_file():
        return source
    settings = data.settings_of_rows({"format", "fields", "chat_template_date", "loss_on", "truncation", "packing"})
    identity = [
        SCHEMA,
        spec.training.objective,
        str(spec.language_model.seq_len),
        rows_content(data.only_source, runs_root),
        tokenizer_identity(data.tokenizer),
        _template_hash(template_files(data)),
        json.dumps(settings, sort_keys=True),
        repr(data.validation_split),
    ]
    return dataset_place(runs_root, hashlib.sha256("\n".join(identity).encode()).hexdigest()[:16])


def _template_hash(files: TemplateFiles) -> str:
    return hashlib.sha256(json.dumps([files.tokens, files.templates], sort_keys=True).encode()).hexdigest()


def tokenizer_of(data: DataSpec, objective: str, most_rows: int | None = None) -> Any:
    """Return the tokenizer of a spec: read from its file, or trained on the rows, at most ``most_rows`` of them."""
    if data.tokenizer.path is not None:
        return given_tokenizer(data.tokenizer)
    rows = islice(rows_of(data, objective)[1], most_rows)
    texts = (text for row in rows for text in _texts_of(row.example))
    return train_tokenizer(texts, data.tokenizer.vocab_size, [END_OF_TEXT, *CHATML_TOKENS])


def _texts_of(example: Example) -> Iterator[str]:
    """Yield what a tokenizer learns from, which is the same for every chat template."""
    if isinstance(example, PlainText):
        yield example.text
    elif isinstance(example, Pair):
        yield from _texts_of(example.chosen)
        yield from _texts_of(example.rejected)
    else:
        parts = [example.messages] if isinstance(example, Conversation) else [example.prompt, example.completion]
        for part in parts:
            for message in [{"content": part}] if isinstance(part, str) else part:
                content = message.get("content")
                yield content if isinstance(content, str) else json.dumps(message, ensure_ascii=False)
        if example.tools:
            yield json.dumps(example.tools, ensure_ascii=False)


class RowEncoder:
    """Encodes and truncates rows, and counts what becomes of them."""

    def __init__(self, tokenizer: ChatTokenizer, data: DataSpec, seq_len: int) -> None:
        self._tokenizer, self._seq_len = tokenizer, seq_len
        self._truncation = "" if data.packing == "best_fit_split" else data.truncation
        self.counts = RowCounts()

    def encode(self, rows: list[Row]) -> Iterator[tuple[Row, list[Encoded]]]:
        """Yield each row that is kept, with its one document, or its chosen and its rejected answer.

        The first token of a document has weight 0: it is nobody's successor. Raises UsageError.
        """
        found = self._tokenizer.encode([(row.example, row.weight) for row in rows])
        for row, documents in zip(rows, found, strict=True):
            if isinstance(documents, RowError):
                raise row_error(row.where, documents)
            if (kept := self._kept(row, documents)) is not None:
                yield row, kept

    def _kept(self, row: Row, documents: list[Encoded]) -> list[Encoded] | None:
        counts = self.counts
        longest = max(len(document.ids) for document in documents)
        cut = self._truncation != "" and longest > self._seq_len
        if cut and self._truncation == "refuse":
            raise row_error(row.where, RowError("row-too-long", tokens=longest, seq_len=self._seq_len))
        if cut and self._truncation == "drop":
            self.counts = replace(counts, read=counts.read + 1, too_long=counts.too_long + 1)
            return None
        part = slice(-self._seq_len, None) if self._truncation == "keep_end" else slice(self._seq_len)
        kept = [Encoded(each.ids[part], each.weights[part]) for each in documents] if cut else documents
        for document in kept:
            document.weights[:1] = 0
        if not all(document.weights.any() for document in kept):
            self.counts = replace(counts, read=counts.read + 1, without_target=counts.without_target + 1)
            return None
        self.counts = replace(
            counts,
            read=counts.read + 1,
            truncated=counts.truncated + cut,
            tokens=counts.tokens + sum(len(document.ids) for document in kept),
            targets=counts.targets + sum(int(np.count_nonzero(document.weights)) for document in kept),
        )
        return kept


class _Spool:
    """The documents of a split in the order of the source, on disk until they are packed."""

    def __init__(self, folder: Path, split: str, dtype: str) -> None:
        self._paths, self._dtype = [folder / f"{split}.{name}.spool" for name in ("tokens", "weights")], dtype
        self._files = [path.open("xb") for path in self._paths]
        self.lengths: list[int] = []

    def add(self, document: Encoded) -> None:
        self._files[0].write(document.ids.astype(self._dtype).tobytes())
        self._files[1].write(document.weights.tobytes())
        self.lengths.append(len(document.ids))

    def __enter__(self) -> _Spool:
        return self

    def __exit__(self, *_: object) -> None:
        for file in self._files:
            file.close()

    def read(self) -> tuple[npt.NDArray[Any], npt.NDArray[np.float32]]:
        """Return tokens and weights of all documents, memory-mapped, after the files were closed."""
        found = []
        for path, dtype in zip(self._paths, (self._dtype, "float32"), strict=True):
            found.append(np.memmap(path, dtype=dtype, mode="r") if path.stat().st_size else np.empty(0, dtype))
        return found[0], found[1]

    def remove(self) -> None:
        """Remove the files, which nothing may have mapped: NFS would keep them under other names."""
        for path in self._paths:
            path.unlink()


def build_rows(spec: RunSpec, folder: Path) -> None:
    """Write the rows of a spec below ``folder``. Raises UsageError."""
    data, objective, seq_len = spec.data, spec.training.objective, spec.language_model.seq_len
    files, tally = template_files(data), Tally()
    raw = tokenizer_of(data, objective)
    create_file(folder / "tokenizer.json", raw.to_str(pretty=True))
    if data.tokenizer.path is None:
        for name, content in _beside_a_tokenizer(files, raw).items():
            create_file(folder / name, json.dumps(content, indent=2) + "\n")
    vocab_size = max(raw.get_vocab().values()) + 1
    dtype = DTYPES[vocab_size > 1 << 16]
    row_format, rows = rows_of(data, objective, tally)
    encoder = RowEncoder(ChatTokenizer(raw, files, data), data, seq_len)
    weighted = False
    with ExitStack() as opened:
        spools = {split: opened.enter_context(_Spool(folder, split, dtype)) for split in SPLITS}
        while batch := list(islice(rows, _ROWS_PER_ENCODE)):
            for row, documents in encoder.encode(batch):
                split = SPLITS[draw(row.key) < data.validation_split]
                for document in documents:
                    spools[split].add(document)
                    weighted = weighted or bool(((document.weights != 0) & (document.weights != 1)).any())
    counts = encoder.counts
    if not counts.targets:
        params = {"rows": counts.read, "dropped": counts.without_target, "too_long": counts.too_long}
        raise UsageError(Reason("data.nothing-to-train-on", {"source": data.source, "seq_len": seq_len, **params}))
    digest, hashes = hashlib.sha256(), list[bytes]()
    numbers: dict[str, Any] = {}
    for split in SPLITS:
        written = _write_split(folder, split, spools[split], data.packing, seq_len, dtype)
        hashes += written.hashes
        digest.update(split.encode() + b"".join(written.hashes))
        numbers |= {
            f"{split}_tokens": written.tokens,
            f"{split}_documents": written.documents,
            f"{split}_rows": written.rows,
        }
    info = RowsInfo(
        schema=SCHEMA,
        fingerprint=digest.hexdigest(),
        dtype=dtype,
        vocab_size=vocab_size,
        documents=numbers["train_documents"] + numbers["validation_documents"],
        replaced=tally.replaced,
        objective=objective,
        format=row_format,
        seq_len=seq_len,
        packing=data.packing,
        weighted=bool(weighted),
        rows_read=counts.read,
        rows_without_target=counts.without_target,
        rows_too_long=counts.too_long,
        rows_truncated=counts.truncated,
        targets=counts.targets,
        template_date=data.chat_template_date,
        template=_template_hash(files),
        loss_on=data.loss_on,
        truncation=data.truncation,
        chat_template=data.recorded_template(Path()),
        fields=data.recorded_fields(),
        **numbers,
    )
    write_document(folder / "dataset.json", asdict(replace(info, seal=seal_of(info, hashes))))


def _beside_a_tokenizer(files: TemplateFiles, tokenizer: Any) -> dict[str, dict[str, Any]]:
    """Return the Hugging Face files that belong to a trained tokenizer, by name."""
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, **files.tokens}
    return {
        "tokenizer_config.json": config | {"chat_template": files.templates["default"]},
        "special_tokens_map.json": dict(files.tokens),
        "generation_config.json": {f"{name}_id": tokenizer.token_to_id(text) for name, text in files.tokens.items()},
    }


@dataclass(frozen=True)
class _Written:
    hashes: list[bytes]
    tokens: int
    documents: int
    rows: int


def _write_split(folder: Path, split: str, spool: _Spool, packing: str, seq_len: int, dtype: str) -> _Written:
    lengths = spool.lengths
    tokens, weights = spool.read()
    starts = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]) if lengths else np.zeros(1, np.int64)
    if packing == "none":
        packed = [[Piece(document, 0, length)] for document, length in enumerate(lengths)]
    else:
        packed = pack(lengths, seq_len, split=packing == "best_fit_split")
    place = documents = rows = 0
    with ExitStack() as opened:
        files = {part: opened.enter_context(HashedFile(folder / f"{split}.{part}")) for part in _PARTS}
        for row in packed:
            cut = [slice(starts[document] + start, starts[document] + stop) for document, start, stop in row]
            own = [weights[each].copy() for each in cut]
            for each in own:
                each[0] = 0
            total = float(sum(each.sum(dtype=np.float64) for each in own))
            if not total:  # the middle of a long prompt
                continue
            for each, its in zip(cut, own, strict=True):
                files["bin"].write(tokens[each].astype(dtype).tobytes())
                files["weights.bin"].write(its.tobytes())
                place += len(its)
                documents += 1
                files["ends.bin"].write(np.int64(place).tobytes())
            rows += 1
            files["rows.bin"].write(np.int64(documents).tobytes())
            files["totals.bin"].write(np.float64(total).tobytes())
        hashes = [files[part].finish() for part in _PARTS]
    del tokens, weights
    spool.remove()
    return _Written(hashes, place, documents, rows)


def open_rows(
    folder: Path, document: dict[str, Any], seq_len: int, rank: int, ranks: int
) -> tuple[RowsInfo, RowSequences, RowSequences]:
    """Return info, training rows and validation rows of a folder with the contents ``document`` of dataset.json.

    Compares this rank's share of the indices with their hashes; tokens and weights are compared when they are first
    read. Raises UsageError, and CorruptDataError if a file has changed since it was written.
    """
    known = {"str": str, "int": int, "bool": bool}
    try:
        info = RowsInfo(**document)
    except TypeError as error:
        raise UsageError(Reason("engine.not-a-dataset", {"folder": str(folder), "error": str(error)})) from error
    wrong = [field.name for field in fields(info) if type(getattr(info, field.name)) is not known[str(field.type)]]
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
    for file in (*checked[2:5], *checked[7:10]):
        file.check_share(rank, ranks)
    if not len(splits[0]):
        sizes = {"tokens": info.train_tokens, "length": seq_len}
        raise UsageError(Reason("engine.dataset-too-small", {"folder": str(folder), **sizes}))
    return info, splits[0], splits[1]


def _open_split(folder: Path, split: str, info: RowsInfo) -> tuple[list[CheckedFile], RowSequences]:
    tokens, documents, rows = (getattr(info, f"{split}_{name}") for name in ("tokens", "documents", "rows"))
    counts = dict(zip(_PARTS, (tokens, tokens, documents, rows, rows), strict=True))
    mapped, checked = [], []
    for part, count in counts.items():
        path = folder / f"{split}.{part}"
        mapped.append(map_numbers(path, _PARTS[part] or info.dtype, count))
        checked.append(CheckedFile(path, mapped[-1].view(np.uint8)))
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
    )
    return checked, sequences


def left_out(info: RowsInfo) -> str:
    """Return how many rows were truncated or left out; empty if none was."""
    if not (info.rows_truncated or info.rows_without_target or info.rows_too_long):
        return ""
    return (
        f"of {info.rows_read} rows {info.rows_truncated} were truncated to {info.seq_len} tokens; left out: "
        f"{info.rows_without_target} without a token in the loss, {info.rows_too_long} for their length"
    )
