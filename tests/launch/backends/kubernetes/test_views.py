"""Views of a run whose volume is not mounted here. kubectl and the pods are stand-ins: kubectl starts the far end here.

The far end finds the files of the run in another folder than the submitter, as pods do on their volume.
"""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from scaletrain_cli import __version__
from scaletrain_cli.errors import ExitCode
from scaletrain_cli.launch.attempts import begin_attempt
from scaletrain_cli.launch.backends.kubernetes.backend import KubernetesBackend
from scaletrain_cli.launch.backends.kubernetes.job_ref import job_ref_of
from scaletrain_cli.launch.backends.kubernetes.pod_output import attempt_start_line
from scaletrain_cli.launch.backends.kubernetes.view_pod import SHARED_SECONDS, view_job
from scaletrain_cli.launch.node.view import _open_view, hold
from scaletrain_cli.rundir.journal import record_event
from scaletrain_cli.rundir.paths import RunDir
from scaletrain_cli.rundir.record import place_documents, read_record
from tests import forked
from tests.cli.command_line import scaletrain
from tests.launch.backends.kubernetes.conftest import (
    SETTINGS,
    condition,
    pod,
    put_cluster,
    put_kubectl,
    put_pods,
    submit_small,
)
from tests.launch.backends.kubernetes.fake_api import FakeApi, Object
from tests.launch.backends.kubernetes.rules import problems
from tests.launch.conftest import PROJECT
from tests.waiting import wait_until

GROUP = "jobset.x-k8s.io"


def long(*rows: Any) -> list[Any]:
    """Mark rows of the same mechanism, of which `make test` runs another one."""
    return [pytest.param(row, marks=pytest.mark.long) for row in rows]


# Notes its words, and becomes the program of a pod here: with the volume of the pods in place of /runs, and without the
# submitter's access to the cluster and runs.
_KUBECTL = f"""#!{sys.executable}
import os, sys
with open(os.environ["NOTED"], "a") as noted:
    print(*sys.argv[1:], file=noted)
words = sys.argv[sys.argv.index("--") + 2 :]
words = [os.environ["VOLUME"] if word == "/runs" else word for word in words]
for name in ("KUBECONFIG", "SCALETRAIN_RUNS"):
    os.environ.pop(name, None)
os.execv(sys.executable, [sys.executable, *words])
"""


