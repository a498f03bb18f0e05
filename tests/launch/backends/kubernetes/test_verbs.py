"""The commands against a fake server: the same output on Kubernetes as on other back ends."""

import json
import shutil
import sys
from pathlib import Path

import pytest

from scaletrain_cli.errors import ExitCode
from scaletrain_cli.launch.backends.kubernetes.pod_output import attempt_start_line
from scaletrain_cli.worker.progress import progress_line
from tests.cli.command_line import scaletrain
from tests.launch.backends.kubernetes.conftest import condition, ended, pod, put_cluster, put_kubectl, put_pods
from tests.launch.backends.kubernetes.conftest import submit_small as submit
from tests.launch.backends.kubernetes.fake_api import FakeApi, write_kubeconfig
from tests.launch.conftest import PROJECT, MakeRun
from tests.launch.working_tree import WorkingTree

GROUP = "jobset.x-k8s.io"


@pytest.fixture
def ready(api: FakeApi, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeApi:
    """Set up a cluster with enough resources for the run, and a runs root."""
    monkeypatch.chdir(tmp_path)
    put_cluster(api)
    return api


def test_a_run_is_submitted_shown_read_cancelled_and_resumed(ready: FakeApi) -> None:
    assert submit("--json", code=ExitCode.DONE).data["job_id"] == "jobset/r1-s1"
    put_pods(ready, pod("r1-s1", 0), pod("r1-s1", 1))
    ready.logs["r1-s1-node-0-0-abcde"] = [
        f"2026-11-21T10:00:00Z {attempt_start_line(1, shared=False)}",
        "2026-11-21T10:00:01Z rank 0: step      7/100  loss 3.1000  x",
        f"2026-11-21T10:00:02Z rank 0: {progress_line(7, 100, 3.1)}",
        f"2026-11-21T10:00:01Z rank 0: {progress_line(7, 100, 3.1)}",
    ]
    status = scaletrain("status", "r1", "--json").data
    assert (status["state"], status["step"], status["why"]) == ("running", 7, "all 2 pods running")
    assert "step      7/100" in scaletrain("logs", "r1").out
    said = scaletrain("cancel", "r1", "--yes", code=ExitCode.DONE).err
    assert "asked to save and stop; `scaletrain status r1` shows when its pods are gone" in " ".join(said.split())
    assert "still active" in scaletrain("resume", "r1", "--yes", code=ExitCode.USAGE).err
    ready.forget("jobsets", "pods")
    assert scaletrain("status", "r1", "--json").data["state"] == "cancelled"
    assert "step      7/100" in scaletrain("logs", "r1", "--rank", "0").out  # of deleted pods
    assert scaletrain("resume", "r1", "--yes", "--json", code=ExitCode.DONE).data["job_id"] == "jobset/r1-s2"
    assert scaletrain("status", "r1", "--json").data["state"] == "queued"


def test_without_the_volume_each_verb_that_shows_a_run_says_what_cannot_be_had(ready: FakeApi, tmp_path: Path) -> None:
    """The figures that the pods print are shown; the rest is in the run directory, which only pods see."""
    submit("--yes")
    put_pods(ready, pod("r1-s1", 0), pod("r1-s1", 1))
    ready.logs["r1-s1-node-0-0-abcde"] = [f"2026-11-21T10:00:02Z rank 0: {progress_line(7, 100, 3.1)}"]
    watched = scaletrain("watch", "r1", "--once")
    said = " ".join(watched.out.split())
    assert "7 of 100 steps" in said
    assert "loss 3.1000" in said
    assert "Run `scaletrain watch r1` in a pod that mounts it." in said
    seen = scaletrain("watch", "r1", "--once", "--json").data
    assert (seen["state"], seen["step"], seen["findings"], seen["hardware"]) == ("running", 7, [], None)

    diagnosed = scaletrain("diagnose", "r1", code=ExitCode.DONE)
    assert "no step to diagnose" in diagnosed.out
    assert "`scaletrain diagnose r1` in a pod that mounts it" in " ".join(diagnosed.out.split())
    answer = scaletrain("diagnose", "r1", "--json").data
    assert (answer["findings"], [each["code"] for each in answer["not_concluded"]]) == ([], ["diagnosis.elsewhere"])

    refused = scaletrain("profile", "r1", "--json", code=ExitCode.USAGE)
    assert refused.data["error"]["reason"]["code"] == "launch.profile-unmounted"

    page = tmp_path / "report.html"
    assert scaletrain("report", "r1", "-o", page).code == ExitCode.DONE
    (reported,) = scaletrain("report", "r1", "--json").data["runs"]
    assert [each["code"] for each in reported["missing"]] == ["report.elsewhere"]
    assert reported["missing"][0]["text"] in page.read_text()
    assert "no findings" not in page.read_text().lower()


def test_a_preflight_that_fails_leaves_no_run(ready: FakeApi, tmp_path: Path) -> None:
    refused = submit("--set", "cluster.kubernetes.pod_priority=none-such", "--yes", code=ExitCode.SCHEDULER)
    assert "there is no such PriorityClass" in refused.err
    assert not list(tmp_path.glob("runs/*"))
    assert not ready.all("jobsets")


def test_a_resume_is_checked_with_the_kept_code_instead_of_the_working_tree(ready: FakeApi, tree: WorkingTree) -> None:
    submit("--yes", "--set", f"code.path={json.dumps(str(tree.folder))}", code=ExitCode.DONE)
    ready.objects[(GROUP, "jobsets", "ml", "r1-s1")]["status"] = {"conditions": [condition("Failed")]}
    shutil.rmtree(tree.folder)
    scaletrain("resume", "r1", "--yes", code=ExitCode.DONE)


def test_the_confirmation_shows_the_job_its_place_and_possible_start(ready: FakeApi) -> None:
    shown = [" ".join(row.split()) for row in submit("--yes").err.splitlines()]
    assert "Job r1: 2 nodes × 2 CPU processes = 4 on Kubernetes, namespace ml" in shown
    assert "submitted as objects for the API server; --dry-run prints it" in shown
    assert any(row.startswith("Start unknown: there is no queue: the gang of 2 pods starts once") for row in shown)


def test_lines_of_a_pod_before_any_attempt_are_shown(ready: FakeApi) -> None:
    submit("--yes")
    put_pods(ready, ended("r1-s1", 0, 1))
    ready.logs["r1-s1-node-0-0-abcde"] = ["2026-11-21T10:00:00Z No module named scaletrain_cli"]
    shown = scaletrain("logs", "r1")
    assert "No module named scaletrain_cli" in shown.out
    assert "before the attempt started" in shown.err
    scaletrain("status", "r1")
    assert "No module" in scaletrain("logs", "r1").out


def test_following_stops_when_the_run_has_ended(ready: FakeApi) -> None:
    submit("--yes")
    put_pods(ready, ended("r1-s1", 0, 0), ended("r1-s1", 1, 0))
    ready.objects[(GROUP, "jobsets", "ml", "r1-s1")]["status"] = {"conditions": [condition("Completed")]}
    begins = f"2026-11-21T10:00:00Z {attempt_start_line(1, shared=False)}"
    ready.logs["r1-s1-node-0-0-abcde"] = [begins, "2026-11-21T10:00:01Z rank 0: done"]
    assert "done" in scaletrain("logs", "r1", "--follow", "--rank", "0").out
    assert scaletrain("status", "r1", "--wait", "5s").code == ExitCode.DONE


@pytest.mark.parametrize("more", [(), ("--json",)])
def test_following_shows_pods_that_end_before_their_attempt(ready: FakeApi, more: tuple[str, ...]) -> None:
    submit("--yes")
    put_pods(ready, ended("r1-s1", 0, 1))
    ready.logs["r1-s1-node-0-0-abcde"] = ["2026-11-21T10:00:00Z No module named scaletrain_cli"]
    ready.objects[(GROUP, "jobsets", "ml", "r1-s1")]["status"] = {"conditions": [condition("Failed")]}
    assert "No module named scaletrain_cli" in scaletrain("logs", "r1", "--follow", *more, code=ExitCode.DONE).out


def test_a_resume_reports_checkpoints_on_an_unmounted_volume_as_unknown(ready: FakeApi) -> None:
    submit("--yes")
    put_pods(ready, ended("r1-s1", 0, 1))
    ready.logs["r1-s1-node-0-0-abcde"] = [f"2026-11-21T10:00:00Z rank 0: {progress_line(84, 100, 2.5)}"]
    ready.objects[(GROUP, "jobsets", "ml", "r1-s1")]["status"] = {"conditions": [condition("Failed")]}
    shown = scaletrain("resume", "r1", "--dry-run")
    said = " ".join(shown.err.split())
    assert "from the start" not in said
    assert "on the pods' volume, which is not visible here; its pods last printed step 84" in said
    assert scaletrain("resume", "r1", "--dry-run", "--json").data["checkpoints_unseen"] is True


def test_fetched_logs_are_shown_if_the_cluster_does_not_answer(ready: FakeApi) -> None:
    submit("--yes")
    put_pods(ready, pod("r1-s1", 0))
    begins = f"2026-11-21T10:00:00Z {attempt_start_line(1, shared=False)}"
    ready.logs["r1-s1-node-0-0-abcde"] = [begins, "2026-11-21T10:00:01Z rank 0: kept"]
    scaletrain("logs", "r1")
    ready.forbid("list", "pods")
    shown = scaletrain("logs", "r1")
    assert "kept" in shown.out
    assert "the right to list pods" in shown.err


def test_doctor_checks_the_configured_cluster(ready: FakeApi, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def kubernetes() -> dict[str, str]:
        return next(check for check in scaletrain("doctor", "--json").data["checks"] if check["name"] == "kubernetes")

    assert (kubernetes()["state"], "v1.36.2" in kubernetes()["found"]) == ("ok", True)
    (tmp_path / "broken").write_text("nothing: here")
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "broken"))
    assert kubernetes()["state"] == "warn"
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none-such"))
    assert kubernetes()["state"] == "none"


