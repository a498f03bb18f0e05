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
