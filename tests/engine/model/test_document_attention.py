"""Attention within documents and windows equals attention with a mask of all pairs, and saves no matrix of pairs."""

import inspect
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.attention.varlen import varlen_attn

from scaletrain_cli.engine.model import document_attention as module
from scaletrain_cli.engine.model.attention import (
    AttentionSettings,
    TokenContext,
    attention_mask,
    causal_attention,
    masked_attention,
)
from scaletrain_cli.engine.model.document_attention import Segments, document_attention, segments_of
from tests.engine.fresh_model import build_model
from tests.engine.model.test_models import LLAMA, spec

LENGTH, HEAD = 96, 16
WINDOWS = [None, 5, 40, 500]


def row(*lengths: int) -> Tensor:
    """Return the document numbers of a row, padded with -1."""
    numbers = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    return F.pad(numbers, (0, LENGTH - len(numbers)), value=-1)


DOCUMENTS = torch.stack([row(50, 1, 7, 38), row(96), row(3, 60)])


def inputs(dtype: torch.dtype, kv_heads: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(3, heads, LENGTH, HEAD) for heads in (4, kv_heads, kv_heads)]
    return [torch.randn(shape, generator=generator, dtype=dtype).requires_grad_() for shape in shapes]


def with_gradients(result: Tensor, sources: list[Tensor]) -> list[Tensor]:
    gradient = torch.randn(result.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return [result.detach(), *torch.autograd.grad(result, sources, gradient.to(result.dtype))]


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("documents", [DOCUMENTS, None], ids=["packed", "whole"])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-13), (torch.float32, 1e-6)], ids=str)
def test_results_and_gradients_are_those_of_a_mask(
    dtype: torch.dtype, tolerance: float, documents: Tensor | None, kv_heads: int, window: int | None
) -> None:
    sources, settings = inputs(dtype, kv_heads), AttentionSettings(scale=0.3, window=window)
    context = TokenContext(torch.arange(LENGTH), torch.arange(3), documents)
    found = with_gradients(causal_attention(*sources, context, settings), sources)
    expected = with_gradients(masked_attention(*sources, context, settings), sources)
    for one, other in zip(found, expected, strict=True):
        assert (one - other).abs().max() <= tolerance * max(1.0, float(other.abs().max()))


