"""The readers of source files, by format. A new format is an entry here, its reader, and its suffix in the spec."""

from scaletrain_cli.data.sources.lines import Code, JsonLines, Prose
from scaletrain_cli.data.sources.records import Reader, SourceFile
from scaletrain_cli.data.sources.tables import Arrow, Parquet

_TEXT: dict[str, Reader] = {
    "txt": Prose(),
    "md": Prose(),
    "code": Code(),
    "jsonl": JsonLines(),
    "parquet": Parquet(),
    "arrow": Arrow(),
}
# Formats whose files hold tokens, not text.
TOKEN_FORMATS = ("megatron", "npy", "raw_uint16", "raw_uint32")


def reader_of(file: SourceFile) -> Reader:
    if file.kind not in TOKEN_FORMATS:
        return _TEXT[file.kind]
    # It loads numpy, which takes as long as the rest of a command on text.
    from scaletrain_cli.data.sources.token_formats import Megatron, TokenArray

    return (
        Megatron() if file.kind == "megatron" else TokenArray(None if file.kind == "npy" else file.kind[len("raw_") :])
    )
