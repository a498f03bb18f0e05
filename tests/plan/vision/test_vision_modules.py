"""Bytes that the planner counts for vision networks are those that autograd keeps in the networks of transformers."""

from collections.abc import Callable
from typing import Any

import pytest

from scaletrain_cli.plan.vision.memory import activation_bytes
from scaletrain_cli.plan.vision.networks import network
from scaletrain_cli.spec.vision_model import VISION
from tests.vision_of_transformers import class_and_config

BATCH = 2
STAGES = {"hidden_sizes": (32, 64), "image_size": 64, "num_labels": 10}
TOWER = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 1, "intermediate_size": 256}
MODELS: dict[str, dict[str, Any]] = {
    "bottleneck": {"family": "resnet", "embedding_size": 16, "depths": (2, 3), **STAGES},
    "basic": {"family": "resnet", "embedding_size": 32, "depths": (2, 2), "layer_type": "basic", **STAGES},
    "convnext": {"family": "convnext", "depths": (1, 2), **STAGES},
    "vit": {"family": "vit", **TOWER, "image_size": 32, "patch_size": 8, "num_labels": 10},
    "clip": {
        "family": "clip",
        "vision_config": {**TOWER, "image_size": 32, "patch_size": 8},
        "text_config": {**TOWER, "vocab_size": 100, "max_position_embeddings": 12},
        "projection_dim": 32,
    },
}


# transformers norms all rows before it takes one: what a norm keeps of the others, and of pairs two indices.
OF_OTHER_ROWS = {"vit": BATCH * 16 * (64 * 4 + 2 * 4), "clip": BATCH * (11 * 2 * 4 + 2 * 8)}


def built(name: str, fused: bool) -> tuple[Any, Any, Callable[[], Any]]:
    """The spec, the network of transformers of the same shape, and what runs it forward on a batch."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("transformers")
    spec = VISION[MODELS[name]["family"]].model_validate(MODELS[name])
    kind, config = class_and_config(spec)
    if name in OF_OTHER_ROWS:
        config._attn_implementation = "sdpa" if fused else "eager"
    torch.manual_seed(0)
    module = kind(config).train()
    side = spec.vision_config.image_size if name == "clip" else spec.image_size
    images = torch.randn(BATCH, 3, side, side)
    if name != "clip":
        return spec, module, lambda: module(pixel_values=images)
    words = torch.randint(0, spec.text_config.vocab_size, (BATCH, spec.text_config.max_position_embeddings))
    return spec, module, lambda: (module.get_image_features(images), module.get_text_features(words))


def kept_bytes(module: Any, forward: Callable[[], Any]) -> int:
    """Storages that the graph holds, weights left out."""
    import torch

    weights = {tensor.untyped_storage().data_ptr() for tensor in [*module.parameters(), *module.buffers()]}
    kept: dict[int, tuple[int, Any]] = {}

    def keep(tensor: Any) -> Any:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights and tensor.dim():  # single numbers are seeds, counts and constants
            kept[storage.data_ptr()] = (storage.nbytes(), tensor)  # holding it keeps the address from reuse
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        result = forward()
    assert result is not None
    return sum(size for size, _ in kept.values())


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "materialised"])
@pytest.mark.parametrize("name", MODELS)
def test_autograd_keeps_what_the_planner_counts(name: str, fused: bool) -> None:
    spec, module, forward = built(name, fused)
    counted = activation_bytes(network(spec, fused), BATCH, 4, "none").kept
    assert counted == kept_bytes(module, forward) - OF_OTHER_ROWS.get(name, 0)
