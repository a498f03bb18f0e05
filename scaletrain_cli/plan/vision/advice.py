"""Warnings and assumptions of plans of vision networks: BatchNorm, contrastive batches, and the image loader."""

from collections.abc import Iterator

from scaletrain_cli.plan.frameworks.registry import framework_of
from scaletrain_cli.plan.result import Layout, Time
from scaletrain_cli.plan.vision.image_feed import (
    IMAGE_BYTES,
    allowed_workers,
    image_feed,
    is_fed,
    set_cores,
    storage_bandwidth,
    waits_for_storage,
)
from scaletrain_cli.plan.vision.losses import caches_gradients, views
from scaletrain_cli.plan.vision.networks import vision_model
from scaletrain_cli.plan.vision.parameters import vision_buffers
from scaletrain_cli.plan.vision.step_time import synchronizes_batch_norm
from scaletrain_cli.reasons import Reason
from scaletrain_cli.spec import RunSpec
from scaletrain_cli.spec.loader_processes import cores_per_rank, decodes_beside_gpus, loader_processes
from scaletrain_cli.spec.sources import MOST_WORKERS

# BatchNorm's error grows below this number of images (arXiv:1803.08494, figure 5).
_FEW_IMAGES = 16


def layout_warnings(spec: RunSpec, layout: Layout, time: Time) -> Iterator[Reason]:
    """Yield warnings about small batches of BatchNorm, a second forward pass, and a loader that does not keep up."""
    yield from _about_batch_norm(spec, layout)
    if caches_gradients(spec, layout):
        share = time.recompute / time.step
        yield Reason("plan.caches-gradients", {"accumulation": layout.gradient_accumulation_steps, "share": share})
    yield from loader_warnings(spec, layout, time)


def loader_warnings(spec: RunSpec, layout: Layout, time: Time) -> Iterator[Reason]:
    """Yield warnings about storage, workers and cores that do not keep up with the step."""
    if not is_fed(spec):
        return
    feed = image_feed(spec, layout, time.step - time.data_wait)
    if waits_for_storage(spec, feed):
        given = {"given": storage_bandwidth(spec), "image_bytes": IMAGE_BYTES}
        rates = {"needed": feed.read_rate, "images": feed.node_rate, **given}
        yield Reason("plan.images-exceed-storage", {**rates, "wait": time.data_wait})
    workers, cores, automatic = loader_processes(spec), set_cores(spec), spec.data.loader.workers == "auto"
    needs = {"given": workers, "needed": feed.workers, "rate": feed.rank_rate, "core_rate": feed.core_rate}
    wait = {"wait": time.data_wait, "share": time.data_wait / time.step}
    if not automatic and workers < (allowed := allowed_workers(spec, feed)) and time.data_wait:
        yield Reason("plan.too-few-image-workers", {**needs, **wait, "needed": allowed})
    if feed.workers > MOST_WORKERS and time.data_wait:
        yield Reason("plan.image-workers-beyond-limit", {**needs, **wait, "most": MOST_WORKERS})
    if cores is not None and cores < feed.workers + automatic:  # one core is left to the training loop
        yield Reason("plan.too-few-cores-for-images", {**needs, "needed": feed.workers + automatic, "cores": cores})
    if cores is None and automatic and workers < feed.workers and time.data_wait:
        given = {"cores": cores_per_rank(spec), "needed": min(feed.workers, MOST_WORKERS) + 1}
        yield Reason("plan.images-need-cores", {**needs, **wait, **given})


def _about_batch_norm(spec: RunSpec, layout: Layout) -> Iterator[Reason]:
    if not framework_of(spec).is_engine or not vision_buffers(vision_model(spec)):
        return
    images, together = layout.micro_batch_size * views(spec), synchronizes_batch_norm(spec, layout)
    seen = images * (layout.data_parallel if together else 1)
    if seen < _FEW_IMAGES:
        code = "plan.few-images-of-all-ranks" if together or layout.data_parallel == 1 else "plan.few-images-per-rank"
        yield Reason(code, {"images": seen, "ranks": layout.data_parallel})
    if layout.gradient_accumulation_steps > 1:
        steps = layout.gradient_accumulation_steps
        yield Reason("plan.accumulates-with-batch-norm", {"accumulation": steps, "images": seen})


def feed_assumptions(spec: RunSpec, layout: Layout, time: Time) -> Iterator[Reason]:
    """Yield the images per second that the plan needs, and what they need of processors and storage."""
    if not is_fed(spec):
        return
    feed = image_feed(spec, layout, time.step - time.data_wait)
    rates = {"rank": feed.rank_rate, "node": feed.node_rate, "cores": feed.cores, "core_rate": feed.core_rate}
    yield Reason("plan.assumes-image-rate", rates)
    if spec.data.loader.workers == "auto" and decodes_beside_gpus(spec):
        yield Reason("plan.assumes-image-readers", {"workers": loader_processes(spec), "cores": cores_per_rank(spec)})
    yield Reason("plan.assumes-image-bytes", {"read": feed.read_rate, "image_bytes": IMAGE_BYTES})
