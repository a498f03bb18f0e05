"""Specs of small real runs on images and pairs for the drills: a ResNet, a ViT, and a CLIP on pairs drawn here."""

import random
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw

from scaletrain_cli.spec import RunSpec, parse_spec

_MODELS = {
    "resnet": "{family: resnet, layer_type: basic, embedding_size: 8, hidden_sizes: [8, 16], depths: [1, 1],"
    " num_channels: 1, num_labels: 10, image_size: 8}",
    "vit": "{family: vit, hidden_size: 16, num_hidden_layers: 2, num_attention_heads: 2, intermediate_size: 32,"
    " num_channels: 1, num_labels: 10, image_size: 8, patch_size: 4, drop_path_rate: 0.1}",
    "clip": "{family: clip, projection_dim: 8, vision_config: {hidden_size: 16, num_hidden_layers: 1,"
    " num_attention_heads: 2, intermediate_size: 32, image_size: 16, patch_size: 8}, text_config: {hidden_size: 16,"
    " num_hidden_layers: 1, num_attention_heads: 2, intermediate_size: 32, vocab_size: 16,"
    " max_position_embeddings: 8, eos_token_id: 12}}",
}
# mixup mixes neighbors of the global batch; every operation of an augmentation draws random numbers of its own
_DIGITS = (
    "{source: sklearn-digits, images: {mean: [0.3], std: [0.38], augment: {horizontal_flip: 0.0, mixup: 0.2,"
    " random_erasing: {probability: 0.3}}}}"
)
_SPEC = """
schema: scaletrain/v1
name: drill
model: {model}
data: {data}
training:
  {{global_batch_size: 12, micro_batch_size: 2, steps: 40, precision: fp32, optimizer: {{lr: 1.0e-3}},
    schedule: {{warmup_steps: 5}}}}
evaluation: {{every: 20, batches: 1}}
cluster: {{gpu: cpu, gpus_per_node: 2, grace_seconds: 60}}
checkpoint: {{every: 10, keep: 2}}
"""
_COLORS = ("red", "green", "blue", "white", "gold")
_SHAPES = ("circle", "square")
_SPECIAL = ("<|startoftext|>", "<unk>", "<|endoftext|>")
_WORDS = (*_SPECIAL[:2], "a", *_COLORS, *_SHAPES, "on", "black", _SPECIAL[2])


def vision_text(family: str, folder: Path) -> str:
    """Return the text of the spec of a small run; ``folder`` is that of ``draw_pairs`` for CLIP."""
    tokenizer = folder / "tokenizer.json"
    pairs = f"{{source: {folder / 'pairs'}, validation_split: 0.2, tokenizer: {{kind: file, path: {tokenizer}}}}}"
    return _SPEC.format(model=_MODELS[family], data=pairs if family == "clip" else _DIGITS)


def vision_spec(family: str, folder: Path, **overrides: Any) -> RunSpec:
    """Return the spec; keys of ``overrides`` are dotted spec keys with ``__`` for the dot."""
    sets = [f"{key.replace('__', '.')}={value}" for key, value in overrides.items()]
    return parse_spec(vision_text(family, folder), file="drill.yaml", base_dir=Path(), overrides=sets)


def draw_pairs(folder: Path, pairs: int = 80) -> Path:
    """Draw images of colored shapes and write their captions beside them; return the folder.

    ``pairs`` has a folder for each shape, which is the class of its images. tokenizer.json has a token for each word.
    """
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace

    draw, images = random.Random(0), folder / "pairs"
    for shape in _SHAPES:
        (images / shape).mkdir(parents=True)
    for number in range(pairs):
        color, shape = draw.choice(_COLORS), draw.choice(_SHAPES)
        image, left, top = Image.new("RGB", (16, 16)), draw.randrange(8), draw.randrange(8)
        pen = ImageDraw.Draw(image)
        (pen.ellipse if shape == "circle" else pen.rectangle)((left, top, left + 7, top + 7), fill=color)
        image.save(images / shape / f"{number}.png")
        (images / shape / f"{number}.txt").write_text(f"a {color} {shape} on black")
    tokenizer = Tokenizer(WordLevel({word: number for number, word in enumerate(_WORDS)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.add_special_tokens(list(_SPECIAL))
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder
