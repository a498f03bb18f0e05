"""Parameter counts and FLOPs against the published figures."""

import pytest

from scaletrain_cli.plan.architecture import (
    active_parameter_count,
    architecture,
    parameter_count,
    training_flops_per_token,
)
from scaletrain_cli.spec.presets import presets
from tests.plan.specs import model_of

# As the checkpoints on the Hugging Face hub hold them, tied heads counted once.
PUBLISHED = {
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "llama-7b": 6_738_415_616,
    "llama-13b": 13_015_864_320,
    "llama-70b": 68_976_648_192,
    "llama-3-8b": 8_030_261_248,
    "llama-3-70b": 70_553_706_496,
    "llama-405b": 405_853_388_800,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-72b": 72_706_203_648,
    "qwen3-8b": 8_190_735_360,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824,
    "mistral-7b": 7_248_023_552,
    "mistral-7b-v0.1": 7_241_732_096,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-3b": 3_085_938_688,
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
    "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264,
    "gemma-2-2b": 2_614_341_888,
    "gemma-2-9b": 9_241_705_984,
    "gemma-2-27b": 27_227_128_320,
    "gemma-3-1b": 999_885_952,
    "phi-3-mini": 3_821_079_552,
    "phi-3-medium": 13_960_238_080,
    "phi-4": 14_659_507_200,
    "olmo-2-1b": 1_484_916_736,
    "olmo-2-7b": 7_298_617_344,
    "olmo-2-13b": 13_716_198_400,
    "olmo-2-32b": 32_234_279_936,
    "mixtral-8x7b": 46_702_792_704,
    "mixtral-8x22b": 140_630_071_296,
    "qwen3-30b-a3b": 30_532_122_624,
    "gpt-oss-20b": 20_914_757_184,
    "gpt-oss-120b": 116_829_156_672,
    "deepseek-v2-lite": 15_706_484_224,
    # The hub's 671,026,419,200 without 256 score corrections in each of 58 routers, which no gradient trains.
    "deepseek-v3": 671_026_419_200 - 58 * 256,
    "qwen3-235b-a22b": 235_093_634_560,
    # The sums of transformers' modules (test_current_models.py); of multimodal models the language model.
    "kimi-k2": 1_026_408_209_408,
    "deepseek-v3.2": 671_877_929_216,
    "llama-4-scout": 107_769_861_120,
    "llama-4-maverick": 400_711_848_960,
    "gemma-3-4b": 3_880_263_168,
    "gemma-3-12b": 11_766_034_176,
    "gemma-3-27b": 27_009_346_304,
    "nemotron-4-340b": 341_029_195_776,
    "nemotron-h-8b": 8_100_852_736,
    "nemotron-3-nano-30b-a3b": 31_577_937_344,
    "jamba-v0.1": 51_570_323_328,
}


@pytest.mark.parametrize(("preset", "parameters"), PUBLISHED.items())
def test_a_preset_has_as_many_parameters_as_its_authors_published(preset: str, parameters: int) -> None:
    assert parameter_count(model_of(preset)) == parameters


def test_gpt3_has_175_billion_parameters() -> None:
    assert parameter_count(model_of("gpt3-175b")) == pytest.approx(174.6e9, rel=1e-3)


def test_every_preset_has_a_published_count() -> None:
    assert set(presets()) == {*PUBLISHED, "gpt3-175b"}


# Beside the input embedding: arXiv:2412.19437, section 1; arXiv:2508.10925, table 1.
@pytest.mark.parametrize(
    ("preset", "billions", "within"),
    [
        ("mixtral-8x7b", 12.88 - 0.13, 0.01),
        ("deepseek-v3", 37, 0.7),
        ("gpt-oss-20b", 3.61, 5e-3),
        ("gpt-oss-120b", 5.13, 5e-3),
    ],
)
def test_a_token_uses_the_published_part_of_a_mixture(preset: str, billions: float, within: float) -> None:
    model = model_of(preset)
    active = active_parameter_count(model) - model.vocab_size * model.hidden_size
    assert active / 1e9 == pytest.approx(billions, abs=within)


def test_training_costs_6_flops_per_weight_and_token_plus_attention() -> None:
    model = model_of("llama-7b", seq_len=2048)
    weights = 6_738_415_616 - 32_000 * 4096 - 65 * 4096  # neither the embedding table nor the norms multiply
    assert training_flops_per_token(model) == 6 * weights + 12 * 32 * 4096 * 2048
    assert active_parameter_count(model) == parameter_count(model)


def test_training_flops_are_those_of_the_megatron_paper() -> None:
    # arXiv:2104.04473: 96 B s l h^2 (1 + s/6h + V/16lh) with recomputation; three quarters of the layers without.
    model = model_of("gpt3-175b", vocab_size=51200)
    layers, hidden, seq_len, vocab = 96, 12288, 2048, 51200
    published = 72 * layers * hidden**2 * (1 + seq_len / (6 * hidden)) + 6 * hidden * vocab
    assert training_flops_per_token(model) == pytest.approx(published, rel=1e-9)


@pytest.mark.parametrize("degree", [2, 4, 8])
def test_tensor_ranks_together_hold_the_model_and_repeat_only_vectors(degree: int) -> None:
    whole = architecture(model_of("llama-7b"))
    shard = architecture(model_of("llama-7b"), tensor_parallel=degree)
    repeated = whole.final_norm + 32 * whole.block.vectors
    assert degree * shard.parameters == whole.parameters + (degree - 1) * repeated


def test_key_value_heads_are_repeated_when_there_are_more_tensor_ranks() -> None:
    eight = architecture(model_of("llama-70b"), tensor_parallel=8).block.attention
    sixteen = architecture(model_of("llama-70b"), tensor_parallel=16).block.attention
    assert 2 * sixteen > eight


def test_expert_ranks_hold_a_share_of_the_experts() -> None:
    block = architecture(model_of("mixtral-8x7b"), expert_parallel=8).block
    assert block.experts == 1
    assert block.routed == 3 * 4096 * 14336
