"""Read weights from a folder of Hugging Face safetensors files; a rank reads its shards only.

All names and shapes are first compared with the whole model, by the files' headers.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from torch import Tensor

from scaletrain_cli.engine.model import fp8_files
from scaletrain_cli.engine.model.causal_lm import CausalLM
from scaletrain_cli.engine.model.fp8_files import ScaledMatrix, block_of, scales_of, scales_shape
from scaletrain_cli.engine.model.gpt_oss_files import Place, place_of, read_expert, router_name
from scaletrain_cli.engine.model.materialization import named_weights
from scaletrain_cli.engine.parallel.mesh import ShardSpec
from scaletrain_cli.errors import Problem, UsageError
from scaletrain_cli.reasons import Reason
from scaletrain_cli.spec.hugging_face import read_config
from scaletrain_cli.spec.hugging_face_weights import config_mismatches
from scaletrain_cli.spec.presets import SourceError
from scaletrain_cli.text import either

logger = logging.getLogger(__name__)

_DTYPES = ("F64", "F32", "F16", "BF16")
_MOST_SHOWN = 8  # differences; a wrong number of layers would list hundreds
_HEAD = "lm_head.weight"
_MOST_FURTHER = 16  # layers that predict further tokens
_ROWS = 4096  # of a matrix that need not be read whole, at a time
# Constants in older files: causal masks and rotary frequencies.
_CONSTANTS = re.compile(r"\.attn\.(masked_)?bias$|\.rotary_emb\.inv_freq$")
# Names in the files that differ from those of the model: base models lack the outermost name, and Mixtral has names of
# its own (https://huggingface.co/mistralai/Mixtral-8x7B-v0.1, model.safetensors.index.json).
_BASE = re.compile(r"^(model|transformer)\.")
_MIXTRAL = {".mlp.": ".block_sparse_moe.", ".gate_proj.": ".w1.", ".down_proj.": ".w2.", ".up_proj.": ".w3."}


def mixtral_name(name: str) -> str:
    """Return the name of a parameter in Mixtral's files."""
    for ours, theirs in _MIXTRAL.items():
        name = name.replace(ours, theirs)
    return name


