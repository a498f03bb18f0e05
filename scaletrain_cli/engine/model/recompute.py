"""What the backward pass computes again or fetches back from the host instead of keeping it. Changes no arithmetic."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint

from scaletrain_cli.engine.model.causal_lm import CausalLM
from scaletrain_cli.spec.layout import LayoutSpec


def recompute_activations(model: CausalLM, layout: LayoutSpec, mode: str, pin_memory: bool = False) -> None:
    """Wrap the modules that ``mode`` (none, selective, full) picks among the blocks of this rank.

    Non-reentrant, because ZeRO-3's hooks break DeepSpeed's own variant. ``pin_memory``: of what waits on the host.
    """
    for module in _recomputed(model, layout, mode):
        module.forward = functools.partial(checkpoint, module.forward, use_reentrant=False)
    if layout.activation_offload:
        for block in model.blocks.values():
            block.forward = _on_host(block.forward, pin_memory)


def _recomputed(model: CausalLM, layout: LayoutSpec, mode: str) -> Iterator[nn.Module]:
    block: Any
    for index, block in enumerate(model.blocks.values()):
        if mode == "full":
            yield block
        elif mode == "selective" and layout.selective_scope == "attention":
            yield block.attention
        elif mode == "selective" and index % layout.selective_every == 0:
            yield block


def _on_host(forward: Callable[..., Any], pin_memory: bool) -> Callable[..., Any]:
    @functools.wraps(forward)
    def wrapped(*arguments: Any) -> Any:
        with save_on_cpu(pin_memory=pin_memory):
            return forward(*arguments)

    return wrapped
