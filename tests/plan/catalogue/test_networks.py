"""Collectives against published measurements, and networks that a spec describes itself."""

import pytest

from scaletrain_cli.errors import UsageError
from scaletrain_cli.plan.catalogue.hardware import accelerator_names, find_accelerator
from scaletrain_cli.plan.catalogue.networks import Link, cluster_link, network_names
from scaletrain_cli.spec import ClusterSpec


def link(gpu: str = "h100-sxm-80gb", nodes: int = 64, **cluster: object) -> Link:
    spec = ClusterSpec.model_validate({"gpu": gpu, "nodes": nodes, "gpus_per_node": 8, "scheduler": "slurm", **cluster})
    return cluster_link(spec, find_accelerator(spec))


# Ultra-Scale Playbook, 8 x H100 nodes with EFA, 256 MiB: nodes, GB/s of all-reduce, of all-gather.
EFA = [(2, 361.7, 184.6), (4, 160.1, 119.0), (8, 99.6, 69.0), (16, 84.7, 55.0), (32, 64.9, 28.0), (64, 32.9, 11.0)]


@pytest.mark.parametrize(("nodes", "reduce", "gather"), EFA)
def test_efa_falls_with_the_number_of_ranks_as_measured(nodes: int, reduce: float, gather: float) -> None:
    size, ranks, efa = 2.0**28, 8 * nodes, link(network="efa-p5")
    part = size * (ranks - 1) / ranks
    assert 2 * part / efa.reduce(size, ranks) / 1e9 == pytest.approx(reduce, rel=0.45)
    assert part / efa.gather(size, ranks) / 1e9 == pytest.approx(gather, rel=0.25)


def test_a_group_with_one_rank_per_node_has_one_card() -> None:
    network = link()
    alone, together = network.gather(1e9, 8, 8), network.gather(1e9, 64, 1)
    assert alone > 5 * together


def test_small_messages_cost_their_latency() -> None:
    network = link()
    assert network.reduce(8, 8) > 1e-5
    assert network.reduce(8, 64) > network.reduce(8, 8)
    assert network.send(8, 8) > 0
    assert network.reduce(0, 8) == network.reduce(1e9, 1) == network.exchange(1e9, 1) == 0


def test_leaving_the_node_is_slower() -> None:
    network = link()
    assert network.gather(1e9, 16) > network.gather(1e9, 8)
    assert network.exchange(1e9, 16) > 2 * network.exchange(1e9, 8)
    assert network.send(1e9, 8) > 2 * network.send(1e9, 4)


def test_a_spec_may_give_its_own_rate_and_oversubscription() -> None:
    slow = link(inter_node_bandwidth="1GB/s")
    assert slow.gather(1e9, 64, 8) > 20 * link().gather(1e9, 64, 8)
    halved = link(network_oversubscription=2.0)
    assert halved.between == link().between / 2


def test_the_nodes_of_an_nvlink_domain_count_as_one() -> None:
    """In a job of two domains 64 of 72 GPUs, as groups of ranks are powers of two."""
    domains = link("gb200-186gb", nodes=32, gpus_per_node=4)
    assert domains == link("gb200-186gb", nodes=2, gpus_per_node=64)
    assert domains.per_node == 64
    assert link("gb200-186gb", nodes=18, gpus_per_node=4).per_node == 72
    assert domains.send(1e9, 63) < domains.send(1e9, 64) / 5
    assert domains.exchange(1e9, 64) < domains.exchange(1e9, 128) / 5
    apart = link("gb200-186gb", nodes=32, gpus_per_node=4, nvlink_domain=4)
    assert apart.per_node == 4
    assert apart.exchange(1e9, 64) > 5 * domains.exchange(1e9, 64)
    assert link(nodes=4, gpus_per_node=4, nvlink_domain=16).per_node == 16


def test_devices_of_one_package_have_faster_links() -> None:
    tiles = link("max-1550-tile-64gb", nodes=1)
    assert tiles.gather(1e9, 2) < tiles.gather(1e9, 4, 1) / 4
    assert tiles.gather(1e9, 2, 2) > 4 * tiles.gather(1e9, 2), "every second tile is in another package"
    assert link("max-1550-tile-64gb", nodes=1, intra_node_bandwidth="30GB/s").gather(1e9, 2) > 0.01


def test_every_network_and_device_has_links() -> None:
    assert len(network_names()) > 3
    assert len(accelerator_names()) > 10
    for name in network_names():
        assert link(network=name).gather(1e9, 64) > 0
    for gpu in accelerator_names():
        assert link(gpu).reduce(1e9, 16) > 0


def test_an_unknown_network_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(UsageError) as error:
        link(network="infiniband-nrd")
    assert "infiniband-ndr" in str(error.value.problems)


def test_the_groups_on_a_node_share_what_it_reaches_at_most() -> None:
    # One group of all ranks sends 1.6 GB x 15/16 at the node's 17 GB/s; eight groups, one per GPU of two nodes, send
    # 0.2 GB x 1/2 each at 17 / 8 GB/s. The latency is below 1 %.
    two = link("a100-sxm-80gb", nodes=2)
    assert two.gather(1.6e9, 16, 1, 17e9) == pytest.approx(1.5e9 / 17e9, rel=0.01)
    assert two.gather(2e8, 2, 8, 17e9) == pytest.approx(1e8 / (17e9 / 8), rel=0.01)
