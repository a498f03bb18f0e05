"""The back end of docs/extending.md, installed by its entry point alone, through the commands of the command line."""

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

from tests.extending.installed import PROJECT, Cli
from tests.forked import scaletrain
from tests.tiny_program import settings
from tests.waiting import wait_until

SPEC = PROJECT / "tests" / "cli" / "small.yaml"


class ToyCli(Cli):
    """The command line with a cluster that has one slot; ``spec`` are the arguments of a run on it."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, "A back end")
        clusters = folder / "clusters.yaml"
        clusters.write_text(f"clusters:\n  here: {{scheduler: toy, toy: {{folder: {folder}/queue, slots: 1}}}}\n")
        self.environment["SCALETRAIN_CLUSTERS"] = str(clusters)
        sets = settings(self.site, steps=4)
        self.spec = [str(SPEC), "--cluster", "here", *(word for one in sets for word in ("--set", one))]


@pytest.fixture(scope="module")
def cli(tmp_path_factory: pytest.TempPathFactory) -> ToyCli:
    return ToyCli(tmp_path_factory.mktemp("toy"))


def test_the_section_of_a_back_end_is_validated_with_spec_lines_and_is_in_the_schema(cli: ToyCli) -> None:
    cli("validate", *cli.spec)
    wrong = cli("validate", *cli.spec, "--set", "cluster.toy.slot=3", "--set", "cluster.toy.slots=0", code=2)
    assert "cluster.toy.slot" in wrong
    assert "Did you mean slots?" in wrong
    assert "cluster.toy.slots" in wrong
    assert "must be an absolute path" in cli("validate", *cli.spec, "--set", "cluster.toy.folder=queue", code=2)
    assert "must be 1 with scheduler: toy" in cli("validate", *cli.spec, "--set", "cluster.nodes=2", code=2)
    unknown = cli("validate", *cli.spec, "--set", "cluster.scheduler=toi", code=2)
    assert "Did you mean toy?" in unknown
    cluster = json.loads(cli("schema"))["$defs"]["ClusterSpec"]["properties"]
    assert cluster["scheduler"]["enum"] == ["local", "slurm", "kubernetes", "toy"]
    assert "jobs that run at once" in json.dumps(cluster["toy"])


def test_doctor_and_the_cluster_view_show_a_back_end_of_another_package(cli: ToyCli) -> None:
    checks = {check["name"]: check for check in cli.json("doctor")["checks"]}
    assert checks["toy"]["found"] == "jobs are processes of this machine"
    view = cli.json("status", "--cluster", "here")
    assert (view["scheduler"], view["nodes"]) == (
        "toy",
        [{"state": "running", "count": 0}, {"state": "free", "count": 1}],
    )


def test_a_run_is_submitted_once_runs_to_its_end_and_is_shown_by_every_verb(cli: ToyCli) -> None:
    assert "toy_queue.slot" in cli("submit", *cli.spec, "--dry-run")
    submitted = cli.json("submit", *cli.spec, "--run-id", "first", "--yes")
    assert submitted["start"]["reason"] == {"code": "toy.slot-free", "params": {}}
    again = cli.json("submit", *cli.spec, "--run-id", "first", "--yes")
    assert (submitted["scheduler"], submitted["job_id"], again["job_id"]) == ("toy", "1", "1")
    ended = cli.json("status", "first", "--wait", "1h")
    assert (ended["state"], ended["step"], ended["scheduler"]) == ("finished", 4, "toy")
    assert "finished at step 4" in cli("logs", "first")
    assert cli.json("explain", "first")["state"] == "finished"
    assert [run["run_id"] for run in cli.json("list")["runs"]] == ["first"]


def test_a_submission_that_failed_is_submitted_under_the_same_id(cli: ToyCli) -> None:
    folder = cli.runs.parent / "later"
    folder.write_text("")  # a file where the queue needs a folder
    later = ["submit", *cli.spec, "--run-id", "later", "--set", f"cluster.toy.folder={folder}", "--yes"]
    cli(*later, code=1)
    folder.unlink()
    assert re.search(r"^submitted: job 1 in", cli(*later), re.M)
    assert "already submitted: job 1" in cli(*later)
    assert cli.json("status", "later", "--wait", "1h")["state"] == "finished"


def test_a_run_waits_for_a_slot_and_a_cancelled_one_is_saved_and_resumed(cli: ToyCli) -> None:
    slow = [*cli.spec, "--set", "training.steps=1000000", "--set", "env.STEP_SECONDS='0.05'"]
    cli("submit", *slow, "--run-id", "slow", "--yes")
    wait_for_event(cli, "slow", "started")
    cli("submit", *cli.spec, "--run-id", "behind", "--yes")
    queued = cli.json("status", "behind")
    assert (queued["state"], queued["why"], queued["code"]) == ("queued", "the job waits for a slot", "toy.waiting")
    (finding,) = cli.json("explain", "behind")["findings"]
    assert (finding["code"], finding["params"]) == ("toy.queue-full", {"job": queued["job_id"], "slots": 1})
    assert finding["headline"] == f"job {queued['job_id']} waits: all slots are in use (1)"
    assert "cluster.toy.slots" in finding["actions"][0]
    assert [evidence["code"] for evidence in finding["evidence"]] == ["toy.queue"]
    assert "--force has no effect on the toy queue" in cli("cancel", "slow", "--force", "--yes", code=2)
    assert cli.json("cancel", "behind", "--yes")["cancelled"]
    assert cli.json("status", "behind", "--wait", "1h", code=1)["state"] == "cancelled"
    cli("cancel", "slow", "--yes")
    saved = cli.json("status", "slow", "--wait", "1h", code=75)
    assert (saved["state"], saved["last_checkpoint_step"]) == ("cancelled", saved["step"])
    resumed = cli.json("resume", "slow", "--yes")
    assert resumed["job_id"] != saved["job_id"]
    assert wait_for_event(cli, "slow", "resumed")["step"] == saved["step"]
    cli("cancel", "slow", "--yes")
    cli("status", "slow", "--wait", "1h", code=75)


def test_a_sweep_is_limited_by_the_slots(cli: ToyCli) -> None:
    assert "set cluster.toy.slots instead" in cli(
        "submit", *cli.spec, "--sweep", "training.seed=1,2", "--max-concurrent", "1", "--yes", code=2
    )
    cli("submit", *cli.spec, "--sweep", "training.seed=1,2", "--run-id", "s", "--yes")
    states = cli.json("status", "s", "--wait", "1h")["states"]
    assert states == {"finished": 2}


def test_a_run_can_be_shown_where_the_package_is_not_installed(cli: ToyCli) -> None:
    cli("submit", *cli.spec, "--run-id", "shown", "--yes")
    done = scaletrain("list", "--json", environment={**cli.environment, "PYTHONPATH": str(PROJECT)})
    assert done.returncode == 0, done.stdout + done.stderr
    assert "shown" in {run["run_id"] for run in json.loads(done.stdout)["runs"]}
    cli("status", "shown", "--wait", "1h")


def test_an_exception_in_a_back_end_makes_a_state_unknown_and_disturbs_no_list(cli: ToyCli) -> None:
    folder = cli.runs.parent / "damaged"
    sets = [f"cluster.toy.folder={folder}", "training.steps=1000000", "env.STEP_SECONDS='0.05'"]
    cli("submit", *cli.spec, *(word for one in sets for word in ("--set", one)), "--run-id", "odd", "--yes")
    (folder / "2.json").write_text("{")
    rows = {run["run_id"]: run for run in cli.json("list")["runs"]}
    assert (rows["odd"]["job"]["state"], rows["odd"]["job"]["code"]) == ("unknown", "plugin.failed")
    assert "the back end toy of the package toy-queue failed: JSONDecodeError" in rows["odd"]["job"]["detail"]
    (folder / "2.json").unlink()
    cli("cancel", "odd", "--yes")
    cli("status", "odd", "--wait", "1h", code=75)


def test_an_entry_point_that_cannot_be_loaded_is_one_clear_error(cli: ToyCli, tmp_path: Path) -> None:
    metadata = tmp_path / "broken-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: broken\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[scaletrain.backends]\nbroken = no_such_module:TRAITS\n")
    environment = {**cli.environment, "PYTHONPATH": f"{tmp_path}{os.pathsep}{PROJECT}"}
    done = scaletrain("validate", str(SPEC), "--set", "cluster.scheduler=broken", environment=environment)
    assert done.returncode == 2
    assert "the back end broken of the package broken cannot be loaded" in " ".join(done.stderr.split())
    assert "Update or uninstall broken." in " ".join(done.stderr.split())
    done = scaletrain("doctor", "--json", environment=environment)
    checks = {check["name"]: check for check in json.loads(done.stdout)["checks"]}
    assert checks["broken"]["state"] == "warn"
    assert "no_such_module" in checks["broken"]["advice"]


def wait_for_event(cli: ToyCli, run: str, name: str) -> Any:
    def found() -> list[Any]:
        events = [json.loads(line) for line in (cli.runs / run / "events.jsonl").read_text().splitlines()]
        return [event for event in events if event["event"] == name]

    wait_until(found, f"the event {name}")
    return found()[-1]
