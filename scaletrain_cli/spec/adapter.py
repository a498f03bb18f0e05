"""The section ``model.adapter``: low-rank adapters on a frozen model, and the modules that they are attached to.

Names and shapes are those of Hugging Face and PEFT; nothing here needs torch.
"""

import re
from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import BeforeValidator, Field, WithJsonSchema

from scaletrain_cli.spec.quantities import Fraction, Positive, Text, Whole
from scaletrain_cli.spec.section import Section
from scaletrain_cli.spec.shared_paths import ModelPath

ALL_LINEAR = "all-linear"

Shape = tuple[int, ...]


Targets = Annotated[
    tuple[Text, ...],
    BeforeValidator(lambda value: [value] if isinstance(value, str) else value),
    Field(min_length=1, max_length=1000),
    WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}, "minItems": 1}]}),
]


class AdapterSpec(Section):
    """LoRA (arXiv:2106.09685) as in PEFT: W x + alpha / rank B(A(x)), where only A and B are trained.

    ``targets``: ``all-linear`` is every linear layer of the blocks, without routers, stacked experts and the head.
    A name matches a module with this name or this ending; ``*`` matches any text.
    """

    name: Literal["lora"]
    rank: Whole = 16
    alpha: Positive = 32.0
    dropout: Fraction = Field(default=0.0, description="dropout of the adapter's input")
    targets: Targets = Field(
        default=(ALL_LINEAR,), description="all-linear, or names, endings or patterns of Hugging Face modules"
    )
    rslora: bool = Field(default=False, description="scale by alpha / sqrt(rank) (arXiv:2312.03732)")
    dora: bool = Field(default=False, description="train magnitudes of the rows apart (DoRA, arXiv:2402.09353)")
    weights: ModelPath | None = Field(
        default=None,
        description="initial weights: folder of a PEFT adapter, or hf://org/name@revision; null: A random, B zero",
    )

    @property
    def scaling(self) -> float:
        """Return the factor of the adapter's output."""
        return float(self.alpha / (self.rank**0.5 if self.rslora else self.rank))


# Keys of PEFT's adapter_config.json that change what an adapter computes, with the values that are as here.
_PEFT_VALUES: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    "init_lora_weights": (True, False, "gaussian", "orthogonal", "eva"),  # the others change the base model, too
}
_PEFT_OFF = (
    "rank_pattern alpha_pattern modules_to_save layer_replication lora_bias use_qalora alora_invocation_tokens "
    "trainable_token_indices use_bdlora arrow_config kasa_config monteclora_config"
).split()
_PEFT_NAMES = {"rank": "r", "alpha": "lora_alpha", "rslora": "use_rslora", "dora": "use_dora"}


