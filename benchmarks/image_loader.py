"""Images per second of the engine's loader, beside torch's DataLoader over the same JPEG files. Prints tables.

Both have the same number of processes, draw images in random order, crop, resize and flip them with Pillow, and hand
over batches of bytes. The dataset of torch is what a plain program has: a list of files, Pillow and torch's own random
numbers. The ways take turns, and a ratio is the median of the ratios of the rounds. Rates of one core are of CPU time,
so that they hold on a machine that is not idle. The files are parts of the two photographs of scikit-learn.
"""

from __future__ import annotations

import argparse
import math
import os
import platform
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import PIL
import psutil
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from scaletrain_cli.data.images.decode import decode
from scaletrain_cli.data.images.index import index_images
from scaletrain_cli.data.images.reading import open_images
from scaletrain_cli.data.images.samples import ImageSettings
from scaletrain_cli.engine.data.images.reading import ImageBatchReader
from scaletrain_cli.engine.data.images.transforms import ImageTransform, SampleKey
from scaletrain_cli.engine.data.loader import Loader
from scaletrain_cli.engine.parallel.mesh import Mesh
from scaletrain_cli.plan.result import Layout
from scaletrain_cli.spec.images import IMAGENET, AugmentSpec, ColorJitterSpec, ImagesSpec, RandAugmentSpec

SIZE = 224
WIDTH, HEIGHT = 500, 375  # the usual size of an image of ImageNet
QUALITY = 92  # about 110 kB a file, as ImageNet has


class Measured(NamedTuple):
    """Images per second, and per second of CPU time of the process and its children."""

    rate: float
    cpu_rate: float


def write_files(folder: Path, count: int) -> list[Path]:
    """Write parts of two photographs in two folders of classes; return their paths."""
    from sklearn.datasets import load_sample_images

    draw, paths = np.random.default_rng(0), []
    photographs = [Image.fromarray(each) for each in load_sample_images().images]
    for number in range(count):
        whole = photographs[number % 2]
        height = int(draw.integers(240, whole.height))
        width = min(whole.width, round(height * WIDTH / HEIGHT))
        left, top = int(draw.integers(whole.width - width + 1)), int(draw.integers(whole.height - height + 1))
        part = whole.crop((left, top, left + width, top + height)).resize((WIDTH, HEIGHT), Image.Resampling.BICUBIC)
        path = folder / str(number % 2) / f"{number:05d}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        part.save(path, quality=QUALITY)
        paths.append(path)
    return paths


class Plain(Dataset[tuple[Tensor, int]]):
    """The files as a plain program reads them."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._paths = list(paths)

    def __len__(self) -> int:
        return len(self._paths)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        path = self._paths[index]
        with Image.open(path) as file:
            image = file.convert("RGB")
        image = _random_part(image).resize((SIZE, SIZE), Image.Resampling.BICUBIC)
        if random.random() < 0.5:
            image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        return torch.from_numpy(np.array(image)).permute(2, 0, 1).contiguous(), int(path.parent.name)


def _random_part(image: Image.Image) -> Image.Image:
    for _ in range(10):
        area = image.width * image.height * random.uniform(0.08, 1)
        ratio = math.exp(random.uniform(math.log(3 / 4), math.log(4 / 3)))
        width, height = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if width <= image.width and height <= image.height:
            left, top = random.randint(0, image.width - width), random.randint(0, image.height - height)
            return image.crop((left, top, left + width, top + height))
    return image


def reader(folder: Path, batch: int, root: Path) -> ImageBatchReader:
    """Return the engine's reader of one rank with the same changes of images."""
    index = index_images(str(folder), ImageSettings(validation_share=0.0), root, 1, lambda *_: None)
    layout = Layout(
        world_size=1,
        data_parallel=1,
        tensor_parallel=1,
        pipeline_parallel=1,
        virtual_pipeline=1,
        sequence_parallel=1,
        context_parallel=1,
        expert_parallel=1,
        zero_stage=0,
        micro_batch_size=batch,
        gradient_accumulation_steps=1,
        global_batch_size=batch,
        activation_checkpointing="none",
        offload="none",
    )
    transform = ImageTransform.of(ImagesSpec(), SIZE, IMAGENET[0])
    return ImageBatchReader((open_images(index)["train"],), layout, Mesh(), 0, transform)


class _Clock:
    """The time and the CPU time of this process and its children since it was made."""

    def __init__(self) -> None:
        self._wall, self._cpu = time.perf_counter(), _cpu_seconds()

    def measured(self, images: int) -> Measured:
        cpu = _cpu_seconds() - self._cpu
        return Measured(images / (time.perf_counter() - self._wall), images / cpu)


