"""Queues of Kueue: a gang waits for its whole quota, and a job of higher priority preempts it."""

from dataclasses import dataclass
from typing import Any

import pytest

from tests.kubernetes_cluster.offers import Offers
from tests.kubernetes_cluster.place import Place, wait_for
from tests.kubernetes_cluster.site import Site

pytestmark = pytest.mark.kubernetes
_UNMANAGED = "Kueue does not manage this kind: it is not in integrations.frameworks of its configuration"


@dataclass(frozen=True)
class Queue:
    """A queue with quota for one gang of two pods. ``name``: of the LocalQueue, and of everything else."""

    name: str
    place: Place

    def settings(self, backend: str, priority: str) -> tuple[str, ...]:
        kubernetes = "cluster.kubernetes"
        chosen = f"{kubernetes}.priority={self.name}-{priority}"
        return f"{kubernetes}.backend={backend}", f"{kubernetes}.queue={self.name}", chosen

    def hold(self, policy: str | None) -> None:
        resource = self.place.offers.kueue("clusterqueues")
        self.place.server.patch(resource, self.name, {"spec": {"stopPolicy": policy or "None"}})


@pytest.fixture(scope="module")
def queue(place: Place, offers: Offers) -> Queue:
    offers.need_kueue()
    name = f"scaletrain-{place.suffix}"
    version = offers.served["kueue.x-k8s.io"]["clusterqueues"]

    def made(kind: str, plural: str, more: dict[str, object], *, of: str = name, outside: bool = True) -> None:
        body = {"apiVersion": version, "kind": kind, "metadata": {"name": of}, **more}
        (place.create_outside if outside else place.create)(offers.kueue(plural), body)

    made("ResourceFlavor", "resourceflavors", {"spec": {}})
    quotas = [{"name": "cpu", "nominalQuota": "2"}, {"name": "memory", "nominalQuota": "8Gi"}]
    spec = {
        "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": place.namespace}},
        "preemption": {"withinClusterQueue": "LowerPriority"},
        "resourceGroups": [{"coveredResources": ["cpu", "memory"], "flavors": [{"name": name, "resources": quotas}]}],
    }
    made("ClusterQueue", "clusterqueues", {"spec": spec})
    made("LocalQueue", "localqueues", {"spec": {"clusterQueue": name}}, outside=False)
    for priority, value in (("low", 10), ("high", 1000)):
        made("WorkloadPriorityClass", "workloadpriorityclasses", {"value": value}, of=f"{name}-{priority}")
    return Queue(name, place)


def need(backend: str, offers: Offers) -> None:
    offers.need_pods()
    if backend == "volcano":
        pytest.skip("the queues of Volcano are not Kueue's")


def submit(site: Site, run_id: str, settings: tuple[str, ...]) -> Any:
    """Submit a run; skip if it is refused because Kueue does not manage its kind."""
    said = site.submit(run_id, *settings, check=False)
    if "Kueue does not manage" in said.stderr:
        pytest.skip(_UNMANAGED)
    assert said.returncode == 0, said.stdout + said.stderr
    return said


def managed(site: Site, run_id: str) -> None:
    """Skip unless Kueue has taken the run on: an administrator chooses which kinds it manages."""

    def taken() -> bool:
        found = site.place.server.list(site.place.offers.kueue("workloads"), site.place.namespace)
        owners = [owner["name"] for one in found for owner in one["metadata"].get("ownerReferences", [])]
        return f"{run_id}-s1" in owners

    try:
        wait_for(taken, "Kueue has a Workload for the run", 30)
    except AssertionError:
        pytest.skip(_UNMANAGED)


def test_a_gang_waits_until_its_quota_is_free(site: Site, queue: Queue, backend: str, offers: Offers) -> None:
    need(backend, offers)
    submit(site, "holds", queue.settings(backend, "low"))
    managed(site, "holds")
    site.running("holds")
    said = submit(site, "waits", queue.settings(backend, "low"))
    assert "is not known" in said.stderr or "unknown" in said.stderr, said.stderr
    waits = site.wait_until("waits", lambda now: "quota" in now["why"], "the quota is what it waits for")
    assert waits["state"] == "queued"
    assert not site.pods("waits")
    assert queue.name in site.scaletrain("explain", "waits").stdout
    site.finish("holds")
    site.running("waits")
    site.cancel("waits")


def test_a_preempted_gang_has_its_grace_and_runs_again(site: Site, queue: Queue, backend: str, offers: Offers) -> None:
    need(backend, offers)
    submit(site, "low", queue.settings(backend, "low"))
    managed(site, "low")
    first = site.running("low")
    submit(site, "high", queue.settings(backend, "high"))
    site.running("high")
    preempted = site.wait_until("low", lambda now: "preempted by Kueue" in now["why"], "it is preempted")
    assert preempted["state"] == "queued"
    site.finish("high")
    assert site.wait("high", "finished")
    site.running("low", other_than=first)
    (jobset,) = site.workloads("low")
    assert jobset["status"].get("restartsCountTowardsMax", 0) == 0
    site.finish("low")
    site.wait("low", "finished")


def test_a_held_queue_accepts_runs_that_wait(site: Site, queue: Queue, backend: str, offers: Offers) -> None:
    need(backend, offers)
    queue.hold("Hold")
    try:
        said = submit(site, "held", queue.settings(backend, "low"))
        assert "Hold" in said.stderr
        managed(site, "held")
        assert site.wait("held", "queued")
        assert not site.pods("held")
    finally:
        queue.hold(None)
    site.running("held")
    site.cancel("held")


def test_a_waiting_gang_is_cancelled_at_once(site: Site, queue: Queue, backend: str, offers: Offers) -> None:
    need(backend, offers)
    submit(site, "holds", queue.settings(backend, "low"))
    managed(site, "holds")
    site.running("holds")
    submit(site, "waits", queue.settings(backend, "low"))
    site.wait("waits", "queued")
    site.cancel("waits")
    assert len(site.running("holds")) == 2
    site.cancel("holds")
