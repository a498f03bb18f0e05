"""Images that ranks and nodes have to read and decode for the planned step, and the time that a step waits for them."""

import math
from dataclasses import dataclass

from scaletrain_cli.plan.catalogue.hardware import rank_cores, stated_rate
from scaletrain_cli.plan.result import Layout
from scaletrain_cli.plan.vision.losses import views
from scaletrain_cli.spec import ClipSpec, LlavaSpec, ModelSpec, RunSpec
from scaletrain_cli.spec.loader_processes import decodes_beside_gpus, loader_processes, set_cores
from scaletrain_cli.spec.sources import MOST_WORKERS
from scaletrain_cli.spec.vision_model import image_channels

# An image of ImageNet's training set: 1,281,167 images in 138 GiB (image-net.org, ILSVRC 2012), 500 x 375 on average.
IMAGE_BYTES = 110_000
_IMAGE_PIXELS = 500 * 375
# Data sets for networks up to this size are stored as small as they are read: CIFAR 32, Tiny ImageNet 64.
_SMALL_SIDE = 64
# Decoding such an image by Pillow takes 1.4 to 2.8 ms of one core: 537 to 726 images a second on Zen 4 and 5, 577 on
# Xeon 8581C, 360 and 551 on Neoverse N1 and V2 (arXiv:2605.08731, ImageNet's validation set).
_DECODE_SECONDS = 1.75e-3
# Of an image whatever its size: a PNG of 32 x 32 takes 0.12 to 0.14 ms with its changes, recipes/clip_pairs_cpu.py.
_FILE_SECONDS = 0.1e-3
# By pixels of the result, ``benchmarks/image_loader.py`` on a 2-core x86 machine, at 224 x 224: crop, resize, flip and
# copy to the batch take 1.0 ms, four color changes 0.5 ms, two operations of RandAugment, of which half
# are applied, 0.85 ms.
_PIXEL_SECONDS, _COLOR_SECONDS, _OPERATION_SECONDS = 20e-9, 2.6e-9, 17e-9
_COLORS = 4  # brightness, contrast, saturation and hue
# Share of these rates that a core of a busy server reaches: four and eight processes of torch's DataLoader on 16 vCPUs
# decode 0.33 to 0.54 of what as many single ones do (arXiv:2605.08731), as cores share clocks, caches and memory; and
# CLIP ViT-B/32 got 730 to 850 images/s from 6 cores per GPU where it was fastest (LAION, trained_models_info.csv). The
# loader of the engine is as fast as torch's (benchmarks/results/image_loader.md). A thread shares Python's lock.
_CORE_SHARE = 0.5
_PROCESS_BYTES = 256 << 20  # of a reader process: Python, NumPy, Pillow and torch without a GPU


@dataclass(frozen=True)
class ImageFeed:
    """The images of one step.

    ``rank_rate``, ``node_rate``: images per second that a rank and a node need so that no step waits. ``core_rate``:
    images per second that one core of a busy server decodes and augments. ``cores``: of a node. ``workers``: processes
    of each rank that suffice. ``read_rate``: bytes per second from storage or network by each node; ``storage``: those
    that the spec allows, infinite if it does not say. ``wait``: seconds that a step waits with the workers of the spec.
    """

    rank_rate: float
    node_rate: float
    core_rate: float
    cores: int
    workers: int
    read_rate: float
    storage: float
    wait: float


def core_seconds(spec: RunSpec) -> float:
    """Return the seconds that one core alone needs for a sample: its image decoded, and each view of it augmented."""
    decode = _FILE_SECONDS + (_DECODE_SECONDS - _FILE_SECONDS) * _stored_pixels(spec) / _IMAGE_PIXELS
    # of the result, with the mean number of drawn operations
    augment = spec.data.images.augment
    drawn, jitter = augment.rand_augment, augment.color_jitter
    operations = 0.0 if drawn is None else drawn.num_ops * drawn.probability
    colors = 0 if jitter is None else _COLORS
    return decode + views(spec) * _side(spec) ** 2 * (
        _PIXEL_SECONDS + _OPERATION_SECONDS * operations + _COLOR_SECONDS * colors
    )


def _side(spec: RunSpec) -> int:
    model = spec.model.vision_config if isinstance(spec.model, ClipSpec | LlavaSpec) else spec.model
    return int(getattr(model, "image_size", 0))


def _stored_pixels(spec: RunSpec) -> int:
    """Return the pixels of an image of the source: as ImageNet has them, or of a small network those that it reads."""
    return _side(spec) ** 2 if 0 < _side(spec) <= _SMALL_SIDE else _IMAGE_PIXELS


def image_feed(spec: RunSpec, layout: Layout, step: float) -> ImageFeed:
    """Return the demand for images of a run whose steps take ``step`` seconds without waiting."""
    core_rate, ranks = _CORE_SHARE / core_seconds(spec), min(layout.data_parallel, spec.cluster.gpus_per_node)
    images = layout.global_batch_size / layout.data_parallel
    rate = images / step
    storage = stated_rate(spec.cluster.storage_bandwidth, math.inf)
    readers = max(1, min(image_readers(spec), rank_cores(spec)))
    read = ranks * images * IMAGE_BYTES * _stored_pixels(spec) / _IMAGE_PIXELS
    return ImageFeed(
        rank_rate=rate,
        node_rate=ranks * rate,
        core_rate=core_rate,
        cores=math.ceil(ranks * rate / core_rate),
        workers=0 if rate <= core_rate else math.ceil(rate / core_rate),
        read_rate=read / step,
        storage=storage,
        wait=max(0.0, images / (core_rate * readers) - step, read / storage - step),
    )


def allowed_workers(spec: RunSpec, feed: ImageFeed) -> int:
    """Return the workers of each rank to set: those that suffice, at most the spec's limit and the cores of a rank.

    ``auto`` leaves one of these to the training loop.
    """
    automatic = spec.data.loader.workers == "auto"
    return min(feed.workers, MOST_WORKERS, max(1, rank_cores(spec) - automatic))


def image_readers(spec: RunSpec) -> int:
    """Return the processes of each rank that decode; 0: a thread does."""
    return loader_processes(spec, rank_cores(spec))


def reader_bytes(spec: RunSpec, layout: Layout) -> int:
    """Return the host memory of the processes of a rank that read images, at most: libraries, and three batches each.

    Two batches of a process are in its slots while it decodes another.
    """
    if not decodes_beside_gpus(spec):
        return 0
    count = loader_processes(spec, set_cores(spec) or MOST_WORKERS)
    samples = layout.global_batch_size // layout.data_parallel
    assert not isinstance(spec.model, ModelSpec)
    return count * (_PROCESS_BYTES + 3 * samples * views(spec) * _side(spec) ** 2 * image_channels(spec.model))
