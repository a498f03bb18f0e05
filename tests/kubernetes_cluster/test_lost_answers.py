"""An API server that is away, busy, or whose answer is lost although it did the work."""

import pytest

from tests.kubernetes_cluster.offers import Offers
from tests.kubernetes_cluster.place import wait_for
from tests.kubernetes_cluster.proxy import Fault
from tests.kubernetes_cluster.site import Site

pytestmark = pytest.mark.kubernetes
ANY = ".*"
# The requests that create a workload, and not the dry run of it.
CREATION = r"/(jobsets|trainjobs|jobs)/[^/?]+-s\d+\?(?!.*dryRun)"
AWAY = (Fault(ANY, "", None),)


def workloads(site: Site, run_id: str, backend: str) -> list[str]:
    resource = {"jobset": "jobsets", "trainjob": "trainjobs", "volcano": "vcjobs"}[backend]
    return [one["metadata"]["name"] for one in site.workloads(run_id, resource)]


@pytest.mark.parametrize("status", [429, 503, 504, None], ids=["429", "503", "504", "cut"])
def test_a_refused_or_lost_creation_makes_one_job(site: Site, backend: str, status: int | None, offers: Offers) -> None:
    offers.need_pods()
    applied = status in (504, None)
    with site.proxy.failing(Fault("PATCH", CREATION, status, applied=applied, times=1)):
        site.submit("once", f"cluster.kubernetes.backend={backend}")
    assert workloads(site, "once", backend) == ["once-s1"]
    site.running("once")
    site.cancel("once")


def test_a_submission_without_any_answer_is_cancelled(site: Site, backend: str, offers: Offers) -> None:
    offers.need_pods()
    creation = Fault("PATCH", CREATION, 504, applied=True, times=1)
    with site.proxy.failing(creation, Fault("PATCH|GET", "", 503, after=creation)):
        said = site.submit("lost", f"cluster.kubernetes.backend={backend}", check=False)
    assert (said.returncode, "lost" in said.stderr) == (4, True), said.stderr
    assert workloads(site, "lost", backend) == ["lost-s1"]
    site.running("lost")
    assert site.status("lost")["state"] in ("queued", "starting", "running")
    site.cancel("lost")
    wait_for(lambda: not workloads(site, "lost", backend), "its object is gone")


def test_while_the_server_is_away_nothing_is_lost_or_changed(site: Site, backend: str, offers: Offers) -> None:
    offers.need_pods()
    site.submit("away", f"cluster.kubernetes.backend={backend}")
    pods = site.running("away")
    with site.proxy.failing(*AWAY):
        silent = site.status("away")
        assert silent["job"]["state"] == "unknown"
        assert silent["state"] not in ("failed", "cancelled", "finished")
        for verb in ("cancel", "resume"):
            refused = site.scaletrain(verb, "away", "--yes", check=False)
            assert refused.returncode == 4, refused.stderr
            assert "lost" not in refused.stderr
        assert site.submit("other", f"cluster.kubernetes.backend={backend}", check=False).returncode == 4
    assert not (site.run_directory("other") / "submission.json").exists()
    assert {pod["metadata"]["uid"] for pod in site.running("away")} == {pod["metadata"]["uid"] for pod in pods}
    site.cancel("away")


@pytest.mark.parametrize("status", [504, None], ids=["504", "cut"])
def test_a_cancel_without_an_answer_is_repeated(site: Site, backend: str, status: int | None, offers: Offers) -> None:
    offers.need_pods()
    site.submit("again", f"cluster.kubernetes.backend={backend}")
    site.running("again")
    lost = Fault("DELETE", r"/(jobsets|trainjobs|jobs)/", status, applied=True)
    with site.proxy.failing(lost):
        assert site.scaletrain("cancel", "again", "--yes", check=False).returncode in (0, 4)
    site.scaletrain("cancel", "again", "--yes", check=False)
    site.wait("again", "cancelled")
    wait_for(lambda: not site.place.names(), "nothing is left")