@pytest.fixture
def volume(api: FakeApi, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the volume of the pods; kubectl reaches it, and the pod of a view runs as soon as its Job exists."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "volume"
    folder.mkdir()
    put_kubectl(tmp_path / "programs", _KUBECTL)
    monkeypatch.setenv(
        forked.FORKS_PYTHON, "kubernetes.config kubernetes.client.api_client kubernetes.client.configuration"
    )
    monkeypatch.setenv("PYTHONPATH", str(PROJECT))
    monkeypatch.setenv("VOLUME", str(folder))
    monkeypatch.setenv("NOTED", str(tmp_path / "kubectl.words"))
    put = api.put

    def put_with_pod(plural: str, body: Object, group: str = "", namespace: str = "ml") -> Object:
        made = put(plural, body, group, namespace)
        if plural == "jobs" and "scaletrain.dev/view" in made["metadata"].get("labels", {}):
            viewing = pod("view", 0, node="node-a")
            viewing["metadata"] |= made["spec"]["template"]["metadata"]
            viewing["metadata"] |= {"name": f"{made['metadata']['name']}-abcde", "creationTimestamp": stamp_of(0)}
            put("pods", viewing)
        return made

    monkeypatch.setattr(api, "put", put_with_pod)
    put_cluster(api)
    return folder


@pytest.fixture
def run(volume: Path, api: FakeApi, tmp_path: Path) -> RunDir:
    """Submit a run; return its directory on the volume, with an attempt that has trained 40 steps and saved nothing."""
    submit_small("--yes", code=ExitCode.DONE)
    documents = next(body for body in api.all("configmaps"))["data"]
    folder = tmp_path / "documents"
    folder.mkdir()
    for name, text in documents.items():
        (folder / name).write_text(text)
    there, record = place_documents(folder, volume)
    begin_attempt(there, record.spec, scheduler="kubernetes", job_id="jobset/r1-s1", nodes=("node-a", "node-b"))
    lines = [{"step": step, "loss": 5.0 - step / 20, "time": 1e9 + step} for step in range(1, 41)]
    there.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    log = there.attempt(1) / "logs" / "node-a-00000.log"
    log.write_text("of the file on the volume\n")
    return there


def running(api: FakeApi) -> None:
    put_pods(api, pod("r1-s1", 0), pod("r1-s1", 1))


def over(api: FakeApi, kind: str = "Completed") -> None:
    """End the job, with its pods deleted."""
    api.forget("pods")
    api.objects[(GROUP, "jobsets", "ml", "r1-s1")]["status"] = {"conditions": [condition(kind)]}


def words_of_kubectl(tmp_path: Path) -> list[str]:
    return (tmp_path / "kubectl.words").read_text().splitlines()


def stamp_of(seconds_ago: float) -> str:
    """Return a time as the API server writes it."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() - seconds_ago))


def one_line(text: str) -> str:
    return " ".join(text.split())


def test_a_view_runs_in_a_running_pod_and_reads_its_files(
    run: RunDir, api: FakeApi, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(forked.FORKS_PYTHON)  # by real command lines
    running(api)
    seen = subprocess_of("status", "r1", "--json")
    assert seen["code"] == ExitCode.DONE, seen
    status = json.loads(seen["out"])
    assert (status["state"], status["step"], status["attempt"], status["files_seen"]) == ("running", 40, 1, True)
    assert status["job"]["detail"] == "all 2 pods running"  # as this machine has asked the API server
    assert status["run_dir"] == str(run.path)
    (words,) = words_of_kubectl(tmp_path)
    assert words.startswith("--namespace=ml exec --stdin --quiet r1-s1-node-0-0-abcde --container=node -- python")
    assert words.endswith("scaletrain_cli.launch.node.view /runs r1")
    assert not api.all("jobs")  # no pod was made for it


def test_the_output_errors_and_exit_code_of_the_verb_are_passed_on(run: RunDir, api: FakeApi) -> None:
    running(api)
    lines = subprocess_of("logs", "r1")
    assert (lines["code"], "of the file on the volume" in lines["out"]) == (ExitCode.DONE, True), lines
    refused = subprocess_of("logs", "r1", "--attempt", "7")
    assert refused["code"] == ExitCode.USAGE
    assert "attempt 7" in one_line(refused["err"])
    assert "no checkpoints in" in subprocess_of("checkpoint", "list", "r1")["err"]  # that was read


def test_after_the_end_a_small_pod_reads_the_files_for_all_views(run: RunDir, api: FakeApi, tmp_path: Path) -> None:
    over(api)
    seen = subprocess_of("checkpoint", "list", "r1")
    assert (seen["code"], "no checkpoints in" in seen["err"]) == (ExitCode.DONE, True), seen
    assert "starting one that reads its files" in one_line(seen["err"])
    (job,) = api.all("jobs")
    assert job["metadata"]["name"].startswith("r1-s1-view-")
    (viewing,) = api.all("pods")
    viewing["metadata"]["creationTimestamp"] = stamp_of(0)  # on a slow machine too
    again = subprocess_of("status", "r1", "--json")
    assert (json.loads(again["out"])["step"], again["err"]) == (40, "")
    assert api.all("jobs") == [job]
    first, second = words_of_kubectl(tmp_path)
    assert f"{job['metadata']['name']}-abcde" in first
    assert first == second


@pytest.mark.parametrize("hindrance", ["deleted", *long("too old", "of another run", "ended", "on a silent node")])
def test_a_pod_that_cannot_serve_is_left_alone(run: RunDir, api: FakeApi, tmp_path: Path, hindrance: str) -> None:
    over(api)
    assert subprocess_of("status", "r1")["code"] == ExitCode.DONE
    (viewing,) = api.all("pods")
    match hindrance:
        case "too old":
            viewing["metadata"]["creationTimestamp"] = stamp_of(SHARED_SECONDS + 1)
        case "of another run":
            viewing["metadata"]["annotations"]["scaletrain.dev/record"] = "0" * 16
        case "ended":
            viewing["status"]["containerStatuses"][0]["state"] = {"terminated": {"exitCode": 0}}
        case "deleted":
            viewing["metadata"]["deletionTimestamp"] = stamp_of(0)
        case "on a silent node":
            viewing["status"]["conditions"] = [condition("Ready", "False", "NodeNotReady")]
    assert json.loads(subprocess_of("status", "r1", "--json")["out"])["step"] == 40
    assert len(api.all("jobs")) == 2
    first, second = words_of_kubectl(tmp_path)
    assert first != second


def test_a_view_that_fails_deletes_the_pod_that_it_has_made(run: RunDir, api: FakeApi, tmp_path: Path) -> None:
    over(api)
    put_kubectl(tmp_path / "programs", "#!/bin/sh\nexit 1\n")
    assert json.loads(subprocess_of("status", "r1", "--json")["out"])["files_seen"] is False
    ((deleted, options),) = [one for one in api.deletions if one[0].startswith("jobs/")]
    assert deleted.startswith("jobs/r1-s1-view-")
    assert options["propagationPolicy"] == "Background"
    assert not api.all("jobs")


def test_a_pod_for_views_ends_a_time_after_the_last_one_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    holding = threading.Thread(target=hold, args=(0.5, 0.05))
    monkeypatch.setattr("signal.signal", lambda *_: None)  # of this thread
    with _open_view():
        holding.start()
        holding.join(1.5)
        assert holding.is_alive()
    holding.join()


def test_the_pod_of_a_view_can_change_nothing_and_ends_by_itself(run: RunDir, api: FakeApi, tmp_path: Path) -> None:
    here = RunDir(tmp_path / "runs" / "r1")
    record = read_record(here)
    ref = job_ref_of(here, record)
    assert ref is not None
    job = view_job(ref, record, ["node-a"])
    spec = job["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    assert all(mount["readOnly"] for mount in container["volumeMounts"])
    assert [mount["mountPath"] for mount in container["volumeMounts"]] == ["/runs"]
    assert "env" not in container  # no Secret of the run
    assert "nvidia.com/gpu" not in container["resources"]["limits"]
    assert spec["automountServiceAccountToken"] is False
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert container["securityContext"] == {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    assert job["spec"]["activeDeadlineSeconds"] <= 3600
    assert job["spec"]["ttlSecondsAfterFinished"] <= 60
    assert job["metadata"]["labels"]["app.kubernetes.io/managed-by"] == "scaletrain"
    assert "@" in job["metadata"]["annotations"]["scaletrain.dev/viewer"]
    assert "scaletrain.dev/run" not in job["spec"]["template"]["metadata"]["labels"]  # never taken for a pod of the run
    assert len(job["metadata"]["name"]) <= 57
    assert problems([job]) == []


def test_the_pod_of_a_view_is_deleted_after_ctrl_c(run: RunDir, api: FakeApi, tmp_path: Path) -> None:
    over(api)
    put_kubectl(tmp_path / "programs", "#!/bin/sh\ntouch started\nexec sleep 100000\n")
    with (tmp_path / "view").open("wb") as file:
        view = subprocess.Popen([sys.executable, "-m", "scaletrain_cli", "status", "r1"], stdout=file)
    try:
        wait_until(lambda: (tmp_path / "started").exists(), "the session begins")
        view.send_signal(signal.SIGINT)
        assert view.wait() == 130
    finally:
        view.kill()
    assert [name for name, _ in api.deletions if name.startswith("jobs/r1-s1-view-")]
    assert not api.all("jobs")


def test_a_report_of_the_files_on_the_volume_arrives_here(run: RunDir, api: FakeApi, tmp_path: Path) -> None:
    running(api)
    page = tmp_path / "report.html"
    made = subprocess_of("report", "r1", "-o", str(page))
    assert made["code"] == ExitCode.DONE, made
    text = page.read_text()
    assert "at step 40 of 100" in text
    assert "not mounted here" not in text
    assert f"copied to {page}" in one_line(made["err"])
    nowhere = subprocess_of("report", "r1", f"--output={tmp_path}/none/report.html")
    assert nowhere["code"] == ExitCode.USAGE


def test_events_are_those_of_the_pods_and_of_the_submitter(run: RunDir, api: FakeApi) -> None:
    record_event(run, "checkpoint", step=30)
    running(api)
    events = json.loads(subprocess_of("events", "r1", "--json")["out"])["events"]
    assert [event["event"] for event in events if event["event"] in ("submitted", "checkpoint")] == [
        "submitted",
        "checkpoint",
    ]


def test_followed_events_go_on_over_the_end_of_a_pod_each_shown_once(
    run: RunDir, api: FakeApi, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    running(api)
    follower = started("events", "r1", "--follow", "--json", output=tmp_path / "events")

    def shown() -> list[str]:
        lines = (tmp_path / "events").read_text().splitlines()
        return [json.loads(line).get("event", "") for line in lines if line.startswith("{")]

    try:
        wait_until(lambda: "submitted" in shown(), "the first events are shown")
        for kubectl in psutil.Process(follower.pid).children():  # as when the pod ends
            kubectl.kill()
        record_event(run, "checkpoint", step=30)
        wait_until(lambda: "checkpoint" in shown(), "the events after the connection are shown")
        over(api)
        assert follower.wait() == ExitCode.DONE
    finally:
        follower.kill()
    assert shown().count("submitted") == 1
    assert shown().count("checkpoint") == 1


@pytest.mark.long
def test_a_watch_that_begins_in_the_queue_continues_on_the_files(run: RunDir, api: FakeApi, tmp_path: Path) -> None:
    watch = started("watch", "r1", output=tmp_path / "watch")

    def shown() -> str:
        return (tmp_path / "watch").read_text()

    try:
        wait_until(lambda: "step not seen, of 100" in shown(), "the queued run is shown")
        assert not (tmp_path / "kubectl.words").exists()
        running(api)
        wait_until(lambda: "step 40 of 100" in shown(), "the files are read")
        over(api)
        assert watch.wait() == ExitCode.DONE
    finally:
        watch.kill()
    assert "attempt 1 ended without reporting" in shown()  # as its files have it


def test_waiting_for_a_run_ends_with_the_exit_code_of_its_files(run: RunDir, api: FakeApi) -> None:
    over(api, "Failed")
    ended_run = subprocess_of("status", "r1", "--wait", "30s", "--json")
    assert ended_run["code"] == ExitCode.CRASHED, ended_run
    assert json.loads(ended_run["out"])["step"] == 40


@pytest.mark.parametrize(
    "hindrance",
    [
        *("no right to exec", "no kubectl", "another run"),
        *long("no right to Jobs", "another revision", "an image without views"),
    ],
)
def test_what_cannot_be_had_ends_as_the_view_of_the_cluster_and_is_not_seen(
    run: RunDir, api: FakeApi, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hindrance: str
) -> None:
    said = {
        "no right to exec": 'cannot create resource "pods/exec"',
        "no right to Jobs": "for the right to create jobs.batch",
        "no kubectl": "kubectl was not found in PATH",
        "another run": "is another run with the same name",
        "another revision": "has revision 3 of the run",
        "an image without views": "No module named",
    }[hindrance]
    if hindrance == "no right to Jobs":
        over(api)
        api.forbid("create", "jobs", "batch")
    else:
        running(api)
        api.logs["r1-s1-node-0-0-abcde"] = [f"2026-11-21T10:00:00Z {attempt_start_line(1, shared=False)}"]
    if hindrance == "no right to exec":
        refusal = f'pods "p" is forbidden: User "kim" {said} in API group ""'
        put_kubectl(tmp_path / "programs", f"#!/bin/sh\necho 'Error from server (Forbidden): {refusal}' >&2; exit 1\n")
    if hindrance == "an image without views":
        put_kubectl(tmp_path / "programs", "#!/bin/sh\necho '/usr/bin/python: No module named x' >&2; exit 1\n")
    if hindrance == "no kubectl":
        (tmp_path / "programs" / "kubectl").unlink()
        monkeypatch.setenv("PATH", str(tmp_path / "programs"))
    if hindrance == "another run":
        document = json.loads(run.record.read_text())
        run.record.write_text(json.dumps(document | {"wandb_run_id": "other"}))
    if hindrance == "another revision":
        revised = json.loads(run.record.read_text()) | {"schema": "scaletrain.revision/v1", "revision": 3}
        (run.path / "revisions").mkdir()
        (run.path / "revisions" / "0003.json").write_text(json.dumps(revised))
    status = subprocess_of("status", "r1", "--json")
    assert status["code"] == ExitCode.DONE
    found = json.loads(status["out"])
    assert (found["files_seen"], found["step"], found["last_checkpoint_step"]) == (False, None, None)
    assert said in one_line(status["err"]), status["err"]
    assert "Shown is what the cluster reports" in one_line(status["err"])
    text = one_line(subprocess_of("status", "r1")["out"])
    assert "step not seen, of 100" in text
    assert "saved not seen" in text
    listed = subprocess_of("checkpoint", "list", "r1")
    assert "no checkpoints" not in listed["err"]
    assert "not seen" in listed["err"]
    assert json.loads(subprocess_of("checkpoint", "list", "r1", "--json")["out"])["checkpoints"] is None
    verified = subprocess_of("checkpoint", "verify", "r1")
    assert (verified["code"], "valid" in verified["err"]) == (ExitCode.USAGE, False)


def test_a_run_without_the_files_stays_not_seen_after_its_output_was_fetched(run: RunDir, api: FakeApi) -> None:
    """Fetched output is kept in folders of attempts, which are no attempts that this machine sees."""
    running(api)
    api.logs["r1-s1-node-0-0-abcde"] = [
        f"2026-11-21T10:00:00Z {attempt_start_line(1, shared=False)}",
        "2026-11-21T10:00:01Z rank 0: hello",
    ]
    backend = KubernetesBackend()
    here = RunDir(Path("runs/r1").absolute())
    logs = backend.logs(here, read_record(here))
    logs.fetch()
    assert here.attempts() == [1]
    put_kubectl(Path("programs").absolute(), "#!/bin/sh\nexit 1\n")
    assert "Run `scaletrain watch r1` in a pod that mounts it" in one_line(scaletrain("watch", "r1", "--once").out)


def test_a_run_that_waits_for_its_first_pod_is_shown_from_the_cluster_alone(run: RunDir, api: FakeApi) -> None:
    seen = subprocess_of("status", "r1")
    assert "step not seen, of 100" in one_line(seen["out"])
    assert "warning" not in seen["err"]
    assert not api.all("jobs")


@pytest.mark.parametrize("verb", [("watch",), ("events", "--follow")])
def test_following_ends_without_the_volume(volume: Path, api: FakeApi, tmp_path: Path, verb: tuple[str, ...]) -> None:
    kept = [setting for setting in SETTINGS if "runs.claim" not in setting and "nodes" not in setting]
    settings = [*kept, "cluster.nodes=1", "cluster.kubernetes.runs.per_pod=true", "checkpoint.dir=/kept/checkpoints"]
    settings.append("cluster.kubernetes.volumes=[{claim: runs, path: /kept}]")
    submit_small("--yes", settings=settings, code=ExitCode.DONE)
    over(api)
    following = started(*verb, "r1", output=tmp_path / "shown")
    try:
        assert following.wait() == ExitCode.DONE
    finally:
        following.kill()
    assert not api.all("jobs")


@pytest.mark.parametrize("options", [(), *long(("--follow",))])
def test_logs_of_a_run_that_is_over_are_those_of_its_files_where_a_part_was_fetched(
    run: RunDir, api: FakeApi, tmp_path: Path, options: tuple[str, ...]
) -> None:
    fetched = RunDir(tmp_path / "runs" / "r1").attempt(1) / "logs"
    fetched.mkdir(parents=True)
    (fetched / "node-a-00000.log").write_text("the part that was fetched\n")
    over(api)
    shown = subprocess_of("logs", "r1", *options)
    assert "of the file on the volume" in shown["out"], shown


@pytest.mark.long
def test_a_login_node_without_the_volume_sees_files(run: RunDir, api: FakeApi, monkeypatch: pytest.MonkeyPatch) -> None:
    running(api)
    monkeypatch.setenv("SCALETRAIN_ON_LOGIN_NODE", f"{__version__} site")
    status = json.loads(subprocess_of("status", "r1", "--json")["out"])
    assert (status["files_seen"], status["step"]) == (True, 40)


def test_events_of_a_run_that_waits_for_its_next_pods_are_not_shown_as_all_of_them(run: RunDir) -> None:
    shown = subprocess_of("events", "r1")
    assert "were not read" in one_line(shown["err"]), shown


def started(*words: str, output: Path) -> forked.Forked:
    """Start a verb, with its standard output in a file."""
    with output.open("wb") as file:
        return forked.Forked("scaletrain_cli", words, os.environ, stdout=file.fileno(), stderr=2)


def subprocess_of(*words: str) -> dict[str, Any]:
    """Run a verb as a process, whose streams are those of the view."""
    done = forked.scaletrain(*words)
    return {"code": done.returncode, "out": done.stdout, "err": done.stderr}
