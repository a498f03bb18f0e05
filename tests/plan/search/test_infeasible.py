"""A run that does not fit is an error with its memory, and with changes that make it fit."""

import pytest
import yaml

from scaletrain_cli.errors import ExitCode
from scaletrain_cli.plan import PlanInfeasibleError, make_plan
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


def test_a_run_that_no_change_makes_fit_says_so() -> None:
    error = refusal(spec_of("llama-7b", model__hidden_size=10**6, model__head_dim=10**6, model__num_attention_heads=1))
    assert "more or larger GPUs do not make it fit" in str(error)


def test_a_batch_that_does_not_divide_has_no_plan_to_show() -> None:
    assert refusal(spec_of("gpt2", training__global_batch_size=100, **DATA_ALONE)).plan is None


@pytest.mark.parametrize(
    ("preset", "vocab", "stages"), [("mistral-7b", 131_072, 4), ("llama-7b", 250_880, 2)], ids=["in steps", "in two"]
)
def test_a_pipeline_that_fits_if_its_blocks_are_divided_by_memory_is_suggested(
    preset: str, vocab: int, stages: int
) -> None:
    sizes = {"cluster__gpu": "a10g-24gb", "model__seq_len": 2048, "model__vocab_size": vocab}
    with pytest.raises(PlanInfeasibleError) as refused:
        make_plan(spec_of(preset, **sizes, training__precision="fp16", layout__pipeline_parallel=stages))
    (found,) = [problem for problem in refused.value.problems if "pipeline_split" in str(problem.given)]
    given = yaml.safe_load(str(found.given))
    assert given["pipeline_parallel"] == stages
    named = {f"layout__{key}": value for key, value in given.items()}
    assert make_plan(spec_of(preset, **sizes, training__precision="fp16", **named)).memory.fits


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
