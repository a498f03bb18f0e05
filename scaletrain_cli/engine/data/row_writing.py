"""Encode, truncate and pack rows, and write them to disk."""

import hashlib
import json
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from scaletrain_cli.data.chunk_hashes import HashedFile
from scaletrain_cli.data.pipeline.shards import split_of
from scaletrain_cli.data.sources.rows import Tally
from scaletrain_cli.data.token_files import DTYPES
from scaletrain_cli.data.tokenizers.chat_templates import CHATML_TOKENS, TemplateFiles, template_files
from scaletrain_cli.data.tokenizers.files import train_tokenizer
from scaletrain_cli.data.tokenizers.load import given_tokenizer
from scaletrain_cli.engine.data.chat_tokenizer import ChatTokenizer, Encoded, ImageTokens, image_tokens
from scaletrain_cli.engine.data.dataset import SPLITS, seal_of
from scaletrain_cli.engine.data.row_dataset import PARTS, SCHEMA, RowsInfo, template_hash
from scaletrain_cli.engine.data.row_source import Row, refuse_or_leave_out, rows_of
from scaletrain_cli.engine.data.rows import ImageWriter, StoredImage
from scaletrain_cli.errors import UsageError
from scaletrain_cli.reasons import Reason
from scaletrain_cli.rundir.documents import write_document
from scaletrain_cli.safe_files import create_file
from scaletrain_cli.spec import DataSpec, LlavaSpec, RunSpec
from scaletrain_cli.spec.corpus_files import END_OF_TEXT
from scaletrain_cli.spec.row_examples import IMAGE_MARK, Conversation, Example, Pair, PlainText, RowError
from scaletrain_cli.spec.vision_model import image_channels


class Piece(NamedTuple):
    """Tokens ``start`` to ``stop - 1`` of a document."""

    document: int
    start: int
    stop: int


def pack(lengths: Sequence[int], capacity: int, *, split: bool) -> list[list[Piece]]:
    """Return rows of at most ``capacity`` tokens, each a list of pieces; every token is in exactly one of them.

    The rows are in the order of their first documents, so that the end of a data set is not its shortest rows. Without
    ``split`` every document is one piece; raises ValueError if one is longer than ``capacity``.
    """
    pieces = [
        Piece(document, start, min(start + capacity, length))
        for document, length in enumerate(lengths)
        for start in range(0, length, capacity)
    ]
    if not split and any(piece.start for piece in pieces):
        raise ValueError(f"a document is longer than {capacity} tokens")
    rows = best_fit([piece.stop - piece.start for piece in pieces], capacity)
    return sorted([[pieces[number] for number in row] for row in rows], key=min)


