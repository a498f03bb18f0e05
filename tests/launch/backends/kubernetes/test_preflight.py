"""Everything that would keep a job from starting is reported at once, and nothing is created."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from scaletrain_cli.errors import SchedulerError
from scaletrain_cli.launch.attempts import begin_attempt
from scaletrain_cli.launch.backends.base import PreflightResult
from scaletrain_cli.launch.backends.kubernetes.backend import KubernetesBackend
from scaletrain_cli.launch.backends.kubernetes.preflight import _may_write
from tests.launch.backends.kubernetes.conftest import SETTINGS, condition
from tests.launch.backends.kubernetes.fake_api import FakeApi, status
from tests.launch.conftest import MakeRun

Notes, Outlook = Callable[..., list[str]], Callable[..., PreflightResult]
KUEUE = "kueue.x-k8s.io"
PRODUCT = "nvidia.com/gpu.product"
GPU = ("cluster.gpu=h100-sxm-80gb", "cluster.gpus_per_node=8", "training.global_batch_size=16", "cluster.nodes=2")
QUEUE = (*GPU, "cluster.kubernetes.queue=team-a")


@pytest.fixture
def preflight(outlook: Outlook) -> Notes:
    """Return a function that checks a spec and returns its notes."""
    return lambda *settings: list(outlook(*settings).notes)


@pytest.fixture
def outlook(make_run: MakeRun, api: FakeApi) -> Outlook:
    """Return a function that checks a spec against a server with enough resources."""
    api.put("namespaces", {"metadata": {"name": "ml"}}, namespace="")
    api.put("persistentvolumeclaims", claim("runs"))
    for number in range(4):
        api.put("nodes", gpu_node(f"n{number}"), namespace="")

    def check(*settings: str) -> PreflightResult:
        record = make_run(*SETTINGS, *settings).record
        before = dict(api.objects)
        try:
            return KubernetesBackend().preflight(record.spec, record.plan)
        finally:
            assert api.objects == before  # nothing is left behind

    return check


def claim(name: str, phase: str = "Bound", modes: tuple[str, ...] = ("ReadWriteMany",)) -> dict[str, Any]:
    return {"metadata": {"name": name}, "spec": {"accessModes": list(modes)}, "status": {"phase": phase}}


def gpu_node(name: str, gpus: int = 8, product: str = "H100", **spec: Any) -> dict[str, Any]:
    allocatable = {"cpu": "96", "memory": "1Ti", "nvidia.com/gpu": str(gpus)}
    return {
        "metadata": {"name": name, "labels": {PRODUCT: product}},
        "spec": spec,
        "status": {"allocatable": allocatable},
    }


def put_queue(api: FakeApi, gpus: int = 16, cpus: str = "1k", **more: Any) -> dict[str, Any]:
    """Add a LocalQueue, its ClusterQueue and a flavor with enough memory."""
    active = {"conditions": [condition("Active", reason="Ready")]}
    local = {"kind": "LocalQueue", "metadata": {"name": "team-a"}, "spec": {"clusterQueue": "training"}}
    api.put("localqueues", {**local, "status": active}, KUEUE)
    api.put("resourceflavors", {"metadata": {"name": "h100"}, "spec": {"nodeLabels": {PRODUCT: "H100"}}}, KUEUE, "")
    amounts = {"nvidia.com/gpu": str(gpus), "cpu": cpus, "memory": "100Ti"}
    resources = [{"name": name, "nominalQuota": amount} for name, amount in amounts.items()]
    group = {"coveredResources": list(amounts), "flavors": [{"name": "h100", "resources": resources}]}
    spec = {"resourceGroups": [group], "namespaceSelector": {}, **more}
    whole = {"kind": "ClusterQueue", "metadata": {"name": "training"}, "spec": spec}
    return api.put("clusterqueues", {**whole, "status": dict(active)}, KUEUE, "")


def problems(preflight: Notes, *settings: str) -> str:
    with pytest.raises(SchedulerError) as caught:
        preflight(*settings)
    assert caught.value.exit_code == 4
    return str(caught.value)


def test_a_job_that_can_run_has_no_problem_and_every_object_is_validated(preflight: Notes, api: FakeApi) -> None:
    assert not [note for note in preflight(*GPU) if "not checked" in note]
    dry = [asked for asked in api.asked if "dryRun=All" in asked]
    for kind in ("configmaps", "jobsets", "batch/v1/namespaces/ml/jobs", "api/v1/namespaces/ml/pods"):
        assert any(kind in asked for asked in dry), kind
    assert len(dry) == len([asked for asked in api.asked if asked.startswith("PATCH")])


def test_all_problems_are_reported_at_once(preflight: Notes, api: FakeApi) -> None:
    del api.installed["jobset.x-k8s.io/v1alpha2"]
    api.put("localqueues", {"metadata": {"name": "team-b"}, "spec": {}}, KUEUE)
    text = problems(
        preflight,
        *QUEUE,
        "cluster.kubernetes.priority=urgent",
        "cluster.kubernetes.pod_priority=high",
        "cluster.kubernetes.service_account=runner",
        "cluster.kubernetes.runs.claim=nowhere",
    )
    assert "v1.36.2: 6 problems would keep the job from starting" in text
    assert "queue = team-a: there is no such LocalQueue in namespace ml. There are: team-b." in text
    assert "priority = urgent: there is no such WorkloadPriorityClass, and the job would wait without a message" in text
    assert "pod_priority = high" in text
    assert "service_account = runner" in text
    assert "runs.claim = nowhere" in text
    assert "no JobSet of jobset.x-k8s.io/v1alpha2" in text


def test_a_queue_without_a_cluster_queue_is_reported(preflight: Notes, api: FakeApi) -> None:
    put_queue(api)
    api.put("localqueues", {"kind": "LocalQueue", "metadata": {"name": "team-a"}}, KUEUE)
    assert "queue = team-a: points to no ClusterQueue, so that it admits no job" in problems(preflight, *QUEUE)


def test_a_queue_of_the_preparation_that_does_not_exist_is_reported(preflight: Notes, api: FakeApi) -> None:
    """The Job that prepares the data would wait in it, and no GPU would ever be requested."""
    api.put("localqueues", {"metadata": {"name": "cpus"}, "spec": {}}, KUEUE)
    preflight("cluster.kubernetes.preparation.queue=cpus")
    text = problems(preflight, "cluster.kubernetes.preparation.queue=cpu")
    assert (
        "cluster.kubernetes.preparation.queue = cpu: there is no such LocalQueue in namespace ml. There are: cpus"
        in text
    )


def test_a_missing_namespace_is_the_only_problem_reported(preflight: Notes, api: FakeApi) -> None:
    text = problems(preflight, "cluster.kubernetes.namespace=nope", "cluster.kubernetes.priority=x", *QUEUE)
    assert "namespace = nope: there is no such namespace" in text
    assert "urgent" not in text


def test_a_quota_that_can_never_fit_is_distinguished_from_one_that_is_busy(preflight: Notes, api: FakeApi) -> None:
    whole = put_queue(api, gpus=8)
    text = problems(preflight, *QUEUE)
    assert "can never admit the job: flavor h100: the job needs 16 nvidia.com/gpu, and there are at most 8" in text
    resources = whole["spec"]["resourceGroups"][0]["flavors"][0]["resources"]
    resources[0]["nominalQuota"] = "16"
    assert not [note for note in preflight(*QUEUE) if "busy" in note]
    taken = [{"name": "h100", "resources": [{"name": "nvidia.com/gpu", "total": "8"}]}]
    whole["status"]["flavorsReservation"] = taken
    (note,) = [note for note in preflight(*QUEUE) if "busy" in note]
    assert "8 of 16 nvidia.com/gpu are used, and the job needs 16; the job will wait" in note


def test_the_start_is_now_where_quota_is_free_and_else_not_known_and_why(outlook: Outlook, api: FakeApi) -> None:
    assert (outlook(*GPU).start.at, outlook(*GPU).start.why[:17]) == (None, "there is no queue")
    whole = put_queue(api)
    start = outlook(*QUEUE).start
    assert start.at is not None
    assert "queue team-a has free quota and no job waits for it" in start.why
    whole["status"]["pendingWorkloads"] = 3
    start = outlook(*QUEUE).start
    assert (start.at, "free quota, and at most 3 jobs ahead of this one" in start.why) == (None, True)
    taken = [{"name": "h100", "resources": [{"name": "nvidia.com/gpu", "total": "8"}]}]
    whole["status"]["flavorsReservation"] = taken
    assert "team-a has no free quota, and at most 3 jobs ahead of this one" in outlook(*QUEUE).start.why
    whole["spec"]["stopPolicy"] = "Hold"
    assert outlook(*QUEUE).start.why == "ClusterQueue training is held"
    api.forbid("get", "clusterqueues", KUEUE)
    assert outlook(*QUEUE).start.why == "the quota of queue team-a cannot be read"


def test_borrowable_quota_counts(preflight: Notes, api: FakeApi) -> None:
    whole = put_queue(api, gpus=8, cohortName="all")
    lender = {"metadata": {"name": "b"}, "spec": {**whole["spec"]}}
    api.put("clusterqueues", lender, KUEUE, "")
    assert preflight(*QUEUE) is not None
    whole["spec"]["resourceGroups"][0]["flavors"][0]["resources"][0]["borrowingLimit"] = "4"
    assert "there are at most 12" in problems(preflight, *QUEUE)
    lender["spec"] = {}
    api.put("cohorts", {"metadata": {"name": "all"}, "spec": {}}, KUEUE, "")
    assert "there are at most 8" in problems(preflight, *QUEUE)
    api.put("cohorts", {"metadata": {"name": "all"}, "spec": whole["spec"]}, KUEUE, "")
    assert "there are at most 12" in problems(preflight, *QUEUE)


def test_a_resource_that_no_flavor_covers_waits_indefinitely(preflight: Notes, api: FakeApi) -> None:
    whole = put_queue(api)
    group = whole["spec"]["resourceGroups"][0]
    group["coveredResources"].remove("memory")
    assert "no flavor has any memory" in problems(preflight, *QUEUE)
    group["coveredResources"].append("memory")
    for node in api.all("nodes"):
        node["status"]["allocatable"]["rdma/hca"] = "1"
    notes = preflight(*QUEUE, "cluster.kubernetes.rdma_resource=rdma/hca")
    assert any("covers rdma/hca: the job waits indefinitely unless" in note for note in notes)


def test_a_flavor_whose_taint_is_not_tolerated_does_not_count(preflight: Notes, api: FakeApi) -> None:
    put_queue(api)
    flavor = api.objects[(KUEUE, "resourceflavors", "", "h100")]
    flavor["spec"]["nodeTaints"] = [{"key": "spot", "value": "true", "effect": "NoSchedule"}]
    assert "do not tolerate its taint spot=true:NoSchedule" in problems(preflight, *QUEUE)
    preflight(*QUEUE, "cluster.spot=true")


def test_queues_that_are_broken_are_reported(preflight: Notes, api: FakeApi) -> None:
    whole = put_queue(api)
    whole["status"]["conditions"] = [condition("Active", "False", "FlavorNotFound", "references missing flavors")]
    assert "ClusterQueue training is not active: FlavorNotFound" in problems(preflight, *QUEUE)
    del api.objects[(KUEUE, "clusterqueues", "", "training")]
    assert "points to ClusterQueue training, which does not exist" in problems(preflight, *QUEUE)
    for version in [version for version in api.installed if version.startswith(KUEUE)]:
        del api.installed[version]
    assert "has no LocalQueue of kueue.x-k8s.io/v1beta2. Install it" in problems(preflight, *QUEUE)


def test_a_queue_that_admits_no_jobs_of_the_namespace_is_reported(preflight: Notes, api: FakeApi) -> None:
    whole = put_queue(api, namespaceSelector=None)
    refused = "admits no jobs of namespace ml (its namespaceSelector)"
    assert refused in problems(preflight, *QUEUE)
    api.put("namespaces", {"metadata": {"name": "ml", "labels": {"team": "a"}}}, namespace="")
    for selector, taken in [
        ({"matchLabels": {"team": "a"}}, True),
        ({"matchLabels": {"team": "b"}}, False),
        ({"matchExpressions": [{"key": "team", "operator": "In", "values": ["a", "b"]}]}, True),
        ({"matchExpressions": [{"key": "team", "operator": "NotIn", "values": ["a"]}]}, False),
        ({"matchExpressions": [{"key": "team", "operator": "Exists"}]}, True),
        ({"matchExpressions": [{"key": "team", "operator": "DoesNotExist"}]}, False),
        ({"matchExpressions": [{"key": "other", "operator": "DoesNotExist"}]}, True),
    ]:
        whole["spec"]["namespaceSelector"] = selector
        assert preflight(*QUEUE) is not None if taken else refused in problems(preflight, *QUEUE)


def test_a_claim_that_waits_for_its_first_consumer_has_a_note(preflight: Notes, api: FakeApi) -> None:
    api.put("persistentvolumeclaims", claim("runs", "Pending"))
    assert "the claim is not bound to a volume" in problems(preflight, *GPU)
    about = {"kind": "PersistentVolumeClaim", "name": "runs"}
    api.put("events", {"metadata": {"name": "e"}, "reason": "WaitForFirstConsumer", "involvedObject": about})
    assert any("claim runs is not bound yet" in note for note in preflight(*GPU))
    api.put("persistentvolumeclaims", claim("runs", modes=("ReadWriteOnce",)))
    assert "must be ReadWriteMany for 2 pods; it is ReadWriteOnce" in problems(preflight, *GPU)
    api.put("persistentvolumeclaims", claim("runs", "Lost"))
    assert "the claim is Lost" in problems(preflight, *GPU)


@pytest.mark.parametrize(
    ("mode", "noted"), [("ReadWriteOnce", True), ("ReadWriteMany", False), ("ReadOnlyMany", False)]
)
def test_a_disk_that_one_node_can_attach_is_noted_for_a_run_of_several(
    preflight: Notes, api: FakeApi, mode: str, noted: bool
) -> None:
    api.put("persistentvolumeclaims", claim("corpus", modes=(mode,)))
    mounted = "cluster.kubernetes.volumes=[{claim: corpus, path: /data, read_only: true}]"
    said = f"claim corpus is {mode}: where its driver attaches a disk to one node"
    assert any(said in note for note in preflight(*GPU, mounted)) == noted
    assert not any(said in note for note in preflight(*GPU, "cluster.nodes=1", mounted))


def test_secrets_and_their_keys_are_checked_if_they_are_readable(preflight: Notes, api: FakeApi) -> None:
    wanted = ("cluster.kubernetes.secrets.TOKEN={secret: hub, key: token}", *GPU)
    assert "there is no such Secret in namespace ml" in problems(preflight, *wanted)
    api.put("secrets", {"metadata": {"name": "hub"}, "data": {"other": "aGlkZGVu"}})
    text = problems(preflight, *wanted)
    assert "Secret hub has no key token; its keys are: other" in text
    assert "aGlkZGVu" not in text
    api.forbid("get", "secrets")
    assert any("you may not read Secrets" in note for note in preflight(*wanted))


def test_without_a_queue_the_suitable_nodes_are_counted(preflight: Notes, api: FakeApi) -> None:
    text = problems(preflight, *GPU, "cluster.kubernetes.gpu_product=B200")
    lack = "4 lack label nvidia.com/gpu.product=B200"
    assert f"the 4 nodes can run at most 0 of the job's pods, and 2 are needed ({lack})" in text
    taint = {"key": "team", "value": "b", "effect": "NoSchedule"}
    for number in range(3):
        api.put("nodes", gpu_node(f"n{number}", taints=[taint]), namespace="")
    assert "3 lack a toleration of team=b:NoSchedule" in problems(preflight, *GPU)
    for number in range(3):
        api.put("nodes", gpu_node(f"n{number}", gpus=4), namespace="")
    assert "3 lack 8 nvidia.com/gpu" in problems(preflight, *GPU)
    api.objects[("", "nodes", "", "n0")]["metadata"]["labels"]["karpenter.sh/nodepool"] = "gpu"
    assert any("until the node pools have grown" in note for note in preflight(*GPU))
    api.forbid("list", "nodes")
    assert any("not checked" in note and "list nodes" in note for note in preflight(*GPU))


def test_a_resource_quota_of_the_namespace_is_checked(preflight: Notes, api: FakeApi) -> None:
    quota = {"metadata": {"name": "q"}, "spec": {}, "status": {"hard": {"requests.nvidia.com/gpu": "8"}, "used": {}}}
    api.put("resourcequotas", quota)
    assert "ResourceQuota q of the namespace allows 8 requests.nvidia.com/gpu" in problems(preflight, *GPU)
    quota["status"] = {"hard": {"pods": "2"}, "used": {"pods": "1"}}
    assert any("the job waits for the rest" in note for note in preflight(*GPU))


def put_quota(api: FakeApi, *resources: str, **spec: object) -> None:
    hard = {name: "10k" if name.endswith("cpu") else "100Ti" for name in resources}
    api.put("resourcequotas", {"metadata": {"name": "team"}, "spec": spec, "status": {"hard": hard, "used": {}}})


def put_limits(api: FakeApi, **rule: object) -> None:
    api.put("limitranges", {"metadata": {"name": "usual"}, "spec": {"limits": [{"type": "Container", **rule}]}})


UNSTATED = (
    "cluster.kubernetes.cpu_limit = auto: ResourceQuota team of the namespace refuses pods whose container node has no "
    "limits.cpu. Set it to requested"
)


def test_a_quota_of_cpu_limits_without_one_in_the_pods_is_one_problem(preflight: Notes, api: FakeApi) -> None:
    put_quota(api, "limits.cpu")
    said = 'pods "a" is forbidden: failed quota: team: must specify limits.cpu for: node'
    api.refusals[("create", "pods")] = (403, status(403, "Forbidden", said))
    text = problems(preflight, *GPU)
    assert text.count("limits.cpu") == 1, "the check and the dry run of each pod find the same"
    assert UNSTATED in text


def test_containers_that_a_webhook_adds_to_each_pod_are_named(preflight: Notes, api: FakeApi) -> None:
    containers = [{"name": "node"}, {"name": "istio-proxy"}]
    added = {"spec": {"containers": containers, "initContainers": [{"name": "side-car", "restartPolicy": "Always"}]}}
    api.refusals[("create", "pods")] = (200, added)
    (note,) = [note for note in preflight(*GPU) if "istio-proxy" in str(note)]
    assert "its pods end only when they end, too" in str(note)
    assert "side-car" not in str(note)


@pytest.mark.parametrize("hidden", ["resourcequotas", "limitranges"])
def test_a_quota_that_may_not_be_read_is_known_from_the_dry_run(preflight: Notes, api: FakeApi, hidden: str) -> None:
    put_quota(api, "limits.cpu")
    api.forbid("list", hidden)
    assert any(f"list {hidden}" in note for note in preflight(*GPU))
    said = 'pods "a" is forbidden: failed quota: team: must specify limits.cpu'  # as before Kubernetes 1.24
    api.refusals[("create", "pods")] = (403, status(403, "Forbidden", said))
    assert UNSTATED in problems(preflight, *GPU)


@pytest.mark.parametrize(
    "settings",
    [["cluster.kubernetes.cpu_limit=requested"], ["cluster.kubernetes.cpus_per_node=96"], ["cluster.cpus_per_gpu=12"]],
)
def test_pods_with_cpu_limits_are_admitted_by_a_quota(preflight: Notes, api: FakeApi, settings: list[str]) -> None:
    put_quota(api, "limits.cpu", "requests.cpu", "limits.memory", "requests.memory")
    assert not [note for note in preflight(*GPU, *settings) if "quota" in note.lower()]


def test_a_default_of_a_limit_range_is_the_limit_unless_it_is_below_the_request(preflight: Notes, api: FakeApi) -> None:
    put_quota(api, "limits.cpu")
    put_limits(api, default={"cpu": "64"})
    preflight(*GPU)
    put_limits(api, default={"cpu": "500m"})
    text = problems(preflight, *GPU)
    assert "LimitRange usual of the namespace limits pods that set no limit to 500m CPUs, which is below" in text
    preflight(*GPU, "cluster.kubernetes.cpu_limit=requested")


def test_a_limit_range_with_a_ratio_needs_limits(preflight: Notes, api: FakeApi) -> None:
    put_limits(api, maxLimitRequestRatio={"cpu": "2"})
    text = problems(preflight, *GPU, "cluster.kubernetes.cpu_limit=none", "cluster.kubernetes.cpus_per_node=96")
    assert "cpu_limit = none: LimitRange usual of the namespace refuses pods whose container node has no limits" in text
    preflight(*GPU, "cluster.kubernetes.cpu_limit=requested")


def test_a_quota_with_a_scope_is_not_taken_for_one_of_these_pods(preflight: Notes, api: FakeApi) -> None:
    without = preflight(*GPU)
    put_quota(api, "limits.cpu", scopes=["BestEffort"])
    assert preflight(*GPU) == without


def test_a_side_car_counts_for_quotas_and_must_state_its_amounts(preflight: Notes, api: FakeApi) -> None:
    side_car = (
        "cluster.kubernetes.pod_overrides={spec: {initContainers: [{name: s, image: a:1, restartPolicy: Always%s}]}}"
    )
    limited = "cluster.kubernetes.cpu_limit=requested"
    put_quota(api, "limits.cpu")
    text = problems(preflight, *GPU, limited, side_car % "")
    assert "refuses pods whose container s has no limits.cpu. Give it to the container" in text
    preflight(*GPU, limited, side_car % ", resources: {limits: {cpu: 1}}")
    much = problems(preflight, *GPU, limited, side_car % ", resources: {limits: {cpu: 8k}}")
    assert "ResourceQuota team of the namespace allows 10k limits.cpu, and the job needs 16064" in much


def test_a_refused_pod_of_the_preparation_is_a_problem_before_the_queue(preflight: Notes, api: FakeApi) -> None:
    preflight(*GPU)
    (asked,) = [line for line in api.asked if "-data-0-" in line]
    assert "dryRun=All" in asked


def test_without_a_user_in_the_pods_nothing_is_said_about_who_may_write(preflight: Notes, api: FakeApi) -> None:
    api.put("persistentvolumeclaims", {**claim("runs"), "spec": {"accessModes": ["ReadWriteMany"], "volumeName": "v"}})
    api.put("persistentvolumes", {"metadata": {"name": "v"}, "spec": {"nfs": {"server": "s"}}}, namespace="")
    assert any("must be writable by uid 1000" in note for note in preflight(*GPU))
    nobody = "{spec: {securityContext: {runAsUser: null, runAsGroup: null}}}"
    assert not [note for note in preflight(*GPU, f"cluster.kubernetes.pod_overrides={nobody}") if "writable" in note]


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("jobsets", "JobSet as it would be created: spec.x: Invalid value"),
        ("jobs", "the Job that would be created from it is refused: spec.x Invalid value"),
    ],
)
def test_fields_that_the_server_refuses_are_problems(preflight: Notes, api: FakeApi, kind: str, text: str) -> None:
    causes = [{"field": "spec.x", "message": "Invalid value"}]
    api.refusals[("create", kind)] = (422, status(422, "Invalid", "invalid", name="j", causes=causes))
    assert text in problems(preflight, *GPU)


def test_without_the_right_to_create_jobs_a_note_says_what_was_not_checked(preflight: Notes, api: FakeApi) -> None:
    api.forbid("create", "jobs", "batch")
    assert any("not checked whether the Job" in note for note in preflight(*GPU))
    api.forbid("create", "jobsets", "jobset.x-k8s.io")
    text = problems(preflight, *GPU)
    assert "JobSet: you need the right to create jobsets.jobset.x-k8s.io" in text
    assert "rbac.yaml has all that is needed" in text


def test_a_job_that_kueue_would_not_hold_back_is_refused(preflight: Notes, api: FakeApi) -> None:
    """Kueue's webhook suspends the jobs of its queues; without it, a job would start outside the quota."""
    put_queue(api)
    preflight(*GPU, *QUEUE)
    api.in_queues = set()
    assert "Kueue does not manage JobSets here" in problems(preflight, *GPU, *QUEUE)
    preflight(*GPU)  # without a queue it starts at once anyway


