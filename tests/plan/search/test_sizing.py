import json
from typing import Any

import pytest

from scaletrain_cli.errors import ExitCode, UsageError
from scaletrain_cli.plan import make_plan
from scaletrain_cli.plan.search.cluster_limits import ClusterLimits, Considered, Limits, parse_limits
from scaletrain_cli.plan.search.cluster_search import Clusters, node_counts
from scaletrain_cli.plan.search.sizing import Sizing, SizingError, scaling_curve, size_cluster
from scaletrain_cli.spec import RunSpec
from scaletrain_cli.spec.cluster import MOST_NODES
from scaletrain_cli.text import dollars_text
from tests.plan.specs import DATA_ALONE, spec_of

DAY = 86400.0


def run(**overrides: object) -> RunSpec:
    """7B on 300B tokens, up to 16 nodes of eight H100 at two dollars an hour; data parallelism alone, to be quick."""
    raw = DATA_ALONE | {"training__tokens": "300B", "training__steps": None, "training__global_batch_size": 1024}
    return spec_of("llama-7b", **{"cluster__nodes": 16, "cluster__price_per_gpu_hour": 2.0, **raw, **overrides})


def chosen(sizing: Sizing) -> Considered:
    (row,) = [row for row in sizing.considered if row.chosen]
    return row


def test_the_fewest_gpus_that_keep_a_deadline() -> None:
    sizing = size_cluster(run(), "gpus", deadline_seconds=30 * DAY)
    row = chosen(sizing)
    assert row.seconds <= 30 * DAY
    fewer = [other for other in sizing.considered if other.gpus < row.gpus]
    assert fewer
    assert all(other.why and other.why.code == "plan.too-late" for other in fewer if other.seconds)
    assert sizing.spec.cluster.nodes == row.nodes
    assert make_plan(sizing.spec) == sizing.plan


def test_a_deadline_alone_may_take_more_gpus_than_the_spec_has() -> None:
    sizing = size_cluster(run(cluster__nodes=2), "gpus", deadline_seconds=5 * DAY)
    row = chosen(sizing)
    assert row.gpus > 16
    assert row.gpus == sizing.limits.max_gpus == sizing.plan.layout.world_size
    assert "more than the 16 GPUs of the spec" in str(sizing.notes[0])
    assert row == chosen(size_cluster(run(cluster__nodes=2), "gpus", max_gpus=row.gpus, deadline_seconds=5 * DAY))
    with pytest.raises(SizingError, match="no cluster of at most 16 GPUs meets"):  # the spec's are the limit here
        size_cluster(run(cluster__nodes=2), "time", deadline_seconds=5 * DAY)


def test_the_cheapest_and_the_fastest_within_a_budget() -> None:
    cheapest = chosen(size_cluster(run(), "cost"))
    fastest = chosen(size_cluster(run(), "time"))
    assert cheapest.dollars <= fastest.dollars
    middle = (cheapest.dollars + fastest.dollars) / 2
    within = chosen(size_cluster(run(), "time", budget_usd=middle))
    assert within.dollars <= middle


def test_wall_clock_time_includes_interruptions() -> None:
    sizing = size_cluster(run(cluster__spot=True, cluster__mean_time_between_interruptions="30m"), "time")
    plan, row = sizing.plan, chosen(sizing)
    assert plan.durability.expected_goodput < 0.95
    assert row.seconds == pytest.approx(plan.time.to_train / plan.durability.expected_goodput)


def test_a_missed_deadline_names_the_closest_cluster_and_a_sufficient_one() -> None:
    with pytest.raises(SizingError) as caught:
        size_cluster(run(), "gpus", max_gpus=32, deadline_seconds=5 * DAY)
    error = caught.value
    assert error.exit_code == ExitCode.INFEASIBLE
    assert error.closest.gpus == 32
    assert "no cluster of at most 32 GPUs meets the deadline of 5 d; the closest one: " in error.message
    assert "too late" in error.message
    assert error.reason.params["cause"].params["missed"].code == "plan.too-late"
    (would_do,) = [problem for problem in error.problems if problem.where == "would do"]
    gpus = int(str(would_do.given).split()[0])
    assert gpus > 32
    size_cluster(run(), "gpus", max_gpus=gpus, deadline_seconds=5 * DAY)
    with pytest.raises(SizingError):
        size_cluster(run(), "gpus", max_gpus=gpus - 8, deadline_seconds=5 * DAY)


def test_the_closest_cluster_may_have_more_gpus_than_the_spec_if_a_deadline_alone_is_given() -> None:
    """Against planning every cluster that is listed."""
    spec = run(cluster__nodes=2)
    with pytest.raises(SizingError) as caught:
        size_cluster(spec, "gpus", deadline_seconds=3600)
    error = caught.value
    planned = [Clusters(spec).plan(row.nodes, None).row for row in error.considered]
    fastest = min((row for row in planned if row.seconds), key=lambda row: row.seconds or 0.0)
    assert (error.closest.gpus, error.closest.seconds) == (fastest.gpus, fastest.seconds)
    assert fastest.gpus > spec.world_size


