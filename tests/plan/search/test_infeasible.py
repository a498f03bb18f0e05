"""A run that does not fit is an error with its memory, and with changes that make it fit."""

import pytest
import yaml
from pydantic import TypeAdapter

from scaletrain_cli.errors import ExitCode
from scaletrain_cli.plan import PlanInfeasibleError, make_plan, submittable
from scaletrain_cli.plan.axes import AXES
from scaletrain_cli.plan.result import RunPlan, with_reasons
from scaletrain_cli.plan.stages import blocks_per_stage
from scaletrain_cli.spec import RunSpec
from scaletrain_cli.text import bytes_text
from tests.plan.specs import DATA_ALONE, spec_of


def refusal(spec: RunSpec) -> PlanInfeasibleError:
    with pytest.raises(PlanInfeasibleError) as caught:
        make_plan(spec)
    return caught.value


def ways_out(error: PlanInfeasibleError) -> dict[str, str | None]:
    return {problem.key: problem.given for problem in error.problems if problem.where == "would fit"}


def test_a_model_that_is_too_large_exits_with_3_and_shows_the_plan_it_would_need() -> None:
    error = refusal(spec_of("llama-70b"))
    assert error.exit_code == ExitCode.INFEASIBLE
    assert not error.plan.memory.fits
    assert error.plan.to_json()["memory"]["fits"] is False
    assert bytes_text(error.plan.memory.peak) in str(error)
    for part in ("weights", "gradients", "optimizer states", "framework", "h100-sxm-80gb has 85.0 GB"):
        assert part in str(error)


