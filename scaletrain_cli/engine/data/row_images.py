"""The images of prepared rows on disk: the bytes of each distinct image once, and the images of each document."""

import hashlib
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from scaletrain_cli.data.chunk_hashes import CheckedFile, HashedFile
from scaletrain_cli.engine.data.dataset import map_numbers

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
        found = []
        for values, file, start, stop in zip((self.contents, self.places), self.files, starts, stops, strict=False):
            file.check(int(start), int(stop))
            found.append(values[int(start) : int(stop)].tobytes())
        return StoredImage(found[0], found[1].decode("utf-8", "replace"))


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
