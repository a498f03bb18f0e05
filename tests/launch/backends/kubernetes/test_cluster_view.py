"""The cluster view: rows from objects as a real API server, Kueue and Volcano write them."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from scaletrain_cli.launch.backends.cluster_view import ClusterView, GpuRow, NodesRow, QuotaRow
from scaletrain_cli.launch.backends.kubernetes.cluster_view import ClusterObjects, Runs, kubernetes_view, make_view
from scaletrain_cli.launch.backends.kubernetes.job_ref import JobRef, update
from scaletrain_cli.launch.backends.kubernetes.observation import unix_time
from scaletrain_cli.spec.kubernetes import KubernetesSpec
from scaletrain_cli.ui.tables import show_cluster
from tests.cli.command_line import scaletrain
from tests.launch.backends.kubernetes.conftest import SETTINGS, condition, pod
from tests.launch.backends.kubernetes.fake_api import FakeApi
from tests.launch.conftest import MakeRun

Object = dict[str, Any]
GPU = "nvidia.com/gpu"
H100 = "NVIDIA-H100-80GB-HBM3"
KUEUE = "kueue.x-k8s.io"
NO_QUOTA = "couldn't assign flavors to pod set node: insufficient unused quota for nvidia.com/gpu in flavor od"


def node(name: str, gpus: int = 8, *, well: int | None = None, ready: bool = True, **spec: Any) -> Object:
    return {
        "metadata": {"name": name, "labels": {"nvidia.com/gpu.product": H100}},
        "spec": spec,
        "status": {
            "capacity": {GPU: str(gpus), "cpu": "192"},
            "allocatable": {GPU: str(gpus if well is None else well), "cpu": "190"},
            "conditions": [condition("Ready", "True" if ready else "Unknown")],
        },
    }


def holding(one: Object, gpus: int = 8) -> Object:
    resources = {"limits": {GPU: str(gpus)}, "requests": {GPU: str(gpus)}}
    one["spec"]["containers"] = [{"name": "node", "resources": resources}, {"name": "mesh"}]
    return one


def jobset(name: str, nodes: int = 2, **spec: Any) -> Object:
    child = {"spec": {"parallelism": nodes, "completions": nodes, "template": holding({"spec": {}})}}
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {
            "name": name,
            "uid": f"uid-{name}",
            "creationTimestamp": "2026-11-21T09:00:00Z",
            "labels": {"app.kubernetes.io/managed-by": "scaletrain", f"{KUEUE}/queue-name": "team-a"},
            "annotations": {"scaletrain.dev/run-id": name.removesuffix("-s1")},
        },
        "spec": {"replicatedJobs": [{"name": "node", "replicas": 1, "template": child}], **spec},
    }


def queued(owner: str, since: str, *conditions: Object, priority: int = 0, queue: str = "team-a") -> Object:
    """Return Kueue's Workload of a JobSet."""
    return {
        "metadata": {
            "name": f"jobset-{owner}-1a2b3",
            "creationTimestamp": f"2026-11-21T{since}Z",
            "ownerReferences": [{"kind": "JobSet", "uid": f"uid-{owner}"}],
        },
        "spec": {"queueName": queue, "priority": priority, "active": True, "podSets": []},
        "status": {"conditions": list(conditions)},
    }


def waiting(owner: str, since: str, *more: Object, **keys: Any) -> Object:
    return queued(owner, since, condition("QuotaReserved", "False", "Pending", NO_QUOTA), *more, **keys)


def local_queue(name: str, to: str = "team-a", **status: Any) -> Object:
    return {"kind": "LocalQueue", "metadata": {"name": name}, "spec": {"clusterQueue": to}, "status": status}


def cluster_queue(pending: int = 0, limit: str | None = None, **spec: Any) -> Object:
    gpus = {"name": GPU, "nominalQuota": "16"} | ({} if limit is None else {"borrowingLimit": limit})
    flavor = {"name": "od", "resources": [gpus, {"name": "memory", "nominalQuota": "2Ti"}]}
    reserved = [{"name": GPU, "total": "8"}, {"name": "memory", "total": "512Gi"}]
    return {
        "kind": "ClusterQueue",
        "metadata": {"name": "team-a"},
        "spec": {"resourceGroups": [{"coveredResources": [GPU, "memory"], "flavors": [flavor]}], **spec},
        "status": {"pendingWorkloads": pending, "flavorsReservation": [{"name": "od", "resources": reserved}]},
    }


def view(runs: Runs | None = None, **seen: Any) -> ClusterView:
    settings = KubernetesSpec(context="gke-1", namespace="ml")
    return make_view(ClusterObjects(runs or Runs(), **seen), settings, unix_time("2026-11-21T12:00:00Z"))


