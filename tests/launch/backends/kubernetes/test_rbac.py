"""k8s/base/rbac.yaml grants exactly the requests of the launcher."""

import contextlib
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from scaletrain_cli.errors import SchedulerError
from scaletrain_cli.launch.backends.kubernetes.api import connect
from scaletrain_cli.launch.backends.kubernetes.backend import KubernetesBackend
from scaletrain_cli.launch.backends.kubernetes.cluster_view import fetch_objects
from scaletrain_cli.launch.submit import submit_run
from scaletrain_cli.rundir.documents import read_document, write_document
from scaletrain_cli.rundir.preparation import forget_job, preparation_folder
from tests.launch.backends.kubernetes.conftest import SETTINGS, ended, pod
from tests.launch.backends.kubernetes.fake_api import FakeApi, status
from tests.launch.conftest import MadeRun, MakeRun

PROJECT = Path(__file__).parents[4]
# Requested, and better not granted: the right to get a Secret includes its values. Without it there is a note.
# Of kubectl, which `exec`, `shell` and `port-forward` start.
OF_KUBECTL = {("get", "", "pods"), ("get", "", "pods/exec"), ("create", "", "pods/exec")}
NOT_GRANTED = {("get", "", "secrets")}
NAMED = (
    "cluster.kubernetes.pod_priority=p",
    "cluster.kubernetes.service_account=s",
    "cluster.kubernetes.secrets.TOKEN={secret: hub, key: token}",
)
BACKENDS = {
    "jobset": ("cluster.kubernetes.queue=q", "cluster.kubernetes.priority=w"),
    "volcano": ("cluster.kubernetes.backend=volcano", "cluster.kubernetes.queue=q"),
    "trainjob": ("cluster.kubernetes.backend=trainjob",),
    "native": ("cluster.kubernetes.native_gang=v1alpha2",),
}


def granted(kind: str) -> set[tuple[str, str, str]]:
    """Return (verb, group, resource) of each rule of the submitters' Role or ClusterRole."""
    documents = YAML(typ="safe").load_all((PROJECT / "k8s" / "base" / "rbac.yaml").read_text(encoding="utf-8"))
    rules = [rule for body in documents if body["kind"] == kind for rule in body["rules"]]
    return {
        (verb, group, resource)
        for rule in rules
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }


def live(api: FakeApi, made: MadeRun) -> None:
    """Send every request that the launcher sends for a run."""
    scheduler = KubernetesBackend()
    with contextlib.suppress(SchedulerError):  # no object exists, so every name is read and the others listed
        scheduler.preflight(made.record.spec, made.record.plan)
    scheduler.submit_preparation(made.run, made.record, 1)
    scheduler.job(made.run, made.record)
    scheduler.cancel(made.run, made.record)
    made.run.stop_file.unlink()
    forget_job(preparation_folder(made.run))
    _refuse_the_workload(api, made)
    _lose_the_workload(api, made)
    submit_run(made.run, made.record, scheduler)
    (made.run.path / "submission.json").unlink()  # an interrupted submitter finds the job again
    workload = submit_run(made.run, made.record, scheduler).job_id.partition("/")[2]
    scheduler.job(made.run, made.record)
    waiting = pod(workload, 1, phase="Pending")
    dead = pod(workload, 0, node="n", metadata={"deletionTimestamp": "2026-11-21T10:00:00Z"})
    for one in (waiting, dead):
        api.put("pods", one)
    api.put("nodes", {"metadata": {"name": "n"}, "status": {}}, namespace="")
    scheduler.job(made.run, made.record)
    scheduler.force(made.run, made.record)
    api.put("pods", ended(workload, 0, 0))
    logs = scheduler.logs(made.run, made.record)
    logs.fetch()
    scheduler.cancel(made.run, made.record)


def _refuse_the_workload(api: FakeApi, made: MadeRun) -> None:
    """Submit a workload that is refused, so that its other objects are deleted."""
    whole = KubernetesBackend()._manifest(made.run, made.record, lambda: pytest.fail("asked"))[0].workload_object
    plural = f"{whole['kind'].lower()}s"
    api.refusals[("create", plural)] = (422, status(422, "Invalid", "no"))
    with pytest.raises(SchedulerError):
        submit_run(made.run, made.record, KubernetesBackend())
    del api.refusals[("create", plural)]


def _lose_the_workload(api: FakeApi, made: MadeRun) -> None:
    """Cancel an unanswered submission without a workload, so that its other objects are deleted."""
    whole = KubernetesBackend()._manifest(made.run, made.record, lambda: pytest.fail("asked"))[0].workload_object
    plural = f"{whole['kind'].lower()}s"
    api.refusals[("create", plural)] = (503, status(503, "ServiceUnavailable", "later"))
    with pytest.raises(SchedulerError):
        submit_run(made.run, made.record, KubernetesBackend())
    del api.refusals[("create", plural)]
    place = read_document(made.run.path / "kubernetes.json")
    assert place is not None
    write_document(made.run.path / "kubernetes.json", place | {"asked": 0.0})
    KubernetesBackend().cancel(made.run, made.record)
    made.run.stop_file.unlink()
    assert not [body for body in api.objects.values() if body["metadata"]["name"].startswith(made.run.run_id)]


def put_queue(api: FakeApi) -> None:
    group = "kueue.x-k8s.io"
    local = {"kind": "LocalQueue", "metadata": {"name": "q"}, "spec": {"clusterQueue": "c"}}
    whole: dict[str, Any] = {"kind": "ClusterQueue", "metadata": {"name": "c"}, "spec": {"cohortName": "all"}}
    whole["spec"]["admissionChecksStrategy"] = {"admissionChecks": [{"name": "c"}]}
    api.put("localqueues", local, group)
    api.put("clusterqueues", whole, group, "")


@pytest.fixture
def calls(api: FakeApi, make_run: MakeRun) -> set[tuple[str, str, str]]:
    api.put("namespaces", {"metadata": {"name": "ml"}}, namespace="")
    pending = {"metadata": {"name": "runs"}, "spec": {"volumeName": "v"}, "status": {"phase": "Pending"}}
    volume = {"metadata": {"name": "v"}, "spec": {"csi": {"driver": "d"}}}
    api.put("persistentvolumes", volume, namespace="")
    for name, more in BACKENDS.items():
        live(api, make_run(*SETTINGS, *NAMED, *more, run_id=name))  # without the queue, existing queues are listed
    put_queue(api)
    api.put("persistentvolumeclaims", pending)
    near = "cluster.kubernetes.topology={kind: unconstrained}"
    live(api, make_run(*SETTINGS, *BACKENDS["jobset"], near, run_id="queued"))
    fetch_objects(connect(None, "ml"), "ml")
    return api.calls - NOT_GRANTED


def test_the_role_grants_exactly_the_requests_of_the_launcher(calls: set[tuple[str, str, str]]) -> None:
    may = granted("Role") | granted("ClusterRole")
    calls |= OF_KUBECTL
    assert calls - may == set(), "called, not granted"
    assert may - calls == set(), "granted, never called"


def test_the_cluster_role_grants_only_reading_of_resources_without_a_namespace() -> None:
    cluster_wide = granted("ClusterRole")
    assert {verb for verb, _, _ in cluster_wide} <= {"get", "list"}
    assert granted("Role") & cluster_wide == {("list", "", "pods")}, "pods of others use GPUs, too"
