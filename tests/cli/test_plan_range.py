"""`scaletrain plan` and `submit --dry-run` of a run with a range of nodes."""

from pathlib import Path

from tests.cli.command_line import SMALL, scaletrain

RANGE = ("cluster.scheduler=slurm", "cluster.gpus_per_node=1", "training.micro_batch_size=1")


def sets(nodes: str, *more: str) -> list[str]:
    return [word for one in (*RANGE, f"cluster.nodes={nodes}", *more) for word in ("--set", one)]


def test_the_plan_shows_every_size_and_why_some_are_not_used() -> None:
    done = scaletrain("plan", SMALL, *sets("{min: 1, max: 4}"))
    assert "Sizes of the range" in done.out
    table = done.out[done.out.index("Sizes of the range") :]
    assert "must be a multiple of 3 data-parallel ranks" in " ".join(table.split())
    assert "on 1 node the run trains at" in table


def test_the_json_has_the_sizes_and_on_a_trace_both_policies(tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("seconds,nodes\n0,1\n4000,4\n8000,1\n")
    words = ("--trace", str(trace), "--json")
    data = scaletrain("plan", SMALL, *sets("{min: 1, max: 4}", "cluster.spot=true"), *words).data
    assert [(size["nodes"], size["usable"]) for size in data["sizes"]] == [(1, True), (2, False), (3, False), (4, True)]
    assert data["sizes"][2]["why_not_reason"] == {
        "code": "plan.cluster-does-not-divide",
        "params": data["sizes"][2]["why_not_reason"]["params"],
    }
    assert data["layout"]["world_size"] == 4
    assert data["range_advice"]["text"].startswith("on 1 node the run trains at")
    assert data["elastic"]["elastic"]["finished"] == data["elastic"]["waiting"]["finished"] == 16
    assert data["elastic"]["advice_reason"]["code"].startswith("plan.range-")


def test_the_rendered_job_requests_the_range() -> None:
    job = scaletrain("submit", SMALL, *sets("{min: 1, max: 4}"), "--dry-run").out
    assert "#SBATCH --nodes=1-4\n" in job
    assert "launch.backends.slurm.growth" in job


def test_a_range_whose_smallest_size_cannot_be_used_is_refused() -> None:
    refused = scaletrain("submit", SMALL, *sets("{min: 3, max: 4}"), "--dry-run", code=3)
    assert "cluster.nodes.min = 3: the run cannot train on so few nodes" in refused.err
    assert "Set cluster.nodes.min to 4 or more" in refused.err
