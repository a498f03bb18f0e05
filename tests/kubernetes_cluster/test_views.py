"""Views of runs from a machine that does not mount their volume, through pods."""

from collections.abc import Callable
from typing import Any

import pytest

from tests.kubernetes_cluster.offers import Offers
from tests.kubernetes_cluster.place import wait_for
from tests.kubernetes_cluster.site import Site
from tests.kubernetes_cluster.test_training import LONG, steps, trains

pytestmark = pytest.mark.kubernetes
__all__ = ["trains"]  # a fixture


def of_views(site: Site) -> list[str]:
    """Return the Jobs and pods of views."""
    return [name for name in site.place.names() if "-view-" in name]


def one_line(text: str) -> str:
    return " ".join(text.split())


def test_what_the_pods_cannot_show_is_not_seen_and_nothing_is_left(site: Site, offers: Offers) -> None:
    """The stand-in pods have no Python."""
    offers.need_pods()
    site.submit("unseen")
    site.running("unseen")
    site.wait("unseen", "running")
    while_running = site.scaletrain("status", "unseen")
    assert "step not seen" in one_line(while_running.stdout)
    assert "were not read" in one_line(while_running.stderr)
    site.finish("unseen")
    site.wait("unseen", "finished")
    afterwards = site.scaletrain("checkpoint", "list", "unseen")
    assert "starting one that reads its files" in one_line(afterwards.stderr)
    assert "not seen" in one_line(afterwards.stderr)
    assert "no checkpoints" not in afterwards.stderr
    wait_for(lambda: not of_views(site), "the pods of the views are deleted")


def test_a_run_is_shown_from_its_pods_and_then_from_one_for_the_view(site: Site, trains: Callable[..., None]) -> None:
    trains("shown", *LONG)
    step = steps(site, "shown", 5)
    now = site.status("shown")
    assert (now["files_seen"], now["state"], now["attempt"]) == (True, "running", 1)
    assert now["run_dir"].startswith("/runs/")
    assert not of_views(site)
    site.cancel("shown")
    wait_for(lambda: not site.pods("shown"), "its pods are gone")
    listed: Any = site.scaletrain("checkpoint", "list", "shown", "--json")
    assert max(one["step"] for one in listed["checkpoints"]) >= step
    ended = site.status("shown")
    assert (ended["files_seen"], ended["state"]) == (True, "cancelled")
    assert ended["last_checkpoint_step"] == max(one["step"] for one in listed["checkpoints"])
    assert len([name for name in of_views(site) if name.startswith("jobs/")]) == 1, "both views used one pod"
    events = [event["event"] for event in site.scaletrain("events", "shown", "--json")["events"]]
    assert {"submitted", "started", "checkpoint"} <= set(events)
    assert events.index("submitted") < events.index("started")
    site.scaletrain("report", "shown", "-o", "page.html")
    assert f"at step {ended['step']:,} of" in (site.folder / "page.html").read_text()
    # The pod ends two minutes after the last view, and its Job is removed half a minute later.
    wait_for(lambda: not of_views(site), "the pods of the views end by themselves", 300)
