"""Watch the nodes of a job that can exchange them; ``python -m ...slurm.node_watch RUN_DIR --script PID``.

Runs on every node of the job, in a step beside that of the agents. Slurm itself notices a lost node after minutes
(SlurmdTimeout, 300 s by default), and an agent waits in a hung collective. Each process holds a connection to the one
on the first node, and the kernel probes it: a stopped process answers, a node without power or network does not. For a
lost node the first one ends the attempt, and has the batch script leave the step behind, whose srun would wait for the
lost node. With ``--no-kill`` Slurm keeps a job whose first node is lost, without its batch script: another node then
requeues it. A spare node is inspected once, and is not used if it is unfit.
"""

import argparse
import contextlib
import json
import logging
import math
import os
import secrets
import selectors
import signal
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from scaletrain_cli.errors import ExitCode, ScaletrainError, SchedulerError
from scaletrain_cli.launch.attempts import AttemptRecord, read_attempt
from scaletrain_cli.launch.backends.slurm.array import own_job_id
from scaletrain_cli.launch.backends.slurm.commands import call_slurm
from scaletrain_cli.launch.backends.slurm.explain import job_fields
from scaletrain_cli.launch.backends.slurm.job import is_lost, own_address, shown_nodes
from scaletrain_cli.launch.backends.slurm.tables import node_names
from scaletrain_cli.launch.node.record import announce, is_announced, read_node_records
from scaletrain_cli.launch.node.watch import observed_failure
from scaletrain_cli.log_setup import set_up_logging
from scaletrain_cli.own_processes import leave_current_folder
from scaletrain_cli.reasons import Reason
from scaletrain_cli.rundir.bad_nodes import BadNode, remember_bad_nodes
from scaletrain_cli.rundir.documents import read_document
from scaletrain_cli.rundir.paths import RunDir
from scaletrain_cli.rundir.record import read_record
from scaletrain_cli.safe_files import replace_file
from scaletrain_cli.worker.failures import write_failure

_IDLE_SECONDS, _PROBE_SECONDS, _PROBES = 2, 2, 3  # a node is lost after 8 s without an answer of its kernel
_POLL_SECONDS, _PATIENCE_SECONDS = 1.0, 20.0  # what is left of an attempt ends within the second one
_FIRST_POLLS_SECONDS = 0.2
_ASK_SECONDS = 15.0  # between two questions whether Slurm has lost the first node
_SUCCESSORS = 3  # nodes that ask, by their index: any one of them may be lost, too
_UNFIT_SECONDS = 24 * 3600.0
_LONGEST_LINE = 1024
logger = logging.getLogger(__name__)


def main(arguments: Sequence[str] | None = None) -> int:
    """Watch until the job ends; return the exit code of the process, which nobody needs."""
    leave_current_folder()
    set_up_logging("slurm node watch")
    parser = argparse.ArgumentParser(prog="slurm_node_watch", description="Watch the nodes of a job.")
    parser.add_argument("run_folder", type=Path)
    parser.add_argument("--script", type=int, required=True, help="process id of the batch script, on the first node")
    options = parser.parse_args(arguments)
    run, environment = RunDir(options.run_folder.absolute()), os.environ
    start = f"{environment['SLURM_JOB_ID']}.{environment.get('SLURM_RESTART_COUNT', '0')}"
    place, index = run.path / "node-watch.json", int(environment["SLURM_NODEID"])
    with contextlib.suppress(OSError, ScaletrainError):
        if index == 0:
            names = node_names(environment["SLURM_STEP_NODELIST"])
            server, address = socket.create_server(("", 0), backlog=len(names)), own_address(environment, names)
            watch = NodeWatch(run, options.script, server)
            there = {"start": start, "address": address, "port": server.getsockname()[1], "token": watch.token}
            replace_file(place, json.dumps(there), private=True)
            while True:  # Slurm kills this process at the end of the job
                watch.look()
        while (found := read_document(place)) is None or found.get("start") != start:
            time.sleep(_FIRST_POLLS_SECONDS)
        with socket.create_connection((str(found["address"]), int(found["port"]))) as connection:
            _probe(connection)
            connection.sendall(f"{found['token']} {environment['SLURMD_NODENAME']}\n".encode())
            with contextlib.suppress(OSError, ScaletrainError):
                _inspect_spare(run, environment)
            _until_lost(connection, run, environment["SLURMD_NODENAME"])
        if index <= _SUCCESSORS:
            time.sleep(index * _POLL_SECONDS)
            requeue_without_first_node(environment)
    return ExitCode.DONE


def _probe(connection: socket.socket) -> None:
    """Have the kernel end a connection whose other side does not answer."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _IDLE_SECONDS)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _PROBE_SECONDS)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _PROBES)


def _inspect_spare(run: RunDir, environment: Mapping[str, str]) -> None:
    """Exclude this node if no attempt uses it yet and it is unfit for one."""
    from scaletrain_cli.launch.node.inspection import inspect_node

    name, record = environment["SLURMD_NODENAME"], read_record(run)
    while (attempt := _running_attempt(run)) is None:
        time.sleep(_POLL_SECONDS)
    if name in attempt.nodes or record.spec.cluster.slurm.container is not None:
        return
    found = inspect_node(run, record, name, environment)
    if found.problems:
        now, why = time.time(), "; ".join(map(str, found.problems))
        logger.warning("this spare node is unfit: %s", why)
        unfit = BadNode(name, "wrong-nodes", why, run.run_id, attempt.number, now, now + _UNFIT_SECONDS)
        remember_bad_nodes(run.path.parent, [unfit], now)


def _until_lost(connection: socket.socket, run: RunDir, name: str) -> None:
    """Return once the first node is lost or its process has ended; in the first case this node's ranks end at once."""
    try:
        connection.recv(1)
    except OSError as error:
        logger.warning("the first node of the job does not respond: %s", error)
        attempt = _running_attempt(run)
        if attempt is not None and name in attempt.nodes:  # a spare node may itself be cut off
            announce(run, attempt.number, "failed")


