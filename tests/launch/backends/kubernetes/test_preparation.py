"""Data are prepared by a Job of CPU pods, and the gang is created only after it."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from scaletrain_cli.errors import ExitCode, UsageError
from scaletrain_cli.launch.backends.kubernetes import preparation
from scaletrain_cli.launch.backends.kubernetes.pod import PREPARATION_MODULE
from scaletrain_cli.launch.backends.kubernetes.pod_output import (
    preparation_end,
    preparation_end_line,
    preparation_sizes_line,
)
from scaletrain_cli.plan.data_size import DataSize
from scaletrain_cli.rundir.paths import RunDir, runs_root
from scaletrain_cli.rundir.record import read_record
from tests.cli.command_line import SMALL, Ended, scaletrain
from tests.forked import Forked, RealProcess
from tests.launch.backends.kubernetes.conftest import IMAGE, SETTINGS, condition, put_cluster
from tests.launch.backends.kubernetes.conftest import submit_small as submit
from tests.launch.backends.kubernetes.fake_api import FakeApi
from tests.launch.backends.kubernetes.rendering import recipe
from tests.launch.backends.kubernetes.schemas import require_valid
from tests.launch.conftest import make_spec
from tests.waiting import wait_until

Object = dict[str, Any]
OWN = (
    "cluster.kubernetes.preparation={cpus: 8, memory: 12GiB, tasks: 3, queue: cpu, node_selector: {pool: cpu},"
    " tolerations: [{key: batch}]}"
)


EPOCHS = ("--set=training.steps=null", "--set=training.epochs=3")


class Controller:
    """Ends the Job as the test says, as soon as it is created: ``prepared``, ``failed``, or '' for not at all."""

    def __init__(self, api: FakeApi) -> None:
        self.api, self.end, self.line = api, "prepared", ""
        self.order: list[str] = []
        self._put = api.put
        api.put = self.put  # type: ignore[method-assign]

    def put(self, plural: str, body: Object, group: str = "", namespace: str = "ml") -> Object:
        name = body["metadata"]["name"]
        if not any(key[1:] == (plural, namespace, name) for key in self.api.objects):
            self.order.append(f"{body.get('kind', plural)} {name}")
        made = self._put(plural, body, group, namespace)
        if plural == "jobs" and group == "batch":
            self.act(made)
        return made

    def act(self, job: Object) -> None:
        if self.end == "prepared":
            job["status"] = {"succeeded": 1, "conditions": [condition("Complete")]}
        elif self.end == "failed":
            job["status"] = {"failed": 1, "conditions": [condition("Failed", reason="PodFailurePolicy")]}
            self._put("pods", pod_of(job, exit_code=2, message=self.line))
        else:
            self._put("pods", pod_of(job))

    @property
    def jobs(self) -> list[Object]:
        return self.api.all("jobs")


def pod_of(job: Object, exit_code: int | None = None, message: str = "") -> Object:
    name = job["metadata"]["name"]
    ended = {"terminated": {"exitCode": exit_code, "reason": "Error", "message": message}}
    state = {"running": {}} if exit_code is None else ended
    return {
        "metadata": {"name": f"{name}-0-abcde", "labels": dict(job["spec"]["template"]["metadata"]["labels"])},
        "spec": {"nodeName": "cpu-1"},
        "status": {
            "phase": "Running" if exit_code is None else "Failed",
            "containerStatuses": [{"name": "node", "state": state}],
        },
    }


@pytest.fixture
def controller(api: FakeApi, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Controller:
    """Set up a cluster, and spend no time between two looks at the Job."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("scaletrain_cli.launch.preparation.reads_prepared_data", lambda *_: True)
    monkeypatch.setattr(preparation, "_LOOK_EVERY_SECONDS", 0.0)
    put_cluster(api)
    return Controller(api)


def interrupt_submit(controller: Controller, monkeypatch: pytest.MonkeyPatch, *more: str) -> Ended:
    """Submit, and end the command while the Job runs."""

    def stop(seconds: float) -> None:
        raise KeyboardInterrupt

    controller.end = ""
    with monkeypatch.context() as patch:
        patch.setattr(preparation, "_pause", stop)
        return submit(*more)


