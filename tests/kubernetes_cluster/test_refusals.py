"""Specs and states of the cluster in which a run can never start: each is refused, and nothing is left behind."""

import pytest

from scaletrain_cli.launch.backends.kubernetes.api_kinds import BACKENDS
from tests.kubernetes_cluster.offers import KUEUE, Offers
from tests.kubernetes_cluster.place import Place, wait_for
from tests.kubernetes_cluster.server import Object
from tests.kubernetes_cluster.site import Site

pytestmark = pytest.mark.kubernetes
K = "cluster.kubernetes"
SPEC, CLUSTER = 2, 4

# Name: the settings, the exit code, and a part of the message. $ stands for a name that exists nowhere.
REFUSED: dict[str, tuple[tuple[str, ...], int, str]] = {
    "namespace with capitals": ((f"{K}.namespace=Team",), SPEC, "namespace"),
    "image without a tag": ((f"{K}.image=busybox",), SPEC, "image"),
    "image that is none": ((f"{K}.image='UPPER case:1'",), SPEC, "image"),
    "label value with a space": ((f"{K}.node_selector={{pool: 'a b'}}",), SPEC, "node_selector"),
    "toleration without its value": ((f"{K}.tolerations=[{{key: a, operator: Equal}}]",), SPEC, "value"),
    "toleration with seconds": ((f"{K}.tolerations=[{{key: a, effect: NoSchedule, seconds: 5}}]",), SPEC, "NoExecute"),
    "relative path of the volume": ((f"{K}.runs={{claim: runs, path: runs}}",), SPEC, "path"),
    "path of the pod's own": ((f"{K}.volumes=[{{claim: runs, path: /dev/shm}}]",), SPEC, "/dev/shm"),
    "secret of the launcher": ((f"{K}.secrets={{MASTER_ADDR: {{secret: s, key: k}}}}",), SPEC, "MASTER_ADDR"),
    "no core": ((f"{K}.cpus_per_node=0",), SPEC, "cpus_per_node"),
    "unknown backend": ((f"{K}.backend=deployment",), SPEC, "backend"),
    "context that is missing": ((f"{K}.context=nowhere-$",), CLUSTER, "nowhere-$"),
    "namespace that is missing": ((f"{K}.namespace=missing-$",), CLUSTER, "missing-$"),
    "claim that is missing": ((f"{K}.runs={{claim: missing-$}}",), CLUSTER, "missing-$"),
    "second claim that is missing": ((f"{K}.volumes=[{{claim: other-$, path: /data}}]",), CLUSTER, "other-$"),
    "claim for one node": ((f"{K}.runs={{claim: once}}",), CLUSTER, "ReadWriteOnce"),
    "secret that is missing": ((f"{K}.secrets={{TOKEN: {{secret: none-$, key: k}}}}",), CLUSTER, "none-$"),
    "key that the secret lacks": ((f"{K}.secrets={{TOKEN: {{secret: keyed, key: absent}}}}",), CLUSTER, "absent"),
    "service account that is missing": ((f"{K}.service_account=nobody-$",), CLUSTER, "nobody-$"),
    "pod priority that is missing": ((f"{K}.pod_priority=no-priority-$",), CLUSTER, "no-priority-$"),
    "label that no node has": ((f"{K}.node_selector={{suite/none: '$'}}",), CLUSTER, "suite/none"),
    "more cores than any node": ((f"{K}.cpus_per_node=100000",), CLUSTER, "cpu"),
    "more memory than any node": ((f"{K}.memory_per_node=900TB",), CLUSTER, "memory"),
    "device that no node has": ((f"{K}.rdma_resource=rdma/none-$",), CLUSTER, "rdma/none-$"),
    "queue that is missing": ((f"{K}.queue=no-queue-$",), CLUSTER, "no-queue-$"),
    "priority that Kueue lacks": ((f"{K}.queue=no-queue-$", f"{K}.priority=no-$"), CLUSTER, "no-$"),
}


@pytest.fixture(scope="module")
def prepared(place: Place) -> Place:
    """Return the namespace with a claim for one node and a Secret with one key."""
    place.claim("once", mode="ReadWriteOnce")
    secret: Object = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "keyed"}, "stringData": {"k": "v"}}
    place.create("secrets", secret)
    return place