def requeue_without_first_node(environment: Mapping[str, str]) -> None:
    """Requeue the job once Slurm reports its first node as lost; return once the job is not this start any more."""
    job_id, restarts = own_job_id(environment), environment.get("SLURM_RESTART_COUNT", "0")
    first, started = node_names(environment["SLURM_STEP_NODELIST"])[0], time.time()
    while True:
        with contextlib.suppress(SchedulerError):
            job = job_fields(job_id)
            if job.get("JobState") != "RUNNING" or job.get("Restarts", restarts) != restarts:
                return
            if any(is_lost(node, started) for node in shown_nodes([first])):
                call_slurm(["scontrol", "requeue", job_id])
                logger.warning("the first node of job %s is lost: requeued it", job_id)
        time.sleep(_ASK_SECONDS)


def _running_attempt(run: RunDir) -> AttemptRecord | None:
    attempt = read_attempt(run, max(run.attempts(), default=0))
    return attempt if attempt is not None and attempt.exit_code is None else None


@dataclass
class NodeWatch:
    """The process on the first node: waits for connections that break."""

    run: RunDir
    script: int
    server: socket.socket
    token: str = field(default_factory=secrets.token_hex, init=False)  # or anyone could end an attempt
    _selector: selectors.DefaultSelector = field(default_factory=selectors.DefaultSelector, init=False)
    # By name: the node does not respond; its process has ended, as at a shutdown; its loss is recorded.
    _gone: dict[str, Literal["silent", "ended", "recorded"]] = field(default_factory=dict, init=False)
    _since: float | None = field(default=None, init=False)
    _asked: float = field(default=-math.inf, init=False)

    def __post_init__(self) -> None:
        self._selector.register(self.server, selectors.EVENT_READ)

    def look(self) -> None:
        """Wait a moment for connections and for their ends, and end the attempt of a lost node."""
        for key, _ in self._selector.select(_POLL_SECONDS):
            if key.fileobj is self.server:
                connection, _ = self.server.accept()
                _probe(connection)
                self._selector.register(connection, selectors.EVENT_READ, [])
            else:
                self._read(key)
        with contextlib.suppress(OSError, ScaletrainError):
            self._end_attempt_of_lost_nodes()

    def close(self) -> None:
        """Close all connections."""
        for key in [*self._selector.get_map().values()]:
            assert isinstance(key.fileobj, socket.socket), "nothing else is registered"
            key.fileobj.close()

    def _read(self, key: selectors.SelectorKey) -> None:
        """Take the name of a node, or note that its connection has broken."""
        assert isinstance(key.fileobj, socket.socket), "the server is handled by the caller"
        state: Literal["silent", "ended"] = "ended"
        data = b""
        try:
            data = key.fileobj.recv(_LONGEST_LINE)
        except OSError:
            state = "silent"
        if data:
            key.data.append(data)
            return
        self._selector.unregister(key.fileobj)
        key.fileobj.close()
        token, _, name = b"".join(key.data).decode(errors="replace").strip().partition(" ")
        if secrets.compare_digest(token.encode(), self.token.encode()):
            self._gone[name] = state

    def _end_attempt_of_lost_nodes(self) -> None:
        attempt = _running_attempt(self.run)
        gone = set() if attempt is None else self._gone.keys() & set(attempt.nodes)
        if attempt is None or not gone:
            self._since = None
            return
        ended = [name for name in gone if self._gone[name] == "ended"]
        if ended and time.monotonic() - self._asked > _ASK_SECONDS:
            self._asked = time.monotonic()
            shown = [node["NodeName"] for node in shown_nodes(ended, _ASK_SECONDS) if is_lost(node, attempt.started)]
            self._gone |= dict.fromkeys(shown, "silent")
        nodes = read_node_records(self.run, attempt.number)
        for name in sorted(name for name in gone if self._gone[name] == "silent"):
            self._gone[name] = "recorded"
            logger.warning("%s does not answer: the attempt ends", name)
            for node in (node for node in nodes if node.name == name):
                # With a storage network of its own, the node may still record an end, which is none.
                failure = observed_failure("node", Reason("slurm.node-silent"), node.node)
                write_failure(self.run, attempt.number, f"{node.node}-silent", failure)
            announce(self.run, attempt.number, "failed")
        if not is_announced(self.run, attempt.number, "failed", "hung"):
            return
        self._since = time.monotonic() if self._since is None else self._since
        if (
            all(node.ended is not None or node.name in gone for node in nodes)
            or time.monotonic() - self._since > _PATIENCE_SECONDS
        ):
            announce(self.run, attempt.number, "abandoned")
            os.kill(self.script, signal.SIGUSR1)  # interrupts its wait for srun


if __name__ == "__main__":
    sys.exit(main())
