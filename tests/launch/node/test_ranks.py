"""The environment of a rank, and the GPUs that a node must have for its ranks."""

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from scaletrain_cli.launch.node import ranks
from scaletrain_cli.launch.node.inspection import count_gpus, problems_of_node
from scaletrain_cli.launch.node.options import AgentOptions
from scaletrain_cli.launch.node.processes import descendants, identify, own_identity, send_signal
from scaletrain_cli.launch.node.ranks import interface_of, rank_environment, route_address
from tests.launch.conftest import PROJECT, make_spec
from tests.waiting import wait_until

AGENT = AgentOptions(Path("/runs/r"), 3, 1, "n2", "n1", 29500, None, "engine")
SLURM = ("cluster.scheduler=slurm", "cluster.nodes=2", "cluster.gpus_per_node=4", "training.global_batch_size=8")


def environment(
    *overrides: str, env: dict[str, str] | None = None, base: dict[str, str] | None = None, cores: int = 32
) -> dict[str, str]:
    spec = make_spec(*SLURM, *overrides, env=env)
    return rank_environment(spec, AGENT, 2, base=base or {}, secrets={"API_KEY": "secret"}, cores=cores)


def test_the_environment_of_a_rank_has_its_rank_and_the_rendezvous() -> None:
    reported = environment(base={"PATH": "/bin", "CUDA_VISIBLE_DEVICES": "0,1,2,3", "RANK": "99"})
    expected = {"RANK": "6", "WORLD_SIZE": "8", "LOCAL_RANK": "2", "LOCAL_WORLD_SIZE": "4", "NODE_RANK": "1"}
    expected |= {"MASTER_ADDR": "n1", "MASTER_PORT": "29500", "SCALETRAIN_ATTEMPT": "3", "PATH": "/bin"}
    expected |= {"SCALETRAIN_AGENT_PID": str(os.getpid()), "CUDA_VISIBLE_DEVICES": "0,1,2,3", "API_KEY": "secret"}
    assert {name: reported[name] for name in expected} == expected


def test_gloo_uses_the_route_to_the_first_node_unless_the_user_sets_it(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "GLOO_SOCKET_IFNAME"
    monkeypatch.setattr(ranks, "_route_interface", {"n1": "ib0"}.get)
    assert environment()[name] == "ib0"
    assert environment(env={name: "eth1"})[name] == "eth1"
    assert environment(base={name: "eth2"})[name] == "eth2"
    assert name not in environment("cluster.nodes=1", "training.global_batch_size=8")
    monkeypatch.setattr(ranks, "_route_interface", lambda host: None)
    assert name not in environment()


def test_the_route_to_a_name_of_this_machine_only_has_no_address() -> None:
    assert route_address("127.0.1.1") is None
    assert route_address("no.such.name.invalid") is None
    assert route_address("a" * 300) is None
    for address in filter(None, [route_address("192.0.2.1")]):  # a machine without a network has no route
        assert interface_of(address) in dict(socket.if_nameindex()).values()
    assert interface_of("192.0.2.7") is None


def test_the_gpu_allocator_uses_expandable_segments_unless_the_user_sets_it() -> None:
    gpu, name, newer = "cluster.gpu=h100-sxm-80gb", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"
    assert environment(gpu)[name] == "expandable_segments:True"
    assert environment(gpu, env={name: "backend:native"})[name] == "backend:native"
    assert environment(gpu, base={name: "backend:native"})[name] == "backend:native"
    assert name not in environment(gpu, base={newer: "backend:native"})
    assert name not in environment("cluster.gpu=cpu")


@pytest.mark.parametrize(
    ("override", "cores", "threads"),
    [
        ("cluster.gpu=cpu", 32, "1"),
        ("cluster.gpu=h100-sxm-80gb", 32, "8"),
        ("cluster.gpu=h100-sxm-80gb", 2, "1"),
        ("cluster.cpus_per_gpu=6", 32, "6"),
    ],
)
def test_threads_follow_the_cores_that_a_rank_may_use(override: str, cores: int, threads: str) -> None:
    assert environment(override, cores=cores)["OMP_NUM_THREADS"] == threads


def test_variables_of_the_user_override_those_of_the_node_but_not_those_of_the_contract() -> None:
    reported = environment(env={"OMP_NUM_THREADS": "3", "HOME": "/mine", "RANK": "7"}, base={"HOME": "/root"})
    assert (reported["OMP_NUM_THREADS"], reported["HOME"], reported["RANK"]) == ("3", "/mine", "6")


def test_gpus_are_counted_by_what_is_visible_or_by_their_devices(tmp_path: Path) -> None:
    for name in ("nvidia0", "nvidia1", "nvidia10", "nvidiactl", "nvidia-uvm", "nvidia-modeset"):
        (tmp_path / name).touch()
    assert count_gpus({}, tmp_path)[0] == 3
    assert count_gpus({"CUDA_VISIBLE_DEVICES": "0,1"}, tmp_path)[0] == 2
    assert count_gpus({"CUDA_VISIBLE_DEVICES": "MIG-a1,MIG-b2,"}, tmp_path)[0] == 2
    assert count_gpus({"CUDA_VISIBLE_DEVICES": ""}, tmp_path)[0] == 0


def test_a_node_needs_at_least_the_planned_gpus_and_none_for_cpu_ranks(tmp_path: Path) -> None:
    gpus = make_spec(*SLURM, "cluster.gpu=h100-sxm-80gb").cluster
    assert problems_of_node(gpus, {"CUDA_VISIBLE_DEVICES": "0,1,2,3,4,5,6,7"}) == []
    (problem,) = problems_of_node(gpus, {}, tmp_path)
    assert str(problem) == f"0 GPUs ({tmp_path}/nvidia*), but the plan needs 4 per node"
    assert problems_of_node(make_spec().cluster, {}, tmp_path) == []


def test_a_process_is_identified_by_pid_and_start_time() -> None:
    me = own_identity()
    assert me.is_alive()
    with subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE) as child:
        identity = identify(child.pid)
        assert identity.is_alive()
        assert child.pid in descendants()
        assert send_signal(identity, signal.SIGKILL)
        wait_until(lambda: not identity.is_alive(), "a zombie is not alive")
    assert not send_signal(identity, signal.SIGKILL)
    assert identify(child.pid) is None


