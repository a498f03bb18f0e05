"""The objects in k8s/ refer to each other by existing names, which otherwise only a cluster would check."""

from __future__ import annotations

import re
import shutil
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from scaletrain_cli.errors import SpecError
from scaletrain_cli.launch.backends.kubernetes.names import Workload
from scaletrain_cli.launch.submit import plan_for_engine
from scaletrain_cli.spec import load_spec
from tests.launch.backends.kubernetes.schemas import require_valid

PROJECT = Path(__file__).parent.parent
KUBERNETES = PROJECT / "k8s"
OVERLAYS = ("overlays/kueue", "overlays/no-queue")
# Values of Helm charts, and a run spec: not objects.
OTHERS = ("gpu-operator-values.yaml", "kueue-values.yaml", "smoke.yaml")
FILES = [
    *(KUBERNETES / name for name in OTHERS),
    *(path for folder in ("base", *OVERLAYS) for path in sorted((KUBERNETES / folder).glob("*.yaml"))),
]
Objects = dict[tuple[str, str], dict[str, Any]]


@cache
def documents(name: str) -> list[dict[str, Any]]:
    return list(YAML(typ="safe").load_all((KUBERNETES / name).read_text(encoding="utf-8")))


def by_name(found: list[dict[str, Any]]) -> Objects:
    """Return the objects by kind and name, each once."""
    result = {(document["kind"], document["metadata"]["name"]): document for document in found}
    assert len(result) == len(found), "two objects of one kind and name"
    return result


def objects_of(folder: str) -> list[dict[str, Any]]:
    """Return the objects of a Kustomize folder, which lists files and folders and changes nothing in them."""
    (kustomization,) = documents(f"{folder}/kustomization.yaml")
    assert kustomization.keys() == {"apiVersion", "kind", "resources"}
    found = []
    for resource in kustomization["resources"]:
        path = (KUBERNETES / folder / resource).resolve().relative_to(KUBERNETES)
        found += objects_of(str(path)) if (KUBERNETES / path).is_dir() else documents(str(path))
    return found


@cache
def objects(overlay: str = "overlays/kueue") -> Objects:
    """Return every Kubernetes object of an overlay and its base."""
    return by_name(objects_of(overlay))


def of_kind(kind: str) -> dict[str, dict[str, Any]]:
    return {name: document for (found, name), document in objects().items() if found == kind}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_every_file_is_valid_yaml_for_helm_or_kubectl(path: Path) -> None:
    found = documents(str(path.relative_to(KUBERNETES)))
    assert found
    for document in found:
        assert isinstance(document, dict)
        if path.name not in OTHERS:
            assert {"apiVersion", "kind"} <= document.keys()


def test_every_file_of_objects_is_in_an_overlay() -> None:
    for folder in ("base", *OVERLAYS):
        listed = set(documents(f"{folder}/kustomization.yaml")[0]["resources"])
        there = {path.name for path in (KUBERNETES / folder).glob("*.yaml")} - {"kustomization.yaml"}
        assert there == {name for name in listed if name.endswith(".yaml")}


def test_the_overlay_without_a_queue_needs_no_kueue() -> None:
    with_queue, without = objects(), objects("overlays/no-queue")
    assert not [one for one in without.values() if "kueue" in one["apiVersion"]]
    assert {key: one for key, one in without.items() if key[0] != "ResourceQuota"}.items() <= with_queue.items()
    assert without["ResourceQuota", "training"]["metadata"]["namespace"] == "ml"


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="needs kubectl")
@pytest.mark.parametrize("folder", ["base", *OVERLAYS])
def test_kubectl_renders_the_same_objects(folder: str) -> None:
    command = ["kubectl", "kustomize", str(KUBERNETES / folder)]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert by_name(list(YAML(typ="safe").load_all(text))) == by_name(objects_of(folder))


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_core_objects_are_valid_by_the_schemas_of_kubernetes(overlay: str) -> None:
    for one in objects_of(overlay):
        if "kueue" not in one["apiVersion"]:
            require_valid(one)


def test_the_queue_reaches_flavors_with_quota_for_every_resource() -> None:
    flavors, topologies = of_kind("ResourceFlavor"), of_kind("Topology")
    assert of_kind("LocalQueue")
    for queue in of_kind("LocalQueue").values():
        cluster_queue = of_kind("ClusterQueue")[queue["spec"]["clusterQueue"]]
        assert ("Namespace", queue["metadata"]["namespace"]) in objects()
        selected = cluster_queue["spec"]["namespaceSelector"]["matchLabels"]["kubernetes.io/metadata.name"]
        assert selected == queue["metadata"]["namespace"]
        for group in cluster_queue["spec"]["resourceGroups"]:
            for flavor in group["flavors"]:
                assert flavor["name"] in flavors
                assert [resource["name"] for resource in flavor["resources"]] == group["coveredResources"]
    for flavor in flavors.values():
        assert flavor["spec"]["topologyName"] in topologies


def test_on_demand_nodes_come_first_and_only_spot_nodes_are_tainted() -> None:
    flavors = of_kind("ResourceFlavor")
    assert of_kind("ClusterQueue")
    for queue in of_kind("ClusterQueue").values():
        (group,) = queue["spec"]["resourceGroups"]
        first, second = (flavors[flavor["name"]]["spec"] for flavor in group["flavors"])
        assert "nodeTaints" not in first
        assert second["nodeTaints"]


