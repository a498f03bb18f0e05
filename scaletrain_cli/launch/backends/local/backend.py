"""The local back end: a detached supervisor process on this machine in place of a cluster's controller.

Starts, finds and signals the supervisor by its files in the run directory; supervisor.py is the process itself.

The view of this machine: its GPUs, or its cores where it has none, and the local runs that use or wait for them.
"""

import contextlib
import dataclasses
import functools
import os
import re
import shlex
import signal
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from scaletrain_cli.errors import ExitCode, SchedulerError, UsageError
from scaletrain_cli.launch.attempts import AttemptRecord, read_attempt, read_attempts
from scaletrain_cli.launch.backends.base import (
    SESSION_MODULE,
    Backend,
    Check,
    JobNode,
    NodeCommand,
    PreflightResult,
    Start,
    require_engine_packages,
    session_arguments,
)
from scaletrain_cli.launch.backends.cluster_view import ClusterView, GpuRow, NodesRow, QueueRow
from scaletrain_cli.launch.job import Job
from scaletrain_cli.launch.node.processes import ProcessIdentity, command_line, send_signal
from scaletrain_cli.launch.node.ranks import ENGINE_MODULE
from scaletrain_cli.launch.node.record import read_node_records
from scaletrain_cli.launch.restart import forget_secrets
from scaletrain_cli.own_processes import absolute_paths, boot_id, python_command, usable_cores
from scaletrain_cli.plan.result import RunPlan
from scaletrain_cli.reasons import Reason, reason_from
from scaletrain_cli.rundir.documents import read_as, write_document
from scaletrain_cli.rundir.journal import read_lines_backwards, record_event
from scaletrain_cli.rundir.paths import RunDir, list_runs, read_sweep_place
from scaletrain_cli.rundir.record import CodeRecord, RunRecord, read_record
from scaletrain_cli.safe_files import locked, open_to_append, touch
from scaletrain_cli.spec import ClusterSpec, RunSpec

_MODEL = re.compile(r"^Model:\s*(.+)$", re.MULTILINE)


def local_view(
    job_of: Callable[[RunDir, RunRecord], Job | None], drivers: Path = Path("/proc/driver/nvidia/gpus")
) -> ClusterView:
    """Return the devices of this machine and the runs under the runs root that use them.

    ``job_of`` returns the job of a run, None for a run of another back end. Other processes are not considered.
    """
    from scaletrain_cli.launch.node.inspection import count_gpus  # most commands look at no device

    rows = tuple(row for run in list_runs() if (row := _row(run, job_of)) is not None)
    count, _ = count_gpus(os.environ)
    texts = (file.read_text(encoding="utf-8", errors="replace") for file in sorted(drivers.glob("*/information")))
    models = (match[1].strip() for text in texts if (match := _MODEL.search(text)))
    total, kind = (count, next(models, "gpu")) if count else (usable_cores(), "CPU core")
    used = min(total, sum(row.gpus or 0 for row in rows if row.state == "running"))
    return ClusterView(
        scheduler="local",
        cluster=socket.gethostname(),
        gpus=(GpuRow(kind, total, used, total - used, 0, 1, int(used == 0)),),
        nodes=(NodesRow("mix" if used else "idle", 1),),
        has_other_users=False,
        queue=tuple(sorted(rows, key=lambda row: (row.state != "running", row.start or 0.0))),
    )


def _row(run: RunDir, job_of: Callable[[RunDir, RunRecord], Job | None]) -> QueueRow | None:
    """Return the row of an active run on this machine; None for any other run, and for a damaged one."""
    try:
        record = read_record(run)
        job = job_of(run, record)
        if job is None or not job.is_active:
            return None
        attempts = read_attempts(run)
    except (UsageError, OSError):
        return None
    return QueueRow(
        job_id=job.id,
        name=record.run_id,
        state=job.state,
        queue="",
        nodes=1,
        gpus=record.spec.world_size,
        ahead=None,
        reason=job.detail if job.state == "queued" else "",
        start=attempts[-1].started if attempts else None,
    )


SUPERVISOR_STOPPED = "local.supervisor-stopped"
SUPERVISOR_FAILED = "local.supervisor-failed"  # the code of its last event
_START_SECONDS = 60.0  # for Python to start on a busy machine with a cold file cache
_POLL_SECONDS = 0.05
_TICK_SECONDS = 0.2