@pytest.mark.parametrize("backend", ["volcano", "trainjob"])
def test_every_backend_is_validated(preflight: Notes, api: FakeApi, backend: str) -> None:
    preflight(*GPU, f"cluster.kubernetes.backend={backend}")
    text = problems(preflight, *GPU, f"cluster.kubernetes.backend={backend}", "cluster.kubernetes.pod_priority=no")
    assert "pod_priority = no" in text


@pytest.mark.parametrize(
    "said",
    [
        'admission webhook "validator.trainjob.trainer.kubeflow.org" denied the request: spec.runtimeRef: Invalid '
        'value: {}: TrainingRuntime.trainer.kubeflow.org "x" not found: specified trainingRuntime must be created '
        "before the TrainJob is created",
        "admission webhook \"vtrainjob.kb.io\" denied the request: runtime 'x' not found",
    ],
    ids=["Trainer", "Kueue"],
)
def test_a_trainjob_is_not_refused_for_a_runtime_of_a_dry_run(preflight: Notes, api: FakeApi, said: str) -> None:
    """Both webhooks read existing runtimes; a dry run creates none."""
    api.refusals[("create", "trainjobs")] = (403, status(403, "Forbidden", said))
    preflight(*GPU, "cluster.kubernetes.backend=trainjob")
    api.refusals[("create", "trainjobs")] = (403, status(403, "Forbidden", "webhook denied the request: name"))
    assert "webhook denied the request: name" in problems(preflight, *GPU, "cluster.kubernetes.backend=trainjob")


