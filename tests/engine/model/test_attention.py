"""The reported attention kernel is the one that runs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

from scaletrain_cli.engine.model.attention import TokenContext, attention_kernel, causal_attention

CPU = torch.device("cpu")


class Operations(TorchDispatchMode):
    """Return the names of the operations that ran."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(str(function))
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("allowed", [[SDPBackend.FLASH_ATTENTION, SDPBackend.MATH], [SDPBackend.MATH]])
def test_the_reported_kernel_is_the_one_that_runs(
    dtype: torch.dtype, kv_heads: int, allowed: list[SDPBackend], masked: bool
) -> None:
    documents = torch.zeros(2, 16, dtype=torch.int64) if masked else None
    context = TokenContext(torch.arange(16), torch.arange(2), documents)
    query, key = (torch.randn(2, heads, 16, 8, dtype=dtype, requires_grad=True) for heads in (4, kv_heads))
    with sdpa_kernel(allowed):
        reported = attention_kernel(
            CPU, dtype, batch=2, heads=4, kv_heads=kv_heads, length=16, head_dim=8, masked=masked
        )
        with Operations() as ran:
            causal_attention(query, key, key.detach(), context)
    fused = any("flash_attention" in name for name in ran.names)
    assert reported == ("flash" if fused else "math")
    assert fused or SDPBackend.FLASH_ATTENTION not in allowed or kv_heads == 2


def test_attention_with_dropout_is_reported_as_unfused() -> None:
    shape = {"batch": 1, "heads": 2, "kv_heads": 2, "length": 8, "head_dim": 8}
    assert attention_kernel(CPU, torch.float32, **shape, dropout=0.1) == "unfused"
