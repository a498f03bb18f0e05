"""LLaVA-1.5 (arXiv:2310.03744): CLIP's image tower, a projector of two layers, and a language model.

Modules have the names of Hugging Face's files of ``LlavaForConditionalGeneration``. The language model is one of the
families that are trained alone too.
"""

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from scaletrain_cli.engine.model import outline
from scaletrain_cli.engine.model.attention import TokenContext
from scaletrain_cli.engine.model.base import CausalLM, TrainedModel
from scaletrain_cli.engine.model.materialization import Initial
from scaletrain_cli.engine.model.vision.clip import VisionTower, tower_initial
from scaletrain_cli.engine.model.vision.vit import ACTIVATIONS
from scaletrain_cli.spec import LlavaSpec
from scaletrain_cli.spec.weight_files import LANGUAGE_MODEL

_PROJECTOR = "multi_modal_projector."


class Tower(nn.Module):
    """The image tower inside the module that the files name."""

    def __init__(self, spec: LlavaSpec) -> None:
        super().__init__()
        self.spec = spec.vision_config
        self.vision_model = VisionTower(spec.vision_config)


class Projector(nn.Module):
    """Two linear layers from the channels of the tower to those of the language model."""

    def __init__(self, spec: LlavaSpec) -> None:
        super().__init__()
        self.linear_1 = nn.Linear(spec.vision_config.hidden_size, spec.text_config.hidden_size)
        self.linear_2 = nn.Linear(spec.text_config.hidden_size, spec.text_config.hidden_size)
        self.activation = ACTIVATIONS[spec.projector_hidden_act]

    def forward(self, features: Tensor) -> Tensor:
        return self.linear_2(self.activation(self.linear_1(features)))  # type: ignore[no-any-return]


class Llava(TrainedModel):
    """A language model that reads the projected patches of images in the places of ``image_token_index``.

    The patches are the hidden states of the tower after ``vision_feature_layer``. What comes later in the tower is in
    the files, is not computed, and does not train.
    """

    spec: LlavaSpec
    measured: ClassVar[str] = "transform"

    def __init__(self, spec: LlavaSpec) -> None:
        super().__init__()
        self.spec = spec
        self.vision_tower = Tower(spec)
        self.multi_modal_projector = Projector(spec)
        self.language_model: CausalLM = outline(spec.text_config)
        self.depth = spec.tower_depth
        tower = self.vision_tower.vision_model
        for module in [tower.post_layernorm, *list(tower.encoder.layers.values())[self.depth :]]:
            module.requires_grad_(False)

    @property
    def language(self) -> CausalLM:
        return self.language_model

    @property
    def blocks(self) -> nn.ModuleDict:
        """The blocks of the tower that are computed, and of the language model: ``vision_NUMBER``, ``text_NUMBER``."""
        tower = list(self.vision_tower.vision_model.encoder.layers.items())[: self.depth]
        language = self.language_model.blocks.items()
        return nn.ModuleDict({f"vision_{n}": layer for n, layer in tower} | {f"text_{n}": part for n, part in language})

    def initial(self, name: str, shape: tuple[int, ...]) -> Initial:
        if name.startswith(LANGUAGE_MODEL):
            return self.language_model.initial(name, shape)
        if not name.startswith(_PROJECTOR):
            return tower_initial(self.spec.vision_config, name, shape)
        return Initial() if name.endswith("bias") else Initial(std=self.spec.text_config.initializer_range)

    def never_decays(self, name: str) -> bool:
        return name.endswith(".position_embedding.weight")

    def image_features(self, pixels: Tensor) -> Tensor:
        """Return what replaces the image tokens, [images, tokens per image, hidden size of the language model].

        ``pixels``: [images, channels, image_size, image_size], normalized.
        """
        hidden = self.vision_tower.vision_model.hidden_states(pixels, self.depth)
        chosen = hidden[:, 1:] if self.spec.vision_feature_select_strategy == "default" else hidden
        return self.multi_modal_projector(chosen)  # type: ignore[no-any-return]

    def embed(self, tokens: Tensor, context: TokenContext, pixels: Tensor | None, *, sharded: bool = False) -> Tensor:
        """Return the hidden states that enter the language model; the images take the places of their tokens in order.

        ``sharded``: other ranks compute other batches with shards of the same weights (ZeRO-3), so that all visit the
        same modules: a batch without images computes one black image without effect. Raises ValueError on a CPU if the
        number of image tokens is not that of the features; on a GPU that would wait for the device, and the readers of
        batches compare both.
        """
        places = tokens == self.spec.image_token_index
        hidden = self.language_model.embed(tokens.masked_fill(places, 0), context)
        images = 0 if pixels is None else len(pixels)
        if not tokens.is_cuda:
            require_image_tokens(self.spec, int(places.sum()), images)
        if pixels is not None and images:
            features = self.image_features(pixels).flatten(0, 1).to(hidden.dtype)
            # with a size that is known on the host: masked_scatter waits for the device in its backward pass
            order = torch.argsort(places.flatten().to(torch.uint8), descending=True, stable=True)[: len(features)]
            return hidden.flatten(0, 1).index_copy(0, order, features).view_as(hidden)
        if not sharded:
            return hidden
        vision = self.spec.vision_config
        black = hidden.new_zeros(1, vision.num_channels, vision.image_size, vision.image_size)
        return hidden + self.image_features(black)[:0].sum().to(hidden.dtype)  # 0, with a gradient of 0

    def transform(self, tokens: Tensor, context: TokenContext, pixels: Tensor | None) -> Tensor:
        """Return the hidden states after the last block of the language model, in training or validation."""
        hidden = self.embed(tokens, context, pixels, sharded=True)
        return self.language_model.transform(hidden, self.language_model.with_masks(context, hidden))

    def forward(
        self,
        tokens: Tensor,
        labels: Tensor,
        pixels: Tensor | None = None,
        context: TokenContext | None = None,
        divisor: Tensor | None = None,
        output: Callable[[CausalLM, Tensor], Any] | None = None,
    ) -> Any:
        """Return the loss of a batch, as ``CausalLM.forward`` does; ``output`` gets the language model.

        tokens, labels: [batch, length] int64; ``pixels``: see ``image_features``, in the order of their tokens.
        """
        language = self.language_model
        hidden = self.transform(tokens, context or TokenContext.of(tokens), pixels)
        return language.loss(hidden, labels, divisor) if output is None else output(language, hidden)


def require_image_tokens(spec: LlavaSpec, tokens: int, images: int) -> None:
    """Raise ValueError if a batch with that many image tokens does not have a feature of its images for each."""
    expected = images * spec.tokens_per_image
    if tokens != expected:
        raise ValueError(
            f"the batch has {tokens} tokens {spec.image_token_index} (model.image_token_index), and {images} "
            f"images with {spec.tokens_per_image} features each, which need {expected}. Write "
            f"{spec.tokens_per_image} image tokens for each image, and do not cut them off."
        )