def test_a_pod_that_the_namespace_never_admits_is_a_problem(preflight: Notes, api: FakeApi) -> None:
    """The API server accepts a Job whose pods violate the namespace's security level, and refuses each of its pods."""
    said = 'pods "x" is forbidden: violates PodSecurity "restricted:latest": unrestricted capabilities (IPC_LOCK)'
    api.refusals[("create", "pods")] = (403, status(403, "Forbidden", said))
    assert f"the Pod that would be created from it is refused: {said}" in problems(preflight, *GPU)
    api.forbid("create", "pods")
    assert any("not checked whether the Pod" in note for note in preflight(*GPU))


@pytest.mark.parametrize(
    ("said", "note"),
    [
        ('pods "x" is forbidden: exceeded quota: q, requested: pods=1, used: pods=8', "and the job waits for it"),
        ('admission webhook "policy.example" denied the request: no naked pods', "perhaps only because no Job owns it"),
    ],
)
def test_a_pod_that_is_refused_temporarily_has_a_note(preflight: Notes, api: FakeApi, said: str, note: str) -> None:
    api.refusals[("create", "pods")] = (403, status(403, "Forbidden", said))
    assert any(note in text and said in text for text in preflight(*GPU))


def test_a_topology_that_no_flavor_has_is_reported(preflight: Notes, api: FakeApi) -> None:
    """Kueue never admits such a job, and its message may name only another flavor's quota."""
    put_queue(api)
    levels = [{"nodeLabel": "topology.example/block"}, {"nodeLabel": "kubernetes.io/hostname"}]
    api.put("topologies", {"metadata": {"name": "racks"}, "spec": {"levels": levels}}, KUEUE, "")
    flavor = api.objects[(KUEUE, "resourceflavors", "", "h100")]
    rack = (*QUEUE, "cluster.kubernetes.topology={kind: required, key: topology.example/rack}")
    assert "flavor h100: it has no Topology, which the job requests" in problems(preflight, *rack)
    flavor["spec"]["topologyName"] = "racks"
    found = problems(preflight, *rack)
    assert "has no level topology.example/rack; it has topology.example/block, kubernetes.io/hostname" in found
    preflight(*QUEUE, "cluster.kubernetes.topology={kind: required, key: topology.example/block}")
    preflight(*QUEUE, "cluster.kubernetes.topology={kind: unconstrained}")
    api.forbid("list", "topologies", KUEUE)
    preflight(*rack)  # Kueue checks what the user may not read


