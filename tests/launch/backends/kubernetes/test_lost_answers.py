"""Unanswered submissions, refused cancels, and jobs of other runs with the same id.

The fake server applies a request and answers 504, as a gateway in front of a slow API server does.
"""

import contextlib
import dataclasses
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from scaletrain_cli.errors import SchedulerError, SchedulerSilentError, UsageError
from scaletrain_cli.launch.backends.kubernetes import job_ref
from scaletrain_cli.launch.backends.kubernetes.api import Cluster
from scaletrain_cli.launch.backends.kubernetes.api_kinds import TRAIN_JOB
from scaletrain_cli.launch.backends.kubernetes.backend import KubernetesBackend
from scaletrain_cli.launch.backends.kubernetes.conditions import CANCELLED
from scaletrain_cli.launch.job import Job
from scaletrain_cli.launch.replan import replan
from scaletrain_cli.launch.resume import resume
from scaletrain_cli.launch.short_jobs import run_preflight
from scaletrain_cli.launch.status import run_status
from scaletrain_cli.launch.submit import submit_job, submit_run
from scaletrain_cli.rundir.paths import RunDir
from tests.launch.backends.kubernetes.conftest import SETTINGS, condition, pod, put_pods
from tests.launch.backends.kubernetes.fake_api import FakeApi, status
from tests.launch.conftest import MadeRun, MakeRun

UNAVAILABLE = (503, status(503, "ServiceUnavailable", "the server is currently unable to handle the request"))


def submit(made: MadeRun) -> str:
    return submit_run(made.run, made.record, KubernetesBackend()).job_id


def cancel(made: MadeRun) -> None:
    KubernetesBackend().cancel(made.run, made.record)


def job(made: MadeRun) -> Job:
    return KubernetesBackend().job(made.run, made.record)


def names(api: FakeApi, plural: str) -> list[str]:
    return sorted(body["metadata"]["name"] for body in api.all(plural))


@contextlib.contextmanager
def server_away_after_the_first_request(api: FakeApi) -> Iterator[None]:
    """Let the server create the workload and answer no request afterwards."""
    api.lost[("create", "jobsets")] = 1
    api.after_lost = {("get", "jobsets"): UNAVAILABLE, ("patch", "jobsets"): UNAVAILABLE}
    try:
        yield
    finally:
        api.after_lost = {}
        api.refusals.clear()


def unanswered(made: MadeRun, api: FakeApi, *, submit_job: Callable[[MadeRun], Any] = submit) -> None:
    """Submit the run such that the job is created and no request is answered."""
    with server_away_after_the_first_request(api), pytest.raises(SchedulerSilentError, match="scaletrain status fake"):
        submit_job(made)


