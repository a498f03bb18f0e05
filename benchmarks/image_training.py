"""Accuracy of the recipes for images beside plain torch loops over models of transformers. Prints a table.

Both sides have the same images, splits, augmentation policy, loss, optimizer, schedule and number of steps; the loops
share no code with the engine: torch's DataLoader and random numbers, Pillow, and models of transformers with their own
initial weights. Weights, order and augmentation of a seed therefore differ, and figures agree within their spread over
seeds. The engine has one rank here, so that BatchNorm sees the same number of images. Needs the extras train and
vision, transformers and scikit-learn.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import io
import json
import math
import os
import platform
import random
import statistics
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
import transformers
import yaml  # type: ignore[import-untyped]
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

RECIPES = Path(__file__).parents[1] / "recipes"
VIT = {
    **{"family": "vit", "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 128},
    **{"image_size": 32, "patch_size": 8, "num_channels": 1, "num_labels": 10},
}
ADAMW = {"name": "adamw", "lr": 1.0e-3, "weight_decay": 0.05}
CLIP_MEAN, CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
Figures = dict[str, float]
RECALLS = [f"recall_at_{k}/{way}" for way in ("image_to_text", "text_to_image") for k in (1, 5, 10)]


class Row(NamedTuple):
    """A recipe with its changes, and the same training as a plain loop. ``measures``: percentages that are compared."""

    recipe: str
    changes: dict[str, Any]
    plain: Callable[[dict[str, Any], Path, int], Figures]
    measures: list[str]


def write_digits(folder: Path) -> None:
    """Write the digits of scikit-learn as train/DIGIT/NNNN.png and val/DIGIT/NNNN.png, a fifth of them to validate."""
    from sklearn.datasets import load_digits

    found = load_digits()
    order = np.random.default_rng(0).permutation(len(found.images))
    for place, number in enumerate(order.tolist()):
        split = "val" if place < len(order) // 5 else "train"
        path = folder / split / str(found.target[number]) / f"{number:04d}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray((found.images[number] * 255 / 16).round().astype(np.uint8)).save(path)


# ---- the plain loops -------------------------------------------------------------------------------------------------


def pixels_of(image: Image.Image, mean: tuple[float, ...], std: tuple[float, ...]) -> Tensor:
    """Return the normalized image, [channels, height, width]."""
    values = np.asarray(image, np.float32).reshape(image.height, image.width, -1) / 255
    return torch.from_numpy(
        ((values - np.array(mean, np.float32)) / np.array(std, np.float32)).transpose(2, 0, 1).copy()
    )


class Digits(Dataset[Any]):
    """Digits with their classes; in training a random part of the image, resized."""

    def __init__(self, folder: Path, spec: dict[str, Any], *, training: bool) -> None:
        self.files = sorted(folder.rglob("*.png"))
        images = spec["data"]["images"]
        self.scale = images["augment"]["random_resized_crop"]["scale"] if training else None
        self.normal = tuple(images["mean"]), tuple(images["std"])
        self.size: int = spec["model"]["image_size"]

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        image: Image.Image = Image.open(self.files[index])
        if self.scale is None:
            shorter = int(self.size / 0.875)
            margin = (shorter - self.size) // 2
            whole = image.resize((shorter, shorter), Image.Resampling.BICUBIC)
            image = whole.crop((margin, margin, margin + self.size, margin + self.size))
        else:
            width, height = part(*image.size, self.scale)
            left, top = (int(torch.randint(most + 1, ())) for most in (image.width - width, image.height - height))
            image = image.crop((left, top, left + width, top + height))
            image = image.resize((self.size, self.size), Image.Resampling.BICUBIC)
        return pixels_of(image, *self.normal), int(self.files[index].parent.name)


def part(width: int, height: int, scale: tuple[float, float]) -> tuple[int, int]:
    """Return width and height of a random part: uniform share of the area, log-uniform ratio of 3/4 to 4/3."""
    for _ in range(10):
        area = width * height * float(torch.empty(()).uniform_(*scale))
        ratio = math.exp(float(torch.empty(()).uniform_(math.log(3 / 4), math.log(4 / 3))))
        found = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if found[0] <= width and found[1] <= height:
            return found
    return width, height


def batches(data: Dataset[Any], size: int, collate: Callable[[list[Any]], Any] | None = None) -> Iterator[Any]:
    """Yield batches without an end, in another random order in each pass."""
    while True:
        yield from DataLoader(data, size, shuffle=True, drop_last=True, collate_fn=collate)


def train(
    model: nn.Module, spec: dict[str, Any], loss_of: Callable[[Any], Tensor], data: Iterator[Any], after: Any = None
) -> None:
    """Train as the spec says: warm-up and cosine, gradient clipping at norm 1, no decay of norms and positions."""
    training, total = spec["training"], spec["training"]["steps"]
    settings, warmup = training["optimizer"], training["schedule"]["warmup_steps"]
    free = ("bias", "cls_token", "position_embeddings", "position_embedding.weight")
    kept = [name.endswith(free) or p.ndim < 2 for name, p in model.named_parameters()]
    parameters = list(model.parameters())
    groups = [
        {
            "params": [p for p, k in zip(parameters, kept, strict=True) if not k],
            "weight_decay": settings["weight_decay"],
        },
        {"params": [p for p, k in zip(parameters, kept, strict=True) if k], "weight_decay": 0.0},
    ]
    if settings["name"] == "momentum":
        optimizer: torch.optim.Optimizer = torch.optim.SGD(groups, lr=settings["lr"], momentum=0.9)
    else:
        optimizer = torch.optim.AdamW(groups, lr=settings["lr"], betas=tuple(settings.get("betas", (0.9, 0.95))))
    model.train()
    for step in range(1, total + 1):
        cosine = 0.5 * (1 + math.cos(math.pi * (step - warmup) / (total - warmup)))
        for group in optimizer.param_groups:
            group["lr"] = settings["lr"] * (step / warmup if step <= warmup else cosine)
        optimizer.zero_grad()
        loss_of(next(data)).backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        if after is not None:
            after()
    model.eval()


def plain_digits(spec: dict[str, Any], data: Path, seed: int) -> Figures:
    """Train a ResNet or a ViT of transformers on the digits; return its top-1 accuracy."""
    torch.manual_seed(seed)
    given = {name: value for name, value in spec["model"].items() if name != "family"}
    model: Any = (
        transformers.ResNetForImageClassification(transformers.ResNetConfig(**given))
        if spec["model"]["family"] == "resnet"
        else transformers.ViTForImageClassification(transformers.ViTConfig(**given))
    )
    smoothing = spec["training"]["label_smoothing"]

    def loss_of(batch: tuple[Tensor, Tensor]) -> Tensor:
        logits = model(pixel_values=batch[0]).logits
        return F.cross_entropy(logits, batch[1], label_smoothing=smoothing)

    train(model, spec, loss_of, batches(Digits(data / "train", spec, training=True), 64))
    held_out = Digits(data / "val", spec, training=False)
    with torch.no_grad():
        right = [
            model(pixel_values=images).logits.argmax(1) == classes for images, classes in DataLoader(held_out, 256)
        ]
    return {"top1": float(torch.cat(right).double().mean())}


class Pairs(Dataset[Any]):
    """Pictures with their captions, of tar shards."""

    def __init__(self, shards: list[Path]) -> None:
        self.pairs: list[tuple[bytes, str]] = []
        for shard in shards:
            with tarfile.open(shard) as archive:
                files = ((member.name, archive.extractfile(member)) for member in archive)
                content = {name: file.read() for name, file in files if file is not None}
            names = sorted({name.partition(".")[0] for name in content})
            self.pairs += [(content[f"{name}.png"], content[f"{name}.txt"].decode()) for name in names]

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, index: int) -> tuple[Tensor, str]:
        picture, caption = self.pairs[index]
        return pixels_of(Image.open(io.BytesIO(picture)), CLIP_MEAN, CLIP_STD), caption


def plain_pairs(spec: dict[str, Any], data: Path, seed: int) -> Figures:
    """Train a CLIP of transformers on the pairs; return recalls and zero-shot accuracy."""
    torch.manual_seed(seed)
    folder, given = data / "clip-pairs", spec["model"]
    text = given["text_config"] | {"bos_token_id": 0, "pad_token_id": 1}
    config = transformers.CLIPConfig(
        text_config=text, vision_config=given["vision_config"], projection_dim=given["projection_dim"]
    )
    model: Any = transformers.CLIPModel(config)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)

    def tokens(captions: list[str]) -> Any:
        length = text["max_position_embeddings"]
        return tokenizer(captions, padding="max_length", truncation=True, max_length=length, return_tensors="pt")

    def collate(pairs: list[tuple[Tensor, str]]) -> tuple[Tensor, Any]:
        return torch.stack([picture for picture, _ in pairs]), tokens([caption for _, caption in pairs])

    def loss_of(batch: tuple[Tensor, Any]) -> Tensor:
        found = model(pixel_values=batch[0], input_ids=batch[1]["input_ids"])
        own = torch.arange(len(batch[0]))
        both = F.cross_entropy(found.logits_per_image, own) + F.cross_entropy(found.logits_per_text, own)
        return both / 2

    def clamp() -> None:
        model.logit_scale.data.clamp_(max=math.log(100))

    shards = Pairs(sorted(folder.glob("train-*.tar")))
    train(model, spec, loss_of, batches(shards, spec["training"]["global_batch_size"], collate), clamp)
    with torch.no_grad():
        held_out = Pairs(sorted(folder.glob("val-*.tar")))
        pictures, captions = collate([held_out[number] for number in range(len(held_out))])
        similar = model(pixel_values=pictures, input_ids=captions["input_ids"]).logits_per_image
        found: Figures = {}
        for way, scores in (("image_to_text", similar), ("text_to_image", similar.T)):
            rank = (scores > scores.diagonal()[:, None]).sum(1)
            found |= {f"recall_at_{k}/{way}": float((rank < k).double().mean()) for k in (1, 5, 10)}
        return found | {"zero_shot_top1": zero_shot(model, tokens, folder / "shapes", spec)}


def zero_shot(model: Any, tokens: Callable[[list[str]], Any], folder: Path, spec: dict[str, Any]) -> float:
    """Return the accuracy of the nearest class by the mean of the normalized features of its prompts."""
    classes = sorted(path.name for path in folder.iterdir())
    means = []
    for name in classes:
        prompts = [template.format(name) for template in spec["evaluation"]["zero_shot"]["templates"]]
        features = model.text_projection(model.text_model(input_ids=tokens(prompts)["input_ids"]).pooler_output)
        means.append(F.normalize(F.normalize(features, dim=1).mean(0), dim=0))
    right = []
    for number, name in enumerate(classes):
        pictures = [pixels_of(Image.open(path), CLIP_MEAN, CLIP_STD) for path in sorted((folder / name).iterdir())]
        features = model.visual_projection(model.vision_model(torch.stack(pictures)).pooler_output)
        right.append((features @ torch.stack(means).T).argmax(1) == number)
    return float(torch.cat(right).double().mean())


# ---- both sides ------------------------------------------------------------------------------------------------------

DIGITS = {"data.source": "digits", "cluster.gpus_per_node": 1, "training.micro_batch_size": 64}
ROWS = {
    "digits, ResNet": Row("vision-digits-cpu", DIGITS, plain_digits, ["top1"]),
    "digits, ViT": Row(
        "vision-digits-cpu", {**DIGITS, "model": VIT, "training.optimizer": ADAMW}, plain_digits, ["top1"]
    ),
    "pairs, CLIP": Row(
        "clip-pairs-cpu",
        {"cluster.gpus_per_node": 1, "training.micro_batch_size": 128},
        plain_pairs,
        [*RECALLS, "zero_shot_top1"],
    ),
}


def spec_of(row: Row) -> dict[str, Any]:
    """Return the recipe with the changes, as the plain loop reads it."""
    spec: dict[str, Any] = yaml.safe_load((RECIPES / f"{row.recipe}.yaml").read_text(encoding="utf-8"))
    for key, value in row.changes.items():
        section, (*parents, last) = spec, key.split(".")
        for parent in parents:
            section = section[parent]
        section[last] = value
    return spec


def engine(row: Row, data: Path, seed: int) -> Figures:
    """Train by `scaletrain train`; return the figures of the last validation."""
    changes = {**row.changes, "training.seed": seed, "checkpoint.every": 10_000}
    sets = [part for key, value in changes.items() for part in ("--set", f"{key}={json.dumps(value)}")]
    run = f"{row.recipe}-{row.changes.get('model', {}).get('family', 'own')}-{seed}"
    words = [sys.executable, "-m", "scaletrain_cli", "train", str(RECIPES / f"{row.recipe}.yaml"), "--run-id", run]
    environment = {**os.environ, "SCALETRAIN_RUNS": str(data / "runs")}
    done = subprocess.run([*words, *sets], cwd=data, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr)
    lines = (data / "runs" / run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    (*_, last) = [found for line in lines if "validation_loss" in (found := json.loads(line))]
    return {name: float(last[f"validation_{name}"]) for name in row.measures}


def shown(values: list[float]) -> str:
    """Return the percentages of the seeds, and their mean with the standard deviation of a seed."""
    spread = statistics.stdev(values) if len(values) > 1 else math.nan
    each = ", ".join(f"{100 * value:.1f}" for value in values)
    return f"{each} | {100 * statistics.mean(values):.1f} ± {100 * spread:.1f}"


def main() -> None:
    """Train every row on both sides, and print a table as Markdown."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    options = parser.parse_args()
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"
    names = ("torch", "transformers", "pillow", "deepspeed")
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in names)
    print(f"Python {platform.python_version()}, {versions}; percent, seeds {options.seeds}\n")
    print("| run | measure | ScaleTrain | mean ± sd | plain loop | mean ± sd |\n|---|---|---|---|---|---|", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder)
        write_digits(data / "digits")
        subprocess.run(
            [sys.executable, str(RECIPES / "clip_pairs_cpu.py")], cwd=data, check=True, stdout=subprocess.DEVNULL
        )
        for name in options.rows:
            row = ROWS[name]
            place = data / "digits" if row.plain is plain_digits else data
            ours, theirs = [], []
            for seed in options.seeds:
                random.seed(seed)
                ours.append(engine(row, data, seed))
                theirs.append(row.plain(spec_of(row), place, seed))
                print(f"{name}, seed {seed}: {ours[-1]} {theirs[-1]}", file=sys.stderr, flush=True)
            for measure in row.measures:
                sides = (shown([found[measure] for found in side]) for side in (ours, theirs))
                print(f"| {name} | {measure} | {' | '.join(sides)} |", flush=True)


if __name__ == "__main__":
    main()
