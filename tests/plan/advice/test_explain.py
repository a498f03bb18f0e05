"""The explanation agrees with the plan, and its questions are in the order in which a person decides."""

from __future__ import annotations

import json
from typing import Any

import pytest

from scaletrain_cli.plan import PlanInfeasibleError, RunPlan, make_plan
from scaletrain_cli.plan.advice.explain import explain
from scaletrain_cli.plan.advice.explanation import Question
from scaletrain_cli.spec import RunSpec
from tests.plan.specs import spec_of

BIG: dict[str, Any] = {
    "cluster__nodes": 64,
    "training__global_batch_size": 1024,
    "layout__tensor_parallel": 8,
    "layout__pipeline_parallel": 8,
    "planner__framework": "megatron",
}
ORDER = ["states", "one_rank", "sharding", "tensor", "pipeline", "axes", "recomputation", "compile", "micro_batch"]
ORDER += ["bubble", "communication", "winner"]


def explained(spec: RunSpec) -> tuple[RunPlan, dict[str, Question]]:
    try:
        plan: RunPlan | None = make_plan(spec)
    except PlanInfeasibleError as error:
        plan = error.plan
    assert plan is not None
    questions = explain(spec, plan)
    json.dumps([question.to_json() for question in questions], allow_nan=False)
    keys = [question.key for question in questions]
    assert keys == sorted(set(keys), key=ORDER.index)
    for question in questions:
        assert question.verdict_text.endswith(".")
        for row in question.rows:
            if row.fits is not None and row.bytes is not None:
                assert row.fits == (row.bytes <= plan.memory.capacity)
    return plan, {question.key: question for question in questions}


def test_a_run_that_fits_on_one_gpu_needs_only_data_parallelism() -> None:
    _, questions = explained(spec_of("gpt2"))
    assert questions["one_rank"].answer is True
    assert "Data parallelism over 8 ranks is enough" in questions["one_rank"].follows_text
    assert not {"tensor", "pipeline", "axes", "bubble"} & questions.keys()


def test_a_7b_model_costs_18_bytes_per_parameter_and_is_sharded() -> None:
    plan, questions = explained(spec_of("llama-7b"))
    together = questions["states"].rows[-1]
    assert together.bytes == 18 * plan.model.parameters
    assert questions["one_rank"].answer is False
    assert questions["sharding"].answer is True


def test_a_model_whose_layers_must_be_split_gets_every_question() -> None:
    plan, questions = explained(spec_of("llama-405b", **BIG))
    assert questions["sharding"].answer is False
    assert {"tensor", "pipeline", "axes", "bubble"} <= questions.keys()
    ideal, real = questions["bubble"].rows
    micro_batches = plan.layout.gradient_accumulation_steps * plan.layout.virtual_pipeline
    assert ideal.share == pytest.approx((plan.layout.pipeline_parallel - 1) / micro_batches)
    assert real.seconds == plan.time.bubble


def test_every_table_of_variants_has_the_chosen_layout() -> None:
    plan, questions = explained(spec_of("llama-7b", cluster__nodes=4))
    for key in ("micro_batch", "recomputation", "winner"):
        chosen = [row for row in questions[key].rows if row.note and row.note.code == "plan.chosen"]
        assert [(row.bytes, row.seconds) for row in chosen] == [(plan.memory.peak, plan.time.step)]
    others = questions["winner"].rows[1:]
    assert [row.bytes for row in others] == [other.peak_bytes for other in plan.alternatives[:3]]


def test_the_explanation_of_a_run_that_does_not_fit_has_no_speed_questions() -> None:
    plan, questions = explained(spec_of("llama-70b"))
    assert not plan.memory.fits
    assert questions["sharding"].answer is False
    assert not {"winner", "communication"} & questions.keys()


def test_a_batch_with_fewer_sequences_than_ranks_is_named_as_the_reason() -> None:
    spec = spec_of("llama-405b", **{**BIG, "training__global_batch_size": 64})
    _, questions = explained(spec)
    assert "64 sequences does not divide over 512" in questions["sharding"].verdict_text


@pytest.mark.parametrize(
    "spec",
    [
        spec_of("gpt2", cluster__gpu="cpu", cluster__gpus_per_node=1),
        spec_of("mixtral-8x7b", cluster__nodes=8, layout__expert_parallel=8),
        spec_of("llama-7b", training__precision="fp32", cluster__nodes=2),
        spec_of("llama-7b", planner__framework="fsdp"),
        spec_of("llama-7b", layout__sequence_parallel=4, cluster__nodes=2),
        spec_of("resnet-50"),
    ],
    ids=["one process", "experts", "fp32", "fsdp", "sequence", "vision"],
)
def test_every_kind_of_run_can_be_explained(spec: RunSpec) -> None:
    _, questions = explained(spec)
    assert "states" in questions