def test_free_gpus_are_counted_by_product_without_those_of_active_pods() -> None:
    nodes = (node("a"), node("b"), node("c", ready=False), node("d", unschedulable=True), node("e", well=7))
    shown = view(nodes=nodes, pods=(holding(pod("x", node="a")), holding(pod("y", node=None)), pod("z", node="b")))
    assert shown.gpus == (GpuRow(H100, total=40, used=8, free=15, out_of_order=17, nodes=5, free_nodes=1),)
    assert shown.nodes == (NodesRow("Ready", 3), NodesRow("NotReady", 1), NodesRow("Ready,SchedulingDisabled", 1))
    assert shown.notes == ("not ready: c NotReady, d Ready,SchedulingDisabled",)


def test_without_the_right_to_list_all_pods_no_free_gpus_are_shown() -> None:
    shown = view(nodes=(node("a"),), pods=None, forbidden=("pods",))
    assert (shown.gpus, shown.nodes) == ((), (NodesRow("Ready", 1),))
    assert shown.notes[0].endswith("you need the right to list pods in all namespaces")


def test_quotas_are_those_of_the_namespaces_queues_and_include_what_may_be_borrowed() -> None:
    unbacked = {"metadata": {"name": "new"}, "spec": {}}
    local = (local_queue("team-a"), local_queue("team-a-fast"), unbacked)
    other = cluster_queue() | {"metadata": {"name": "team-b"}}
    assert view(local_queues=local, cluster_queues=(cluster_queue(), other)).quotas == (
        QuotaRow("queue team-a, team-a-fast", "od", "GPUs", 16.0, 8.0),
        QuotaRow("queue team-a, team-a-fast", "od", "memory, GiB", 2048.0, 512.0),
    )
    for limit, words in ((None, "od, and may borrow of cohort all"), ("8", "od, and may borrow 8 of cohort all")):
        lent = cluster_queue(limit=limit, cohortName="all")
        assert view(local_queues=local, cluster_queues=(lent,)).quotas[0].limit == words


def test_an_inactive_queue_is_shown_with_its_reason() -> None:
    inactive = condition("Active", "False", "ClusterQueueIsInactive", "Can't submit new workloads")
    shown = view(local_queues=(local_queue("team-a", conditions=[inactive]),))
    assert shown.notes == ("LocalQueue team-a is not active: Can't submit new workloads",)


def test_runs_are_listed_in_queue_order_with_kueues_reason_and_the_number_ahead() -> None:
    back = condition("Evicted", "True", "PodsReadyTimeout", "pods were not ready in time")  # at 10:00
    runs = Runs(
        workloads=tuple(("jobset", jobset(f"{name}-s1", suspend=True)) for name in ("late", "back", "high")),
        queued=(
            waiting("late-s1", "09:30:00"),
            waiting("back-s1", "09:00:00", back),
            waiting("high-s1", "09:59:00", priority=1000),
            waiting("notebook", "09:10:00"),
            waiting("elsewhere", "09:10:00", priority=5000, queue="team-b"),
            queued("done", "08:00:00", condition("Finished")),
        ),
    )
    queues = (local_queue("team-a"), local_queue("team-b", "team-b"))
    shown = view(runs, local_queues=queues, cluster_queues=(cluster_queue(pending=9),))
    assert [(row.name, row.ahead) for row in shown.queue] == [("high", 0), ("late", 2), ("back", 3)]
    row = shown.queue[1]
    assert (row.job_id, row.state, row.queue, row.nodes, row.gpus) == ("jobset/late-s1", "queued", "team-a", 2, 16)
    assert row.reason == f"waits in queue team-a: {NO_QUOTA}"
    assert shown.others_queued == 6
    assert shown.notes == ("ahead counts only namespace ml; 9 jobs wait for the same quota",)


def test_a_running_run_has_its_start_time_and_an_ended_one_is_left_out() -> None:
    over = jobset("over-s1") | {"status": {"conditions": [condition("Completed")]}}
    pods = tuple(holding(pod("mine-s1", index, startTime="2026-11-21T11:00:00Z")) for index in (0, 1))
    admitted = queued("mine-s1", "09:00:00", condition("QuotaReserved"))
    theirs = [holding(pod("theirs-s1", index)) for index in (0, 1)]
    for one in theirs:
        one["metadata"]["ownerReferences"] = [{"uid": "job-1"}]
    shown = view(Runs((("jobset", jobset("mine-s1")), ("jobset", over)), pods, (admitted,)), pods=(*pods, *theirs))
    (row,) = shown.queue
    assert (row.name, row.state, row.ahead, row.reason) == ("mine", "running", None, "")
    assert row.start == unix_time("2026-11-21T11:00:00Z")
    assert (shown.others_running, shown.others_queued) == (1, 0)


