"""A site that preempts by QOS: the script says so, and a run that loses its nodes to a higher QOS goes on by itself."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.slurm_cluster.cluster import DevCluster
from tests.slurm_cluster.test_a_run_on_slurm import HOSTILE, ON_SLURM, RECIPE, TINY, Login, ends

pytestmark = [pytest.mark.slurm, pytest.mark.long]  # a cluster with a database of its own
BY_QOS = (*ON_SLURM, *TINY, "cluster.slurm.partition=main", "cluster.slurm.qos=scavenger", "cluster.grace_seconds=40")


@pytest.fixture(scope="module")
def cluster() -> Iterator[DevCluster]:
    conf = ["PreemptType=preempt/qos", "PriorityWeightQOS=1000"]
    with DevCluster.running("--accounting", nodes=3, kill_wait_seconds=20, conf=conf) as cluster:
        for words in (
            "add qos scavenger Priority=0 PreemptMode=requeue GraceTime=40",
            "add qos prod Priority=1000 Preempt=scavenger",
            "modify account lab set QOS+=scavenger,prod",
        ):
            cluster.run("sacctmgr", "-i", *words.split())
        yield cluster


@pytest.fixture
def login(cluster: DevCluster, tmp_path: Path) -> Login:
    return Login(cluster, tmp_path / HOSTILE)


@pytest.mark.drill
def test_a_run_preempted_by_a_higher_qos_continues_without_losing_a_step(login: Login) -> None:
    run_id = login.submit(*BY_QOS)
    before = login.wait_for_steps(run_id, 1)
    script = (Path(before["run_dir"]) / "job.sh").read_text()
    assert "# Preemption: by QOS. Jobs of scavenger are preempted by prod: PreemptMode=REQUEUE. SIGTERM to" in script
    urgent = login.cluster.submit("sleep 600", "-q", "prod", "-A", "lab", "-N", "3", "--exclusive", "-o/dev/null")
    login.cluster.wait_for_state(urgent, "RUNNING")
    login.cluster.run("scancel", urgent)
    after = login.wait_for_steps(run_id, 2)
    assert (after["job_id"], after["steps_lost_total"]) == (before["job_id"], 0)
    login.scaletrain("cancel", run_id, "--yes")
    cancelled = login.wait(run_id, lambda now: now["state"] == "cancelled", "cancelled")
    assert ends(cancelled["run_dir"]) == [(75, "preempted"), (75, "cancelled")]


def test_a_grace_period_longer_than_that_of_the_qos_is_reported(login: Login) -> None:
    sets = (*BY_QOS, "cluster.grace_seconds=300", "cluster.slurm.time=1h", "cluster.slurm.extra={hold: true}")
    told = login.scaletrain("submit", str(RECIPE), "--yes", sets=sets)
    login.cluster.run("scancel", "-u", "root")
    assert "cluster.grace_seconds = 300, but QOS scavenger gives a preempted job 40 s (GraceTime)" in told.stderr
