"""Explanations of pending and ended jobs of a real Slurm."""

from pathlib import Path

import pytest

from scaletrain_cli.launch.backends.slurm.explain import how_it_ended, why_it_waits
from tests.slurm_cluster.cluster import DevCluster
from tests.waiting import wait_until

pytestmark = pytest.mark.slurm


@pytest.fixture
def cluster(slurm: DevCluster, monkeypatch: pytest.MonkeyPatch) -> DevCluster:
    monkeypatch.setenv("SLURM_CONF", slurm.environment["SLURM_CONF"])
    return slurm


def sleeping(cluster: DevCluster, *options: str) -> str:
    command = ["sbatch", "--parsable", "--output=/dev/null", *options, "--wrap=sleep 300"]
    return str(cluster.run(*command).stdout).strip()


def cause_of(job: str) -> str:
    return why_it_waits(job, "a-1").cause


def test_a_held_job_is_explained_with_the_command_that_releases_it(cluster: DevCluster) -> None:
    job = sleeping(cluster, "--hold")
    finding = why_it_waits(job, "a-1")
    assert (finding.cause, finding.needs_action) == ("held", True)
    assert f"scontrol release {job}" in finding.actions


def test_a_job_that_waits_for_nodes_is_explained_with_the_jobs_ahead_and_the_usable_nodes(cluster: DevCluster) -> None:
    running = sleeping(cluster, "--nodes=4", "--exclusive", "--time=10")
    wait_until(lambda: "R" in cluster.run("squeue", "-h", "-j", running, "-o", "%t").stdout, "it runs")
    waiting = sleeping(cluster, "--nodes=4", "--time=10")
    behind = sleeping(cluster, "--nodes=4", "--time=10", "--nice=1000")
    wait_until(lambda: cause_of(waiting) == "resources" and cause_of(behind) == "priority", "both have a reason")
    texts = {evidence.source: evidence.text for evidence in why_it_waits(behind, "a-1").evidence}
    assert texts["squeue, partition main"] == "1 of 2 pending jobs are ahead of it"
    assert texts["sinfo, partition main"] == "4 alloc; 4 usable"
    assert "NumNodes=4" in texts["requested"]
    wait_until(lambda: "start expected" in str(why_it_waits(waiting, "a-1").evidence), "a start is expected")


def test_a_job_that_can_never_start_needs_action(cluster: DevCluster) -> None:
    failed = str(cluster.run("sbatch", "--parsable", "--output=/dev/null", "--wrap=false").stdout).strip()
    never = sleeping(cluster, f"--dependency=afterok:{failed}")
    too_large = sleeping(cluster, "--nodes=9")
    wait_until(lambda: why_it_waits(never, "a-1").needs_action, "the dependency has failed")
    wait_until(lambda: why_it_waits(too_large, "a-1").needs_action, "the partition is too small")
    assert cause_of(too_large) == "never"


def test_the_end_of_a_job_is_shown_from_the_controller_and_from_its_log(cluster: DevCluster, tmp_path: Path) -> None:
    log = tmp_path / "slurm.log"
    command = ("sbatch", "--parsable", f"--output={log}", "--wrap=echo 'python: error: no such file' >&2; exit 7")
    job = str(cluster.run(*command).stdout).strip()
    wait_until(lambda: "JobState=FAILED" in str(list(how_it_ended(job, log))), "it has failed")
    texts = {evidence.source: evidence.text for evidence in how_it_ended(job, log)}
    assert "ExitCode=7:0" in texts[f"scontrol show job {job}"]
    assert texts["slurm.log"] == "python: error: no such file"


def test_a_job_that_slurm_no_longer_lists_is_reported_as_such(cluster: DevCluster, tmp_path: Path) -> None:
    assert [evidence.text for evidence in how_it_ended("999999", tmp_path / "none")] == [
        "Slurm no longer lists job 999999, and its accounting has no record of it"
    ]
