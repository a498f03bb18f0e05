"""The model families, under Hugging Face parameter names. They hold no parallel code; ``parallel/`` shards them."""

from __future__ import annotations

from collections.abc import Callable

import torch

from scaletrain_cli.engine.model.causal_lm import CausalLM
from scaletrain_cli.engine.model.gpt import GPT2LMHeadModel
from scaletrain_cli.engine.model.llama import LlamaForCausalLM
from scaletrain_cli.plugins import load_reference
from scaletrain_cli.spec import ModelSpec
from scaletrain_cli.spec.extensions import model_family_extension

FAMILIES: dict[str, Callable[[ModelSpec], CausalLM]] = {"llama": LlamaForCausalLM, "gpt": GPT2LMHeadModel}


def outline(spec: ModelSpec) -> CausalLM:
    """Return the model on the meta device: modules with names and shapes, without values.

    ``FAMILIES`` has the built-in families; others come from the entry points ``scaletrain.model_families``.
    """
    family = FAMILIES.get(spec.family) or _from_extension(spec.family)
    with torch.device("meta"):
        return family(spec)


def _from_extension(name: str) -> Callable[[ModelSpec], CausalLM]:
    found = model_family_extension(name)
    if found is None:
        raise LookupError(f"no model family is called {name!r}")
    build: Callable[[ModelSpec], CausalLM] = load_reference(found.build)
    return build
