"""ResNet (arXiv:1512.03385) with the stride in the 3 x 3 convolution of a bottleneck (v1.5), as in torchvision.

Modules have the names of Hugging Face's files of ``ResNetForImageClassification``. With ``norm: group`` GroupNorm
(arXiv:1803.08494) takes the place of BatchNorm, and no Hugging Face model has these weights.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from scaletrain_cli.engine.model.base import ImageClassifier
from scaletrain_cli.engine.model.materialization import Initial
from scaletrain_cli.engine.model.vision.batch_norm import BatchNorm2d, update_statistics
from scaletrain_cli.spec import ResNetSpec
from scaletrain_cli.spec.vision_model import GROUPS

_REDUCTION = 4  # of the channels inside a bottleneck
_FORMATS = {"channels_last": torch.channels_last, "contiguous_format": torch.contiguous_format}


class ConvNorm(nn.Module):
    """A convolution without bias that keeps the size at stride 1, and its norm."""

    def __init__(self, spec: ResNetSpec, channels: int, features: int, kernel: int, stride: int = 1) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(channels, features, kernel, stride, kernel // 2, bias=False)
        self.normalization = nn.GroupNorm(GROUPS, features) if spec.norm == "group" else BatchNorm2d(features)

    def forward(self, x: Tensor) -> Tensor:
        return self.normalization(self.convolution(x))  # type: ignore[no-any-return]


class Layer(nn.Module):
    """A residual block. The shortcut has a convolution where the block changes channels or size."""

    def __init__(self, spec: ResNetSpec, channels: int, features: int, stride: int) -> None:
        super().__init__()
        same = channels == features and stride == 1
        self.shortcut = nn.Identity() if same else ConvNorm(spec, channels, features, 1, stride)
        narrow = features // _REDUCTION
        if spec.layer_type == "basic":
            layers = [ConvNorm(spec, channels, features, 3, stride), ConvNorm(spec, features, features, 3)]
        else:
            layers = [
                ConvNorm(spec, channels, narrow, 1),
                ConvNorm(spec, narrow, narrow, 3, stride),
                ConvNorm(spec, narrow, features, 1),
            ]
        self.layer = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        """Return the images after this block: [batch, features, height / stride, width / stride]."""
        *first, last = self.layer
        hidden = x
        for layer in first:
            hidden = F.relu(layer(hidden))
        return F.relu(last(hidden) + self.shortcut(x))


class Stage(nn.Module):
    """Blocks with the same number of channels, of which the first one has the stride."""

    def __init__(self, spec: ResNetSpec, channels: int, features: int, stride: int, depth: int) -> None:
        super().__init__()
        first = Layer(spec, channels, features, stride)
        self.layers = nn.ModuleList([first, *(Layer(spec, features, features, 1) for _ in range(depth - 1))])


class Encoder(nn.Module):
    """The stages; each but the first halves height and width."""

    def __init__(self, spec: ResNetSpec) -> None:
        super().__init__()
        channels = (spec.embedding_size, *spec.hidden_sizes)
        strides = (1, *(2 for _ in spec.depths[1:]))
        parts = zip(channels, spec.hidden_sizes, strides, spec.depths, strict=False)
        self.stages = nn.ModuleList([Stage(spec, *part) for part in parts])


class Stem(nn.Module):
    """The 7 x 7 convolution and the pooling, which halve height and width twice."""

    def __init__(self, spec: ResNetSpec) -> None:
        super().__init__()
        self.embedder = ConvNorm(spec, spec.num_channels, spec.embedding_size, 7, 2)

    def forward(self, pixels: Tensor) -> Tensor:
        return F.max_pool2d(F.relu(self.embedder(pixels)), 3, 2, 1)


class ResNetModel(nn.Module):
    """Modules with the names of Hugging Face's inner model."""

    def __init__(self, spec: ResNetSpec) -> None:
        super().__init__()
        self.embedder = Stem(spec)
        self.encoder = Encoder(spec)

    @property
    def layers(self) -> dict[str, nn.Module]:
        """The residual blocks in order: ``STAGE_NUMBER``."""
        stages = enumerate(self.encoder.stages)
        return {f"{stage}_{number}": layer for stage, part in stages for number, layer in enumerate(part.layers)}  # type: ignore[arg-type]

    def forward(self, pixels: Tensor) -> Tensor:
        """Return the mean over the pixels of the last stage, [batch, features]."""
        hidden = self.embedder(pixels)
        for layer in self.layers.values():
            hidden = layer(hidden)
        return hidden.mean((2, 3))  # type: ignore[no-any-return]


class ResNetForImageClassification(ImageClassifier):
    """A ResNet, in the parts of ``ImageClassifier``."""

    spec: ResNetSpec

    def __init__(self, spec: ResNetSpec) -> None:
        super().__init__()
        self.spec = spec
        self.resnet = ResNetModel(spec)
        self.classifier = nn.Sequential(nn.Flatten(), nn.Linear(spec.hidden_sizes[-1], spec.num_labels))

    @property
    def blocks(self) -> nn.ModuleDict:
        return nn.ModuleDict(self.resnet.layers)

    def initial(self, name: str, shape: tuple[int, ...]) -> Initial:
        """Return the distribution of the first values (arXiv:1502.01852, section 2.2, and torch's of linear layers).

        Convolutions: Normal(0, sqrt(2 / (output channels x kernel size))). With ``zero_init_residual`` the last norm of
        each block begins with weight 0, so that the block begins as the identity (arXiv:1706.02677, section 5.1).
        """
        if name.startswith("classifier."):
            return Initial(bound=self.spec.hidden_sizes[-1] ** -0.5)
        if len(shape) > 1:
            return Initial(std=(2 / (shape[0] * shape[2] * shape[3])) ** 0.5)
        last = 1 if self.spec.layer_type == "basic" else 2
        if self.spec.zero_init_residual and name.endswith(f".layer.{last}.normalization.weight"):
            return Initial(0.0)
        return Initial(1.0 if name.endswith((".weight", ".running_var")) else 0.0)

    def features(self, pixels: Tensor, samples: Tensor | None) -> Tensor:
        features: Tensor = self.resnet(pixels.contiguous(memory_format=_FORMATS[self.spec.memory_format]))
        if self.training:
            update_statistics(self)
        return features
