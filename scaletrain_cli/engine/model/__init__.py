"""The model families, under Hugging Face parameter names. They hold no parallel code; ``parallel/`` shards them."""

from collections.abc import Callable
from typing import Any, overload

import torch
from torch.nn import init
from torch.overrides import TorchFunctionMode

from scaletrain_cli.engine.model.base import CausalLM, TrainedModel, VisionModel
from scaletrain_cli.engine.model.gpt import GPT2LMHeadModel
from scaletrain_cli.engine.model.llama import LlamaForCausalLM
from scaletrain_cli.plugins import load_reference
from scaletrain_cli.spec import ModelSpec
from scaletrain_cli.spec.extensions import model_family_extension
from scaletrain_cli.spec.run import AnyModel
from scaletrain_cli.spec.vision_model import VisionSpec

FAMILIES: dict[str, Callable[[ModelSpec], CausalLM]] = {"llama": LlamaForCausalLM, "gpt": GPT2LMHeadModel}
# Below this package; a run imports only the one that it trains.
VISION_FAMILIES: dict[str, str] = {
    "resnet": "vision.resnet:ResNetForImageClassification",
    "convnext": "vision.convnext:ConvNextForImageClassification",
    "vit": "vision.vit:ViTForImageClassification",
    "clip": "vision.clip:Clip",
    "llava": "vision.llava:Llava",
}


@overload
def outline(spec: ModelSpec) -> CausalLM: ...


@overload
def outline(spec: VisionSpec) -> VisionModel: ...


@overload
def outline(spec: AnyModel) -> TrainedModel: ...


def outline(spec: Any) -> TrainedModel:
    """Return the model on the meta device: modules with names and shapes, without values.

    ``FAMILIES`` and ``VISION_FAMILIES`` have the built-in families; others come from the entry points
    ``scaletrain.model_families``.
    """
    family: Callable[[Any], TrainedModel]
    if spec.family in VISION_FAMILIES:
        family = load_reference(f"{__name__}.{VISION_FAMILIES[spec.family]}")
    else:
        family = FAMILIES.get(spec.family) or _from_extension(spec.family)
    with torch.device("meta"), _WithoutInitialValues():
        return family(spec)


class _WithoutInitialValues(TorchFunctionMode):
    """Skips ``torch.nn.init``, which on the meta device does nothing but load torch's compiler."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if getattr(func, "__module__", None) == init.__name__:
            return args[0] if args else (kwargs or {})["tensor"]
        return func(*args, **(kwargs or {}))


def _from_extension(name: str) -> Callable[[ModelSpec], CausalLM]:
    extension = model_family_extension(name)
    if extension is None:
        raise LookupError(f"no model family is called {name!r}")
    build: Callable[[ModelSpec], CausalLM] = load_reference(extension.build)
    return build
