"""Runs that Slurm suspends, requeues or cancels, and commands of Slurm that fail or lose their answers."""

import contextlib
import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.slurm_cluster.cluster import DevCluster
from tests.slurm_cluster.site import FOREVER, Site

pytestmark = pytest.mark.slurm

TIMED_OUT = "Socket timed out on send/recv operation"


class Front:
    """Wrappers of Slurm's commands that fail, or lose their answers, while a file for it exists."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()
        for name in ("squeue", "sbatch"):
            real = shutil.which(name)
            lines = (
                "#!/bin/sh",
                f'[ ! -e "{folder}/{name}.fails" ] || {{ cat "{folder}/{name}.fails" >&2; exit 1; }}',
                f'case "$*" in *--test-only*) exec {real} "$@";; esac',
                f'[ ! -e "{folder}/{name}.loses" ] || {{ {real} "$@" >/dev/null; echo "{TIMED_OUT}" >&2; exit 1; }}',
                f'exec {real} "$@"',
            )
            path = folder / name
            path.write_text("\n".join(lines) + "\n")
            path.chmod(0o755)

    def says(self, name: str, words: str | None) -> None:
        path = self.folder / f"{name}.fails"
        path.unlink() if words is None else path.write_text(words)


@pytest.fixture
def front(tmp_path: Path) -> Front:
    return Front(tmp_path / "bin")


@pytest.fixture
def site(slurm: DevCluster, tmp_path: Path, front: Front) -> Site:
    site = Site(slurm, tmp_path / "runs")
    slurm.environment["PATH"] = f"{front.folder}:{slurm.environment['PATH']}"
    return site


def explained(site: Site, run_id: str) -> str:
    """Return the findings as one text; fail if it mentions a lost node."""
    text = json.dumps(site.scaletrain("explain", run_id, "--json")["findings"])
    assert "lost" not in text, text
    assert "dministrator" not in text
    return text


def test_a_run_continues_after_suspension_and_lost_answers_and_cancel_saves_its_state(site: Site, front: Front) -> None:
    (front.folder / "sbatch.loses").touch()
    run_id = site.submit(FOREVER)  # the job was accepted, but its id was never printed
    (front.folder / "sbatch.loses").unlink()
    job_id = site.trains(run_id)["job_id"]
    assert site.submit(FOREVER) == run_id
    assert site.cluster.run("squeue", "-h", "--me", "-o", "%A").stdout.split() == [job_id]

    front.says("squeue", "slurm_load_jobs error: Unable to contact slurm controller (connect failure)")
    silent = site.status(run_id)
    assert (silent["state"], silent["job"]["state"]) == ("unknown", "unknown")
    assert "Unable to contact slurm controller" in explained(site, run_id)
    for verb in ("cancel", "resume"):
        refused = site.scaletrain(verb, run_id, "--yes", check=False)
        assert (refused.returncode, "Unable to contact" in refused.stderr) == (4, True), refused.stderr
        assert "lost" not in refused.stderr
    front.says("squeue", None)

    site.cluster.suspend(job_id, steps=3)  # the batch script, and an agent on each node
    suspended = site.wait(run_id, lambda now: now["state"] == "suspended", "it is suspended")
    assert suspended["why"] == "SUSPENDED"
    assert f"job {job_id} is suspended" in explained(site, run_id)
    refused = site.scaletrain("resume", run_id, "--yes", check=False)
    assert (refused.returncode, "SUSPENDED" in refused.stderr, "lost" in refused.stderr) == (2, True, False)
    site.cluster.run("scontrol", "resume", job_id)
    step = suspended["step"]
    site.wait(run_id, lambda now: now["step"] > step + 5, "it trains on")

    site.cluster.suspend(job_id, steps=3)  # the batch script, and an agent on each node
    site.wait(run_id, lambda now: now["state"] == "suspended", "it is suspended again")
    said = site.scaletrain("cancel", run_id, "--yes").stderr
    assert "resumed and asked to save and stop" in said
    ended = site.wait(run_id, lambda now: now["state"] == "cancelled", "it is cancelled")
    assert ended["last_checkpoint_step"] == ended["step"] > step
    assert site.ends(run_id) == [(75, "cancelled")], site.attempts(run_id)
    site.nothing_is_lost(run_id)


@pytest.mark.long
def test_a_requeue_by_slurm_continues_in_the_same_job_and_scancel_cancels_the_run(site: Site) -> None:
    run_id = site.submit(FOREVER)
    job_id = site.trains(run_id)["job_id"]
    urgent = site.cluster.submit("sleep 600", "-p", "high", "-N", "4", "--exclusive", "-o/dev/null")  # gets all nodes
    site.cluster.run("scontrol", "requeue", job_id)
    site.wait(run_id, lambda now: now["job"]["state"] == "queued", "it is queued again")
    explanation = explained(site, run_id)
    assert "another attempt follows" in explanation
    assert "no attempt follows" not in explanation
    site.cluster.run("scancel", job_id, urgent)
    ended = site.wait(run_id, lambda now: now["job"]["state"] == "ended", "the job is over")
    assert ended["state"] == "cancelled"
    assert "no attempt follows" in explained(site, run_id)

    starting = site.submit({**FOREVER, "start_seconds": 60}, run_id="starting")
    job_id = site.wait(starting, lambda now: now["attempt"] == 1 and now["agent_pids"], "its agents run")["job_id"]
    site.cluster.run("scancel", job_id)
    ended = site.wait(starting, lambda now: now["job"]["state"] == "ended", "the job is over")
    assert ended["state"] == "cancelled", ended
    assert "cancelled" in explained(site, starting)
    site.nothing_is_left(starting)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "small"
    folder.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=160m", "none", folder], check=False).returncode:
        pytest.skip("file systems cannot be mounted here")
    yield folder
    subprocess.run(["umount", "--lazy", folder], check=True)


@pytest.mark.long
def test_a_full_runs_root_ends_the_run_with_disk_full_and_resume_continues_it(small_disk: Path) -> None:
    # A cluster of its own: nodes see only what was mounted before they started.
    with DevCluster.running(nodes=2, grace_seconds=60) as cluster:
        site = Site(cluster, small_disk / "runs")
        run_id = site.submit(FOREVER)
        job_id = site.trains(run_id)["job_id"]
        filler = small_disk / "filler"
        with filler.open("wb", buffering=0) as file:
            for size in (1 << 20, 4096):
                with contextlib.suppress(OSError):
                    while file.write(bytes(size)):
                        pass
        job = cluster.wait_for_state(job_id, "FAILED", "COMPLETED")
        assert job["ExitCode"] == "93:0"
        failed = site.status(run_id)
        assert (failed["state"], "is full" in failed["why"] or "No space left" in failed["why"]) == ("failed", True)
        explanation = site.scaletrain("explain", run_id, "--json")
        assert explanation["findings"][0]["cause"] == "disk-full", explanation
        explained(site, run_id)
        filler.unlink()
        site.scaletrain("resume", run_id, "--yes")
        site.trains(run_id, attempt=2)
        site.cancel(run_id)
