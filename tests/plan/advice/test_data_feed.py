from typing import Any

import pytest

from scaletrain_cli.plan import RunPlan, make_plan
from scaletrain_cli.plan.advice.data_feed import data_feed
from tests.plan.specs import DATA_ALONE, spec_of

FEED = ("plan.assumes-data-rate", "plan.assumes-remote-data", "plan.assumes-data-thread", "plan.assumes-data-workers")


def planned(**overrides: Any) -> tuple[RunPlan, dict[str, Any]]:
    """Return a plan, and what it assumes about reading by code."""
    plan = make_plan(spec_of(**{"model__seq_len": 4096, "cluster__grace_seconds": 600, **overrides}))
    return plan, {reason.code: reason.params for reason in plan.assumptions if reason.code in FEED}


def test_each_node_reads_the_tokens_of_its_replicas_once() -> None:
    for overrides, replicas in (({}, 8), ({"layout__tensor_parallel": 4, "layout__pipeline_parallel": 1}, 2)):
        plan, found = planned(**{**DATA_ALONE, **overrides})
        rate = found["plan.assumes-data-rate"]
        assert plan.layout.data_parallel == replicas
        of_tokens = 2 * plan.time.tokens_per_second * 4097 / 4096
        assert rate["node"] == pytest.approx(of_tokens)
        assert rate["rank"] == pytest.approx(of_tokens / replicas)
        assert rate["first"] == pytest.approx(plan.time.tokens_per_second / 4096 * 131072)
        assert "plan.assumes-data-thread" in found
        assert "plan.assumes-remote-data" not in found


def test_large_vocabularies_and_weights_of_rows_are_wider() -> None:
    def width(**overrides: Any) -> float:
        plan, found = planned(**DATA_ALONE, **overrides)
        return float(found["plan.assumes-data-rate"]["node"] / plan.time.tokens_per_second * 4096 / 4097)

    assert width(model__vocab_size=70_000) == pytest.approx(4)
    rows = {"data__source": "python-docstrings", "training__objective": "sft"}
    assert width(**rows) == pytest.approx(6)


def test_steps_that_are_shorter_than_their_reads_need_processes_and_warn_of_too_few() -> None:
    spec = spec_of("gpt2", **DATA_ALONE, data__packing="documents", model__seq_len=1024)
    layout = make_plan(spec).layout
    slow, fast = data_feed(spec, layout, 60.0), data_feed(spec, layout, 0.01)
    assert slow.workers == 0
    assert slow.reader_seconds == fast.reader_seconds
    assert fast.workers == -(-fast.reader_seconds // 0.005)
    every = {**DATA_ALONE, "training__global_batch_size": 8192, "data__packing": "documents", "model__seq_len": 128}
    small = {"model__hidden_size": 64, "model__num_attention_heads": 2, "model__num_hidden_layers": 1}
    plan, found = planned(preset="gpt2", **every, **small, model__intermediate_size=64)
    needed = found["plan.assumes-data-workers"]["workers"]
    (warning,) = [reason for reason in plan.warnings if reason.code == "plan.too-few-readers"]
    assert (warning.params["given"], warning.params["needed"]) == (0, needed)
    plan, _ = planned(preset="gpt2", **every, **small, model__intermediate_size=64, data__loader={"workers": needed})
    assert not [reason for reason in plan.warnings if reason.code == "plan.too-few-readers"]


def test_a_remote_store_is_read_in_blocks_through_the_cache() -> None:
    plan, found = planned(**DATA_ALONE, data__source="s3://bucket/tokens")
    assert found["plan.assumes-remote-data"]["first"] == pytest.approx(plan.time.tokens_per_second / 4096 * 2**20)
