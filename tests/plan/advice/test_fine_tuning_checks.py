"""Checks of the recipe of fine-tuning: notes where it is far from published runs, never errors."""

import json
from pathlib import Path
from typing import Any

import pytest

from scaletrain_cli.plan import make_plan
from scaletrain_cli.plan.advice.fine_tuning_checks import check_fine_tuning, check_rate
from scaletrain_cli.plan.result import Sanity
from scaletrain_cli.plan.workloads.registry import workload_of
from tests.plan.specs import spec_of

LORA = {"model__adapter": {"name": "lora", "rank": 16, "alpha": 32}}


def checks(preset: str = "llama-3-8b", **changes: Any) -> dict[str, Sanity]:
    made = {"model__weights": "/weights", "training__objective": "sft", "training__global_batch_size": 128, **changes}
    spec = spec_of(preset, **made)
    rows = [*check_fine_tuning(spec, workload_of(spec.model).training_size(spec)), check_rate(spec)]
    assert {row.verdict for row in rows} <= {"ok", "note"}
    return {row.topic: row for row in rows}


def prepared(folder: Path, rows: int, tokens: int, **info: Any) -> dict[str, Any]:
    document = {"train_rows": rows, "validation_rows": 10, "train_tokens": tokens, "validation_tokens": 100, **info}
    (folder / "dataset.json").write_text(json.dumps(document))
    return {"data__source": str(folder)}


@pytest.mark.parametrize(
    ("objective", "steps", "code"),
    [
        ("sft", 30, "plan.usual-epochs"),
        ("sft", 80, "plan.epochs-many"),
        ("sft", 4, "plan.part-of-the-data"),
        ("dpo", 20, "plan.preference-epochs"),
        ("dpo", 5, "plan.preference-epochs"),
        ("dpo", 40, "plan.preference-epochs-many"),
    ],
)
def test_epochs_over_known_data_are_compared_with_published_ones(
    tmp_path: Path, objective: str, steps: int, code: str
) -> None:
    rows = {"sft": 1280, "dpo": 2 * 1280}[objective]  # a pair has two rows
    found = checks(**prepared(tmp_path, rows, 10**6), training__objective=objective, training__steps=steps)["epochs"]
    assert found.value == f"{steps / 10:.2g} over 1,280 {'pairs' if objective == 'dpo' else 'sequences'}"
    assert (found.message.code, found.verdict) == (code, "note" if "many" in code else "ok")


def test_epochs_over_text_are_checked_from_random_weights_too(tmp_path: Path) -> None:
    data = prepared(tmp_path, 0, 1000 * 8192 + 1)
    changes = {"model__weights": None, "training__objective": "causal_lm", **data}
    assert checks(**changes, training__steps=30)["epochs"].message.code == "plan.repeated-text"
    many = checks(**changes, training__steps=80)
    assert many["epochs"].value == "10 over 1,000 sequences"
    assert many["epochs"].message.code == "plan.repeated-text-many"
    assert set(many) == {"epochs", "learning rate"}


def test_epochs_over_unknown_data_are_not_guessed() -> None:
    assert "epochs" not in checks(data__source="/nowhere/rows.jsonl")


@pytest.mark.parametrize(
    ("changes", "samples", "code"),
    [
        ({}, 128, "plan.fine-tuning-batch"),
        ({}, 2048, "plan.fine-tuning-batch-large"),
        ({}, 4, "plan.fine-tuning-batch-small"),
        ({"data__packing": "best_fit"}, 4, "plan.fine-tuning-batch"),
        (LORA, 4, "plan.adapter-batch"),
        (LORA, 256, "plan.adapter-batch-large"),
        ({**LORA, "training__objective": "dpo"}, 256, "plan.preference-batch"),
        ({"training__objective": "dpo"}, 2048, "plan.preference-batch-large"),
        ({"training__objective": "dpo"}, 4, "plan.preference-batch-small"),
    ],
)
def test_the_batch_is_compared_with_published_ones_of_the_method(
    changes: dict[str, Any], samples: int, code: str
) -> None:
    found = checks(**changes, training__global_batch_size=samples)["fine-tuning batch"]
    assert (found.message.code, found.verdict) == (code, "note" if code.endswith(("large", "small")) else "ok")


def test_weight_decay_above_the_published_ones_gets_a_note() -> None:
    assert "weight decay" not in checks(training__optimizer={"weight_decay": 0.1})
    assert (
        checks(training__optimizer={"weight_decay": 0.3})["weight decay"].message.code == "plan.fine-tuning-decay-high"
    )


@pytest.mark.parametrize(
    ("rank", "alpha", "verdict"), [(64, 16, "ok"), (8, 16, "ok"), (256, 16, "ok"), (4, 128, "note"), (256, 1, "note")]
)
def test_published_scales_of_adapters_are_usual(rank: int, alpha: float, verdict: str) -> None:
    adapter = {"name": "lora", "rank": rank, "alpha": alpha}
    assert checks(model__adapter=adapter)["adapter scale"].verdict == verdict
    assert "adapter scale" not in checks(model__adapter={**adapter, "rslora": True})


def test_an_adapter_is_compared_with_the_tokens_of_the_data(tmp_path: Path) -> None:
    few = checks(**LORA, **prepared(tmp_path, 1000, 50_000_000))["adapter rank"]
    assert few.verdict == "ok"
    (tmp_path / "more").mkdir()
    many = checks(**LORA, **prepared(tmp_path / "more", 1000, 600_000_000))["adapter rank"]  # 42 M parameters
    assert many.verdict == "note"
    assert many.message.params["enough"] == 128  # 16 x 600 / 84, to the next power of two
    (tmp_path / "most").mkdir()
    data = prepared(tmp_path / "most", 1000, 600_000_000_000)
    for rank, code in ((128, "plan.adapter-rank-low"), (256, "plan.adapter-rank-highest")):
        high = checks(model__adapter={"name": "lora", "rank": rank, "alpha": 32}, **data)["adapter rank"]
        assert (high.verdict, high.message.code) == ("note", code)


@pytest.mark.parametrize(
    ("preset", "changes", "usual"),
    [
        ("llama-3-8b", {}, 2e-5),
        ("llama-3-70b", {}, 2e-6),
        ("llama-3-8b", {"training__objective": "dpo"}, 5e-7),
        ("llama-3-70b", {"training__objective": "dpo"}, 2e-7),
        ("llama-3-8b", LORA, 2e-4),
        ("llama-3-70b", LORA, 1e-4),
        ("llama-3-70b", {**LORA, "training__objective": "dpo"}, 2e-6),
    ],
)
def test_the_usual_learning_rate_depends_on_size_method_and_objective(
    preset: str, changes: dict[str, Any], usual: float
) -> None:
    found = checks(preset, **changes, training__optimizer={"lr": usual})["learning rate"]
    assert found.message.params["usual"] == pytest.approx(usual)
    assert found.verdict == "ok"
    assert checks(preset, **changes, training__optimizer={"lr": 100 * usual})["learning rate"].verdict == "note"


def test_the_checks_are_part_of_the_plan() -> None:
    spec = spec_of("llama-3-8b", model__weights="/weights", training__objective="sft", **LORA)
    assert {"fine-tuning batch", "adapter scale", "learning rate"} <= {row.topic for row in make_plan(spec).sanity}
