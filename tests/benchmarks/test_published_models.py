"""Dimensions of published models: parameter counts, names, and rows that name a model."""

from pathlib import Path

import pytest
from planner_truth import architectures, foundry, train_runs
from planner_truth.architectures import known_model, model_of, published_models, read_dimensions
from planner_truth.mapping import Unmapped

from scaletrain_cli.plan.architecture import architecture
from scaletrain_cli.spec import ModelSpec

# Number of parameters of the published weights (model.safetensors.index.json, model cards, papers).
PARAMETERS = {
    "meta-llama/Llama-3.1-405B": 405_853_388_800,
    "LLAMA3_70B": 70_553_706_496,
    "Llama 3.2 1B": 1_235_814_400,
    "LLaMA2-13B": 13_015_864_320,
    "codellama/CodeLlama-34b-hf": 33_743_970_304,
    "TinyLlama-1.1B": 1_100_048_384,
    "Mixtral 8x7B": 46_702_792_704,
    "Mixtral-8x22B": 140_630_071_296,
    "Mistral-7B-v0.1": 7_241_732_096,
    # 256 biases of the router in each of 58 layers are not trained by gradients
    "DeepSeekV3 (w/o MTP)": 671_026_419_200 - 58 * 256,
    "DeepSeek-V2": 235_741_434_880,
    "DeepSeek-V2-Lite": 15_706_484_224,
    "Qwen3_235B_A22B": 235_093_634_560,
    "Qwen3_30B_a3B": 30_532_122_624,
    "Qwen3 8B": 8_190_735_360,
    "Qwen/Qwen2.5-7B": 7_615_616_512,
    "Qwen2.5-72B-Instruct": 72_706_203_648,
    "GPT-OSS 120B": 116_829_156_672,
    "gpt_oss_20b": 20_914_757_184,
    "gemma-2-9b": 9_241_705_984,
    "gemma-3-1b-it": 999_885_952,
    "Phi-3-mini-4k": 3_821_079_552,
    "phi-4": 14_659_507_200,
    "OLMo-2-7B": 7_298_617_344,
    "Yi-34B": 34_388_917_248,
    "internlm2-7b": 7_737_708_544,
    "Baichuan2-7B": 7_505_973_248,
    "bigscience/bloomz-7b1": 7_069_016_064,
    "BLOOM-176B": 176_247_271_424,
    "EleutherAI/pythia-6.9b": 6_857_302_016,
    "gpt-neox-20b": 20_554_567_680,
}
LENGTH = {"seq_len": 2048, "max_position_embeddings": 2048}
EMPTY = dict.fromkeys(("layers", "hidden", "heads", "kv_heads", "ffn", "vocab"), "")


def row_of(name: str, **columns: str) -> dict[str, str]:
    return {**EMPTY, "model": name, "seq_len": "2048", **columns}


def named(name: str) -> int:
    section = architectures._named(name)
    assert section is not None, name
    return architecture(ModelSpec.model_validate({**section, **LENGTH})).parameters


@pytest.mark.parametrize("name", PARAMETERS)
def test_the_parameters_of_a_published_model_are_exact(name: str) -> None:
    assert named(name) == PARAMETERS[name]


# Rounded in the papers (arXiv:2507.20534, 2402.16819, 2406.11704) and on the models' pages.
@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("Kimi-K2", 1026),
        ("Nemotron-4 15B", 15.6),
        ("Nemotron 340B", 341),
        ("GPT3-175B", 175),
        ("Llama-4-Scout", 107.8),  # 109 with the encoder of images
        ("Llama4 Maverick", 400.7),
        ("NEMOTRON_3_NANO (30B_A3B)", 31.6),
        ("Nemotron-H-8B", 8.1),
    ],
)
def test_those_of_other_models_are_the_rounded_ones(name: str, billions: float) -> None:
    assert named(name) / 1e9 == pytest.approx(billions, rel=0.003)


def test_every_published_model_is_valid_and_has_a_source() -> None:
    models = list(published_models())
    assert len(models) > 100
    for _, source, section in models:
        assert source
        ModelSpec.model_validate({**section, **LENGTH})


def test_a_name_that_only_contains_another_is_not_taken_for_it() -> None:
    for name in ("auroragpt-7b", "xyi-34b", "qwen3-4bit", "large"):
        assert architectures._named(name) is None, name
    assert named("Llama-2-7b-16layers-13bx") == named("Llama-2-7b")


def test_columns_of_the_row_take_precedence() -> None:
    found = known_model(row_of("llama2-7b", layers="4", hidden="2048", heads="16", kv_heads="16", ffn="5504"), tensor=8)
    assert (found["num_hidden_layers"], found["head_dim"], found["seq_len"]) == (4, 128, 2048)
    assert found["vocab_size"] == 32768  # padded to 128 x 8


def test_a_model_without_name_or_columns_is_left_out() -> None:
    with pytest.raises(Unmapped, match="dimensions of large are not known"):
        model_of(row_of("large"))
    plain = model_of(row_of("my-gpt", layers="4", hidden="256", heads="4", vocab="1000"))
    assert (plain["family"], plain["intermediate_size"]) == ("gpt", 1024)
    gated = model_of(row_of("mine", layers="4", hidden="4096", heads="32", vocab="1000"))
    assert (gated["family"], gated["intermediate_size"]) == ("llama", 11008)


