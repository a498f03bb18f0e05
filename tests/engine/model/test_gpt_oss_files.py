"""Experts of GPT-OSS's files: read in 16 bits and MXFP4 in every layout, as transformers reads them."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from scaletrain_cli.engine.model import outline
from scaletrain_cli.engine.model.gpt_oss_files import dequantized
from scaletrain_cli.engine.model.materialization import named_matrices
from scaletrain_cli.engine.model.safetensors import HuggingFaceFolder
from scaletrain_cli.engine.parallel.mesh import ShardSpec
from scaletrain_cli.errors import UsageError
from tests.engine.model.families import loaded, logits, reference, spec_of, tokens_of


def packed(values: Tensor) -> tuple[Tensor, Tensor]:
    """Return blocks and scales of values [experts, in, out], rounded to E2M1 with one power of 2 for 32 inputs."""
    rows = values.transpose(1, 2)
    groups = rows.reshape(*rows.shape[:-1], -1, 32)
    exponents = torch.floor(torch.log2(groups.abs().amax(-1))) - 2  # the largest of E2M1 is 6 = 1.5 * 2^2
    scaled = groups / torch.exp2(exponents).unsqueeze(-1)
    levels = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    nearest = (scaled.abs().unsqueeze(-1) - levels).abs().argmin(-1)
    codes = (nearest + 8 * (scaled < 0)).to(torch.uint8)
    return codes[..., 0::2] | codes[..., 1::2] << 4, (exponents + 127).to(torch.uint8)


def packed_folder(folder: Path) -> Path:
    """Write a tiny GPT-OSS whose experts are in MXFP4, as OpenAI's files are."""
    reference("gpt-oss", folder / "whole", intermediate_size=64, hidden_size=32)
    tensors: dict[str, Tensor] = {}
    for name, values in load_file(folder / "whole" / "model.safetensors").items():
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            tensors[f"{name}_blocks"], tensors[f"{name}_scales"] = packed(values.float())
        else:
            tensors[name] = values.bfloat16()
    found = folder / "packed"
    found.mkdir()
    save_file({name: values.contiguous() for name, values in tensors.items()}, found / "model.safetensors")
    config = json.loads((folder / "whole" / "config.json").read_text())
    config |= {"quantization_config": {"quant_method": "mxfp4"}, "dtype": "bfloat16"}
    (found / "config.json").write_text(json.dumps(config))
    return found


def test_every_code_and_scale_is_dequantized_as_transformers_does() -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    blocks = torch.randint(0, 256, (3, 40, 2, 16), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    blocks[0, :16, 0] = torch.arange(256, dtype=torch.uint8).view(16, 16)
    scales = torch.arange(240, dtype=torch.uint8).view(3, 40, 2) + 7
    theirs = convert_moe_packed_tensors(blocks, scales)
    for expert in range(3):
        assert torch.equal(dequantized(blocks[expert], scales[expert]).t(), theirs[expert])


@pytest.mark.filterwarnings("ignore")  # transformers: no kernels for MXFP4 on a CPU
def test_mxfp4_files_compute_what_transformers_computes_with_them(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, Mxfp4Config

    folder = packed_folder(tmp_path)
    settings = {"quantization_config": Mxfp4Config(dequantize=True), "attn_implementation": "eager"}
    theirs: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, **settings).float().eval()
    ours, tokens = loaded(spec_of(folder), folder), tokens_of()
    with torch.no_grad():
        torch.testing.assert_close(logits(ours, tokens), theirs(tokens).logits, rtol=1e-5, atol=1e-5)
    names = dict(theirs.named_parameters())
    gates = names["model.layers.0.mlp.experts.gate_up_proj"][3, :, ::2].t()
    assert torch.equal(ours.state_dict()["model.layers.0.mlp.experts.gate_up_proj"][3, :64], gates)


@pytest.mark.parametrize("form", ["whole", "packed"])
def test_a_tensor_rank_reads_its_part_of_each_expert(form: str, tmp_path: Path) -> None:
    packed_folder(tmp_path)
    model = outline(spec_of(tmp_path / form))
    folder = HuggingFaceFolder(tmp_path / form, model)
    read = 0
    for name, shape in named_matrices(model):
        if ".experts." in name:
            for dim in range(len(shape)):
                whole = folder.read(name, shape, None)
                assert whole.shape == shape
                parts = [folder.read(name, shape, ShardSpec(dim, 4, rank)) for rank in range(4)]
                assert torch.equal(torch.cat(parts, dim), whole), name
                read += 1
    assert read == 2 * 4 * (3 * 2 + 3)


def test_experts_of_another_shape_or_dtype_are_refused_by_the_name_in_the_files(tmp_path: Path) -> None:
    folder = packed_folder(tmp_path)
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.1.mlp.experts.down_proj"
    tensors[f"{name}_blocks"] = tensors[f"{name}_blocks"][:3].clone()
    tensors[f"{name}_scales"] = tensors[f"{name}_scales"].float()
    del tensors["model.layers.0.mlp.experts.gate_up_proj_scales"]
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(UsageError) as refused:
        HuggingFaceFolder(folder, outline(spec_of(folder)))
    assert [(problem.key, problem.message) for problem in refused.value.problems] == [
        ("model.layers.0.mlp.experts.gate_up_proj_scales", "is in the model but in none of the files."),
        (f"{name}_blocks", "the model has [4, 32, 2, 16]."),
        (f"{name}_scales", "must be U8."),
    ]
