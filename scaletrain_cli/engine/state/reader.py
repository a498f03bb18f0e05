"""The state in a checkpoint's files, piece by piece, whatever layout saved it. Knows no engine."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from scaletrain_cli.engine.state.pieces import Piece, overlaps
from scaletrain_cli.engine.state.shard_file import ShardFile
from scaletrain_cli.errors import ScaletrainError, UsageError

OPAQUE = "opaque"
RANDOM = "random"
_SHARD = re.compile(r"rank-\d{5,}\.safetensors")


def shard_name(rank: int) -> str:
    """Of the file that a rank writes."""
    return f"rank-{rank:05d}.safetensors"


class StateReader:
    """Reads a rank's own file alone where the layout is the one that saved it, else whatever files have its pieces."""

    def __init__(self, folder: Path, rank: int, owned: Sequence[Piece], files: Collection[str]) -> None:
        """``owned``: what the rank would save itself in the layout that it has now.

        ``files``: the names in the manifest. Others in the folder belong to no checkpoint and are never read.
        """
        self._folder, self._own = folder, None
        self._shards = sorted(name for name in files if _SHARD.fullmatch(name))
        if shard_name(rank) in self._shards:
            own = ShardFile(folder / shard_name(rank))
            self._own = own if own.header.pieces == {piece.name: piece for piece in owned} else None
        self.counts = dict((self._own or self._files[0]).header.counts)

    def random_state(self) -> Tensor | None:
        """Of the rank with this number, where the layout is the same."""
        return None if self._own is None or RANDOM not in self._own.keys else self._own.read(RANDOM)

    @cached_property
    def kinds(self) -> set[str]:
        """Of values that are one per element of a matrix."""
        files = [self._own] if self._own is not None and self._own.header.pieces else self._files
        return {key.partition("/")[0] for file in files for key in file.keys} - {OPAQUE, RANDOM}

    @property
    def shapes(self) -> dict[str, torch.Size]:
        """Every matrix in the checkpoint, whole."""
        return {name: torch.Size(pieces[0][1].whole_shape) for name, pieces in sorted(self._index.items())}

    def read(self, kind: str, piece: Piece) -> Tensor:
        """The values of a piece, flat, as saved. Raises ScaletrainError where the files do not have all of it."""
        key, found, values = f"{kind}/{piece.name}", 0, torch.zeros(piece.numel)
        for file, saved in self._sources(piece):
            shared = list(overlaps(saved, piece))
            if not shared:
                continue
            first = min(overlap.at_first for overlap in shared)
            last = max(overlap.at_first + overlap.length for overlap in shared)
            stored = file.read(key, first, last)
            for there, here, length in shared:
                values[here : here + length] = stored[there - first : there - first + length]
                found += length
        if found != piece.numel:
            raise ScaletrainError(f"{self._folder.name} has {found} of {piece.numel} values of {key}")
        return values

    def opaque(self, holder: int) -> dict[str, Tensor]:
        """States of a holder that no other layout can read. Raises UsageError where this is one."""
        prefix = f"{OPAQUE}/{holder}/"
        if self._own is not None:
            return {key.removeprefix(prefix): self._own.read(key) for key in self._own.keys if key.startswith(prefix)}
        if any(key.startswith(OPAQUE) for file in self._files for key in file.keys):
            raise UsageError(
                f"{self._folder.name} has optimizer states that are quantised in blocks, which only the layout that "
                f"saved them can read. Resume with the same number of ranks, degrees and zero_stage."
            )
        return {}

    def _sources(self, piece: Piece) -> Iterator[tuple[ShardFile, Piece]]:
        """The files to read it from: the rank's own where that has all of it, which no replica's without ZeRO has."""
        own = None if self._own is None else self._own.header.pieces.get(piece.name)
        if self._own is not None and own is not None and own.contains(piece):
            yield self._own, own
        else:
            yield from self._index.get(piece.name, [])

    @cached_property
    def _files(self) -> list[ShardFile]:
        return [ShardFile(self._folder / name) for name in self._shards]

    @cached_property
    def _index(self) -> dict[str, list[tuple[ShardFile, Piece]]]:
        index: dict[str, list[tuple[ShardFile, Piece]]] = {}
        for file in self._files:
            for name, piece in file.header.pieces.items():
                index.setdefault(name, []).append((file, piece))
        return index
