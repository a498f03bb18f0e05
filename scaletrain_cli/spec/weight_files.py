"""Files of Hugging Face weights: their headers, and how names, shapes and types in them differ from a model's.

Uses the standard library only. The checks before a run compare with it what the ranks load later.
"""

import json
import os
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from scaletrain_cli.errors import Problem
from scaletrain_cli.safe_files import open_to_read
from scaletrain_cli.spec.adapter import Adapted, AdapterSpec, factor_shapes
from scaletrain_cli.spec.corpus_files import LFS_POINTER
from scaletrain_cli.text import either

Shape = tuple[int, ...]

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
FP8 = "F8_E4M3"
_DTYPES = ("F64", "F32", "F16", "BF16")
_CLASSIFIER = re.compile(r"classifier\.")
_COUNTER, _COUNTED = "I64", re.compile(r"\.num_batches_tracked$")  # of BatchNorm
_HEAD = "lm_head.weight"
_LARGEST_HEADER_BYTES = 100_000_000
_MOST_FURTHER = 16  # layers that predict further tokens
# Constants in older files: causal masks, rotary frequencies, numbers of positions. And the layer behind the class token
# of a ViT, which a classifier does not have.
_CONSTANTS = re.compile(
    r"\.attn\.(masked_)?bias$|\.rotary_emb\.inv_freq$|\.embeddings\.position_ids$|^(vit\.)?pooler\.dense\.(weight|bias)$"
)
# Learned positions of the patches of an image, which are resized to another number of patches.
_PATCH_POSITIONS = re.compile(
    r"^(vit\.)?embeddings\.position_embeddings$"
    r"|(^|\.)(vision_model|vision_tower)\.embeddings\.position_embedding\.weight$"
)
# Names in the files that differ from those of the model: base models lack the outermost name, and Mixtral has names of
# its own (https://huggingface.co/mistralai/Mixtral-8x7B-v0.1, model.safetensors.index.json).
_BASE = re.compile(r"^(model|transformer|vit|resnet|convnext)\.")
# LLaVA's, in the files of transformers from 4.52 on, and from 5 on.
_LLAVA = (
    (re.compile(r"^language_model\.(model|transformer)\."), "model.language_model."),
    (re.compile(r"^language_model\.lm_head\."), "lm_head."),
    (re.compile(r"^(vision_tower|multi_modal_projector)\."), r"model.\1."),
    (re.compile(r"^vision_tower\.vision_model\."), "vision_tower."),
    (re.compile(r"^vision_tower\.vision_model\."), "model.vision_tower."),
)
_MIXTRAL = {".mlp.": ".block_sparse_moe.", ".gate_proj.": ".w1.", ".down_proj.": ".w2.", ".up_proj.": ".w3."}
_EXPERT = re.compile(r"(?P<experts>.*\.mlp\.experts)\.(?P<number>\d+)\.(?P<matrix>\w+)\.(?P<kind>weight|bias)")
_ROUTER = re.compile(r"(?<=\.mlp\.)gate(?=\.(weight|bias)$)")
_GATES = {"gate_proj": 0, "up_proj": 1}  # their first column of two that alternate
_FP8_BLOCK = (128, 128)
_MXFP4_BLOCK = 32  # values with one scale


class Header(NamedTuple):
    """One tensor of a safetensors file, by the header of the file. ``file``: the path, as people know it."""

    file: str
    shape: Shape
    dtype: str


class DamagedHeaderError(Exception):
    """A file is not a complete safetensors file. ``found``, ``expected``: its bytes; None if the header is invalid.

    ``is_pointer``: it is one of Git LFS.
    """

    def __init__(
        self, file: str, found: int | None = None, expected: int | None = None, *, is_pointer: bool = False
    ) -> None:
        super().__init__(f"{file} is not a safetensors file, or is truncated")
        self.file, self.found, self.expected, self.is_pointer = file, found, expected, is_pointer


def read_headers(path: Path) -> dict[str, Header]:
    """Return the tensors of one file by name. Raises DamagedHeaderError and OSError.

    The header gives the file's length (github.com/huggingface/safetensors, section Format).
    """
    with open_to_read(path) as file:
        size = os.fstat(file.fileno()).st_size
        if (length := header_bytes(beginning := file.read(8), size)) is None:
            beginning += file.read(len(LFS_POINTER) - 8)
            raise DamagedHeaderError(path.name, is_pointer=beginning == LFS_POINTER.encode())
        return parsed_headers(str(path), file.read(length), size)


def header_bytes(beginning: bytes, size: int) -> int | None:
    """Return the length of the JSON after the first 8 bytes of a file of ``size`` bytes; None for other files."""
    length = int.from_bytes(beginning[:8], "little")
    return None if size < 8 or length > min(size - 8, _LARGEST_HEADER_BYTES) else length


