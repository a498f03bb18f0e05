"""Read the files that wandb writes offline."""

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def offline_rows(file: Path) -> Iterator[dict[str, Any]]:
    """Yield the logged rows of an offline file, which ``wandb sync`` sends in this order."""
    from wandb.proto.wandb_internal_pb2 import Record

    for data in _leveldb_records(file.read_bytes()):
        record = Record()
        record.ParseFromString(data)
        if record.history.item:
            yield {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}


def _leveldb_records(text: bytes) -> Iterator[bytes]:
    """Yield the records of a file in LevelDB's log format, which begins with seven bytes of wandb's own."""
    place, parts = 7, b""
    while place + 7 <= len(text):
        if 32768 - place % 32768 < 7:  # the rest of a block that is too short for a header
            place += 32768 - place % 32768
            continue
        length, kind = struct.unpack_from("<HB", text, place + 4)
        parts += text[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield parts
            parts = b""
