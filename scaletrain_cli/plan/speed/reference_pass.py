"""Seconds of the pass over all pairs of ``dpo`` that computes the log-probabilities of the reference, before step 1."""

from __future__ import annotations

from dataclasses import replace

from scaletrain_cli.plan.data_size import data_size
from scaletrain_cli.plan.result import Layout, Time
from scaletrain_cli.spec import RunSpec


def with_reference_pass(spec: RunSpec, layout: Layout, time: Time) -> Time:
    """Return the time of a run with that of its reference pass; unchanged for objectives without a reference.

    The pass is the forward pass of a step, repeated for as many batches as the pairs of both splits fill
    (engine/objectives/reference.py ``ReferencePass``).
    """
    if spec.training.objective != "dpo":
        return time
    pairs = reference_pairs(spec)
    forward = max((stage.forward for stage in time.by_stage), default=0.0)
    filling = (layout.pipeline_parallel - 1) / layout.virtual_pipeline
    seconds = pairs / layout.global_batch_size * (layout.gradient_accumulation_steps + filling) * forward
    return replace(time, reference=seconds, reference_pairs=pairs, to_train=time.to_train + seconds)


def reference_pairs(spec: RunSpec) -> int:
    """Return the pairs of which the reference is computed: those of the data, or if unknown those of all steps.

    The latter is what one epoch has, with the validation split in addition.
    """
    known = data_size(spec)
    if known is not None:
        return known.train + known.validation
    return round(spec.total_steps * spec.training.global_batch_size / (1 - spec.data.validation_split))
