import json
from typing import Any

import pytest

from scaletrain_cli.plan import PlanInfeasibleError, RunPlan, make_plan
from scaletrain_cli.plan.advice.explain import explain
from scaletrain_cli.plan.advice.explanation import Question
from scaletrain_cli.spec import RunSpec
from tests.plan.specs import spec_of

BIG: dict[str, Any] = {"cluster__nodes": 64, "training__global_batch_size": 1024, "planner__framework": "megatron"}
BIG |= {"layout__tensor_parallel": 8, "layout__pipeline_parallel": 8}
ORDER = "training reference states one_rank sharding tensor pipeline axes recomputation compile micro_batch".split()
ORDER += "bubble communication winner loader".split()


def explained(spec: RunSpec) -> tuple[RunPlan, dict[str, Question]]:
    try:
        plan: RunPlan | None = make_plan(spec)
    except PlanInfeasibleError as error:
        plan = error.plan
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


def test_a_pipeline_with_moved_blocks_is_explained_beside_others_that_are_divided_by_time() -> None:
    split = {"layout__pipeline_parallel": 8, "layout__pipeline_split": [3, 4, 4, 4, 4, 4, 5, 4], "cluster__nodes": 8}
    plan, questions = explained(spec_of("llama-7b", **split))
    rows = {row.name: row.bytes for row in questions["pipeline"].rows}
    assert rows.keys() >= {"pipeline 4", "pipeline 8"}
    assert plan.layout.pipeline_split == tuple(split["layout__pipeline_split"])


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


def test_a_layout_takes_as_long_in_an_explanation_as_planned_alone() -> None:
    sizes = {"cluster__nodes": 16, "training__global_batch_size": 1024}
    _, questions = explained(spec_of("llama-70b", **sizes))
    alone = make_plan(spec_of("llama-70b", **sizes, layout__zero_stage=3, layout__activation_checkpointing="full"))
    (found,) = [row for row in questions["sharding"].rows if row.name.startswith("ZeRO-3, recompute full")]
    assert alone.layout.micro_batch_size > 1
    assert found.seconds == pytest.approx(alone.time.step, rel=0.02)


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


def fine_tuned(**changes: Any) -> RunSpec:
    return spec_of("llama-3-8b", model__weights="/weights", model__seq_len=2048, **changes)


def test_an_adapter_is_explained_with_its_bytes_and_those_of_the_base() -> None:
    plan, questions = explained(fine_tuned(model__adapter={"name": "lora", "rank": 16}))
    found = questions["training"]
    sizes = {row.name: row.bytes for row in found.rows}
    assert sizes["adapter"] == 4 * 41_943_040
    assert sizes["frozen weights"] == pytest.approx(2 * 8_030_261_248, rel=0.001)
    assert sizes["optimizer states"] == plan.memory.optimizer_states
    assert "41.9 M of 8.03 B parameters (0.5 %)." in found.verdict_text
    assert "goes through all blocks." in found.verdict_text
    assert "training" not in explained(fine_tuned())[1]


def test_groups_and_stages_are_explained_with_their_rates_and_steps() -> None:
    head = {"match": ["lm_head*"], "lr": 1e-4, "end_step": 250}
    top = {"match": ["model.layers.30.*", "model.layers.31.*"], "lr": 1e-5, "start_step": 251}
    plan, questions = explained(fine_tuned(training__trainable=[head, top], training__optimizer={"lr": 2e-5}))
    found = questions["training"]
    notes = {row.name: str(row.note) for row in found.rows if row.note}
    assert notes["lr 0.0001, decay 0.1"] == "525 M parameters, steps 1 to 250"
    assert notes["lr 1e-05, decay 0.1"] == "436 M parameters, steps 251 to 1000"
    assert notes["steps 251 to 1000"] == "436 M parameters train"
    seconds = {row.name: row.seconds for row in found.rows}
    assert seconds["steps 1 to 250"] == plan.training_stages[0].step_seconds
    assert plan.training_stages[1].peak > plan.training_stages[0].peak
    assert "ends in block 30 of 0 to 31" in found.verdict_text


def test_the_reference_pass_is_explained_as_a_share_of_the_run() -> None:
    plan, questions = explained(fine_tuned(training__objective="dpo"))
    rows = {row.name: row.seconds for row in questions["reference"].rows}
    assert rows["reference pass"] == plan.time.reference > 0
    assert sum(rows.values()) == pytest.approx(plan.time.to_train)
