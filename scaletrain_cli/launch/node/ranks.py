"""The rank processes of one node: their environment, start, signals and ends.

The contract with a training program is its environment and signal mask (docs/own-engine.md). Addresses
of this machine are those that other nodes see: host names may resolve to a loopback address, or only here.
"""

import contextlib
import functools
import ipaddress
import math
import os
import random
import signal
import socket
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path

from scaletrain_cli.errors import SchedulerError
from scaletrain_cli.launch.node.heartbeats import START_SECONDS, Channel, LastBeat
from scaletrain_cli.launch.node.options import AgentOptions
from scaletrain_cli.launch.node.record import RankRecord
from scaletrain_cli.own_processes import SAFE_CHILDREN, absolute_paths
from scaletrain_cli.reasons import Reason
from scaletrain_cli.safe_files import closing_descriptor, open_to_append
from scaletrain_cli.spec import RunSpec
from scaletrain_cli.worker.run_environment import RUN_DIR_VARIABLE
from scaletrain_cli.worker.telemetry import RankRow

_MOST_ROWS = 10_000  # of telemetry, where their file system does not respond; then the oldest are lost
_PORTS = range(20_000, 32_000)  # below the kernel's ephemeral ports, which outgoing connections take
ENGINE_MODULE = "scaletrain_cli.engine"
# The setting of torch's GPU allocator, unless the user has set one: segments that grow do not fragment
# (docs.pytorch.org/docs/stable/notes/cuda.html). torch reads the older of the two names first.
_ALLOCATOR_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
_ALLOCATOR_SETTINGS = "expandable_segments:True"
# Blocked in every rank when it starts: the engine unblocks them once its handlers are installed, so none is lost.
BLOCKED_IN_RANKS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
_DEFAULT_IN_RANKS = (signal.SIGHUP, signal.SIGINT, signal.SIGCHLD, signal.SIGPIPE)
# Becomes the program of code.command: it dies with the agent, ignores what only scaletrain_cli.worker handles until the
# program sets a handler, and has no signal blocked. Isolated (-I), as the environment is meant for the program.
_EXEC = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL)
agent, folder, *words = sys.argv[1:]
if os.getppid() != int(agent):
    os._exit(1)