UNKILLABLE = """
import signal, sys
from pathlib import Path
from scaletrain_cli.launch.node import attempt, watch
from scaletrain_cli.launch.node.options import AGENT_SIGNALS
from scaletrain_cli.launch.node.processes import adopt_orphans, kill_descendants
from scaletrain_cli.launch.node.ranks import LocalRanks
from scaletrain_cli.rundir.paths import RunDir

class Hanging(LocalRanks):
    def kill(self):
        pass  # as with a process that sleeps in the kernel

signal.pthread_sigmask(signal.SIG_BLOCK, AGENT_SIGNALS)
watch.UNKILLABLE_SECONDS = 0.2
local_ranks = Hanging()
local_ranks.start(4, ["/bin/sleep", "600"], {}, Path(sys.argv[1]))
adopt_orphans()
options = type("Options", (), {"node_rank": 0, "node_name": "n", "attempt": 1})
cluster = type("Cluster", (), {"nodes": 1, "grace_seconds": 1.0})
watching = watch.Watch(RunDir(Path(sys.argv[1] + "-run")), options, "n", local_ranks, cluster)
watching.deadline = 0.0
watching.run_to_end()
first_failure = local_ranks.first_failure
print(first_failure, local_ranks.ranks[0].exit_code, attempt.node_exit_code(local_ranks.ranks, first_failure))
kill_descendants()
"""


def test_an_agent_ends_although_a_rank_hangs_in_the_kernel(tmp_path: Path) -> None:
    command = [sys.executable, "-c", UNKILLABLE, str(tmp_path / "log")]
    result = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, check=False)
    assert result.stdout == "4 None 1\n", result.stderr
    assert "cannot be killed" in result.stderr


KEEPER = """
import os, signal, subprocess, sys, time
from scaletrain_cli.launch.node.processes import adopt_orphans, descendants, kill_descendants
adopt_orphans()
# A daemon as daemons are made: its parent is gone, its session is its own, and its name tries to break a parser.
fork = (
    "import ctypes, os, signal, time\\n"
    "signal.signal(signal.SIGTERM, signal.SIG_IGN)\\n"
    "if os.fork() == 0:\\n"
    "    os.setsid()\\n"
    "    if os.fork() == 0:\\n"
    "        ctypes.CDLL(None).prctl(15, b'a) R 1 (b')\\n"
    "        print(os.getpid(), flush=True)\\n"
    "        time.sleep(600)\\n"
)
with subprocess.Popen([sys.executable, "-c", fork], stdout=subprocess.PIPE) as parent:
    daemon = int(parent.stdout.readline())
while daemon not in descendants():  # until the processes between them are gone
    time.sleep(0.01)
print(daemon, flush=True)
kill_descendants()
left = descendants()
for pid in left:  # it has the standard error of this process, which the test reads to its end
    os.kill(pid, signal.SIGKILL)
assert not left, left
"""


def test_a_daemon_that_ignores_sigterm_is_killed_with_the_other_descendants() -> None:
    result = subprocess.run([sys.executable, "-c", KEEPER], cwd=PROJECT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert identify(int(result.stdout)) is None
