"""Pods that are evicted, and nodes that are drained, deleted or silent. Only an eviction disturbs nothing else."""

import pytest

from tests.kubernetes_cluster.offers import Offers
from tests.kubernetes_cluster.place import wait_for
from tests.kubernetes_cluster.site import Site

pytestmark = pytest.mark.kubernetes
# One pod on each node, so that a gang loses one pod with a node.
SOON = "cluster.kubernetes.not_ready_seconds=5"


def charged(site: Site, run_id: str) -> int:
    """Return how many restarts count against the limit of the run's JobSet."""
    (jobset,) = site.workloads(run_id)
    return int(jobset.get("status", {}).get("restartsCountTowardsMax", 0))


def test_an_evicted_pod_restarts_the_gang_without_charge(site: Site, backend: str, offers: Offers) -> None:
    offers.need_pods()
    site.submit("evicted", f"cluster.kubernetes.backend={backend}")
    first = site.running("evicted")
    site.place.server.evict(first[1]["metadata"]["name"], site.place.namespace)
    site.running("evicted", other_than=first)
    if backend != "volcano":
        assert charged(site, "evicted") == 0
    seen = site.wait_until("evicted", lambda now: "restart" in now["job"]["detail"], "status counts the restart")
    assert "restart 1" in seen["job"]["detail"]
    site.cancel("evicted")


def test_a_drained_node_costs_no_restart(site: Site, backend: str, offers: Offers, nodes_of_its_own: None) -> None:
    offers.need_pods()
    site.submit("drained", f"cluster.kubernetes.backend={backend}")
    first = site.running("drained")
    node = first[0]["spec"]["nodeName"]
    site.cordon(node)
    try:
        for pod in first:
            if pod["spec"]["nodeName"] == node:
                site.place.server.evict(pod["metadata"]["name"], site.place.namespace)
        again = site.running("drained", other_than=first)
        assert node not in {pod["spec"]["nodeName"] for pod in again}
        if backend != "volcano":
            assert charged(site, "drained") == 0
    finally:
        site.cordon(node, False)
    site.cancel("drained")


def test_a_deleted_node_costs_no_restart(site: Site, backend: str, offers: Offers, nodes_of_its_own: None) -> None:
    offers.need_pods()
    site.submit("reclaimed", f"cluster.kubernetes.backend={backend}")
    first = site.running("reclaimed")
    name = first[1]["spec"]["nodeName"]
    node = site.place.server.get("nodes", name)
    assert node is not None
    site.place.server.delete("nodes", name)
    try:
        again = site.running("reclaimed", other_than=first, seconds=300)
        assert name not in {pod["spec"]["nodeName"] for pod in again}
        if backend != "volcano":
            assert charged(site, "reclaimed") == 0
    finally:
        site.restore_node(node)
    site.cancel("reclaimed")


def test_a_silent_node_is_named_and_ended(site: Site, backend: str, offers: Offers, nodes_of_its_own: None) -> None:
    offers.need_pods()
    offers.need_silence()
    site.submit("silent", f"cluster.kubernetes.backend={backend}", SOON, "cluster.grace_seconds=1")
    pods = site.running("silent")
    name = pods[1]["spec"]["nodeName"]
    site.silence(name)
    try:
        seen = site.wait_until("silent", lambda now: name in now["why"], "status names the node", 300)
        assert "report" in seen["why"] or "unreachable" in seen["why"], seen["why"]
        site.scaletrain("cancel", "silent", "--yes")
        ending = site.status("silent")
        assert ending["job"]["state"] in ("ending", "ended")
        assert name in ending["why"] or name in ending["job"]["detail"], ending

        def forced() -> bool:
            done = site.scaletrain("cancel", "silent", "--yes", "--force", check=False)
            return done.returncode == 0 and not site.pods("silent")

        wait_for(forced, "a forced cancel deletes the pod of the silent node", 240)
        assert site.wait("silent", "cancelled")["job"]["state"] == "ended"
    finally:
        site.wake(name)
