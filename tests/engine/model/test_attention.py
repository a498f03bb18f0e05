"""The reported attention kernel is the one that runs; attention with sinks is that of its definition."""

from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

from scaletrain_cli.engine.model.attention import (
    AttentionSettings,
    TokenContext,
    attention_kernel,
    attention_mask,
    attention_weights,
    causal_attention,
)
from scaletrain_cli.engine.model.attention_sinks import fused_attention_with_sinks

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
def test_the_reported_kernel_runs(dtype: torch.dtype, kv_heads: int, allowed: list[SDPBackend], masked: bool) -> None:
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
    by_document = "scaletrain.document_attention.default" in ran.names
    assert by_document == masked
    assert reported == ("flash by document" if by_document else "flash" if fused else "math")
    assert fused or by_document or SDPBackend.FLASH_ATTENTION not in allowed or kv_heads == 2


def test_attention_with_dropout_is_reported_as_unfused() -> None:
    shape = {"batch": 1, "heads": 2, "kv_heads": 2, "length": 8, "head_dim": 8}
    assert attention_kernel(CPU, torch.float32, **shape, dropout=0.1) == "unfused"


def with_sinks(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, sinks: torch.Tensor, mask: torch.Tensor, scale: float
) -> torch.Tensor:
    """Return attention by definition: the sink is one more score, and has no value."""
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scores = query @ key.transpose(-1, -2) * scale + mask
    scores = torch.cat((scores, sinks.view(1, -1, 1, 1).expand(*scores.shape[:-1], 1)), -1)
    return scores.softmax(-1)[..., :-1] @ value


@pytest.mark.parametrize("documents", [None, torch.tensor([[0] * 9 + [1] * 11, [0] * 20])])
@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_fused_attention_with_sinks_and_its_gradients_are_those_of_the_definition(
    documents: torch.Tensor | None, window: int | None, kv_heads: int, device: str
) -> None:
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no GPU")
    length, dtype = (20, torch.float64) if device == "cpu" else (32, torch.float32)
    documents = None if documents is None else torch.nn.functional.pad(documents, (0, length - 20), value=2).to(device)
    torch.manual_seed(0)
    leaves = [
        torch.randn(2, heads, length, 8, dtype=dtype, device=device, requires_grad=True)
        for heads in (4, kv_heads, kv_heads)
    ]
    leaves.append((torch.randn(4, dtype=dtype, device=device) * 2).requires_grad_())
    context = TokenContext(torch.arange(length, device=device), torch.arange(2, device=device), documents)
    settings = AttentionSettings(scale=0.5, window=window)
    same = torch.zeros(2, length, dtype=torch.int64, device=device) if documents is None else documents
    mask = attention_mask(same, dtype, window)
    expected = with_sinks(*leaves, mask, 0.5)
    weights = torch.randn_like(expected)
    wanted = torch.autograd.grad((expected * weights).sum(), leaves)
    needed = None if window is None and documents is None else mask
    assert fused_attention_with_sinks(*leaves, needed, 0.5) is not None
    unfused = attention_weights(leaves[0], leaves[1], context, settings, leaves[3]).flatten(1, 2)
    found = causal_attention(*leaves[:3], context, settings, leaves[3])
    tolerance = 1e-10 if device == "cpu" else 1e-5
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
    value = leaves[2].repeat_interleave(4 // kv_heads, 1)
    torch.testing.assert_close(unfused @ value, expected, rtol=1e-5, atol=1e-5)  # softmax in fp32
    gradients = torch.autograd.grad((found * weights).sum(), leaves)
    for ours, theirs in zip(gradients, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


def test_attention_with_sinks_is_reported_as_flash_with_grouped_queries() -> None:
    shape = {"batch": 1, "heads": 4, "kv_heads": 2, "length": 8, "head_dim": 8}
    assert attention_kernel(CPU, torch.float32, **shape, sinks=True, masked=True) == "flash"