@dataclass(frozen=True)
class Supervisor:
    """The process that supervises, or last supervised, a run; from supervisor.json.

    ``machine`` and ``boot``: ids of the machine and of its boot, empty where it has none. ``began``: Unix seconds.
    """

    hostname: str
    pid: int
    start_ticks: int
    machine: str = ""
    boot: str = ""
    began: float = 0.0
    at_work: bool = False

    @property
    def process(self) -> ProcessIdentity:
        return ProcessIdentity(self.pid, self.start_ticks)

    @property
    def is_here(self) -> bool:
        """Return whether it was started on this machine, whose name may have changed since."""
        if self.boot and self.boot == boot_id():
            return True
        known = self.machine and machine_id()
        return self.machine == machine_id() if known else self.hostname == socket.gethostname()

    def is_alive_in(self, run: RunDir) -> bool:
        """Return whether it still supervises the run. In another container its lock tells that, and not its pid."""
        is_of_earlier_boot = self.boot and boot_id() and self.boot != boot_id()
        if not self.is_here or is_of_earlier_boot:
            return False
        return self.process.is_alive() or (self.hostname != socket.gethostname() and _is_locked(run))


@dataclass(frozen=True)
class LocalBackend(Backend):
    """Runs jobs on this machine. ``engine`` is the module that each rank runs; tests replace it."""

    name: ClassVar[str] = "local"

    engine: str = ENGINE_MODULE

    def preflight(
        self, spec: RunSpec, plan: RunPlan, run: RunDir | None = None, code: CodeRecord | None = None
    ) -> PreflightResult:
        from scaletrain_cli.launch.node.inspection import problems_of_node

        problems = problems_of_node(spec.cluster, {**os.environ, **spec.env})
        if problems:
            raise SchedulerError(Reason("local.unfit-machine", {"problems": list(map(str, problems))}))
        if self.engine == ENGINE_MODULE:
            require_engine_packages(spec)
        return PreflightResult(Start(time.time(), Reason("local.no-queue")))

    def render(self, run: RunDir, record: RunRecord) -> str:
        return shlex.join(supervisor_command(run, self.engine)) + "\n"

    def submit(self, run: RunDir, record: RunRecord) -> str:
        pid, log_bytes = self._start_supervisor(run)
        # The supervisor has a session of its own, so Ctrl-C does not end it: the run is submitted.
        with contextlib.suppress(KeyboardInterrupt):
            _wait_for_start(run, pid, log_bytes)
        return str(pid)

    def start_following_evaluations(self, run: RunDir) -> None:
        """Start a detached process, because processes that the supervisor starts end with the run."""
        _follow_evaluations(run)

    def job(self, run: RunDir, record: RunRecord) -> Job:
        supervisor = read_supervisor(run)
        if supervisor is None:
            return Job.because("", "unknown", Reason("local.never-started"))
        job_id, nodes = str(supervisor.pid), (supervisor.hostname,)
        if not supervisor.is_here and not _has_recorded_end(run, supervisor):
            return Job.because(job_id, "unknown", Reason("local.job-elsewhere", {"host": supervisor.hostname}), nodes)
        is_alive = supervisor.is_alive_in(run)
        if is_alive and (before := run_to_wait_for(run)) is not None:
            return Job.because(job_id, "queued", Reason("local.waits-for-run", {"run": before.run_id}), nodes)
        if is_alive:
            return Job.because(job_id, "running", Reason("local.supervisor-running"), nodes)
        if live_agents(run):
            return Job.because(job_id, "running", Reason("local.agent-stopping"), nodes)
        newest = next(read_lines_backwards(run.events), {})
        failure = reason_from(newest) if newest.get("code") == SUPERVISOR_FAILED else None
        why = failure or Reason("local.no-process")
        return Job.because(job_id, "ended", why, nodes, begins_no_attempt=failure is not None)

    def cancel(self, run: RunDir, record: RunRecord) -> None:
        supervisor = read_supervisor(run)
        if supervisor is not None and not supervisor.is_here and not _has_recorded_end(run, supervisor):
            params = {"run": run.run_id, "host": supervisor.hostname}
            raise SchedulerError(Reason("local.started-elsewhere", params))
        touch(run.stop_file)
        if supervisor is not None and _stop(supervisor.process, run):
            return  # it records the end itself
        for agent in live_agents(run):
            _stop(agent, run)
        record_event(run, "cancelled")
        forget_secrets(run)

    def was_shut_down(self, run: RunDir, last: AttemptRecord) -> bool:
        """Return whether the supervisor was ended by SIGTERM before this machine booted."""
        import psutil

        supervisor, decision = read_supervisor(run), last.decision
        stopped = decision is not None and decision.code == SUPERVISOR_STOPPED
        is_here = supervisor is not None and supervisor.is_here
        return stopped and is_here and last.ended is not None and last.ended < psutil.boot_time()

    def node_command(self, run: RunDir, record: RunRecord, node: JobNode) -> NodeCommand:
        return NodeCommand(tuple(python_command(SESSION_MODULE, *session_arguments(run.path, node))))

    def max_concurrent(self, cluster: ClusterSpec, requested: int | None, points: int) -> int:
        """Return ``requested``, by default 1. Raises UsageError if the runs would share GPUs."""
        if (requested or 1) > 1 and cluster.gpu != "cpu":
            raise UsageError(Reason("local.shared-gpus", {"requested": requested}))
        return min(points, requested or 1)

    def run_in_foreground(self, run: RunDir, record: RunRecord, on_tick: Callable[[], None]) -> int:
        """Supervise the run in a child of this process: a supervisor changes the signal mask and adopts orphans.

        Ctrl-C, or the death of this process, saves a checkpoint and stops the run, as a preemption.
        """
        pid, log_bytes = self._start_supervisor(run, "--parent-pid", str(os.getpid()))
        follows = record.spec.evaluation.tasks and record.spec.evaluation.job.submit == "auto"
        follower = _follow_evaluations(run) if follows else None
        code = None
        while code is None:
            try:
                code = _wait_for_start(run, pid, log_bytes)
                while code is None:
                    on_tick()
                    time.sleep(_TICK_SECONDS)
                    code = _exit_code(pid)
            except KeyboardInterrupt:
                os.kill(pid, signal.SIGTERM)
        if follower is not None:
            with contextlib.suppress(KeyboardInterrupt):
                os.waitpid(follower, 0)  # it submits the evaluation of the last checkpoint
        on_tick()
        return code if code >= 0 else int(ExitCode.CRASHED)

    def _start_supervisor(self, run: RunDir, *more: str) -> tuple[int, int]:
        """Start the supervisor; return its pid, and the size of its log before."""
        log = run.path / "supervisor.log"
        log_bytes = log.stat().st_size if log.exists() else 0
        return _spawn([*supervisor_command(run, self.engine), *more], log), log_bytes

    def secret_hint(self, name: str) -> str:
        return f"Export {name}"

    def is_available(self) -> bool:
        """Return True: every machine can run a job on itself."""
        return True

    def cluster_view(self, cluster: ClusterSpec) -> ClusterView:
        """Return this machine's GPUs or cores, and the local runs that use or wait for them."""
        return local_view(
            lambda run, record: self.job(run, record) if record.spec.cluster.scheduler == self.name else None
        )

    def checks(self) -> Iterator[Check]:
        """Yield nothing: `scaletrain doctor` checks this machine in any case."""
        yield from ()


