"""Property: a faster device or network never takes longer for the same layout."""

from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from scaletrain_cli.plan.axes import resolve_axes
from scaletrain_cli.plan.catalogue.hardware import Accelerator, find_accelerator
from scaletrain_cli.plan.search.layouts import build_layout
from scaletrain_cli.plan.speed.step_time import plan_time
from scaletrain_cli.spec import RunSpec
from tests.plan.specs import spec_of

_MORE = (1.05, 1.3, 2.0, 8.0)
# A faster link may be of a generation with a microsecond more of latency; and faster products leave communication a
# little less of the backward pass to hide behind, where the host sets the pace of the whole.
_HARDLY = 1.001


def _step(spec: RunSpec, zero_stage: int, device: Accelerator) -> float:
    layout = build_layout(spec, resolve_axes(spec), zero_stage, "none", 1)
    return plan_time(spec, layout, device)[0].step


def _faster(device: Accelerator, what: str, by: float) -> Accelerator:
    if what == "flops":
        return replace(device, flops={name: by * peak for name, peak in device.flops.items()})
    return replace(device, **{what: by * getattr(device, what)})


CASES: list[tuple[str, str, str, int, int, int]] = [
    (preset, gpu, framework, tensor, pipeline, chunks)
    for (preset, gpu), framework, (tensor, pipeline, chunks) in product(
        (("gpt2", "l40s"), ("llama-7b", "h100-sxm-80gb"), ("llama-70b", "gb300")),
        ("deepspeed", "megatron", "nanotron"),
        ((1, 2, 1), (4, 8, 1), (2, 4, 2), (1, 1, 1), (4, 1, 1)),
    )
    if chunks == 1 or framework == "megatron"
    if preset != "gpt2" or (pipeline < 8 or framework != "nanotron")
]


@pytest.mark.parametrize("case", CASES)
def test_more_hardware_is_never_slower(case: tuple[str, str, str, int, int, int]) -> None:
    preset, gpu, framework, tensor, pipeline, chunks = case
    overrides: dict[str, Any] = {
        "cluster__gpu": gpu,
        "cluster__nodes": 8,
        "planner__framework": framework,
        "layout__tensor_parallel": tensor,
        "layout__pipeline_parallel": pipeline,
    }
    if chunks > 1:
        overrides["layout__virtual_pipeline"] = chunks
    spec = spec_of(preset, **overrides)
    device = find_accelerator(spec.cluster)
    for zero_stage in (0, 1) if pipeline > 1 else (1, 3):
        before = _step(spec, zero_stage, device)
        for what, by in product(("flops", "memory_bandwidth", "intra_node_bandwidth"), _MORE):
            after = _step(spec, zero_stage, _faster(device, what, by))
            assert after <= before * _HARDLY, (zero_stage, what, by, after / before)
        steps = []
        for by in (1.0, *_MORE):
            cluster = spec.cluster.model_copy(update={"inter_node_bandwidth": by * 12.5e9})
            steps.append(_step(spec.model_copy(update={"cluster": cluster}), zero_stage, device))
        assert max(steps) <= steps[0] * _HARDLY, (zero_stage, "inter_node_bandwidth", steps)
