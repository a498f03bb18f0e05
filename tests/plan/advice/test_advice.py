from typing import Any

from scaletrain_cli.plan import RunPlan, make_plan
from tests.plan.specs import ONE_LAYOUT, spec_of


def plan_of(preset: str = "llama-7b", **overrides: Any) -> RunPlan:
    return make_plan(spec_of(preset, **{**ONE_LAYOUT, "cluster__nodes": 4, **overrides}))


def text_of(plan: RunPlan) -> str:
    return "\n".join(map(str, plan.assumptions))


def test_a_reasonable_run_has_no_warnings() -> None:
    assert plan_of(cluster__grace_seconds=600).warnings == ()


def test_spot_without_a_rate_says_what_is_assumed() -> None:
    assumed = plan_of(cluster__spot=True, cluster__grace_seconds=600)
    assert any("every 2.4 hours" in str(line) for line in assumed.warnings)
    assert "preemptions: one per 2.4 hours" in text_of(assumed)
    stated = plan_of(cluster__spot=True, cluster__grace_seconds=600, cluster__mean_time_between_interruptions="5h")
    assert stated.warnings == ()
    assert "preemptions: one per" not in text_of(stated)


def test_the_failure_rate_is_that_of_the_generation() -> None:
    assert "50,677 GPU hours, as Llama 3 reports" in text_of(plan_of())
    assert "11,904 GPU hours, as OPT-175B's chronicle reports" in text_of(plan_of(cluster__gpu="a100-sxm-80gb"))
    assert "GPU hours" not in text_of(plan_of(cluster__per_node_mtbf="500h"))


def test_a_large_head_without_a_fused_kernel_is_warned_of() -> None:
    odd = plan_of("gpt2", model__num_attention_heads=2, model__head_dim=384)
    assert any("model.head_dim = 384: fused attention supports" in str(line) for line in odd.warnings)


def test_assumptions_are_those_of_the_framework() -> None:
    ours, theirs = plan_of(), plan_of(planner__framework="nanotron")
    assert "what DeepSpeed 0.19 allocates" in text_of(ours)
    assert "what nanotron allocates" in text_of(theirs)
    assert "for comparison; it cannot be submitted" in text_of(theirs)
    assert "deepspeed" not in text_of(theirs)


def test_units_of_vision_networks_are_images() -> None:
    text = text_of(make_plan(spec_of("resnet-50")))
    assert "per parameter" not in text
    assert "image loader: " in text
    assert "tokens" not in text.replace("tokens_per_second", "")


def test_a_cap_of_scores_is_warned_of_with_its_cost() -> None:
    options = {"cluster__nodes": 4, "model__seq_len": 4096}
    capped = make_plan(spec_of("gemma-2-2b", **options, training__compile=False))
    (found,) = (reason for reason in capped.warnings if reason.code == "plan.capped-attention")
    assert found.params["times"] > 1.2
    assert found.params["bytes"] > 4 * 8 * 4096**2  # the scores of one block and row, in fp32
    plain = make_plan(spec_of("gemma-2-2b", **options, model__attn_logit_softcapping=None))
    assert "plan.capped-attention" not in {reason.code for reason in plain.warnings}
