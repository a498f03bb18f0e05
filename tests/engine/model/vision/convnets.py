"""Small ResNets and ConvNeXts, and the models of transformers with the same dimensions."""

from typing import Any

import torch
from torch import Tensor, nn

from scaletrain_cli.engine.model import outline
from scaletrain_cli.engine.model.attention import assign_dropout_keys
from scaletrain_cli.engine.model.base import VisionModel
from scaletrain_cli.engine.model.materialization import materialize
from scaletrain_cli.spec.vision_model import VISION

_RESNET: dict[str, Any] = {"family": "resnet", "embedding_size": 8, "hidden_sizes": [16, 16, 32], "depths": [2, 1, 2]}
_CONVNEXT: dict[str, Any] = {
    **{"family": "convnext", "hidden_sizes": [8, 16, 24], "depths": [1, 2, 1], "patch_size": 2},
    **{"layer_scale_init_value": 0.3, "layer_norm_eps": 1e-3},
}
_COMMON = {"num_labels": 5, "image_size": 32}
DIMS: dict[str, dict[str, Any]] = {
    "basic": {**_RESNET, **_COMMON, "layer_type": "basic"},
    "bottleneck": {**_RESNET, **_COMMON, "layer_type": "bottleneck"},
    "convnext": {**_CONVNEXT, **_COMMON},
    "convnext without layer scale": {**_CONVNEXT, **_COMMON, "layer_scale_init_value": 0.0},
}


def spec_of(dims: dict[str, Any]) -> Any:
    return VISION[dims["family"]].model_validate(dims)


def fresh(dims: dict[str, Any], seed: int = 0, dtype: torch.dtype | None = None) -> VisionModel:
    model: VisionModel = outline(spec_of(dims))
    assign_dropout_keys(model, seed)
    cpu = torch.device("cpu")
    materialize(model, model.first_weights(seed, cpu), cpu, dtype)
    return model


def theirs(dims: dict[str, Any]) -> Any:
    """Return the model of transformers with random weights, norms and statistics included."""
    import transformers  # here, because ranks import this module

    given = {key: value for key, value in dims.items() if key not in ("family", "image_size")}
    if dims["family"] == "resnet":
        model: Any = transformers.ResNetForImageClassification(transformers.ResNetConfig(**given))
    else:
        config = transformers.ConvNextConfig(**given, num_stages=len(dims["depths"]))
        model = transformers.ConvNextForImageClassification(config)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, values in model.state_dict().items():
            if values.ndim == 1:
                low, high = (-0.5, 0.5) if name.endswith(("bias", "mean")) else (0.5, 1.5)
                values.uniform_(low, high, generator=generator)
            elif values.ndim > 1:
                values.normal_(0, values[0].numel() ** -0.5, generator=generator)
            elif name.endswith("num_batches_tracked"):
                values.fill_(7)
    return model


def images(number: int = 6, seed: int = 1, side: int = 32) -> Tensor:
    return torch.randn(number, 3, side, side, generator=torch.Generator().manual_seed(seed))


def gradients(model: nn.Module) -> dict[str, Tensor]:
    found = {}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        found[name] = parameter.grad / parameter.grad.abs().max()
    return found
