"""Rows of tokens for fine-tuning: one or several documents each, with the weight of every token in the loss.

Their images on disk: the bytes of each distinct image once, and the images of each document.
"""

import hashlib
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from scaletrain_cli.data.chunk_hashes import CheckedFile, HashedFile
from scaletrain_cli.engine.data.dataset import Joined, map_numbers

# The files of a split: the bytes of all images and their places in the source (UTF-8), one after another; of each image
# the ends of its bytes and of its place; the numbers of the images of all documents, in order; and how many of these
# numbers there are up to and including each document.
_CONTENTS, _PLACES, _ENDS = "images.bin", "images.places.bin", "images.ends.bin"
_NUMBERS, _DOCUMENTS = "images.numbers.bin", "images.documents.bin"
LARGE_FILES = 2  # the first ones, which are compared with their hashes when they are read
_DIGEST_BYTES = 16


class StoredImage(NamedTuple):
    """The bytes of an image file, and where the source had it."""

    content: bytes
    place: str


@dataclass(frozen=True)
class RowImages:
    """The images of the documents of one split. ``ends``: [images, 2], of the bytes and of the place of each image.

    ``files``: compare the five arrays with their hashes, in their order.
    """

    contents: npt.NDArray[np.uint8]
    places: npt.NDArray[np.uint8]
    ends: npt.NDArray[np.int64]
    numbers: npt.NDArray[np.int64]
    documents: npt.NDArray[np.int64]
    files: tuple[CheckedFile, ...]

    def of_documents(self, first: int, stop: int) -> npt.NDArray[np.int64]:
        """Return the numbers of the images of documents ``first`` to ``stop - 1``, in the order of their tokens."""
        start = int(self.documents[first - 1]) if first else 0
        return np.asarray(self.numbers[start : int(self.documents[stop - 1])])

    def read(self, number: int) -> StoredImage:
        """Return an image by its number. Raises CorruptDataError if its bytes have changed since they were written."""
        starts = self.ends[number - 1] if number else (0, 0)
        stops = self.ends[number]
        parts = []
        for values, file, start, stop in zip((self.contents, self.places), self.files, starts, stops, strict=False):
            file.check(int(start), int(stop))
            parts.append(values[int(start) : int(stop)].tobytes())
        return StoredImage(parts[0], parts[1].decode("utf-8", "replace"))


class ImageWriter:
    """Writes the images of a split. Memory: about 150 bytes for each distinct image, and 16 for each document."""

    def __init__(self, folder: Path, split: str) -> None:
        self._path = folder, split
        self._files = {name: self._file(name) for name in (_CONTENTS, _PLACES, _ENDS)}
        self._known: dict[bytes, int] = {}
        self._sizes = [0, 0]
        self._numbers = array("q")
        self._ends = array("q")

    def _file(self, name: str) -> HashedFile:
        folder, split = self._path
        return HashedFile(folder / f"{split}.{name}")

    def close(self) -> None:
        """Close the files, also those of a split that is not finished."""
        for file in self._files.values():
            file.__exit__()

    def add_document(self, images: Sequence[StoredImage]) -> None:
        """Store the images of the next document, of which those that are there already are not written again."""
        for image in images:
            digest = hashlib.blake2b(image.content, digest_size=_DIGEST_BYTES).digest()
            if (number := self._known.get(digest)) is None:
                number = self._known[digest] = len(self._known)
                for part, (name, content) in enumerate(((_CONTENTS, image.content), (_PLACES, image.place.encode()))):
                    self._files[name].write(content)
                    self._sizes[part] += len(content)
                self._files[_ENDS].write(np.array(self._sizes, np.int64).tobytes())
            self._numbers.append(number)
        self._ends.append(len(self._numbers))

    def finish(self, order: Sequence[int]) -> tuple[list[bytes], dict[str, int]]:
        """Write the images of the documents in ``order``; return the hashes of the five files and their sizes."""
        used = 0
        with self._file(_NUMBERS) as numbers, self._file(_DOCUMENTS) as documents:
            for document in order:
                start = self._ends[document - 1] if document else 0
                own = self._numbers[start : self._ends[document]]
                numbers.write(own.tobytes())
                used += len(own)
                documents.write(np.int64(used).tobytes())
            hashes = [file.finish() for file in (*self._files.values(), numbers, documents)]
        sizes = {"images": len(self._known), "image_bytes": self._sizes[0], "image_place_bytes": self._sizes[1]}
        return hashes, sizes | {"image_uses": used}


