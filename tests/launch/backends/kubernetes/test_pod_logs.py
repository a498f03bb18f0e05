"""The output of pods is copied into the run directory once, unless this machine sees the pods' files."""

from pathlib import Path
from typing import Any

import pytest

from scaletrain_cli.errors import SchedulerError
from scaletrain_cli.launch.attempts import begin_attempt
from scaletrain_cli.launch.backends.kubernetes import pod_logs
from scaletrain_cli.launch.backends.kubernetes.backend import KubernetesBackend
from scaletrain_cli.launch.backends.kubernetes.pod_output import (
    attempt_end_line,
    attempt_start_line,
    progress_in,
    rank_of,
    read_pod_line,
)
from scaletrain_cli.launch.logs import log_files, read_logs
from scaletrain_cli.launch.submit import submit_run
from scaletrain_cli.reasons import recorded
from scaletrain_cli.worker.progress import progress_line
from tests.launch.backends.kubernetes.conftest import ended, pod
from tests.launch.backends.kubernetes.fake_api import FakeApi
from tests.launch.conftest import MadeRun
from tests.waiting import wait_until

OWN, SHARED = attempt_start_line(1, shared=False), attempt_start_line(1, shared=True)


@pytest.fixture
def name(made: MadeRun, api: FakeApi) -> str:
    """Submit a run and return its workload."""
    return submit_run(made.run, made.record, KubernetesBackend()).job_id.partition("/")[2]


def printed(api: FakeApi, one: dict[str, Any], *lines: str, second: int = 0) -> None:
    """Add a pod with these lines in its log, a second apart."""
    api.put("pods", one)
    log = api.logs.setdefault(one["metadata"]["name"], [])
    for line in lines:
        log.append(f"2026-11-21T10:{len(log) // 60:02d}:{len(log) % 60:02d}.000000000Z {line}")


def bring(made: MadeRun) -> None:
    logs = KubernetesBackend().logs(made.run, made.record)
    logs.fetch()


def lines(made: MadeRun, attempt: int, rank: int) -> list[str]:
    return [line.text for line in read_logs(made.run, attempt, rank)]


def test_every_rank_has_a_log_in_the_attempt_that_its_pod_announced(made: MadeRun, api: FakeApi, name: str) -> None:
    printed(api, pod(name, 0, node="n1"), OWN, "rank 0: a", "rank 1: b", "of the agent")
    printed(api, pod(name, 1, node="n2"), OWN, "rank 2: c", "rank 3: d")
    bring(made)
    assert [(file.node, file.rank) for file in log_files(made.run)] == [("n1", 0), ("n1", 1), ("n2", 2), ("n2", 3)]
    assert lines(made, 1, 0) == ["a", "of the agent"]
    assert lines(made, 1, 3) == ["d"]


def test_lines_are_written_once_however_often_they_are_fetched(made: MadeRun, api: FakeApi, name: str) -> None:
    printed(api, pod(name, 0), OWN, "rank 0: a")
    bring(made)
    bring(made)
    printed(api, pod(name, 0), "rank 0: b")
    bring(made)
    assert lines(made, 1, 0) == ["a", "b"]
    assert any("sinceTime=" in asked for asked in api.asked)


def test_lines_of_one_time_are_written_once_and_none_is_left_out(made: MadeRun, api: FakeApi, name: str) -> None:
    """CRI-O, the container runtime of OpenShift, gives all lines that it reads at once the same time."""
    one = pod(name, 0)
    printed(api, one, OWN)
    log = api.logs[one["metadata"]["name"]]
    for text in ("a", "b", "c"):
        log.append(f"2026-11-21T10:00:07.250000000Z rank 0: {text}")
        if text != "a":
            bring(made)
    assert lines(made, 1, 0) == ["a", "b", "c"]


def test_an_error_of_the_kubelet_in_a_log_hides_no_later_line(made: MadeRun, api: FakeApi, name: str) -> None:
    """It ends a followed log on a node with too many watches, and has no time."""
    one = pod(name, 0)
    printed(api, one, OWN, "rank 0: a")
    api.logs[one["metadata"]["name"]].append("failed to create fsnotify watcher: too many open files")
    bring(made)
    api.logs[one["metadata"]["name"]].pop()
    printed(api, one, "rank 0: b")
    bring(made)
    assert lines(made, 1, 0) == ["a", "b"]