def unsupported_peft_keys(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys and values of an adapter_config.json with which PEFT computes what this engine cannot."""
    values = {key: config[key] for key, allowed in _PEFT_VALUES.items() if config.get(key, allowed[0]) not in allowed}
    return values | {key: config[key] for key in _PEFT_OFF if config.get(key)}


def peft_settings_that_differ(config: Mapping[str, Any], adapter: object) -> dict[str, tuple[str, Any]]:
    """Return (key in adapter_config.json, its value) by key of ``model.adapter``, where that has another value."""
    stated = {key: (theirs, config[theirs]) for key, theirs in _PEFT_NAMES.items() if config.get(theirs) is not None}
    return {key: pair for key, pair in stated.items() if pair[1] != getattr(adapter, key)}


class Adapted(NamedTuple):
    """A module with an adapter. ``inputs`` and ``outputs`` are its features.

    ``kind``: ``linear``, ``embedding``, ``head`` or ``experts``: one stacked matrix of ``experts`` experts, whose
    ``halves`` matrices (gate and up) are one module in Hugging Face models and have one A. ``interleaved``: the outputs
    of the halves alternate there, as in GPT-OSS. ``transposed``: the weight is [in, out].
    """

    name: str
    kind: Literal["linear", "embedding", "head", "experts"]
    inputs: int
    outputs: int
    experts: int = 0
    halves: tuple[str, ...] = ()
    transposed: bool = False
    interleaved: bool = False

    @property
    def parameter(self) -> str:
        """Return the name of its weight; that of stacked experts is the name of the module."""
        return self.name if self.kind == "experts" else f"{self.name}.weight"


_EXPERT = re.compile(r"(?P<experts>.*\.experts)\.(?P<number>\d+)\.(?P<matrix>\w+)\.weight")
_JOINED = {"gate_proj": "gate_up_proj", "up_proj": "gate_up_proj"}
_EMBEDDINGS = ("embed_tokens", "wte", "wpe")
_HEAD = "lm_head"
_ROUTERS = ("gate", "router")
_TRANSPOSED = ("c_attn", "c_proj", "c_fc")  # GPT-2's weights are [in, out]


def adaptable_modules(shapes: Mapping[str, Shape], *, tied: bool = False, interleaved: bool = False) -> list[Adapted]:
    """Return the modules that can have an adapter, in the order of ``shapes``, which has every base parameter by name.

    ``tied``: the head shares the weight of the token embedding, and is not in ``shapes``. ``interleaved``: the outputs
    of gates and ups of experts alternate in Hugging Face models.
    """
    modules: dict[str, Adapted] = {}
    for name, shape in shapes.items():
        if match := _EXPERT.fullmatch(name):
            _add_expert(modules, match, shape, interleaved=interleaved)
        elif name.endswith(".weight") and len(shape) == 2:
            module = name.removesuffix(".weight")
            last = module.rpartition(".")[2]
            if last in _EMBEDDINGS:
                modules[module] = Adapted(module, "embedding", *shape)
            elif last == _HEAD:
                modules[module] = Adapted(module, "head", shape[1], shape[0])
            elif last not in _ROUTERS:
                transposed = last in _TRANSPOSED
                inputs, outputs = shape if transposed else shape[::-1]
                modules[module] = Adapted(module, "linear", inputs, outputs, transposed=transposed)
    if tied:
        embedding = next(one for one in modules.values() if one.kind == "embedding")
        modules[_HEAD] = Adapted(_HEAD, "head", embedding.outputs, embedding.inputs)
    return list(modules.values())


def _add_expert(modules: dict[str, Adapted], match: re.Match[str], shape: Shape, *, interleaved: bool) -> None:
    matrix = match["matrix"]
    name = f"{match['experts']}.{_JOINED.get(matrix, matrix)}"
    known = modules.get(name, Adapted(name, "experts", shape[1], 0))
    halves = known.halves if matrix in known.halves else (*known.halves, matrix)
    modules[name] = known._replace(
        interleaved=interleaved and len(halves) > 1,
        halves=halves,
        outputs=shape[0] * len(halves),
        experts=max(known.experts, int(match["number"]) + 1),
    )


def adapted_modules(
    adapter: AdapterSpec, shapes: Mapping[str, Shape], *, tied: bool = False, interleaved: bool = False
) -> list[Adapted]:
    """Return the modules that have an adapter, in the order of the model. See ``adaptable_modules``."""
    return [
        module
        for module in adaptable_modules(shapes, tied=tied, interleaved=interleaved)
        if any(_matches(pattern, module) for pattern in adapter.targets)
    ]


def _matches(pattern: str, module: Adapted) -> bool:
    if pattern == ALL_LINEAR:
        return module.kind == "linear"
    return fnmatchcase(module.name, pattern) or fnmatchcase(module.name, f"*.{pattern}")


def unmatched_targets(adapter: AdapterSpec, shapes: Mapping[str, Shape], *, tied: bool = False) -> list[str]:
    """Return the patterns in ``targets`` that match no module which can have an adapter."""
    modules = adaptable_modules(shapes, tied=tied)
    return [pattern for pattern in adapter.targets if not any(_matches(pattern, module) for module in modules)]


def factor_shapes(adapter: AdapterSpec, module: Adapted) -> dict[str, Shape]:
    """Return the names and whole shapes of the parameters of a module's adapter.

    Those of linear layers, embeddings and the head have PEFT's names; each expert has its own factors.
    """
    rank, name = adapter.rank, module.name
    if module.kind == "embedding":
        return {f"{name}.lora_embedding_A": (rank, module.inputs), f"{name}.lora_embedding_B": (module.outputs, rank)}
    if module.kind == "experts":
        experts, _, joined = name.rpartition(".")
        rows = module.outputs // len(module.halves)
        numbers = range(module.experts)
        low: dict[str, Shape] = {
            f"{experts}.{number}.{joined}.lora_A.weight": (rank, module.inputs) for number in numbers
        }
        names = [f"{experts}.{number}.{half}.lora_B.weight" for number in numbers for half in module.halves]
        return low | dict.fromkeys(names, (rows, rank))
    magnitudes = {f"{name}.lora_magnitude_vector": (module.outputs,)} if adapter.dora else {}
    return {
        **magnitudes,
        f"{name}.lora_A.weight": (rank, module.inputs),
        f"{name}.lora_B.weight": (module.outputs, rank),
    }


_FACTOR = re.compile(r"\.lora_(A\.weight|B\.weight|embedding_A|embedding_B|magnitude_vector)$")


def is_adapter_parameter(name: str) -> bool:
    """Return True if a parameter with this name belongs to an adapter."""
    return _FACTOR.search(name) is not None
