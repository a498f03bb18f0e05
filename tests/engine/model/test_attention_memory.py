"""Memory of attention without a fused kernel: the plan against the tensors that exist in the backward pass."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from scaletrain_cli.engine.model.causal_lm import TokenContext
from scaletrain_cli.plan.memory.activations import token_activations
from tests.engine.fresh_model import build_model
from tests.plan.specs import model_of

SIZES: dict[str, Any] = {
    "hidden_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 384,
    "vocab_size": 256,
    "seq_len": 512,
    "max_position_embeddings": 512,
}


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of the tensors that operations return, as long as they exist, and their peak."""

    def __init__(self, known: list[torch.Tensor]) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._sizes = {tensor.untyped_storage()._cdata: 0 for tensor in known}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage()._cdata not in self._sizes:
                storage = tensor.untyped_storage()
                self._sizes[storage._cdata] = storage.nbytes()
                self.now += storage.nbytes()
                self.peak = max(self.peak, self.now)
                weakref.finalize(storage, self._freed, storage._cdata)
        return result

    def _freed(self, key: int) -> None:
        self.now -= self._sizes.pop(key)


@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "changes",
    [{"preset": "gemma-2-2b"}, {"attention_dropout": 0.1}, {"preset": "gemma-2-2b", "attention_dropout": 0.1}],
)
def test_the_backward_pass_of_unfused_attention_needs_the_gradients_of_scores(
    changes: dict[str, Any], precision: torch.dtype
) -> None:
    model = model_of(**{"preset": "llama-7b", **SIZES, **changes})
    block = build_model(model, seed=0).to(precision)
    hidden = torch.randn(1, 512, 128, dtype=precision).requires_grad_()
    context = block.with_masks(TokenContext(torch.arange(512), torch.arange(1)), hidden)
    with LiveBytes([*block.parameters(), hidden]) as live:
        out = block.transform(hidden, context)
        gradient, saved = torch.ones_like(out), live.now
        live.peak = 0
        out.backward(gradient)
    measured, planned = (live.peak - saved) / 512, token_activations(model, precision.itemsize).working
    assert measured <= planned <= 1.15 * measured