def refused(site: Site, settings: tuple[str, ...], code: int, said: str) -> None:
    """Submit a run; check the exit code and the message, and that nothing was created."""
    before = site.place.names()
    done = site.submit("refused", *settings, check=False)
    assert done.returncode == code, done.stdout + done.stderr
    text = "".join(done.stderr.split())  # the lines of a message are wrapped
    assert "".join(said.split()) in text, done.stderr
    assert "Traceback" not in done.stderr
    assert site.place.names() == before
    assert not site.run_directory("refused").exists()


@pytest.mark.parametrize("name", REFUSED)
def test_a_run_that_can_never_start_leaves_nothing(site: Site, prepared: Place, offers: Offers, name: str) -> None:
    settings, code, said = REFUSED[name]
    if code == CLUSTER:
        offers.need_backend("jobset")
    if "queue" in name or "Kueue" in name:
        offers.need_kueue()
    suffix = prepared.suffix
    refused(site, tuple(one.replace("$", suffix) for one in settings), code, said.replace("$", suffix))


@pytest.mark.parametrize("missing", ["jobset", "trainjob", "volcano"])
def test_a_kind_of_workload_that_is_not_installed_is_refused(site: Site, offers: Offers, missing: str) -> None:
    kind = BACKENDS[missing]
    if kind.plural in offers.served[kind.group]:
        pytest.skip(f"the cluster serves {kind.name}")
    refused(site, (f"{K}.backend={missing}",), CLUSTER, kind.name)


def test_a_resource_quota_that_is_too_small_is_refused(site: Site, place: Place, backend: str) -> None:
    body: Object = {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "small"}}
    place.create("resourcequotas", {**body, "spec": {"hard": {"requests.cpu": "1"}}})
    try:

        def counted() -> bool:
            found = place.server.get("resourcequotas", "small", place.namespace) or {}
            return bool(found.get("status", {}).get("hard"))

        wait_for(counted, "the quota is counted")
        refused(site, (f"{K}.backend={backend}",), CLUSTER, "small")
    finally:
        place.server.delete("resourcequotas", "small", place.namespace)


def test_a_pod_that_the_security_level_of_the_namespace_forbids_is_refused(site: Site, offers: Offers) -> None:
    offers.need_backend("jobset")
    devices = {name for node in offers.nodes for name in node["status"]["allocatable"] if name.startswith("rdma/")}
    if not devices:
        pytest.skip("no node has an RDMA device, whose pods request a capability")
    place, label = site.place, "pod-security.kubernetes.io/enforce"
    place.server.patch("namespaces", place.namespace, {"metadata": {"labels": {label: "restricted"}}})
    try:
        refused(site, (f"{K}.rdma_resource={min(devices)}",), CLUSTER, "IPC_LOCK")
    finally:
        place.server.patch("namespaces", place.namespace, {"metadata": {"labels": {label: None}}})


def test_a_quota_that_can_never_hold_the_gang_is_refused(site: Site, place: Place, offers: Offers) -> None:
    offers.need_backend("jobset")
    offers.need_kueue()
    name = f"scaletrain-tiny-{place.suffix}"
    version = offers.served[KUEUE]["clusterqueues"]
    quotas = [{"name": "cpu", "nominalQuota": "1"}, {"name": "memory", "nominalQuota": "64Gi"}]
    group = {"coveredResources": ["cpu", "memory"], "flavors": [{"name": name, "resources": quotas}]}
    flavor: Object = {"apiVersion": version, "kind": "ResourceFlavor", "metadata": {"name": name}, "spec": {}}
    queue: Object = {"apiVersion": version, "kind": "ClusterQueue", "metadata": {"name": name}}
    local: Object = {"apiVersion": version, "kind": "LocalQueue", "metadata": {"name": "tiny"}}
    place.create_outside(offers.kueue("resourceflavors"), flavor)
    whole = {**queue, "spec": {"namespaceSelector": {}, "resourceGroups": [group]}}
    place.create_outside(offers.kueue("clusterqueues"), whole)
    place.create(offers.kueue("localqueues"), {**local, "spec": {"clusterQueue": name}})
    refused(site, (f"{K}.queue=tiny",), CLUSTER, "cpu")


def test_more_devices_than_a_node_has_are_refused(site: Site, offers: Offers) -> None:
    offers.need_backend("jobset")
    offers.need_gpus()
    most = site.most_of_a_node("nvidia.com/gpu")
    gpus = ("cluster.gpu=h100-sxm-80gb", f"cluster.gpus_per_node={2 * most}", "training.global_batch_size=1024")
    refused(site, (*gpus, f"{K}.memory_per_node=8GB", f"{K}.shm_size=64MB"), CLUSTER, "nvidia.com/gpu")