def test_complete_dense_rows_of_model_arch_are_read(tmp_path: Path) -> None:
    (tmp_path / "model_arch.csv").write_text(
        "model,layers,hidden,heads,kv_heads,ffn,vocab,experts\n"
        "aquila2-34b,60,6144,48,16,24576,32000,\nhalf,60,,48,16,24576,32000,\nmoe-x,4,512,8,8,2048,32000,8\n"
    )
    read_dimensions(tmp_path)
    try:
        assert known_model(row_of("Aquila2_34B"))["num_key_value_heads"] == 16
        for name in ("half", "moe-x"):
            with pytest.raises(Unmapped):
                known_model(row_of(name))
    finally:
        read_dimensions(tmp_path / "none")
    assert architectures._named("aquila2-34b") is None


ROW = {
    **dict.fromkeys(train_runs.TABLE.input_columns, ""),
    **{"n_gpus": "8", "gpus_per_node": "8", "seq_len": "2048", "gbs_samples": "64", "mbs": "1", "precision": "bf16"},
    **{"tp": "1", "pp": "1", "gpu": "H100", "gpu_mem_gb": "80"},
}


def test_sets_without_a_mapping_follow_their_framework() -> None:
    new = {**ROW, "set": "new"}
    megatron = train_runs.build({**new, "framework": "Megatron-Core", "model": "Qwen3_30B_a3B", "ep": "8"})
    assert (megatron.spec.planner.framework, megatron.layout.expert_parallel) == ("megatron", 8)
    fsdp = train_runs.build({**new, "framework": "FSDP2", "model": "Llama 3 8B", "dp_sharding": "ZeRO-3"})
    assert (fsdp.spec.planner.framework, fsdp.layout.zero_stage) == ("fsdp", 3)
    with pytest.raises(Unmapped, match="no mapping for the framework MaxText"):
        train_runs.build({**new, "framework": "MaxText", "model": "Llama 3 8B"})


def test_adapters_are_read_where_the_recipe_says_what_they_train() -> None:
    lora = {**ROW, "framework": "NeMo", "model": "LLAMA2-7B", "workload": "lora", "set": "nemo-perf-2407"}
    assert train_runs.build(lora).spec.transformer.adapter.targets == ("q_proj", "k_proj", "v_proj")
    with pytest.raises(Unmapped, match="adapters"):
        train_runs.build({**ROW, "set": "litgpt", "framework": "litgpt", "model": "Llama 2 7 B", "workload": "lora"})


def test_what_a_table_does_not_say_is_a_reason_not_a_guess() -> None:
    nemo = {**ROW, "set": "megatron-bridge", "framework": "NeMo", "model": "LLAMA3_70B"}
    for change, reason in (
        ({"tp": ""}, "no layout"),
        ({"precision": "see notes"}, "no precision"),
        ({"precision": "NVFP4"}, "4-bit"),
        ({"model": "T5 3B"}, "T5"),
    ):
        with pytest.raises(Unmapped, match=reason):
            train_runs.build({**nemo, **change})


def test_shard_grad_op_is_zero_2() -> None:
    row = {**ROW, "layers": "24", "hidden": "2048", "heads": "16", "vocab": "50368", "dp": "8"}
    cases = [foundry.build({**row, "dp_sharding": sharding}) for sharding in ("FULL_SHARD", "SHARD_GRAD_OP")]
    assert [case.layout.zero_stage for case in cases] == [3, 2]
    with pytest.raises(Unmapped, match="HYBRID"):
        foundry.build({**row, "dp_sharding": "HYBRID"})


CHRONICLE = {
    **{**ROW, "set": "bigscience", "gpu": "V100", "gpu_mem_gb": "32", "gpus_per_node": "4", "n_gpus": "64"},
    **{"seq_len": "1024", "tp": "", "pp": ""},
}


@pytest.mark.parametrize(
    ("section", "columns", "zero", "tensor", "offload"),
    [
        ("Megatron", {"model": "206B", "n_gpus": "256", "pp": "64", "gbs_samples": "4", "dp": "1"}, 0, 4, "none"),
        ("Megatron + Deepspeed ZeRO", {"model": "52B", "dp": "16", "mbs": "48", "gbs_samples": "768"}, 3, 4, "none"),
        (
            "Megatron + Deepspeed ZeRO",
            {"model": "52B", "dp": "16", "mbs": "64", "gbs_samples": "1024"},
            3,
            4,
            "optimizer+params",
        ),
        ("HF + Deepspeed Zero 3 + Full", {"model": "52B", "mbs": "8", "gbs_samples": "512"}, 3, 1, "none"),
        (
            "HF + Deepspeed Zero 3 + Full",
            {"model": "25B", "mbs": "4", "gbs_samples": "64", "n_gpus": "16"},
            3,
            1,
            "optimizer",
        ),
    ],
)
def test_sections_of_the_chronicles_on_v100(
    section: str, columns: dict[str, str], zero: int, tensor: int, offload: str
) -> None:
    case = train_runs.build({**CHRONICLE, "notes": section, **columns})
    assert case.spec.planner.framework == ("deepspeed" if zero == 3 else "megatron")
    layout = case.layout
    assert (layout.zero_stage, layout.tensor_parallel, layout.offload) == (zero, tensor, offload)