def _follow_evaluations(run: RunDir) -> int:
    """Start the process that submits the evaluations of a run until it has ended; return its pid."""
    command = python_command("scaletrain_cli", "evaluation", "submit", str(run.path), "--follow")
    return _spawn(command, run.path / "evaluations.log")


def supervisor_command(run: RunDir, engine: str = ENGINE_MODULE) -> list[str]:
    """Return the command line that starts the supervisor of a run."""
    command = python_command("scaletrain_cli.launch.backends.local.supervisor", str(run.path))
    return command if engine == ENGINE_MODULE else [*command, "--engine", engine]


def read_supervisor(run: RunDir) -> Supervisor | None:
    """Return the latest supervisor of the run; None before the first."""
    return read_as(Supervisor, run.path / "supervisor.json")


def write_supervisor(run: RunDir, process: ProcessIdentity, *, at_work: bool = False) -> None:
    """Record this process as the supervisor; ``at_work``: it has begun an attempt, or waits for its turn in a sweep."""
    place = (socket.gethostname(), process.pid, process.start_ticks, machine_id(), boot_id())
    supervisor = Supervisor(*place, began=time.time(), at_work=at_work)
    write_document(run.path / "supervisor.json", dataclasses.asdict(supervisor))


@functools.cache
def machine_id() -> str:
    """Return the id that this machine keeps when its name changes; empty where it has none, as in many containers."""
    with contextlib.suppress(OSError):
        return Path("/etc/machine-id").read_text(encoding="ascii", errors="replace").strip()
    return ""


