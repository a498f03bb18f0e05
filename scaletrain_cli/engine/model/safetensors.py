"""Read weights from a folder of Hugging Face safetensors files; a rank reads its shards only.

All names and shapes are first compared with the whole model, by the files' headers.
"""

import contextlib
import json
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from scaletrain_cli.engine.model.gpt_oss_files import read_expert
from scaletrain_cli.engine.model.materialization import named_weights
from scaletrain_cli.engine.model.vision.vit import resized_positions
from scaletrain_cli.engine.parallel.mesh import ShardSpec
from scaletrain_cli.errors import Problem, UsageError
from scaletrain_cli.reasons import Reason
from scaletrain_cli.spec.hugging_face import read_config
from scaletrain_cli.spec.hugging_face_weights import config_mismatches
from scaletrain_cli.spec.presets import SourceError
from scaletrain_cli.spec.run import InitialWeights
from scaletrain_cli.spec.vision_model import ClipVisionSpec
from scaletrain_cli.spec.weight_files import (
    Header,
    WeightDifferences,
    block_of,
    is_another_grid,
    is_drawn,
    lacks_tokens,
    scales_of,
    stacked_place,
    stored_name,
    tower_names,
)

logger = logging.getLogger(__name__)

_MOST_SHOWN = 8  # differences; a wrong number of layers would list hundreds
_HEAD = "lm_head.weight"
_ROWS = 4096  # of a matrix that need not be read whole, at a time


class HuggingFaceFolder:
    """``folder`` holds ``model.safetensors``, or ``model.safetensors.index.json`` and the files that it names.

    ``model``: the whole model on the meta device, or the part of it that the files have; its attribute ``spec`` is
    ``source.model``. ``source``: the key and its section; None: model.weights. Raises UsageError that lists the
    differences.
    """

    def __init__(self, folder: Path, model: nn.Module, source: InitialWeights | None = None) -> None:
        self._spec: Any = vars(model)["spec"]
        self._source = source or InitialWeights("model.weights", str(folder), self._spec)
        self._folder, self._experts = folder, getattr(self._spec, "num_experts", 0)
        self._files: dict[Path, Any] = {}
        self._file_of = self._index()
        config: dict[str, Any] = {}  # without config.json; whether it is right, ``config_mismatches`` checks
        with contextlib.suppress(SourceError):
            config = read_config(folder)
        self._block = block_of(config)
        self._whole = named_weights(model)
        try:
            differing = list(config_mismatches(folder, self._spec, self._source.section))
        except UsageError as error:
            raise UsageError(self._reason("engine.weights-invalid", problem=error.reason or error.message)) from error
        if problems := [*differing, *self._mismatches(config)]:
            shown = tuple(problems[:_MOST_SHOWN])
            params = {"folder": str(folder), "differences": len(problems), "shown": len(shown)}
            raise UsageError(self._reason("engine.weights-differ", **params), shown)

    def _reason(self, code: str, **params: Any) -> Reason:
        return Reason(code, {"key": self._source.key, **params})

    def read(self, name: str, whole_shape: tuple[int, ...], spec: ShardSpec | None) -> Tensor:
        """Return this rank's shard of a parameter, as stored."""
        stored = self._stored(name)
        if stored is None and (place := stacked_place(name, whole_shape, self._experts, self._file_of)) is not None:
            return read_expert(place, whole_shape, spec, self._named_slice, packed=self._stored(place.stack) is None)
        if stored is None:
            raise UsageError(self._reason("engine.weights-missing", folder=str(self._folder), name=name))
        values = self._values(stored)
        if not whole_shape:
            return self._opened(stored).get_tensor(self._file_of[stored][1])  # type: ignore[no-any-return]  # a slice needs a dimension
        if is_another_grid(name, tuple(self._slice(stored).get_shape()), whole_shape):
            return resized_positions(values[:], whole_shape[-2])
        if self._source.may_lack_tokens and lacks_tokens(tuple(self._slice(stored).get_shape()), whole_shape):
            # A new token is as likely as the mean of the others, and changes little in the softmax over all tokens.
            table = values[:]
            mean = table.float().mean(0, keepdim=True).to(table.dtype)
            return torch.cat([table, mean.expand(whole_shape[0] - len(table), -1)])
        if spec is None:
            return values[:]  # type: ignore[no-any-return]
        before = (slice(None),) * spec.dim
        spans = [slice(first, first + length) for first, length in spec.spans(whole_shape[spec.dim])]
        parts = [values[before + (span,)] for span in spans]  # noqa: RUF005  Python 3.10 cannot unpack in an index
        return torch.cat(parts, spec.dim)

    def _index(self) -> dict[str, tuple[Path, str]]:
        """Return the file of each tensor and its name there; of an image tower by the names of a CLIP."""
        folder = self._folder
        index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
        try:
            if index.exists():
                files = {name: folder / file for name, file in json.loads(index.read_bytes())["weight_map"].items()}
            else:
                with safe_open(single, framework="pt") as opened:
                    files = dict.fromkeys(opened.keys(), single)
        except (OSError, SafetensorError, ValueError, KeyError) as error:
            path = index if index.exists() else single
            params = {"path": str(path), "error": str(error) or type(error).__name__}
            raise UsageError(self._reason("engine.weights-unreadable", **params)) from error
        names = tower_names(files) if isinstance(self._spec, ClipVisionSpec) else {name: name for name in files}
        return {name: (files[stored], stored) for name, stored in names.items()}

    def _stored(self, name: str) -> str | None:
        """Return the name of a parameter in the files; None if they do not have it."""
        return stored_name(name, self._file_of)

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
        try:
            return self._opened(stored).get_slice(self._file_of[stored][1])
        except (OSError, SafetensorError) as error:
            params = {"path": str(self._file_of[stored][0]), "error": str(error)}
            raise UsageError(self._reason("engine.weights-unreadable", **params)) from error

    def _opened(self, stored: str) -> Any:
        """Return the file of a tensor. Raises OSError and SafetensorError."""
        path, _ = self._file_of[stored]
        if path not in self._files:
            self._files[path] = safe_open(path, framework="pt")
        return self._files[path]

    def _mismatches(self, config: dict[str, Any]) -> Iterator[Problem]:
        expected = {name: shape for name, shape in self._whole.items() if not is_drawn(self._spec, name)}
        differences = WeightDifferences(
            expected,
            {name: self._header(name) for name in self._file_of if not is_drawn(self._spec, name)},
            experts=self._experts,
            config=config,
            folder=str(self._folder),
            may_lack_tokens=self._source.may_lack_tokens,
        )
        yield from differences.problems()
        head = differences.unexpected_head()
        if head is not None and not self._is_tied(expected):
            yield head
        if differences.not_loaded and (not dist.is_initialized() or dist.get_rank() == 0):
            params = {"tensors": len(differences.not_loaded), "layers": differences.untrained_layers}
            logger.info("%s", self._reason("engine.weights-not-loaded", folder=str(self._folder), **params))

    def _header(self, stored: str) -> Header:
        values = self._slice(stored)
        return Header(str(self._file_of[stored][0]), tuple(values.get_shape()), values.get_dtype())

    def _is_tied(self, expected: dict[str, tuple[int, ...]]) -> bool:
        """Return True if the head in the files is a copy of the embedding, which is the first parameter."""
        embedding = self._stored(next(iter(expected)))
        if embedding is None:
            return False
        head, table = self._slice(_HEAD), self._slice(embedding)
        rows = (slice(first, first + _ROWS) for first in range(0, head.get_shape()[0], _ROWS))
        return all(torch.equal(head[part], table[part]) for part in rows)


