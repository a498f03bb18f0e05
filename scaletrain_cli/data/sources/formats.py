"""The formats of source files, by name and by suffix. A new format is one entry here and its reader."""

from __future__ import annotations

from scaletrain_cli.data.sources.lines import Code, JsonLines, Prose
from scaletrain_cli.data.sources.records import Reader, SourceFile
from scaletrain_cli.data.sources.tables import Arrow, Parquet
from scaletrain_cli.data.sources.tokens import Megatron, TokenArray

READERS: dict[str, Reader] = {
    "txt": Prose(),
    "md": Prose(),
    "code": Code(),
    "jsonl": JsonLines(),
    "parquet": Parquet(),
    "arrow": Arrow(),
    "megatron": Megatron(),
    "npy": TokenArray(),
    "raw_uint16": TokenArray("uint16"),
    "raw_uint32": TokenArray("uint32"),
}
# The format of a file by its suffix, where it is not the suffix itself.
_BY_SUFFIX = {"py": "code", "ndjson": "jsonl", "text": "txt", "idx": "megatron", "bin": "megatron"}
COMPRESSIONS = ("gz", "zst")
# Formats whose files are text, which may be compressed.
COMPRESSIBLE = ("txt", "md", "code", "jsonl")


def format_by_name(path: str, named: str = "auto") -> tuple[str, str]:
    """Return (format, compression) of a file; an empty format if the suffix is unknown. ``named``: by the user."""
    suffixes = path.rsplit("/", 1)[-1].lower().split(".")[1:]
    compression = suffixes.pop() if suffixes and suffixes[-1] in COMPRESSIONS else ""
    kind = named
    if named == "auto":
        suffix = suffixes[-1] if suffixes else ""
        kind = _BY_SUFFIX.get(suffix, suffix)
    if kind not in READERS or (compression and kind not in COMPRESSIBLE):
        kind = ""
    return kind, compression


def reader_of(file: SourceFile) -> Reader:
    """Return the reader of a file whose format is known."""
    return READERS[file.kind]
