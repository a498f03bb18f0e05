"""CLIP (arXiv:2103.00020): an image tower and a text tower, projected into one space.

Modules have the names of Hugging Face's files of ``CLIPModel``, with their spelling.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from scaletrain_cli.engine.model.base import VisionModel
from scaletrain_cli.engine.model.materialization import Initial
from scaletrain_cli.engine.model.vision.vit import ACTIVATIONS, attention_of_heads
from scaletrain_cli.spec import ClipSpec
from scaletrain_cli.spec.vision_model import OLD_EOS, ClipTextSpec, ClipVisionSpec

TowerSpec = ClipVisionSpec | ClipTextSpec


class ClipFeatures(NamedTuple):
    """Features [batch, projection_dim] of length 1, fp32, and what scales and shifts their products.

    ``logit_scale``: the logarithm of the factor of similarities, a scalar. ``logit_bias``: added to the scaled
    similarities; None: nothing.
    """

    image: Tensor
    text: Tensor
    logit_scale: Tensor
    logit_bias: Tensor | None


class Attention(nn.Module):
    """Multi-head attention, [batch, length, hidden] in and out."""

    def __init__(self, spec: TowerSpec, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal = spec.num_attention_heads, causal
        self.k_proj, self.v_proj, self.q_proj, self.out_proj = (
            nn.Linear(spec.hidden_size, spec.hidden_size) for _ in range(4)
        )

    def forward(self, x: Tensor) -> Tensor:
        mixed = attention_of_heads(self.q_proj(x), self.k_proj(x), self.v_proj(x), self.heads, causal=self.causal)
        return self.out_proj(mixed)  # type: ignore[no-any-return]


class MLP(nn.Module):
    """Two layers with the activation of the tower."""

    def __init__(self, spec: TowerSpec) -> None:
        super().__init__()
        self.fc1 = nn.Linear(spec.hidden_size, spec.intermediate_size)
        self.fc2 = nn.Linear(spec.intermediate_size, spec.hidden_size)
        self.activation = ACTIVATIONS[spec.hidden_act]

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.activation(self.fc1(x)))  # type: ignore[no-any-return]


class Layer(nn.Module):
    """Attention and MLP with residuals and norms before them."""

    def __init__(self, spec: TowerSpec, causal: bool) -> None:
        super().__init__()
        self.self_attn = Attention(spec, causal)
        self.layer_norm1 = nn.LayerNorm(spec.hidden_size, eps=spec.layer_norm_eps)
        self.mlp = MLP(spec)
        self.layer_norm2 = nn.LayerNorm(spec.hidden_size, eps=spec.layer_norm_eps)

    @property
    def attention(self) -> nn.Module:
        return self.self_attn

    def forward(self, x: Tensor) -> Tensor:
        """Return the hidden states after this block, [batch, length, hidden]."""
        x = x + self.self_attn(self.layer_norm1(x))
        return x + self.mlp(self.layer_norm2(x))  # type: ignore[no-any-return]


class Encoder(nn.Module):
    """The blocks of a tower, by number."""

    def __init__(self, spec: TowerSpec, causal: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({str(index): Layer(spec, causal) for index in range(spec.num_hidden_layers)})

    def forward(self, hidden: Tensor, depth: int | None = None) -> Tensor:
        """Return the hidden states after the first ``depth`` blocks; None: after all."""
        for layer in list(self.layers.values())[:depth]:
            hidden = layer(hidden)
        return hidden


class VisionEmbeddings(nn.Module):
    """The class token and the patches, plus their positions."""

    def __init__(self, spec: ClipVisionSpec) -> None:
        super().__init__()
        self.positions = 1 + (spec.image_size // spec.patch_size) ** 2
        self.class_embedding = nn.Parameter(torch.zeros(spec.hidden_size))
        self.patch_embedding = nn.Conv2d(
            spec.num_channels, spec.hidden_size, spec.patch_size, spec.patch_size, bias=False
        )
        self.position_embedding = nn.Embedding(self.positions, spec.hidden_size)

    def forward(self, pixels: Tensor) -> Tensor:
        """Return [batch, 1 + patches, hidden]."""
        patches = self.patch_embedding(pixels).flatten(2).transpose(1, 2)
        first = self.class_embedding.expand(len(patches), 1, -1)
        places = torch.arange(self.positions, device=pixels.device)
        return torch.cat((first, patches), 1) + self.position_embedding(places)  # type: ignore[no-any-return]


class VisionTower(nn.Module):
    """The image tower: pixels [batch, channels, image_size, image_size] in."""

    def __init__(self, spec: ClipVisionSpec) -> None:
        super().__init__()
        self.embeddings = VisionEmbeddings(spec)
        self.pre_layrnorm = nn.LayerNorm(spec.hidden_size, eps=spec.layer_norm_eps)
        self.encoder = Encoder(spec, causal=False)
        self.post_layernorm = nn.LayerNorm(spec.hidden_size, eps=spec.layer_norm_eps)

    def hidden_states(self, pixels: Tensor, depth: int | None = None) -> Tensor:
        """Return what leaves the first ``depth`` blocks, [batch, 1 + patches, hidden]; None: all blocks."""
        return self.encoder(self.pre_layrnorm(self.embeddings(pixels)), depth)  # type: ignore[no-any-return]

    def forward(self, pixels: Tensor) -> Tensor:
        """Return the normalized class token, [batch, hidden]."""
        return self.post_layernorm(self.hidden_states(pixels)[:, 0])  # type: ignore[no-any-return]


class TextEmbeddings(nn.Module):
    """The tokens, plus their positions."""

    def __init__(self, spec: ClipTextSpec) -> None:
        super().__init__()
        self.token_embedding = nn.Embedding(spec.vocab_size, spec.hidden_size)
        self.position_embedding = nn.Embedding(spec.max_position_embeddings, spec.hidden_size)

    def forward(self, tokens: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        return self.token_embedding(tokens) + self.position_embedding(places)  # type: ignore[no-any-return]


class TextTower(nn.Module):
    """The text tower: tokens [batch, length] int64 in, length up to ``max_position_embeddings``.

    Captions are padded behind their end. Attention is causal, so that no token up to the end sees the padding.
    """

    def __init__(self, spec: ClipTextSpec) -> None:
        super().__init__()
        self.ends = largest_token if spec.eos_token_id == OLD_EOS else first_token(spec.eos_token_id)
        self.embeddings = TextEmbeddings(spec)
        self.encoder = Encoder(spec, causal=True)
        self.final_layer_norm = nn.LayerNorm(spec.hidden_size, eps=spec.layer_norm_eps)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the normalized hidden state of the end of each caption, [batch, hidden]."""
        hidden = self.encoder(self.embeddings(tokens))
        rows = torch.arange(len(tokens), device=tokens.device)
        return self.final_layer_norm(hidden[rows, self.ends(tokens)])  # type: ignore[no-any-return]


