"""The vision transformer (arXiv:2010.11929): patches, a class token, learned positions, norms before each part.

Modules have the names of Hugging Face's files of ``ViTForImageClassification``. Attention, activations and resized
positions are those of the towers of CLIP, too.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from scaletrain_cli.engine.model.attention import KeyedDropPath
from scaletrain_cli.engine.model.base import ImageClassifier
from scaletrain_cli.engine.model.linear import gelu_tanh
from scaletrain_cli.engine.model.materialization import Initial
from scaletrain_cli.spec import VitSpec


def quick_gelu(x: Tensor) -> Tensor:
    """Return x sigmoid(1.702 x), the approximation of GELU of arXiv:1606.08415, section 2."""
    return x * torch.sigmoid(1.702 * x)


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_pytorch_tanh": gelu_tanh,
    "quick_gelu": quick_gelu,
}


def attention_of_heads(query: Tensor, key: Tensor, value: Tensor, heads: int, *, causal: bool) -> Tensor:
    """Return scaled dot-product attention; all tensors are [batch, length, hidden], heads side by side."""
    batch, length, hidden = query.shape
    query, key, value = (x.view(batch, length, heads, hidden // heads).transpose(1, 2) for x in (query, key, value))
    mixed = F.scaled_dot_product_attention(query, key, value, is_causal=causal)
    return mixed.transpose(1, 2).reshape(batch, length, hidden)


def resized_positions(table: Tensor, positions: int) -> Tensor:
    """Return learned positions of another number of patches, [..., ``positions``, hidden], fp32.

    ``table``: [..., 1 + rows ** 2, hidden], the class token first. The grid of patches is resized by bicubic
    interpolation without antialiasing, as in transformers (``interpolate_pos_encoding``). Raises ValueError if either
    number of patches is not a square.
    """
    *leading, stored, hidden = table.shape
    before, after = round((stored - 1) ** 0.5), round((positions - 1) ** 0.5)
    if before**2 != stored - 1 or after**2 != positions - 1:
        raise ValueError(f"{stored} and {positions} positions are not a class token and a square grid each")
    whole = table.reshape(stored, hidden).float()
    grid = whole[1:].view(1, before, before, hidden).permute(0, 3, 1, 2)
    resized = F.interpolate(grid, size=(after, after), mode="bicubic", align_corners=False)
    patches = resized.permute(0, 2, 3, 1).reshape(after**2, hidden)
    return torch.cat((whole[:1], patches)).view(*leading, positions, hidden)


_EMBEDDINGS = "vit.embeddings."
POSITIONS = f"{_EMBEDDINGS}position_embeddings"


class PatchEmbeddings(nn.Module):
    """A convolution whose stride is its size."""

    def __init__(self, spec: VitSpec) -> None:
        super().__init__()
        self.projection = nn.Conv2d(spec.num_channels, spec.hidden_size, spec.patch_size, spec.patch_size)

    def forward(self, pixels: Tensor) -> Tensor:
        """Return [batch, patches, hidden], row by row of the image."""
        return self.projection(pixels).flatten(2).transpose(1, 2)  # type: ignore[no-any-return]


class Embeddings(nn.Module):
    """The class token and the patches, plus their positions."""

    def __init__(self, spec: VitSpec) -> None:
        super().__init__()
        patches = (spec.image_size // spec.patch_size) ** 2
        self.cls_token = nn.Parameter(torch.zeros(1, 1, spec.hidden_size))
        self.position_embeddings = nn.Parameter(torch.zeros(1, 1 + patches, spec.hidden_size))
        self.patch_embeddings = PatchEmbeddings(spec)

    def forward(self, pixels: Tensor) -> Tensor:
        """Return the hidden states that enter the first block, [batch, 1 + patches, hidden]."""
        patches = self.patch_embeddings(pixels)
        return torch.cat((self.cls_token.expand(len(patches), -1, -1), patches), 1) + self.position_embeddings


class SelfAttention(nn.Module):
    """Attention of all patches to all, before its output projection."""

    def __init__(self, spec: VitSpec) -> None:
        super().__init__()
        self.heads = spec.num_attention_heads
        self.query, self.key, self.value = (
            nn.Linear(spec.hidden_size, spec.hidden_size, bias=spec.qkv_bias) for _ in range(3)
        )

    def forward(self, x: Tensor) -> Tensor:
        return attention_of_heads(self.query(x), self.key(x), self.value(x), self.heads, causal=False)


class Projection(nn.Module):
    """A linear layer in a module of its own, as in the files."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.dense = nn.Linear(inputs, outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.dense(x)  # type: ignore[no-any-return]


