"""A frozen model with linear layers quantized by bitsandbytes: int8 (arXiv:2208.07339) and nf4 (arXiv:2305.14314).

For CUDA only. Nothing here runs without a GPU, so that the tests cover which layers are quantized and their bytes, and
the 4-bit formats on the CPU kernels of bitsandbytes; the spec refuses a quantized base on CPUs.
"""

from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor, nn

from scaletrain_cli.engine.model.adapters import is_transposed
from scaletrain_cli.extras import require

_BLOCK = 64  # weights that share a scale in 4 bits, as in QLoRA
_OUTLIERS = 6.0  # inputs above this are multiplied in 16 bits, as in LLM.int8()


def quantize_when_loaded(model: nn.Module, names: Collection[str], kind: str) -> Callable[[nn.Module], None]:
    """Replace the products of layers, and return what quantizes a layer's weight once it is on the device.

    ``names`` of the weights, ``kind``: int8, nf4 or nf4_double. Call it before adapters are attached, and pass the
    result to ``materialize``, so that at most one weight at a time is not quantized. Raises UsageError without
    bitsandbytes.
    """
    library = require("bitsandbytes", "optimizers", "engine.quantization-missing")
    layers: dict[nn.Module, str] = {}
    for name, layer in model.named_modules():
        if f"{name}.weight" in names:
            layers[layer] = name
            layer.forward = _product(layer, kind, library)

    def quantize(module: nn.Module) -> None:
        if module in layers:
            _quantize(module, kind, library)

    return quantize


@torch.no_grad()
def _quantize(layer: Any, kind: str, library: Any) -> None:
    """Replace the weight of a layer by buffers, which neither DeepSpeed nor a checkpoint counts as parameters."""
    weight = layer.weight.t().contiguous() if is_transposed(layer) else layer.weight.detach()
    del layer.weight
    if kind == "int8":
        packed, scales, _ = library.functional.int8_vectorwise_quant(weight.to(torch.float16))
        layer.quantized_scales = nn.Buffer(scales, persistent=False)
    else:
        packed, layer.quantized_state = library.functional.quantize_4bit(
            weight, blocksize=_BLOCK, compress_statistics=kind == "nf4_double", quant_type="nf4"
        )
    layer.quantized = nn.Buffer(packed, persistent=False)


def _product(layer: Any, kind: str, library: Any) -> Callable[[Tensor], Tensor]:
    def forward(x: Tensor) -> Tensor:
        product: Tensor
        if kind == "int8":
            state = library.MatmulLtState()
            state.CB, state.SCB = layer.quantized, layer.quantized_scales
            state.has_fp16_weights, state.threshold = False, _OUTLIERS
            product = library.matmul(x, layer.quantized, bias=None, state=state)
        else:
            product = library.matmul_4bit(x, layer.quantized.t(), bias=None, quant_state=layer.quantized_state)
        return product if layer.bias is None else product + layer.bias

    return forward
