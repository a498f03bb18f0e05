"""Weights from a folder of Hugging Face safetensors files, of which a rank reads no more than its piece.

Checks all names and shapes against the whole model first, by the files' headers. Knows no layout but a rank's spec.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from scaletrain_cli.engine.model.causal_lm import CausalLM
from scaletrain_cli.engine.model.materialization import named_matrices
from scaletrain_cli.engine.parallel.mesh import ShardSpec
from scaletrain_cli.errors import Problem, UsageError
from scaletrain_cli.spec.hugging_face_weights import config_mismatches

_DTYPES = ("F64", "F32", "F16", "BF16")
_TOLD = 8  # problems; a wrong number of layers would make hundreds
_HEAD = "lm_head.weight"
_ROWS = 4096  # of a matrix that need not be read whole, at a time
# Constants that older files hold beside the weights: causal masks and rotary frequencies.
_CONSTANTS = re.compile(r"\.attn\.(masked_)?bias$|\.rotary_emb\.inv_freq$")
# What files call things, where that differs from the name in the model: those of a base model lack the outermost name,
# and Mixtral has names of its own (https://huggingface.co/mistralai/Mixtral-8x7B-v0.1, model.safetensors.index.json).
_BASE = re.compile(r"^(model|transformer)\.")
_MIXTRAL = {".mlp.": ".block_sparse_moe.", ".gate_proj.": ".w1.", ".down_proj.": ".w2.", ".up_proj.": ".w3."}


def mixtral_name(name: str) -> str:
    """What Mixtral's files call a parameter."""
    for ours, theirs in _MIXTRAL.items():
        name = name.replace(ours, theirs)
    return name


class HuggingFaceFolder:
    """``folder`` holds ``model.safetensors``, or ``model.safetensors.index.json`` and the files that it names.

    ``model``: the whole model on the meta device, uncut. Raises UsageError that lists what does not match it.
    """

    def __init__(self, folder: Path, model: CausalLM) -> None:
        self._folder = folder
        self._files: dict[Path, Any] = {}
        self._file_of = _index(folder)
        if problems := [*config_mismatches(folder, model.spec), *self._mismatches(model)]:
            more = f" The first {_TOLD} of {len(problems)}:" if len(problems) > _TOLD else ""
            raise UsageError(f"model.weights: {folder} does not hold this model.{more}", tuple(problems[:_TOLD]))

    def read(self, name: str, whole_shape: tuple[int, ...], spec: ShardSpec | None) -> Tensor:
        """This rank's piece of a parameter, as the file has it."""
        stored = self._stored(name)
        if stored is None:
            raise UsageError(f"model.weights: {self._folder} has no {name}.")
        values = self._slice(stored)
        if spec is None:
            return values[:]  # type: ignore[no-any-return]
        size = whole_shape[spec.dim] // spec.parts
        length = size // spec.ranks
        pieces = []
        for part in range(spec.parts):
            first = part * size + spec.rank * length
            pieces.append(values[(slice(None),) * spec.dim + (slice(first, first + length),)])
        return torch.cat(pieces, spec.dim)

    def _stored(self, name: str) -> str | None:
        """What the files call a parameter of the model, if they have it."""
        for candidate in (name, _BASE.sub("", name), mixtral_name(name)):
            if candidate in self._file_of:
                return candidate
        return None

    def _slice(self, stored: str) -> Any:
        """The tensor in its file, not yet read; its shape and dtype come from the header."""
        path = self._file_of[stored]
        try:
            if path not in self._files:
                self._files[path] = safe_open(path, framework="pt")
            return self._files[path].get_slice(stored)
        except (OSError, SafetensorError) as error:
            raise UsageError(f"model.weights: {path} cannot be read: {error}.") from error

    def _mismatches(self, model: CausalLM) -> Iterator[Problem]:
        expected, used = dict(named_matrices(model)), set()
        for name, shape in expected.items():
            stored = self._stored(name)
            used.add(stored)
            if stored is None:
                hint = "Set model.tie_word_embeddings: true." if name == _HEAD else None
                yield Problem(str(self._folder), name, "is in none of the files, and the model has it.", hint=hint)
                continue
            path, header = self._file_of[stored], self._slice(stored)
            if tuple(header.get_shape()) != shape:
                given = str(header.get_shape())
                yield Problem(str(path), stored, f"the model's dimensions make it {list(shape)}.", given)
            if header.get_dtype() not in _DTYPES:
                yield Problem(str(path), stored, f"must be one of {', '.join(_DTYPES)}.", header.get_dtype())
        for stored in sorted(self._file_of.keys() - used):
            if not _CONSTANTS.search(stored) and not (stored == _HEAD and self._is_tied(expected)):
                yield Problem(str(self._file_of[stored]), stored, "is not in the model, which would lose it.")

    def _is_tied(self, expected: dict[str, tuple[int, ...]]) -> bool:
        """Whether the head in the files is a copy of the embedding, which is the first parameter."""
        embedding = self._stored(next(iter(expected)))
        if embedding is None:
            return False
        head, table = self._slice(_HEAD), self._slice(embedding)
        if head.get_shape() != table.get_shape():
            return False
        rows = (slice(first, first + _ROWS) for first in range(0, head.get_shape()[0], _ROWS))
        return all(torch.equal(head[part], table[part]) for part in rows)


def _index(folder: Path) -> dict[str, Path]:
    """The file of each tensor."""
    index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
    try:
        if index.exists():
            return {name: folder / file for name, file in json.loads(index.read_bytes())["weight_map"].items()}
        with safe_open(single, framework="pt") as opened:
            return dict.fromkeys(opened.keys(), single)
    except (OSError, SafetensorError, ValueError, KeyError) as error:
        read = index if index.exists() else single
        raise UsageError(f"model.weights: {read} cannot be read: {error or type(error).__name__}.") from error
