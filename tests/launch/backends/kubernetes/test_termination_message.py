"""The termination message of a pod: what the agent writes, and what `status` and `explain` read without the volume."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from scaletrain_cli.errors import ScaletrainError
from scaletrain_cli.launch.backends.kubernetes import pod_agent
from scaletrain_cli.launch.backends.kubernetes.backend import KubernetesBackend
from scaletrain_cli.launch.backends.kubernetes.conditions import steps_reported
from scaletrain_cli.launch.backends.kubernetes.pod_output import (
    PodEnd,
    read_termination_message,
    termination_text,
    write_termination_message,
)
from scaletrain_cli.launch.explain import explain
from scaletrain_cli.launch.status import run_status
from scaletrain_cli.launch.submit import submit_run
from scaletrain_cli.reasons import Reason
from scaletrain_cli.rundir.record import documents_of
from tests.launch.backends.kubernetes.conftest import condition, ended
from tests.launch.backends.kubernetes.fake_api import FakeApi
from tests.launch.backends.kubernetes.pods import Gang, put_documents
from tests.launch.conftest import MadeRun, MakeRun

FULL = Reason("kubernetes.volume-full", {"said": "No space left on device"})
CRASH = PodEnd(93, FULL, attempt=2, step=120, checkpoint_step=100, requeue=False)
MOST_BYTES = 4096


def test_a_message_is_read_as_it_was_written() -> None:
    found = read_termination_message(termination_text(CRASH, "gpu-3"))
    assert (found.end, found.code, found.node) == (CRASH, FULL.code, "gpu-3")


@pytest.mark.parametrize("said", ["x" * 10_000, "ä" * 10_000, "\U0001f600" * 10_000, '"\\' * 5_000, "\x00" * 10_000])
def test_a_long_reason_fits_into_4096_bytes_with_its_code(said: str) -> None:
    text = termination_text(PodEnd(1, Reason("kubernetes.volume-full", {"said": said}), step=7), "gpu-3")
    assert len(text.encode()) <= MOST_BYTES
    found = read_termination_message(text)
    assert (found.code, found.end.exit_code, found.end.step) == ("kubernetes.volume-full", 1, 7)


def test_a_reason_that_fits_without_its_text_keeps_its_parameters() -> None:
    long = Reason("kubernetes.volume-full", {"said": "x" * 3000})
    found = read_termination_message(termination_text(PodEnd(1, long), "gpu-3"))
    assert found.end.reason == long


@pytest.mark.parametrize(
    "text",
    [
        "",
        "Traceback: boom",
        "{",
        "[1]",
        "{}",
        '{"scaletrain": "attempt-end", "exit_code": 1}',
        '{"scaletrain": "pod-end"}',
    ],
)
def test_any_other_text_is_no_message(text: str) -> None:
    assert read_termination_message(text) is None


def test_nothing_is_written_outside_a_pod(tmp_path: Path) -> None:
    write_termination_message(tmp_path / "none", CRASH, "gpu-3")
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def end_with_a_secret(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[], dict[str, Any]]:
    """Return a function that ends a pod with a secret in its reason, and returns the termination message."""
    log = tmp_path / "termination"
    log.touch()
    given = {"SCALETRAIN_WORKLOAD": "jobset/x", "SCALETRAIN_NODE_RANK": "0", "SCALETRAIN_NODE_NAME": "n"}
    given |= {"SCALETRAIN_POD": "x-0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", "MY_LOGIN": "hush-hush-0123"}
    for name, value in given.items():
        monkeypatch.setenv(name, value)

    def fail(options: object) -> None:
        raise ScaletrainError(Reason("kubernetes.volume-full", {"said": "login with hush-hush-0123"}))

    monkeypatch.setattr(pod_agent, "run_pod", fail)
    monkeypatch.setattr(pod_agent, "AGENT_SIGNALS", ())
    monkeypatch.setattr(pod_agent, "leave_current_folder", lambda: None)
    monkeypatch.setattr(pod_agent, "set_up_logging", lambda name: None)

    def end() -> dict[str, Any]:
        words = ("--documents", tmp_path / "documents", "--runs-root", tmp_path, "--termination-log", log)
        assert pod_agent.main(list(map(str, words))) == 1
        return dict(json.loads(log.read_text()))

    return end


@pytest.mark.parametrize("more", [(), ("secret_env=[MY_LOGIN]",)])
def test_the_message_of_a_pod_hides_the_secrets_that_the_spec_names(
    make_run: MakeRun, end_with_a_secret: Callable[[], dict[str, Any]], tmp_path: Path, more: tuple[str, ...]
) -> None:
    """MY_LOGIN does not have the name of a secret, and its value not the form of one."""
    made = make_run("cluster.scheduler=kubernetes", "cluster.kubernetes.secrets.MY_LOGIN={secret: a, key: b}", *more)
    put_documents(documents_of(made.run, made.record), tmp_path / "documents")
    written = end_with_a_secret()
    assert written["params"] == {"said": "login with (not shown)"}
    assert "hush" not in json.dumps(written)


@pytest.mark.parametrize("record", [None, "{", '{"schema": "scaletrain.run/v1", "spec": {"secret_env": 1}}'])
def test_the_message_of_a_pod_without_a_record_has_only_the_code(
    end_with_a_secret: Callable[[], dict[str, Any]], tmp_path: Path, record: str | None
) -> None:
    if record is not None:
        (tmp_path / "documents").mkdir()
        (tmp_path / "documents" / "run.json").write_text(record)
    written = end_with_a_secret()
    assert written["code"] == "kubernetes.volume-full"
    assert not {"text", "params"} & written.keys()


def test_every_pod_writes_how_its_gang_ended(make_run: MakeRun, start_gang: Callable[..., Gang]) -> None:
    settings = ("cluster.scheduler=kubernetes", "cluster.nodes=2", "restarts.crash=0")
    made = make_run(*settings, die={"*:2": 7}, checkpoint_every=1, steps=200)
    pods = start_gang(made)
    assert pods.wait() == [93, 93]
    for number in (0, 1):
        written = json.loads(pods.termination_log(number).read_text())
        assert (written["exit_code"], written["requeue"], written["attempt"]) == (93, False, 1)
        assert written["code"] == "launch.attempt-ended-decided"
        assert written["node"] == f"gpu-{number}.ec2.internal"
        assert written["step"] == pods.attempts[0].last_step


def reported(name: str, index: int, end: PodEnd) -> dict[str, Any]:
    """Return a pod that has ended with a termination message."""
    one = ended(name, index, end.exit_code)
    one["status"]["containerStatuses"][0]["state"]["terminated"]["message"] = termination_text(end, f"gpu-{index}")
    return one


@pytest.fixture
def failed(made: MadeRun, api: FakeApi) -> str:
    """Return the name of a workload that has failed and whose volume and logs are not seen."""
    name = submit_run(made.run, made.record, KubernetesBackend()).job_id.partition("/")[2]
    whole = api.objects[("jobset.x-k8s.io", "jobsets", "ml", name)]
    whole["status"] = {"conditions": [condition("Failed", reason="FailJobSetFailurePolicyAction")]}
    return name


def test_status_names_the_cause_and_the_step_without_the_volume(made: MadeRun, api: FakeApi, failed: str) -> None:
    api.put("pods", reported(failed, 0, CRASH))
    seen = run_status(made.run)
    assert (seen.state, seen.step, seen.job.exit_code) == ("failed", 120, 93)
    assert f"pod {failed}-node-0-0-abcde on gpu-0 ended with exit code 93 at step 120: {FULL}" in seen.why
    assert seen.why.startswith("failed: FailJobSetFailurePolicyAction; ")
    assert seen.job.reason.code == "kubernetes.pod-ended-at"
    assert seen.job.reason.params["cause"] == FULL


def test_the_cause_is_kept_after_the_pods_are_deleted(made: MadeRun, api: FakeApi, failed: str) -> None:
    api.put("pods", reported(failed, 0, CRASH))
    run_status(made.run)
    api.objects.clear()
    assert str(FULL) in run_status(made.run).why
    assert run_status(made.run).step == 120


def test_explain_names_the_cause_of_a_run_whose_volume_is_not_seen(made: MadeRun, api: FakeApi, failed: str) -> None:
    api.put("pods", reported(failed, 0, CRASH))
    (finding,) = explain(made.run).findings
    assert str(FULL) in " ".join(evidence.text for evidence in finding.evidence)


def test_the_step_is_that_of_the_newest_attempt() -> None:
    pods = [reported("a-s1", 0, PodEnd(0, FULL, attempt=1, step=90)), reported("a-s1", 1, PodEnd(0, FULL, 2, 30))]
    assert steps_reported(pods) == {"step": 30}
    assert steps_reported([ended("a-s1", 0, 0)]) == {}
