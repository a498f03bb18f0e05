"""ConvNeXt (arXiv:2201.03545): patches, then stages of 7 x 7 depthwise convolutions and pointwise MLPs.

Modules have the names of Hugging Face's files of ``ConvNextForImageClassification``.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from scaletrain_cli.engine.model.attention import KeyedDropPath
from scaletrain_cli.engine.model.base import ImageClassifier
from scaletrain_cli.engine.model.materialization import Initial
from scaletrain_cli.spec import ConvNextSpec

_EPS = 1e-6  # of all norms but the last one
_EXPANSION = 4


class ChannelNorm(nn.LayerNorm):
    """LayerNorm over the channels of each pixel, [batch, channels, height, width] in and out."""

    def __init__(self, channels: int) -> None:
        super().__init__(channels, eps=_EPS)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class Layer(nn.Module):
    """A residual block: depthwise convolution, norm, MLP. ``drop_path``: the probability of leaving it out."""

    def __init__(self, spec: ConvNextSpec, channels: int, drop_path: float) -> None:
        super().__init__()
        scaled = spec.layer_scale_init_value > 0
        self.layer_scale_parameter = nn.Parameter(torch.ones(channels)) if scaled else None
        self.dwconv = nn.Conv2d(channels, channels, 7, padding=3, groups=channels)
        self.layernorm = nn.LayerNorm(channels, eps=_EPS)
        self.pwconv1 = nn.Linear(channels, _EXPANSION * channels)
        self.pwconv2 = nn.Linear(_EXPANSION * channels, channels)
        self.drop_path = KeyedDropPath(drop_path)

    def forward(self, x: Tensor, samples: Tensor | None) -> Tensor:
        """Return images after this block, [batch, channels, height, width]; ``samples``: see the model."""
        hidden = self.layernorm(self.dwconv(x).permute(0, 2, 3, 1))
        hidden = self.pwconv2(F.gelu(self.pwconv1(hidden)))
        if self.layer_scale_parameter is not None:
            hidden = self.layer_scale_parameter * hidden
        return x + self.drop_path(hidden.permute(0, 3, 1, 2), samples)  # type: ignore[no-any-return]


class Stage(nn.Module):
    """Blocks with the same number of channels, after what halves height and width in all stages but the first."""

    def __init__(self, spec: ConvNextSpec, number: int, drop_paths: list[float]) -> None:
        super().__init__()
        channels, downsampling = spec.hidden_sizes[number], []
        if number:
            before = spec.hidden_sizes[number - 1]
            downsampling = [ChannelNorm(before), nn.Conv2d(before, channels, 2, 2)]
        self.downsampling_layer = nn.Sequential(*downsampling)
        self.layers = nn.ModuleList([Layer(spec, channels, rate) for rate in drop_paths])

    def forward(self, x: Tensor, samples: Tensor | None) -> Tensor:
        x = self.downsampling_layer(x)
        for layer in self.layers:
            x = layer(x, samples)
        return x


class Encoder(nn.Module):
    """The stages; of ``n`` blocks in all of them number ``i`` drops paths with probability ``rate * i / (n - 1)``."""

    def __init__(self, spec: ConvNextSpec) -> None:
        super().__init__()
        last = max(1, sum(spec.depths) - 1)
        rates = [spec.drop_path_rate * block / last for block in range(sum(spec.depths))]
        starts = [sum(spec.depths[:number]) for number in range(len(spec.depths))]
        spans = zip(starts, spec.depths, strict=True)
        stages = [Stage(spec, number, rates[first : first + depth]) for number, (first, depth) in enumerate(spans)]
        self.stages = nn.ModuleList(stages)


class Embeddings(nn.Module):
    """The patches and their norm."""

    def __init__(self, spec: ConvNextSpec) -> None:
        super().__init__()
        width = spec.hidden_sizes[0]
        self.patch_embeddings = nn.Conv2d(spec.num_channels, width, spec.patch_size, spec.patch_size)
        self.layernorm = ChannelNorm(width)

    def forward(self, pixels: Tensor) -> Tensor:
        return self.layernorm(self.patch_embeddings(pixels))  # type: ignore[no-any-return]


class ConvNextModel(nn.Module):
    """Modules with the names of Hugging Face's inner model."""

    def __init__(self, spec: ConvNextSpec) -> None:
        super().__init__()
        self.embeddings = Embeddings(spec)
        self.encoder = Encoder(spec)
        self.layernorm = nn.LayerNorm(spec.hidden_sizes[-1], eps=spec.layer_norm_eps)

    def forward(self, pixels: Tensor, samples: Tensor | None) -> Tensor:
        """Return the normalized mean over the pixels of the last stage, [batch, features]."""
        hidden = self.embeddings(pixels)
        for stage in self.encoder.stages:
            hidden = stage(hidden, samples)
        return self.layernorm(hidden.mean((2, 3)))  # type: ignore[no-any-return]


class ConvNextForImageClassification(ImageClassifier):
    """A ConvNeXt, in the parts of ``ImageClassifier``."""

    spec: ConvNextSpec

    def __init__(self, spec: ConvNextSpec) -> None:
        super().__init__()
        self.spec = spec
        self.convnext = ConvNextModel(spec)
        self.classifier = nn.Linear(spec.hidden_sizes[-1], spec.num_labels)

    @property
    def blocks(self) -> nn.ModuleDict:
        """The residual blocks in order: ``STAGE_NUMBER``."""
        stages: Any = enumerate(self.convnext.encoder.stages)
        blocks = {f"{stage}_{number}": layer for stage, part in stages for number, layer in enumerate(part.layers)}
        return nn.ModuleDict(blocks)

    def initial(self, name: str, shape: tuple[int, ...]) -> Initial:
        is_scale = name.endswith(".layer_scale_parameter")
        return Initial(self.spec.layer_scale_init_value) if is_scale else super().initial(name, shape)

    def features(self, pixels: Tensor, samples: Tensor | None) -> Tensor:
        return self.convnext(pixels.contiguous(memory_format=torch.channels_last), samples)  # type: ignore[no-any-return]
