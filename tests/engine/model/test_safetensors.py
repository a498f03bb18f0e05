import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from scaletrain_cli.engine.model import outline
from scaletrain_cli.engine.model.base import CausalLM
from scaletrain_cli.engine.model.materialization import materialize, named_matrices
from scaletrain_cli.engine.model.safetensors import HuggingFaceFolder
from scaletrain_cli.engine.parallel.mesh import ShardSpec
from scaletrain_cli.errors import UsageError
from scaletrain_cli.spec import ModelSpec
from tests.model_sizes import model_sizes

CPU = torch.device("cpu")
LLAMA: dict[str, Any] = {
    **model_sizes(
        hidden=16, layers=2, heads=4, kv_heads=2, head_dim=4, intermediate=24, vocab=32, seq_len=8, positions=8
    ),
    "family": "llama",
}
GPT: dict[str, Any] = {**LLAMA, "family": "gpt", "num_key_value_heads": 4, "tie_word_embeddings": True}
MIXTURE: dict[str, Any] = {**LLAMA, "num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 8}
MODELS = {
    "llama": LLAMA,
    "tied": {**LLAMA, "tie_word_embeddings": True},
    "qwen2": {**LLAMA, "qkv_bias": True},
    "qwen3": {**LLAMA, "qk_norm": True},
    "gpt2": GPT,
    "qwen3_moe": MIXTURE,
}


def model_of(dims: dict[str, Any]) -> CausalLM:
    return outline(ModelSpec.model_validate(dims))


def contents(dims: dict[str, Any], dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Return the tensors of a Hugging Face file for these dimensions, with random values."""
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in named_matrices(model_of(dims))}


def loaded(folder: Path, dims: dict[str, Any]) -> dict[str, Tensor]:
    """Return the parameters of the model after loading the folder, with separate matrices for experts."""
    model = model_of(dims)
    materialize(model, HuggingFaceFolder(folder, model_of(dims)), CPU)
    found = {name: p.detach() for name, p in model.named_parameters()}
    for path, module in model.named_modules():
        if hasattr(module, "matrices"):
            for name in ("gate_up_proj", "down_proj"):
                stack = found.pop(f"{path}.{name}")
                for member, joined in zip(stack, module.matrices(name), strict=True):
                    found |= {f"{path}.{n}": part for n, part in zip(joined, member.chunk(len(joined)), strict=True)}
    return found


def complaints(folder: Path, dims: dict[str, Any]) -> str:
    with pytest.raises(UsageError) as raised:
        HuggingFaceFolder(folder, model_of(dims))
    return str(raised.value)


def test_files_in_shards_and_in_16_bits_become_fp32(tmp_path: Path) -> None:
    saved = contents(LLAMA, torch.bfloat16)
    files = {name: f"model-{number % 3}.safetensors" for number, name in enumerate(saved)}
    for file in set(files.values()):
        save_file({name: saved[name] for name in files if files[name] == file}, tmp_path / file)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))
    expected = {name: tensor.float() for name, tensor in saved.items()}
    torch.testing.assert_close(loaded(tmp_path, LLAMA), expected, rtol=0, atol=0)


@pytest.mark.parametrize(("dims", "prefix"), [(GPT, "transformer."), (LLAMA, "model.")], ids=["gpt2", "llama"])
def test_the_outermost_name_and_old_constants_do_not_matter(dims: dict[str, Any], prefix: str, tmp_path: Path) -> None:
    """Names have no prefix in the files of openai-community/gpt2."""
    saved = contents(dims)
    bare = {name.removeprefix(prefix): tensor for name, tensor in saved.items()}
    save_file(bare | {"h.0.attn.bias": torch.ones(1, 1, 8, 8)}, tmp_path / "model.safetensors")
    torch.testing.assert_close(loaded(tmp_path, dims), saved, rtol=0, atol=0)


def test_experts_are_read_under_mixtral_s_names(tmp_path: Path) -> None:
    saved = contents(MIXTURE)
    theirs = {"mlp": "block_sparse_moe", "gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
    renamed = {".".join(theirs.get(part, part) for part in name.split(".")): t for name, t in saved.items()}
    save_file(renamed, tmp_path / "model.safetensors")
    torch.testing.assert_close(loaded(tmp_path, MIXTURE), saved, rtol=0, atol=0)


@pytest.mark.parametrize(
    "spec", [ShardSpec(0, 2, 1), ShardSpec(1, 3, 2), ShardSpec(1, 2, 0, parts=3), ShardSpec(0, 2, 1, parts=2)]
)
def test_a_rank_reads_its_shard(spec: ShardSpec, tmp_path: Path) -> None:
    saved = contents(GPT)
    save_file(saved, tmp_path / "model.safetensors")
    name = "transformer.h.1.attn.c_attn.weight"
    piece = HuggingFaceFolder(tmp_path, model_of(GPT)).read(name, (16, 48), spec)
    assert torch.equal(piece, spec.take(saved[name]))


def test_every_mismatch_is_reported_with_file_tensor_and_both_shapes(tmp_path: Path) -> None:
    saved = contents(LLAMA)
    del saved["model.norm.weight"]
    saved["model.embed_tokens.weight"] = torch.zeros(40, 16)
    saved["model.layers.0.self_attn.q_proj.bias"] = torch.zeros(16)
    saved["lm_head.weight"] = saved["lm_head.weight"].to(torch.int8)
    file = tmp_path / "model.safetensors"
    save_file(saved, file)
    assert complaints(tmp_path, LLAMA).splitlines() == [
        f"model.weights: {tmp_path} does not hold this model; 4 of 4 differences.",
        f"  {file} model.embed_tokens.weight = [40, 16]: the model has [32, 16].",
        f"  {tmp_path} model.norm.weight: is in the model but in none of the files.",
        f"  {file} lm_head.weight = I8: must be one of F64, F32, F16, BF16.",
        f"  {file} model.layers.0.self_attn.q_proj.bias: is in the files but not in the model.",
    ]


def test_a_head_is_tied_in_the_model_when_it_is_in_the_files(tmp_path: Path) -> None:
    tied = {**LLAMA, "tie_word_embeddings": True}
    save_file(contents(tied), tmp_path / "model.safetensors")
    assert "Set model.tie_word_embeddings: true." in complaints(tmp_path, LLAMA)
    save_file(contents(LLAMA), tmp_path / "model.safetensors")
    assert "lm_head.weight: is in the files but not in the model" in complaints(tmp_path, tied)
    copied = contents(tied) | {"lm_head.weight": contents(tied)["model.embed_tokens.weight"].clone()}
    save_file(copied, tmp_path / "model.safetensors")
    assert loaded(tmp_path, tied).keys() == contents(tied).keys()


def test_a_list_of_hundreds_of_problems_is_truncated(tmp_path: Path) -> None:
    save_file(contents(LLAMA), tmp_path / "model.safetensors")
    reported = complaints(tmp_path, {**LLAMA, "num_hidden_layers": 30})
    assert "8 of 252 differences." in reported
    assert len(reported.splitlines()) == 9


def test_differences_that_shapes_do_not_show_are_found_in_config_json(tmp_path: Path) -> None:
    save_file(contents(LLAMA), tmp_path / "model.safetensors")
    config = {
        "model_type": "mistral",
        "num_key_value_heads": 2,
        "rope_theta": 500000.0,
        "rms_norm_eps": 1e-05,
        "num_attention_heads": 2,
    }
    rope = {"rope_scaling": {"rope_type": "linear", "factor": 2.0}, "sliding_window": 4}
    (tmp_path / "config.json").write_text(json.dumps(config | rope))
    reported = complaints(tmp_path, LLAMA)
    assert "num_attention_heads = 2: the spec has 4. Set model.num_attention_heads: 2." in reported
    assert "rope_theta = 500000.0: the spec has 10000.0." in reported
    assert "rope_scaling = {rope_type: linear, factor: 2.0}: the spec has null." in reported
    assert "sliding_window = 4" in reported
    (tmp_path / "config.json").write_text(json.dumps(config | {"rope_theta": 10000.0, "num_attention_heads": 4}))
    HuggingFaceFolder(tmp_path, model_of(LLAMA))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "is_causal": False}))
    assert "has is_causal = false, but only true is supported" in complaints(tmp_path, LLAMA)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "bert"}))
    assert "has model_type 'bert'" in complaints(tmp_path, LLAMA)


@pytest.mark.parametrize("damage", ["no file", "cut short", "no JSON", "no shard", "not in its shard"])
def test_files_that_cannot_be_read_are_named(damage: str, tmp_path: Path) -> None:
    index, file = tmp_path / "model.safetensors.index.json", tmp_path / "model.safetensors"
    if damage == "cut short":
        save_file(contents(LLAMA), file)
        file.write_bytes(file.read_bytes()[:1000])
    elif damage == "no JSON":
        index.write_text("{")
    elif damage != "no file":
        index.write_text(json.dumps({"weight_map": dict.fromkeys(contents(LLAMA), file.name)}))
        if damage == "not in its shard":
            save_file({"another": torch.zeros(1)}, file)
    named = index if damage == "no JSON" else file
    assert f"model.weights: {named} cannot be read:" in complaints(tmp_path, LLAMA)
