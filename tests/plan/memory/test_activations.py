"""Activation bytes: against the paper, and against what autograd really saves of the engine's own model."""

from scaletrain_cli.plan.frameworks.registry import FRAMEWORKS
from scaletrain_cli.plan.memory.activations import (
    LOSS_CHUNK_TOKENS,
    Recomputation,
    block_backward_bytes,
    chosen_cross_entropy,
    loss_bytes,
    stage_activation_bytes,
    token_activations,
)
from scaletrain_cli.plan.memory.block_activations import BlockKernels
from tests.plan.specs import model_of, spec_of


def test_a_gpt_block_keeps_34_bytes_per_channel_without_its_two_dropout_masks() -> None:
    # Korthikanti et al., arXiv:2205.05198, equation 1, less the masks (2) and the scores (5 a s / h).
    saved = token_activations(model_of("gpt3-175b"), BlockKernels(2)).saved
    statistics = 4 * (96 + 4)
    assert saved - statistics == 32 * 12288


def test_tensor_parallelism_divides_24_of_those_bytes() -> None:
    # Equation 2: 10 + 24 / t, of which the masks are 2.
    saved = token_activations(model_of("gpt3-175b"), BlockKernels(2, tensor=8)).saved
    assert saved - 4 * (96 // 8 + 4) == (8 + 24 // 8) * 12288


def test_fp32_saves_twice_the_bytes_of_16_bits_except_for_statistics() -> None:
    model = model_of("gpt2")
    statistics = 4 * (12 + 4)
    narrow, wide = (token_activations(model, BlockKernels(element)).saved - statistics for element in (2, 4))
    assert wide == 2 * narrow


def test_attention_without_a_fused_kernel_keeps_a_row_of_weights_per_head() -> None:
    model = model_of("llama-3-8b", seq_len=4096)
    fused = token_activations(model, BlockKernels(4)).saved
    assert token_activations(model, BlockKernels(4, fused=False)).saved - fused == 4 * 32 * 4096


def test_selective_checkpointing_recomputes_every_second_block_from_the_first() -> None:
    assert [Recomputation("selective").blocks(layers) for layers in (1, 2, 3, 32)] == [1, 1, 2, 16]
    assert [Recomputation("selective", every=3).blocks(layers) for layers in (1, 3, 4, 32)] == [1, 1, 2, 11]
    assert Recomputation("selective", "attention").blocks(32) == 0


def test_full_checkpointing_keeps_the_input_of_each_block() -> None:
    per_token = token_activations(model_of("llama-7b"), BlockKernels(2))
    assert stage_activation_bytes(per_token, 4096, 32, Recomputation("full"), 1) == 4096 * 32 * 2 * 4096


def test_recomputation_restores_one_block_at_a_time() -> None:
    per_token = token_activations(model_of("llama-7b"), BlockKernels(2))
    full, none = (block_backward_bytes(per_token, 1, 32, Recomputation(mode)) for mode in ("full", "none"))
    again = full - none
    assert again == per_token.saved


def test_the_loss_of_a_large_vocabulary_needs_more_than_a_block() -> None:
    model = model_of("llama-3-8b")
    assert loss_bytes(model, 2, 8192) > 12 * 128_256 * 8192 > token_activations(model, BlockKernels(2)).saved * 8192


def test_a_loss_in_chunks_keeps_the_gradient_of_the_head_and_the_logits_of_one_chunk() -> None:
    model = model_of("llama-3-8b")
    head, logits = 128_256 * 4096, 14 * 128_256 * LOSS_CHUNK_TOKENS
    hidden = 8192 * 4096
    norm = 4 * hidden + 4 * 8192
    assert loss_bytes(model, 2, 8192, cross_entropy="chunked") == norm + 2 * hidden + 6 * head + logits
    assert loss_bytes(model, 2, 65536, cross_entropy="chunked") < loss_bytes(model, 2, 65536) / 5
    assert loss_bytes(model, 2, 8192, cross_entropy="liger") < loss_bytes(model, 2, 8192, cross_entropy="chunked")


def test_the_loss_is_chunked_if_it_would_take_much_of_the_device() -> None:
    spec, device = spec_of("llama-3-8b"), 80 * 10**9
    most = int(0.15 * device) // (12 * 128_256)
    assert chosen_cross_entropy(spec, most, 1, device) == chosen_cross_entropy(spec, 2 * most, 2, device) == "whole"
    assert chosen_cross_entropy(spec, most + 1, 1, device) == "chunked"
    assert chosen_cross_entropy(spec_of("llama-3-8b", training__cross_entropy="liger"), 1, 1, device) == "liger"
    assert FRAMEWORKS["megatron"].cross_entropy(spec_of("llama-3-8b"), 10**6, 1, device) == "whole"
