"""The models we train, with Hugging Face parameter names, and no word of how they are distributed."""

from __future__ import annotations

import torch

from scaletrain_cli.engine.model.causal_lm import CausalLM
from scaletrain_cli.engine.model.gpt import GPT2LMHeadModel
from scaletrain_cli.engine.model.llama import LlamaForCausalLM
from scaletrain_cli.spec import ModelSpec


def outline(spec: ModelSpec) -> CausalLM:
    """The modules of a model on the meta device: names and shapes, no values yet."""
    with torch.device("meta"):
        return LlamaForCausalLM(spec) if spec.family == "llama" else GPT2LMHeadModel(spec)
