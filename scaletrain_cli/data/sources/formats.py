"""The readers of source files, by format. A new format is an entry here, its reader, and its suffix in the spec."""

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
# Formats whose files hold tokens, not text.
TOKEN_FORMATS = ("megatron", "npy", "raw_uint16", "raw_uint32")


def reader_of(file: SourceFile) -> Reader:
    """Return the reader of a file whose format is known."""
    return READERS[file.kind]
