"""The cluster for an objective: what meets the limits, the best of it, and the closest miss where nothing does."""

from __future__ import annotations

import json

import pytest

from scaletrain_cli.errors import ExitCode, UsageError
from scaletrain_cli.plan import make_plan
from scaletrain_cli.plan.search.sizing import Considered, Sizing, SizingError, node_counts, scaling_curve, size_cluster
from scaletrain_cli.spec import RunSpec
from tests.plan.specs import spec_of

DAY = 86400.0


def run(**overrides: object) -> RunSpec:
    """7B on 300B tokens, up to 16 nodes of eight H100 at two dollars an hour."""
    raw = {"training__tokens": "300B", "training__steps": None, "training__global_batch_size": 1024}
    return spec_of("llama-7b", **{"cluster__nodes": 16, "cluster__price_per_gpu_hour": 2.0, **raw, **overrides})


def chosen(sizing: Sizing) -> Considered:
    (row,) = [row for row in sizing.considered if row.chosen]
    return row


def test_the_fewest_gpus_that_keep_a_deadline() -> None:
    sizing = size_cluster(run(), "gpus", deadline_seconds=30 * DAY)
    row = chosen(sizing)
    assert row.seconds is not None
    assert row.seconds <= 30 * DAY
    fewer = [other for other in sizing.considered if other.gpus < row.gpus]
    assert fewer
    assert all(other.why.startswith("takes ") for other in fewer if other.seconds)
    assert sizing.spec.cluster.nodes == row.nodes
    assert make_plan(sizing.spec) == sizing.plan


def test_the_cheapest_and_the_fastest_within_a_budget() -> None:
    cheapest = chosen(size_cluster(run(), "cost"))
    fastest = chosen(size_cluster(run(), "time"))
    assert cheapest.dollars is not None
    assert fastest.dollars is not None
    assert cheapest.dollars <= fastest.dollars
    middle = (cheapest.dollars + fastest.dollars) / 2
    within = chosen(size_cluster(run(), "time", budget_usd=middle))
    assert within.dollars is not None
    assert within.dollars <= middle


def test_days_count_interruptions() -> None:
    sizing = size_cluster(run(cluster__spot=True, cluster__mean_time_between_interruptions="30m"), "time")
    plan, row = sizing.plan, chosen(sizing)
    assert plan.durability.expected_goodput < 0.95
    assert row.seconds == pytest.approx(plan.time.to_train / plan.durability.expected_goodput)


def test_a_deadline_out_of_reach_names_the_closest_miss_and_what_would_do() -> None:
    with pytest.raises(SizingError) as caught:
        size_cluster(run(), "gpus", max_gpus=32, deadline_seconds=5 * DAY)
    error = caught.value
    assert error.exit_code == ExitCode.INFEASIBLE
    assert error.closest is not None
    assert error.closest.gpus == 32
    assert "5.0 days are out of reach with at most 32 GPUs: takes" in error.message
    (would_do,) = [problem for problem in error.problems if problem.where == "would do"]
    gpus = int(str(would_do.given).split()[0])
    assert gpus > 32
    size_cluster(run(), "gpus", max_gpus=gpus, deadline_seconds=5 * DAY)


def test_counts_that_do_not_divide_the_batch_are_listed_with_the_reason() -> None:
    sizing = size_cluster(run(training__global_batch_size=960), "time")
    (row,) = [row for row in sizing.considered if row.gpus == 128]
    assert row.why.startswith("does not divide: training.global_batch_size = 960: must be a multiple of 128")
    assert row.layout is None
    assert {15, 16} <= set(node_counts(run(training__global_batch_size=960), 128))


def test_what_does_not_fit_is_listed_and_a_run_that_never_fits_is_refused() -> None:
    sizing = size_cluster(spec_of("llama-70b", cluster__nodes=8), "gpus")
    assert sizing.considered[0].why.startswith("does not fit: ")
    with pytest.raises(SizingError) as caught:
        size_cluster(spec_of("llama-70b"), "time")
    assert caught.value.closest is None
    assert "would do" in str(caught.value)


def test_gpu_types_are_compared_each_at_its_own_price() -> None:
    names = ("h100-sxm-80gb", "a100-sxm-80gb")
    sizing = size_cluster(run(), "time", max_gpus=32, gpus=names)
    assert {row.gpu for row in sizing.considered} == set(names)
    assert chosen(sizing).gpu == "h100-sxm-80gb"
    per_hour = {
        row.gpu: row.dollars / row.gpus / row.seconds for row in sizing.considered if row.dollars and row.seconds
    }
    assert per_hour["h100-sxm-80gb"] != pytest.approx(per_hour["a100-sxm-80gb"])


def test_questions_without_an_answer_are_usage_errors() -> None:
    for arguments in (
        {"objective": "speed"},
        {"objective": "time", "max_gpus": 4},
        {"objective": "time", "gpus": ["x"]},
    ):
        with pytest.raises(UsageError):
            size_cluster(run(), **arguments)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="price"):
        size_cluster(spec_of("gpt2", cluster__gpu="cpu", cluster__gpus_per_node=2), "cost")


def test_this_machine_has_one_node() -> None:
    assert node_counts(spec_of("gpt2", cluster__scheduler="local"), 64) == [1]


def test_the_answer_is_json_and_the_same_each_time() -> None:
    first, second = (size_cluster(run(), "cost").to_json() for _ in range(2))
    assert json.dumps(first, allow_nan=False) == json.dumps(second)
    assert set(first) == {"objective", "max_gpus", "deadline_seconds", "budget_usd", "considered"}


def test_the_scaling_curve_starts_at_one_and_leaves_out_what_has_no_plan() -> None:
    curve = scaling_curve(run(training__global_batch_size=960), [1, 4, 15, 16])
    assert [point.gpus for point in curve] == [8, 32, 120]
    assert curve[0].efficiency == 1
    assert all(0.5 < point.efficiency < 1.1 for point in curve)
