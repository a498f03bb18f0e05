"""Dropout: the published generator, the requested rate, no pattern, and one mask per sample in every layout."""

import math
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from scaletrain_cli.engine.model import attention as dropout
from scaletrain_cli.engine.model.attention import (
    AttentionWithDropout,
    KeyedDropout,
    TokenContext,
    assign_dropout_keys,
    causal_attention,
)

LENGTH, CHANNELS = 64, 126
POSITIONS, SAMPLES = torch.arange(LENGTH), torch.arange(8)


class Places(nn.Module):
    def __init__(self, p: float, seed: int = 0) -> None:
        super().__init__()
        self.first, self.second = KeyedDropout(p), KeyedDropout(p)
        assign_dropout_keys(self, seed)


def kept(p: float = 0.1, seed: int = 0, place: str = "first", samples: Tensor = SAMPLES) -> Tensor:
    """Return a mask [samples, length, channels]: 1 for values that are kept."""
    x = torch.ones(len(samples), LENGTH, CHANNELS)
    return (Places(p, seed).get_submodule(place)(x, TokenContext(POSITIONS, samples)) != 0).float()


def correlation(a: Tensor, b: Tensor) -> float:
    """Return the difference from independent masks, in standard deviations."""
    a, b = a.flatten() - a.mean(), b.flatten() - b.mean()
    return float((a @ b) / (a.norm() * b.norm()) * math.sqrt(a.numel()))


def test_the_generator_is_splitmix64() -> None:
    """The first outputs from seed 1234567, as in the reference implementation."""
    outputs = dropout._split(torch.tensor(1234567), torch.arange(3)).tolist()
    assert [word % 2**64 for word in outputs] == [6457827717110365317, 3203168211198807973, 9817491932198370423]


@pytest.mark.parametrize("p", [0.01, 0.1, 0.5, 0.9])
def test_the_requested_share_is_dropped_everywhere_and_the_mean_is_kept(p: float) -> None:
    mask = kept(p)
    for dim in (0, 1, 2):
        others = [d for d in range(3) if d != dim]
        count = mask.numel() // mask.shape[dim]
        assert (mask.mean(others) - (1 - p)).abs().max() < 5 * math.sqrt(p * (1 - p) / count)
    dropped = Places(p).first(torch.ones(8, LENGTH, CHANNELS), TokenContext(POSITIONS, SAMPLES))
    assert dropped.unique().tolist() == pytest.approx([0, 1 / (1 - p)], rel=1e-3)


def test_masks_of_neighboring_channels_positions_samples_and_seeds_are_independent() -> None:
    mask = kept()
    pairs = {
        "channels": (mask[..., 1:], mask[..., :-1]),
        "words": (mask[..., 4:], mask[..., :-4]),
        "positions": (mask[:, 1:], mask[:, :-1]),
        "diagonal": (mask[:, 1:, 1:], mask[:, :-1, :-1]),
        "samples": (mask[1:], mask[:-1]),
        "steps": (mask, kept(samples=SAMPLES + 8)),
        "places": (mask, kept(place="second")),
        "seeds": (mask, kept(seed=1)),
    }
    deviations = {name: correlation(*pair) for name, pair in pairs.items()}
    assert max(abs(deviation) for deviation in deviations.values()) < 4.5, deviations


def test_any_slice_of_a_batch_drops_what_the_whole_does() -> None:
    module, x = Places(0.3).first, torch.randn(8, LENGTH, CHANNELS)
    whole = module(x, TokenContext(POSITIONS, SAMPLES))
    for samples, positions in ((SAMPLES[2:4], POSITIONS[16:32]), (SAMPLES.flip(0), POSITIONS[::2])):
        piece = module(x[samples][:, positions], TokenContext(positions, samples))
        assert torch.equal(piece, whole[samples][:, positions])


def test_recomputation_draws_the_same_mask() -> None:
    module, gradients = Places(0.3).first, []
    for forward in (module, lambda *given: checkpoint(module, *given, use_reentrant=False)):
        x = torch.ones(2, LENGTH, CHANNELS, requires_grad=True)
        forward(x, TokenContext(POSITIONS, SAMPLES[:2])).sum().backward()
        gradients.append(x.grad)
    assert torch.equal(*gradients)


