"""The dev cluster behaves as a real one: distinct hosts, a network, preemption, lost nodes; stop leaves nothing."""

import contextlib
import os
import sys
from pathlib import Path

import pytest

from tests.slurm_cluster.cluster import DevCluster
from tests.waiting import wait_until

pytestmark = pytest.mark.slurm

EXCHANGE = """
import os, socket, time
address = (os.environ["MASTER_ADDR"], 29500)
if os.environ["SLURM_PROCID"] == "0":
    with socket.create_server(("", address[1])) as server:
        connection, peer = server.accept()
        print(connection.recv(100).decode(), "called", socket.gethostname(), flush=True)
else:
    while True:
        try:
            connection = socket.create_connection(address)
            break
        except ConnectionRefusedError:
            time.sleep(0.1)
    connection.sendall(socket.gethostname().encode())
"""

# A command line that no other run of these tests has.
HIDDEN = f"sleep 300.{os.getpid()}"


@pytest.fixture
def cluster(slurm: DevCluster) -> DevCluster:
    return slurm


def test_two_nodes_have_two_hostnames(cluster: DevCluster) -> None:
    hosts = cluster.run("srun", "-N2", "hostname").stdout.split()

    assert sorted(hosts) == ["n1", "n2"]


@pytest.mark.long
def test_nodes_reach_each_other_by_hostname(cluster: DevCluster, tmp_path: Path) -> None:
    (tmp_path / "exchange.py").write_text(EXCHANGE)
    output = tmp_path / "out"
    script = f"""export MASTER_ADDR=$(scontrol show hostnames $SLURM_JOB_NODELIST | head -n 1)
        srun {sys.executable} {tmp_path}/exchange.py"""

    job = cluster.submit(script, "-N2", "--ntasks-per-node=1", f"-o{output}")
    cluster.wait_for_state(job, "COMPLETED")

    assert output.read_text() == "n2 called n1\n"


@pytest.mark.long
def test_a_node_that_was_powered_off_can_be_started_again(cluster: DevCluster) -> None:
    job = cluster.submit("srun sleep 32323", "-N2", "-wn2,n3", "--no-requeue", "-o/dev/null")
    # A job is RUNNING before srun has launched its tasks; an srun that loses a node then fails, with the whole job.
    wait_until(lambda: len(states_of(cluster, "/usr/bin/sleep 32323")) == 2, "both tasks run")

    cluster.lose_node("n3")

    assert not node_processes(cluster, "n3")
    assert node_processes(cluster, "n2")
    cluster.wait_for_state(job, "NODE_FAIL")
    cluster.node_up("n3")
    assert cluster.run("srun", "-wn3", "hostname").stdout == "n3\n"


@pytest.mark.long
def test_stop_leaves_nothing_behind_and_no_other_cluster_is_affected(cluster: DevCluster, tmp_path: Path) -> None:
    output = tmp_path / "out"
    with DevCluster.running(nodes=2, gpus=4) as other:
        # A process that is hard to find: in its own session, with an empty environment.
        hiding = f"setsid env -i {HIDDEN} & echo gpus=$CUDA_VISIBLE_DEVICES; sleep 300"
        other.submit(f"srun bash -c '{hiding}'", "-N2", "--gpus-per-node=3", f"-o{output}")
        wait_until(lambda: output.exists() and output.read_text() == "gpus=0,1,2\n" * 2, "both tasks print")
        name = tag(other)
        assert len(network(name)) == 2 + 3  # two namespaces, the bridge, two links
        # srun and the shells have the text of the command in theirs.
        wait_until(lambda: [each.partition(" ")[2] for each in leftovers(other)].count(HIDDEN) == 2, "both hide")

    assert leftovers(other) == []
    assert network(name) == []
    assert not other.directory.exists()
    assert len(cluster.run("srun", "-N4", "hostname").stdout.split()) == 4


@pytest.mark.long
def test_a_cluster_with_a_suspended_job_stops_and_a_node_of_it_can_be_powered_off() -> None:
    with DevCluster.running(nodes=2) as cluster:
        job = cluster.submit("srun sleep 31313", "-N2", "--exclusive", "-o/dev/null")
        wait_until(lambda: len(states_of(cluster, "/usr/bin/sleep 31313")) == 2, "both tasks run")
        cluster.run("scontrol", "suspend", job)
        wait_until(lambda: set(states_of(cluster, "/usr/bin/sleep 31313")) in ({"D"}, {"T"}), "both are frozen")
        cluster.node_down("n2")
        cluster.stop()
        assert leftovers(cluster) == []