def test_channels_need_not_be_adjacent_in_memory() -> None:
    sources = [x.detach().mT.contiguous().mT.requires_grad_() for x in inputs(torch.float64, 4)]
    segments = segments_of(DOCUMENTS)
    expected = with_gradients(document_attention(*(x.contiguous() for x in sources), segments), sources)
    for one, other in zip(with_gradients(document_attention(*sources, segments), sources), expected, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize(
    ("capability", "heads"),
    [((8, 0), (192, 200, 224, 256)), ((9, 0), (192, 200, 224, 256)), ((8, 6), (192, 256)), ((12, 0), (192, 256))],
    ids=str,
)
def test_heads_without_a_backward_pass_on_a_gpu_take_a_mask(
    capability: tuple[int, int], heads: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    gpu = torch.device("cuda")
    found = tuple(size for size in (192, 200, 224, 256, 264) if module.is_supported(gpu, torch.bfloat16, size))
    assert found == heads


def test_values_may_have_fewer_channels_than_queries() -> None:
    query, key, value = inputs(torch.float64, 4)
    narrow, context = value[..., :10], TokenContext(torch.arange(LENGTH), torch.arange(3), DOCUMENTS)
    expected = F.scaled_dot_product_attention(query, key, narrow, attn_mask=attention_mask(DOCUMENTS, torch.float64))
    torch.testing.assert_close(causal_attention(query, key, narrow, context), expected)


@pytest.mark.parametrize("window", [None, 40])
def test_bf16_is_as_close_to_fp64_as_with_a_mask(window: int | None) -> None:
    sources, settings = inputs(torch.bfloat16, 2), AttentionSettings(window=window)
    exact = [source.detach().double().requires_grad_() for source in sources]
    context = TokenContext(torch.arange(LENGTH), torch.arange(3), DOCUMENTS)
    truth = with_gradients(masked_attention(*exact, context, settings), exact)
    found, masked = (
        [
            float((one.double() - true).norm() / true.norm())
            for one, true in zip(with_gradients(compute(*sources, context, settings), sources), truth, strict=True)
        ]
        for compute in (causal_attention, masked_attention)
    )
    assert all(ours <= 1.2 * theirs for ours, theirs in zip(found, masked, strict=True)), (found, masked)


def test_segments_are_the_documents_of_all_rows_one_after_another() -> None:
    bounds, longest = segments_of(DOCUMENTS)
    assert bounds.tolist() == [0, 50, 51, 58, 96, 192, 195, 255, 288]
    assert longest == 96


def test_empty_segments_change_nothing() -> None:
    sources, segments = inputs(torch.float32, 4), segments_of(DOCUMENTS)
    padded = Segments(F.pad(segments.bounds, (0, 3), value=3 * LENGTH), segments.longest)
    results = [with_gradients(document_attention(*sources, each), sources) for each in (segments, padded)]
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


def test_nothing_of_the_size_of_all_pairs_is_saved() -> None:
    sizes: list[int] = []
    context = TokenContext(torch.arange(LENGTH), torch.arange(3), DOCUMENTS)
    sources = inputs(torch.float32, 2)
    with saved_tensors_hooks(lambda tensor: sizes.append(tensor.numel()) or tensor, lambda tensor: tensor):
        causal_attention(*sources, context, AttentionSettings(window=8))
    assert max(sizes) == sources[0].numel()
    model = build_model(spec({**LLAMA, "sliding_window": 8}), seed=0)
    shared = model.with_masks(context, torch.zeros(3, LENGTH, 8))
    assert shared.segments is not None
    assert shared.mask is shared.window_mask is None


@pytest.mark.filterwarnings("ignore")  # torch's own, while it traces
def test_compiled_attention_is_the_same_for_other_documents_and_compiles_twice_at_most() -> None:
    compilations = []

    def backend(graph: Any, example: Any) -> Any:
        compilations.append(graph)
        return graph

    def attend(query: Tensor, key: Tensor, value: Tensor, context: TokenContext) -> Tensor:
        return causal_attention(query * 1, key, value, context, AttentionSettings(window=16))

    compiled = torch.compile(attend, fullgraph=True, backend=backend)
    sources = inputs(torch.float32, 2)
    for lengths in ((50, 46), (20, 20, 56), (96,), (1, 2, 3, 4, 86), (48, 48)):
        context = TokenContext(torch.arange(LENGTH), torch.arange(3), row(*lengths).expand(3, -1)).with_segments()
        found = with_gradients(compiled(*sources, context), sources)
        expected = with_gradients(attend(*sources, context), sources)
        assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    assert len(compilations) <= 2


def by_definition(
    query: Tensor, key: Tensor, value: Tensor, bounds_q: Tensor, bounds_k: Tensor, *_: int, **options: Any
) -> Tensor:
    """Return what the documentation of ``varlen_attn`` states, of [tokens, heads, channels]."""
    left, right = options["window_size"]
    parts = []
    for start, stop in zip(bounds_q.tolist(), bounds_q.tolist()[1:], strict=False):
        places = torch.arange(stop - start)
        distance = places[:, None] - places
        seen = (distance >= -right) & ((distance <= left) if left >= 0 else True)
        own = [x[start:stop].transpose(0, 1) for x in (query, key, value)]
        mixed = F.scaled_dot_product_attention(*own, attn_mask=seen, scale=options["scale"], enable_gqa=True)
        parts.append(mixed.transpose(0, 1))
    return torch.cat(parts)


@pytest.mark.parametrize("window", WINDOWS)
def test_the_kernel_for_cuda_gets_what_its_docs_ask_for(window: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def kernel(*arguments: Any, **options: Any) -> Tensor:
        inspect.signature(varlen_attn).bind(*arguments, **options)
        calls.append((arguments[5:7], options["enable_gqa"]))
        return by_definition(*arguments, **options)

    monkeypatch.setattr(module, "_cuda_kernel", lambda: kernel)
    query, key, value = inputs(torch.float64, 2)
    segments = segments_of(DOCUMENTS)
    limit = None if window is None or window >= segments.longest else window
    found = module._on_cuda(query, key, value, segments, 0.3, limit)
    expected = document_attention(query, key, value, segments, 0.3, window)
    torch.testing.assert_close(found, expected)
    assert calls == [((96, 96), True)]