def status() -> dict[str, Any]:
    found: dict[str, Any] = scaletrain("status", "r1", "--json").data
    return found


def test_the_gang_is_created_after_the_job_that_prepares_its_data(controller: Controller) -> None:
    assert "prepared on the nodes' volume by a job of 1 task on CPU nodes" in submit(code=ExitCode.DONE).err
    assert controller.order == ["ConfigMap r1-s1-data-spec", "Job r1-s1-data", "ConfigMap r1-s1-run", "JobSet r1-s1"]
    (job,) = controller.jobs
    texts = next(one for one in controller.api.all("configmaps") if one["metadata"]["name"] == "r1-s1-data-spec")
    assert texts["metadata"]["ownerReferences"][0]["uid"] == job["metadata"]["uid"]
    assert json.loads(texts["data"]["preparation.json"])["spec"]["data"]["source"] == "python-stdlib"
    assert status()["job_id"] == "jobset/r1-s1"
    assert submit().code == ExitCode.DONE  # again: nothing is created
    assert len(controller.order) == 4


def test_a_failed_preparation_creates_no_gang_and_is_explained(controller: Controller) -> None:
    controller.end = "failed"
    controller.line = preparation_end_line(UsageError("/data/web.jsonl:7: not JSON"), None)
    assert "/data/web.jsonl:7: not JSON" in submit(code=ExitCode.USAGE).err
    assert not controller.api.all("jobsets")
    found = status()
    assert found["state"] == "failed"
    assert "the data could not be prepared: /data/web.jsonl:7: not JSON" in found["why"]
    explained = scaletrain("explain", "r1").out
    assert "/data/web.jsonl:7: not JSON" in explained
    assert "scaletrain resume r1" in explained
    controller.end = "prepared"
    scaletrain("resume", "r1", "--yes", code=ExitCode.DONE)
    assert [job["metadata"]["name"] for job in controller.jobs] == ["r1-s1-data", "r1-s1-data2"]
    assert controller.api.all("jobsets")
    assert status()["state"] == "queued"


def test_an_interrupted_submit_resumes_the_same_job(controller: Controller, monkeypatch: pytest.MonkeyPatch) -> None:
    sent = interrupt_submit(controller, monkeypatch)
    assert sent.code == 130
    assert "job/r1-s1-data goes on in the cluster; scaletrain resume r1" in sent.err
    found = status()
    assert (found["state"], found["job_id"]) == ("queued", "job/r1-s1-data")
    assert "prepared by job/r1-s1-data: 1 of 1 pod" in found["why"]
    assert "no GPU is requested meanwhile" in scaletrain("explain", "r1").out
    (job,) = controller.jobs
    controller.end = "prepared"
    controller.act(job)
    assert "the training job does not exist yet" in status()["why"]
    scaletrain("resume", "r1", "--yes", code=ExitCode.DONE)
    assert len(controller.jobs) == 1
    assert [one["metadata"]["name"] for one in controller.api.all("jobsets")] == ["r1-s1"]


def test_a_submitter_that_was_killed_is_resumed_with_the_same_job(controller: Controller) -> None:
    controller.end = ""
    settings = [f"--set={setting}" for setting in SETTINGS]
    process = Forked("scaletrain_cli", ["submit", str(SMALL), "--run-id", "r1", "--yes", *settings], os.environ)
    wait_until(lambda: any("r1-s1-data-0-abcde" in key for key in list(controller.api.objects)), "a pod runs")
    process.kill()
    process.wait()
    assert status()["state"] == "queued"
    assert not controller.api.all("jobsets")
    controller.end = "prepared"
    controller.act(controller.jobs[0])
    assert "the training job does not exist yet" in status()["why"]
    assert scaletrain("resume", "r1", "--yes").code == ExitCode.DONE
    assert len(controller.jobs) == len(controller.api.all("jobsets")) == 1