@pytest.mark.long
def test_the_example_of_partitions_is_valid() -> None:
    example = Path(__file__).parents[2] / "slurm" / "partitions.conf.example"
    lines = [line for line in example.read_text().splitlines() if line and not line.startswith("#")]

    with DevCluster.running(nodes=1, conf=lines) as cluster:
        shown = cluster.run("scontrol", "show", "partition", "cheap").stdout
        preemption = cluster.run("scontrol", "show", "config").stdout

    assert "GraceTime=120" in shown
    assert "PreemptMode=REQUEUE" in shown
    assert "PreemptExemptTime       = 00:10:00" in preemption


def test_a_daemon_that_dies_is_reported_at_once_with_its_log(cluster: DevCluster, tmp_path: Path) -> None:
    broken = DevCluster(Path(f"{cluster.directory}-broken"), cluster.port + 10000)
    try:
        done = broken.control("start", f"--port={broken.port}", "--conf=Nonsense=1", check=False)
    finally:
        broken.stop()

    assert done.returncode == 1
    assert "slurmctld died" in done.stderr
    assert "Nonsense" in done.stderr
    assert leftovers(broken) == []


def test_missing_packages_are_named(tmp_path: Path) -> None:
    nowhere = DevCluster(tmp_path / "dir", 17000)
    nowhere.environment["PATH"] = str(tmp_path)

    done = nowhere.control("start", "--no-netns", check=False)

    assert done.returncode == 4
    assert "apt-get install -y --no-install-recommends iproute2 munge slurm-client" in done.stderr


def test_a_directory_without_a_cluster_is_not_touched(tmp_path: Path) -> None:
    folder = Path(f"/tmp/scaletrain-not-slurm-{os.getpid()}")
    folder.mkdir()
    (folder / "thesis.tex").touch()
    try:
        done = DevCluster(folder, 17000).control("start", check=False)
        if done.returncode == 4:
            pytest.skip(done.stderr)

        assert done.returncode == 2
        assert "not empty" in done.stderr
    finally:
        (folder / "thesis.tex").unlink()
        folder.rmdir()


def node_processes(cluster: DevCluster, node: str) -> list[str]:
    spaces = cluster.run("ip", "netns", "list").stdout.split()
    mine = [name for name in spaces if name == f"{tag(cluster)}-{node}"]
    return cluster.run("ip", "netns", "pids", *mine).stdout.split() if mine else []


def tag(cluster: DevCluster) -> str:
    """Return the prefix of the names of its network, found by the address of its controller."""
    conf = Path(cluster.environment["SLURM_CONF"]).read_text()
    address = conf.partition("SlurmctldHost=")[2].partition("(")[2].partition(")")[0]
    lines = cluster.run("ip", "-o", "-4", "addr").stdout.splitlines()
    return next(line.split()[1] for line in lines if f" {address}/" in line)


def network(tag: str) -> list[str]:
    return [path.name for parent in ("/run/netns", "/sys/class/net") for path in Path(parent).glob(f"{tag}*")]


def states_of(cluster: DevCluster, command: str) -> list[str]:
    """Return the kernel's state letters of the processes with this command line on the cluster's nodes."""
    found = []
    for pid in (pid for number in (1, 2, 3, 4) for pid in node_processes(cluster, f"n{number}")):
        with contextlib.suppress(OSError):
            if Path("/proc", pid, "cmdline").read_text().replace("\0", " ").strip() == command:
                found.append(Path("/proc", pid, "stat").read_text().rpartition(")")[2].split()[0])
    return found


def leftovers(cluster: DevCluster) -> list[str]:
    """Return the live processes with the cluster's SLURM_CONF, or with the command line HIDDEN."""
    mark = f"SLURM_CONF={cluster.environment['SLURM_CONF']}".encode()
    found = []
    for proc in Path("/proc").glob("[0-9]*"):
        try:
            environ = (proc / "environ").read_bytes()
            command = (proc / "cmdline").read_text(errors="replace").replace("\0", " ").strip()
        except OSError:
            continue
        if mark in environ.split(b"\0") or command == HIDDEN:
            found.append(f"{proc.name} {command}")
    return found
