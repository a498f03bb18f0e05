"""Two clusters, one of them with accounting, that all tests of a worker use one after the other."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.slurm_cluster.cluster import DevCluster, SharedCluster
from tests.slurm_cluster.site import Site

ACCOUNTING = (
    "add qos scavenger PreemptMode=requeue GraceTime=10",
    "add qos capped MaxTRESPerJob=gres/gpu=8",
    "add qos two GrpTRES=cpu=2",
    "modify account lab set QOS+=scavenger,capped,two GrpTRES=gres/gpu=16",
)


@pytest.fixture(scope="session")
def of_all_tests() -> Iterator[SharedCluster]:
    with contextlib.closing(SharedCluster(nodes=4, grace_seconds=60)) as shared:
        yield shared


@pytest.fixture
def slurm(of_all_tests: SharedCluster) -> Iterator[DevCluster]:
    """Four nodes with four CPUs; partitions main, spot (a grace time of a minute), spot0 and high."""
    with of_all_tests.lent() as cluster:
        yield cluster


@pytest.fixture
def site(slurm: DevCluster, tmp_path: Path) -> Site:
    return Site(slurm, tmp_path / "runs")


@pytest.fixture(scope="session")
def of_all_tests_with_accounting() -> Iterator[SharedCluster]:
    def prepare(cluster: DevCluster) -> None:
        for words in ACCOUNTING:
            cluster.run("sacctmgr", "-i", *words.split())

    options = {"nodes": 3, "gpus": 8, "cpus": 16}
    with contextlib.closing(SharedCluster("--gpu-type=h100", "--accounting", prepare=prepare, **options)) as shared:
        yield shared


@pytest.fixture
def accounting(of_all_tests_with_accounting: SharedCluster) -> Iterator[DevCluster]:
    """Three nodes with 16 CPUs and eight GPUs, and the QOS and limits of ACCOUNTING."""
    with of_all_tests_with_accounting.lent() as cluster:
        yield cluster