def _cpu_seconds() -> float:
    own = psutil.Process()
    times = [each.cpu_times() for each in (own, *own.children(recursive=True))]
    return float(sum(each.user + each.system for each in times))


def of_engine(read: Callable[[int], Any], workers: int, batches: int, batch: int) -> Measured:
    """Return the rate at which ``batches`` are taken, after the processes have started."""
    loader, ahead = Loader(read, torch.device("cpu"), workers=workers), 2 * workers
    try:
        first = 1
        processes = loader._processes
        assert processes is not None
        while not all(each.started for each in processes._processes):
            loader.take(first, range(first + 1, first + 1 + ahead))
            first += 1
        clock = _Clock()
        for number in range(first, first + 2 * ahead + batches):
            if number == first + 2 * ahead:
                clock = _Clock()
            loader.take(number, range(number + 1, number + 1 + ahead))
        return clock.measured(batches * batch)
    finally:
        loader.close()


def of_torch(dataset: Plain, workers: int, batches: int, batch: int) -> Measured:
    """Return the same for torch's DataLoader."""
    ahead = 2 * workers
    # As many batches are left at the end as the processes read ahead, so that they work all the time.
    samples = torch.randint(len(dataset), ((batches + 3 * ahead) * batch,)).tolist()
    loader = DataLoader(
        dataset,
        batch_size=batch,
        sampler=samples,
        num_workers=workers,
        prefetch_factor=2,
        multiprocessing_context="spawn",
    )
    taken = iter(loader)
    for _ in range(2 * ahead):
        next(taken)
    clock = _Clock()
    for _ in range(batches):
        next(taken)
    found = clock.measured(batches * batch)
    del taken
    return found


def of_one_core(work: Callable[[int, bytes], object], files: Sequence[bytes]) -> float:
    """Return images per second of CPU time of one thread."""
    work(0, files[0])
    began = time.process_time()
    for number, content in enumerate(files):
        work(number, content)
    return len(files) / (time.process_time() - began)


def core_rates(paths: Sequence[Path], rounds: int) -> dict[str, float]:
    """Return the rate of one core by what it does with an image."""
    files = [path.read_bytes() for path in paths]
    heavy = AugmentSpec(rand_augment=RandAugmentSpec())
    colors = AugmentSpec(color_jitter=ColorJitterSpec(brightness=0.4, contrast=0.4, saturation=0.4))
    plain, augmented, colored = (
        ImageTransform.of(ImagesSpec(augment=each), SIZE, IMAGENET[0]) for each in (AugmentSpec(), heavy, colors)
    )

    def training(transform: ImageTransform, number: int, content: bytes) -> object:
        return transform.training(decode(content, "", 3), SampleKey(0, 0, number))

    ways: dict[str, Callable[[int, bytes], object]] = {
        "decode": lambda number, content: decode(content, "", 3),
        "decode, resize, center crop": lambda number, content: plain.evaluation(decode(content, "", 3)),
        "decode, random crop, flip": partial(training, plain),
        "decode, random crop, flip, color jitter": partial(training, colored),
        "decode, random crop, flip, RandAugment of 2 operations": partial(training, augmented),
    }
    found: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, work in ways.items():
            found[name].append(of_one_core(work, files))
    return {name: statistics.median(each) for name, each in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--files", type=int, default=512)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--batches", type=int, default=40)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(f"Pillow {PIL.__version__}, torch {torch.__version__}, {os.cpu_count()} cores, {platform.machine()}", end="")
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "files"
        paths = write_files(folder, options.files)
        size = statistics.mean(path.stat().st_size for path in paths)
        print(f"; {WIDTH} x {HEIGHT} pixels, {size / 1e3:.0f} kB a file\n")
        print("| one core | images/s |\n|-|-|")
        for name, rate in core_rates(paths, options.rounds).items():
            print(f"| {name} | {rate:.0f} |", flush=True)
        read, dataset = reader(folder, options.batch, Path(place) / "runs").without_groups().batch, Plain(paths)
        print(
            "\n| processes | torch images/s | engine images/s | ratio | ratio of images per CPU second |\n|-|-|-|-|-|"
        )
        for workers in options.workers:
            pairs = []
            for _ in range(options.rounds):
                theirs = of_torch(dataset, workers, options.batches, options.batch)
                pairs.append((theirs, of_engine(read, workers, options.batches, options.batch)))
            rates = [statistics.median(each.rate for each in side) for side in zip(*pairs, strict=True)]
            ratio = statistics.median(ours.rate / theirs.rate for theirs, ours in pairs)
            cpu = statistics.median(ours.cpu_rate / theirs.cpu_rate for theirs, ours in pairs)
            print(f"| {workers} | {rates[0]:.0f} | {rates[1]:.0f} | {ratio:.2f} | {cpu:.2f} |", flush=True)


if __name__ == "__main__":
    main()
