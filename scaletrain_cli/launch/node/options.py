"""The options of a node agent, and the signals that it handles."""

import argparse
import signal
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

# To the process that submits evaluations: look for checkpoints a last time, and end. Blocked until that process waits.
LAST_LOOK_SIGNAL = signal.SIGUSR1
# Blocked from the first statement on and fetched one by one with next_signal. Without handlers no signal can be lost or
# interrupt anything.
AGENT_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD)


@dataclass(frozen=True)
class AgentOptions:
    """The options of an agent. ``parent_pid``: the agent ends when this process does; None: no such process.

    ``end_together``: the agent of a run that has finished ends when all nodes have ended.
    """

    run_folder: Path
    attempt: int
    node_rank: int
    node_name: str
    master_addr: str
    master_port: int
    parent_pid: int | None
    engine: str
    end_together: bool = False


def parse_options(arguments: Sequence[str] | None, environment: Mapping[str, str]) -> AgentOptions:
    """Return the options; they win over the environment, and the environment's NODE_RANK over Slurm's SLURM_NODEID."""
    parser = argparse.ArgumentParser(prog="node_agent", description="Run the ranks of one node.")
    parser.add_argument("run_folder", type=Path)
    parser.add_argument("--attempt", type=int, required=True)
    rank = environment.get("NODE_RANK", environment.get("SLURM_NODEID"))
    parser.add_argument("--node-rank", type=int, default=rank, required=rank is None)
    parser.add_argument("--node-name", default=environment.get("SLURMD_NODENAME", socket.gethostname()))
    address, port = environment.get("MASTER_ADDR"), environment.get("MASTER_PORT")
    parser.add_argument("--master-addr", default=address, required=address is None)
    parser.add_argument("--master-port", type=int, default=port, required=port is None)
    parser.add_argument("--parent-pid", type=int, help="preempt the ranks when this parent process dies")
    parser.add_argument("--end-together", action="store_true", help="end a finished run on all nodes together")
    engine = environment.get("SCALETRAIN_ENGINE", "scaletrain_cli.engine")  # tests of the launcher use a stub
    parser.add_argument("--engine", default=engine, help=argparse.SUPPRESS)
    return AgentOptions(**vars(parser.parse_args(arguments)))