@pytest.mark.parametrize(
    ("batch", "deadline_days", "most"),
    [(1024, 17, 48), pytest.param(5040, 6.7, 72, marks=pytest.mark.long), (1024, 9, 64)],
)
def test_no_smaller_cluster_meets_the_deadline(batch: int, deadline_days: float, most: int) -> None:
    """Against planning every node count."""
    spec = run(training__global_batch_size=batch, planner__search="everything", cluster__nodes=4)
    row = chosen(size_cluster(spec, "gpus", max_gpus=most, deadline_seconds=deadline_days * DAY))
    tried = [Clusters(spec).plan(nodes, None).row for nodes in range(1, most // 8 + 1)]
    assert row.gpus == min(each.gpus for each in tried if each.seconds and each.seconds <= deadline_days * DAY)


def test_time_and_cost_objectives_try_counts_between_powers_of_two() -> None:
    spec = run(planner__search="everything", training__global_batch_size=960, cluster__nodes=4)
    rows = [Clusters(spec).plan(nodes, None).row for nodes in range(1, 15)]
    soonest, cheapest = (chosen(size_cluster(spec, objective, max_gpus=8 * 14)) for objective in ("time", "cost"))
    assert soonest.seconds == min(each.seconds for each in rows if each.seconds)
    assert cheapest.dollars == min(each.dollars for each in rows if each.dollars)


def test_a_limit_that_only_an_intermediate_size_meets_is_found() -> None:
    spec = run(layout__pipeline_parallel="auto", cluster__nodes=2)  # in three stages
    assert chosen(size_cluster(spec, "gpus", max_gpus=24, deadline_seconds=17 * DAY)).gpus == 24


def test_the_text_of_a_missed_limit_has_the_difference_not_the_rounded_sum() -> None:
    seconds = size_cluster(run(cluster__nodes=1), "time").considered[0].seconds
    with pytest.raises(SizingError, match="90 s too late") as caught:
        size_cluster(run(cluster__nodes=1), "gpus", max_gpus=8, deadline_seconds=seconds - 90)
    assert str(caught.value).count("$") == 2  # the miss and what would do, each once
    rows = size_cluster(run(), "cost").considered
    least = min(row.dollars for row in rows if row.dollars)
    assert all(
        row.chosen or str(row.why) == f"costs {dollars_text(row.dollars - least)} more" for row in rows if row.dollars
    )


def test_counts_that_do_not_divide_the_batch_are_listed_with_the_reason() -> None:
    sizing = size_cluster(run(training__global_batch_size=960), "time")
    (row,) = [row for row in sizing.considered if row.gpus == 128]
    assert str(row.why).startswith("does not divide: training.global_batch_size = 960: must be a multiple of 128")
    assert row.layout is None
    assert {15, 16} <= set(node_counts(run(training__global_batch_size=960), 128))


def test_clusters_that_do_not_fit_are_listed_and_a_run_that_never_fits_is_an_error() -> None:
    sizing = size_cluster(spec_of("llama-70b", cluster__nodes=8), "gpus")
    assert str(sizing.considered[0].why).startswith("does not fit: ")
    with pytest.raises(SizingError) as caught:
        size_cluster(spec_of("llama-70b"), "time")
    assert caught.value.closest is None
    assert "would do" in str(caught.value)


def test_gpu_types_are_compared_at_their_own_prices() -> None:
    names = ("h100-sxm-80gb", "a100-sxm-80gb")
    sizing = size_cluster(run(), "time", max_gpus=32, gpus=names)
    assert {row.gpu for row in sizing.considered} == set(names)
    assert chosen(sizing).gpu == "h100-sxm-80gb"
    per_hour = {
        row.gpu: row.dollars / row.gpus / row.seconds for row in sizing.considered if row.dollars and row.seconds
    }
    assert per_hour["h100-sxm-80gb"] != pytest.approx(per_hour["a100-sxm-80gb"])


@pytest.mark.parametrize(
    "objective", ["time", *(pytest.param(one, marks=pytest.mark.long) for one in ("cost", "gpus"))]
)
def test_the_best_of_several_gpu_types_is_found_without_planning_every_cluster(objective: str) -> None:
    names = ("h100-sxm-80gb", "a100-sxm-80gb", "h200-sxm-141gb", "b200-sxm-180gb", "l40s-48gb")
    spec, most = run(training__global_batch_size=1024), 512
    sizing = size_cluster(spec, objective, max_gpus=most, deadline_seconds=30 * DAY, gpus=names)
    every = [Clusters(spec).plan(nodes, gpu).row for gpu in names for nodes in node_counts(spec, most)]
    fitting = [row for row in every if row.seconds is not None and row.seconds <= 30 * DAY]
    limits = ClusterLimits(objective, most, 30 * DAY, None)
    assert limits.rank(chosen(sizing)) <= min(limits.rank(row) for row in fitting)
    assert len(sizing.considered) < len(every)


@pytest.mark.parametrize("spot", [pytest.param(False, marks=pytest.mark.long), True])
def test_no_cluster_is_faster_than_its_bound_and_none_that_bounds_exclude_is_cheaper(spot: bool) -> None:
    """Against planning every cluster without a limit."""
    spec = run(cluster__spot=spot, training__tokens="30B", planner__search="everything")
    clusters, most = Clusters(spec), 256
    every = {nodes: clusters.plan(nodes, None).row for nodes in node_counts(spec, most)}
    assert len(every) > 1
    for nodes, row in every.items():
        least = clusters.at_least(nodes, None).row
        assert (least.seconds or 0) < row.seconds < 4 * (least.seconds or 0)
        assert clusters.plan(nodes, None, 0.9 * (least.seconds or 0)).plan is None
        within = clusters.plan(nodes, None, row.seconds * (1 + 1e-9)).row
        assert (within.seconds, within.layout) == (row.seconds, row.layout)
    for objective in ("cost", "time"):
        limits = ClusterLimits(objective, most, None, None)
        best = chosen(size_cluster(spec, objective, max_gpus=most))
        assert limits.rank(best) <= min(map(limits.rank, every.values()))


def test_invalid_objectives_limits_and_gpus_are_usage_errors() -> None:
    for arguments in (
        {"objective": "speed"},
        {"objective": "time", "max_gpus": 4},
        {"objective": "time", "gpus": ["x"]},
    ):
        with pytest.raises(UsageError):
            size_cluster(run(), **arguments)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="price"):
        size_cluster(spec_of("gpt2", cluster__gpu="cpu", cluster__gpus_per_node=2), "cost")


def test_spare_nodes_are_a_part_of_the_gpus_that_a_job_may_have() -> None:
    """A job with 40 GPUs has 5 nodes: 4 train, and 1 is spare."""
    spec = run(cluster__spare_nodes=1)
    sizing = size_cluster(spec, "time", max_gpus=40)
    row = chosen(sizing)
    assert (row.nodes, row.gpus, sizing.spec.allocated_devices) == (4, 40, 40)
    assert size_cluster(run(cluster__nodes=4, cluster__spare_nodes=1), "time").limits.max_gpus == 40
    with pytest.raises(UsageError, match="less than the 16 of 2 nodes"):
        size_cluster(spec, "time", max_gpus=8)


def test_the_local_scheduler_has_one_node() -> None:
    spec = spec_of("gpt2", cluster__scheduler="local")
    assert node_counts(spec, 64) == [1]
    assert not size_cluster(spec, "time").notes
    assert "local has only one node" in str(size_cluster(spec, "time", max_gpus=64).notes[0])


def test_a_limit_above_every_cluster_ends_at_the_largest_cluster_of_a_spec() -> None:
    assert max(node_counts(run(), 10**20)) <= MOST_NODES
    assert chosen(size_cluster(run(), "time", max_gpus=10**20)).gpus == 1024  # the batch has no more to share out


def test_the_answer_is_json_and_the_same_each_time() -> None:
    first, second = (size_cluster(run(), "cost").to_json() for _ in range(2))
    assert json.dumps(first, allow_nan=False) == json.dumps(second)
    keys = "objective max_gpus deadline_seconds budget_usd probability tried ruled_out notes note_reasons considered"
    assert set(first) == set(keys.split())
    assert first["probability"] is None, "without a limit of time or dollars"


def test_the_scaling_curve_starts_at_one_and_leaves_out_what_has_no_plan() -> None:
    curve = scaling_curve(run(training__global_batch_size=960), [1, 4, 15, 16])
    assert [point.gpus for point in curve] == [8, 32, 120]
    assert curve[0].efficiency == 1
    assert all(0.5 < point.efficiency < 1.1 for point in curve)


def limits(objective: str | None = None, **given: Any) -> Limits | None:
    return parse_limits(objective, **{"max_gpus": None, "deadline": None, "budget": None, "gpus": (), **given})


def test_no_options_are_no_limits() -> None:
    assert limits() is None


def test_the_default_objective_is_gpus_with_a_deadline_and_time_otherwise() -> None:
    assert limits(deadline="30d") == Limits("gpus", None, 30 * 86400.0, None, ())
    assert limits(budget="$50k") == Limits("time", None, None, 50_000.0, ())
    assert limits(max_gpus=8, gpus=["t4", "h200-sxm-141gb", "t4"]) == Limits(
        "time", 8, None, None, ("t4-16gb", "h200-sxm-141gb")
    )
    assert limits("cost", deadline="1d") == Limits("cost", None, 86400.0, None, ())


@pytest.mark.parametrize("given", [{"deadline": "soon"}, {"deadline": "0"}, {"budget": "-1"}, {"budget": ""}])
def test_an_invalid_limit_is_an_error_that_names_its_option(given: dict[str, str]) -> None:
    with pytest.raises(UsageError, match=f"--{next(iter(given))} is invalid"):
        limits(**given)
