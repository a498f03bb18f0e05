"""The version of a kind is asked from the API server, and what is written and read follows it.

The answers are written in the form of a real server by the fake one; test_schemas.py has the schemas. The fields that
the launcher reads are also looked up in Kueue's released CRDs, if given (schemas.py).
"""

from typing import Any

import pytest

from scaletrain_cli.errors import SchedulerError
from scaletrain_cli.launch.backends.kubernetes import api_kinds
from scaletrain_cli.launch.backends.kubernetes.api import Cluster, NotServedError
from scaletrain_cli.launch.backends.kubernetes.api_kinds import (
    CLUSTER_QUEUE,
    COHORT,
    JOB_SET,
    LOCAL_QUEUE,
    ServedVersions,
)
from scaletrain_cli.launch.backends.kubernetes.backend import KubernetesBackend
from scaletrain_cli.launch.submit import submit_run
from tests.launch.backends.kubernetes.conftest import SETTINGS
from tests.launch.backends.kubernetes.fake_api import FakeApi, status
from tests.launch.backends.kubernetes.schemas import crd_schemas, needs_crds
from tests.launch.conftest import MakeRun

KUEUE = "kueue.x-k8s.io"
SCHEDULING = "scheduling.k8s.io"
# Paths that the launcher reads of Kueue's objects, in the names of the newest version.
READ = {
    "AdmissionCheck": ("spec.controllerName",),
    "ClusterQueue": (
        "spec.admissionChecksStrategy.admissionChecks[].name",
        "spec.cohortName",
        "spec.resourceGroups[].flavors[].resources[].nominalQuota",
        "spec.resourceGroups[].flavors[].resources[].borrowingLimit",
        "spec.resourceGroups[].flavors[].resources[].lendingLimit",
        "spec.resourceGroups[].coveredResources",
        "spec.namespaceSelector",
        "spec.stopPolicy",
        "status.pendingWorkloads",
        "status.flavorsReservation[].resources[].total",
        "status.conditions",
    ),
    "LocalQueue": ("spec.clusterQueue", "spec.stopPolicy", "status.conditions"),
    "Cohort": ("spec.parentName", "spec.resourceGroups"),
    "ResourceFlavor": ("spec.nodeLabels", "spec.nodeTaints", "spec.tolerations", "spec.topologyName"),
    "Topology": ("spec.levels[].nodeLabel",),
    "Workload": (
        *("spec.queueName", "spec.priority", "spec.active", "spec.podSets[].template", "status.conditions"),
        *("status.requeueState.requeueAt", "status.admissionChecks[].state"),
    ),
}


def serve_only(api: FakeApi, group: str, versions: dict[str, tuple[str, ...]]) -> None:
    api.installed = {each: kinds for each, kinds in api.installed.items() if each.partition("/")[0] != group}
    api.installed |= {f"{group}/{version}": kinds for version, kinds in versions.items()}


@pytest.mark.parametrize("version", ["v1beta2", "v1beta1"])
def test_kueue_is_read_in_the_version_that_is_served(cluster: Cluster, api: FakeApi, version: str) -> None:
    serve_only(api, KUEUE, {version: ("clusterqueues", "localqueues")})
    old = "cohort" if version == "v1beta1" else "cohortName"
    api.put("clusterqueues", {"metadata": {"name": "c"}, "spec": {old: "all"}}, KUEUE, "")
    found = cluster.get(CLUSTER_QUEUE, "", "c")
    assert found["spec"] == {"cohortName": "all"}
    assert cluster.find(LOCAL_QUEUE, "ml") == []
    for_groups = [asked for asked in api.asked if asked.count("/") == 2 and asked.startswith("GET /apis/")]
    assert for_groups == [f"GET /apis/{KUEUE}"], "asked once for all kinds of the group"
    assert {asked.split("/")[3] for asked in api.asked if asked.count("/") > 2} == {version}


def test_a_kind_that_the_first_served_version_lacks_is_found_in_the_next(cluster: Cluster, api: FakeApi) -> None:
    api.strict = True
    serve_only(api, KUEUE, {"v1beta1": ("clusterqueues",), "v1alpha1": ("cohorts",)})
    api.put("cohorts", {"metadata": {"name": "all"}, "spec": {"parent": "root"}}, KUEUE, "")
    found = cluster.get(COHORT, "", "all")
    assert found["spec"] == {"parentName": "root"}


