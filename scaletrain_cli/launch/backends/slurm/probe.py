"""Probe the nodes before the job is queued: one short submitit task on each of the planned number of nodes.

The temporary folder and the job are always removed. launch/node/inspection.py collects and compares the facts.
"""

import contextlib
import os
import secrets
import shlex
import shutil
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from scaletrain_cli.errors import MissingPackageError, Problem, SchedulerError, UsageError, WrongNodesError
from scaletrain_cli.extras import install_command
from scaletrain_cli.launch.backends.slurm.commands import call_slurm, passed_on
from scaletrain_cli.launch.backends.slurm.queue import job_state
from scaletrain_cli.launch.backends.slurm.script import sbatch_options
from scaletrain_cli.launch.backends.slurm.tables import node_names
from scaletrain_cli.launch.node.inspection import NodeFacts, facts_file, place_token, probe_problems
from scaletrain_cli.own_processes import absolute_paths, python_command
from scaletrain_cli.plan.result import RunPlan
from scaletrain_cli.reasons import Reason
from scaletrain_cli.rundir.documents import read_as
from scaletrain_cli.rundir.paths import runs_root
from scaletrain_cli.safe_files import make_folder
from scaletrain_cli.spec import RunSpec

_JOB_MINUTES = 5
_QUEUE_SECONDS = 1800.0  # the longest wait for free nodes
_LATE_SECONDS = 10.0  # for a result to appear on a shared file system after its job has ended
_POLL_SECONDS = 0.5
# Options that submitit or this module sets, or that a job of minutes does not need.
_NOT_OF_THE_SPEC = set("job-name nodes no-kill ntasks-per-node time signal requeue open-mode output".split())


def probe_nodes(spec: RunSpec, plan: RunPlan) -> list[NodeFacts]:
    """Return the facts of the nodes. Raises WrongNodesError if they do not match the plan."""
    if find_spec("submitit") is None:
        raise MissingPackageError("--probe needs submitit.", install_command("slurm"))
    root = runs_root()
    folder = root / f".probe-{secrets.token_hex(4)}"  # the dot hides it from `scaletrain list`
    try:
        make_folder(root, mode=0o777)
        make_folder(folder, mode=0o700, exist_ok=False)
        place_token(folder, folder.name)
    except OSError as error:
        raise UsageError(Reason("slurm.runs-root-unwritable", {"root": str(root), "error": str(error)})) from error
    try:
        return _probe(spec, plan, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)  # a task that is still ending may have a file open in it


def _probe(spec: RunSpec, plan: RunPlan, folder: Path) -> list[NodeFacts]:
    job = _submit(spec, folder)
    try:
        silent = _wait(job.job_id, spec.cluster.nodes, folder)
    finally:
        # --quiet: no error if the job has already ended.
        call_slurm(["scancel", "--quiet", job.job_id], accept=("Invalid job id", "already completing"))
    files = [facts_file(folder, index) for index in range(spec.cluster.nodes)]
    nodes = [facts for file in files if (facts := read_as(NodeFacts, file)) is not None]
    problems = list(probe_problems(spec, plan, nodes))
    if silent:
        names = _names(job.job_id, spec.cluster.nodes)
        problems += _no_answers([names[index] for index in sorted(silent)], folder)
    if problems:
        raise WrongNodesError(Reason("slurm.wrong-nodes"), tuple(problems))
    return nodes


def _submit(spec: RunSpec, folder: Path) -> Any:
    import submitit

    # The tasks' logs, written by srun.
    options: dict[str, str | bool] = {"output": "/dev/null", "error": "/dev/null"}
    for option in sbatch_options(spec, folder.name):
        name, equals, value = option.partition("=")
        if name not in _NOT_OF_THE_SPEC:
            options[name] = value if equals else True
    command = shlex.join(python_command("scaletrain_cli.launch.node.inspection", str(folder), folder.name))
    with _filtered_environment(spec):
        executor = submitit.SlurmExecutor(folder=folder, max_num_timeout=0)
        executor.update_parameters(
            job_name="scaletrain-probe",
            nodes=spec.cluster.nodes,
            ntasks_per_node=1,
            time=_JOB_MINUTES,
            wckey=None,
            additional_parameters=options,
            srun_args=["--export=ALL", "--mpi=none", "--kill-on-bad-exit=0"],
        )
        try:
            # Not submit(), which uses pickle: users who can write to the runs root could replace the folder.
            return executor._submit_command(command)
        except submitit.core.utils.FailedJobError as error:
            raise SchedulerError(Reason("slurm.probe-refused", {"error": str(error)})) from error


def _wait(job_id: str, nodes: int, folder: Path) -> set[int]:
    """Wait until every node has answered or the job is over; return the tasks without an answer."""
    deadline = time.monotonic() + _QUEUE_SECONDS
    ended: float | None = None
    while True:
        silent = {index for index in range(nodes) if not facts_file(folder, index).exists()}
        now = time.monotonic()
        if not silent or (ended is not None and now > ended + _LATE_SECONDS):
            return silent
        if now > deadline:
            raise SchedulerError(Reason("slurm.probe-not-started", {"nodes": nodes, "minutes": _QUEUE_SECONDS / 60}))
        if ended is None:
            command = ["squeue", "--noheader", "--states=all", f"--jobs={job_id}", "--format=%T"]
            states = call_slurm(command, accept=("Invalid job id",)).stdout.split()
            ended = now if all(job_state(state) == "ended" for state in states) else None
        time.sleep(_POLL_SECONDS)


def _names(job_id: str, nodes: int) -> list[str]:
    """Return the name of the node of each task."""
    command = ["squeue", "--noheader", "--states=all", f"--jobs={job_id}", "--format=%N"]
    names = node_names(call_slurm(command, accept=("Invalid job id",)).stdout.strip())
    return list(names) if len(names) == nodes else [f"node {index}" for index in range(nodes)]


def _no_answers(names: list[str], folder: Path) -> Iterator[Problem]:
    """Yield a problem for each node that did not answer, with the last line of Slurm's error log if there is one."""
    logs = [path.read_text(encoding="utf-8", errors="replace").strip() for path in sorted(folder.glob("*_log.err"))]
    why = Reason("slurm.probe-no-answer", {"root": str(folder.parent)})
    if said := next((log.splitlines()[-1] for log in logs if log), ""):
        why = Reason("slurm.probe-no-answer-because", {"root": str(folder.parent), "said": said})
    for name in names:
        yield Problem.because(name, "", why)


@contextlib.contextmanager
def _filtered_environment(spec: RunSpec) -> Iterator[None]:
    """Remove the variables that Slurm must not store from this process's environment: submitit passes on all of it."""
    before, allowed = dict(os.environ), passed_on(spec.secret_env)
    os.environ.clear()
    os.environ.update(absolute_paths(allowed))
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