class Attention(nn.Module):
    """Attention and its output projection, [batch, length, hidden] in and out."""

    def __init__(self, spec: VitSpec) -> None:
        super().__init__()
        self.attention = SelfAttention(spec)
        self.output = Projection(spec.hidden_size, spec.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        return self.output(self.attention(x))  # type: ignore[no-any-return]


class Layer(nn.Module):
    """Attention and MLP with residuals and norms before them. ``drop_path``: the probability of leaving one out."""

    def __init__(self, spec: VitSpec, drop_path: float) -> None:
        super().__init__()
        self.attention = Attention(spec)
        self.intermediate = Projection(spec.hidden_size, spec.intermediate_size)
        self.output = Projection(spec.intermediate_size, spec.hidden_size)
        self.layernorm_before = nn.LayerNorm(spec.hidden_size, eps=spec.layer_norm_eps)
        self.layernorm_after = nn.LayerNorm(spec.hidden_size, eps=spec.layer_norm_eps)
        self.activation = ACTIVATIONS[spec.hidden_act]
        self.attention_drop_path, self.mlp_drop_path = KeyedDropPath(drop_path), KeyedDropPath(drop_path)

    def forward(self, x: Tensor, samples: Tensor | None) -> Tensor:
        """Return the hidden states after this block, [batch, length, hidden]; ``samples``: see the model."""
        x = x + self.attention_drop_path(self.attention(self.layernorm_before(x)), samples)
        wide = self.activation(self.intermediate(self.layernorm_after(x)))
        return x + self.mlp_drop_path(self.output(wide), samples)  # type: ignore[no-any-return]


class Encoder(nn.Module):
    """The blocks by number; of ``n`` blocks number ``i`` drops paths with probability ``rate * i / (n - 1)``."""

    def __init__(self, spec: VitSpec) -> None:
        super().__init__()
        last = max(1, spec.num_hidden_layers - 1)
        self.layer = nn.ModuleDict(
            {str(index): Layer(spec, spec.drop_path_rate * index / last) for index in range(spec.num_hidden_layers)}
        )


class ViTModel(nn.Module):
    """Modules with the names of Hugging Face's inner model."""

    def __init__(self, spec: VitSpec) -> None:
        super().__init__()
        self.embeddings = Embeddings(spec)
        self.encoder = Encoder(spec)
        self.layernorm = nn.LayerNorm(spec.hidden_size, eps=spec.layer_norm_eps)

    def forward(self, pixels: Tensor, samples: Tensor | None) -> Tensor:
        """Return the normalized class token, [batch, hidden]."""
        hidden = self.embeddings(pixels)
        for layer in self.encoder.layer.values():
            hidden = layer(hidden, samples)
        return self.layernorm(hidden[:, 0])  # type: ignore[no-any-return]


class ViTForImageClassification(ImageClassifier):
    """A ViT, in the parts of ``ImageClassifier``."""

    def __init__(self, spec: VitSpec) -> None:
        super().__init__()
        self.spec = spec
        self.vit = ViTModel(spec)
        self.classifier = nn.Linear(spec.hidden_size, spec.num_labels)

    @property
    def blocks(self) -> nn.ModuleDict:
        return self.vit.encoder.layer

    def initial(self, name: str, shape: tuple[int, ...]) -> Initial:
        if name.startswith(_EMBEDDINGS) and not name.endswith("bias"):
            return Initial(std=self.spec.initializer_range)
        return super().initial(name, shape)

    def never_decays(self, name: str) -> bool:
        return name in (POSITIONS, f"{_EMBEDDINGS}cls_token")

    def features(self, pixels: Tensor, samples: Tensor | None) -> Tensor:
        return self.vit(pixels, samples)  # type: ignore[no-any-return]
