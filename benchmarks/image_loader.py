"""Images per second of the engine's loader, beside torch's DataLoader over the same JPEG files. Prints tables.

Both have the same number of processes, draw images in random order, crop, resize and flip them with Pillow, and hand
over batches of bytes. The dataset of torch is what a plain program has: a list of files, Pillow and torch's own random
numbers. Both start once and take turns, with the other one at rest; which one begins a round alternates, and a ratio is
the median of the ratios of the rounds. Three figures hold on a machine that is not idle, too: rates per CPU second;
rates by the clock without the time in which the processes waited for a core; and the idle share, the time in which
they neither ran nor waited for a core, because they had nothing to read. The files are parts of the two photographs of
scikit-learn.
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
from typing import Any, NamedTuple, Protocol

import numpy as np
import PIL
import psutil
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, RandomSampler

from scaletrain_cli.data.images.decode import decode
from scaletrain_cli.data.images.index import index_images
from scaletrain_cli.data.images.reading import open_images
from scaletrain_cli.data.images.samples import ImageSettings
from scaletrain_cli.engine.data.images.reading import ImageBatchReader
from scaletrain_cli.engine.data.images.transforms import ImageTransform, SampleKey
from scaletrain_cli.engine.data.loader import Loader
from scaletrain_cli.engine.data.reader_processes import ReaderProcesses
from scaletrain_cli.engine.parallel.mesh import Mesh
from scaletrain_cli.plan.result import Layout
from scaletrain_cli.spec.images import IMAGENET, AugmentSpec, ColorJitterSpec, ImagesSpec, RandAugmentSpec

QUALITY = 92  # about 110 kB a file of 500 x 375 pixels, as ImageNet has


class Pictures(NamedTuple):
    """Files of ``width`` x ``height`` pixels, which are made ``side`` x ``side`` for a model."""

    side: int
    width: int
    height: int

    @classmethod
    def of(cls, side: int) -> Pictures:
        """Return those of ImageNet's usual size from 128 pixels on, and squares, as small data sets have, below."""
        return cls(side, 500, 375) if side >= 128 else cls(side, side, side)


class Measured(NamedTuple):
    """Images per second; per second in which the processes did not wait for a core; per second of CPU time of this
    process and of those; and the share of their idle time.
    """

    rate: float
    free_rate: float
    cpu_rate: float
    idle: float


def write_files(folder: Path, count: int, pictures: Pictures) -> list[Path]:
    """Write parts of two photographs in two folders of classes; return their paths."""
    from sklearn.datasets import load_sample_images

    draw, paths = np.random.default_rng(0), []
    photographs = [Image.fromarray(each) for each in load_sample_images().images]
    for number in range(count):
        whole = photographs[number % 2]
        height = int(draw.integers(240, whole.height))
        width = min(whole.width, round(height * pictures.width / pictures.height))
        left, top = int(draw.integers(whole.width - width + 1)), int(draw.integers(whole.height - height + 1))
        part = whole.crop((left, top, left + width, top + height))
        part = part.resize((pictures.width, pictures.height), Image.Resampling.BICUBIC)
        path = folder / str(number % 2) / f"{number:05d}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        part.save(path, quality=QUALITY)
        paths.append(path)
    return paths


class Plain(Dataset[tuple[Tensor, int]]):
    """The files as a plain program reads them."""

    def __init__(self, paths: Sequence[Path], side: int) -> None:
        self._paths, self._side = list(paths), side

    def __len__(self) -> int:
        return len(self._paths)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        path = self._paths[index]
        with Image.open(path) as file:
            image = file.convert("RGB")
        image = _random_part(image).resize((self._side, self._side), Image.Resampling.BICUBIC)
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


def reader(folder: Path, batch: int, root: Path, side: int) -> ImageBatchReader:
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
    transform = ImageTransform.of(ImagesSpec(), side, IMAGENET[0])
    return ImageBatchReader((open_images(index)["train"],), layout, Mesh(), 0, transform)


class Side(Protocol):
    """A loader whose batches are taken one after the other."""

    def take(self) -> object:
        """Return the next batch."""
        ...

    def pids(self) -> list[int]:
        """Return the process ids of the processes that read."""
        ...

    def close(self) -> None:
        """End the processes."""
        ...


class Engine:
    """The engine's loader, after its processes have started."""

    def __init__(self, read: Callable[[int], Any], workers: int) -> None:
        self._loader, self._ahead = Loader(read, torch.device("cpu"), workers=workers), 2 * workers
        self._number = 0
        while not all(each.started for each in self._processes._processes):
            self.take()

    @property
    def _processes(self) -> ReaderProcesses:
        assert self._loader._processes is not None
        return self._loader._processes

    def take(self) -> object:
        """Return the next batch."""
        self._number += 1
        return self._loader.take(self._number, range(self._number + 1, self._number + 1 + self._ahead))

    def pids(self) -> list[int]:
        """Return the process ids of the processes that read."""
        return self._processes.pids

    def close(self) -> None:
        """End the processes."""
        self._loader.close()


class Torch:
    """torch's DataLoader with as many batches ahead, after its processes have started."""

    def __init__(self, dataset: Plain, workers: int, batch: int) -> None:
        loader = DataLoader(
            dataset,
            batch_size=batch,
            sampler=RandomSampler(dataset, replacement=True, num_samples=10**7),
            num_workers=workers,
            prefetch_factor=2,
            multiprocessing_context="spawn",
        )
        self._batches: Any = iter(loader)
        for _ in range(2 * workers):
            self.take()

    def take(self) -> object:
        """Return the next batch."""
        return next(self._batches)

    def pids(self) -> list[int]:
        """Return the process ids of the processes that read."""
        return [each.pid for each in self._batches._workers]

    def close(self) -> None:
        """End the processes."""
        self._batches._shutdown_workers()


