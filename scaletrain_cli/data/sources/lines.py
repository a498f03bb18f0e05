"""Readers of text files: one document per line (jsonl), per group of paragraphs (txt, md), or per file (code).

Places are byte offsets in the decompressed file.
"""

import json
import re
from collections.abc import Iterator
from itertools import pairwise
from typing import IO, Any, NamedTuple

from scaletrain_cli.data.sources.opening import DamagedFileError, opened
from scaletrain_cli.data.sources.records import MAX_DOCUMENT_BYTES, BadRecord, Columns, Part, Record, SourceFile
from scaletrain_cli.reasons import Reason
from scaletrain_cli.spec.corpus_files import FEW_REPLACED, MOST_REPLACED

# A long file of prose is split into documents of whole paragraphs of this many bytes, about 4,000 tokens.
_PROSE_BYTES = 1 << 14
_CODE_BYTES = 1 << 20
_UNDECODED = re.compile("[\udc80-\udcff]")
_LONE_SURROGATES = re.compile("[\ud800-\udfff]")
_BOM = b"\xef\xbb\xbf"
_UTF_16_BOMS = (b"\xff\xfe", b"\xfe\xff")
_JSON_TYPES = {bool: "true or false", int: "a number", float: "a number", list: "a list", dict: "an object"}
_BLOCK = 1 << 20
_NO_END = 1 << 62


class _Line(NamedTuple):
    place: int
    content: bytes  # with its line end; empty for a line that is too long


def _lines(file: IO[bytes], part: Part, *, beyond: bool = False) -> Iterator[_Line]:
    """Yield the lines that begin within a part; ``beyond``: and those after it, unless none begins within the part.

    Holds no more than MAX_DOCUMENT_BYTES of a line in memory. A part in the middle of a long line reads no more of it
    than lies in the part.
    """
    place = part.start
    if place:
        file.seek(place - 1)
        place += _skip_line(file, part.stop - place) - 1
        if place >= part.stop:
            return
    while (beyond or place < part.stop) and (content := file.readline(MAX_DOCUMENT_BYTES + 1)):
        length = len(content)
        if length > MAX_DOCUMENT_BYTES and not content.endswith(b"\n"):
            content, length = b"", length + _skip_line(file)
        yield _Line(place, content)
        place += length


def _skip_line(file: IO[bytes], most: int = _NO_END) -> int:
    """Read to the end of the line; return the number of bytes, more than ``most`` if it does not end within them."""
    total = 0
    while content := file.readline(min(_BLOCK, most - total + 1)):
        total += len(content)
        if content.endswith(b"\n"):
            break
    return total


def decoded(content: bytes) -> tuple[str, Reason | None]:
    """Return the text of UTF-8 bytes, a few invalid ones of which become U+FFFD; and why it is not text at all."""
    try:
        return content.decode("utf-8"), None
    except UnicodeDecodeError:
        if content.startswith(_UTF_16_BOMS) and b"\0" in content:
            return "", Reason("sources.utf-16")
        text, replaced = _UNDECODED.subn("\ufffd", content.decode("utf-8", "surrogateescape"))
    if replaced > max(FEW_REPLACED, MOST_REPLACED * len(text)):
        return "", Reason("sources.not-utf-8", {"replaced": replaced, "characters": len(text)})
    return text, None


