"""The life of a run: to its end, cancelled, resumed, and every exit code of a pod."""

import pytest

from tests.kubernetes_cluster.offers import Offers
from tests.kubernetes_cluster.place import wait_for
from tests.kubernetes_cluster.server import Object
from tests.kubernetes_cluster.site import Site

pytestmark = pytest.mark.kubernetes
RESOURCES = {"jobset": "jobsets", "trainjob": "trainjobs", "volcano": "vcjobs"}
FINAL = (2, 3, 93)


def restarts(site: Site, run_id: str, backend: str) -> tuple[int, int]:
    """Return how often the gang was restarted, and how many of these count against its limit."""
    if backend == "volcano":
        (job,) = site.workloads(run_id, "vcjobs")
        count = job.get("status", {}).get("retryCount", 0)
        return count, count
    (jobset,) = site.workloads(run_id)
    status = jobset.get("status", {})
    return status.get("restarts", 0), status.get("restartsCountTowardsMax", 0)


def test_a_run_starts_its_gang_and_finishes(site: Site, backend: str, offers: Offers) -> None:
    offers.need_pods()
    site.submit("journey", f"cluster.kubernetes.backend={backend}")
    assert site.wait("journey", "queued", "starting", "running")["job_id"].startswith(f"{backend}/journey-s1")
    first = site.running("journey")
    running = site.wait("journey", "running", "starting")
    assert len(running["nodes"]) >= 1
    assert {pod["spec"]["nodeName"] for pod in first} == set(running["nodes"])
    site.finish("journey")
    assert site.wait("journey", "finished")["job"]["state"] == "ended"
    assert "finished" in site.scaletrain("list").stdout


@pytest.mark.parametrize("code", [1, 2, 3, 4, 5, 75, 93])
def test_every_exit_code_restarts_charges_or_ends_the_run(site: Site, backend: str, offers: Offers, code: int) -> None:
    offers.need_pods()
    run_id = f"exit-{code}"
    site.submit(run_id, f"cluster.kubernetes.backend={backend}", "restarts={node: 1, crash: 0, oom: 0, preemption: 5}")
    first = site.running(run_id)
    site.end(first[0], code)
    if code in FINAL:
        assert f"exit code {code}" in site.wait(run_id, "failed")["why"]
        assert not site.pods(run_id)
        return
    again = site.running(run_id, other_than=first)
    charged = backend == "volcano" or code != 75
    assert restarts(site, run_id, backend) == (1, int(charged))
    assert site.status(run_id)["state"] in ("queued", "running", "starting")
    if charged and backend != "volcano":  # the budget is used up
        site.end(again[0], code)
        assert f"exit code {code}" in site.wait(run_id, "failed")["why"]
    else:
        site.cancel(run_id)


def test_cancel_gives_the_pods_their_grace_period_and_leaves_nothing(site: Site, backend: str, offers: Offers) -> None:
    offers.need_pods()
    site.submit("stopped", f"cluster.kubernetes.backend={backend}")
    pods = site.running("stopped")
    wanted = site.scaletrain("cancel", "stopped", "--yes")
    assert wanted.returncode == 0
    seen = site.place.server.get("pods", pods[0]["metadata"]["name"], site.place.namespace)
    if seen is not None:  # it may have ended already
        assert seen["metadata"].get("deletionGracePeriodSeconds", 0) > 10 or seen["status"]["phase"] != "Running"
    assert site.wait("stopped", "cancelled")["job"]["state"] == "ended"
    wait_for(lambda: not site.place.names(), f"nothing is left: {site.place.names()}")
    assert site.scaletrain("cancel", "stopped", "--yes", check=False).returncode in (0, 2)


def test_a_cancelled_run_is_resumed_on_other_numbers_of_nodes(site: Site, backend: str, offers: Offers) -> None:
    offers.need_pods()
    site.submit("sizes", f"cluster.kubernetes.backend={backend}")
    first = site.running("sizes")
    refused = site.scaletrain("resume", "sizes", "--yes", check=False)
    assert refused.returncode == 2, "it is still running"
    site.cancel("sizes")
    site.scaletrain("resume", "sizes", "--yes", "--nodes", "1")
    (alone,) = site.running("sizes", 1, other_than=first)
    assert site.wait("sizes", "running", "starting")["job_id"] == f"{backend}/sizes-s2"
    site.cancel("sizes")
    site.scaletrain("resume", "sizes", "--yes", "--nodes", "2")
    site.running("sizes", other_than=[alone])
    site.finish("sizes")
    assert site.wait("sizes", "finished")["job_id"] == f"{backend}/sizes-s3"


def test_a_run_whose_object_is_gone_has_the_end_that_was_seen(site: Site, backend: str, offers: Offers) -> None:
    offers.need_pods()
    if backend == "trainjob":
        pytest.skip("Trainer 2.3 keeps TrainJobs that have ended: their spec has no time to live")
    ttl = "cluster.kubernetes.ttl_seconds_after_finished=6"
    for run_id in ("seen", "unseen"):
        site.submit(run_id, f"cluster.kubernetes.backend={backend}", ttl)
        site.finish(run_id)
        if run_id == "seen":
            site.wait(run_id, "finished")

    def left() -> list[Object]:
        return [one for run_id in ("seen", "unseen") for one in site.workloads(run_id, RESOURCES[backend])]

    wait_for(lambda: not left(), "both objects are removed", 120)
    assert site.status("seen")["state"] == "finished"
    assert site.status("unseen")["state"] == "unknown"
