"""Tokens on disk: built once from a corpus, then read as memory-mapped sequences. Knows nothing of ranks or steps."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from scaletrain_cli.engine.corpus import corpus_identity, documents
from scaletrain_cli.errors import UsageError
from scaletrain_cli.rundir.documents import write_document
from scaletrain_cli.spec import DataSpec

_SCHEMA = "scaletrain.dataset/v2"
_SPLITS = ("train", "validation")
_END_OF_TEXT = "<|endoftext|>"
# In tokenizers that others trained: GPT-2, Llama 3, Llama 2 and Mistral, Qwen.
_ENDS_OF_TEXT = (_END_OF_TEXT, "<|end_of_text|>", "</s>", "<|im_end|>", "<eos>")
# A tokenizer learns no more from more text, and needs memory in proportion.
_MOST_CHARACTERS_TO_LEARN_FROM = 500_000_000
_DOCUMENTS_PER_ENCODE = 256


@dataclass(frozen=True)
class DatasetInfo:
    """dataset.json: what the token files hold. ``fingerprint`` is the SHA-256 of all tokens.

    Beside ``train.bin`` and ``validation.bin`` stand ``train.ends.bin`` and ``validation.ends.bin``: where in them each
    document ends, as int64.
    """

    schema: str
    fingerprint: str
    dtype: str
    vocab_size: int
    documents: int
    train_tokens: int
    validation_tokens: int
    train_documents: int
    validation_documents: int


@dataclass(frozen=True)
class TokenSequences:
    """Non-overlapping sequences of ``seq_len`` tokens and their successors, from one token file.

    ``document_ends``: indices into ``tokens`` of the last token of each document, ascending.
    """

    tokens: npt.NDArray[np.unsignedinteger]
    seq_len: int
    document_ends: npt.NDArray[np.int64]

    def __len__(self) -> int:
        return max(0, (len(self.tokens) - 1) // self.seq_len)

    def rows(self, indices: list[int]) -> npt.NDArray[np.int64]:
        """Sequences as [len(indices), seq_len + 1]: inputs are [:, :-1], labels [:, 1:]."""
        starts = (index * self.seq_len for index in indices)
        return np.stack([self.tokens[start : start + self.seq_len + 1] for start in starts]).astype(np.int64)

    def document_ends_within(self, first: int, last: int) -> npt.NDArray[np.int64]:
        """Document ends among the inputs of sequences ``first`` to ``last - 1``, counted from the first one's start.

        What such a token is followed by, its label, is the first token of another document.
        """
        start, stop = first * self.seq_len, last * self.seq_len
        low, high = np.searchsorted(self.document_ends, (start, stop))
        return self.document_ends[low:high] - start


def open_dataset(folder: Path, seq_len: int) -> tuple[DatasetInfo, TokenSequences, TokenSequences]:
    """Info, training and validation sequences of a prepared dataset. Raises UsageError."""
    try:
        info = DatasetInfo(**json.loads((folder / "dataset.json").read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise UsageError(f"{folder} is not a prepared dataset: {error}") from error
    train = _sequences(folder, "train", info.dtype, info.train_tokens, info.train_documents, seq_len)
    validation = _sequences(
        folder, "validation", info.dtype, info.validation_tokens, info.validation_documents, seq_len
    )
    if not len(train):
        raise UsageError(f"{folder} holds {info.train_tokens} training tokens, fewer than one sequence of {seq_len}.")
    return info, train, validation


def _sequences(folder: Path, split: str, dtype: str, tokens: int, documents: int, seq_len: int) -> TokenSequences:
    ends = _map(folder / f"{split}.ends.bin", "int64", documents)
    return TokenSequences(_map(folder / f"{split}.bin", dtype, tokens), seq_len, ends)


def _map(path: Path, dtype: str, count: int) -> npt.NDArray[Any]:
    """The numbers in a file without reading it; an empty file cannot be mapped. Raises UsageError for a damaged one."""
    found = path.stat().st_size // np.dtype(dtype).itemsize if path.exists() else 0
    if found != count:
        raise UsageError(f"{path} holds {found} numbers and dataset.json says {count}. Prepare the dataset again.")
    return np.memmap(path, dtype=dtype, mode="r") if count else np.empty(0, dtype=dtype)


def dataset_folder(data: DataSpec, runs_root: Path) -> Path:
    """Where the prepared form of ``data`` is, or will be: the source itself if it is one, else under the runs root."""
    if (Path(data.source) / "dataset.json").is_file():
        return Path(data.source)
    tokenizer = data.tokenizer.model_dump_json()
    if data.tokenizer.path is not None:
        tokenizer = hashlib.sha256(_tokenizer_file(data.tokenizer.path)).hexdigest()
    identity = [_SCHEMA, *corpus_identity(data.source), tokenizer, repr(data.validation_split)]
    key = hashlib.sha256("\n".join(identity).encode()).hexdigest()[:16]
    return runs_root / "datasets" / key


def prepare_dataset(data: DataSpec, runs_root: Path) -> Path:
    """Build the dataset unless it is there; safe against a second builder. Returns its folder. Raises UsageError."""
    folder = dataset_folder(data, runs_root)
    if (folder / "dataset.json").is_file():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with (folder.parent / f"{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "dataset.json").is_file():
            staging = folder.with_suffix(".tmp")
            shutil.rmtree(staging, ignore_errors=True)
            staging.mkdir()
            _build(data, staging)
            staging.rename(folder)
    return folder


def _build(data: DataSpec, folder: Path) -> None:
    from tokenizers import Tokenizer

    if data.tokenizer.path is not None:
        tokenizer = Tokenizer.from_buffer(_tokenizer_file(data.tokenizer.path))
        tokenizer.no_truncation()
        tokenizer.no_padding()
    else:
        tokenizer = _train_tokenizer(data)
    tokenizer.save(str(folder / "tokenizer.json"))
    vocab_size = max(tokenizer.get_vocab().values()) + 1  # ids may have gaps
    known = (tokenizer.token_to_id(name) for name in _ENDS_OF_TEXT)
    end_of_text = next((token for token in known if token is not None), None)
    if end_of_text is None:
        raise UsageError(
            f"{data.tokenizer.path} has no token that ends a document; one of {', '.join(_ENDS_OF_TEXT)} is needed."
        )
    dtype = "uint16" if vocab_size <= 1 << 16 else "uint32"
    counts, ended = dict.fromkeys(_SPLITS, 0), dict.fromkeys(_SPLITS, 0)
    digest = hashlib.sha256()
    with ExitStack() as opened:
        files = {split: opened.enter_context((folder / f"{split}.bin").open("wb")) for split in _SPLITS}
        ends = {split: opened.enter_context((folder / f"{split}.ends.bin").open("wb")) for split in _SPLITS}
        for texts in _batched(documents(data.source), _DOCUMENTS_PER_ENCODE):
            for text, encoded in zip(texts, tokenizer.encode_batch(texts), strict=True):
                split = "validation" if _draw(text) < data.validation_split else "train"
                ids = [*encoded.ids, end_of_text]
                packed = np.asarray(ids, dtype=dtype).tobytes()
                files[split].write(packed)
                digest.update(split.encode() + packed)
                counts[split] += len(ids)
                ends[split].write(np.int64(counts[split] - 1).tobytes())
                ended[split] += 1
        for file in (*files.values(), *ends.values()):
            file.flush()
            os.fsync(file.fileno())
    info = DatasetInfo(
        schema=_SCHEMA,
        fingerprint=digest.hexdigest(),
        dtype=dtype,
        vocab_size=vocab_size,
        documents=sum(ended.values()),
        train_tokens=counts["train"],
        validation_tokens=counts["validation"],
        train_documents=ended["train"],
        validation_documents=ended["validation"],
    )
    write_document(folder / "dataset.json", asdict(info))


def _train_tokenizer(data: DataSpec) -> Any:
    """Byte-level BPE (GPT-2 report, section 2.2) on the corpus itself."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=data.tokenizer.vocab_size,
        special_tokens=[_END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_beginning(documents(data.source)), trainer)
    return tokenizer


def _beginning(texts: Iterator[str]) -> Iterator[str]:
    total = 0
    for text in texts:
        yield text
        total += len(text)
        if total > _MOST_CHARACTERS_TO_LEARN_FROM:
            return


def _tokenizer_file(path: str) -> bytes:
    try:
        return Path(path).expanduser().read_bytes()
    except OSError as error:
        raise UsageError(
            f"data.tokenizer.path = {path}: {error.strerror}. Give a Hugging Face tokenizer.json."
        ) from error


def _draw(text: str) -> float:
    """A number in [0, 1) that depends on the document alone, so that its split never changes."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") / 2**64


def _batched(items: Iterator[str], size: int) -> Iterator[list[str]]:
    while batch := list(islice(items, size)):
        yield batch
