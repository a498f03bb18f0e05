"""Checks of the recipe: batch, learning rate, warm-up, data, precision and dimensions, against published recipes."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from scaletrain_cli.plan import make_plan
from scaletrain_cli.plan.advice.recipe_checks import (
    check_fine_tuning,
    check_learning_rate,
    check_rate,
    check_recipe,
    critical_batch_tokens,
    published_recipe,
    scaled_lr,
    starting_preset,
)
from scaletrain_cli.plan.catalogue.hardware import find_accelerator
from scaletrain_cli.plan.result import Sanity
from scaletrain_cli.plan.workloads.registry import workload_of
from scaletrain_cli.spec import parse_spec
from scaletrain_cli.spec.presets import presets, vision_presets
from scaletrain_cli.spec.starting_spec import starting_spec
from tests.plan.specs import ONE_LAYOUT, spec_of

LLAMA = {"training__global_batch_size": 1024, "cluster__nodes": 4}  # 4 M tokens, as the authors


def checks_of(preset: str = "llama-7b", **overrides: Any) -> dict[str, Sanity]:
    return {row.topic: row for row in make_plan(spec_of(preset, **{**ONE_LAYOUT, **LLAMA, **overrides})).sanity}


def optimizer(lr: float, name: str = "adamw") -> dict[str, Any]:
    return {"training__optimizer": {"name": name, "lr": lr}}


def test_every_recipe_belongs_to_a_preset_and_has_a_source() -> None:
    named = [name for name in presets() | vision_presets() if published_recipe(name)]
    assert {"gpt3-175b", "llama-7b", "llama-405b", "resnet-50", "clip-vit-base-patch32"} <= set(named)
    for name in named:
        recipe = published_recipe(name)
        assert "arXiv:" in recipe.source
        assert 1e-5 < recipe.lr <= 0.1
        assert 256 <= recipe.batch < 1e8
    assert published_recipe(None) is published_recipe("unheard-of") is None


def test_adam_scales_by_the_square_root_and_sgd_linearly() -> None:
    llama, resnet = published_recipe("llama-7b"), published_recipe("resnet-50")
    assert scaled_lr(llama, 4 * llama.batch, linear=False) == pytest.approx(2 * 3e-4)
    assert scaled_lr(resnet, 8192, linear=True) == pytest.approx(3.2)  # Goyal et al., section 5.1
    assert scaled_lr(resnet, 8192, linear=False) is None


@pytest.mark.parametrize("nodes", [1, 12])
def test_the_spec_that_init_writes_for_a_preset_has_no_recipe_that_its_plan_criticizes(nodes: int) -> None:
    layout = make_plan(spec_of("gpt2", **ONE_LAYOUT)).layout
    of_published_dimensions = {"matrix dimensions", "router balance loss"}
    found = {}
    for name in presets():
        text = starting_spec(
            preset=starting_preset(name), gpu="h100-sxm-80gb", scheduler="slurm", nodes=nodes, gpus_per_node=8
        )
        spec = parse_spec(text, file="run.yaml", base_dir=Path())
        size = workload_of(spec.model).training_size(spec)
        checks = check_recipe(spec, layout, size, find_accelerator(spec.cluster))
        found |= {
            (name, row.topic): str(row.message)
            for row in checks
            if row.verdict != "ok" and row.topic not in of_published_dimensions
        }
        assert {row.topic for row in checks} > {"learning rate", "critical batch size", "warm-up"}
    assert not found


def test_the_spec_that_init_writes_for_a_preset_names_its_source_and_no_data() -> None:
    text = starting_spec(preset=starting_preset("llama-3-70b"), nodes=32, gpus_per_node=8)
    assert "arXiv:2407.21783" in text
    spec = parse_spec(text, file="run.yaml", base_dir=Path())
    assert spec.training.optimizer.lr == 1.5e-4
    assert spec.training.global_batch_size * 8192 == 4_194_304
    assert spec.data.source == "/path/to/your/corpus"


def test_the_published_learning_rate_is_ok() -> None:
    row = checks_of(**optimizer(3e-4))["learning rate"]
    assert (row.verdict, row.value) == ("ok", "0.0003")
    assert "arXiv:2307.09288" in str(row.message)


def test_a_learning_rate_for_another_batch_is_scaled_and_compared() -> None:
    small = checks_of(training__global_batch_size=64, **optimizer(3e-4))["learning rate"]
    assert small.verdict == "note"
    assert "the recipe scales to 7.5e-05: with the square root of a batch 0.0625 times as large" in str(small.message)
    assert checks_of(**optimizer(3e-3))["learning rate"].verdict == "warning"
    assert checks_of(**optimizer(1e-5))["learning rate"].verdict == "note"


def test_another_optimizer_is_not_compared() -> None:
    row = checks_of(**optimizer(0.1, "momentum"))["learning rate"]
    assert row.verdict == "note"
    assert "the recipe uses adamw" in str(row.message)


def test_without_a_published_recipe_the_scaling_rule_is_named() -> None:
    assert "square root of k (arXiv:2205.10287)" in str(checks_of("qwen2.5-7b")["learning rate"].message)
    assert "which is shown for k up to 32 (arXiv:1706.02677)" in str(
        checks_of("qwen2.5-7b", **optimizer(0.1, "sgd"))["learning rate"].message
    )


def test_linear_scaling_is_trusted_up_to_thirty_two_fold() -> None:
    """Goyal et al. show a batch of 8,192 beside one of 256."""
    recipe = published_recipe("resnet-50")

    def row(times: int) -> Sanity:
        rate = {"training__optimizer": {"name": "momentum", "lr": recipe.lr * times}}
        spec = spec_of("resnet-50", training__global_batch_size=recipe.batch * times, cluster__nodes=8, **rate)
        return next(row for row in make_plan(spec).sanity if row.topic == "learning rate")

    assert row(32).verdict == "ok"
    assert row(64).verdict == "warning"
    assert "shown up to a batch 32 times as large" in str(row(64).message)


def test_a_run_from_given_weights_is_compared_with_fine_tuning(tmp_path: Path) -> None:
    rows = checks_of(model__weights=str(tmp_path), **optimizer(2e-5))
    assert rows["learning rate"].verdict == "ok"
    assert "fine-tuning" in str(rows["learning rate"].message)
    assert checks_of(model__weights=str(tmp_path), **optimizer(3e-4))["learning rate"].verdict == "note"
    assert not {"tokens per parameter", "critical batch size"} & set(rows)


@pytest.mark.parametrize(
    "tuned",
    [{"model__adapter": {"name": "lora"}}, {"training__objective": "dpo", "data__source": "python-docstrings"}],
    ids=["adapter", "dpo"],
)
def test_adapters_and_preference_pairs_get_no_advice_for_pre_training(tuned: dict[str, Any]) -> None:
    rows = checks_of(**tuned, **optimizer(2e-4))
    assert not {"tokens per parameter", "critical batch size", "learning rate"} & set(rows)


def test_a_validation_set_that_takes_billions_of_tokens_is_noted() -> None:
    steps = {"training__steps": 100_000}
    row = checks_of(**steps)["validation split"]
    assert row.verdict == "note"
    assert "22.1 B tokens" in str(row.message)  # 420 B tokens x 0.05 / 0.95
    assert "validation split" not in checks_of(**steps, data__validation_split=0.001)
    assert "validation split" not in checks_of(training__steps=100)


def test_published_batches_of_large_runs_are_near_the_critical_one() -> None:
    """GPT-3: 3.2 M tokens; Llama 2: 4 M; Llama 3 405B: 16 M. All were chosen with the noise scale or by trial."""
    for parameters, tokens, batch in ((175e9, 300e9, 3.2e6), (7e9, 2e12, 4e6), (405e9, 15e12, 16e6)):
        assert 0.1 < batch / critical_batch_tokens(int(parameters), tokens) < 1.5


def test_a_batch_far_above_the_critical_one_is_a_warning() -> None:
    huge = checks_of(training__global_batch_size=2**16, training__steps=1000)["critical batch size"]
    assert huge.verdict == "warning"
    assert checks_of(training__steps=500_000)["critical batch size"].verdict == "ok"


def test_the_effective_batch_is_the_product_of_its_parts() -> None:
    plan = make_plan(spec_of(**LLAMA))
    row = plan.sanity[0]
    assert row.value == "1,024 sequences, 4,194,304 tokens"
    parts = plan.layout.micro_batch_size, plan.layout.gradient_accumulation_steps, plan.layout.data_parallel
    assert math.prod(parts) == 1024
    assert str(row.message) == "micro-batch {} x accumulation {} x {} data-parallel ranks".format(*parts)


@pytest.mark.parametrize(("steps", "verdict"), [(0, "note"), (10, "ok"), (100, "ok"), (200, "note"), (600, "warning")])
def test_warm_up_is_checked_as_a_share_of_the_steps(steps: int, verdict: str) -> None:
    row = checks_of(training__schedule={"warmup_steps": steps})["warm-up"]
    assert row.verdict == verdict
    assert row.value == f"{steps:,} steps, {steps / 10:.2g} %"


def test_tokens_per_parameter_and_total_flops_are_those_of_the_run() -> None:
    rows = checks_of(training__steps=10_000)
    plan = make_plan(spec_of(**LLAMA, training__steps=10_000))
    tokens = 10_000 * 4_194_304
    assert rows["tokens per parameter"].value == f"{tokens / plan.model.active_parameters:.3g}"
    assert float(rows["total FLOPs"].value) == pytest.approx(plan.model.flops_per_token * tokens, rel=0.01)
    assert checks_of(training__steps=100)["tokens per parameter"].verdict == "note"


def test_precision_is_checked_against_the_device() -> None:
    old = checks_of(cluster__gpu="v100-sxm2-32gb", cluster__nodes=8)["precision"]
    assert old.verdict == "warning"
    assert "v100-sxm2-32gb has no bf16 units" in str(old.message)
    half = checks_of(training__precision="fp16")["precision"]
    assert half.verdict == "note"
    assert "loss scaling" in str(half.message)
    assert "has bf16" in str(half.message)
    assert checks_of()["precision"].verdict == "ok"


def test_padded_dimensions_are_named_with_the_next_aligned_vocabulary() -> None:
    assert checks_of("gpt2")["matrix dimensions"].verdict == "ok", "the engine's head pads its rows itself"
    row = checks_of("gpt2", training__cross_entropy="liger")["matrix dimensions"]
    assert row.verdict == "note"
    assert "vocab_size per tensor rank = 50,257" in str(row.message)
    assert "A vocab_size of 50,304 would be a multiple" in str(row.message)
    assert checks_of()["matrix dimensions"].verdict == "ok"


def test_a_cpu_has_no_tensor_cores_to_fill() -> None:
    rows = checks_of("gpt2", cluster__gpu="cpu", cluster__nodes=1, training__global_batch_size=8)
    assert not {"precision", "matrix dimensions"} & rows.keys()


@pytest.mark.parametrize(
    ("rate", "changes", "verdict", "code"),
    [
        (2e-5, {}, "ok", "plan.fine-tuning-rate"),
        (3e-4, {}, "note", "plan.fine-tuning-rate-high"),
        (2e-4, {"model__adapter": {"name": "lora"}}, "ok", "plan.adapter-rate"),
        (1e-5, {"model__adapter": {"name": "lora"}}, "note", "plan.adapter-rate-low"),
        (1e-2, {"model__adapter": {"name": "lora"}}, "note", "plan.adapter-rate-high"),
        (5e-7, {"training__objective": "dpo"}, "ok", "plan.preference-rate"),
        (2e-5, {"training__objective": "dpo"}, "note", "plan.preference-rate-high"),
        (5e-6, {"training__objective": "dpo", "model__adapter": {"name": "lora"}}, "ok", "plan.preference-rate"),
    ],
)
def test_tuning_rates_depend_on_the_objective(rate: float, changes: dict[str, Any], verdict: str, code: str) -> None:
    spec = spec_of("llama-3-8b", model__weights="/weights", training__optimizer={"lr": rate}, **changes)
    (found,) = check_learning_rate(spec)
    assert (found.verdict, found.message.code) == (verdict, code)


def test_adapters_on_attention_alone_get_a_note() -> None:
    adapter = {"name": "lora", "targets": ["q_proj", "v_proj"]}
    spec = spec_of("llama-3-8b", model__adapter=adapter, model__weights="/weights", training__optimizer={"lr": 2e-4})
    row = next(row for row in make_plan(spec).sanity if row.topic == "trained parameters")
    assert row.message.code == "plan.adapter-without-mlp"
    assert row.value.startswith("6,815,744, 0.085 %")


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
def test_epochs_over_known_data_are_compared(tmp_path: Path, objective: str, steps: int, code: str) -> None:
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
def test_the_batch_is_compared_with_published_ones(changes: dict[str, Any], samples: int, code: str) -> None:
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
def test_usual_rates_depend_on_size_method_and_objective(preset: str, changes: dict[str, Any], usual: float) -> None:
    found = checks(preset, **changes, training__optimizer={"lr": usual})["learning rate"]
    assert found.message.params["usual"] == pytest.approx(usual)
    assert found.verdict == "ok"
    assert checks(preset, **changes, training__optimizer={"lr": 100 * usual})["learning rate"].verdict == "note"


def test_the_checks_are_part_of_the_plan() -> None:
    spec = spec_of("llama-3-8b", model__weights="/weights", training__objective="sft", **LORA)
    assert {"fine-tuning batch", "adapter scale", "learning rate"} <= {row.topic for row in make_plan(spec).sanity}
