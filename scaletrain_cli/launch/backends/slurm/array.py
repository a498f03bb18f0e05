"""One job array for the runs of a sweep: its script, its submission, and how one of its tasks is called.

Task N of the array runs the batch script of run N, ``job.sh`` in its run directory. Its job is ``ARRAY_N`` in every
command: the plain number of the last task is that of the whole array. A run that is resumed gets a job of its own.
"""

import hashlib
import shlex
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from scaletrain_cli.errors import SchedulerError, SchedulerSilentError, UsageError
from scaletrain_cli.launch.backends.slurm.commands import call_slurm, lost_job, queue_script
from scaletrain_cli.launch.backends.slurm.script import sbatch_options
from scaletrain_cli.reasons import Reason
from scaletrain_cli.rundir.paths import RunDir, SweepPlace
from scaletrain_cli.rundir.record import RunRecord
from scaletrain_cli.safe_files import make_private_folder, replace_file
from scaletrain_cli.spec import RunSpec

_OF_ONE_RUN = ("job-name=", "output=")


@dataclass(frozen=True)
class ArrayPlan:
    """The array of a sweep: its runs in the order of their tasks, from 1, of which ``cap`` run at a time."""

    sweep: str
    runs: tuple[tuple[RunDir, RunRecord], ...]
    cap: int
    exclude: str | None = None  # a hostlist that replaces the spec's

    @property
    def folder(self) -> Path:
        """The folder of the array's script and log, hidden beside the runs."""
        return self.runs[0][0].path.parent / f".array-{self.sweep}"


def own_job_id(environment: Mapping[str, str]) -> str:
    """Return the id of the job that this process is in: ``ARRAY_TASK`` for a task of an array."""
    array, task = environment.get("SLURM_ARRAY_JOB_ID", ""), environment.get("SLURM_ARRAY_TASK_ID", "")
    return f"{array}_{task}" if array and task else environment["SLURM_JOB_ID"]


def job_order(job_id: str) -> tuple[int, int]:
    """Return the sort key of a job id: jobs in the order of their submission, tasks by their number."""
    array, _, task = job_id.partition("_")
    return int(array), int(task) if task.isdigit() else 0


def tasks_of(listed: str) -> Iterator[str]:
    """Yield the ids in a row of the accounting: ``70_[2-3,5%2]`` for tasks that never started, else one id."""
    array, is_several, tasks = listed.partition("_[")
    if not is_several:
        yield listed
    for part in tasks.rstrip("]").partition("%")[0].split(",") if is_several else ():
        first, _, last = part.partition("-")
        if first.isdigit() and (last or first).isdigit():  # a long list is cut off by "..."
            yield from (f"{array}_{number}" for number in range(int(first), int(last or first) + 1))


def require_one_array(specs: Sequence[RunSpec]) -> None:
    """Raise UsageError unless all runs request the same from Slurm."""
    first, *others = [
        [option for option in sbatch_options(spec, "") if not option.startswith(_OF_ONE_RUN)] for spec in specs
    ]
    for other in others:
        if other != first:
            differing = [option for option in (*first, *other) if option not in first or option not in other]
            raise UsageError(Reason("slurm.array-of-different-jobs", {"options": differing}))
    if any(spec.cluster.node_range is not None for spec in specs):
        raise UsageError(Reason("slurm.array-of-node-ranges"))


def array_script(plan: ArrayPlan) -> str:
    lines = ["#!/bin/bash", *(f"#SBATCH --{option}" for option in _options(plan)), ""]
    lines += ["# Task N runs the batch script of run N, whose output is in its run directory.", "runs=("]
    lines += [f"    {shlex.quote(str(run.path))}" for run, _ in plan.runs]
    lines += [")", 'cd "${runs[SLURM_ARRAY_TASK_ID - 1]}" || exit 5']
    lines += ['exec /bin/bash ./job.sh >>"slurm-${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID.log" 2>&1']
    return "\n".join(lines) + "\n"


def _options(plan: ArrayPlan) -> Iterator[str]:
    yield f"job-name={plan.sweep}"
    spec = plan.runs[0][1].spec
    yield from (option for option in sbatch_options(spec, "", plan.exclude) if not option.startswith(_OF_ONE_RUN))
    at_a_time = f"%{plan.cap}" if plan.cap < len(plan.runs) else ""
    yield f"array=1-{len(plan.runs)}{at_a_time}"
    yield "output=slurm-%A_%a.log"


def array_comment(runs_root: Path, sweep: str) -> str:
    """Return the comment of a sweep's array, by which it is found without its id."""
    return f"{hashlib.sha256(str(runs_root / sweep).encode()).hexdigest()[:16]}-array"


def submit_array(plan: ArrayPlan) -> tuple[str, ...]:
    """Queue the array and return the job id of each run. The runs have their ``job.sh``. Raises SchedulerError.

    If the answer of sbatch is lost, the array is looked for by its comment.
    """
    make_private_folder(plan.folder)
    replace_file(plan.folder / "array.sh", array_script(plan))
    secrets = sorted({name for _, record in plan.runs for name in record.spec.secret_env})
    comment = array_comment(plan.folder.parent, plan.sweep)
    try:
        array = queue_script(plan.folder / "array.sh", comment, without=secrets)
    except SchedulerSilentError as error:
        array = lost_job(plan.sweep, error, lambda: _find_array(plan.sweep, comment))
    except SchedulerError:
        shutil.rmtree(plan.folder, ignore_errors=True)
        raise
    return tuple(f"{array}_{number}" for number in range(1, len(plan.runs) + 1))


def _find_array(sweep: str, comment: str) -> str | None:
    """Return the id of the newest active array with this comment; None if there is none. Raises SchedulerError."""
    said = call_slurm(
        ["squeue", "--noheader", "--all", "--states=pending,running", f"--name={sweep}", "--format=%F|%k"]
    )
    ids = {row.split("|")[0] for row in said.stdout.split() if row.endswith(f"|{comment}")}
    return max(ids, key=int, default=None)


def is_of_array(run: RunDir, place: SweepPlace | None, job_id: str, comment: str) -> bool:
    """Return whether a job is the task of the run in the array of its sweep."""
    if place is None or not place.array or not job_id.endswith(f"_{place.number}"):
        return False
    return comment == array_comment(run.path.parent, place.sweep)


def number_of_step(job_id: str) -> str:
    """Return the plain number of a job or of a running task, which srun requires. Raises SchedulerError."""
    if "_" not in job_id:
        return job_id
    answer = call_slurm(["squeue", "--noheader", f"--jobs={job_id}", "--format=%A"], accept=("Invalid job id",))
    return answer.stdout.strip() or job_id