# Matrices in fp8 in Hugging Face files, with one scale for each block of rows and columns, as in DeepSeek-V3's.
#
# A matrix ``*.weight`` in E4M3 has its scales beside it in ``*.weight_scale_inv`` [rows / 128, columns / 128]; a value
# times the scale of its block is the weight. The size of the blocks is ``quantization_config.weight_block_size`` in
# config.json (DeepSeek-V3, arXiv:2412.19437, section 3.3).


@dataclass(frozen=True)
class ScaledMatrix:
    """A matrix in a file, read as fp32. Indexed by slices without a step, as those of safetensors are.

    ``values`` and ``scales``: safetensors' slices of both tensors.
    """

    values: Any
    scales: Any
    block: tuple[int, int]

    def __getitem__(self, index: slice | tuple[slice, ...]) -> Tensor:
        """Return a part; only its values and the scales of its blocks are read."""
        rows, columns = ((*index, slice(None)) if isinstance(index, tuple) else (index, slice(None)))[:2]
        spans = [part.indices(size)[:2] for part, size in zip((rows, columns), self.values.get_shape(), strict=True)]
        blocks = tuple(
            slice(first // side, -(-stop // side)) for (first, stop), side in zip(spans, self.block, strict=True)
        )
        scales: Tensor = self.scales[blocks].float()
        for dim, ((first, stop), side) in enumerate(zip(spans, self.block, strict=True)):
            scales = scales.repeat_interleave(side, dim).narrow(dim, first % side, stop - first)
        values: Tensor = self.values[rows, columns].to(torch.float32)
        return values * scales
