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
import resource
import secrets
import selectors
import signal
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

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
from scaletrain_cli.text import listed
from scaletrain_cli.worker.failures import write_failure

_IDLE_SECONDS, _PROBE_SECONDS, _PROBES = 2, 2, 3  # a node is lost after 8 s without an answer of its kernel
_POLL_SECONDS = 1.0
# What is left of an attempt ends within this: ranks that cannot be killed, stacks and positions, telemetry, the mirror.
_PATIENCE_SECONDS = 90.0
_ASK_SECONDS = 15.0  # between two questions to Slurm, times the index of a node that is not the first
_ANSWERS = 2  # that say that the first node is lost: a restart of its slurmd looks so for a moment
_UNFIT_SECONDS = 24 * 3600.0
_LONGEST_LINE = 1024
_FILE = "node-watch.json"
logger = logging.getLogger(__name__)


def main(arguments: Sequence[str] | None = None) -> int:
    """Watch until the job ends; return the exit code of the process, which nobody needs."""
    leave_current_folder()
    set_up_logging("slurm node watch")
    parser = argparse.ArgumentParser(prog="slurm_node_watch", description="Watch the nodes of a job.")
    parser.add_argument("run_folder", type=Path)
    parser.add_argument("--script", type=int, required=True, help="process id of the batch script, on the first node")
    options = parser.parse_args(arguments)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # is sent to all steps of the job, so that the ranks save
    run, environment = RunDir(options.run_folder.absolute()), os.environ
    start = f"{environment['SLURM_JOB_ID']}.{environment.get('SLURM_RESTART_COUNT', '0')}"
    try:
        if environment["SLURM_NODEID"] == "0":
            serve(run, options.script, start, environment)
        else:
            Member(run, start, environment).until_the_job_ends()
    except (OSError, ScaletrainError) as error:
        logger.warning("lost nodes are noticed by Slurm only: %s", error)
    return ExitCode.DONE


def serve(run: RunDir, script: int, start: str, environment: Mapping[str, str]) -> None:
    """Watch from the first node; Slurm kills the process at the end of the job."""
    names = node_names(environment["SLURM_STEP_NODELIST"])
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # one for each node
    server, address = socket.create_server(("", 0), backlog=len(names)), own_address(environment, names)
    watch = NodeWatch(run, script, server)
    there = {"start": start, "address": address, "port": server.getsockname()[1], "token": watch.token}
    replace_file(run.path / _FILE, json.dumps(there), private=True)
    while True:
        watch.look()