class TextReader:
    """The base of readers of text files. A compressed file is one part."""

    def parts(self, file: SourceFile, part_bytes: int) -> Iterator[tuple[int, int]]:
        if file.compression:
            yield 0, _NO_END
            return
        count = max(1, file.size // part_bytes)
        yield from pairwise([file.size * number // count for number in range(count + 1)])

    def records(self, part: Part) -> Iterator[Record | BadRecord]:
        place = part.start
        try:
            with opened(part.file) as file:
                for record in self.records_in(file, part):
                    place = record.place
                    yield record
        except DamagedFileError as error:
            yield BadRecord(place, error.reason)

    def records_in(self, file: IO[bytes], part: Part) -> Iterator[Record | BadRecord]:
        """Yield the documents of a part of a decompressed file."""
        raise NotImplementedError

    def place_text(self, file: SourceFile, place: int) -> str:
        """Return ``path:line``."""
        line, left = 1, place
        try:
            with opened(file) as stream:
                while left and (block := stream.read(min(left, _BLOCK))):
                    line += block.count(b"\n")
                    left -= len(block)
        except DamagedFileError:
            pass  # the line at which the damage begins
        return f"{file.path}:{line}"


class JsonLines(TextReader):
    """One JSON object per line."""

    def records_in(self, file: IO[bytes], part: Part) -> Iterator[Record | BadRecord]:
        for place, content in _lines(file, part):
            if not content:
                yield BadRecord(place, Reason("sources.too-long", {"bytes": MAX_DOCUMENT_BYTES}))
            elif stripped := (content.removeprefix(_BOM) if place == 0 else content).strip():
                yield _row(place, stripped, part.columns)


def _row(place: int, content: bytes, columns: Columns) -> Record | BadRecord:
    line, problem = decoded(content)
    if problem is not None:
        return BadRecord(place, problem)
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        return BadRecord(place, Reason("sources.not-json", {"error": error.msg, "character": error.pos + 1}))
    except RecursionError:
        return BadRecord(place, Reason("sources.json-unreadable", {"error": "it is nested too deeply"}))
    except ValueError as error:
        return BadRecord(place, Reason("sources.json-unreadable", {"error": str(error)}))
    return record_of(place, row, columns)


def record_of(place: int, row: Any, columns: Columns) -> Record | BadRecord:
    """Return the document of a row of any format; lone surrogates, which JSON can contain, become U+FFFD."""
    if not isinstance(row, dict):
        return BadRecord(place, Reason("sources.not-an-object"))
    if columns.text not in row:
        return BadRecord(place, Reason("sources.no-field", {"field": columns.text, "columns": list(row)[:20]}))
    text = row[columns.text]
    if not isinstance(text, str):
        kind = "null" if text is None else _JSON_TYPES.get(type(text), type(text).__name__)
        return BadRecord(place, Reason("sources.not-text", {"field": columns.text, "type": kind}))
    text = text if text.isascii() else _LONE_SURROGATES.sub("\ufffd", text)
    if not text.strip():
        return BadRecord(place, Reason("sources.empty"))
    if missing := [name for name in columns.others if name not in row]:
        return BadRecord(place, Reason("sources.no-column", {"column": missing[0], "columns": list(row)[:20]}))
    return Record(place, text, {name: row[name] for name in columns.others})


class Prose(TextReader):
    """Documents of whole paragraphs: each ends at the first blank line after _PROSE_BYTES.

    A part begins after the first blank line in its range, and ends with the first one after it.
    """

    def records_in(self, file: IO[bytes], part: Part) -> Iterator[Record | BadRecord]:
        lines = _lines(file, part, beyond=True)
        if part.start:
            border = next((line for line in lines if line.place >= part.stop or not line.content.strip()), None)
            if border is None or border.place >= part.stop:
                return
        held: list[_Line] = []
        size = 0
        for line in lines:
            held.append(line)
            size += len(line.content)
            between_paragraphs = not line.content.strip()
            ends = between_paragraphs and line.place >= part.stop
            if ends or size >= (_PROSE_BYTES if between_paragraphs else _CODE_BYTES):
                yield from _document(held)
                held, size = [], 0
            if ends:
                return
        yield from _document(held)


class Code(TextReader):
    """One document per file; a file of more than _CODE_BYTES becomes several, of whole lines."""

    def parts(self, file: SourceFile, part_bytes: int) -> Iterator[tuple[int, int]]:
        yield 0, _NO_END

    def records_in(self, file: IO[bytes], part: Part) -> Iterator[Record | BadRecord]:
        held: list[_Line] = []
        size = 0
        for line in _lines(file, part):
            held.append(line)
            size += len(line.content)
            if size >= _CODE_BYTES:
                yield from _document(held)
                held, size = [], 0
        yield from _document(held)


def _document(lines: list[_Line]) -> Iterator[Record | BadRecord]:
    """Yield the document of some lines, unless it is blank."""
    too_long = next((number for number, line in enumerate(lines) if not line.content), None)
    if too_long is not None:
        yield from _document(lines[:too_long])
        yield BadRecord(lines[too_long].place, Reason("sources.too-long", {"bytes": MAX_DOCUMENT_BYTES}))
        yield from _document(lines[too_long + 1 :])
        return
    content = b"".join(line.content for line in lines)
    if not content.strip():
        return
    place = lines[0].place
    text, problem = decoded(content.removeprefix(_BOM) if place == 0 else content)
    if problem is None and "\0" in text:
        problem = Reason("sources.binary")
    yield BadRecord(place, problem) if problem else Record(place, text.replace("\r\n", "\n"))
