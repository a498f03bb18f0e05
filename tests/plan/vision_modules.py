"""Small vision networks in torch, written from the papers, to count what autograd really keeps. No tests here."""

import torch  # noqa: TID253 (only a test that has found torch imports this file)
from torch import Tensor, nn  # noqa: TID253
from torch.nn import functional  # noqa: TID253

from scaletrain_cli.spec.vision_model import ClipSpec, ConvNextSpec, ResNetSpec, VitSpec


class Residual(nn.Module):
    """A basic block or a bottleneck of ResNet v1.5."""

    def __init__(self, channels: int, features: int, stride: int, bottleneck: bool) -> None:
        super().__init__()
        narrow = features // 4
        shapes = (
            [(channels, narrow, 1, 1), (narrow, narrow, 3, stride), (narrow, features, 1, 1)]
            if bottleneck
            else [(channels, features, 3, stride), (features, features, 3, 1)]
        )
        self.convolutions = nn.ModuleList(
            nn.Conv2d(a, b, kernel, s, kernel // 2, bias=False) for a, b, kernel, s in shapes
        )
        self.norms = nn.ModuleList(nn.BatchNorm2d(b) for _, b, _, _ in shapes)
        self.shortcut = nn.Identity()
        if channels != features or stride != 1:
            self.shortcut = nn.Sequential(
                nn.Conv2d(channels, features, 1, stride, bias=False), nn.BatchNorm2d(features)
            )

    def forward(self, x: Tensor) -> Tensor:
        out = x
        for index, (convolution, norm) in enumerate(zip(self.convolutions, self.norms, strict=True)):
            out = norm(convolution(out))
            if index < len(self.norms) - 1:
                out = functional.relu(out, inplace=True)
        out += self.shortcut(x)
        return functional.relu(out, inplace=True)


def resnet(spec: ResNetSpec) -> nn.Module:
    width = spec.embedding_size
    layers: list[nn.Module] = [
        nn.Conv2d(spec.num_channels, width, 7, 2, 3, bias=False),
        nn.BatchNorm2d(width),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(3, 2, 1),
    ]
    for stage, (features, depth) in enumerate(zip(spec.hidden_sizes, spec.depths, strict=True)):
        for index in range(depth):
            stride = 2 if stage and not index else 1
            layers.append(Residual(width, features, stride, spec.layer_type == "bottleneck"))
            width = features
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, spec.num_labels))


class ChannelNorm(nn.LayerNorm):
    """LayerNorm over the channels of an image."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class ConvNextLayer(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(channels, channels, 7, padding=3, groups=channels)
        self.norm = nn.LayerNorm(channels)
        self.up, self.down = nn.Linear(channels, 4 * channels), nn.Linear(4 * channels, channels)
        self.scale = nn.Parameter(torch.full((channels,), 1e-6))

    def forward(self, x: Tensor) -> Tensor:
        out = self.norm(self.depthwise(x).permute(0, 2, 3, 1))
        out = self.scale * self.down(functional.gelu(self.up(out)))
        return x + out.permute(0, 3, 1, 2)


def convnext(spec: ConvNextSpec) -> nn.Module:
    width = spec.hidden_sizes[0]
    layers: list[nn.Module] = [
        nn.Conv2d(spec.num_channels, width, spec.patch_size, spec.patch_size),
        ChannelNorm(width),
    ]
    for stage, (features, depth) in enumerate(zip(spec.hidden_sizes, spec.depths, strict=True)):
        if stage:
            layers += [ChannelNorm(width), nn.Conv2d(width, features, 2, 2)]
        layers += [ConvNextLayer(features) for _ in range(depth)]
        width = features
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.LayerNorm(width), nn.Linear(width, spec.num_labels)]
    return nn.Sequential(*layers, *head)


class TransformerLayer(nn.Module):
    """Norms first; the same in ViT and in CLIP, but for the activation."""

    def __init__(self, hidden: int, heads: int, inner: int, quick: bool, fused: bool) -> None:
        super().__init__()
        self.heads, self.quick, self.fused = heads, quick, fused
        self.before, self.after = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.up, self.down = nn.Linear(hidden, inner), nn.Linear(inner, hidden)

    def forward(self, x: Tensor) -> Tensor:
        batch, rows, hidden = x.shape
        qkv = self.qkv(self.before(x)).view(batch, rows, 3, self.heads, hidden // self.heads).permute(2, 0, 3, 1, 4)
        if self.fused:
            mixed = functional.scaled_dot_product_attention(qkv[0], qkv[1], qkv[2])
        else:
            mixed = ((qkv[0] @ qkv[1].transpose(-2, -1)) * 0.125).softmax(-1) @ qkv[2]
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, rows, hidden))
        up = self.up(self.after(x))
        return x + self.down(up * torch.sigmoid(1.702 * up) if self.quick else functional.gelu(up))


class Patches(nn.Module):
    def __init__(self, channels: int, side: int, patch: int, hidden: int, bias: bool) -> None:
        super().__init__()
        self.patches = nn.Conv2d(channels, hidden, patch, patch, bias=bias)
        self.token = nn.Parameter(torch.zeros(1, 1, hidden))
        self.positions = nn.Parameter(torch.zeros(1, (side // patch) ** 2 + 1, hidden))

    def forward(self, images: Tensor) -> Tensor:
        rows = self.patches(images).flatten(2).transpose(1, 2)
        return torch.cat([self.token.expand(len(rows), -1, -1), rows], 1) + self.positions


class Vit(nn.Module):
    def __init__(self, spec: VitSpec, fused: bool) -> None:
        super().__init__()
        hidden = spec.hidden_size
        self.patches = Patches(spec.num_channels, spec.image_size, spec.patch_size, hidden, bias=True)
        sizes = hidden, spec.num_attention_heads, spec.intermediate_size
        self.layers = nn.Sequential(*(TransformerLayer(*sizes, False, fused) for _ in range(spec.num_hidden_layers)))
        self.norm, self.head = nn.LayerNorm(hidden), nn.Linear(hidden, spec.num_labels)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.norm(self.layers(self.patches(images))[:, 0]))


class Clip(nn.Module):
    """Both towers; gives their features."""

    def __init__(self, spec: ClipSpec, fused: bool) -> None:
        super().__init__()
        image, text = spec.vision_config, spec.text_config
        self.patches = Patches(image.num_channels, image.image_size, image.patch_size, image.hidden_size, bias=False)
        self.first, self.last = nn.LayerNorm(image.hidden_size), nn.LayerNorm(image.hidden_size)
        self.seen, self.read = (
            nn.Sequential(
                *(
                    TransformerLayer(tower.hidden_size, tower.num_attention_heads, tower.intermediate_size, True, fused)
                    for _ in range(tower.num_hidden_layers)
                )
            )
            for tower in (image, text)
        )
        self.words = nn.Embedding(text.vocab_size, text.hidden_size)
        self.positions = nn.Parameter(torch.zeros(text.max_position_embeddings, text.hidden_size))
        self.end = nn.LayerNorm(text.hidden_size)
        self.image_out = nn.Linear(image.hidden_size, spec.projection_dim, bias=False)
        self.text_out = nn.Linear(text.hidden_size, spec.projection_dim, bias=False)
        self.temperature = nn.Parameter(torch.zeros(()))

    def forward(self, images: Tensor, words: Tensor) -> tuple[Tensor, Tensor]:
        seen = self.last(self.seen(self.first(self.patches(images)))[:, 0])
        read = self.end(self.read(self.words(words) + self.positions)[:, -1])
        return self.image_out(seen), self.text_out(read)
