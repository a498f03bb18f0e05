"""Explain what the image loader has to deliver for the speed of a plan."""

from __future__ import annotations

from collections.abc import Iterator

from scaletrain_cli.plan.advice.explanation import Question, Row
from scaletrain_cli.plan.result import RunPlan
from scaletrain_cli.reasons import Reason
from scaletrain_cli.spec import RunSpec
from scaletrain_cli.spec.loader_processes import loader_processes


def loader_questions(spec: RunSpec, plan: RunPlan) -> Iterator[Question]:
    """Yield the question whether reading and decoding keep up with the step, for runs that read images."""
    if spec.unit == "tokens":
        return
    from scaletrain_cli.plan.vision.image_feed import (  # only for images
        allowed_workers,
        image_feed,
        is_fed,
        waits_for_storage,
    )

    if not is_fed(spec):
        return
    time, layout = plan.time, plan.layout
    busy = time.step - time.data_wait
    feed = image_feed(spec, layout, busy)
    images = layout.global_batch_size / layout.data_parallel
    per_core = Reason("plan.images-by-core", {"core_rate": feed.core_rate})
    per_node = Reason("plan.images-by-node", {"node_rate": feed.node_rate, "cores": feed.cores})
    rows = (
        Row("images of a rank, decoded by one core", seconds=images / feed.core_rate, note=per_core),
        Row("step without waiting", seconds=busy, note=per_node),
        Row("read by a node, of the step", round(feed.read_rate * busy)),
        Row("waiting for data", seconds=time.data_wait, share=time.data_wait / time.step),
    )
    given = {"workers": loader_processes(spec), "needed": allowed_workers(spec, feed)}
    if waits_for_storage(spec, feed):
        verdict = Reason("plan.storage-is-too-slow", {"needed": feed.read_rate})
    elif time.data_wait and (spec.data.loader.workers == "auto" or given["workers"] >= given["needed"]):
        cores = {"needed": feed.workers, "rate": feed.rank_rate, "core_rate": feed.core_rate}
        verdict = Reason("plan.cores-are-too-few", cores)
    elif time.data_wait:
        verdict = Reason("plan.workers-are-too-few", given)
    else:
        verdict = Reason("plan.loader-keeps-up", given)
    yield Question("loader", Reason("plan.ask-loader"), rows, not time.data_wait, (verdict,))