def open_row_images(folder: Path, split: str, sizes: Mapping[str, int], documents: int) -> RowImages:
    """Return the images of a split. ``sizes``: as ``ImageWriter.finish`` returns them. Raises CorruptDataError."""
    expected = {
        _CONTENTS: ("uint8", sizes["image_bytes"]),
        _PLACES: ("uint8", sizes["image_place_bytes"]),
        _ENDS: ("int64", 2 * sizes["images"]),
        _NUMBERS: ("int64", sizes["image_uses"]),
        _DOCUMENTS: ("int64", documents),
    }
    paths = [folder / f"{split}.{name}" for name in expected]
    mapped = [map_numbers(path, dtype, count) for path, (dtype, count) in zip(paths, expected.values(), strict=True)]
    files = tuple(CheckedFile(path, values.view(np.uint8)) for path, values in zip(paths, mapped, strict=True))
    return RowImages(mapped[0], mapped[1], mapped[2].reshape(-1, 2), mapped[3], mapped[4], files)


NOT_COUNTED = -100  # ignore_index of torch.nn.functional.cross_entropy
PADDING_DOCUMENT = -1


class Rows(NamedTuple):
    """Rows of one micro-batch, each an array [rows, length].

    tokens: int64, 0 in the padding. labels: int64, the next token of the same document, -100 where it does not count.
    weights: fp32, weight of each label, 0 where it does not count; None if all others are 1. documents: int64, number
    of the document in its row, -1 for padding; positions: int64, within the document. Both are None where each row is
    one document. real: bool, False in the padding. images: numbers of all images in the order of their tokens; None:
    the rows of the model have none.
    """

    tokens: npt.NDArray[np.int64]
    labels: npt.NDArray[np.int64]
    weights: npt.NDArray[np.float32] | None
    documents: npt.NDArray[np.int64] | None
    positions: npt.NDArray[np.int64] | None
    real: npt.NDArray[np.bool_]
    images: npt.NDArray[np.int64] | None = None


