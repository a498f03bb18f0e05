"""Runs on a real site: to the end, requeued, cancelled, resumed, with every exit code, and refused."""

import pytest

from tests.slurm_cluster.site import FOREVER
from tests.slurm_site.conftest import RealSite, nodes

pytestmark = pytest.mark.slurm_site


def trains(site: RealSite, run_id: str, attempt: int = 1) -> dict[str, object]:
    site.wait(run_id, lambda now: now["attempt"] == attempt, f"attempt {attempt} begins")
    return site.trains(run_id, attempt)


def test_a_run_finishes(site: RealSite) -> None:
    run_id = site.submit({"steps": 5, "checkpoint_every": 5})
    ended = site.wait(run_id, lambda now: now["job"]["state"] == "ended", "it ends")
    assert (ended["state"], ended["step"]) == ("finished", 5)
    site.nothing_is_left(run_id)


def test_a_requeued_run_continues_from_its_checkpoint_and_a_cancelled_one_has_saved(site: RealSite) -> None:
    run_id = site.submit(FOREVER)
    job_id = trains(site, run_id)["job_id"]
    site.cluster.run("scontrol", "requeue", str(job_id))
    trains(site, run_id, attempt=2)
    assert (site.attempts(run_id)[1]["checkpoint_at_start"] or 0) > 0
    site.cancel(run_id)


def test_a_cancelled_run_is_resumed_on_another_number_of_nodes(site: RealSite) -> None:
    run_id = site.submit(FOREVER)
    trains(site, run_id)
    site.cancel(run_id)
    size = 1 if nodes() > 1 else 2
    if size > nodes():
        pytest.skip("the site is used with one node")
    site.scaletrain("resume", run_id, "--yes", "--nodes", str(size))
    trains(site, run_id, attempt=2)
    assert len(site.attempts(run_id)[1]["nodes"]) == size
    site.cancel(run_id)


@pytest.mark.parametrize(("code", "reason"), [(93, "nan"), (3, "usage"), (2, "usage")])
def test_a_final_exit_code_ends_the_run_at_once(site: RealSite, code: int, reason: str) -> None:
    run_id = site.submit({"die": {"1:0": code}, "reason": reason})
    ended = site.wait(run_id, lambda now: now["job"]["state"] == "ended", "it ends")
    assert (ended["state"], ended["attempt"]) == ("failed", 1)
    assert site.ends(run_id)[0][0] == code


def test_a_crash_is_restarted_by_the_same_job(site: RealSite) -> None:
    run_id = site.submit({"steps": 5, "die": {"1:0": 1}}, "restarts.crash=1")
    ended = site.wait(run_id, lambda now: now["job"]["state"] == "ended", "it ends")
    assert (ended["state"], ended["attempt"]) == ("finished", 2)


@pytest.mark.parametrize(
    "setting",
    ["cluster.slurm.partition=no-such-partition", "cluster.nodes=90000", "cluster.slurm.memory_per_node=90TB"],
)
def test_a_job_that_the_site_can_never_run_is_refused_and_nothing_is_left(site: RealSite, setting: str) -> None:
    before = site.cluster.run("squeue", "--noheader", "--me").stdout
    refused = site.try_to_submit(FOREVER, setting, run_id="refused")
    assert refused.returncode in (2, 3, 4), refused.stdout + refused.stderr
    assert "Traceback" not in refused.stderr
    assert site.cluster.run("squeue", "--noheader", "--me").stdout == before
