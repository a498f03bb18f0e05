import json
from pathlib import Path

import pytest

from scaletrain_cli.plan import make_plan, submittable
from scaletrain_cli.plan.search.layout_search import SAME_TIME
from scaletrain_cli.spec import load_spec
from tests.plan.specs import DATA_ALONE, spec_of

RECIPES = sorted((Path(__file__).parents[2] / "recipes").glob("*.yaml"))


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_every_recipe_plans_and_may_be_submitted(recipe: Path) -> None:
    spec = load_spec(recipe)
    plan = make_plan(spec)
    assert plan.memory.fits
    assert submittable(spec, plan) == []
    assert json.loads(json.dumps(plan.to_json(), allow_nan=False))["schema"] == "scaletrain.plan/v1"


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_no_recipe_pins_what_the_planner_would_choose_better(recipe: Path) -> None:
    spec = load_spec(recipe)
    free = spec.model_copy(update={"layout": type(spec.layout)()})
    if spec.layout != free.layout:
        assert make_plan(spec).time.step <= SAME_TIME * make_plan(free).time.step


def test_a_small_model_needs_no_zero() -> None:
    assert make_plan(spec_of("gpt2", training__precision="fp32")).layout.zero_stage == 0


def test_70b_on_64_data_parallel_gpus_needs_zero_3_and_recomputation() -> None:
    layout = make_plan(spec_of("llama-70b", cluster__nodes=8, **DATA_ALONE)).layout
    assert layout.zero_stage == 3
    assert layout.activation_checkpointing != "none"


def test_every_alternative_has_a_reason_and_those_that_fit_come_first() -> None:
    plan = make_plan(spec_of("llama-7b", cluster__nodes=4))
    assert plan.alternatives
    assert all(a.why for a in plan.alternatives)
    fits = [a.fits for a in plan.alternatives]
    assert fits == sorted(fits, reverse=True)
    assert len({(a.layout) for a in plan.alternatives} | {plan.layout}) == len(plan.alternatives) + 1
    assert all(a.why.code == "plan.needs-memory" for a in plan.alternatives if not a.fits)


def test_pinned_settings_are_kept() -> None:
    pinned = {"layout__zero_stage": 3, "layout__activation_checkpointing": "selective", "training__micro_batch_size": 2}
    plan = make_plan(spec_of("llama-7b", cluster__nodes=4, **pinned, **DATA_ALONE))
    layout = plan.layout
    assert (layout.zero_stage, layout.activation_checkpointing, layout.micro_batch_size) == (3, "selective", 2)
    assert plan.alternatives == ()


def test_throughput_and_time_to_train_follow_from_the_step() -> None:
    spec = spec_of("llama-7b", training__steps=1000, cluster__nodes=4)
    time = make_plan(spec).time
    assert time.to_train == pytest.approx(1000 * time.step)
    assert time.tokens_per_second == pytest.approx(256 * 4096 / time.step)
    assert time.tokens_per_second_per_gpu == pytest.approx(time.tokens_per_second / 32)


def test_one_gpu_sends_nothing() -> None:
    plan = make_plan(spec_of("gpt2", cluster__gpus_per_node=1))
    assert plan.network.per_step_bytes.data == 0
    assert plan.time.exposed_communication == 0


def test_missing_units_are_warned_about() -> None:
    old = make_plan(spec_of("gpt2", cluster__gpu="v100-sxm2-32gb"))
    assert any("v100-sxm2-32gb has no bf16 units" in str(line) for line in old.warnings)


def test_attention_with_dropout_stores_its_scores_with_a_warning() -> None:
    plain, dropped = (make_plan(spec_of("gpt2", model__attention_dropout=rate)) for rate in (0.0, 0.1))
    assert dropped.memory.activations / dropped.layout.micro_batch_size > 2 * (
        plain.memory.activations / plain.layout.micro_batch_size
    )
    assert any("model.attention_dropout = 0.1" in str(warning) for warning in dropped.warnings)
