"""A real Slurm whose nodes have GPUs of several types: the checks before a submission agree with it."""

from collections.abc import Iterator

import pytest

from scaletrain_cli.errors import SchedulerError
from scaletrain_cli.launch.backends.slurm.preflight import check_job
from scaletrain_cli.launch.backends.slurm.site import Site, query_site
from tests.launch.backends.slurm.test_preflight import ask
from tests.slurm_cluster.cluster import DevCluster

pytestmark = [pytest.mark.slurm, pytest.mark.long]
GRES = ("n3=gpu:a100:4", "n4=gpu:h100:2,gpu:a100:2", "n5=gpu:a100_1g.10gb:7")
BY_GRES = "cluster.slurm={gpu_request: gres, gres_type: h100}"
WHOLE_NODES = "cluster.slurm={gpu_request: none, nodelist: 'n[2-3]'}"


@pytest.fixture(scope="module")
def cluster() -> Iterator[DevCluster]:
    words = [f"--gres={one}" for one in GRES]
    with DevCluster.running("--gpu-type=h100", *words, nodes=5, gpus=8, cpus=8) as cluster:
        yield cluster


@pytest.fixture
def site(cluster: DevCluster, monkeypatch: pytest.MonkeyPatch) -> Site:
    monkeypatch.setenv("SLURM_CONF", cluster.environment["SLURM_CONF"])
    return query_site(ask().cluster)


def test_a_job_gets_only_nodes_with_enough_gpus_of_its_type(site: Site) -> None:
    for sets, gpus, nodes, given in (
        (("cluster.slurm.gres_type=h100",), 8, 2, "n[1-2]"),
        (("cluster.slurm.gres_type=a100",), 4, 1, "n3"),
        (("cluster.slurm.gres_type=a100",), 2, 2, "n[3-4]"),
        (("cluster.slurm.gres_type=a100_1g.10gb", "code.command=[serve]"), 7, 1, "n5"),
        ((), 8, 2, "n[1-2]"),
        ((BY_GRES,), 8, 2, "n[1-2]"),
        ((WHOLE_NODES,), 3, 2, "n[2-3]"),
    ):
        spec = ask("cluster.cpus_per_gpu=1", *sets, gpus=gpus, nodes=nodes)
        start = check_job(site, spec, None).start
        assert f"on {given} of main" in str(start.reason), sets


def test_what_slurm_would_refuse_or_mix_is_refused_before_it_is_asked(cluster: DevCluster, site: Site) -> None:
    for sets, gpus, nodes, said in (
        (("cluster.slurm.gres_type=h100",), 8, 3, "2 nodes with enough resources"),
        (("cluster.slurm.gres_type=a100",), 8, 1, "at most 4 GPUs of type a100"),
        (("cluster.slurm.gres_type=v100",), 1, 1, "it has a100, a100_1g.10gb, h100"),
        ((), 4, 3, "GPUs of different types"),
    ):
        spec = ask("cluster.cpus_per_gpu=1", *sets, gpus=gpus, nodes=nodes)
        with pytest.raises(SchedulerError) as refused:
            check_job(site, spec, None)
        assert said in "\n".join(map(str, refused.value.problems))
    # Without a type Slurm accepts the last one, on nodes with GPUs of both types.
    mixed = cluster.run("sbatch", "--test-only", "--nodes=3", "--gpus-per-node=4", "--wrap=true")
    assert "on nodes n[1-3]" in mixed.stderr