def largest_token(tokens: Tensor) -> Tensor:
    """Return the place of the largest id of each row, [batch]; the first of several."""
    return tokens.argmax(-1)


def first_token(number: int) -> Callable[[Tensor], Tensor]:
    """Return a function that returns the first place of the token ``number`` in each row, [batch]."""

    def place(tokens: Tensor) -> Tensor:
        return (tokens == number).int().argmax(-1)

    return place


class Clip(VisionModel):
    """Both towers, their projections, and the learned scale of similarities."""

    def __init__(self, spec: ClipSpec) -> None:
        super().__init__()
        self.spec = spec
        self.text_model, self.vision_model = TextTower(spec.text_config), VisionTower(spec.vision_config)
        self.visual_projection = nn.Linear(spec.vision_config.hidden_size, spec.projection_dim, bias=False)
        self.text_projection = nn.Linear(spec.text_config.hidden_size, spec.projection_dim, bias=False)
        self.logit_scale = nn.Parameter(torch.tensor(spec.logit_scale_init_value))
        bias = spec.logit_bias_init_value
        self.logit_bias = None if bias is None else nn.Parameter(torch.tensor(bias))

    @property
    def blocks(self) -> nn.ModuleDict:
        """The blocks of both towers: ``vision_NUMBER`` and ``text_NUMBER``."""
        towers = {"vision": self.vision_model.encoder, "text": self.text_model.encoder}
        return nn.ModuleDict(
            {f"{name}_{number}": layer for name, tower in towers.items() for number, layer in tower.layers.items()}
        )

    def initial(self, name: str, shape: tuple[int, ...]) -> Initial:
        if name == "logit_scale":
            return Initial(self.spec.logit_scale_init_value)
        if name == "logit_bias":
            return Initial(self.spec.logit_bias_init_value or 0.0)
        if name == "visual_projection.weight":
            return Initial(std=self.spec.vision_config.hidden_size**-0.5)
        if name == "text_projection.weight":
            return Initial(std=self.spec.text_config.hidden_size**-0.5)
        tower: TowerSpec = self.spec.vision_config if name.startswith("vision_model.") else self.spec.text_config
        return tower_initial(tower, name, shape)

    def never_decays(self, name: str) -> bool:
        return name.endswith(".position_embedding.weight")

    def limits(self) -> dict[str, tuple[float, float]]:
        """Return the largest logit scale, so that similarities do not grow without bound (section 2.5)."""
        largest = self.spec.max_logit_scale
        return {} if largest is None else {"logit_scale": (-math.inf, largest)}

    def image_features(self, pixels: Tensor) -> Tensor:
        """Return the features of images, [batch, projection_dim], of length 1, fp32."""
        return normalized(self.visual_projection(self.vision_model(pixels)))

    def text_features(self, tokens: Tensor) -> Tensor:
        """Return the features of captions, [batch, projection_dim], of length 1, fp32."""
        return normalized(self.text_projection(self.text_model(tokens)))

    def forward(
        self, pixels: Tensor | None, tokens: Tensor | None, output: "Callable[[Clip, Any], Any] | None" = None
    ) -> Any:
        """Return the ``ClipFeatures`` of pairs of image and caption.

        ``pixels``: [batch, channels, image_size, image_size]; ``tokens``: [batch, length]. If one is None, its
        features are empty: [0, projection_dim].
        """
        empty = torch.empty(0, self.spec.projection_dim, device=self.logit_scale.device)
        image = empty if pixels is None else self.image_features(pixels)
        text = empty if tokens is None else self.text_features(tokens)
        result = ClipFeatures(image, text, self.logit_scale, self.logit_bias)
        return result if output is None else output(self, result)


def normalized(features: Tensor) -> Tensor:
    """Return features of length 1, fp32."""
    wide = features.float()
    length: Tensor = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
    return wide / length


def tower_initial(spec: TowerSpec, name: str, shape: tuple[int, ...]) -> Initial:
    """Return the distribution of the first values of a parameter of a tower (OpenAI's ``initialize_parameters``)."""
    hidden, layers = spec.hidden_size, spec.num_hidden_layers
    if name.endswith(".class_embedding"):
        return Initial(std=hidden**-0.5)
    if len(shape) == 1:
        return Initial(0.0 if name.endswith("bias") else 1.0)
    if ".embeddings." in name:
        return Initial(std=spec.initializer_range if isinstance(spec, ClipVisionSpec) else 0.02)
    if name.endswith((".q_proj.weight", ".k_proj.weight", ".v_proj.weight", ".fc2.weight")):
        return Initial(std=hidden**-0.5 * (2 * layers) ** -0.5)
    return Initial(std=(2 * hidden) ** -0.5 if name.endswith(".fc1.weight") else hidden**-0.5)
