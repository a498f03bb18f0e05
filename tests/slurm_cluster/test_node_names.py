"""Names of nodes that mean something else on each node: the ranks of a real Slurm meet all the same."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.slurm_cluster.cluster import DevCluster
from tests.slurm_cluster.test_a_run_on_slurm import ON_SLURM, TINY, Login

pytestmark = [pytest.mark.slurm, pytest.mark.long]
NODES = ("n1", "n2")


Names = Callable[[str, dict[str, str]], dict[str, str]]


def debian(node: str, hosts: dict[str, str]) -> dict[str, str]:
    return {**hosts, node: "127.0.1.1"}


def first_node_only_on_itself(node: str, hosts: dict[str, str]) -> dict[str, str]:
    return hosts if node == "n1" else {"n2": hosts["n2"]}


def no_names(node: str, hosts: dict[str, str]) -> dict[str, str]:
    return {}


def interface_without_a_route(node: str, hosts: dict[str, str]) -> dict[str, str]:
    return {**hosts, node: f"10.99.0.{node[1:]}"}


def ipv6(node: str, hosts: dict[str, str]) -> dict[str, str]:
    return {name: f"fd99::{name[1:]}" for name in hosts}


@pytest.mark.parametrize("names", [debian, first_node_only_on_itself, no_names, interface_without_a_route, ipv6])
def test_a_run_trains_whatever_the_names_of_its_nodes_resolve_to(names: Names, tmp_path: Path) -> None:
    with DevCluster.running(nodes=2) as cluster:
        lines = (cluster.directory / "etc" / "hosts").read_text().splitlines()
        hosts = {line.split()[1]: line.split()[0] for line in lines if line.split()[1:] and line.split()[1] in NODES}
        assert sorted(hosts) == sorted(NODES)
        for node in NODES:
            file = tmp_path / f"hosts-{node}"
            others = [line for line in lines if line.split()[1:] and line.split()[1] not in NODES]
            own = [f"{address} {name}" for name, address in names(node, hosts).items()]
            file.write_text("\n".join([*others, *own]) + "\n")
            inside = ("nsenter", "-n", "-m", "-t", str(cluster.slurmd(node)))
            cluster.run(*inside, "mount", "--bind", str(file), "/etc/hosts")
            cluster.run(*inside, "ip", "link", "add", "unused", "type", "bridge")
            cluster.run(*inside, "ip", "addr", "add", f"10.99.0.{node[1:]}/24", "dev", "unused")
            cluster.run(*inside, "ip", "link", "set", "unused", "up")
            interface = cluster.run(*inside, "ip", "-o", "-4", "addr", "show", "to", hosts[node]).stdout.split()[1]
            cluster.run(*inside, "ip", "-6", "addr", "add", f"fd99::{node[1:]}/64", "dev", interface, "nodad")
        login = Login(cluster, tmp_path / "runs")
        run_id = login.submit(
            *ON_SLURM, *TINY, "training.steps=20", "checkpoint.every=6", "cluster.slurm.partition=main"
        )
        done = login.wait(run_id, lambda now: now["state"] == "finished", "finished")
        assert (done["attempt"], done["step"]) == (1, 20)