@pytest.fixture
def later(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Return a function that lets the time pass in which an API server may still apply an unanswered request."""
    return lambda: monkeypatch.setattr(job_ref, "_SETTLED_SECONDS", 0.0)


def lose_the_answer(made: MadeRun, api: FakeApi) -> None:
    """Submit the run to a server that creates its ConfigMap and answers 503 to the creation of its JobSet."""
    api.refusals[("create", "jobsets")] = UNAVAILABLE
    with pytest.raises(SchedulerSilentError):
        submit(made)
    del api.refusals[("create", "jobsets")]


def test_a_request_whose_answer_was_lost_is_repeated_and_creates_no_second_job(made: MadeRun, api: FakeApi) -> None:
    api.lost[("create", "configmaps")] = 1
    api.lost[("create", "jobsets")] = 1
    name = submit(made).partition("/")[2]
    assert names(api, "jobsets") == [name]
    assert api.all("configmaps")[0]["metadata"]["ownerReferences"]


def test_an_unanswered_job_is_adopted_by_the_next_submit(made: MadeRun, api: FakeApi) -> None:
    for look in (lambda: None, lambda: run_status(made.run)):
        unanswered(made, api)
        (name,) = names(api, "jobsets")
        look()
        assert submit(made) == f"jobset/{name}"
        assert names(api, "jobsets") == [name]
        (made.run.path / "submission.json").unlink()
        (made.run.path / "kubernetes.json").unlink()
        api.objects.clear()


def test_an_unanswered_resume_is_found_and_two_gangs_never_run_at_once(made: MadeRun, api: FakeApi) -> None:
    first = submit(made)
    cancel(made)
    unanswered(made, api, submit_job=lambda made: resume(made.run))
    (second,) = names(api, "jobsets")
    assert f"jobset/{second}" != first
    assert job(made).state == "queued"
    with pytest.raises(Exception, match="still active"):
        resume(made.run)
    cancel(made)
    assert not api.all("jobsets")
    assert resume(made.run).submission.job_id.endswith("-s3")


def test_an_unsettled_request_has_not_ended_and_stays(made: MadeRun, api: FakeApi, later: Callable[[], None]) -> None:
    lose_the_answer(made, api)
    found = job(made)
    assert (found.state, found.may_be_active) == ("unknown", True)
    assert "the outcome is known in" in found.detail
    with pytest.raises(SchedulerError, match="Repeat `scaletrain cancel"):
        cancel(made)
    assert not made.run.is_cancelled
    assert api.all("configmaps"), "it has no owner yet"
    later()
    cancel(made)
    assert not api.objects, "objects of the job that was never created"
    assert not job(made).may_be_active
    assert submit(made).endswith("-s1")


def test_a_cancel_removes_what_a_request_has_left_that_status_took_for_lost(
    made: MadeRun, api: FakeApi, later: Callable[[], None]
) -> None:
    lose_the_answer(made, api)
    later()
    assert "never submitted" in job(made).detail
    assert api.all("configmaps"), "the server may be slower than that, so that status deletes nothing"
    cancel(made)
    assert not api.objects


def test_a_spec_that_was_changed_after_a_lost_request_is_submitted_with_its_own_record(
    made: MadeRun, api: FakeApi, later: Callable[[], None]
) -> None:
    """The lost request has left the ConfigMap of that name, which nothing can change."""
    lose_the_answer(made, api)
    later()
    assert resume(made.run, resize=replan(made.run, ["training.steps=30"])).submission.job_id.endswith("-s1")
    (documents,) = api.all("configmaps")
    assert "0001.json" in documents["data"]


@pytest.mark.parametrize("answered", [True, False])
def test_an_answer_overrides_what_status_recorded_in_the_meantime(
    made: MadeRun, api: FakeApi, later: Callable[[], None], monkeypatch: pytest.MonkeyPatch, answered: bool
) -> None:
    """The server takes minutes: `status` finds no job and takes the request for lost."""
    first = submit(made)
    api.objects[("jobset.x-k8s.io", "jobsets", "ml", first.partition("/")[2])]["status"] = {
        "conditions": [condition("Failed")]
    }
    assert job(made).state == "ended"
    later()
    look = KubernetesBackend()._cluster(made.record.spec).apply

    def slow(self: Any, body: Any, **more: Any) -> Any:
        assert job(made).id == first, "the second does not exist, so the first counts"
        made_of_it = look(body, **more)
        if not answered and body["kind"] == "JobSet":
            raise SchedulerSilentError("no answer")
        return made_of_it

    monkeypatch.setattr(Cluster, "apply", slow)
    monkeypatch.setattr("scaletrain_cli.launch.backends.kubernetes.objects._LOST_ANSWER_PAUSES", ())
    with contextlib.nullcontext() if answered else pytest.raises(SchedulerSilentError):
        resume(made.run)
    assert (job(made).id, job(made).state) == (first[:-1] + "2", "queued")


def test_an_unanswered_resume_leaves_the_ended_job(made: MadeRun, api: FakeApi, later: Callable[[], None]) -> None:
    first = submit(made)
    whole = api.objects[("jobset.x-k8s.io", "jobsets", "ml", first.partition("/")[2])]
    whole["status"] = {"conditions": [condition("Failed", reason="ReachedMaxRestarts")]}
    before = job(made)
    api.refusals[("create", "jobsets")] = UNAVAILABLE
    with pytest.raises(SchedulerSilentError):
        resume(made.run)
    assert job(made).state == "unknown"
    del api.refusals[("create", "jobsets")]
    later()
    assert (job(made), before.id) == (before, first)
    assert resume(made.run).submission.job_id.endswith("-s2")


def test_a_refusal_after_a_lost_answer_counts_only_if_no_object_exists(made: MadeRun, api: FakeApi) -> None:
    """The first request may have created the job, and the cause of the refusal may be new."""
    api.lost[("create", "jobsets")] = 1
    api.after_lost = {("patch", "jobsets"): (403, status(403, "Forbidden", "a webhook says no"))}
    assert submit(made).endswith("-s1")
    assert api.all("configmaps")


def test_a_refusal_after_a_lost_answer_without_an_object_is_raised(made: MadeRun, api: FakeApi) -> None:
    api.refusals[("create", "jobsets")] = UNAVAILABLE
    api.later = {("create", "jobsets"): (403, status(403, "Forbidden", "a webhook says no"))}
    with pytest.raises(SchedulerError, match="a webhook says no") as caught:
        submit(made)
    assert not isinstance(caught.value, SchedulerSilentError)
    assert not api.objects


def test_a_user_who_may_only_read_the_run_directory_sees_the_job(
    made: MadeRun, api: FakeApi, later: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`status` of another user: only a user who may write records its result."""
    first = submit(made)
    unanswered(made, api, submit_job=lambda made: submit_job(made.run, made.record, KubernetesBackend()))

    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(job_ref, "write_document", refuse)
    second = job(made)
    assert (second.id, second.state) == (first[:-1] + "2", "queued")
    api.objects.clear()
    later()
    assert (job(made).id, job(made).state) == (first, "ended")


def test_a_status_of_an_earlier_job_does_not_overwrite_a_later_submission(made: MadeRun, api: FakeApi) -> None:
    """`status` takes seconds on a slow server, and meanwhile another command may have resumed the run."""
    submit(made)
    cancel(made)
    stale = job_ref.job_ref_of(made.run, made.record)
    second = resume(made.run).submission.job_id
    job_ref.record_end(made.run, stale, Job(stale.job_id, "ended", "the job is no longer in the cluster"))
    job_ref.record_progress(made.run, stale, {"step": 3})
    job_ref.update(made.run, stale, None)
    assert (job(made).id, job(made).state) == (second, "queued")


@pytest.mark.parametrize(
    "damage", [{"job_id": "slurm/7"}, {"namespace": 7}, {"surprise": 1}, {"before": []}, {"progress": "x"}]
)
def test_a_damaged_job_reference_is_reported_with_its_file(made: MadeRun, api: FakeApi, damage: dict[str, Any]) -> None:
    submit(made)
    path = made.run.path / "kubernetes.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | damage))
    with pytest.raises(UsageError, match=r"kubernetes\.json"):
        job(made)


def test_a_preflight_without_an_answer_keeps_its_run_directory(made: MadeRun, api: FakeApi, tmp_path: Path) -> None:
    with server_away_after_the_first_request(api), pytest.raises(SchedulerSilentError):
        run_preflight(made.record.spec, made.record.plan, KubernetesBackend(), 1.0, lambda status: None)
    (folder,) = (tmp_path / "runs").glob("preflight-*")
    assert run_status(RunDir(folder)).state == "queued"


def test_jobs_of_a_run_are_found_by_its_label_without_the_run_directory(made: MadeRun, api: FakeApi) -> None:
    submit(made)
    (name,) = names(api, "jobsets")
    data = json.loads((made.run.path / "kubernetes.json").read_text())
    later = {**data, "job_id": f"jobset/{name[:-1]}2"}
    (made.run.path / "kubernetes.json").write_text(json.dumps(later))
    found = job(made)
    assert (found.state, name in found.detail) == ("queued", True)
    cancel(made)
    assert not api.all("jobsets")


def test_the_job_of_another_run_of_this_id_is_left_alone(made: MadeRun, api: FakeApi, make_run: MakeRun) -> None:
    """Two users with two run directories, one namespace and one --run-id."""
    submit(made)
    theirs = MadeRun(
        make_run(*SETTINGS, run_id="elsewhere").run,
        dataclasses.replace(make_run(*SETTINGS, run_id="third").record, run_id=made.run.run_id),
    )
    with pytest.raises(SchedulerError, match="perhaps of another user") as caught:
        submit(theirs)
    assert "delete" not in caught.value.message
    theirs.run.path.joinpath("kubernetes.json").write_bytes((made.run.path / "kubernetes.json").read_bytes())
    assert not job(theirs).is_active
    cancel(theirs)
    assert not api.deletions


@pytest.mark.parametrize("verb", ["delete", "patch"])
def test_a_refused_cancel_changes_nothing(made: MadeRun, api: FakeApi, verb: str) -> None:
    """Without the right to delete nothing is changed; without the right to annotate, the job is deleted."""
    submit(made)
    api.forbid(verb, "jobsets", "jobset.x-k8s.io")
    if verb == "patch":
        cancel(made)
        assert not api.all("jobsets")
        return
    with pytest.raises(SchedulerError, match="the right to delete jobsets"):
        cancel(made)
    assert not made.run.is_cancelled
    assert CANCELLED not in api.all("jobsets")[0]["metadata"]["annotations"]
    assert not made.events("cancelled")


def test_a_refusal_after_the_dry_run_is_undone(made: MadeRun, api: FakeApi, monkeypatch: pytest.MonkeyPatch) -> None:
    submit(made)
    scheduler = KubernetesBackend()
    cluster = scheduler._cluster(made.record.spec)
    whole = cluster.delete

    def refused(*args: Any, dry_run: bool = False, **more: Any) -> bool:
        if not dry_run:
            api.forbid("delete", "jobsets", "jobset.x-k8s.io")
        return whole(*args, dry_run=dry_run, **more)

    monkeypatch.setattr(cluster, "delete", refused)
    with pytest.raises(SchedulerError, match="the right to delete"):
        KubernetesBackend(lambda context, namespace: cluster).cancel(made.run, made.record)
    assert not made.run.is_cancelled
    assert CANCELLED not in api.all("jobsets")[0]["metadata"]["annotations"]


def trainjob_run(make_run: MakeRun) -> MadeRun:
    return make_run(*SETTINGS, "cluster.kubernetes.backend=trainjob")


def test_a_cancelled_trainjob_is_deleted_and_its_pods_keep_their_grace_period(make_run: MakeRun, api: FakeApi) -> None:
    made = trainjob_run(make_run)
    name = submit(made).partition("/")[2]
    saving = pod(name, 0)
    api.put("pods", saving)
    cancel(made)
    assert [what for what, _ in api.deletions] == [f"trainjobs/{name}"]
    assert not api.all("trainjobs")
    assert not api.all("trainingruntimes")
    assert not api.all("configmaps")
    found = job(made)
    assert (found.state, found.detail) == ("ending", "cancelled; 1 pod saving and exiting")
    assert saving["metadata"]["deletionTimestamp"], "the kubelet sends SIGTERM; the pod is not killed"
    api.objects.clear()
    assert run_status(made.run).state == "cancelled"


def test_a_second_cancel_ends_the_stuck_deletion_of_a_trainjob(make_run: MakeRun, api: FakeApi) -> None:
    made = trainjob_run(make_run)
    name = submit(made).partition("/")[2]
    scheduler = KubernetesBackend()
    cluster = scheduler._cluster(made.record.spec)
    cluster.delete(TRAIN_JOB, "ml", name)  # in the foreground, as `kubectl delete --cascade=foreground` does
    assert api.all("trainjobs")[0]["metadata"]["deletionTimestamp"]
    assert job(made).is_active
    cancel(made)
    assert not api.all("trainjobs")


def test_the_jobset_of_a_deleted_trainjob_keeps_the_run_active(make_run: MakeRun, api: FakeApi) -> None:
    made = trainjob_run(make_run)
    name = submit(made).partition("/")[2]
    marks = api.all("trainjobs")[0]["metadata"]["annotations"]
    owner = [{"kind": "TrainJob", "uid": "gone"}]
    metadata = {"name": name, "annotations": marks, "ownerReferences": owner, "labels": {}}
    api.put("jobsets", {"metadata": metadata, "status": {"restarts": 3}}, "jobset.x-k8s.io")
    put_pods(api, pod(name, 0), pod(name, 1))
    assert job(made).detail == "all 2 pods running; restart 3"
    api.forget("trainjobs", "pods")
    assert job(made).state == "ending"


def test_a_run_is_not_cancelled_while_its_object_exists(made: MadeRun, api: FakeApi) -> None:
    name = submit(made).partition("/")[2]
    api.put("pods", pod(name, 0))
    cancel(made)
    assert run_status(made.run).state == "ending"
    api.objects[("jobset.x-k8s.io", "jobsets", "ml", name)]["status"] = {"conditions": [condition("Failed")]}
    assert run_status(made.run).state == "ending", "until the server has deleted it"
