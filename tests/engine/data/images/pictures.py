"""Small sources of images in memory, in a module that reader processes import quickly."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from scaletrain_cli.data.images.samples import ImageSample
from scaletrain_cli.engine.data.images.reading import ImageBatchReader
from scaletrain_cli.engine.data.images.transforms import ImageTransform
from scaletrain_cli.engine.parallel.mesh import Axis, Mesh
from scaletrain_cli.plan.result import Layout
from scaletrain_cli.spec.images import AugmentSpec, ColorJitterSpec, ImagesSpec, RandAugmentSpec, RandomErasingSpec
from tests.engine.plain_layout import plain_layout

CLASSES = 3
ALL = AugmentSpec(
    color_jitter=ColorJitterSpec(brightness=0.2, hue=0.1),
    rand_augment=RandAugmentSpec(),
    random_erasing=RandomErasingSpec(probability=0.5),
    mixup=0.8,
    cutmix=1.0,
)


@dataclass(frozen=True)
class Pictures:
    """``count`` images of random colors, which are functions of their numbers. Number ``bad`` has no image."""

    count: int = 20
    name: str = "a.tar"
    bad: int = -1
    side: int = 24

    def __len__(self) -> int:
        return self.count

    def read(self, index: int) -> ImageSample:
        file = BytesIO()
        draw = np.random.default_rng([index, len(self.name)])
        pixels = draw.integers(0, 256, (self.side, self.side + 4, 3), np.uint8)
        Image.fromarray(pixels).save(file, "PNG")
        content = b"no image" if index == self.bad else file.getvalue()
        return ImageSample(str(index), content, index % CLASSES, f"picture {index}", f"{self.name}:{index}.png")


def noted(reads: Path, read: Callable[[int], Any], number: int) -> Any:
    """Return what ``read`` returns, after a line with the process and the number in a file."""
    with reads.open("a", encoding="utf-8") as file:
        file.write(f"{os.getpid()} {number}\n")
    return read(number)


def layout(batch: int, data_parallel: int = 1, micro_batch_size: int | None = None) -> Layout:
    size = micro_batch_size or batch // data_parallel
    return plain_layout(batch, data_parallel, batch // size // data_parallel)


def reader(
    *sources: Any, at: Layout | None = None, rank: int = 0, size: int = 16, channels: int = 3, **settings: Any
) -> ImageBatchReader:
    images = ImagesSpec(augment=settings.pop("augment", ALL))
    at = at or layout(12)
    axis = Axis(at.data_parallel, rank)
    transform = ImageTransform.of(images, size, (0.5,) * channels)
    given = {"seed": 7, **settings}
    return ImageBatchReader(sources or (Pictures(),), at, Mesh(data=axis, replicas=axis), transform=transform, **given)