try:
    os.chdir(folder)
    for number in (signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    os.execvp(words[0], words)
except OSError as error:
    print(f"code.command: {words[0]} cannot be started: {error.strerror}", file=sys.stderr, flush=True)
    os._exit(127 if isinstance(error, FileNotFoundError) else 126)
"""


def program_command(words: Sequence[str], folder: Path) -> list[str]:
    """Return the command line that starts the program of ``code.command`` in ``folder``."""
    return [sys.executable, "-I", "-S", "-c", _EXEC, str(os.getpid()), str(folder), *words]


def free_port(address: str) -> int:
    """Return a TCP port that is free at ``address`` ("" for all addresses). Raises SchedulerError when there is none.

    If another process takes the port before the ranks do, the attempt fails.
    """
    for port in random.sample(_PORTS, len(_PORTS)):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind((address, port))
            return port
    raise SchedulerError(Reason("node.no-free-port", {"first": _PORTS.start, "last": _PORTS.stop - 1}))


def rank_environment(
    spec: RunSpec,
    agent: AgentOptions,
    local_rank: int,
    *,
    base: Mapping[str, str],
    secrets: Mapping[str, str],
    cores: int,
) -> dict[str, str]:
    """Return the environment of one rank. The user's variables override the node's, and the contract's override both.

    A user's training program gets ``PYTHONPATH`` as it is in the spec. For the built-in engine, entries of search
    paths that are relative to the current folder are removed.
    """
    cluster = spec.cluster
    threads: int | str = cluster.cpus_per_gpu
    if threads == "auto":
        threads = 1 if cluster.gpu == "cpu" else max(1, cores // cluster.gpus_per_node)
    is_set = any(name in known for name in _ALLOCATOR_VARIABLES for known in (base, spec.env))
    allocator = {} if is_set or cluster.gpu == "cpu" else {_ALLOCATOR_VARIABLES[0]: _ALLOCATOR_SETTINGS}
    launcher = {}  # for a program that starts its own ranks; torchrun reads PET_* where it has no option
    if spec.code.processes_per_node == 1:
        launcher = {
            "NNODES": str(cluster.nodes),
            "NPROC_PER_NODE": str(cluster.gpus_per_node),
            "PET_NNODES": str(cluster.nodes),
            "PET_NPROC_PER_NODE": str(cluster.gpus_per_node),
            "PET_NODE_RANK": str(agent.node_rank),
            "PET_MASTER_ADDR": agent.master_addr,
            "PET_MASTER_PORT": str(agent.master_port),
            "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(math.ceil(cluster.grace_seconds)),
        }
    # gloo takes the address that the host name resolves to, which may be a loopback address; ranks on GPUs use it, too.
    gloo = {}
    if cluster.nodes > 1 and _GLOO_INTERFACE not in base and (interface := _route_interface(agent.master_addr)):
        gloo = {_GLOO_INTERFACE: interface}  # of the route to the first node
    environment = {
        **base,
        **allocator,
        **launcher,
        **gloo,
        "OMP_NUM_THREADS": str(threads),
        "PYTHONUNBUFFERED": "1",  # otherwise a crash would lose the last lines of the log
        **spec.env,
        **secrets,
        "RANK": str(agent.node_rank * cluster.gpus_per_node + local_rank),
        "WORLD_SIZE": str(spec.world_size),
        "LOCAL_RANK": str(local_rank),
        "LOCAL_WORLD_SIZE": str(cluster.gpus_per_node),
        "NODE_RANK": str(agent.node_rank),
        "MASTER_ADDR": agent.master_addr,
        "MASTER_PORT": str(agent.master_port),
        "SCALETRAIN_ATTEMPT": str(agent.attempt),
        RUN_DIR_VARIABLE: str(agent.run_folder),
        "SCALETRAIN_AGENT_PID": str(os.getpid()),
    }
    if spec.code.processes_per_node == 1:  # the program decides which ranks it starts
        return {name: value for name, value in environment.items() if name not in _OF_ONE_RANK}
    return environment if spec.code.own_program else absolute_paths(environment) | SAFE_CHILDREN


_GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"
_OF_ONE_RANK = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")


@functools.cache  # the ranks of a node have the same
def _route_interface(host: str) -> str | None:
    address = route_address(host)
    return None if address is None else interface_of(address)


class LocalRanks:
    """The rank processes of this node. The caller waits for child processes and passes each end to ``ended``."""

    def __init__(self, start_seconds: float = START_SECONDS, *, foreign: bool = False) -> None:
        """Create an empty set. ``foreign``: programs of ``code.command``, which may not know the contract."""
        self.start_seconds = start_seconds
        self.foreign = foreign
        self.ranks: list[RankRecord] = []
        self.first_failure: int | None = None
        self.channels: dict[int, Channel] = {}
        self.rows: deque[tuple[int, RankRow]] = deque(maxlen=_MOST_ROWS)  # of telemetry: rank and row
        self._killed: set[int] = set()

    def start(self, rank: int, command: list[str], environment: Mapping[str, str], log: Path, ranks: int = 1) -> None:
        """Start one rank as the leader of its own session, its output appended to ``log``.

        ``ranks``: how many ranks the process will start itself.
        """
        channel = self.channels[rank] = Channel(self.start_seconds, lambda row: self.rows.append((rank, row)))
        with channel.inherited() as variables, closing_descriptor(open_to_append(log)) as output:
            files = [
                (os.POSIX_SPAWN_OPEN, 0, "/dev/null", os.O_RDONLY, 0),
                (os.POSIX_SPAWN_DUP2, output, 1),
                (os.POSIX_SPAWN_DUP2, output, 2),
            ]
            pid = os.posix_spawn(
                command[0],
                command,
                {**environment, **variables},
                file_actions=files,
                setsid=True,
                setsigmask=BLOCKED_IN_RANKS,
                setsigdef=_DEFAULT_IN_RANKS,
            )
        self.ranks.append(RankRecord(rank, pid, time.time(), ranks=ranks))

    @property
    def alive(self) -> list[RankRecord]:
        """Return the records of the ranks that have not ended."""
        return [rank for rank in self.ranks if rank.exit_code is None]

    @property
    def step(self) -> int:
        """Return the newest step that a rank has reported; 0 before the first."""
        return max((channel.beat.step for channel in self.channels.values()), default=0)

    def forward(self, signum: int) -> None:
        """Send the signal once to each living rank, but not to its process group, which the rank manages.

        A program of ``code.command`` may be a shell, which passes nothing on: its process group gets the signal, and
        SIGTERM in place of SIGUSR1, which few programs handle.
        """
        for rank in self.alive:  # not reaped yet, so the pid is still its own
            if self.foreign:
                os.killpg(rank.pid, signal.SIGTERM if signum == signal.SIGUSR1 else signum)
            else:
                os.kill(rank.pid, signum)

    def listen(self, lost_seconds: float = 0.0) -> dict[int, LastBeat]:
        """Return the last beat of each living rank; ``lost_seconds`` of silence do not count."""
        for rank in self.alive:
            self.channels[rank.rank].extend(lost_seconds)
            self.channels[rank.rank].listen()
        return {rank.rank: self.channels[rank.rank].beat for rank in self.alive}

    def kill(self) -> None:
        """Send SIGKILL to the process group of each living rank."""
        for rank in self.alive:
            self._killed.add(rank.rank)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(rank.pid, signal.SIGKILL)

    def record_unkillable(self) -> None:
        """Record ranks that survive SIGKILL as failed, without an exit code."""
        if self.first_failure is None and self.alive:
            self.first_failure = self.alive[0].rank

    def ended(self, pid: int, exit_code: int) -> RankRecord | None:
        """Record the end of a child process; return None for an adopted orphan, which is not a rank."""
        for index, rank in enumerate(self.ranks):
            if rank.pid == pid and rank.exit_code is None:
                ended = rank.end(exit_code, time.time(), killed_by_agent=rank.rank in self._killed)
                self.ranks[index] = ended
                self.channels[rank.rank].listen()  # the last rows
                self.channels[rank.rank].close()
                if exit_code not in (0, 75) and self.first_failure is None:
                    self.first_failure = ended.rank
                return ended
        return None


_ANY_PORT = 9  # nothing is sent to it


def route_address(host: str) -> str | None:
    """Return this machine's address on the route to ``host``; None if there is none but a loopback address.

    Debian writes ``127.0.1.1 HOSTNAME`` into /etc/hosts, so a name of this machine may not lead here from elsewhere.
    """
    with contextlib.suppress(OSError, UnicodeError):
        for family, kind, protocol, _, target in socket.getaddrinfo(host, _ANY_PORT, type=socket.SOCK_DGRAM):
            with contextlib.suppress(OSError), socket.socket(family, kind, protocol) as probe:
                probe.connect(target)  # chooses the route
                address = str(probe.getsockname()[0]).partition("%")[0]
                if not ipaddress.ip_address(address).is_loopback:
                    return address
    return None


def interface_of(address: str) -> str | None:
    """Return the name of the network interface that has this address; None if none has."""
    import psutil

    for name, addresses in psutil.net_if_addrs().items():
        if any(one.address.partition("%")[0] == address for one in addresses):
            return str(name)
    return None