def _is_locked(run: RunDir) -> bool:
    """Return whether a process of this kernel holds the lock of the run's supervisor."""
    with contextlib.suppress(OSError), locked(run.path / "supervisor.lock", wait_seconds=0) as is_free:
        return not is_free
    return False


def _has_recorded_end(run: RunDir, supervisor: Supervisor) -> bool:
    """Return whether the supervisor has recorded that it ended the run: no other machine need be asked."""
    last = read_attempt(run, max(run.attempts(), default=0))
    return last is not None and last.ended is not None and last.ended >= supervisor.began and not last.may_be_followed


def run_to_wait_for(run: RunDir) -> RunDir | None:
    """Return the run of the sweep that must end first; None if there is none or this run has begun."""
    place = read_sweep_place(run)
    if place is None or place.after is None or run.attempts():
        return None
    before = RunDir(run.path.parent / place.after)
    supervisor = read_supervisor(before)
    return before if (supervisor is not None and supervisor.is_alive_in(before)) or live_agents(before) else None


def _stop(process: ProcessIdentity, run: RunDir) -> bool:
    """Send SIGTERM to a process of this run; return False if it has ended or is not of this run.

    The pid comes from a file that other users may be able to write, so a process is signaled only if its command line
    names this run directory.
    """
    folder = os.path.realpath(run.path)
    if not any(os.path.realpath(word) == folder for word in command_line(process.pid)):
        return False
    return send_signal(process, signal.SIGTERM)


def live_agents(run: RunDir) -> list[ProcessIdentity]:
    """Return the node agents of the latest attempt that still run on this machine.

    The pid with the ticks from the boot to its start is no other process, also where the machine has another name.
    """
    nodes = read_node_records(run, max(run.attempts(), default=0))
    return [node.agent for node in nodes if node.agent.is_alive()]


def _spawn(command: list[str], log: Path) -> int:
    """Start a process in a session of its own, without input, its output appended to ``log``; return its pid."""
    output = open_to_append(log)
    try:
        return os.posix_spawn(
            command[0],
            command,
            absolute_paths(os.environ),
            file_actions=[
                (os.POSIX_SPAWN_OPEN, 0, "/dev/null", os.O_RDONLY, 0),
                (os.POSIX_SPAWN_DUP2, output, 1),
                (os.POSIX_SPAWN_DUP2, output, 2),
            ],
            setsid=True,
        )
    finally:
        os.close(output)


def _wait_for_start(run: RunDir, pid: int, log_bytes: int) -> int | None:
    """Wait until the supervisor is at work; return its exit code if it has ended since, else None.

    ``log_bytes``: size of its log before it was started. Raises SchedulerError if it ended before it was at work.
    """
    deadline = time.monotonic() + _START_SECONDS
    while time.monotonic() < deadline:
        code = _exit_code(pid)  # before the file is read: an ended process no longer changes it
        supervisor = read_supervisor(run)
        is_known = supervisor is not None and supervisor.pid == pid
        if supervisor is not None and is_known and supervisor.at_work:
            return code
        if code is not None:
            with (run.path / "supervisor.log").open("rb") as log:
                log.seek(log_bytes)
                said = " ".join(log.read().decode(errors="replace").split())[-500:]
            if said:
                raise SchedulerError(Reason("local.supervisor-not-started", {"said": said}))
            raise SchedulerError(Reason("local.supervisor-exited", {"exit_code": code}))
        time.sleep(_POLL_SECONDS)
    if is_known:  # it supervises the run, but a slow disk delays it
        return None
    os.kill(pid, signal.SIGKILL)  # otherwise it might still start, without a record
    os.waitpid(pid, 0)
    params = {"pid": pid, "seconds": _START_SECONDS, "folder": str(run.path)}
    raise SchedulerError(Reason("local.supervisor-timed-out", params))


def _exit_code(pid: int) -> int | None:
    """Return the exit code of a child that has ended, once; None while it runs."""
    ended, status = os.waitpid(pid, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if ended else None