def test_a_submitter_whose_job_waits_or_ends_says_so(controller: Controller, monkeypatch: pytest.MonkeyPatch) -> None:
    said = "Back-off pulling image"
    seen: list[str] = []

    def next_look(seconds: float) -> None:
        (job,) = controller.jobs
        if not seen:
            (pod,) = controller.api.all("pods")
            waiting = {"waiting": {"reason": "ImagePullBackOff", "message": said}}
            pod["status"] = {"phase": "Pending", "containerStatuses": [{"name": "node", "state": waiting}]}
        elif len(seen) == 1:
            job["spec"]["suspend"] = True
        else:
            job["metadata"]["deletionTimestamp"] = "2026-11-21T10:00:00Z"
        seen.append("")

    controller.end = ""
    monkeypatch.setattr(preparation, "_pause", next_look)
    sent = submit(code=ExitCode.SCHEDULER)
    assert said in sent.err
    assert "job/r1-s1-data waits in a queue of Kueue" in sent.err
    assert "was deleted" in sent.err
    assert not controller.api.all("jobsets")


def test_cancel_ends_it_and_a_resume_prepares_again(controller: Controller, monkeypatch: pytest.MonkeyPatch) -> None:
    interrupt_submit(controller, monkeypatch)
    assert scaletrain("cancel", "r1", "--yes").code == ExitCode.DONE
    assert [name for name, _ in controller.api.deletions] == ["jobs/r1-s1-data"]
    assert status()["state"] == "cancelled"
    controller.api.forget("pods")
    controller.end = "prepared"
    scaletrain("resume", "r1", "--yes", code=ExitCode.DONE)
    assert status()["state"] == "queued"
    assert controller.api.all("jobsets")


def test_rm_deletes_the_job_of_a_failed_preparation(controller: Controller) -> None:
    controller.end = "failed"
    assert submit().code == ExitCode.CRASHED  # without a line that says why
    assert "pod r1-s1-data-0-abcde" in status()["why"]
    controller.api.forget("pods")
    scaletrain("rm", "r1", "--yes", code=ExitCode.DONE)
    assert not controller.jobs
    assert not [one for one in controller.api.all("configmaps") if one["metadata"]["name"].startswith("r1")]


def test_a_dry_run_shows_the_job_and_the_gang(controller: Controller) -> None:
    shown = submit("--output", "yaml")
    kinds = [body["kind"] for body in YAML(typ="safe").load_all(shown.out)]
    assert kinds == ["ConfigMap", "Job", "ConfigMap", "JobSet"]
    assert not controller.order


def test_data_of_later_runs_are_prepared_by_a_job(controller: Controller) -> None:
    settings = [f"--set={setting}" for setting in SETTINGS]
    made = scaletrain("data", "prepare", SMALL, *settings, "--submit", code=ExitCode.DONE)
    assert made.out.strip() == f"job/{controller.jobs[0]['metadata']['name']}"


def test_servers_without_retries_by_index_get_those_of_the_whole_job() -> None:
    spec = recipe("llama-7b-h100", OWN)
    for by_index, key, count in ((True, "backoffLimitPerIndex", 3), (False, "backoffLimit", 9)):
        _, job = preparation.preparation_objects(spec, "a-data", "a", 3, {}, {}, by_index=by_index)
        assert job["spec"][key] == count
        assert len({"backoffLimit", "backoffLimitPerIndex"} & job["spec"].keys()) == 1


def test_a_job_is_kept_until_the_submitter_has_seen_its_end() -> None:
    """With a time to live of 0 it was gone at the next look, and taken for one that somebody had deleted."""
    spec = recipe("llama-7b-h100", OWN, "cluster.kubernetes.ttl_seconds_after_finished=0")
    _, job = preparation.preparation_objects(spec, "a-data", "a", 3, {}, {})
    assert job["spec"]["ttlSecondsAfterFinished"] == preparation._SILENT_SECONDS


