"""The models we train, with Hugging Face parameter names, and no word of how they are distributed."""

from __future__ import annotations

import functools

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from scaletrain_cli.engine.model.causal_lm import CausalLM
from scaletrain_cli.engine.model.gpt import GPT2LMHeadModel
from scaletrain_cli.engine.model.llama import LlamaForCausalLM
from scaletrain_cli.spec import ModelSpec


def outline(spec: ModelSpec) -> CausalLM:
    """The modules of a model on the meta device: names and shapes, no values yet."""
    with torch.device("meta"):
        return LlamaForCausalLM(spec) if spec.family == "llama" else GPT2LMHeadModel(spec)


def build_model(spec: ModelSpec, seed: int) -> CausalLM:
    """A freshly initialised fp32 model on the CPU; the same seed gives the same weights for every layout."""
    model = LlamaForCausalLM(spec) if spec.family == "llama" else GPT2LMHeadModel(spec)
    initialise(model, spec, torch.Generator().manual_seed(seed))
    return model


@torch.no_grad()
def initialise(model: CausalLM, spec: ModelSpec, generator: torch.Generator) -> None:
    """Normal(0, initializer_range) matrices, with the projections into the residual stream scaled by 1/sqrt(2 layers).

    The scaling keeps the residual stream's variance independent of depth (GPT-2 report, section 2.3).
    """
    for name, parameter in model.named_parameters():
        if name.endswith(".bias"):
            parameter.zero_()
        elif parameter.ndim == 1:
            parameter.fill_(1.0)
        else:
            residual = name.endswith(model.residual_projections)
            std = spec.initializer_range / (2 * spec.num_hidden_layers) ** 0.5 if residual else spec.initializer_range
            parameter.normal_(0.0, std, generator=generator)


def checkpoint_activations(model: CausalLM, mode: str) -> None:
    """Recompute blocks in the backward pass: all of them (full), every second one (selective), or none.

    Arithmetic is unchanged. Non-reentrant, because ZeRO-3's hooks break DeepSpeed's own variant.
    """
    every = {"none": 0, "selective": 2, "full": 1}[mode]
    for index, block in enumerate(model.blocks.values()):
        if every and index % every == 0:
            block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, object]]:
    """Matrices decay, norms and biases do not (GPT-3, arXiv:2005.14165, appendix B)."""
    decayed = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim <= 1]
    return [{"params": decayed, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]