def test_a_job_without_a_topology_uses_no_flavor_with_one_unless_all_have_one(preflight: Notes, api: FakeApi) -> None:
    whole = put_queue(api, gpus=8)
    (group,) = whole["spec"]["resourceGroups"]
    large = [resource | {"nominalQuota": "16"} for resource in group["flavors"][0]["resources"]]
    group["flavors"].append({"name": "placed", "resources": [*large[:1], *group["flavors"][0]["resources"][1:]]})
    spec = {"nodeLabels": {PRODUCT: "H100"}, "topologyName": "racks"}
    api.put("resourceflavors", {"metadata": {"name": "placed"}, "spec": spec}, KUEUE, "")
    assert "flavor placed: it admits only pods that request a topology" in problems(preflight, *QUEUE)
    api.objects[(KUEUE, "resourceflavors", "", "h100")]["spec"]["topologyName"] = "racks"
    preflight(*QUEUE)


def test_the_number_of_pods_is_checked_if_the_queue_limits_it(preflight: Notes, api: FakeApi) -> None:
    whole = put_queue(api)
    (group,) = whole["spec"]["resourceGroups"]
    group["coveredResources"].append("pods")
    group["flavors"][0]["resources"].append({"name": "pods", "nominalQuota": "1"})
    assert "the job needs 2 pods, and there are at most 1" in problems(preflight, *QUEUE)


