"""A sweep as one job array on a real Slurm: each task is a run that is followed, cancelled and resumed on its own."""

import json
from typing import Any

import pytest

from tests.slurm_cluster.site import FOREVER, Site

pytestmark = pytest.mark.slurm
SEEDS = (1, 2, 3, 4)
RUNS = [f"sweep-seed-{seed}" for seed in SEEDS]


def submit(site: Site, fake: dict[str, Any], *options: str) -> dict[str, Any]:
    values = ",".join(map(str, SEEDS))
    words = ("--sweep", f"training.seed={values}", "--array", "--max-concurrent", "2", *options)
    done = site.try_to_submit(fake, run_id="sweep", options=words)
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


def rows(site: Site) -> list[str]:
    return site.cluster.run("squeue", "-h", "-r", "--me", "-o", "%i %T").stdout.split("\n")[:-1]


def test_the_tasks_of_an_array_are_runs_of_their_own(site: Site) -> None:
    sent = submit(site, FOREVER)
    jobs = {run["run_id"]: run["job_id"] for run in sent["runs"]}
    array = jobs[RUNS[0]].split("_")[0]
    assert list(jobs.items()) == [(name, f"{array}_{number}") for number, name in enumerate(RUNS, start=1)]
    for name in RUNS[:2]:
        site.trains(name)
    assert sorted(row.split()[1] for row in rows(site)) == ["PENDING", "PENDING", "RUNNING", "RUNNING"]
    again = submit(site, FOREVER)
    assert {run["run_id"]: run["job_id"] for run in again["runs"]} == jobs, "no second array"
    assert [run["state"] for run in site.status("sweep")["runs"]] == ["running", "running", "queued", "queued"]
    listed = site.scaletrain("list", "--json")["runs"]
    assert {row["run_id"]: row["job_id"] for row in listed} == jobs
    assert site.scaletrain("explain", RUNS[3], "--json")["findings"][0]["code"] == "slurm.wait-dependency"
    assert "up" in site.scaletrain("logs", RUNS[0]).stdout
    assert site.scaletrain("exec", RUNS[1], "--", "echo", "beside").stdout == "beside\n"


@pytest.mark.long
def test_a_task_is_requeued_canceled_and_resumed_on_its_own(site: Site) -> None:
    jobs = {run["run_id"]: run["job_id"] for run in submit(site, FOREVER)["runs"]}
    for name in RUNS[:2]:
        site.trains(name)
    # Another task takes the place of the one that is requeued, as no more than two may run.
    site.cluster.run("scontrol", "requeue", jobs[RUNS[0]])
    site.trains(RUNS[2])
    assert site.status(RUNS[1])["attempt"] == 1
    site.scaletrain("cancel", RUNS[3], "--yes")
    site.wait(RUNS[3], lambda now: now["state"] == "cancelled", "a task that waits is cancelled")
    site.cancel(RUNS[1])
    site.trains(RUNS[0], attempt=2)
    assert site.status(RUNS[2])["state"] == "running"
    assert [attempt["job_id"] for attempt in site.attempts(RUNS[0])] == [jobs[RUNS[0]]] * 2
    site.scaletrain("resume", RUNS[3], "--yes")
    resumed = site.status(RUNS[3])
    assert "_" not in resumed["job_id"], "a job of its own"
    assert RUNS[3] in site.cluster.run("squeue", "-h", "--me", "-o", "%j").stdout
    site.trains(RUNS[3])
    site.scaletrain("cancel", "sweep", "--yes")
    for name in RUNS:
        site.wait(name, lambda now: now["state"] == "cancelled", "the sweep is cancelled")
        site.nothing_is_lost(name)


@pytest.mark.long
def test_a_rank_that_dies_restarts_or_requeues_only_its_own_task(site: Site) -> None:
    """Requeued after a second failure at the same step. The last task of the array has the number of the array."""
    dies, stays = {"1:1": -9, "2:1": -9}, {"1:0": 2, "2:0": 2}
    submit(site, {"steps": 30, "checkpoint_every": 5, "die": dies, "die_at": 3, "stay": stays})
    done = site.scaletrain("status", "sweep", "--wait", "1h", "--json")
    assert [(run["state"], run["attempt"]) for run in done["runs"]] == [("finished", 3)] * 4
    for name in RUNS:
        assert site.ends(name) == [(1, "killed"), (1, "killed"), (0, "done")]
        assert site.cluster.job(site.attempts(name)[0]["job_id"])["Restarts"] == "1"
        log = site.runs / name / f"slurm-{site.attempts(name)[0]['job_id']}.log"
        assert log.is_file()


def test_an_array_with_a_wrong_request_leaves_nothing(site: Site) -> None:
    words = ("--sweep", "training.seed=1,2", "--array")
    refused = site.try_to_submit(FOREVER, "cluster.slurm.licenses=nothing:1", run_id="other", options=words)
    assert refused.returncode == 4, refused.stderr
    assert not list(site.runs.glob("other*"))
