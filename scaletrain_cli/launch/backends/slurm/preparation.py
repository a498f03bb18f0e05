"""The preparation of data as Slurm jobs: an array of CPU tasks that share the work, and a job that completes it.

The second job starts when all tasks have ended, however they did, does what they left, and succeeds only if the data
are prepared. The gang depends on it (afterok), so it never starts without data, and holds no device meanwhile.
"""

import math
import shlex
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from scaletrain_cli.errors import SchedulerError
from scaletrain_cli.launch.backends.slurm.commands import call_slurm, queue_script
from scaletrain_cli.launch.backends.slurm.script import (
    agent_words,
    environment_lines,
    keep_absolute_lines,
    minutes_seconds,
    module_lines,
    python_line,
    spec_environment,
    srun_words,
)
from scaletrain_cli.launch.finding import Evidence, Finding
from scaletrain_cli.launch.preparation import ENGINE_COMMAND, begin_job_folder
from scaletrain_cli.own_processes import START
from scaletrain_cli.reasons import Reason
from scaletrain_cli.rundir.paths import RunDir
from scaletrain_cli.rundir.preparation import PreparationJob, preparation_folder, preparation_name, read_job, record_job
from scaletrain_cli.safe_files import replace_file
from scaletrain_cli.spec import RunSpec

_MOST_LOGS = 4
_OPTIONS = ("account", "reservation", "constraint", "exclude", "nodelist")


def preparation_script(
    spec: RunSpec, name: str, folder: Path, working_folder: Path, secrets: Path, tasks: int | None
) -> str:
    """Return the batch script of the array of ``tasks``; None: of the job that completes the work.

    ``folder``: of the job, below a folder of the runs root. ``secrets``: the file with the values of ``secret_env``,
    which the job that completes the work removes, unless a gang that follows reads them too.
    """
    cluster, settings = spec.cluster, spec.cluster.slurm.preparation
    words = ['"$(type -P srun)"', "--ntasks=1", "--export=ALL", "--mpi=none"]
    words += [f"--cpus-per-task={settings.cpus_per_task}", *srun_words(cluster, folder.parent)]
    files = ["--failure", '"$folder/failure.json"', "--secrets", shlex.quote(str(secrets))]
    if tasks is None:
        files += ["--done", '"$folder/done.json"', *(["--keep-secrets"] if secrets.parent != folder else [])]
    lines = [
        "#!/bin/bash",
        *(f"#SBATCH --{option}" for option in _sbatch_options(spec, name, tasks)),
        "",
        *environment_lines(spec),
        "",
        *keep_absolute_lines(),
        *module_lines(spec),
        python_line(spec),
        f"start={shlex.quote(START)}",
        f"folder={shlex.quote(str(folder))}",
        f"cd -- {shlex.quote(str(working_folder))} || exit 2 # relative paths of the spec",
        'exec env "${dropped[@]}" \\',
        *(f"    {key}={shlex.quote(value)} \\" for key, value in spec_environment(spec).items()),
        f"    {' '.join(words)} \\",
        f"    {' '.join(agent_words(cluster, folder.parent, gpus=False))} \\",
        f'    -c "$start" scaletrain_cli.engine.commands {ENGINE_COMMAND} "$folder/spec.json" \\',
        f"    {shlex.quote(str(folder.parent.parent))} --workers {settings.cpus_per_task} \\",
        f"    {' '.join(files)}",
    ]
    return "\n".join(lines) + "\n"


def _sbatch_options(spec: RunSpec, name: str, tasks: int | None) -> Iterator[str]:
    slurm, settings = spec.cluster.slurm, spec.cluster.slurm.preparation
    yield f"job-name={name}"
    yield "nodes=1"
    yield "ntasks=1"
    yield f"cpus-per-task={settings.cpus_per_task}"
    if tasks is not None:
        yield f"array=0-{tasks - 1}"
    for option in _OPTIONS:
        # Nodes of the gang's partition are not those of another one.
        if (value := getattr(slurm, option)) is not None and (option == "account" or settings.partition is None):
            yield f"{option}={value}"
    if (partition := settings.partition or slurm.partition) is not None:
        yield f"partition={partition}"
    if settings.partition is None and slurm.qos is not None:
        yield f"qos={slurm.qos}"
    if settings.time is not None:
        yield f"time={minutes_seconds(settings.time)}"
    if settings.memory is not None:
        yield f"mem={math.ceil(settings.memory / 2**20)}M"
    yield "requeue"  # of a task that was preempted, or lost its node
    yield "open-mode=append"
    yield "output=slurm-%j.log" if tasks is None else "output=slurm-%A-%a.log"


def submit_preparation(
    spec: RunSpec,
    name: str,
    folder: Path,
    working_folder: Path,
    secrets: Path,
    tasks: int,
    comment: str,
    revision: int = 0,
) -> PreparationJob:
    """Queue both jobs and return them; those that a submitter has queued who then died are used. Raises SchedulerError.

    ``comment``: a mark of the submission that no other one has.
    """
    known = {row[1]: row[0] for row in active_jobs(name) if row[1].startswith(f"{comment}-")}
    if not known:
        begin_job_folder(folder, spec)
    job_ids: list[str] = []
    for part, count in (("tasks", tasks), ("end", None)):
        mark = f"{comment}-{part}"
        if mark not in known:
            script = folder / f"{part}.sh"
            replace_file(script, preparation_script(spec, name, folder, working_folder, secrets, count))
            depends = [f"--dependency=afterany:{job_ids[0]}"] if job_ids else []
            try:
                known[mark] = queue_script(script, mark, *depends, without=spec.secret_env)
            except SchedulerError:
                for job_id in job_ids:  # without the second job nobody would complete the work
                    call_slurm(["scancel", job_id])
                raise
        job_ids.append(known[mark])
    job = PreparationJob("slurm", job_ids[1], job_ids[0], tasks, revision)
    record_job(folder, job)
    return job


def active_jobs(name: str) -> list[tuple[str, str, str]]:
    """Return (id, comment, state) of the jobs of a name that have not ended; an array has one id."""
    command = ["squeue", "--noheader", "--all", "--me", f"--name={name}", "--format=%A|%T|%F|%k"]
    rows = (line.strip().split("|", 3) for line in call_slurm(command).stdout.splitlines())
    return [(row[2], row[3], row[1]) for row in rows if len(row) == 4]


def cancel_preparation(name: str) -> None:
    """Delete the preparation jobs of a name. Raises SchedulerError."""
    job_ids = {row[0] for row in active_jobs(name)}
    for job_id in sorted(job_ids, key=int, reverse=True):  # first the one that depends on the other
        call_slurm(["scancel", job_id], accept=("Invalid job id",))


def why_it_is_not_prepared(run: RunDir, waiting: Finding) -> Finding:
    """Return the finding about a gang that waits for its preparation job. Raises SchedulerError."""
    folder = preparation_folder(run)
    job = read_job(folder)
    if job is None:
        return waiting
    states = Counter(state for _, _, state in active_jobs(preparation_name(run)))
    counts = ", ".join(f"{count} {state}" for state, count in sorted(states.items()))
    evidence = [Evidence(f"squeue --name={preparation_name(run)}", counts)] if states else []
    for path in sorted(folder.glob("slurm-*.log"))[:_MOST_LOGS]:
        if lines := path.read_text(encoding="utf-8", errors="replace").splitlines()[-1:]:
            evidence.append(Evidence(f"{folder.name}/{path.name}", lines[0]))
    why = Reason("preparation.waiting", {"job": job.job_id, "folder": str(folder)})
    return Finding.because("preparation", why, (*evidence, *waiting.evidence))
