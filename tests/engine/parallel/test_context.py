from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend

from scaletrain_cli.engine.model.attention import AttentionSettings, CausalAttention, TokenContext
from scaletrain_cli.engine.parallel import sequence as ring
from scaletrain_cli.engine.parallel.mesh import Axis, SequencePart, group_of
from scaletrain_cli.engine.parallel.sequence import RingAttention, UlyssesAttention
from scaletrain_cli.plan.axes import resolve_axes
from scaletrain_cli.plan.search.layouts import build_layout
from scaletrain_cli.plan.speed.communication import ring_bytes
from tests.engine.ranks import on_ranks
from tests.plan.specs import spec_of

RANKS = 4
CUTS = [(1, 1), (1, 3), (2, 1), (2, 2), (2, 4), (3, 2), (4, 3), (2, 3)]


def parts_of(context: int, sequence: int) -> list[SequencePart]:
    return [SequencePart(context, c, sequence, s) for c in range(context) for s in range(sequence)]


@pytest.mark.parametrize(("context", "sequence"), CUTS)
def test_context_ranks_have_each_position_once_and_as_many_pairs(context: int, sequence: int) -> None:
    parts = parts_of(context, sequence)
    length = 3 * parts[0].multiple
    places = [part.places(length) for part in parts]
    assert torch.cat(places).sort().values.tolist() == list(range(length))
    assert {len(each) for each in places} == {length // (context * sequence)}
    rows = np.arange(2 * length).reshape(2, length)
    assert all((part.take(rows)[0] == mine.numpy()).all() for part, mine in zip(parts, places, strict=True))
    of_context = [torch.cat(places[first : first + sequence]) for first in range(0, len(places), sequence)]
    assert len({int((each + 1).sum()) for each in of_context}) == 1


@dataclass(frozen=True)
class Case:
    """Attention of ``heads`` queries and ``kv_heads`` keys over ``ranks`` context ranks and the others by Ulysses."""

    ranks: int = RANKS
    heads: int = 4
    kv_heads: int = 4
    head_dim: int = 16
    value_dim: int = 16
    length: int = 48
    dtype: torch.dtype = torch.float64
    scale: float | None = None
    fused: bool = True


CASES = [
    Case(),
    Case(ranks=2),
    Case(kv_heads=2),
    Case(ranks=2, kv_heads=1, heads=2),
    Case(head_dim=12, value_dim=8, scale=0.1),
    Case(head_dim=8, value_dim=12, ranks=2),
    Case(kv_heads=2, fused=False),
    Case(kv_heads=2, dtype=torch.float32, length=160),
    Case(kv_heads=2, dtype=torch.bfloat16),
    Case(kv_heads=2, dtype=torch.bfloat16, fused=False),
    Case(ranks=2, kv_heads=2, dtype=torch.bfloat16),
    Case(ranks=2, kv_heads=1, heads=2, dtype=torch.float32),
]


@pytest.fixture(scope="module")
def of_ranks() -> list[list[tuple[list[Tensor], list[int]]]]:
    return on_ranks(RANKS, all_cases)


def inputs_of(case: Case) -> list[Tensor]:
    """Return query, key, value, and the gradient of the result, of whole sequences."""
    generator = torch.Generator().manual_seed(3)
    shapes = [(case.heads, case.head_dim), (case.kv_heads, case.head_dim), (case.kv_heads, case.value_dim)]
    shapes.append((case.heads, case.value_dim))
    whole = [torch.randn(2, case.length, *shape, generator=generator, dtype=torch.float64) for shape in shapes]
    return [each.to(case.dtype).transpose(1, 2) for each in whole]


def all_cases() -> list[tuple[list[Tensor], list[int]]]:
    rank = dist.get_rank()
    everyone = Axis(RANKS, rank, group_of(list(range(RANKS))))
    inner = [group_of([first, first + 1]) for first in (0, 2) if rank in (first, first + 1)]
    across = [group_of([first, first + 2]) for first in (0, 1) if rank in (first, first + 2)]
    context, sequence = Axis(2, rank // 2, across[0]), Axis(2, rank % 2, inner[0])
    found = []
    for case in CASES:
        axes = (everyone, Axis()) if case.ranks == RANKS else (context, sequence)
        with nullcontext() if case.fused else patch.object(ring, "fused_kernel", lambda *_: None):
            found.append(on_rank(case, *axes))
    return found


def on_rank(case: Case, context: Axis, sequence: Axis) -> tuple[list[Tensor], list[int]]:
    """Return this rank's result and gradients, and the bytes that it sends around the ring in each pass."""
    part = SequencePart(context.size, context.rank, sequence.size, sequence.rank)
    places = part.places(case.length)
    *mine, gradient = (each[:, :, places].contiguous() for each in inputs_of(case))
    leaves = [each.requires_grad_() for each in mine]
    attention: Any = RingAttention(CausalAttention(AttentionSettings(scale=case.scale)), context)
    attention = attention if sequence.size == 1 else UlyssesAttention(attention, sequence)
    with counted_bytes() as sent:
        mixed = attention(*leaves, TokenContext(places, torch.arange(2)))
        forward = sum(sent)
        mixed.backward(gradient)
    return [each.detach() for each in (mixed, *(leaf.grad for leaf in leaves))], [forward, sum(sent) - forward]


@contextmanager
def counted_bytes() -> Iterator[list[int]]:
    sent: list[int] = []
    exchange = dist.batch_isend_irecv

    def counting(operations: list[dist.P2POp]) -> Any:
        sent.extend(each.tensor.nbytes for each in operations if each.op is dist.isend)
        return exchange(operations)

    with patch.object(dist, "batch_isend_irecv", counting):
        yield sent


def expected(case: Case) -> list[Tensor]:
    *inputs, gradient = (each.double() for each in inputs_of(case))
    leaves = [each.detach().requires_grad_() for each in inputs]
    mixed = F.scaled_dot_product_attention(*leaves, is_causal=True, enable_gqa=True, scale=case.scale)
    mixed.backward(gradient)
    return [mixed.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]


LIMITS = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 0.03}


@pytest.mark.parametrize("number", range(len(CASES)), ids=lambda number: str(CASES[number])[5:-1])
def test_a_ring_computes_the_attention_and_the_gradients_of_one_rank(number: int, of_ranks: Any) -> None:
    case = CASES[number]
    parts = parts_of(case.ranks, RANKS // case.ranks)
    for kind, whole in enumerate(expected(case)):
        for rank, part in enumerate(parts):
            found = of_ranks[rank][number][0][kind]
            assert found.dtype is case.dtype
            wanted = whole[:, :, part.places(case.length)]
            assert float((found.double() - wanted).abs().max()) <= LIMITS[case.dtype] * float(wanted.abs().max())


@pytest.mark.parametrize("number", [n for n, case in enumerate(CASES) if case.dtype is not torch.float64])
def test_a_rank_sends_the_planned_bytes(number: int, of_ranks: Any) -> None:
    case = CASES[number]
    spec = spec_of(
        "llama-7b",
        cluster__gpu="cpu",
        cluster__gpus_per_node=RANKS,
        training__precision="fp32" if case.dtype is torch.float32 else "bf16",
        training__global_batch_size=2,
        training__micro_batch_size=2,
        layout__context_parallel=case.ranks,
        layout__sequence_parallel=RANKS // case.ranks,
        model__num_attention_heads=case.heads,
        model__num_key_value_heads=case.kv_heads,
        model__head_dim=case.head_dim,
        model__hidden_size=64,
        model__seq_len=case.length,
    )
    planned = ring_bytes(spec, build_layout(spec, resolve_axes(spec), 1, "none", 2))
    assert {tuple(sent[number][1]) for sent in of_ranks} == {planned}


@pytest.mark.parametrize(
    ("kernel", "dtype"),
    [(SDPBackend.FLASH_ATTENTION, torch.bfloat16), (SDPBackend.EFFICIENT_ATTENTION, torch.float32)],
    ids=["flash", "memory-efficient"],
)
@pytest.mark.parametrize(("rows", "columns"), [(96, 96), (96, 48), (48, 96)])
def test_the_kernels_for_cuda_take_and_return_these_shapes(
    kernel: SDPBackend, dtype: torch.dtype, rows: int, columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By torch's own shapes of its kernels: tensors without values, since there is no GPU."""
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    query, gradient = (torch.empty(2, 96, 4, 16, dtype=dtype, device="meta").transpose(1, 2) for _ in range(2))
    block = torch.empty(2, 2, 2, 96, 16, dtype=dtype, device="meta")[:, :, :, :columns]
    mine, attention = query[:, :, 96 - rows :], ring._Kernel(kernel, 0.25)
    mixed, sums = attention.forward(mine, *block, causal=rows == columns)
    assert (mixed.shape, mixed.dtype) == (mine.shape, dtype)
    assert (sums.shape, sums.dtype) == (mine.shape[:3], torch.float32)
    whole = torch.empty(2, 4, 96, dtype=torch.float32, device="meta")[:, :, 96 - rows :]
    found = attention.backward(gradient[:, :, 96 - rows :], mine, mixed, whole, *block, causal=rows == columns)
    assert [each.shape for each in found] == [mine.shape, *(part.shape for part in block)]