def test_cancel_with_force_deletes_only_the_pods_of_a_dead_node(ready: FakeApi) -> None:
    submit()
    dead = pod("r1-s1", 0, node="n0", metadata={"deletionTimestamp": "2026-11-21T10:00:00Z"})
    put_pods(ready, dead, pod("r1-s1", 1, node="n1"))
    well = {"conditions": [condition("Ready")]}
    ready.put("nodes", {"metadata": {"name": "n1"}, "status": well}, namespace="")
    assert "node n0 is unreachable" in scaletrain("status", "r1").out.replace("\n", " ")
    ended = scaletrain("cancel", "r1", "--yes", "--force", code=ExitCode.DONE)
    assert f"removed {dead['metadata']['name']}" in ended.err
    assert [path.rpartition("/")[2] for path, _ in ready.deletions] == ["r1-s1", dead["metadata"]["name"]]
    assert ready.deletions[1][1]["gracePeriodSeconds"] == 0
    assert "pods-force-deleted" in scaletrain("events", "r1", "--json").out


def test_force_is_refused_for_other_back_ends(make_run: MakeRun) -> None:
    ended = scaletrain("cancel", make_run().run.run_id, "--yes", "--force", code=ExitCode.USAGE)
    assert "--force has no effect on this machine" in ended.err


