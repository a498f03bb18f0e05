"""ViT and the two towers of CLIP as operations, as transformers builds them. Knows no device."""

from __future__ import annotations

from dataclasses import dataclass

from scaletrain_cli.plan.vision.layers import (
    activation,
    addition,
    attention,
    convolution,
    layer_norm,
    linear,
)
from scaletrain_cli.plan.vision.operations import Block, Network, Operation
from scaletrain_cli.spec import ClipSpec, VitSpec


def vit(model: VitSpec, *, fused: bool, autocast: bool) -> Network:
    """Patches with a class token and learned positions, blocks, norm, and a classifier of the class token."""
    hidden, side = model.hidden_size, model.image_size // model.patch_size
    tokens = side**2 + 1
    build = _Builder(fused, autocast)
    layer = build.layer(tokens, hidden, model.num_attention_heads, model.intermediate_size, bias=model.qkv_bias)
    return Network(
        (
            Block(build.patches(model.num_channels, model.image_size, model.patch_size, hidden, bias=True)),
            Block(layer, model.num_hidden_layers, input=tokens * hidden * build.stream),
            Block((build.norm(hidden, tokens), linear(1, hidden, model.num_labels, kept=False))),
        ),
        classes=model.num_labels,
    )


def clip(model: ClipSpec, *, fused: bool, autocast: bool) -> Network:
    """The image tower, the text tower, and a projection of each; no dropout, QuickGELU (arXiv:2103.00020, code)."""
    image, text, joint = model.vision_config, model.text_config, model.projection_dim
    tokens, words = (image.image_size // image.patch_size) ** 2 + 1, text.max_position_embeddings
    build = _Builder(fused, autocast, quick_gelu=True)
    patches = build.patches(image.num_channels, image.image_size, image.patch_size, image.hidden_size, bias=False)
    table = Operation(
        parameters=(text.vocab_size + words) * text.hidden_size,
        kept=words * text.hidden_size * build.stream,  # the sum with the positions, which the first norm reads again
        kept_bytes=8 * words,  # the words' numbers, as int64
        inputs=2 * words * text.hidden_size,
        outputs=words * text.hidden_size,
        moved_back=2 * words * text.hidden_size,
    )
    seen = build.layer(tokens, image.hidden_size, image.num_attention_heads, image.intermediate_size)
    read = build.layer(words, text.hidden_size, text.num_attention_heads, text.intermediate_size)
    return Network(
        (
            Block((*patches, build.norm(image.hidden_size, tokens))),
            Block(seen, image.num_hidden_layers, input=tokens * image.hidden_size * build.stream),
            Block((build.norm(image.hidden_size, 1), linear(1, image.hidden_size, joint, bias=False, kept=False))),
            Block((table,)),
            Block(read, text.num_hidden_layers, input=words * text.hidden_size * build.stream),
            Block((build.norm(text.hidden_size, words), linear(1, text.hidden_size, joint, bias=False, kept=False))),
        ),
        features=2 * joint,
    )


@dataclass(frozen=True)
class _Builder:
    """What the layers of a tower have in common."""

    fused: bool
    autocast: bool
    quick_gelu: bool = False

    @property
    def stream(self) -> int:
        """Elements per value of the stream that blocks add to: two where it is fp32."""
        return 2 if self.autocast else 1

    def norm(self, hidden: int, rows: int) -> Operation:
        return layer_norm(hidden, rows, autocast=self.autocast)

    def patches(self, channels: int, side: int, patch: int, hidden: int, *, bias: bool) -> tuple[Operation, ...]:
        """The image, its patches as a convolution, and the class token and positions, whose sum is kept."""
        pixels, tokens = side**2, (side // patch) ** 2
        embedded = (tokens + 1) * hidden
        return (
            Operation(kept=channels * pixels),
            convolution(channels, hidden, patch, pixels, tokens, bias=bias, of_images=True, kept=False),
            Operation(
                parameters=(tokens + 2) * hidden,
                kept=embedded * self.stream,
                inputs=2 * embedded,
                outputs=2 * embedded,
                moved_back=embedded,
            ),
        )

    def layer(self, rows: int, hidden: int, heads: int, inner: int, *, bias: bool = True) -> tuple[Operation, ...]:
        """A block with the norms first; only the queries, keys and values may lack their ``bias``."""
        joined = addition(rows * hidden, autocast=self.autocast)
        return (
            self.norm(hidden, rows),
            linear(rows, hidden, 3 * hidden, bias=bias),
            *attention(rows, heads, hidden // heads, fused=self.fused, autocast=self.autocast),
            linear(rows, hidden, hidden, kept=False),
            joined,
            self.norm(hidden, rows),
            linear(rows, hidden, inner),
            activation(rows * inner, 2 if self.quick_gelu else 1),
            linear(rows, inner, hidden, kept=False),
            joined,
        )
