"""Activations of other frameworks' blocks: against the papers and what their sources keep."""

from typing import Any

import pytest

from scaletrain_cli.plan.frameworks.registry import FRAMEWORKS
from scaletrain_cli.plan.memory.framework_memory import BlockActivations, BlockSharding, block_activations
from tests.plan.specs import model_of

PROFILES = {name: FRAMEWORKS[name].memory_profile for name in ("fsdp", "megatron", "nanotron")}


def block(
    preset: str, framework: str = "megatron", tensor: int = 1, norms: int = 1, flash: bool = True, **model: object
) -> BlockActivations:
    shape = model_of(preset, **model)
    return block_activations(
        shape, PROFILES[framework], BlockSharding(tensor, norms, tensor, flash, 2), bool(shape.num_experts)
    )


def test_megatron_keeps_34_bytes_per_channel_of_a_gpt_block_with_dropout() -> None:
    # Korthikanti et al., arXiv:2205.05198, equation 1, without the scores; beside it statistics of rows.
    saved = block("gpt3-175b", hidden_dropout=0.1, attention_dropout=0.1).saved
    assert saved - 4 * (96 + 2 * 2) == 34 * 12288


@pytest.mark.parametrize(("norms", "each"), [(8, 34 / 8), (1, 10 + 24 / 8)])
def test_sequence_parallelism_shards_norms_and_dropout_too(norms: int, each: float) -> None:
    # Equations 2 and 4 of the same.
    saved = block("gpt3-175b", tensor=8, norms=norms, hidden_dropout=0.1).saved
    assert saved - 4 * (96 // 8 + 2 * 2 // norms) == pytest.approx(each * 12288, abs=8)


def test_materialised_attention_keeps_five_bytes_per_score_with_dropout() -> None:
    kept = block("gpt3-175b", flash=False, attention_dropout=0.1).scores
    assert kept == 5 * 96 * 2048
    assert block("gpt3-175b", flash=False).scores == 2 * 96 * 2048


def test_nanotron_keeps_16_bytes_per_channel_and_8_per_inner_channel() -> None:
    saved = block("llama-7b", "nanotron").saved
    assert saved - 4 * (32 + 2) == 16 * 4096 + 8 * 11008


def test_fused_swiglu_keeps_less_and_repeated_keys_more() -> None:
    assert block("llama-3-8b", "megatron").mlp == 6 * 14336 < block("llama-3-8b", "fsdp").mlp
    grouped, repeated = (block("llama-3-8b", framework).attention for framework in ("nanotron", "fsdp"))
    assert repeated - grouped == 2 * 2 * (32 - 8) * 128


def test_selective_operations_keep_less_than_every_second_block() -> None:
    found = block("llama-3-8b", "fsdp")
    assert found.block_input < found.products < (found.saved + found.block_input) / 2


def test_a_token_is_saved_once_per_expert_that_it_is_routed_to() -> None:
    one, two = (block("mixtral-8x7b", num_experts_per_tok=k).mlp for k in (1, 2))
    routers = 2 * 4 * 8
    assert two - routers == 2 * (one - routers)
    assert one - routers == 2 * (2 * 4096 + 3 * 14336)


def test_latent_attention_keeps_its_latents_once_for_all_heads() -> None:
    shape: dict[str, Any] = {"kv_lora_rank": 512, "q_lora_rank": 1536, "qk_rope_head_dim": 64, "v_head_dim": 128}
    whole, half = (block("llama-7b", tensor=tensor, **shape).attention for tensor in (1, 2))
    assert 2 * half - whole == 2 * (2 * (512 + 1536) + 64)