@dataclass(frozen=True)
class RowSequences:
    """Rows of at most ``seq_len`` tokens of one split; ``read`` pads them to this length, or to a shorter one.

    ``tokens``, ``weights``: of all documents in order; the first token of a document has weight 0. ``document_ends``:
    index after the last token of each document. ``row_ends``: number of documents up to and including each row.
    ``totals``: sum of the weights of each row, fp64. ``pairs``: rows 2 i and 2 i + 1 are the chosen and the rejected
    answer of pair i, and the length is the number of pairs. ``packed``: a row may have several documents.
    ``weighted``: some weights are neither 0 nor 1. ``files``: compare tokens and weights with their hashes.
    ``images``: those of the documents; None: the rows of the model have none.
    """

    tokens: npt.NDArray[np.unsignedinteger]
    weights: npt.NDArray[np.float32]
    document_ends: npt.NDArray[np.int64]
    row_ends: npt.NDArray[np.int64]
    totals: npt.NDArray[np.float64]
    seq_len: int
    pairs: bool = False
    packed: bool = False
    weighted: bool = False
    files: tuple[CheckedFile, CheckedFile] | None = None
    first: int = 0
    count: int | None = None  # number of rows or pairs from ``first`` on; None for all
    images: RowImages | None = None

    def __len__(self) -> int:
        return len(self.row_ends) // (2 if self.pairs else 1) - self.first if self.count is None else self.count

    def part(self, first: int, count: int) -> "RowSequences":
        return replace(self, first=self.first + first, count=count)

    def total_weight(self, indices: Sequence[int]) -> float:
        """Return the sum of the weights of these rows or pairs."""
        return float(self.totals[self._rows(indices)].sum())

    def longest(self, indices: Sequence[int]) -> int:
        """Return the tokens of the longest of these rows, or of the answers of these pairs."""
        rows = self._rows(indices)
        ends = self.document_ends[self.row_ends[rows] - 1]
        return int(max(end - self._start(row) for end, row in zip(ends, rows, strict=True)))

    def images_of(self, index: int) -> list[StoredImage]:
        """Return the images of a row, in the order of their tokens. Raises CorruptDataError."""
        if self.images is None:
            return []
        return [self.images.read(int(number)) for number in self._image_numbers(index + self.first)]

    def _image_numbers(self, row: int) -> npt.NDArray[np.int64]:
        assert self.images is not None
        return self.images.of_documents(int(self.row_ends[row - 1]) if row else 0, int(self.row_ends[row]))

    def read(self, indices: Sequence[int], length: int | None = None) -> Rows:
        """Return these rows, or the chosen answers of these pairs and then the rejected ones.

        ``length``: at least that of the longest row; None for ``seq_len``. Raises CorruptDataError if a file has
        changed since it was written.
        """
        shape = (len(indices) * (2 if self.pairs else 1), length or self.seq_len)
        tokens, labels = np.zeros(shape, np.int64), np.full(shape, NOT_COUNTED, np.int64)
        weights = np.zeros(shape, np.float32)
        documents, positions = np.full(shape, PADDING_DOCUMENT, np.int64), np.zeros(shape, np.int64)
        images: list[npt.NDArray[np.int64]] = []
        for place, row in enumerate(self._rows(indices)):
            if self.images is not None:
                images.append(self._image_numbers(int(row)))
            ends = self.document_ends[self.row_ends[row - 1] if row else 0 : self.row_ends[row]]
            base = self._start(row)
            stop = int(ends[-1])
            for file, values in zip(self.files or (), (self.tokens, self.weights), strict=False):
                file.check(base * values.itemsize, stop * values.itemsize)
            count = stop - base
            tokens[place, :count] = self.tokens[base:stop]
            weights[place, : count - 1] = self.weights[base + 1 : stop]  # 0 where the next document starts
            starts = np.concatenate([[0], ends[:-1] - base])
            number = np.repeat(np.arange(len(ends)), np.diff(np.append(starts, count)))
            documents[place, :count] = number
            positions[place, :count] = np.arange(count) - starts[number]
        counted = weights[:, :-1] > 0
        labels[:, :-1][counted] = tokens[:, 1:][counted]
        return Rows(
            tokens,
            labels,
            weights if self.weighted else None,
            documents if self.packed else None,
            positions if self.packed else None,
            documents != PADDING_DOCUMENT,
            None if self.images is None else np.concatenate(images),
        )

    def _rows(self, indices: Sequence[int]) -> npt.NDArray[np.int64]:
        numbers = np.asarray(indices, np.int64) + self.first
        return np.concatenate([2 * numbers, 2 * numbers + 1]) if self.pairs else numbers

    def _start(self, row: int) -> int:
        """Return the index of the first token of a row."""
        before = int(self.row_ends[row - 1]) if row else 0
        return int(self.document_ends[before - 1]) if before else 0


@dataclass(frozen=True)
class JoinedRows(Joined):
    """The rows or pairs of several sources, in the order of Joined."""

    sources: tuple[RowSequences, ...]
    images, first = None, 0  # of no source

    @classmethod
    def of(cls, sources: Sequence[RowSequences]) -> "JoinedRows":
        """Return sources that read rows alike: with weights and documents if one of them has some."""
        weighted, packed = (any(getattr(source, name) for source in sources) for name in ("weighted", "packed"))
        return cls(tuple(replace(source, weighted=weighted, packed=packed) for source in sources))

    @property
    def seq_len(self) -> int:
        """The most tokens of a row, the same in all sources."""
        return self.sources[0].seq_len

    @property
    def pairs(self) -> bool:
        return self.sources[0].pairs

    @property
    def weighted(self) -> bool:
        return self.sources[0].weighted

    def total_weight(self, indices: Sequence[int]) -> float:
        return float(sum(source.total_weight(own) for source, _, own in self.by_source(indices)))

    def longest(self, indices: Sequence[int]) -> int:
        return int(max(source.longest(own) for source, _, own in self.by_source(indices)))

    def read(self, indices: Sequence[int], length: int | None = None) -> Rows:
        """Return these rows or pairs in the order of ``indices``, as RowSequences does. Raises CorruptDataError."""
        parts = [(places, source.read(own, length)) for source, places, own in self.by_source(indices)]
        # all rejected answers follow all chosen ones
        copies = (0, len(indices)) if self.pairs else (0,)
        order = np.argsort(np.concatenate([places + offset for places, _ in parts for offset in copies]))
        columns = zip(*(rows for _, rows in parts), strict=True)
        joined: list[Any] = [None if column[0] is None else np.concatenate(column)[order] for column in columns]
        return Rows(*joined)


RowSamples = RowSequences | JoinedRows