def test_a_volcano_queue_must_be_open(preflight: Notes, api: FakeApi) -> None:
    volcano = (*GPU, "cluster.kubernetes.backend=volcano", "cluster.kubernetes.queue=q")
    assert "no such Volcano queue" in problems(preflight, *volcano)
    api.put("queues", {"metadata": {"name": "q"}, "status": {"state": "Closed"}}, "scheduling.volcano.sh", "")
    assert "is Closed, and admits no jobs" in problems(preflight, *volcano)


def test_a_volcano_queue_that_is_too_small_is_distinguished_from_a_busy_one(preflight: Notes, api: FakeApi) -> None:
    volcano = (*GPU, "cluster.kubernetes.backend=volcano", "cluster.kubernetes.queue=q")
    queue: dict[str, Any] = {"metadata": {"name": "q"}, "spec": {"capability": {"nvidia.com/gpu": "8"}}}
    api.put("queues", queue, "scheduling.volcano.sh", "")
    assert "needs 16 nvidia.com/gpu, and the capability is 8" in problems(preflight, *volcano)
    queue["spec"]["capability"]["nvidia.com/gpu"] = "16"
    assert not [note for note in preflight(*volcano) if "busy" in note]
    queue["status"] = {"state": "Open", "allocated": {"nvidia.com/gpu": "8"}}
    assert any("8 of 16 nvidia.com/gpu are used; the job will wait" in note for note in preflight(*volcano))


