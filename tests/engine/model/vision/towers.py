"""Tiny models of images of transformers with random weights, and ours with the same weights."""

from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from scaletrain_cli.engine.model import outline
from scaletrain_cli.engine.model.base import TrainedModel
from scaletrain_cli.engine.model.materialization import materialize
from scaletrain_cli.engine.model.safetensors import HuggingFaceFolder
from scaletrain_cli.spec.hugging_face import from_config, read_config
from scaletrain_cli.spec.presets import derived_dimensions
from scaletrain_cli.spec.vision_model import VISION

CPU = torch.device("cpu")
TOWER = {
    **{"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 48},
    **{"image_size": 12, "patch_size": 4},
}
CAPTIONS = {
    **{"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 40},
    **{"vocab_size": 60, "max_position_embeddings": 11, "bos_token_id": 57, "eos_token_id": 59, "pad_token_id": 59},
}
TEXT = {
    **{"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2},
    **{"intermediate_size": 24, "vocab_size": 50, "max_position_embeddings": 64},
    **{"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0},
}
IMAGE_TOKEN = 49


def vit(folder: Path, **changes: Any) -> nn.Module:
    config = transformers.ViTConfig(**{**TOWER, "num_labels": 5, **changes})
    return _saved(transformers.ViTForImageClassification, config, folder)


def clip(folder: Path, vision: dict[str, Any] | None = None, text: dict[str, Any] | None = None) -> nn.Module:
    config = transformers.CLIPConfig(
        vision_config=TOWER | (vision or {}), text_config=CAPTIONS | (text or {}), projection_dim=20
    )
    return _saved(transformers.CLIPModel, config, folder)


def llava(folder: Path, kind: str, text: dict[str, Any] | None = None, **changes: Any) -> nn.Module:
    config = transformers.LlavaConfig(
        vision_config=transformers.CLIPVisionConfig(**TOWER),
        text_config=transformers.CONFIG_MAPPING[kind](**TEXT, **(text or {})),
        image_token_index=IMAGE_TOKEN,
        **changes,
    )
    return _saved(transformers.LlavaForConditionalGeneration, config, folder)


def _saved(model_class: Any, config: Any, folder: Path) -> nn.Module:
    """Save a model in fp32 whose weights are the same in each test, and so large that every setting shows."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model: nn.Module = model_class(config)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            size = 0.0 if parameter.ndim == 0 else 0.3 if parameter.ndim == 1 else 0.2
            if name.startswith(("lm_head", "language_model.embed_tokens")):
                size = 0.5
            parameter.add_(torch.randn(parameter.shape, generator=generator) * size)
    saved: Any = model.float().eval()
    saved.save_pretrained(folder)
    return model


def spec_of(folder: Path, **changes: Any) -> Any:
    found = {**from_config(read_config(folder)), **changes}
    if found["family"] == "llava":
        found["text_config"] = derived_dimensions(found["text_config"])
    spec = VISION[found["family"]].model_validate(found)
    assert list(spec.inconsistencies()) == []  # type: ignore[attr-defined]
    return spec


def loaded(spec: Any, folder: Path) -> Any:
    model: TrainedModel = outline(spec)
    materialize(model, HuggingFaceFolder(folder, outline(spec)), CPU)
    return model.eval()


def images(count: int = 4, size: int = 12) -> Tensor:
    return torch.randn(count, 3, size, size, generator=torch.Generator().manual_seed(1))


def close(ours: Tensor, theirs: Tensor, tolerance: float = 1e-5) -> None:
    torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)