def parsed_headers(path: str, header: bytes, size: int) -> dict[str, Header]:
    """Return the tensors of a file of ``size`` bytes by its header. Raises DamagedHeaderError."""
    name = path.rpartition("/")[2]
    try:
        entries = {key: entry for key, entry in json.loads(header).items() if key != "__metadata__"}
        ends = [int(entry["data_offsets"][1]) for entry in entries.values()]
        headers = {
            key: Header(path, tuple(map(int, entry.get("shape", ()))), str(entry.get("dtype", "")))
            for key, entry in entries.items()
        }
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError) as error:
        raise DamagedHeaderError(name) from error
    expected = 8 + len(header) + max(ends, default=0)
    if size != expected:
        raise DamagedHeaderError(name, size, expected)
    return headers


def mixtral_name(name: str) -> str:
    """Return the name of a parameter in Mixtral's files."""
    for ours, theirs in _MIXTRAL.items():
        name = name.replace(ours, theirs)
    return name


def router_name(name: str) -> str:
    """Return the name of a parameter in GPT-OSS's files, if it is not one of an expert."""
    return _ROUTER.sub("router", name)


def stored_name(name: str, files: Collection[str]) -> str | None:
    """Return the name of a parameter in the files; None if they do not have it."""
    in_gpt_oss = router_name(name)
    for candidate in (name, _BASE.sub("", name), mixtral_name(name), in_gpt_oss, _BASE.sub("", in_gpt_oss)):
        if candidate in files:
            return candidate
    if name.startswith(_PARTS_OF_LLAVA):
        spellings = (name, mixtral_name(name), in_gpt_oss)
        moved = (pattern.sub(new, one) for one in spellings for pattern, new in _LLAVA)
        return next((candidate for candidate in moved if candidate in files), None)
    return None


LANGUAGE_MODEL = "language_model."
_PARTS_OF_LLAVA = (LANGUAGE_MODEL, "vision_tower.", "multi_modal_projector.")


_OF_TOWER = re.compile(
    r"(model\.)?(vision_tower\.)?(vision_model\.)?((embeddings|encoder|pre_layrnorm|post_layernorm)\..*)"
)


def tower_names(files: Collection[str]) -> dict[str, str]:
    """Return the names of CLIP's image tower in files by those of a CLIP: ``vision_model....``.

    The files are those of a CLIP, of its image tower alone, or of a LLaVA.
    """
    matches = ((_OF_TOWER.fullmatch(name), name) for name in files if not _CONSTANTS.search(name))
    return {f"vision_model.{match[4]}": name for match, name in matches if match is not None}


def lacks_tokens(stored: Shape, shape: Shape) -> bool:
    """Return True if an embedding or a head in files has fewer rows than that of the model."""
    return len(stored) == len(shape) == 2 and stored[0] < shape[0] and stored[1] == shape[1]


def is_drawn(model: object, name: str) -> bool:
    """Return True if a parameter of a model with weights is random all the same: see ``model.new_classifier``."""
    return bool(getattr(model, "new_classifier", False)) and _CLASSIFIER.match(name) is not None


def is_another_grid(name: str, stored: Shape, shape: Shape) -> bool:
    """Return True if a tensor in the files is resized to ``shape``: positions of another number of patches.

    Both have a class token and a square of patches.
    """
    if _PATCH_POSITIONS.search(name) is None or stored == shape or len(stored) < 2 or len(stored) != len(shape):
        return False
    squares = all(size > 1 and round((size - 1) ** 0.5) ** 2 == size - 1 for size in (stored[-2], shape[-2]))
    return squares and stored[-1] == shape[-1] and stored[:-2] == shape[:-2]