def test_teams_share_a_cohort_and_can_borrow_unused_quota() -> None:
    queues = [queue["spec"] for queue in of_kind("ClusterQueue").values()]
    assert len(queues) > 1
    assert len({queue["cohortName"] for queue in queues}) == 1
    for queue in queues:
        assert queue["preemption"]["reclaimWithinCohort"] == "Any"
        lent = {
            (flavor["name"], resource["name"]): resource["nominalQuota"]
            for other in queues
            if other is not queue
            for flavor in other["resourceGroups"][0]["flavors"]
            for resource in flavor["resources"]
        }
        for flavor in queue["resourceGroups"][0]["flavors"]:
            for resource in flavor["resources"]:
                assert resource["borrowingLimit"] == lent[flavor["name"], resource["name"]]


def test_kueue_releases_the_nodes_of_a_gang_that_cannot_start() -> None:
    (values,) = documents("kueue-values.yaml")
    configuration = YAML(typ="safe").load(values["managerConfig"]["controllerManagerConfigYaml"])
    assert configuration["apiVersion"] == "config.kueue.x-k8s.io/v1beta2"
    assert {"timeout", "recoveryTimeout"} <= configuration["waitForPodsReady"].keys()
    assert configuration["waitForPodsReady"]["blockAdmission"] is False
    assert {"jobset.x-k8s.io/jobset", "trainer.kubeflow.org/trainjob"} <= {*configuration["integrations"]["frameworks"]}


def test_the_smoke_run_uses_the_objects_of_these_files() -> None:
    spec = load_spec(KUBERNETES / "smoke.yaml", ("cluster.kubernetes.image=registry.example/scaletrain:TAG",))
    kubernetes = spec.cluster.kubernetes
    assert ("Namespace", kubernetes.namespace) in objects()
    assert ("LocalQueue", kubernetes.queue) in objects()
    assert ("WorkloadPriorityClass", kubernetes.priority) in objects()
    assert ("PersistentVolumeClaim", kubernetes.runs.claim) in objects()
    assert plan_for_engine(spec, "smoke.yaml").memory.fits


def test_the_smoke_run_asks_for_an_image_before_anything_is_sent() -> None:
    with pytest.raises(SpecError, match=r"cluster\.kubernetes\.image = REGISTRY/"):
        load_spec(KUBERNETES / "smoke.yaml")


def test_the_network_policy_selects_the_pods_of_runs() -> None:
    (policy,) = of_kind("NetworkPolicy").values()
    chosen = policy["spec"]["podSelector"]["matchLabels"]
    assert chosen.items() <= Workload("any", 1).labels.items()
    assert policy["spec"]["ingress"] == [{"from": [{"podSelector": {"matchLabels": chosen}}]}]


def test_the_network_policy_lets_pods_ask_every_kind_of_name_server() -> None:
    """CoreDNS in kube-system, a cache at a link-local address of the node, and OpenShift's pods at port 5353."""
    (policy,) = of_kind("NetworkPolicy").values()
    to_anybody = [port for rule in policy["spec"]["egress"] if "to" not in rule for port in rule["ports"]]
    for number in (53, 5353):
        assert [{"protocol": name, "port": number} in to_anybody for name in ("UDP", "TCP")] == [True, True]


def test_the_gpu_operator_tolerates_every_taint_of_a_gpu_node() -> None:
    (values,) = documents("gpu-operator-values.yaml")
    taints = {
        taint["key"] for flavor in of_kind("ResourceFlavor").values() for taint in flavor["spec"].get("nodeTaints", [])
    }
    for operand in (values["daemonsets"], values["node-feature-discovery"]["worker"]):
        assert {"nvidia.com/gpu", *taints} <= {toleration["key"] for toleration in operand["tolerations"]}


def test_workload_and_pod_priority_classes_agree() -> None:
    for_jobs, for_pods = of_kind("WorkloadPriorityClass"), of_kind("PriorityClass")
    assert {name: job["value"] for name, job in for_jobs.items()} == {
        name: pod["value"] for name, pod in for_pods.items()
    }
    assert all(pod["preemptionPolicy"] == "Never" for pod in for_pods.values())


def test_every_binding_names_an_existing_role_and_no_role_has_all_permissions() -> None:
    for binding in [*of_kind("RoleBinding").values(), *of_kind("ClusterRoleBinding").values()]:
        assert (binding["roleRef"]["kind"], binding["roleRef"]["name"]) in objects()
    for role in [*of_kind("Role").values(), *of_kind("ClusterRole").values()]:
        for rule in role["rules"]:
            assert "*" not in [*rule["apiGroups"], *rule["resources"], *rule["verbs"]]
            assert "secrets" not in rule["resources"]
    assert all(account["automountServiceAccountToken"] is False for account in of_kind("ServiceAccount").values())


def test_the_image_runs_without_root_and_copies_existing_files() -> None:
    text = (KUBERNETES / "Containerfile").read_text(encoding="utf-8")
    assert re.search(r"^USER 1000$", text, re.MULTILINE)
    assert re.search(r"^ENTRYPOINT \[", text, re.MULTILINE), "the shell form would swallow SIGTERM"
    copied = [source for line in re.findall(r"^COPY (.+) \S+$", text, re.MULTILINE) for source in line.split()]
    assert [source for source in copied if not (PROJECT / source).exists()] == []
