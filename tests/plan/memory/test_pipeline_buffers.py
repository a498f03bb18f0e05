"""What a stage of DeepSpeed's pipeline holds of the hidden states that stages send each other."""

from dataclasses import replace

import pytest

from scaletrain_cli.plan.axes import resolve_axes
from scaletrain_cli.plan.memory.buffers import PipelineBuffers, pipeline_buffers
from scaletrain_cli.plan.result import Layout
from scaletrain_cli.plan.search.layouts import build_layout
from scaletrain_cli.plan.stages import Stage
from tests.plan.specs import spec_of

FIRST, MIDDLE, LAST = (Stage(place, 8, 8, place == 0, place == 3, 8 * place) for place in (0, 1, 3))
PAYLOAD = 1000


def layout_of(tensor: int = 1, pipeline: int = 4) -> Layout:
    degrees = {"layout__tensor_parallel": tensor, "layout__pipeline_parallel": pipeline}
    spec = spec_of("llama-7b", **degrees, training__global_batch_size=64, training__micro_batch_size=1)
    return build_layout(spec, resolve_axes(spec), 1, "full", 1)


# As many payloads as tensors of their size were alive on fake tensors, beside those that autograd saves.
@pytest.mark.parametrize(
    ("stage", "in_flight", "forward", "backward", "update"),
    [
        (FIRST, 4, 1 + 4, 1 + 4, 1),  # the buffer, and the outputs
        (MIDDLE, 3, 1 + 3 + 3, 1 + 3 + 3, 1),  # and what was received
        (LAST, 1, 1 + 1 + 3, 1 + 1 + 3 + 1, 1 + 2 * 3),  # and what other micro-batches have left
    ],
)
def test_a_stage_keeps_inputs_and_outputs_of_each_micro_batch(
    stage: Stage, in_flight: int, forward: int, backward: int, update: int
) -> None:
    found = pipeline_buffers(layout_of(), stage, PAYLOAD, in_flight)
    assert found == PipelineBuffers(forward * PAYLOAD, backward * PAYLOAD, update * PAYLOAD)


@pytest.mark.parametrize(("stage", "in_flight"), [(FIRST, 4), (MIDDLE, 3)])
def test_tensor_ranks_keep_shares_and_join_the_output_and_its_gradient(stage: Stage, in_flight: int) -> None:
    found = pipeline_buffers(layout_of(tensor=2), stage, PAYLOAD, in_flight)
    shares = (1 + in_flight) * PAYLOAD // 2
    assert found == PipelineBuffers(shares, shares + 2 * PAYLOAD, PAYLOAD // 2)


def test_one_micro_batch_leaves_nothing_beside_the_next() -> None:
    alone = replace(layout_of(), gradient_accumulation_steps=1)
    assert pipeline_buffers(alone, LAST, PAYLOAD, 1) == PipelineBuffers(2 * PAYLOAD, 3 * PAYLOAD, 4 * PAYLOAD)


def test_without_a_pipeline_there_is_nothing_to_send() -> None:
    assert pipeline_buffers(layout_of(pipeline=1), Stage(0, 32, 32, True, True), PAYLOAD, 1) == (0, 0, 0)