def test_an_upgrade_of_the_controller_is_noticed(cluster: Cluster, api: FakeApi) -> None:
    serve_only(api, KUEUE, {"v1beta1": ("localqueues",)})
    cluster.find(LOCAL_QUEUE, "ml")
    serve_only(api, KUEUE, {"v1beta2": ("localqueues",)})
    assert cluster.find(LOCAL_QUEUE, "ml") == []


def test_without_the_right_to_ask_the_versions_are_tried(cluster: Cluster, api: FakeApi) -> None:
    serve_only(api, KUEUE, {"v1beta1": ("localqueues",)})
    api.refusals[("get", f"/apis/{KUEUE}")] = (403, status(403, "Forbidden", "no discovery"))
    assert cluster.find(LOCAL_QUEUE, "ml") == []


def test_a_version_that_is_not_known_is_refused_with_those_that_are(cluster: Cluster, api: FakeApi) -> None:
    serve_only(api, JOB_SET.group, {"v1": ("jobsets",)})
    with pytest.raises(NotServedError) as refused:
        cluster.get(JOB_SET, "ml", "j")
    assert refused.value.reason.code == "kubernetes.served-in-other-versions"
    assert (refused.value.reason.params["served"], refused.value.reason.params["known"]) == (["v1"], ["v1alpha2"])
    missing = cluster.missing(JOB_SET)
    assert missing.reason == refused.value.reason


@pytest.mark.parametrize("version", ["v1alpha2", "v1alpha3", "v1beta1"])
@pytest.mark.parametrize("given", ["auto", "v1alpha2"])
def test_a_pod_group_has_the_version_that_is_served(api: FakeApi, make_run: MakeRun, version: str, given: str) -> None:
    serve_only(api, SCHEDULING, {"v1": ("priorityclasses",), version: ("podgroups",)})
    api.strict = True
    made = make_run(*SETTINGS, f"cluster.kubernetes.native_gang={given}")
    submit_run(made.run, made.record, KubernetesBackend())
    (group,) = api.all("podgroups")
    assert group["apiVersion"] == f"{SCHEDULING}/{version}"
    assert group["metadata"]["ownerReferences"][0]["kind"] == "JobSet"


def test_a_submission_is_refused_where_no_pod_group_is_served(api: FakeApi, make_run: MakeRun) -> None:
    serve_only(api, SCHEDULING, {"v1": ("priorityclasses",)})
    api.strict = True
    api.put("namespaces", {"metadata": {"name": "ml"}}, namespace="")
    made = make_run(*SETTINGS, "cluster.kubernetes.native_gang=auto")
    with pytest.raises(SchedulerError, match=r"cluster\.kubernetes\.native_gang: .* has no PodGroup"):
        KubernetesBackend().preflight(made.record.spec, made.record.plan)


def test_a_kind_that_is_known_in_one_version_is_not_asked_for() -> None:
    versions = ServedVersions(lambda group: pytest.fail(f"asked for {group}"))
    assert versions.candidates(JOB_SET) == [JOB_SET]


def has_path(schema: dict[str, Any], path: str) -> bool:
    for part in path.split("."):
        schema = schema.get("properties", {}).get(part.removesuffix("[]"), {})
        schema = schema.get("items", {}) if part.endswith("[]") else schema
    return bool(schema)


@needs_crds
@pytest.mark.parametrize("version", ["v1beta2", "v1beta1"])
@pytest.mark.parametrize("kind", READ)
def test_the_fields_that_are_read_are_in_the_released_schemas(version: str, kind: str) -> None:
    schema = crd_schemas(KUEUE)[f"{KUEUE}/{version}", kind]
    older = {"cohortName": "cohort"} if version == "v1beta1" else {}  # parentName was parent in v1alpha1 only
    assert {old: new for new, old in older.items()}.items() <= api_kinds._RENAMED.items()
    names = [".".join(older.get(part, part) for part in path.split(".")) for path in READ[kind]]
    assert [name for name in names if not has_path(schema, name)] == []