def measured(side: Side, workers: int, batches: int, batch: int) -> Measured:
    """Return the rates at which ``batches`` are taken, from a loader at rest."""
    for _ in range(4 * workers):  # those that were read ahead
        side.take()
    pids = side.pids()
    wall, cpu, (ran, waited) = time.perf_counter(), _cpu_seconds(pids), _scheduled(pids)
    for _ in range(batches):
        side.take()
    wall, cpu = time.perf_counter() - wall, _cpu_seconds(pids) - cpu
    ran, waited = (now - before for now, before in zip(_scheduled(pids), (ran, waited), strict=True))
    free = wall - waited / len(pids)
    while True:  # until it has read ahead as far as it may
        before = _cpu_seconds(pids)
        time.sleep(0.3)
        if _cpu_seconds(pids) - before < 0.02:
            images = batches * batch
            return Measured(images / wall, images / free, images / cpu, 1 - (ran + waited) / (wall * len(pids)))


def _cpu_seconds(pids: Sequence[int]) -> float:
    """Return the seconds that this process and others ran."""
    times = [psutil.Process(pid).cpu_times() for pid in (os.getpid(), *pids)]
    return float(sum(each.user + each.system for each in times))


def _scheduled(pids: Sequence[int]) -> tuple[float, float]:
    """Return the seconds that the main threads of processes ran, and waited for a core (proc(5), schedstat)."""
    fields = [Path(f"/proc/{pid}/schedstat").read_text(encoding="ascii").split() for pid in pids]
    return sum(int(ran) for ran, _, _ in fields) / 1e9, sum(int(waited) for _, waited, _ in fields) / 1e9


def of_one_core(work: Callable[[int, bytes], object], files: Sequence[bytes]) -> float:
    """Return images per second of CPU time of one thread."""
    work(0, files[0])
    began = time.process_time()
    for number, content in enumerate(files):
        work(number, content)
    return len(files) / (time.process_time() - began)


def core_rates(paths: Sequence[Path], rounds: int, side: int) -> dict[str, float]:
    """Return the rate of one core by what it does with an image."""
    files = [path.read_bytes() for path in paths]
    heavy = AugmentSpec(rand_augment=RandAugmentSpec())
    colors = AugmentSpec(color_jitter=ColorJitterSpec(brightness=0.4, contrast=0.4, saturation=0.4))
    plain, augmented, colored = (
        ImageTransform.of(ImagesSpec(augment=each), side, IMAGENET[0]) for each in (AugmentSpec(), heavy, colors)
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


def compare(read: Callable[[int], Any], dataset: Plain, workers: int, options: argparse.Namespace) -> str:
    """Return a row of the table: both loaders with this number of processes."""
    sides: list[Side] = [Torch(dataset, workers, options.batch), Engine(read, workers)]
    rounds: list[list[Measured]] = [[], []]
    try:
        for number in range(options.rounds + 1):
            for each in (0, 1) if number % 2 else (1, 0):
                found = measured(sides[each], workers, options.batches, options.batch)
                if number:  # the first round brings files and programs into memory
                    rounds[each].append(found)
    finally:
        for side in sides:
            side.close()
    theirs, ours = rounds
    pairs = list(zip(theirs, ours, strict=True))
    ratios = [
        statistics.median(b.rate / a.rate for a, b in pairs),
        statistics.median(b.free_rate / a.free_rate for a, b in pairs),
        statistics.median(b.cpu_rate / a.cpu_rate for a, b in pairs),
    ]
    shown = " | ".join(f"{ratio:.2f}" for ratio in ratios)
    rates = [statistics.median(each.rate for each in side) for side in rounds]
    idle = [statistics.median(each.idle for each in side) for side in rounds]
    return f"| {workers} | {rates[0]:.0f} | {rates[1]:.0f} | {shown} | {idle[0]:.0%} | {idle[1]:.0%} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--side", type=int, default=224, help="pixels of the images of the model")
    parser.add_argument("--files", type=int, default=512)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--batches", type=int, default=20, help="batches of a round")
    parser.add_argument("--workers", type=int, nargs="*", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=11)
    options = parser.parse_args()
    torch.set_num_threads(1)
    pictures = Pictures.of(options.side)
    print(f"Pillow {PIL.__version__}, torch {torch.__version__}, {os.cpu_count()} cores, {platform.machine()}", end="")
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "files"
        paths = write_files(folder, options.files, pictures)
        size = statistics.mean(path.stat().st_size for path in paths)
        print(f"; {pictures.width} x {pictures.height} pixels, {size / 1e3:.0f} kB a file\n")
        print("| one core | images/s |\n|-|-|")
        for name, rate in core_rates(paths, min(5, options.rounds), options.side).items():
            print(f"| {name} | {rate:.0f} |", flush=True)
        read = reader(folder, options.batch, Path(place) / "runs", options.side).without_groups().batch
        columns = "torch images/s | engine images/s | ratio | without waits for a core | per CPU second"
        print(f"\n| processes | {columns} | torch idle | engine idle |\n|-|-|-|-|-|-|-|-|")
        for workers in options.workers:
            print(compare(read, Plain(paths, options.side), workers, options), flush=True)


if __name__ == "__main__":
    main()
