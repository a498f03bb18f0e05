"""What this engine cannot run is named, one line per thing, with what to do."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from scaletrain_cli.plan import make_plan, submittable
from scaletrain_cli.plan.search import engine_support
from scaletrain_cli.plan.search.engine_support import AXES, ENGINE, capabilities, opened
from tests.plan.specs import spec_of


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ({"layout__tensor_parallel": 2}, "layout.tensor_parallel = 2"),
        ({"layout__pipeline_parallel": 2}, "layout.pipeline_parallel = 2"),
        ({"layout__sequence_parallel": 2}, "layout.sequence_parallel = 2"),
        ({"layout__context_parallel": 2}, "layout.context_parallel = 2"),
        ({"model__num_experts": 4, "model__num_experts_per_tok": 2}, "model.num_experts = 4"),
        ({"training__precision": "fp16"}, "training.precision = fp16"),
        ({"training__precision": "fp8"}, "training.precision = fp8"),
        ({"training__grad_dtype": "fp16"}, "training.grad_dtype = fp16"),
        ({"training__precision": "tf32", "cluster__gpu": "cpu"}, "training.precision = tf32: needs an NVIDIA GPU"),
        ({"training__schedule": {"name": "wsd"}}, "training.schedule.name = wsd"),
        ({"layout__offload": "optimizer"}, "layout.offload = optimizer"),
        ({"guard__spike": {"action": "rollback"}}, "guard.spike.action = rollback"),
        ({"checkpoint__dir": "/scratch"}, "checkpoint.dir"),
        ({"planner__framework": "megatron"}, "planner.framework = megatron"),
        ({"cluster__scheduler": "kubernetes"}, "cluster.scheduler = kubernetes"),
    ],
)
def test_what_the_engine_cannot_run_is_planned_but_not_submitted(overrides: dict[str, Any], expected: str) -> None:
    dims = {"hidden_size": 512, "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 8}
    small = {f"model__{key}": value for key, value in dims.items()} | {"model__head_dim": 64}
    spec = spec_of("llama-7b", **(small | overrides))
    reasons = submittable(spec, make_plan(spec))
    assert len(reasons) == 1
    assert expected in reasons[0]
    assert "Use " in reasons[0]


def test_a_plain_run_may_be_submitted() -> None:
    spec = spec_of("llama-7b", cluster__nodes=4)
    assert submittable(spec, make_plan(spec)) == []


def test_the_search_stays_within_the_declaration_unless_it_is_asked_for_more() -> None:
    assert capabilities(spec_of()) is ENGINE
    assert capabilities(spec_of(planner__search="everything")).axes == set(AXES)


def test_other_frameworks_are_offered_the_axes_that_they_have() -> None:
    missing = {"fsdp": set(), "megatron": {"sequence_parallel"}, "nanotron": {"sequence_parallel", "virtual_pipeline"}}
    for framework, axes in missing.items():
        assert capabilities(spec_of(planner__framework=framework)).axes == set(AXES) - axes
    spec = spec_of("llama-70b", cluster__nodes=4, planner__framework="megatron", planner__search="everything")
    plan = make_plan(spec)
    assert plan.layout.sequence_parallel == 1
    assert "sequence_parallel above 1: megatron cannot run it" in {row.reason for row in plan.rejected}


def test_a_search_of_everything_opens_the_axes_that_the_spec_does_not_speak_of() -> None:
    layout = opened(spec_of(planner__search="everything")).layout
    assert (layout.virtual_pipeline, layout.context_parallel) == ("auto", "auto")
    pinned = spec_of(planner__search="everything", layout__virtual_pipeline=1, layout__context_parallel=1)
    assert opened(pinned).layout.virtual_pipeline == opened(pinned).layout.context_parallel == 1
    assert opened(spec_of()).layout.virtual_pipeline == 1


def test_what_the_engine_declares_may_be_proposed_and_submitted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next engine only changes the declaration."""
    wider = replace(ENGINE, axes=frozenset({"tensor_parallel", "pipeline_parallel"}), offload=("none", "optimizer"))
    monkeypatch.setattr(engine_support, "ENGINE", wider)
    spec = spec_of("llama-7b", layout__tensor_parallel=2, layout__offload="optimizer")
    assert submittable(spec, make_plan(spec)) == []
    spec = spec_of("llama-70b", cluster__nodes=4, layout__offload="auto")
    plan = make_plan(spec)
    assert submittable(spec, plan) == []
    assert not any("tensor_parallel above 1" in row.reason for row in plan.rejected)
    assert any("expert_parallel" in row.reason or "sequence_parallel above 1" in row.reason for row in plan.rejected)
