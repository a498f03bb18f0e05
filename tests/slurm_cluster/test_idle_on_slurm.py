"""Idle runs on a real Slurm: the agents of two nodes agree, the state is saved, and the nodes are released."""

import json
from pathlib import Path

import pytest

from tests.slurm_cluster.site import FOREVER, Site

pytestmark = [pytest.mark.slurm, pytest.mark.long]


def test_an_idle_run_is_announced_saved_and_ended_without_a_requeue_and_can_be_resumed(site: Site) -> None:
    fake = {"steps": 30, "checkpoint_every": 5, "stay": {"1:*": 12}, "silence": 600, "save_seconds": 600}
    run_id = site.submit(fake, options=("--idle-timeout", "20s"))
    announced = site.wait(run_id, lambda now: bool(now["idle"]), "it is announced")
    assert announced["idle_reason"]["code"] == "launch.idle"
    (site.runs / run_id / "save").touch()  # until now the ranks could not end
    ended = site.wait(run_id, lambda now: now["state"] == "ended-idle", "it is ended")
    assert site.ends(run_id) == [(75, "idle")]
    assert ended["last_checkpoint_step"] == 12, "the ranks saved"
    job = site.cluster.wait_for(ended["job_id"], lambda job: job["JobState"] not in ("RUNNING", "COMPLETING"))
    assert (job["JobState"], job["ExitCode"], job["Restarts"]) == ("FAILED", "75:0", "0")
    nodes = sorted((site.runs / run_id / "attempts" / "0001" / "idle").glob("*.json"))
    assert len(nodes) == 1, "the second node tells the first one"
    assert json.loads(nodes[0].read_text())["idle_seconds"] >= 20
    explained = site.scaletrain("explain", run_id, "--json")
    assert explained["findings"][0]["code"] == "launch.exit-idle"
    site.nothing_is_lost(run_id)
    site.scaletrain("resume", run_id, "--yes")
    done = site.wait(run_id, lambda now: now["state"] == "finished", "the resumed run finishes")
    assert done["attempt"] == 2
    assert site.attempts(run_id)[1]["checkpoint_at_start"] == 12


def test_a_run_of_which_one_node_works_is_not_ended(site: Site) -> None:
    """Rank 1 waits, and rank 0 trains; both are on nodes of their own."""
    fake = {**FOREVER, "stay": {"1:1": 5}, "silence": 600}
    run_id = site.submit(fake, "cluster.idle_timeout=10s")
    record = site.runs / run_id / "attempts" / "0001" / "idle"
    site.wait(run_id, lambda now: any(found["idle_seconds"] > 20 for found in records(record)), "node 1 is idle")
    assert site.status(run_id)["state"] == "running"
    assert site.events(run_id, "idle") == []
    site.scaletrain("cancel", run_id, "--yes")
    site.wait(run_id, lambda now: now["state"] == "cancelled", "it is cancelled")


def records(folder: Path) -> list[dict[str, float]]:
    return [json.loads(path.read_text()) for path in folder.glob("[!.]*.json")]