def test_a_volcano_job_has_its_queue_and_gpus_and_a_trainjob_is_listed_once() -> None:
    volcano = jobset("v-s1", tasks=[{"replicas": 4, "template": holding({"spec": {}})}], queue="default")
    volcano |= {"apiVersion": "batch.volcano.sh/v1alpha1", "kind": "Job", "status": {"state": {"phase": "Pending"}}}
    del volcano["spec"]["replicatedJobs"], volcano["metadata"]["labels"][f"{KUEUE}/queue-name"]
    train = jobset("t-s1", trainer={"numNodes": 2})
    train |= {"apiVersion": "trainer.kubeflow.org/v1alpha1", "kind": "TrainJob"}
    del train["spec"]["replicatedJobs"]
    child = jobset("t-s1")
    child["metadata"]["ownerReferences"] = [{"kind": "TrainJob", "uid": "uid-t-s1"}]
    rows = view(Runs((("volcano", volcano), ("trainjob", train), ("jobset", child)))).queue
    assert [(row.job_id, row.queue, row.nodes, row.gpus) for row in rows] == [
        ("volcano/v-s1", "default", 4, 32),
        ("trainjob/t-s1", "team-a", 2, None),
    ]


def test_the_table_is_the_same_as_on_slurm(capsys: pytest.CaptureFixture[str]) -> None:
    runs = Runs((("jobset", jobset("late-s1", suspend=True)),), (), (waiting("late-s1", "09:30:00"),))
    queues = {"local_queues": (local_queue("team-a"),), "cluster_queues": (cluster_queue(),)}
    show_cluster(view(runs, nodes=(node("a"),), **queues))
    shown = capsys.readouterr().out
    assert "context gke-1, ml  kubernetes  nodes: 1 Ready" in shown
    assert "queue team-a     8     8       16  GPUs (od)" in shown


@pytest.fixture
def filled(api: FakeApi, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeApi:
    """Set up a cluster with one node, used by another namespace, and a clusters.yaml that names it."""
    file = tmp_path / "clusters.yaml"
    file.write_text("default: k\nclusters:\n  k: {scheduler: kubernetes, kubernetes: {namespace: ml}}\n")
    monkeypatch.setenv("SCALETRAIN_CLUSTERS", str(file))
    api.put("nodes", node("a"), namespace="")
    api.put("pods", holding(pod("theirs-s1", node="a")), namespace="other")
    api.put("pods", holding(pod("gone-s1", node="a", phase="Succeeded")))
    api.put("localqueues", local_queue("team-a"), KUEUE)
    api.put("clusterqueues", cluster_queue(), KUEUE, "")
    api.put("jobsets", jobset("late-s1", suspend=True), "jobset.x-k8s.io")
    api.put("workloads", waiting("late-s1", "09:30:00"), KUEUE)
    return api


def ask() -> Any:
    return scaletrain("status", "--cluster", "--json", code=0).data


@pytest.mark.usefixtures("filled")
def test_the_view_counts_gpus_of_pods_in_every_namespace() -> None:
    data = ask()
    assert (data["gpus"][0]["total"], data["gpus"][0]["free"], data["others_running"]) == (8, 0, 1)
    assert [row["job_id"] for row in data["queue"]] == ["jobset/late-s1"]
    assert data["quotas"][0]["allowed"] == 16.0
    assert data["notes"] == []


def test_a_part_without_the_right_to_read_it_is_left_out_and_named(filled: FakeApi) -> None:
    filled.forbid("list", "workloads", KUEUE)
    filled.forbid("list", "clusterqueues", KUEUE)
    filled.forbid("list", "trainjobs", "trainer.kubeflow.org")
    del filled.installed["trainer.kubeflow.org/v1alpha1"]  # a server also forbids resources that it does not have
    data = ask()
    assert data["quotas"] == []
    assert "why is unknown" in data["queue"][0]["reason"]
    assert [note.partition("; you need the right to ")[2] for note in data["notes"]] == [
        "list workloads.kueue.x-k8s.io",
        "list clusterqueues.kueue.x-k8s.io",
    ]


def test_without_a_configured_namespace_the_view_is_of_the_namespace_of_the_users_runs(
    api: FakeApi, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make_run: MakeRun
) -> None:
    def shown() -> ClusterView:
        return kubernetes_view(KubernetesSpec())

    config = json.loads((tmp_path / "kubeconfig").read_text())
    assert shown().cluster == "current context, default"
    config["contexts"][0]["context"]["namespace"] = "team"
    (tmp_path / "kubeconfig").write_text(json.dumps(config))
    assert shown().cluster == "current context, team"
    assert kubernetes_view(KubernetesSpec(namespace="set")).cluster == "current context, set"
    for number, (namespace, ended) in enumerate((("over", True), ("ml", False), ("vision", False))):
        run = make_run(*SETTINGS, run_id=f"r{number}").run
        place = JobRef(f"jobset/r{number}-s1", namespace, None, ended=ended)
        update(run, place, place)
        os.utime(run.record, (number, number))
    view = shown()
    assert view.cluster == "current context, vision"
    assert "you also have runs in ml" in view.notes[-1]