def test_the_backward_pass_needs_one_byte_per_decision() -> None:
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        Places(0.3).first(torch.ones(2, LENGTH, CHANNELS, requires_grad=True), TokenContext(POSITIONS, SAMPLES[:2]))
    assert [(t.dtype, t.shape) for t in saved if t.ndim] == [(torch.bool, (2, LENGTH, CHANNELS))]


def test_evaluation_drops_nothing() -> None:
    places, x = Places(0.5).eval(), torch.randn(8, LENGTH, CHANNELS)
    assert places.first(x, TokenContext(POSITIONS, SAMPLES)) is x


CONTEXT = TokenContext(torch.arange(24), SAMPLES[:2])


def attention_inputs(heads: int = 4, kv_heads: int = 2) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(2, n, 24, 8, generator=generator) for n in (heads, kv_heads, kv_heads)]


def attention(p: float, first_head: int = 0) -> AttentionWithDropout:
    made = AttentionWithDropout(p, first_head)
    made.key.fill_(5)
    return made


def test_attention_with_dropout_equals_the_formula_with_some_weights_zeroed() -> None:
    query, key, value = attention_inputs()
    mixed = attention(0.25)(query, key, value, CONTEXT)
    rows = dropout._split(torch.tensor(5), SAMPLES[:2]).view(2, 1, 1)
    rows = dropout._split(dropout._split(rows, torch.arange(4).view(4, 1)), torch.arange(24))
    mask = dropout._drop(torch.ones(2, 4, 24, 24), rows, 0.25)
    key, value = (x.repeat_interleave(2, dim=1) for x in (key, value))
    scores = query @ key.transpose(-1, -2) / math.sqrt(8)
    weights = scores.masked_fill(torch.ones(24, 24, dtype=torch.bool).triu(1), -math.inf).softmax(-1)
    torch.testing.assert_close(mixed, (weights * mask) @ value)
    assert (mask == 0).float().mean().item() == pytest.approx(0.25, abs=0.02)


def test_without_dropout_attention_is_the_fused_one() -> None:
    given = attention_inputs()
    torch.testing.assert_close(attention(1e-9)(*given, CONTEXT), causal_attention(*given, CONTEXT))  # rounds to nothing
    assert torch.equal(attention(0.5).eval()(*given, CONTEXT), causal_attention(*given, CONTEXT))


def test_a_rank_with_some_of_the_heads_drops_what_the_whole_does() -> None:
    query, key, value = attention_inputs()
    whole = attention(0.5)(query, key, value, CONTEXT)
    second = attention(0.5, first_head=2)(query[:, 2:], key[:, 1:], value[:, 1:], CONTEXT)
    torch.testing.assert_close(second, whole[:, 2:])


def test_blocks_share_one_compiled_graph() -> None:
    graphs: list[Any] = []

    def backend(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    model = nn.ModuleList(Places(0.1) for _ in range(4))
    assign_dropout_keys(model, 0)
    x, masks = torch.ones(8, LENGTH, CHANNELS), []
    for places in model:
        expected = places.first(x, TokenContext(POSITIONS, SAMPLES))
        places.first.compile(backend=backend, fullgraph=True)
        masks.append(places.first(x, TokenContext(POSITIONS, SAMPLES)))
        assert torch.equal(masks[-1], expected)
    assert len(graphs) == 1
    assert not any(torch.equal(a, b) for a, b in pairwise(masks))


def test_the_mean_over_masks_is_the_input() -> None:
    module, generator = Places(0.2).first, torch.Generator().manual_seed(0)
    x = torch.randn(1, 4, 8, generator=generator).expand(4000, 4, 8)
    mean = module(x, TokenContext(torch.arange(4), torch.arange(4000))).mean(0)
    assert F.mse_loss(mean, x[0]) < 3 * (0.25 * x[0].square().mean()) / 4000