def put_volume(
    api: FakeApi, policy: str | None = None, modes: tuple[str, ...] = ("ReadWriteMany",), **spec: Any
) -> None:
    """Add a volume for the claim: of a CSI driver with this policy, or of another kind."""
    body = claim("runs", modes=modes)
    body["spec"]["volumeName"] = "v"
    api.put("persistentvolumeclaims", body)
    source = spec or {"csi": {"driver": "d", "fsType": "ext4"}}
    api.put("persistentvolumes", {"metadata": {"name": "v"}, "spec": source}, namespace="")
    driver = {"metadata": {"name": "d"}, "spec": {"fsGroupPolicy": policy}}
    api.put("csidrivers", driver, "storage.k8s.io", "")


@pytest.mark.parametrize("volume", [{"policy": "None"}, {"policy": "ReadWriteOnceWithFSType"}, {"nfs": {}}])
def test_a_volume_that_ignores_fs_group_has_a_note(preflight: Notes, api: FakeApi, volume: dict[str, Any]) -> None:
    put_volume(api, **volume)
    assert any("fs_group 1000 has no effect on claim runs" in note for note in preflight(*GPU))


def test_a_volume_with_the_fs_group_applied_has_no_note(preflight: Notes, api: FakeApi) -> None:
    put_volume(api, "File")
    assert not [note for note in preflight(*GPU) if "fs_group" in note]
    put_volume(api, "None")
    api.forbid("get", "persistentvolumes")
    assert not [note for note in preflight(*GPU) if "fs_group" in note], "no note without the right to read the volume"


