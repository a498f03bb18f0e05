"""Runs of a fake engine on a real Slurm with accounting: preempted by a QOS, refused by a quota, waiting for one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.slurm_cluster.cluster import DevCluster
from tests.slurm_cluster.site import FOREVER, Site

pytestmark = pytest.mark.slurm
CAPPED = "cluster.slurm.qos=capped"


@pytest.fixture(scope="module")
def shared() -> Iterator[DevCluster]:
    conf = ["PreemptType=preempt/qos", "PriorityWeightQOS=1000"]
    with DevCluster.running("--accounting", nodes=4, kill_wait_seconds=20, conf=conf) as cluster:
        for words in (
            "add qos scavenger Priority=0 PreemptMode=requeue GraceTime=50",
            "add qos prod Priority=1000 Preempt=scavenger",
            "add qos capped GrpTRES=cpu=2",
            "modify account lab set QOS+=scavenger,prod,capped",
        ):
            cluster.run("sacctmgr", "-i", *words.split())
        yield cluster


@pytest.fixture
def site(shared: DevCluster, tmp_path: Path) -> Iterator[Site]:
    with Site.visiting(shared, tmp_path / "runs") as site:
        yield site


@pytest.mark.long
def test_a_run_preempted_by_a_higher_qos_continues_without_losing_a_step(site: Site) -> None:
    run_id = site.submit(FOREVER, "cluster.slurm.qos=scavenger")
    before = site.trains(run_id)
    script = (site.runs / run_id / "job.sh").read_text()
    assert "# Preemption: by QOS. Jobs of scavenger are preempted by prod: PreemptMode=REQUEUE. SIGTERM to" in script
    urgent = site.cluster.submit("sleep 300", "-q", "prod", "-A", "lab", "-N", "4", "--exclusive", "-o/dev/null")
    site.cluster.wait_for_state(urgent, "RUNNING")
    site.cluster.run("scancel", urgent)
    after = site.trains(run_id, attempt=2)
    assert after["job_id"] == before["job_id"]
    site.cancel(run_id)
    assert site.ends(run_id) == [(75, "preempted"), (75, "cancelled")]


def test_a_grace_period_longer_than_the_qos_gives_is_reported_at_submission(site: Site) -> None:
    held = ("cluster.grace_seconds=300", "cluster.slurm.time=1h", "cluster.slurm.extra={hold: true}")
    submitted = site.try_to_submit(FOREVER, "cluster.slurm.qos=scavenger", *held)
    assert submitted.returncode == 0, submitted.stderr
    assert "cluster.grace_seconds = 300, but QOS scavenger gives a preempted job 50 s (GraceTime)" in submitted.stderr


def test_a_job_beyond_its_quota_is_refused_and_leaves_nothing(site: Site) -> None:
    refused = site.try_to_submit(FOREVER, CAPPED, "cluster.nodes=4", run_id="refused")
    assert refused.returncode == 4, refused.stderr
    assert "4 CPUs over all nodes: QOS capped may use 2 CPUs at the same time" in refused.stderr
    assert not site.runs.exists()
    assert site.cluster.run("squeue", "-h", "--me").stdout == ""
    assert not site.processes("refused")


def test_a_quota_in_use_is_a_note_and_the_run_starts_once_it_is_free(site: Site) -> None:
    holder = site.cluster.submit("sleep 300", "-A", "lab", "-q", "capped", "-N", "1", "-o/dev/null")
    site.cluster.wait_for_state(holder, "RUNNING")
    waits = site.try_to_submit({"steps": 20, "checkpoint_every": 5}, CAPPED)
    assert waits.returncode == 0, waits.stderr
    assert "QOS capped has 1 of its 2 CPUs in use (GrpTRES): the job waits for 2." in waits.stderr
    assert site.status("life")["state"] == "queued"
    assert not site.processes("life")
    site.cluster.run("scancel", holder)
    done = site.wait("life", lambda now: now["state"] == "finished", "it finishes")
    assert (done["attempt"], done["last_checkpoint_step"], site.ends("life")) == (1, 20, [(0, "done")])
    site.nothing_is_lost("life")
