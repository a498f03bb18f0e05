"""Draw the data of recipes/clip-pairs-cpu.yaml: pictures of one shape each, described by an English caption.

`python recipes/clip_pairs_cpu.py [FOLDER]` writes to FOLDER (clip-pairs):

- train-0000.tar to train-0003.tar, val-0000.tar: pairs as WebDataset writes them, NAME.png and NAME.txt
- shapes/red circle/00.png: pictures with a class each, for zero-shot classification
- tokenizer.json and tokenizer_config.json: byte-pair encoding of the captions, with the start and end tokens of CLIP

A scene is a shape, its color, size and place, and the color of the background. No scene of the validation pairs is
among those of the training pairs, and no two of them are the same.
"""

from __future__ import annotations

import io
import itertools
import json
import math
import random
import sys
import tarfile
from collections import Counter
from pathlib import Path
from typing import NamedTuple

from PIL import Image, ImageDraw
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

COLORS = {
    "red": (214, 40, 40),
    "green": (40, 160, 60),
    "blue": (40, 80, 210),
    "yellow": (245, 215, 40),
    "orange": (245, 130, 30),
    "purple": (130, 50, 170),
    "pink": (250, 150, 190),
    "brown": (120, 75, 40),
}
BACKGROUNDS = {"white": (245, 245, 245), "black": (15, 15, 15), "gray": (128, 128, 128)}
SHAPES = ("circle", "square", "triangle", "cross", "ring")
SIZES = {"small": (0.13, 0.16), "large": (0.23, 0.27)}  # half of the width, as a share of that of the picture
SIZE_WORDS = {"small": ("small", "little", "tiny"), "large": ("large", "big", "huge")}
# A place is said in one of these ways, and is so far from the center, to the right and down, as a share of the picture.
PLACES = {
    "middle": (("in the middle", "in the center"), (0.0, 0.0)),
    "left": (("on the left", "at the left edge"), (-0.22, 0.0)),
    "right": (("on the right", "at the right edge"), (0.22, 0.0)),
    "top": (("at the top", "at the upper edge"), (0.0, -0.22)),
    "bottom": (("at the bottom", "at the lower edge"), (0.0, 0.22)),
}
TRAIN, VALIDATION, IN_SHARD, PER_CLASS = 8000, 240, 2000, 6
PIXELS, FINER = 32, 4  # pictures are drawn finer and made smaller, so that edges are smooth
START, END = "<|startoftext|>", "<|endoftext|>"
VOCABULARY = 256


class Scene(NamedTuple):
    """The attributes of a picture that its caption may name."""

    shape: str
    color: str
    size: str
    place: str
    background: str


def drawn(scene: Scene, draw: random.Random) -> bytes:
    """Return a PNG of the scene; its exact place, size, angle and shades are drawn at random."""
    side = PIXELS * FINER

    def shade(color: tuple[int, int, int]) -> tuple[int, int, int]:
        red, green, blue = (min(255, max(0, value + draw.randint(-12, 12))) for value in color)
        return red, green, blue

    picture = Image.new("RGB", (side, side), shade(BACKGROUNDS[scene.background]))
    pen, color = ImageDraw.Draw(picture), shade(COLORS[scene.color])
    radius = side * draw.uniform(*SIZES[scene.size])
    x, y = (side * (0.5 + off + draw.uniform(-0.03, 0.03)) for off in PLACES[scene.place][1])
    turn = draw.uniform(-0.2, 0.2)

    def polygon(points: list[tuple[float, float]]) -> None:
        """Draw a polygon by the angle of each corner, in turns, and its distance from the center."""
        angles = [(2 * math.pi * angle + turn, radius * share) for angle, share in points]
        pen.polygon([(x + far * math.sin(angle), y - far * math.cos(angle)) for angle, far in angles], fill=color)

    box = (x - radius, y - radius, x + radius, y + radius)
    if scene.shape == "circle":
        pen.ellipse(box, fill=color)
    elif scene.shape == "ring":
        pen.ellipse(box, outline=color, width=round(0.4 * radius))
    elif scene.shape == "square":
        polygon([(each / 8, 1.25) for each in (1, 3, 5, 7)])
    elif scene.shape == "triangle":
        polygon([(each / 3, 1.25) for each in range(3)])
    else:
        arm = math.atan2(0.3, 1.1) / (2 * math.pi)
        for quarter in (0.0, 0.25):
            polygon([(quarter + each, 1.14) for each in (-arm, arm, 0.5 - arm, 0.5 + arm)])
    file = io.BytesIO()
    picture.resize((PIXELS, PIXELS), Image.Resampling.BOX).save(file, "PNG")
    return file.getvalue()