def test_logs_of_a_restarted_gang_do_not_replace_those_before(made: MadeRun, api: FakeApi, name: str) -> None:
    printed(api, ended(name, 0, 75), OWN, "rank 0: first gang")
    bring(made)
    api.objects = {key: body for key, body in api.objects.items() if key[1] != "pods"}
    second = pod(name, 0, metadata={"name": "again", "uid": "uid-again"})
    printed(api, second, attempt_start_line(2, shared=False), "rank 0: second gang")
    bring(made)
    assert lines(made, 1, 0)[-1] == "first gang"
    assert lines(made, 2, 0)[-1] == "second gang"


def test_no_log_is_fetched_if_this_machine_sees_the_pods_files(made: MadeRun, api: FakeApi, name: str) -> None:
    printed(api, pod(name, 0), SHARED, "rank 0: a")
    bring(made)  # before this machine sees the attempt, as on a slow file system
    assert not made.run.attempts()
    begin_attempt(made.run, made.record.spec, scheduler="kubernetes", job_id=f"jobset/{name}", nodes=("n",))
    assert KubernetesBackend().logs(made.run, made.record) is None


def test_a_pod_on_an_unreachable_node_does_not_hide_the_logs_of_others(made: MadeRun, api: FakeApi, name: str) -> None:
    printed(api, pod(name, 0, node="dead"), OWN, "rank 0: a")
    printed(api, pod(name, 1), OWN, "rank 2: c")
    api.silent_pods.add(f"{name}-node-0-0-abcde")
    with pytest.raises(SchedulerError, match="no route to host"):
        bring(made)
    assert lines(made, 1, 2) == ["c"]


def test_logs_of_pods_that_have_not_started_are_not_requested(made: MadeRun, api: FakeApi, name: str) -> None:
    api.put("pods", pod(name, 0, phase="Pending"))
    bring(made)
    assert not any("/log" in asked for asked in api.asked)


def test_following_includes_later_pods(made: MadeRun, api: FakeApi, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pod_logs, "_LOOK_EVERY_SECONDS", 0.05)
    first = pod(name, 0)
    api.living.add(first["metadata"]["name"])
    printed(api, first, OWN, "rank 0: one")
    logs = KubernetesBackend().logs(made.run, made.record)
    with logs.following():
        wait_until(lambda: _text(made, 1, 0).endswith("one\n"), "what was there")
        printed(api, first, "rank 0: two")
        wait_until(lambda: _text(made, 1, 0).endswith("two\n"), "what was printed since")
        second = pod(name, 0, metadata={"name": "again", "uid": "uid-again"})
        printed(api, second, attempt_start_line(2, shared=False), "rank 0: three")
        wait_until(lambda: _text(made, 2, 0).endswith("three\n"), "what a later gang prints")
        other = KubernetesBackend().logs(made.run, made.record)
        other.fetch()  # does nothing while another command follows
    assert _text(made, 1, 0) == "one\ntwo\n"


def _text(made: MadeRun, attempt: int, rank: int) -> str:
    paths: list[Path] = list((made.run.attempt(attempt) / "logs").glob(f"*-{rank:05d}.log"))
    return paths[0].read_text() if paths else ""


def test_attempt_lines_are_parsed_as_pods_write_them() -> None:
    assert read_pod_line(SHARED) == {"scaletrain": "attempt-start", "attempt": 1, "shared": True}
    end = read_pod_line(attempt_end_line(3, 75, requeue=True, reason=recorded("preempted")))
    assert (end["attempt"], end["exit_code"], end["requeue"], end["text"]) == (3, 75, True, "preempted")
    assert rank_of("rank 12: rank 3: x") == (12, "rank 3: x")
    assert rank_of("no rank") == (None, "no rank")


@pytest.mark.parametrize(
    "line",
    ["attempt 3 ended: done", '{"scaletrain": "attempt-start"}', '{"scaletrain": "att', progress_line(1, 2, 0.5)],
)
def test_other_lines_are_not_about_an_attempt(line: str) -> None:
    assert read_pod_line(line) is None


def test_the_newest_step_of_rank_0_is_the_progress() -> None:
    of_rank_0 = [f"rank 0: {progress_line(step, 100, 2.25, 12345.0)}" for step in (10, 20)]
    other = f"rank 1: {progress_line(30, 100, 9.0)}"
    human = "rank 0: step     40/100  loss 2.0000"
    progress = progress_in([*of_rank_0, other, human])
    assert progress == {"step": 20, "total_steps": 100, "loss": 2.25, "tokens_per_second": 12345.0}
    assert progress_in(["nothing"]) == {}
