"""Runs that train in pods, with the image of k8s/Containerfile: saved, resumed, and on a volume that is closed."""

from collections.abc import Callable

import pytest

from tests.kubernetes_cluster.offers import Offers
from tests.kubernetes_cluster.place import Place
from tests.kubernetes_cluster.site import Site

pytestmark = pytest.mark.kubernetes
K = "cluster.kubernetes"
TINY = (
    *("model.hidden_size=32", "model.num_hidden_layers=1", "model.num_attention_heads=2"),
    *("model.num_key_value_heads=2", "model.intermediate_size=32", "model.vocab_size=512", "model.seq_len=32"),
    *("data.tokenizer={kind: bpe, vocab_size: 512}", "training.micro_batch_size=2", "evaluation.every=0"),
    *("layout.zero_stage=1", "cluster.grace_seconds=60"),
)
LONG = ("training.steps=100000", "checkpoint.every=50")


@pytest.fixture
def trains(site: Site, offers: Offers) -> Callable[..., None]:
    """Return a function that submits a run that trains in the project's image."""
    image = offers.need_image()
    site.proxy.image = None

    def submit(run_id: str, *settings: str) -> None:
        site.submit_training(run_id, image, *TINY, *settings)

    return submit


def steps(site: Site, run_id: str, more_than: int) -> int:
    """Wait until the run has trained more than this many steps; return the step."""
    return int(site.wait_until(run_id, lambda now: (now["step"] or 0) > more_than, f"step {more_than}", 500)["step"])


def test_a_run_prepares_its_data_trains_and_finishes(site: Site, trains: Callable[..., None], backend: str) -> None:
    trains("trained", f"{K}.backend={backend}", "training.steps=20", "training.schedule.warmup_steps=2")
    assert site.wait("trained", "finished", seconds=500)["step"] == 20
    assert "loss" in site.scaletrain("logs", "trained").stdout


def test_a_cancelled_run_continues_on_one_node(site: Site, trains: Callable[..., None], backend: str) -> None:
    trains("saved", f"{K}.backend={backend}", *LONG)
    step = steps(site, "saved", 5)
    site.cancel("saved")
    site.scaletrain("resume", "saved", "--yes", "--nodes", "1")
    steps(site, "saved", step)
    assert "step" in site.scaletrain("logs", "saved").stdout
    site.cancel("saved")


def test_pods_that_may_not_write_say_so(site: Site, trains: Callable[..., None], place: Place, backend: str) -> None:
    claim = f"closed-{backend}"
    place.claim(claim)  # of root, and without a group the kubelet changes nothing
    trains(
        "closed",
        f"{K}.backend={backend}",
        f"{K}.runs={{claim: {claim}}}",
        f"{K}.fs_group=null",
        "env.SCALETRAIN_ENGINE=none",
    )
    ended = site.wait("closed", "failed", seconds=400)
    assert "cannot write" in ended["why"] or "owner" in ended["why"], ended["why"]
    assert "Traceback" not in ended["why"]