def test_a_run_directory_that_the_pods_cannot_write_is_a_problem(
    outlook: Outlook, api: FakeApi, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the runs root of this machine is the path in the pods, this user will own the run directory."""
    monkeypatch.setenv("SCALETRAIN_RUNS", str(tmp_path))
    settings = (
        *GPU,
        f"cluster.kubernetes.runs={{claim: runs, path: {tmp_path}}}",
        "cluster.kubernetes.run_as_user=4711",
    )
    put_volume(api, "None")
    with pytest.raises(SchedulerError, match=f"cannot write {tmp_path}"):
        outlook(*settings)
    put_volume(api, "File")
    assert not [note for note in outlook(*settings).notes if "cannot write" in note]


@pytest.mark.parametrize(
    ("uid", "gid", "mode", "may"),
    [
        *((1000, 1, 0o750, True), (1000, 1, 0o550, False), (1, 1000, 0o770, True), (1, 2000, 0o770, True)),
        *((1, 1000, 0o750, False), (1, 1, 0o777, True), (1, 1, 0o775, False)),
    ],
)
def test_owner_group_and_mode_decide_whether_the_pods_can_write(uid: int, gid: int, mode: int, may: bool) -> None:
    assert _may_write(1000, 2000, uid, gid, mode) is may


def test_a_run_directory_of_another_user_is_refused_by_resume(api: FakeApi, make_run: MakeRun) -> None:
    api.put("namespaces", {"metadata": {"name": "ml"}}, namespace="")
    for number in range(2):
        api.put("nodes", gpu_node(f"n{number}"), namespace="")
    put_volume(api, "None")
    made = make_run(*SETTINGS)
    begin_attempt(made.run, made.record.spec, scheduler="kubernetes", job_id="jobset/x-s1", nodes=("n",))
    if os.geteuid() == 0:
        os.chown(made.run.path, 4711, 4711)
    with pytest.raises(SchedulerError, match=r"cannot write .*run_as_user: \d+, or change the owner.* to 1000"):
        KubernetesBackend().preflight(made.record.spec, made.record.plan, made.run)


def test_a_job_for_a_held_queue_is_accepted_and_waits(outlook: Outlook, api: FakeApi) -> None:
    """Kueue then reports both queues as inactive; only a misconfigured queue is a problem."""
    whole = put_queue(api, stopPolicy="Hold")
    local = api.objects[(KUEUE, "localqueues", "ml", "team-a")]
    whole["status"] = {"conditions": [condition("Active", "False", "Stopped", "Can't admit new workloads: is stopped")]}
    elsewhere = condition("Active", "False", "ClusterQueueIsInactive", "Can't submit new workloads to clusterQueue")
    local["status"] = {"conditions": [elsewhere]}
    found = outlook(*QUEUE)
    assert any("ClusterQueue training is held (stopPolicy Hold)" in note for note in found.notes)
    assert (found.start.at, found.start.why) == (None, "ClusterQueue training is held")


@pytest.mark.parametrize(
    "checks", [{"admissionChecks": ["c"]}, {"admissionChecksStrategy": {"admissionChecks": [{"name": "c"}]}}]
)
def test_a_queue_that_sends_jobs_to_other_clusters_is_refused(
    preflight: Notes, api: FakeApi, checks: dict[str, Any]
) -> None:
    """MultiKueue copies the workload only, and its pods would wait for the ConfigMap of the run."""
    put_queue(api, **checks)
    check = {"metadata": {"name": "c"}, "spec": {"controllerName": f"{KUEUE}/multikueue"}}
    api.put("admissionchecks", check, KUEUE, "")
    refused = "queue = team-a: leads to ClusterQueue training, whose admission check c sends jobs to other clusters"
    assert refused in problems(preflight, *QUEUE)
    api.forbid("get", "admissionchecks", KUEUE)
    assert any("not checked: you need the right to get admissionchecks" in note for note in preflight(*QUEUE))
    del api.refusals["get", "admissionchecks"]
    check["spec"]["controllerName"] = f"{KUEUE}/provisioning-request"
    assert not [note for note in preflight(*QUEUE) if "admission" in note]


@pytest.mark.parametrize(
    ("settings", "spec", "text"),
    [
        (("cluster.kubernetes.node_selector={rack: r9}",), {}, "can run at most 0 of the job's pods, and 2 are needed"),
        ((), {"taints": [{"key": "team", "value": "b", "effect": "NoSchedule"}]}, "a toleration of team=b:NoSchedule"),
    ],
)
def test_unsuitable_nodes_are_a_problem_although_the_queue_has_quota(
    preflight: Notes, api: FakeApi, settings: tuple[str, ...], spec: dict[str, Any], text: str
) -> None:
    whole = put_queue(api)
    for number in range(4):
        api.put("nodes", gpu_node(f"n{number}", **spec), namespace="")
    assert text in problems(preflight, *QUEUE, *settings)
    whole["spec"]["admissionChecksStrategy"] = {"admissionChecks": [{"name": "provision"}]}  # it may add nodes
    assert any(text in note for note in preflight(*QUEUE, *settings))


def test_a_job_whose_nodes_are_cordoned_does_not_start_although_there_is_quota(outlook: Outlook, api: FakeApi) -> None:
    put_queue(api)
    for number in range(3):
        api.put("nodes", gpu_node(f"n{number}", unschedulable=True), namespace="")
    found = outlook(*QUEUE)
    assert (found.start.at, found.start.why) == (None, "nodes that the job needs are cordoned")
    assert any("3 suitable nodes are cordoned" in note for note in found.notes)


def test_nodes_of_any_flavor_of_the_queue_count(outlook: Outlook, api: FakeApi) -> None:
    """The flavor's labels and tolerations count, and one flavor with enough nodes is enough."""
    whole = put_queue(api)
    first = whole["spec"]["resourceGroups"][0]["flavors"][0]
    whole["spec"]["resourceGroups"][0]["flavors"].append({**first, "name": "other"})
    taint = {"key": "team", "value": "a", "effect": "NoSchedule"}
    more = {"nodeLabels": {"pool": "x"}, "tolerations": [{"key": "team", "operator": "Exists"}], "nodeTaints": [taint]}
    api.put("resourceflavors", {"metadata": {"name": "other"}, "spec": more}, KUEUE, "")
    for number in range(4):
        node = gpu_node(f"n{number}", taints=[taint] if number < 2 else [])
        node["metadata"]["labels"] = {"pool": "x"} if number < 2 else {}
        api.put("nodes", node, namespace="")
    assert outlook(*QUEUE).start.at is not None
