"""What ZeRO-3 gathers and holds in a micro-batch, by the rules of DeepSpeed's coordinator."""

from typing import Any

import pytest

from scaletrain_cli.plan.memory.activations import Recomputation
from scaletrain_cli.plan.memory.gathered_weights import GatheredWeights, gathered_weights
from tests.plan.specs import spec_of

HIDDEN, INNER, VOCABULARY = 4096, 11_008, 32_000
TABLE, SQUARE, WIDE = VOCABULARY * HIDDEN, HIDDEN**2, HIDDEN * INNER
BLOCK = 4 * SQUARE + 3 * WIDE
PREFETCH = 50_000_000


def of_llama_7b(live: int, mode: str = "full", tensor: int = 1, **changes: Any) -> GatheredWeights:
    model = spec_of("llama-7b", **{f"model__{key}": value for key, value in changes.items()}).transformer
    return gathered_weights(model, tensor, 1, Recomputation(mode), live, PREFETCH)


@pytest.mark.parametrize("mode", ["none", "selective", "full"])
def test_all_weights_of_a_model_that_fits_are_gathered_once(mode: str) -> None:
    found = of_llama_7b(10**10, mode, num_hidden_layers=1)
    assert found.gathered == found.elements == found.head == 2 * TABLE + BLOCK


def test_a_table_that_is_also_the_head_is_gathered_once_if_the_model_fits() -> None:
    found = of_llama_7b(10**10, num_hidden_layers=1, tie_word_embeddings=True)
    assert found.gathered == found.elements == TABLE + BLOCK


def test_the_first_weights_are_freed_before_their_turn_comes_where_two_passes_exceed_the_distance_of_reuse() -> None:
    found = of_llama_7b(10**10, num_hidden_layers=2)
    assert TABLE <= found.gathered - found.elements < TABLE + BLOCK


@pytest.mark.parametrize(
    ("mode", "kept"),
    [
        ("none", 2 * WIDE),  # what is used last in the forward pass comes first in the backward pass
        ("full", WIDE),  # recomputation begins with the query of the block, so that the others wait too long
    ],
)
def test_a_block_that_fits_in_part_keeps_its_last_matrices(mode: str, kept: int) -> None:
    live = TABLE + 4 * BLOCK + 2 * WIDE + 1
    found = of_llama_7b(live, mode)
    assert 2 * found.elements - found.gathered == TABLE + 4 * BLOCK + kept


def test_a_head_that_exceeds_the_limit_alone_stays_with_nothing_else() -> None:
    found = of_llama_7b(10**9, "none", vocab_size=256_000)
    assert found.head == 256_000 * HIDDEN > 10**9
    assert 2 * found.elements - found.gathered == 256_000 * HIDDEN


def test_the_table_is_gathered_before_the_last_blocks_have_run_backward() -> None:
    found = of_llama_7b(10**9)
    (left, _), *_, (last, most) = found.backward
    assert (left, last) == (32, 10**9 // BLOCK + 1)  # of which one is running
    assert 10**9 < most < 10**9 + TABLE


def test_more_layers_add_what_two_passes_gather_of_them() -> None:
    some, more = (of_llama_7b(10**9, num_hidden_layers=layers) for layers in (128, 1000))
    assert more.gathered - some.gathered == 2 * (1000 - 128) * BLOCK
    assert more.elements - some.elements == (1000 - 128) * BLOCK
    assert some.head == more.head
    assert some.backward[-1] == more.backward[-1]
