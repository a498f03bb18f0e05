from typing import Any

import pytest
import torch
from torch import nn

from scaletrain_cli.engine.model import outline
from scaletrain_cli.engine.model.gpt import Conv1D
from scaletrain_cli.engine.model.materialization import named_matrices
from scaletrain_cli.engine.model.quantization import quantize_when_loaded
from scaletrain_cli.plan.adapters import quantized_weights
from tests.engine.model.adapted_models import GPT, LLAMA, MIXTRAL


def quantized_bytes(layer: Any) -> int:
    """Return the bytes of a quantized layer's weight and of its scales."""
    tensors = [layer.quantized]
    if hasattr(layer, "quantized_scales"):
        tensors.append(layer.quantized_scales)
    else:
        state = layer.quantized_state
        tensors.append(state.absmax)
        if state.nested:
            tensors += [state.state2.absmax]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


@pytest.mark.parametrize(("kind", "per_weight"), [("nf4", 0.5625), ("nf4_double", 0.5159), ("int8", 1 + 4 / 256)])
def test_a_weight_takes_the_bytes_that_the_format_has(kind: str, per_weight: float) -> None:
    model = nn.ModuleDict({"q_proj": nn.Linear(256, 256 * 64, bias=False)})
    model.requires_grad_(False)

    quantize_when_loaded(model, {"q_proj.weight"}, kind)(model["q_proj"])

    assert quantized_bytes(model["q_proj"]) / (256 * 256 * 64) == pytest.approx(per_weight, rel=2e-3)
    assert not list(model.parameters())


@pytest.mark.parametrize("kind", ["nf4", "nf4_double"])
@pytest.mark.parametrize("transposed", [False, True])
def test_a_product_is_that_of_bitsandbytes_own_layer(kind: str, transposed: bool) -> None:
    import bitsandbytes

    torch.manual_seed(0)
    theirs = bitsandbytes.nn.Linear4bit(
        64, 128, quant_type="nf4", compress_statistics=kind == "nf4_double", compute_dtype=torch.float32
    )
    weight, bias, x = torch.randn(128, 64), torch.randn(128), torch.randn(2, 3, 64)
    layer: nn.Module = Conv1D(64, 128) if transposed else nn.Linear(64, 128)
    with torch.no_grad():
        layer.get_parameter("weight").copy_(weight.t() if transposed else weight)
        layer.get_parameter("bias").copy_(bias)
        theirs.bias.copy_(bias)
    theirs.weight = bitsandbytes.nn.Params4bit(
        weight, requires_grad=False, quant_type="nf4", compress_statistics=kind == "nf4_double"
    )
    model = nn.ModuleDict({"layer": layer})

    quantize_when_loaded(model, {"layer.weight"}, kind)(layer)

    torch.testing.assert_close(layer(x), theirs.to("cpu")(x), rtol=1e-5, atol=1e-5)
    assert not torch.equal(layer(x), nn.functional.linear(x, weight, bias))


@pytest.mark.parametrize(("spec", "count"), [(LLAMA, 14), (GPT, 8), (MIXTRAL, 8)])
def test_only_linear_layers_of_blocks_are_quantized(spec: object, count: int) -> None:
    names = quantized_weights(spec)  # type: ignore[arg-type]

    assert len(names) == count
    assert names.keys() <= dict(named_matrices(outline(spec))).keys()  # type: ignore[arg-type]
    assert not any("embed" in name or "head" in name or "expert" in name or "gate.weight" in name for name in names)
