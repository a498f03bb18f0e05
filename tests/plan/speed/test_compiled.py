"""torch.compile fuses chains of small kernels: against the steps that build-nanogpt's author reports, and in itself."""

from dataclasses import replace
from typing import Any

import pytest

from scaletrain_cli.plan import make_plan
from scaletrain_cli.plan.advice.explain import explain
from scaletrain_cli.plan.axes import resolve_axes
from scaletrain_cli.plan.catalogue.hardware import find_accelerator
from scaletrain_cli.plan.frameworks.profile import compiled_profile
from scaletrain_cli.plan.frameworks.registry import FRAMEWORKS
from scaletrain_cli.plan.memory.device_memory import plan_memory
from scaletrain_cli.plan.result import Layout
from scaletrain_cli.plan.search.layouts import build_layout
from scaletrain_cli.plan.speed.step_time import plan_time
from tests.plan.specs import spec_of


def _milliseconds(**overrides: Any) -> float:
    """One micro-batch of 16 x 1024 tokens of GPT-2 124M on one A100, bf16."""
    run = {"planner__framework": "fsdp", "cluster__gpu": "a100-sxm-80gb", "cluster__gpus_per_node": 1}
    spec = spec_of("gpt2", training__global_batch_size=16, **{**run, **overrides})
    layout = build_layout(spec, resolve_axes(spec), 0, "none", 16)
    return 1e3 * plan_time(spec, layout, find_accelerator(spec.cluster))[0].step


def test_gpt_2_takes_about_what_build_nanogpt_reports() -> None:
    """github.com/karpathy/build-nanogpt, from memory: 300 ms eager, 130 compiled, 96 with flash attention too.

    It compiles the loss with the model; the planner's frameworks compile the blocks alone, some 20 ms more.
    """
    assert _milliseconds(planner__attention="materialised") == pytest.approx(300, rel=0.25)
    kept = _milliseconds(planner__attention="materialised", training__compile=True)
    assert kept - 20 == pytest.approx(130, rel=0.25)
    assert _milliseconds(training__compile=True) - 20 == pytest.approx(96, rel=0.25)


@pytest.mark.parametrize("framework", ["deepspeed", "fsdp", "megatron", "nanotron"])
def test_compiled_blocks_move_fewer_bytes_and_launch_fewer_kernels(framework: str) -> None:
    eager = FRAMEWORKS[framework].profile
    compiled = compiled_profile(eager)
    assert compiled.norm_forward <= eager.norm_forward
    assert compiled.forward_host < eager.forward_host
    assert compiled.loss == eager.loss


def test_auto_compiles_only_what_compiles_reliably() -> None:
    def layout(preset: str = "llama-7b", **overrides: Any) -> Layout:
        return make_plan(spec_of(preset, **overrides)).layout

    assert layout().compile
    assert layout(cluster__gpu="a100-sxm-80gb").compile
    assert layout("gpt2", training__compile=True, cluster__gpu="v100-sxm2-32gb", training__precision="fp16").compile
    for case in (
        {"training__compile": False},
        {"training__precision": "fp8"},
        {"training__steps": 100},
        {"planner__framework": "fsdp"},
        {"cluster__gpu": "mi300x-192gb"},
    ):
        assert not layout(**case).compile, case
    for gpu, precision in (("cpu", "bf16"), ("v100-sxm2-32gb", "fp16")):
        assert not layout("gpt2", cluster__gpu=gpu, training__precision=precision).compile
    assert not layout("mixtral-8x7b", cluster__nodes=8).compile


def test_auto_is_planned_with_the_time_of_compiled_blocks_and_the_memory_of_eager_ones() -> None:
    auto, eager = (spec_of("llama-7b", training__compile=compile) for compile in ("auto", False))
    plan = make_plan(auto)
    device, layout = find_accelerator(auto.cluster), replace(plan.layout, compile=False)
    assert plan.time.step < plan_time(eager, layout, device)[0].step
    assert plan.memory == plan_memory(eager, layout, device)
    (question,) = [each for each in explain(auto, plan) if each.key == "compile"]
    assert question.answer is True
    assert [row.name for row in question.rows] == ["compiled", "eager"]
    assert [reason.code for reason in question.verdict] == ["plan.compiled"]
