"""Files in fp8, and in MXFP4 as of GPT-OSS: read in every layout as transformers reads them."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from scaletrain_cli.engine.model import outline
from scaletrain_cli.engine.model.gpt_oss_files import dequantized
from scaletrain_cli.engine.model.materialization import named_matrices
from scaletrain_cli.engine.model.safetensors import HuggingFaceFolder, ScaledMatrix
from scaletrain_cli.engine.parallel.mesh import ShardSpec
from scaletrain_cli.errors import UsageError
from tests.engine.model.families import loaded, logits, reference, spec_of, tokens_of

BLOCK = 8
LARGEST = 448.0  # of E4M3


def quantized(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Return the values in E4M3, and the factors with which blocks of BLOCK x BLOCK become the matrix again."""
    rows, columns = matrix.shape
    blocks = matrix.view(rows // BLOCK, BLOCK, columns // BLOCK, BLOCK)
    factors = blocks.abs().amax(dim=(1, 3)) / LARGEST
    values = (blocks / factors[:, None, :, None]).reshape(rows, columns)
    return values.to(torch.float8_e4m3fn), factors


def write_quantized(folder: Path) -> None:
    """Rewrite the file of a tiny DeepSeek as DeepSeek publishes its own: linear layers of blocks in fp8."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    for name in list(tensors):
        if name.endswith("_proj.weight") or name.endswith("mqa.weight"):
            tensors[name], tensors[f"{name}_scale_inv"] = quantized(tensors[name])
    for name in [name for name in tensors if name.startswith("model.layers.1.")]:
        tensors[name.replace("layers.1.", "layers.2.")] = tensors[name].clone()
    tensors["model.layers.2.eh_proj.weight"] = torch.zeros(32, 64)
    save_file(tensors, file, metadata={"format": "pt"})
    change_config(
        folder,
        num_nextn_predict_layers=1,
        quantization_config={
            **{"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"},
            "weight_block_size": [BLOCK, BLOCK],
        },
    )


def change_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_files_in_fp8_are_loaded_as_transformers_loads_them(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    plain = reference("deepseek v3", tmp_path)
    write_quantized(tmp_path)
    with caplog.at_level(logging.INFO):
        ours, tokens = loaded(spec_of(tmp_path), tmp_path), tokens_of()
    assert "predict tokens after the next one" in caplog.text
    settings = transformers.FineGrainedFP8Config(dequantize=True)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, quantization_config=settings, dtype=torch.float32
    ).eval()
    with torch.no_grad():
        expected = theirs(tokens).logits
        torch.testing.assert_close(logits(ours, tokens), expected, rtol=1e-5, atol=1e-5)
        assert not torch.allclose(plain(tokens).logits, expected, atol=1e-2)


@pytest.mark.parametrize("spec", [None, ShardSpec(0, 3, 1), ShardSpec(1, 2, 1), ShardSpec(0, 2, 1, parts=3)])
def test_a_rank_reads_its_shard_with_the_scales_of_its_blocks(spec: ShardSpec | None, tmp_path: Path) -> None:
    """Blocks of 8 x 5 of a matrix of 30 x 22: shards begin within blocks, and the last blocks are smaller."""
    reference("deepseek dense", tmp_path)
    values = torch.randn(30, 22).to(torch.float8_e4m3fn)
    scales = torch.rand(4, 5)
    whole = values.float() * scales.repeat_interleave(8, 0)[:30].repeat_interleave(5, 1)[:, :22]

    class Stored:
        def __init__(self, tensor: Tensor) -> None:
            self.tensor = tensor

        def get_shape(self) -> list[int]:
            return [*self.tensor.shape]

        def __getitem__(self, index: Any) -> Tensor:
            return self.tensor[index]

    matrix = ScaledMatrix(Stored(values), Stored(scales), (8, 5))
    folder = HuggingFaceFolder(tmp_path, outline(spec_of(tmp_path)))
    folder._values = lambda stored: matrix  # type: ignore[method-assign]
    found = folder.read("model.norm.weight", (30, 22), spec)
    assert torch.equal(found, whole if spec is None else spec.take(whole))


def test_scales_that_do_not_fit_the_blocks_are_reported(tmp_path: Path) -> None:
    reference("deepseek v3", tmp_path)
    write_quantized(tmp_path)
    change_config(tmp_path, quantization_config={"weight_block_size": [16, 8]})
    with pytest.raises(UsageError) as raised:
        HuggingFaceFolder(tmp_path, outline(spec_of(tmp_path)))
    assert "q_a_proj.weight_scale_inv = [3, 4]: blocks of 16 x 8 have scales [2, 4]." in str(raised.value)


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
