"""The example files for administrators in slurm/, on a real Slurm: quotas and the prolog."""

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.launch.conftest import PROJECT
from tests.slurm_cluster.cluster import DevCluster
from tests.waiting import wait_until

pytestmark = pytest.mark.slurm
SLURM = PROJECT / "slurm"
NO_HOLD = "SchedulerParameters=batch_sched_delay=1,sched_interval=1,bf_interval=1,bf_continue,nohold_on_prolog_fail"
SICK = 'echo "    Remapped Rows"; echo "        Pending                           : Yes"'
WELL = 'echo "        Pending                           : No"'


@pytest.mark.long
def test_the_example_of_qos_and_quotas_loads_as_written() -> None:
    with DevCluster.running("--accounting", nodes=1, gpus=2) as cluster:
        for _ in range(2):  # an administrator runs it again after a change
            cluster.run("bash", str(SLURM / "qos.example.sh"))
        listed = cluster.run("sacctmgr", "-nP", "show", "qos", "format=name,priority,gracetime,preempt,flags").stdout
        teams = cluster.run("sacctmgr", "-nP", "show", "assoc", "format=account,grptres,fairshare,qos").stdout
    rows = {row[0]: row[1:] for row in (line.split("|") for line in listed.splitlines())}
    assert rows["spot"][:2] == ["1", "00:02:00"]
    assert rows["prod"][2:] == ["spot", "DenyOnLimit"]
    assert re.search(r"^language\|gres/gpu=128\|50\|normal,prod,spot$", teams, re.MULTILINE)


@pytest.fixture
def prolog(tmp_path: Path) -> Iterator[tuple[DevCluster, Path]]:
    """Start a cluster whose nodes run the prolog with a fake nvidia-smi, as there is no GPU."""
    tool = tmp_path / "bin" / "nvidia-smi"
    tool.parent.mkdir()
    wrapper = tmp_path / "prolog.sh"
    wrapper.write_text(f"#!/bin/sh\nPATH={tool.parent}:$PATH exec {SLURM / 'prolog_health_check.sh'}\n")
    wrapper.chmod(0o755)
    say(tool, WELL)
    with DevCluster.running(nodes=2, conf=[f"Prolog={wrapper}", "PrologFlags=Alloc", NO_HOLD]) as cluster:
        yield cluster, tool


def say(tool: Path, words: str) -> None:
    tool.write_text(f"#!/bin/sh\n{words}\n", encoding="utf-8")
    tool.chmod(0o755)


@pytest.mark.long
def test_the_prolog_drains_a_bad_node_and_the_job_runs_elsewhere(prolog: tuple[DevCluster, Path]) -> None:
    cluster, tool = prolog
    well = cluster.submit("true", "-w", "n2")
    cluster.wait_for_state(well, "COMPLETED")
    say(tool, f'case "$SLURMD_NODENAME" in n1) {SICK} ;; *) {WELL} ;; esac')
    job = cluster.submit("sleep 1; true", "--requeue")
    wait_until(lambda: "drain" in state(cluster, "n1") or done(cluster, job), "n1 is looked at")
    if "drain" not in state(cluster, "n1"):  # the job ran on n2 at once
        cluster.submit("true", "-w", "n1")
        wait_until(lambda: "drain" in state(cluster, "n1"), "n1 is drained")
    reason = cluster.run("sinfo", "-h", "-n", "n1", "-o", "%E").stdout
    assert "health check: a GPU needs a reset" in reason
    wait_until(lambda: done(cluster, job), "the job ends on the other node")
    assert cluster.job(job)["NodeList"] == "n2"


def state(cluster: DevCluster, node: str) -> str:
    return cluster.run("sinfo", "-h", "-n", node, "-o", "%T").stdout.split("\n")[0]


def done(cluster: DevCluster, job: str) -> bool:
    return cluster.job(job)["JobState"] == "COMPLETED"


@pytest.mark.parametrize("name", ["qos.example.sh", "prolog_health_check.sh"])
def test_the_scripts_are_valid_bash(name: str) -> None:
    parsed = subprocess.run(["bash", "-n", str(SLURM / name)], capture_output=True, text=True)
    assert (parsed.returncode, parsed.stderr) == (0, "")