def test_more_gpus_are_proposed_and_the_proposal_fits() -> None:
    spec = spec_of("llama-70b")
    proposed = ways_out(refusal(spec))["cluster"]
    gpus, _, name = proposed.split(maxsplit=2)
    assert name == "h100-sxm-80gb"
    assert make_plan(spec_of("llama-70b", cluster__nodes=int(gpus) // 8)).memory.fits
    if int(gpus) > 16:
        refusal(spec_of("llama-70b", cluster__nodes=int(gpus) // 16))


def test_a_larger_gpu_is_proposed_and_fits() -> None:
    spec = spec_of("llama-7b", cluster__gpu="l4-24gb", cluster__gpus_per_node=4)
    proposed = ways_out(refusal(spec))["cluster.gpu"]
    assert make_plan(spec_of("llama-7b", cluster__gpu=proposed, cluster__gpus_per_node=4)).memory.fits


def test_the_step_time_on_a_larger_gpu_is_that_of_a_layout_which_the_gpu_runs() -> None:
    """An Instinct GPU has no compiled blocks, which a GeForce has: its step is not that of compiled ones."""
    on = {"cluster__gpu": "rtx-4090-24gb", "training__global_batch_size": 480}
    long = {"model__seq_len": 131_072, "model__max_position_embeddings": 131_072, **on}
    (larger,) = [problem for problem in refusal(spec_of("gemma-2-2b", **long)).problems if problem.key == "cluster.gpu"]
    plan = make_plan(spec_of("gemma-2-2b", **{**long, "cluster__gpu": larger.given}))
    assert not plan.layout.compile
    assert plan.time.step <= larger.reason.params["step"]


@pytest.mark.parametrize(
    ("pinned", "key", "value"),
    [
        ({"training__micro_batch_size": 64, "training__global_batch_size": 1024}, "training.micro_batch_size", "4"),
        ({"layout__zero_stage": 1, "model__preset": "llama-13b"}, "layout.zero_stage", "2"),
        (
            {"layout__activation_checkpointing": "none", "training__micro_batch_size": 4},
            "layout.activation_checkpointing",
            "selective",
        ),
    ],
)
def test_a_pinned_setting_in_the_way_is_named_with_a_remedy(pinned: dict[str, object], key: str, value: str) -> None:
    pinned = {**DATA_ALONE, **pinned}
    error = refusal(spec_of(**pinned))  # type: ignore[arg-type]
    found = [problem.given for problem in error.problems if problem.where == "would fit" and problem.key == key]
    assert found, str(error)
    changed = {**pinned, key.replace(".", "__"): int(found[0]) if str(found[0]).isdigit() else found[0]}
    assert make_plan(spec_of(**changed)).memory.fits  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "pinned",
    [
        # With the layout free it fits on this cluster, so more or larger GPUs are for these settings.
        {"model__preset": "llama-13b", "layout__zero_stage": 1, **DATA_ALONE},
        {"layout__activation_checkpointing": "none", "training__micro_batch_size": 4, **DATA_ALONE},
        # Nothing fits on this cluster, and no number of GPUs makes ZeRO-0 fit, or has 8 data-parallel ranks alone.
        {"model__preset": "llama-70b", "layout__zero_stage": 0, **DATA_ALONE},
        {"model__preset": "llama-70b", "layout__data_parallel": 8, **DATA_ALONE},
    ],
    ids=["zero-1", "no-recomputation", "zero-0", "data parallel"],
)
def test_another_cluster_that_is_named_fits_with_the_settings_of_the_spec_or_those_named_with_it(
    pinned: dict[str, object],
) -> None:
    proposed = [problem for problem in refusal(spec_of(**pinned)).problems if problem.key in ("cluster", "cluster.gpu")]  # type: ignore[arg-type]
    assert proposed
    for problem in proposed:
        name = "cluster__nodes" if problem.key == "cluster" else "cluster__gpu"
        value = int(problem.given.split()[0]) // 8 if problem.key == "cluster" else problem.given
        freed = {key.replace(".", "__"): "auto" for key in problem.reason.params.get("keys", ())}
        assert make_plan(spec_of(**{**pinned, **freed, name: value})).memory.fits  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("pinned", "key", "refused"),
    [
        ({"training__precision": "fp8", "cluster__gpu": "l40s-48gb", "layout__zero_stage": 1}, "layout.zero_stage", 3),
        (
            {
                "training__precision": "fp8",
                "cluster__gpu": "rtx-4090",
                "preset": "llama-3.2-3b",
                "model__seq_len": 49152,
            },
            "cluster.gpu",
            "a100",
        ),
    ],
    ids=["zero-3 with fp8", "fp8 on an A100"],
)
def test_nothing_is_named_that_the_engine_refuses(pinned: dict[str, object], key: str, refused: object) -> None:
    pinned = {"preset": "llama-3-8b", "training__precision": "fp8", **pinned, **DATA_ALONE}
    named = [problem for problem in refusal(spec_of(**pinned)).problems if problem.where == "would fit"]  # type: ignore[arg-type]
    assert not any(problem.key == key and str(problem.given).startswith(str(refused)) for problem in named)
    for problem in named:
        if problem.key not in ("cluster", "layout"):
            value = yaml.safe_load(str(problem.given))
            changed = spec_of(**{**pinned, problem.key.replace(".", "__"): value})  # type: ignore[arg-type]
            assert not submittable(changed, make_plan(changed))


def test_a_run_that_no_change_makes_fit_says_so() -> None:
    error = refusal(spec_of("llama-7b", model__hidden_size=10**6, model__head_dim=10**6, model__num_attention_heads=1))
    assert "more or larger GPUs do not make it fit" in str(error)


def test_a_batch_that_does_not_divide_has_no_plan_to_show() -> None:
    assert refusal(spec_of("gpt2", training__global_batch_size=100, **DATA_ALONE)).plan is None


# BLOOM-7b: the embedding of 250,880 tokens, of which the last stage has a copy, weighs as much as 5.1 of its 30 blocks.
BLOOM_7B = {
    "model__num_hidden_layers": 30,
    "model__intermediate_size": 16384,
    "model__gated_mlp": False,
    "model__position_embedding": "alibi",
    "model__vocab_size": 250_880,
    "model__tie_word_embeddings": True,
    "cluster__gpu": "v100-sxm2-32gb",
    "training__precision": "fp16",
    "layout__pipeline_parallel": 8,
}


@pytest.mark.parametrize(
    "run",
    [
        {"preset": "llama-7b", **BLOOM_7B},
        {
            "preset": "mistral-7b",
            "cluster__gpu": "a10g-24gb",
            "model__seq_len": 2048,
            "model__vocab_size": 131_072,
            "training__precision": "fp16",
            "layout__pipeline_parallel": 4,
        },
    ],
    ids=["bloom-7b", "mistral"],
)
def test_blocks_move_from_a_full_stage_to_others_where_only_that_makes_a_run_fit(run: dict[str, object]) -> None:
    spec = spec_of(**run)  # type: ignore[arg-type]
    by_time = blocks_per_stage(spec.transformer, int(run["layout__pipeline_parallel"]))  # type: ignore[call-overload]
    plan = make_plan(spec)
    split = plan.layout.pipeline_split
    assert plan.memory.fits
    assert sum(split) == sum(by_time)
    assert split != by_time
    assert max(stage.peak for stage in plan.memory.by_stage) == plan.memory.peak
    layouts = (row for row in plan.rejected if not row.text.startswith((*AXES, "zero_stage")))
    assert sum(row.count for row in layouts) == plan.considered - 1
    assert TypeAdapter(RunPlan).validate_python(with_reasons(plan.to_json())).layout == plan.layout, "as ranks read it"
    pinned = make_plan(spec_of(**run, layout__pipeline_split=split))  # type: ignore[arg-type]
    assert (pinned.layout, pinned.memory, pinned.time) == (plan.layout, plan.memory, plan.time)
    error = refusal(spec_of(**run, layout__pipeline_split=by_time))  # type: ignore[arg-type]
    named = yaml.safe_load(str(ways_out(error)["layout.pipeline_split"]))
    assert tuple(named) == split


def test_a_pipeline_that_fits_divided_by_time_has_no_other_split() -> None:
    assert make_plan(spec_of(**{**BLOOM_7B, "cluster__gpu": "h100-sxm-80gb"})).layout.pipeline_split == ()
    assert "layout.pipeline_split" not in ways_out(refusal(spec_of(**{**BLOOM_7B, "cluster__gpu": "v100-sxm2-16gb"})))


def test_context_ranks_are_suggested_for_long_sequences() -> None:
    """Long sequences of few heads fit when keys and values travel round the ranks."""
    spec = spec_of("llama-7b", model__seq_len=262144, model__max_position_embeddings=262144, **DATA_ALONE)
    error = refusal(spec)
    found = {problem.key: problem for problem in error.problems if problem.where == "would fit"}
    assert "layout.context_parallel" in found, str(error)
    degree = int(str(found["layout.context_parallel"].given))

    def cut_over(ranks: int) -> RunSpec:
        return spec.model_copy(update={"layout": spec.layout.model_copy(update={"context_parallel": ranks})})

    assert make_plan(cut_over(degree)).memory.fits
    refusal(cut_over(degree // 2))


def test_offload_is_suggested_if_the_spec_allows_it() -> None:
    for search in ("engine", "everything"):
        error = refusal(spec_of("llama-70b", planner__search=search))
        found = [(problem.key, problem.given) for problem in error.problems if problem.where == "would fit"]
        assert ("layout.offload", "optimizer") in found


def test_activation_offload_is_suggested_too() -> None:
    pinned = {"training__micro_batch_size": 4, "layout__activation_checkpointing": "full", "layout__zero_stage": 3}
    long = {"model__seq_len": 49152, "model__max_position_embeddings": 49152, "training__cross_entropy": "chunked"}
    error = refusal(spec_of("llama-7b", **pinned, **long, **DATA_ALONE))
    assert ways_out(error).get("layout.activation_offload") == "True", str(error)
    (cure,) = [problem for problem in error.problems if problem.key == "layout.activation_offload"]
    assert " s per step" in cure.message


@pytest.mark.parametrize("size", [2, 16])
def test_a_smaller_micro_batch_is_named_with_the_blocks_of_each_stage_that_it_needs(size: int) -> None:
    error = refusal(spec_of(**BLOOM_7B, training__micro_batch_size=size))
    assert ways_out(error)["training.micro_batch_size"] == "1"
    assert "blocks [3, 4" in str(error)