def test_json_has_the_code_of_every_problem_of_a_refused_submission(ready: FakeApi) -> None:
    error = submit("--set", "cluster.kubernetes.queue=none", "--set", "cluster.kubernetes.pod_priority=none", "--json")
    assert error.code == ExitCode.SCHEDULER
    assert error.data["error"]["reason"]["code"] == "kubernetes.preflight-problems"
    codes = {problem["key"]: problem["reason"]["code"] for problem in error.data["error"]["problems"]}
    missing = {"cluster.kubernetes.queue", "cluster.kubernetes.pod_priority"}
    assert {key for key, code in codes.items() if code == "kubernetes.object-missing"} >= missing


def test_json_has_the_code_of_every_note_and_of_the_start(ready: FakeApi) -> None:
    ready.forbid("get", "secrets")
    answer = submit("--yes", "--json", "--set", "cluster.kubernetes.pull_secrets=[registry]").data
    codes = [note["code"] for note in answer["note_reasons"]]
    assert len(codes) == len(answer["notes"])
    assert "kubernetes.secrets-unreadable" in codes
    assert answer["start"]["reason"]["code"] == "kubernetes.start-no-queue"


@pytest.mark.parametrize(
    ("verb", "code"),
    [("status", "kubernetes.no-answer-before"), ("explain", "kubernetes.no-answer")],  # status asks for the files first
)
def test_json_has_the_code_of_an_unreachable_server(
    ready: FakeApi, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, verb: str, code: str
) -> None:
    submit("--yes")
    monkeypatch.setenv("KUBECONFIG", str(write_kubeconfig(tmp_path / "away", "http://127.0.0.1:9", "test")))
    text = json.dumps(scaletrain(verb, "r1", "--json").data)
    assert f'"code": "{code}"' in text


_KUBECTL = """#!/bin/sh
# Stands in for kubectl: it notes its words, and runs the rest of them here.
echo "$@" > kubectl.words
while [ "$1" != -- ]; do shift; done
shift 2
exec "$PYTHON" "$@"
"""


def test_a_session_is_started_by_kubectl(ready: FakeApi, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """kubectl and the pod are stand-ins: this shows the words, and that the refusal of the pod's end arrives."""
    submit("--yes")
    put_pods(ready, pod("r1-s1", 0), pod("r1-s1", 1))
    put_kubectl(tmp_path / "programs", _KUBECTL)
    monkeypatch.setenv("PYTHON", sys.executable)
    monkeypatch.setenv("PYTHONPATH", str(PROJECT))
    refused = scaletrain("exec", "r1", "--node", "1", "--", "true")
    assert (refused.code, "no attempt of r1 runs on node 1 now" in refused.err) == (ExitCode.USAGE, True), refused.err
    words = (tmp_path / "kubectl.words").read_text().split()
    assert words[:4] == ["--namespace=ml", "exec", "--stdin", "--quiet"]
    assert words[4].startswith("r1-s1-node-0-1")
    assert words[5:8] == ["--container=node", "--", "python"]
    assert words[-4:] == ["scaletrain_cli.launch.node.command", "/runs/r1", "--node-rank", "1"]
    ready.forget("pods")
    assert "does not run" in scaletrain("exec", "r1", "--", "true", code=ExitCode.USAGE).err