class HuggingFaceFolder:
    """``folder`` holds ``model.safetensors``, or ``model.safetensors.index.json`` and the files that it names.

    ``model``: the whole model on the meta device. Raises UsageError that lists the differences from it.
    """

    def __init__(self, folder: Path, model: CausalLM) -> None:
        self._folder, self._experts = folder, model.spec.num_experts
        self._files: dict[Path, Any] = {}
        self._file_of = _index(folder)
        config = _config(folder)
        self._block = block_of(config)
        self._untrained = _untrained_layers(config)
        try:
            differing = list(config_mismatches(folder, model.spec))
        except UsageError as error:
            raise UsageError(Reason("engine.weights-invalid", {"problem": error.reason or error.message})) from error
        if problems := [*differing, *self._mismatches(model)]:
            shown = tuple(problems[:_MOST_SHOWN])
            params = {"folder": str(folder), "differences": len(problems), "shown": len(shown)}
            raise UsageError(Reason("engine.weights-differ", params), shown)

    def read(self, name: str, whole_shape: tuple[int, ...], spec: ShardSpec | None) -> Tensor:
        """Return this rank's shard of a parameter, as stored."""
        stored = self._stored(name)
        if stored is None and (place := self._place(name, whole_shape)) is not None:
            return read_expert(place, whole_shape, spec, self._named_slice, packed=self._is_packed(place))
        if stored is None:
            raise UsageError(Reason("engine.weights-missing", {"folder": str(self._folder), "name": name}))
        values = self._values(stored)
        if spec is None:
            return values[:]  # type: ignore[no-any-return]
        before = (slice(None),) * spec.dim
        spans = [slice(first, first + length) for first, length in spec.spans(whole_shape[spec.dim])]
        parts = [values[before + (span,)] for span in spans]  # noqa: RUF005  Python 3.10 cannot unpack in an index
        return torch.cat(parts, spec.dim)

    def _stored(self, name: str) -> str | None:
        """Return the name of a parameter in the files; None if they do not have it."""
        in_gpt_oss = router_name(name)
        for candidate in (name, _BASE.sub("", name), mixtral_name(name), in_gpt_oss, _BASE.sub("", in_gpt_oss)):
            if candidate in self._file_of:
                return candidate
        return None

    def _place(self, name: str, shape: tuple[int, ...]) -> Place | None:
        """Return the place of an expert's parameter if the files have all experts of a layer in one tensor."""
        place = place_of(name, shape, self._experts)
        found = place is not None and (self._stored(place.stack) or self._stored(place.blocks))
        return place if found else None

    def _is_packed(self, place: Place) -> bool:
        return self._stored(place.stack) is None

    def _named_slice(self, name: str) -> Any:
        stored = self._stored(name)
        assert stored is not None, "compared with the files before"
        return self._slice(stored)

    def _values(self, stored: str) -> Any:
        """Return what reads parts of a tensor by slices: the tensor in its file, or a matrix in fp8 with its scales."""
        values, scales = self._slice(stored), scales_of(stored)
        if scales not in self._file_of:
            return values
        return ScaledMatrix(values, self._slice(scales), self._block)

    def _slice(self, stored: str) -> Any:
        """Return the tensor in its file, not yet read; shape and dtype come from the header."""
        path = self._file_of[stored]
        try:
            if path not in self._files:
                self._files[path] = safe_open(path, framework="pt")
            return self._files[path].get_slice(stored)
        except (OSError, SafetensorError) as error:
            raise UsageError(Reason("engine.weights-unreadable", {"path": str(path), "error": str(error)})) from error

    def _mismatches(self, model: CausalLM) -> Iterator[Problem]:
        expected = named_weights(model)
        used: set[str | None] = set()
        for name, shape in expected.items():
            stored = self._stored(name)
            if stored is None and (place := self._place(name, shape)) is not None:
                yield from self._stack_mismatches(place, used)
                continue
            used.add(stored)
            if stored is None:
                hint = "Set model.tie_word_embeddings: true." if name == _HEAD else None
                yield Problem(str(self._folder), name, "is in the model but in none of the files.", hint=hint)
                continue
            path, header = self._file_of[stored], self._slice(stored)
            if tuple(header.get_shape()) != shape:
                given = str(header.get_shape())
                yield Problem(str(path), stored, f"the model has {list(shape)}.", given)
            if header.get_dtype() == fp8_files.DTYPE and scales_of(stored) in self._file_of:
                used.add(scales_of(stored))
                yield from self._scales_mismatches(stored, shape)
            elif header.get_dtype() not in _DTYPES:
                yield Problem(str(path), stored, f"must be one of {', '.join(_DTYPES)}.", header.get_dtype())
        ignored = 0
        for stored in sorted(self._file_of.keys() - used):
            if self._untrained and stored.startswith(self._untrained):
                ignored += 1
                continue
            if not _CONSTANTS.search(stored) and not (stored == _HEAD and self._is_tied(expected)):
                yield Problem(str(self._file_of[stored]), stored, "is in the files but not in the model.")
        if ignored and (not dist.is_initialized() or dist.get_rank() == 0):
            params = {"folder": str(self._folder), "tensors": ignored, "layers": len(self._untrained)}
            logger.info("%s", Reason("engine.weights-not-loaded", params))

    def _scales_mismatches(self, stored: str, shape: tuple[int, ...]) -> Iterator[Problem]:
        """Yield how the scales of a matrix in fp8 differ from its blocks."""
        name = scales_of(stored)
        found, expected = tuple(self._slice(name).get_shape()), scales_shape(shape, self._block)
        if found != expected:
            rows, columns = self._block
            message = f"blocks of {rows} x {columns} have scales {list(expected)}."
            yield Problem(str(self._file_of[name]), name, message, str(list(found)))

    def _stack_mismatches(self, place: Place, used: set[str | None]) -> Iterator[Problem]:
        """Yield how the tensors of a layer's experts differ from the model, once for all experts."""
        packed = self._is_packed(place)
        for name, shape in place.stored_shapes(packed=packed).items():
            stored = self._stored(name)
            if (stored or name) in used:
                continue
            used.add(stored or name)
            if stored is None:
                yield Problem(str(self._folder), name, "is in the model but in none of the files.")
                continue
            path, header = self._file_of[stored], self._slice(stored)
            if tuple(header.get_shape()) != shape:
                yield Problem(str(path), stored, f"the model has {list(shape)}.", str(header.get_shape()))
            allowed = ("U8",) if packed else _DTYPES
            if header.get_dtype() not in allowed:
                yield Problem(str(path), stored, f"must be {either(allowed)}.", header.get_dtype())

    def _is_tied(self, expected: dict[str, tuple[int, ...]]) -> bool:
        """Return True if the head in the files is a copy of the embedding, which is the first parameter."""
        embedding = self._stored(next(iter(expected)))
        if embedding is None:
            return False
        head, table = self._slice(_HEAD), self._slice(embedding)
        if head.get_shape() != table.get_shape():
            return False
        rows = (slice(first, first + _ROWS) for first in range(0, head.get_shape()[0], _ROWS))
        return all(torch.equal(head[part], table[part]) for part in rows)


def _config(folder: Path) -> dict[str, Any]:
    """Return the parsed config.json; empty without one. Whether it is right, ``config_mismatches`` checks."""
    try:
        return read_config(folder)
    except SourceError:
        return {}


def _untrained_layers(config: dict[str, Any]) -> tuple[str, ...]:
    """Return the beginnings of the names of layers that predict further tokens (DeepSeek-V3, section 2.2).

    They come after the ``num_hidden_layers`` others in the files, and are not loaded, as in transformers.
    """
    layers = config.get("num_hidden_layers")
    further = config.get("num_nextn_predict_layers", config.get("num_mtp_layers"))
    if not isinstance(layers, int) or not isinstance(further, int):
        return ()
    return tuple(f"model.layers.{number}." for number in range(layers, layers + min(further, _MOST_FURTHER)))


def _index(folder: Path) -> dict[str, Path]:
    """Return the file of each tensor."""
    index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
    try:
        if index.exists():
            return {name: folder / file for name, file in json.loads(index.read_bytes())["weight_map"].items()}
        with safe_open(single, framework="pt") as opened:
            return dict.fromkeys(opened.keys(), single)
    except (OSError, SafetensorError, ValueError, KeyError) as error:
        path = index if index.exists() else single
        params = {"path": str(path), "error": str(error) or type(error).__name__}
        raise UsageError(Reason("engine.weights-unreadable", params)) from error
