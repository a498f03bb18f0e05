"""How each block of a model runs: compiled or not, and what its backward pass computes again or fetches back from the
host instead of keeping it. Changes no arithmetic.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from scaletrain_cli.engine.model.causal_lm import CausalLM
from scaletrain_cli.spec.layout import LayoutSpec

Forward = Callable[..., Any]


def wrap_blocks(
    model: CausalLM, layout: LayoutSpec, mode: str, *, compiled: bool = False, pin_memory: bool = False
) -> None:
    """Replace the forward passes of the blocks of this rank, or of their attention.

    ``mode``: none, selective or full activation checkpointing. ``pin_memory``: of what waits on the host. Whole blocks
    are recomputed around the compiled graph, because a checkpoint within one sends mixtures of experts back to eager
    execution. The head and the embedding, which may share a weight that ZeRO-3 holds in shards, are not compiled.
    """
    attention_only = mode == "selective" and layout.selective_scope == "attention"
    every = {"none": 0, "selective": layout.selective_every, "full": 1}[mode]
    block: Any
    for index, block in enumerate(model.blocks.values()):
        if attention_only:
            block.attention.forward = _recomputed(block.attention.forward)
        if compiled:
            block.forward = torch.compile(block.forward)
        if every and not attention_only and index % every == 0:
            block.forward = _recomputed(block.forward)
        if layout.activation_offload:
            block.forward = _on_host(block, pin_memory)


def _recomputed(forward: Forward) -> Forward:
    """Non-reentrant, because ZeRO-3's hooks break DeepSpeed's own variant. A closure: dynamo skips a partial.

    Random states are not kept for the second time, because nothing within draws from them: see dropout.
    """

    @functools.wraps(forward)
    def wrapped(*arguments: Any) -> Any:
        return checkpoint(forward, *arguments, use_reentrant=False, preserve_rng_state=False)

    return wrapped


def _on_host(block: nn.Module, pin_memory: bool) -> Forward:
    """What is saved within waits on the host. Weights do not: they stay on the device, or ZeRO-3 gathers them again."""
    forward, weights = block.forward, list(block.parameters())
    away = save_on_cpu(pin_memory=pin_memory)

    def pack(tensor: Tensor) -> Any:
        if isinstance(tensor, nn.Parameter):
            return tensor
        address = tensor.untyped_storage().data_ptr()  # a view of a weight has the weight's
        return tensor if any(w.untyped_storage().data_ptr() == address for w in weights) else away.pack_hook(tensor)

    def unpack(packed: Any) -> Tensor:
        return packed if isinstance(packed, Tensor) else away.unpack_hook(packed)

    @functools.wraps(forward)
    def wrapped(*arguments: Any) -> Any:
        with saved_tensors_hooks(pack, unpack):
            return forward(*arguments)

    return wrapped