def best_fit(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Return rows of indices: the longest item first, each into the fullest row that has space for it.

    Items of the same length keep their order, and of rows with the same space the oldest is chosen.
    """
    rows: list[list[int]] = []
    with_space: defaultdict[int, deque[int]] = defaultdict(deque)
    spaces = 0  # bit n is set if some row has space for exactly n more tokens
    for index in np.argsort(-np.asarray(lengths, np.int64), kind="stable").tolist():
        length = lengths[index]
        fitting = spaces >> length
        if fitting:
            space = length + (fitting & -fitting).bit_length() - 1
            row = with_space[space].popleft()
            if not with_space[space]:
                spaces ^= 1 << space
        else:
            space, row = capacity, len(rows)
            rows.append([])
        rows[row].append(index)
        if space > length:
            with_space[space - length].append(row)
            spaces |= 1 << (space - length)
    return rows


_ROWS_PER_ENCODE = 256
_BAD_SHOWN = 20


@dataclass
class RowCounts:
    """Numbers of rows read, left out and truncated, and of tokens kept. ``targets``: tokens in the loss."""

    read: int = 0  # without those that cannot be used
    without_target: int = 0  # left out: no token in the loss, or none after truncation
    too_long: int = 0  # left out by data.truncation: drop
    truncated: int = 0
    tokens: int = 0
    targets: int = 0


def tokenizer_of(data: DataSpec, objective: str, most_rows: int | None = None, *, images: bool = False) -> Any:
    """Return the tokenizer of a spec: read from its file, or trained on the rows, at most ``most_rows`` of them.

    ``images``: a trained tokenizer has a token for the place of an image, with the id TRAINED_IMAGE_TOKEN.
    """
    if data.tokenizer.path is not None:
        return given_tokenizer(data.tokenizer)
    rows = islice(rows_of(data, objective, images=images)[1], most_rows)
    texts = (text.replace(IMAGE_MARK, "") if images else text for row in rows for text in _texts_of(row.example))
    special = [END_OF_TEXT, *CHATML_TOKENS, *([IMAGE_MARK] if images else [])]
    return train_tokenizer(texts, data.tokenizer.vocab_size, special)


def chat_tokenizer(spec: RunSpec, tokenizer: Any) -> ChatTokenizer:
    """Return what renders and encodes the rows of a spec. Raises UsageError."""
    images = image_tokens(tokenizer, spec.model) if isinstance(spec.model, LlavaSpec) else None
    return ChatTokenizer(tokenizer, template_files(spec), spec.data, images)


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
    """Encodes and truncates rows, and counts what becomes of them.

    ``lost``: rows whose tokens lack something of them, by its name. ``stops``: ids of the tokens at which turns end,
    which a model learns to write. ``tally``: counts rows that are left out because data.on_bad is skip.
    """

    def __init__(self, tokenizer: ChatTokenizer, data: DataSpec, seq_len: int, tally: Tally | None = None) -> None:
        self._tokenizer, self._data, self._seq_len = tokenizer, data, seq_len
        self._images = tokenizer.images
        self._truncation = "" if data.packing == "best_fit_split" else data.truncation
        self.counts, self.lost, self.tally = RowCounts(), Counter[str](), tally or Tally()
        self.stops = set[int]()

    def encode(self, rows: list[Row]) -> Iterator[tuple[Row, list[Encoded]]]:
        """Yield each row that is kept, with its one document, or its chosen and its rejected answer.

        The first token of a document has weight 0: it is nobody's successor. Raises UsageError.
        """
        encoded = self._tokenizer.encode([(row.example, row.weight) for row in rows])
        for row, documents in zip(rows, encoded, strict=True):
            if isinstance(documents, RowError):
                refuse_or_leave_out(row.where, documents, self._data, self.tally)
            elif (kept := self._kept(row, documents)) is not None:
                self.stops.update(*(document.stops for document in documents))
                lacks = {name for document in documents for name in document.lacks}
                self.lost.update(lacks | {f"column {name}" for name in row.not_read})
                yield row, kept

    def _kept(self, row: Row, documents: list[Encoded]) -> list[Encoded] | None:
        counts = self.counts
        longest = max(len(document.ids) for document in documents)
        cut = self._truncation != "" and longest > self._seq_len
        if cut and self._truncation == "refuse":
            raise UsageError(RowError("row-too-long", tokens=longest, seq_len=self._seq_len).at(row.where))
        counts.read += 1
        if cut and self._truncation == "drop":
            counts.too_long += 1
            return None
        part = slice(-self._seq_len, None) if self._truncation == "keep_end" else slice(self._seq_len)
        if cut and self._images is not None:
            part = slice(self._images.before_a_cut(documents[0].ids, self._seq_len))
        if cut:
            documents = [whole._replace(ids=whole.ids[part], weights=whole.weights[part]) for whole in documents]
        for document in documents:
            document.weights[:1] = 0
        if not all(document.weights.any() for document in documents):
            counts.without_target += 1
            return None
        counts.truncated += cut
        counts.tokens += sum(len(document.ids) for document in documents)
        counts.targets += sum(int(np.count_nonzero(document.weights)) for document in documents)
        return documents


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

    def close(self) -> None:
        for file in self._files:
            file.close()

    def read(self) -> tuple[npt.NDArray[Any], npt.NDArray[np.float32]]:
        """Return tokens and weights of all documents, memory-mapped, after the files were closed."""
        arrays = []
        for path, dtype in zip(self._paths, (self._dtype, "float32"), strict=True):
            arrays.append(np.memmap(path, dtype=dtype, mode="r") if path.stat().st_size else np.empty(0, dtype))
        return arrays[0], arrays[1]

    def remove(self) -> None:
        """Remove the files, which nothing may have mapped: NFS would keep them under other names."""
        for path in self._paths:
            path.unlink()


class _Images:
    """Reads and stores the images of the rows of a LLaVA, and counts rows whose images are bad."""

    def __init__(self, spec: RunSpec, model: LlavaSpec, folder: Path, tokens: ImageTokens) -> None:
        from scaletrain_cli.data.images.decode import BadImageError, MissingImageError  # these need Pillow
        from scaletrain_cli.engine.data.images.reading import read_image

        self._bad, self._missing, self._read = BadImageError, MissingImageError, read_image
        self._skips, self._channels, self._tokens = spec.data.on_bad == "skip", image_channels(model), tokens
        self._writers = {split: ImageWriter(folder, split) for split in SPLITS}
        self.bad: list[str] = []
        self.rows_left_out = 0

    def close(self) -> None:
        for writer in self._writers.values():
            writer.close()

    def usable(self, rows: Iterable[Row]) -> Iterator[tuple[Row, list[StoredImage]]]:
        """Yield the rows with their images. Raises UsageError for a bad one, unless such rows are left out."""
        for row in rows:
            try:
                yield row, [self._read(image, self._channels, decodes=self._skips) for image in row.images]
            except self._bad as error:
                if not self._skips:
                    if isinstance(error, self._missing):
                        missing = RowError("image-missing", place=error.evidence["file"])
                        raise UsageError(missing.at(row.where)) from error
                    raise UsageError(Reason("data.bad-image", {"where": row.where, "problem": error.reason})) from error
                self.rows_left_out += 1
                if len(self.bad) < _BAD_SHOWN:
                    self.bad.append(f"{row.where}: {error.message}")

    def add(self, split: str, document: Encoded, images: Sequence[StoredImage]) -> None:
        """Store the images of a document, without those that were cut off."""
        kept = int((document.ids == self._tokens.id).sum()) // self._tokens.copies
        self._writers[split].add_document(images[:kept])

    def finish(self, split: str, order: Sequence[int]) -> tuple[list[bytes], dict[str, int]]:
        """Write the rest of a split, whose documents are in this order; return the hashes and sizes of its files."""
        return self._writers[split].finish(order)


def build_rows(spec: RunSpec, folder: Path) -> None:
    """Write the rows of a spec below ``folder``. Raises UsageError."""
    with ExitStack() as held:
        _build(spec, folder, held)


def _build(spec: RunSpec, folder: Path, held: ExitStack) -> None:
    data, objective, seq_len = spec.data, spec.training.objective, spec.language_model.seq_len
    is_llava = isinstance(spec.model, LlavaSpec)
    files, tally = template_files(spec), Tally()
    raw = tokenizer_of(data, objective, images=is_llava)
    create_file(folder / "tokenizer.json", raw.to_str(pretty=True))
    if data.tokenizer.path is None:
        for name, content in _beside_a_tokenizer(files, raw).items():
            create_file(folder / name, json.dumps(content, indent=2) + "\n")
    ids, chat = set(raw.get_vocab().values()), chat_tokenizer(spec, raw)
    dtype = DTYPES[max(ids) + 1 > 1 << 16]
    images = None
    if isinstance(spec.model, LlavaSpec):
        assert chat.images is not None
        images = held.enter_context(closing(_Images(spec, spec.model, folder, chat.images)))
        ids.discard(chat.images.id)  # no row of the embedding
    vocab_size = max(ids) + 1
    row_format, rows = rows_of(data, objective, tally, images=is_llava)
    parts = [(rows, data.validation_split)]
    if data.validation_source is not None:
        parts.append((rows_of(data, objective, tally, images=is_llava, validation=True)[1], 1.0))
    encoder = RowEncoder(chat, data, seq_len, tally)
    weighted = False
    with ExitStack() as opened:
        spools = {split: opened.enter_context(closing(_Spool(folder, split, dtype))) for split in SPLITS}
        for rows, validation_share in parts:
            usable = ((row, list[StoredImage]()) for row in rows) if images is None else images.usable(rows)
            while batch := list(islice(usable, _ROWS_PER_ENCODE)):
                of_row = {id(row): stored for row, stored in batch}
                for row, documents in encoder.encode([row for row, _ in batch]):
                    split = split_of(row.key.encode(), validation_share)
                    for document in documents:
                        spools[split].add(document)
                        weighted = weighted or bool(((document.weights != 0) & (document.weights != 1)).any())
                        if images is not None:
                            images.add(split, document, of_row[id(row)])
    counts = encoder.counts
    if not counts.targets:
        params = {"rows": counts.read, "dropped": counts.without_target, "too_long": counts.too_long}
        params |= {"unusable": tally.unusable}
        raise UsageError(Reason("data.nothing-to-train-on", {"source": data.source, "seq_len": seq_len, **params}))
    digest, hashes = hashlib.sha256(), list[bytes]()
    numbers: dict[str, Any] = {}
    for split in SPLITS:
        of_split, sizes, order = _write_split(folder, split, spools[split], data.packing, seq_len, dtype)
        if images is not None:
            of_images, image_sizes = images.finish(split, order)
            of_split, sizes = of_split + of_images, sizes | image_sizes
        hashes += of_split
        digest.update(split.encode() + b"".join(of_split))
        numbers |= {f"{split}_{name}": size for name, size in sizes.items()}
    bad_images = 0 if images is None else images.rows_left_out
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
        rows_read=counts.read + tally.unusable + bad_images,
        rows_without_target=counts.without_target,
        rows_too_long=counts.too_long,
        rows_truncated=counts.truncated,
        targets=counts.targets,
        template_date=data.chat_template_date,
        template=template_hash(files),
        loss_on=data.loss_on,
        truncation=data.truncation,
        chat_template=data.recorded_template(Path()),
        chat_template_kwargs=data.recorded("chat_template_kwargs"),
        fields=data.recorded("fields"),
        rows_unusable=tally.unusable,
        unusable="\n".join(tally.problems),
        lost=json.dumps(encoder.lost, sort_keys=True),
        stop_tokens=",".join(map(str, sorted(encoder.stops))),
        tokens_per_image=0 if chat.images is None else chat.images.copies,
        image_token=0 if chat.images is None else chat.images.id,
        image_folder=data.images.folder or "",
        rows_with_bad_images=bad_images,
        bad_images="" if images is None else "\n".join(images.bad),
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


def _write_split(
    folder: Path, split: str, spool: _Spool, packing: str, seq_len: int, dtype: str
) -> tuple[list[bytes], dict[str, int], list[int]]:
    """Return the hashes and sizes of its files, and the order of the documents by their numbers in the spool."""
    lengths = spool.lengths
    tokens, weights = spool.read()
    starts = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]) if lengths else np.zeros(1, np.int64)
    if packing == "none":
        packed = [[Piece(document, 0, length)] for document, length in enumerate(lengths)]
    else:
        packed = pack(lengths, seq_len, split=packing == "best_fit_split")
    place = documents = rows = 0
    order: list[int] = []
    with ExitStack() as opened:
        files = {part: opened.enter_context(HashedFile(folder / f"{split}.{part}")) for part in PARTS}
        for row in packed:
            cut = [slice(starts[document] + start, starts[document] + stop) for document, start, stop in row]
            own = [weights[span].copy() for span in cut]
            for piece in own:
                piece[0] = 0
            total = float(sum(own_weights.sum(dtype=np.float64) for own_weights in own))
            if not total:  # the middle of a long prompt
                continue
            for piece, its in zip(cut, own, strict=True):
                files["bin"].write(tokens[piece].astype(dtype).tobytes())
                files["weights.bin"].write(its.tobytes())
                place += len(its)
                documents += 1
                files["ends.bin"].write(np.int64(place).tobytes())
            order += [document for document, _, _ in row]
            rows += 1
            files["rows.bin"].write(np.int64(documents).tobytes())
            files["totals.bin"].write(np.float64(total).tobytes())
        hashes = [files[part].finish() for part in PARTS]
    del tokens, weights
    spool.remove()
    return hashes, {"tokens": place, "documents": documents, "rows": rows}, order
