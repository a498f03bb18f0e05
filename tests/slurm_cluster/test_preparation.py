"""Data that a job of Slurm prepares before the gang starts. Data that cannot be prepared are in test_life."""

import hashlib
import json
from pathlib import Path

import pytest

from tests.launch.conftest import PROJECT
from tests.slurm_cluster.site import Site
from tests.waiting import wait_until

pytestmark = [pytest.mark.slurm, pytest.mark.long]
DONE = {"steps": 6, "checkpoint_every": 5}


def corpus(folder: Path, documents: int) -> Path:
    path = folder / "web.jsonl"
    words = "alpha beta gamma delta epsilon".split()
    rows = (" ".join(words[(row * place) % 5] for place in range(1, 200)) + f" {row}" for row in range(documents))
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in rows), encoding="utf-8")
    return path


def settings(path: Path, *more: str) -> tuple[str, ...]:
    small = ("data.tokenizer.vocab_size=300", "cluster.slurm.preparation.cpus_per_task=1")
    return (f"data.source={path}", *small, *more)


def datasets(runs: Path) -> dict[str, str]:
    """Return the digests of all files of prepared datasets."""
    found = [path for path in (runs / "datasets").rglob("*") if path.is_file()]
    visible = [path for path in found if not any(part.startswith(".") for part in path.relative_to(runs).parts)]
    return {str(path.relative_to(runs)): hashlib.sha256(path.read_bytes()).hexdigest() for path in visible}


def test_the_gang_starts_after_the_preparation_whose_preempted_tasks_change_no_byte(site: Site, tmp_path: Path) -> None:
    path = corpus(tmp_path, 60_000)
    spot = "cluster.slurm.preparation={tasks: 2, cpus_per_task: 1, partition: spot0}"
    spec = settings(path, spot, 'data.prepare=[{"step": "duplicates", "near": true}]')
    run_id = site.submit(DONE, *spec, options=("--prepare", "job"))
    folder = site.runs / run_id / "preparation"
    job = json.loads((folder / "job.json").read_text(encoding="utf-8"))
    wait_until(lambda: list(folder.glob("slurm-*-1.log")), "the second task runs")
    urgent = site.cluster.submit("sleep 3", "-phigh", "-N4", "--exclusive", "-o/dev/null")
    waiting = site.status(run_id)
    assert waiting["state"] == "queued"
    said = site.scaletrain("explain", run_id, "--json")["findings"][0]
    assert job["job_id"] in said["headline"]
    site.cluster.wait_for(urgent, lambda job: job["JobState"] == "COMPLETED")
    tasks = [site.cluster.job(f"{job['others']}_{task}") for task in range(2)]
    assert [task["Restarts"] for task in tasks] == ["1", "1"]
    done = site.wait(run_id, lambda now: now["state"] in ("finished", "failed"), "it trains")
    assert (done["state"], site.ends(run_id)) == ("finished", [(0, "done")])
    ended = max(log.stat().st_mtime for log in folder.glob("slurm-*.log"))
    assert site.attempts(run_id)[0]["started"] >= ended - 1
    found = datasets(site.runs)
    assert found
    (read,) = json.loads((folder / "datasets.json").read_text(encoding="utf-8"))["datasets"]
    assert f"datasets/{read['folder']}/dataset.json" in found
    assert (folder / "done.json").is_file()
    site.cluster.environment["SCALETRAIN_RUNS"] = str(tmp_path / "alone")
    again = site.try_to_submit(DONE, *spec, run_id="again", options=("--prepare", "now"))
    site.cluster.environment["SCALETRAIN_RUNS"] = str(site.runs)
    assert again.returncode == 0, again.stderr
    assert datasets(tmp_path / "alone") == found
    site.cluster.run("scancel", "--name=again")


def test_cancel_deletes_the_preparation_job_with_the_gang(site: Site, tmp_path: Path) -> None:
    path = corpus(tmp_path, 30_000)
    run_id = site.submit(DONE, *settings(path), options=("--prepare", "job"))
    site.scaletrain("cancel", run_id, "--yes")
    wait_until(lambda: not site.cluster.run("squeue", "-h", "-o", "%i %j").stdout.split(), "nothing is queued")
    assert site.status(run_id)["state"] == "cancelled"
    assert not datasets(site.runs)


def test_rows_are_prepared_by_a_job_and_data_by_one_for_later_runs(site: Site, tmp_path: Path) -> None:
    sets = [word for one in (*settings(corpus(tmp_path, 3_000)), "cluster.scheduler=slurm") for word in ("--set", one)]
    spec = str(PROJECT / "tests" / "cli" / "small.yaml")
    queued = site.scaletrain("data", "prepare", spec, "--submit", "--workers", "2", "--json", *sets)["job"]
    assert queued["tasks"] == 2
    ended = site.cluster.wait_for(queued["job_id"], lambda job: job["JobState"] == "COMPLETED")
    assert ended["ExitCode"] == "0:0"
    assert datasets(site.runs)
    assert site.scaletrain("data", "prepare", spec, "--submit", "--json", *sets)["prepared"]
    rows = tmp_path / "rows.jsonl"
    pairs = [("user", "Which number follows {}?"), ("assistant", "The number {}, as always.")]
    messages = [[{"role": role, "content": text.format(row)} for role, text in pairs] for row in range(200)]
    rows.write_text("".join(json.dumps({"messages": each}) + "\n" for each in messages), encoding="utf-8")
    before = datasets(site.runs)
    run_id = site.submit(DONE, *settings(rows, "training.objective=sft"), options=("--prepare", "job"))
    done = site.wait(run_id, lambda now: now["state"] in ("finished", "failed"), "it trains")
    assert (done["state"], site.ends(run_id)) == ("finished", [(0, "done")])
    (read,) = json.loads((site.runs / run_id / "preparation" / "datasets.json").read_text(encoding="utf-8"))["datasets"]
    assert f"datasets/{read['folder']}/dataset.json" in datasets(site.runs).keys() - before.keys()