@pytest.mark.parametrize("settings", [(), (OWN, "cluster.kubernetes.runs={claim: r, sub_path: a}")])
def test_the_job_is_valid_and_takes_no_gpu(settings: tuple[str, ...]) -> None:
    spec = recipe("llama-7b-h100", *settings)
    texts, job = preparation.preparation_objects(spec, "a-data", "a", 3, {}, {})
    for one in (texts, job):
        require_valid(one)
    (container,) = job["spec"]["template"]["spec"]["containers"]
    assert container["resources"]["requests"].keys() == {"cpu", "memory"}
    pod = job["spec"]["template"]["spec"]
    assert [each["key"] for each in pod.get("tolerations", ())] == (["batch"] if settings else [])
    assert pod.get("nodeSelector", {}) == ({"pool": "cpu"} if settings else {})
    assert ("kueue.x-k8s.io/queue-name" in job["metadata"]["labels"]) == bool(settings)


def run_pod(folder: Path, source: Path, kind: type[Forked | RealProcess]) -> tuple[int, list[str]]:
    """Run the program of a pod for a small text; return its exit code and its output."""
    sizes = ("data.tokenizer.vocab_size=300", "model.vocab_size=300", f"cluster.kubernetes.image={IMAGE}")
    spec = make_spec(f"data.source={source}", *sizes, "cluster.scheduler=kubernetes")
    document = {"spec": spec.model_dump(mode="json", by_alias=True), "hub": {}}
    (folder / "preparation.json").write_text(json.dumps(document))
    words = ("--documents", str(folder), "--runs-root", str(folder / "runs"), "--workers", "1")
    pod = kind(PREPARATION_MODULE, words, os.environ)
    output = pod.communicate()
    return pod.wait(), output.splitlines()


def test_a_pod_prepares_the_data_and_says_why_it_cannot(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("some words and others\n" * 200)
    code, output = run_pod(tmp_path, tmp_path / "text.txt", RealProcess)
    assert code == 0, output
    (dataset,) = (tmp_path / "runs" / "datasets").glob("*/dataset.json")
    tokens = json.loads(dataset.read_text())["train_tokens"]
    counted = preparation_end(output)
    assert counted["sizes"]["source"][0] == (tokens - 1) // 8
    (tmp_path / "text.jsonl").write_text('{"text": "some words"}\n{"text": 1}\n')
    code, output = run_pod(tmp_path, tmp_path / "text.jsonl", Forked)
    assert code == ExitCode.USAGE, output
    said = preparation_end(output)
    assert said is not None
    error = preparation.error_of(said)
    assert error.exit_code == ExitCode.USAGE
    assert "text.jsonl:2" in str(error)
    assert error.reason is not None


def test_epochs_are_counted_by_the_pods_that_prepare_the_data(
    controller: Controller, monkeypatch: pytest.MonkeyPatch
) -> None:
    act = controller.act

    def count(job: Object) -> None:
        act(job)
        if job["metadata"]["name"].startswith("prepare-"):
            controller.api.put("pods", pod_of(job, exit_code=0))
            line = preparation_sizes_line({"source": DataSize(1000, 100, 8000, exact=True)})
            controller.api.logs[f"{job['metadata']['name']}-0-abcde"] = [f"2026-01-01T00:00:00Z {line}"]

    monkeypatch.setattr(controller, "act", count)
    sent = submit(*EPOCHS, code=ExitCode.DONE)
    assert "3 epochs of 1,000 sequences = 188 steps of 16" in sent.err
    assert "counted in steps before the run is planned" in sent.err
    first, *_, last = controller.order
    assert first.startswith("ConfigMap prepare-")
    assert last == "JobSet r1-s1"
    ((deleted, _),) = controller.api.deletions
    assert deleted.startswith("jobs/prepare-")
    assert read_record(RunDir(runs_root() / "r1")).spec.total_steps == 188


def test_epochs_whose_preparation_is_not_seen_to_its_end_create_no_run(
    controller: Controller, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "goes on in the cluster" in interrupt_submit(controller, monkeypatch, *EPOCHS).err
    controller.end = "prepared"
    assert "the output of its pods, which has their size, cannot be read" in submit(*EPOCHS).err
    controller.end = "failed"
    controller.line = preparation_end_line(UsageError("/data/web.jsonl:7: not JSON"), None)
    assert "/data/web.jsonl:7: not JSON" in submit(*EPOCHS, code=ExitCode.USAGE).err
    assert not (runs_root() / "r1").exists()