class ExpertPlace(NamedTuple):
    """The place of an expert's matrix or bias in files of GPT-OSS: in tensor ``stack``, the expert's ``number``.

    ``first``, ``step``: its columns among those of the expert. ``shape``: that of the whole stack.
    """

    stack: str
    number: int
    first: int
    step: int
    shape: Shape
    is_bias: bool

    @property
    def blocks(self) -> str:
        """Return the name of the 4-bit values."""
        return f"{self.stack}_blocks"

    @property
    def scales(self) -> str:
        """Return the name of the scales."""
        return f"{self.stack}_scales"

    def stored_shapes(self, *, packed: bool) -> dict[str, Shape]:
        """Return the shapes of the tensors in the files, by name; ``packed``: in MXFP4."""
        if not packed:
            return {self.stack: self.shape}
        experts, inputs, outputs = self.shape
        scales = (experts, outputs, -(-inputs // _MXFP4_BLOCK))
        return {self.blocks: (*scales, _MXFP4_BLOCK // 2), self.scales: scales}


def expert_place(name: str, shape: Shape, experts: int) -> ExpertPlace | None:
    """Return the place of an expert's parameter with this name and whole shape; None for all other parameters."""
    if (match := _EXPERT.fullmatch(name)) is None:
        return None
    joined, is_bias = match["matrix"] in _GATES, match["kind"] == "bias"
    first, step = (_GATES[match["matrix"]], 2) if joined else (0, 1)
    stack = f"{match['experts']}.{'gate_up_proj' if joined else match['matrix']}{'_bias' if is_bias else ''}"
    stored = (experts, *reversed(shape[1:]), shape[0] * step)
    return ExpertPlace(stack, int(match["number"]), first, step, stored, is_bias)


def stacked_place(name: str, shape: Shape, experts: int, files: Collection[str]) -> ExpertPlace | None:
    """Return the place of an expert's parameter if the files have all experts of a layer in one tensor."""
    place = expert_place(name, shape, experts)
    found = place is not None and (stored_name(place.stack, files) or stored_name(place.blocks, files))
    return place if found else None


def scales_of(name: str) -> str:
    """Return the name of the scales of a matrix in fp8."""
    return f"{name}_scale_inv"


def block_of(config: Mapping[str, Any]) -> tuple[int, int]:
    """Return the rows and columns of a block of fp8 by a config.json; without them those of DeepSeek-V3."""
    quantization = config.get("quantization_config")
    given = quantization.get("weight_block_size") if isinstance(quantization, dict) else None
    if isinstance(given, list) and len(given) == 2 and all(isinstance(size, int) and size > 0 for size in given):
        return given[0], given[1]
    return _FP8_BLOCK


def untrained_layers(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the beginnings of the names of layers that predict further tokens (DeepSeek-V3, section 2.2).

    They come after the ``num_hidden_layers`` others in the files, and are not loaded, as in transformers.
    """
    layers = config.get("num_hidden_layers")
    further = config.get("num_nextn_predict_layers", config.get("num_mtp_layers"))
    if not isinstance(layers, int) or not isinstance(further, int):
        return ()
    return tuple(f"model.layers.{number}." for number in range(layers, layers + min(further, _MOST_FURTHER)))


class WeightDifferences:
    """Compares the tensors of files with those of a model. ``expected``: whole shapes by name, the embedding first.

    ``experts``: number of routed experts; ``config``: config.json, empty without one; ``folder``: for messages.
    ``may_lack_tokens``: embedding and head may have fewer rows than the model.
    """

    def __init__(
        self,
        expected: Mapping[str, Shape],
        files: Mapping[str, Header],
        *,
        experts: int,
        config: Mapping[str, Any],
        folder: str,
        may_lack_tokens: bool = False,
    ) -> None:
        self._tables = {next(iter(expected)), _HEAD} if may_lack_tokens else set()
        self._expected, self._files, self._experts, self._folder = expected, files, experts, folder
        self._block, self._untrained = block_of(config), untrained_layers(config)
        self._used: set[str | None] = set()

    @property
    def not_loaded(self) -> list[str]:
        """Return the tensors of layers that predict further tokens."""
        return [name for name in self._files if self._untrained and name.startswith(self._untrained)]

    @property
    def untrained_layers(self) -> int:
        """Return the number of layers that predict further tokens."""
        return len(self._untrained)

    @property
    def known(self) -> int:
        """Return the number of parameters of the model that the files have."""
        return sum(
            stored_name(name, self._files) is not None
            or stacked_place(name, shape, self._experts, self._files) is not None
            for name, shape in self._expected.items()
        )

    def problems(self) -> Iterator[Problem]:
        """Yield all differences. A head in the files of a tied model is left to ``unexpected_head``."""
        self._used = set()
        for name, shape in self._expected.items():
            stored = stored_name(name, self._files)
            if stored is None and (place := stacked_place(name, shape, self._experts, self._files)) is not None:
                yield from self._of_stack(place)
                continue
            self._used.add(stored)
            if stored is None:
                hint = "Set model.tie_word_embeddings: true." if name == _HEAD else None
                yield Problem(self._folder, name, "is in the model but in none of the files.", hint=hint)
                continue
            header = self._files[stored]
            fits = header.shape == shape or is_another_grid(name, header.shape, shape)
            if not fits and not (name in self._tables and lacks_tokens(header.shape, shape)):
                hint = "To train other classes, set model.new_classifier: true." if _CLASSIFIER.match(name) else None
                yield Problem(header.file, stored, f"the model has {list(shape)}.", str(list(header.shape)), hint)
            if header.dtype == FP8 and scales_of(stored) in self._files:
                self._used.add(scales_of(stored))
                yield from self._of_scales(stored, shape)
            elif _COUNTED.search(name) is not None:
                if header.dtype != _COUNTER:
                    yield Problem(header.file, stored, f"must be {_COUNTER}.", header.dtype)
            elif header.dtype not in _DTYPES:
                yield Problem(header.file, stored, f"must be one of {', '.join(_DTYPES)}.", header.dtype)
        for stored in sorted(self._files.keys() - self._used - set(self.not_loaded)):
            if not _CONSTANTS.search(stored) and not (stored == _HEAD and self._may_be_tied()):
                yield self._unexpected(stored)

    def unexpected_head(self) -> Problem | None:
        """Return the problem of a head that a tied model does not have, unless it is a copy of the embedding.

        None without such a head. The caller compares its values.
        """
        found = _HEAD in self._files and _HEAD not in self._expected and self._may_be_tied()
        return self._unexpected(_HEAD) if found else None

    def _unexpected(self, stored: str) -> Problem:
        return Problem(self._files[stored].file, stored, "is in the files but not in the model.")

    def _may_be_tied(self) -> bool:
        """Return True if the head in the files has the shape of the embedding, which is the first parameter."""
        embedding = stored_name(next(iter(self._expected)), self._files)
        return embedding is not None and self._files[_HEAD].shape == self._files[embedding].shape

    def _of_scales(self, stored: str, shape: Shape) -> Iterator[Problem]:
        """Yield how the scales of a matrix in fp8 differ from its blocks."""
        name = scales_of(stored)
        scale_shape = self._files[name].shape
        # Blocks at the end of a matrix may be smaller.
        expected = tuple(-(-size // side) for size, side in zip(shape, self._block, strict=False))
        if scale_shape != expected:
            rows, columns = self._block
            message = f"blocks of {rows} x {columns} have scales {list(expected)}."
            yield Problem(self._files[name].file, name, message, str(list(scale_shape)))

    def _of_stack(self, place: ExpertPlace) -> Iterator[Problem]:
        """Yield how the tensors of a layer's experts differ from the model, once for all experts."""
        packed = stored_name(place.stack, self._files) is None
        for name, shape in place.stored_shapes(packed=packed).items():
            stored = stored_name(name, self._files)
            if (stored or name) in self._used:
                continue
            self._used.add(stored or name)
            if stored is None:
                yield Problem(self._folder, name, "is in the model but in none of the files.")
                continue
            header = self._files[stored]
            if header.shape != shape:
                yield Problem(header.file, stored, f"the model has {list(shape)}.", str(list(header.shape)))
            allowed = ("U8",) if packed else _DTYPES
            if header.dtype not in allowed:
                yield Problem(header.file, stored, f"must be {either(allowed)}.", header.dtype)


# The file of a PEFT adapter.

PEFT_PREFIX = "base_model.model."


def stacked_factor(module: Adapted, modules: Sequence[Adapted], letter: str) -> str:
    """Return PEFT's name of a factor of all experts; of two stacks the first is inside the wrapper of the second."""
    experts, _, _ = module.name.rpartition(".")
    beside = [one.name for one in modules if one.kind == "experts" and one.name.rpartition(".")[0] == experts]
    inner = ".base_layer" * (len(beside) - 1 - beside.index(module.name))
    return f"{PEFT_PREFIX}{experts}{inner}.lora_{letter}.weight"


def peft_shapes(adapter: AdapterSpec, modules: Sequence[Adapted]) -> dict[str, Shape]:
    """Return the names and shapes of the tensors in adapter_model.safetensors."""
    shapes: dict[str, Shape] = {}
    for module in modules:
        if module.kind == "experts":
            rank = adapter.rank * module.experts
            shapes[stacked_factor(module, modules, "A")] = (rank, module.inputs)
            shapes[stacked_factor(module, modules, "B")] = (module.outputs, rank)
        else:
            shapes |= {PEFT_PREFIX + name: shape for name, shape in factor_shapes(adapter, module).items()}
    return shapes


def peft_differences(expected: Mapping[str, Shape], stored: Mapping[str, Shape], path: str) -> Iterator[Problem]:
    """Yield how names and shapes in adapter_model.safetensors differ from those of the spec's adapter."""
    for name, shape in expected.items():
        if name not in stored:
            yield Problem(path, name, "is in the adapter of the spec but not in the file.")
        elif stored[name] != shape:
            yield Problem(path, name, f"the adapter of the spec has {list(shape)}.", str(list(stored[name])))
    for name in sorted(stored.keys() - expected.keys()):
        yield Problem(path, name, "is in the file but not in the adapter of the spec.")