def _probe(connection: socket.socket) -> None:
    """Have the kernel end a connection whose other side does not answer."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _IDLE_SECONDS)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _PROBE_SECONDS)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _PROBES)


@dataclass
class Member:
    """The process on another node: is connected to the first one, and requeues the job if that one is lost."""

    run: RunDir
    start: str
    environment: Mapping[str, str]
    _inspected: bool = field(default=False, init=False)
    _began: float = field(default_factory=time.time, init=False)
    _asked: float = field(default_factory=time.monotonic, init=False)
    _lost: int = field(default=0, init=False)  # answers of Slurm, one after the other

    def until_the_job_ends(self) -> None:
        """Connect again whenever the connection has broken; Slurm kills the process at the end of the job."""
        while not self.is_over():
            with contextlib.suppress(OSError, ScaletrainError):
                self.hold()
            time.sleep(_POLL_SECONDS)

    def hold(self) -> None:
        """Keep a connection to the first node until it breaks. The attempt ends if that node does not respond."""
        document = read_document(self.run.path / _FILE) or {}
        if document.get("start") != self.start:
            return
        name = self.environment["SLURMD_NODENAME"]
        with socket.create_connection((str(document["address"]), int(document["port"])), _ASK_SECONDS) as connection:
            connection.settimeout(None)
            _probe(connection)
            connection.sendall(f"{document['token']} {name}\n".encode())
            if not self._inspected:
                self._inspected = True
                self._inspect_spare(name)
            self._lost, self._asked = 0, time.monotonic()
            try:
                connection.recv(1)
            except OSError as error:
                logger.warning("the first node of the job does not respond: %s", error)
                attempt = _running_attempt(self.run)
                if attempt is not None and name in attempt.nodes:  # a spare node may itself be cut off
                    announce(self.run, attempt.number, "failed")

    def is_over(self) -> bool:
        """Requeue the job once Slurm says that its first node is lost; return whether this is another start of it.

        Slurm keeps a job with --no-kill as running without its batch script (seen in 22.05.8). Later nodes ask more
        rarely: each of those before may be lost, too.
        """
        if time.monotonic() - self._asked < _ASK_SECONDS * int(self.environment["SLURM_NODEID"]):
            return False
        self._asked = time.monotonic()
        job_id, restarts = own_job_id(self.environment), self.environment.get("SLURM_RESTART_COUNT", "0")
        with contextlib.suppress(SchedulerError):
            job = job_fields(job_id)
            if job.get("JobState") != "RUNNING" or job.get("Restarts", restarts) != restarts:
                return True
            first = node_names(self.environment["SLURM_STEP_NODELIST"])[0]
            lost = any(is_lost(node, self._began) for node in shown_nodes([first], _ASK_SECONDS))
            self._lost = self._lost + 1 if lost else 0
            if self._lost >= _ANSWERS:
                call_slurm(["scontrol", "requeue", job_id])
                logger.warning("the first node of job %s is lost: requeued it", job_id)
        return False

    def _inspect_spare(self, name: str) -> None:
        """Exclude this node if no attempt uses it yet and it is unfit for one."""
        from scaletrain_cli.launch.node.inspection import inspect_node

        record = read_record(self.run)
        while (attempt := _running_attempt(self.run)) is None:
            time.sleep(_POLL_SECONDS)
        if name in attempt.nodes or record.spec.cluster.slurm.container is not None:
            return
        if problems := inspect_node(self.run, record, name, self.environment).problems:
            now, why = time.time(), "; ".join(map(str, problems))
            logger.warning("this spare node is unfit: %s", why)
            unfit = BadNode(name, "wrong-nodes", why, self.run.run_id, attempt.number, now, now + _UNFIT_SECONDS)
            remember_bad_nodes(self.run.path.parent, [unfit], now)


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
    # By name, "silent": the node does not respond; "ended": its process, as at a shutdown. Until it connects again.
    _gone: dict[str, str] = field(default_factory=dict, init=False)
    _attempt: int = field(default=0, init=False)
    _recorded: set[str] = field(default_factory=set, init=False)  # lost in this attempt
    _since: float | None = field(default=None, init=False)
    _asked: float = field(default=-math.inf, init=False)

    def __post_init__(self) -> None:
        self._selector.register(self.server, selectors.EVENT_READ)

    def look(self) -> None:
        """Wait a moment for connections and for their ends, and end the attempt of a lost node."""
        for key, _ in self._selector.select(_POLL_SECONDS):
            if key.fileobj is self.server:
                try:
                    connection, _ = self.server.accept()
                except OSError as error:  # the other side has gone, or too many files are open
                    logger.warning("a connection could not be accepted: %s", error)
                    time.sleep(_POLL_SECONDS)
                    continue
                _probe(connection)
                self._selector.register(connection, selectors.EVENT_READ, [])
            else:
                self._read(key)
        with contextlib.suppress(OSError, ScaletrainError):
            self._end_attempt_of_lost_nodes()

    def _read(self, key: selectors.SelectorKey) -> None:
        """Take the name of a node, or note that its connection has broken."""
        assert isinstance(key.fileobj, socket.socket), "the server is handled by the caller"
        try:
            data, state = key.fileobj.recv(_LONGEST_LINE), "ended"
        except OSError:
            data, state = b"", "silent"
        line = b"".join([*key.data, data])
        token, name = line.decode(errors="replace").rstrip("\n").partition(" ")[::2]
        known = secrets.compare_digest(token.encode(), self.token.encode())
        if data and len(line) <= _LONGEST_LINE:
            key.data.append(data)
            if known and data.endswith(b"\n"):
                self._gone.pop(name, None)
            return
        self._selector.unregister(key.fileobj)
        key.fileobj.close()
        if known:
            self._gone[name] = state

    def _end_attempt_of_lost_nodes(self) -> None:
        attempt = _running_attempt(self.run)
        if attempt is None or attempt.number != self._attempt:
            self._attempt, self._since = (0 if attempt is None else attempt.number), None
            self._recorded.clear()
        gone = set() if attempt is None else self._gone.keys() & set(attempt.nodes)
        if attempt is None or not gone:
            return
        ended = [name for name in gone if self._gone[name] == "ended"]
        if ended and time.monotonic() - self._asked > _ASK_SECONDS:
            self._asked = time.monotonic()
            shown = [node["NodeName"] for node in shown_nodes(ended, _ASK_SECONDS) if is_lost(node, attempt.started)]
            self._gone |= dict.fromkeys(shown, "silent")
        nodes = read_node_records(self.run, attempt.number)
        silent = {name for name in gone if self._gone[name] == "silent"}
        if silent - self._recorded:
            others = len(attempt.nodes) - 1
            logger.warning("%d of %d nodes do not answer: %s", len(silent), others, listed(sorted(silent)))
            for node in nodes if len(silent) == 1 or 2 * len(silent) <= others else ():  # else this node is cut off
                if node.name in silent:
                    # With a storage network of its own, the node may still record an end, which is none.
                    failure = observed_failure("node", Reason("slurm.node-silent"), node.node)
                    write_failure(self.run, attempt.number, f"{node.node}-silent", failure)
            self._recorded |= silent
            announce(self.run, attempt.number, "failed")
        if not is_announced(self.run, attempt.number, "failed", "hung"):
            return
        self._since = time.monotonic() if self._since is None else self._since
        patient = time.monotonic() - self._since < _PATIENCE_SECONDS
        if not patient or (self._recorded and all(node.ended is not None or node.name in silent for node in nodes)):
            announce(self.run, attempt.number, "abandoned")
            os.kill(self.script, signal.SIGUSR1)  # interrupts its wait for srun


if __name__ == "__main__":
    sys.exit(main())