def described(scene: Scene, draw: random.Random) -> str:
    """Return a caption that says everything about the scene, in one of several ways."""
    size = draw.choice(SIZE_WORDS[scene.size])
    place = draw.choice(PLACES[scene.place][0])
    thing, back = f"{size} {scene.color} {scene.shape}", scene.background
    return draw.choice(
        (
            f"a {thing} {place} of a {back} picture",
            f"a picture of a {thing} {place}, on {back}",
            f"{place} there is a {thing}; the background is {back}",
            f"on a {back} background, a {thing} {place}",
            f"{thing}, {place}, {back} background",
        )
    )


def write_pairs(path: Path, scenes: list[Scene], first: int, draw: random.Random) -> list[str]:
    """Write a tar shard with the pairs of some scenes; return their captions. ``first``: the number of the first."""
    captions = []
    with tarfile.open(path, "w", format=tarfile.USTAR_FORMAT) as shard:
        for number, scene in enumerate(scenes, start=first):
            captions.append(described(scene, draw))
            for suffix, content in (("png", drawn(scene, draw)), ("txt", captions[-1].encode())):
                member = tarfile.TarInfo(f"{number:06d}.{suffix}")
                member.size = len(content)
                shard.addfile(member, io.BytesIO(content))
    return captions


def trained(words: Counter[str]) -> models.BPE:
    """Return byte-pair encoding (arXiv:1508.07909) trained on words with their counts, with </w> at their ends.

    Of equally frequent pairs the first in alphabetical order is merged: the trainer of the library chooses one of them
    at random.
    """
    parts = {word: [*word[:-1], f"{word[-1]}</w>"] for word in sorted(words)}
    letters = sorted({letter for word in words for letter in word})
    tokens = [START, END, *letters, *(f"{letter}</w>" for letter in letters)]
    merges: list[tuple[str, str]] = []
    while len(tokens) < VOCABULARY:
        pairs = Counter[tuple[str, str]]()
        for word, split in parts.items():
            for pair in itertools.pairwise(split):
                pairs[pair] += words[word]
        if not pairs:
            break
        left, right = min(pairs, key=lambda pair: (-pairs[pair], pair))
        merges.append((left, right))
        tokens.append(left + right)
        for split in parts.values():
            for place in range(len(split) - 1, 0, -1):
                if split[place - 1 : place + 1] == [left, right]:
                    split[place - 1 : place + 1] = [left + right]
    return models.BPE({token: number for number, token in enumerate(tokens)}, merges, end_of_word_suffix="</w>")


def write_tokenizer(folder: Path, captions: list[str]) -> None:
    """Write a tokenizer of CLIP's kind, trained on captions: lower case, words that end with </w>."""
    split = pre_tokenizers.Whitespace()
    words = Counter(word for caption in captions for word, _ in split.pre_tokenize_str(caption.lower()))
    tokenizer = Tokenizer(trained(words))
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Lowercase()])
    tokenizer.pre_tokenizer = split
    tokenizer.add_special_tokens([START, END])
    ids = [(token, tokenizer.token_to_id(token)) for token in (START, END)]
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{START} $A {END}", special_tokens=ids)
    tokenizer.decoder = decoders.BPEDecoder(suffix="</w>")
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": START,
        "eos_token": END,
        "pad_token": END,
        "model_max_length": 24,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def main(folder: Path) -> None:
    """Write everything, the same bytes each time, over what an earlier call has written."""
    draw = random.Random(1)
    folder.mkdir(parents=True, exist_ok=True)
    scenes = list(itertools.starmap(Scene, itertools.product(SHAPES, COLORS, SIZES, PLACES, BACKGROUNDS)))
    draw.shuffle(scenes)
    validation, training = scenes[:VALIDATION], scenes[VALIDATION:]
    chosen = [draw.choice(training) for _ in range(TRAIN)]
    captions = []
    for shard in range(TRAIN // IN_SHARD):
        first = shard * IN_SHARD
        captions += write_pairs(folder / f"train-{shard:04d}.tar", chosen[first : first + IN_SHARD], first, draw)
    write_pairs(folder / "val-0000.tar", validation, TRAIN, draw)
    for shape, color in itertools.product(SHAPES, COLORS):
        place = folder / "shapes" / f"{color} {shape}"
        place.mkdir(parents=True, exist_ok=True)
        of_class = [scene for scene in scenes if (scene.shape, scene.color) == (shape, color)]
        for number, scene in enumerate(draw.sample(of_class, PER_CLASS)):
            (place / f"{number:02d}.png").write_bytes(drawn(scene, draw))
    write_tokenizer(folder, captions)
    classes = len(SHAPES) * len(COLORS)
    print(
        f"{TRAIN} pairs to train on, {VALIDATION} to validate on, {classes} classes of {PER_CLASS} pictures: {folder}"
    )


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "clip-pairs"))
