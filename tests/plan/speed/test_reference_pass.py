import json
from pathlib import Path
from typing import Any

import pytest

from scaletrain_cli.plan import make_plan
from scaletrain_cli.plan.result import RunPlan, Time
from tests.plan.specs import DATA_ALONE, spec_of

PINNED: dict[str, Any] = {
    **DATA_ALONE,
    **{"model__seq_len": 2048, "model__weights": "/weights", "layout__zero_stage": 2},
    **{"layout__activation_checkpointing": "none", "training__compile": False, "training__global_batch_size": 64},
    **{"training__micro_batch_size": 1, "training__objective": "dpo", "training__cross_entropy": "whole"},
}


def planned(**changes: Any) -> RunPlan:
    return make_plan(spec_of("llama-3-8b", **{**PINNED, **changes}))


def test_the_reference_takes_the_forward_passes_of_one_epoch() -> None:
    plan = planned(training__steps=900, data__validation_split=0.1)
    time = plan.time
    assert time.reference_pairs == 64 * 1000  # 900 steps are nine tenths of the pairs
    assert time.reference == pytest.approx(1000 * 8 * time.by_stage[0].forward)  # 8 micro-batches per rank and batch
    assert time.reference / 1000 == pytest.approx(time.compute / 3, rel=0.05)  # forward is a third of the FLOPs
    assert time.to_train == pytest.approx(900 * time.step + time.reference)
    assert plan.cost.on_demand_usd == pytest.approx(plan.cost.price_per_gpu_hour * 8 * time.to_train / 3600)
    assert planned(training__objective="sft").time.reference == 0


def test_a_pipeline_is_filled_once_per_batch_of_the_reference() -> None:
    changes = {"layout__pipeline_parallel": 4, "layout__zero_stage": 1, "training__steps": 100}
    time = planned(**changes, data__validation_split=0.0).time
    slowest = max(stage.forward for stage in time.by_stage)
    assert time.reference == pytest.approx(100 * (32 + 3) * slowest)


def test_pairs_are_counted_where_the_data_are_readable(tmp_path: Path) -> None:
    rows = tmp_path / "pairs.jsonl"
    pair = {"prompt": "why", "chosen": "because", "rejected": "no"}
    rows.write_text("".join(json.dumps(pair) + "\n" for _ in range(5000)))
    found = planned(data__source=str(rows))
    assert found.time.reference_pairs == pytest.approx(5000, rel=0.001)
    twice = [{"name": name, "path": str(rows), "weight": 1} for name in ("a", "b")]
    tokenizer = {"kind": "file", "path": "tokenizer.json"}
    mixed = planned(data__source=None, data__sources=twice, data__tokenizer=tokenizer)
    assert mixed.time.reference_pairs == pytest.approx(10000, rel=0.001)
    assert "plan.assumes-estimated-pairs" in {each.code for each in found.assumptions}
    (tmp_path / "prepared").mkdir()
    info = {"train_rows": 240, "validation_rows": 20, "train_tokens": 9000, "validation_tokens": 700}
    (tmp_path / "prepared/dataset.json").write_text(json.dumps(info))
    found = planned(data__source=str(tmp_path / "prepared"))
    assert found.time.reference_pairs == 130
    assert "plan.assumes-counted-pairs" in {each.code for each in found.assumptions}


def test_chunked_log_probabilities_compute_the_logits_twice() -> None:
    def time(objective: str, loss: str) -> Time:
        rows = {"training__micro_batch_size": 2 if objective == "sft" else 1, "model__seq_len": 1024}
        return planned(training__objective=objective, training__cross_entropy=loss, **rows).time

    def added(objective: str) -> float:
        """Return the seconds per micro-batch of 2048 tokens that chunks add."""
        steps = 4 if objective == "sft" else 8
        return (time(objective, "chunked").compute - time(objective, "whole").compute) / steps

    logits = 2 * 128_256 * 4096 * 2048 / 989e12  # seconds at the peak of the device
    assert logits < added("dpo") - added("sft") < 3 * logits
    assert time("dpo", "chunked").hfu > time("dpo", "chunked").mfu
    assert time("sft", "chunked").hfu == time("sft", "chunked").mfu
