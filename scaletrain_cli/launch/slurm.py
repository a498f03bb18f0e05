"""The Slurm scheduler: sbatch, squeue, scancel and scontrol, by their stable text interfaces.

What runs inside the job is in slurm_script (the text) and slurm_job (its first and last word).
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from scaletrain_cli.errors import SchedulerError
from scaletrain_cli.launch.exclusion import Exclusion
from scaletrain_cli.launch.outlook import Outlook, Start
from scaletrain_cli.launch.scheduler import Job, JobCause, JobState
from scaletrain_cli.launch.shared_folder import unshared_notes
from scaletrain_cli.launch.slurm_commands import call_slurm, node_names
from scaletrain_cli.launch.slurm_nodes import exclude_option, exclusion_for, record_exclusion
from scaletrain_cli.launch.slurm_preemption import preemption_rule
from scaletrain_cli.launch.slurm_preflight import judge
from scaletrain_cli.launch.slurm_script import job_script, sbatch_options
from scaletrain_cli.launch.slurm_site import ask_site
from scaletrain_cli.launch.slurm_start import start_and_rest
from scaletrain_cli.launch.submission import read_submission
from scaletrain_cli.plan.result import RunPlan
from scaletrain_cli.rundir.code import CodeRecord
from scaletrain_cli.rundir.journal import record_event
from scaletrain_cli.rundir.paths import RunDir, runs_root
from scaletrain_cli.rundir.record import RunRecord
from scaletrain_cli.rundir.sweeps import read_sweep_place
from scaletrain_cli.safe_files import replace_file, touch
from scaletrain_cli.spec import RunSpec

_STATES: dict[str, JobState] = {
    **dict.fromkeys(("PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT"), "queued"),
    **dict.fromkeys(("RUNNING", "RESIZING", "SIGNALING"), "running"),
    **dict.fromkeys(("SUSPENDED", "STOPPED"), "suspended"),
    **dict.fromkeys(("COMPLETING", "STAGE_OUT"), "ending"),
}
_CAUSES: dict[str, JobCause] = {
    "CANCELLED": "cancelled",
    "PREEMPTED": "preempted",
    "TIMEOUT": "time-limit",
    "DEADLINE": "time-limit",
    "OUT_OF_MEMORY": "host-oom",
    "NODE_FAIL": "node",
    "BOOT_FAIL": "node",
}
_LOOK_SECONDS = 15.0


class SlurmScheduler:
    """Jobs of the cluster that this machine's Slurm commands talk to."""

    def preflight(
        self, spec: RunSpec, plan: RunPlan, run: RunDir | None = None, code: CodeRecord | None = None
    ) -> Outlook:
        """Whether Slurm can ever run it, what would make it wait, and Slurm's own estimate of its start.

        Raises SchedulerError with every reason why it can not, or with Slurm's own words where there is no better one.
        """
        _check_path(runs_root())
        site = ask_site(spec.cluster, spec.secret_env)
        verdict = judge(site, spec, lambda hosts: node_names(hosts, spec.secret_env))
        if verdict.problems:
            raise SchedulerError(
                "Slurm can never run this job as it is asked for. Nothing was queued.", verdict.problems
            )
        excluded = None if run is None else exclude_option(spec, exclusion_for(run, spec))
        options = sbatch_options(spec, "preflight", excluded)
        script = "\n".join(["#!/bin/bash", *(f"#SBATCH --{option}" for option in options)])
        answer = call_slurm(["sbatch", "--test-only"], text=script + "\ntrue\n", without=spec.secret_env)
        said = [line.removeprefix("sbatch: ") for line in answer.stderr.splitlines() if line.strip()]
        start, rest = start_and_rest(said, site.now, reservations_hidden=site.hides_reservations)
        if spec.cluster.slurm.extra.get("hold") is True:
            start = Start(None, "it is queued on hold (cluster.slurm.extra), until `scontrol release`")
        return Outlook(start, (*verdict.notes, *unshared_notes(runs_root(), spec.cluster.nodes), *rest))

    def render(self, run: RunDir, record: RunRecord) -> str:
        return self._script(run, record, exclusion_for(run, record.spec))

    def submit(self, run: RunDir, record: RunRecord) -> str:
        """Queue the job, unless one of this run is there: a submitter may have died after sbatch."""
        _check_path(run.path)
        secrets = record.spec.secret_env
        # The name alone may be that of a run under another root; the comment is this directory's own.
        mark = hashlib.sha256(str(run.path).encode()).hexdigest()[:16]
        comment = f"{mark}-{record.revision}"
        question = ["squeue", "--noheader", "--me", f"--name={record.run_id}", "--format=%A|%k"]
        for line in call_slurm(question, without=secrets).stdout.splitlines():
            job_id, _, found = line.strip().partition("|")
            if found == comment:
                return job_id
            if found.partition("-")[0] == mark:
                raise SchedulerError(
                    f"job {job_id} of {record.run_id} is there with an older layout. Run scancel {job_id} first."
                )
        script = run.path / "job.sh"
        excluded = exclusion_for(run, record.spec)
        replace_file(script, self._script(run, record, excluded))
        # From the run directory: the log's name needs no path then, which may hold blanks and quotes.
        answer = call_slurm(
            ["sbatch", "--parsable", f"--comment={comment}", *_dependency(run), script.name],
            folder=run.path,
            without=secrets,
        )
        if excluded.nodes or excluded.spared:
            record_exclusion(run, excluded)
        return answer.stdout.strip().split(";")[0]  # "id" or "id;cluster"

    def _script(self, run: RunDir, record: RunRecord, excluded: Exclusion) -> str:
        return job_script(
            record.spec,
            record.run_id,
            run.path,
            exclude=exclude_option(record.spec, excluded),
            preemption=_preemption(record.spec),
        )

    def job(self, run: RunDir, record: RunRecord) -> Job:
        submission = read_submission(run)
        if submission is None:
            return Job("", "unknown", "never submitted")
        job_id = submission.job_id
        command = ["squeue", "--noheader", "--states=all", f"--jobs={job_id}", "--format=%T|%r|%N"]
        # A controller that is down keeps squeue trying for a minute; who looks at a run has its directory meanwhile.
        answer = call_slurm(command, accept=("Invalid job id",), seconds=_LOOK_SECONDS)
        fields = answer.stdout.strip().split("|")
        if len(fields) != 3:
            return Job(job_id, "ended", "Slurm no longer knows the job")
        state, reason, nodes = fields
        detail = state if reason in ("None", "") else f"{state} ({reason})"
        return Job(job_id, job_state(state), detail, node_names(nodes), cause=job_cause(state))

    def cancel(self, run: RunDir, record: RunRecord) -> None:
        """Ask the ranks to save and leave; the job's last word is slurm_job's. A queued job just goes."""
        touch(run.stop_file)
        job = self.job(run, record)
        if job.state == "running":
            # Plain scancel would leave KillWait, not the grace period, before SIGKILL.
            call_slurm(["scancel", "--signal=TERM", job.id])
        elif job.state == "queued":
            call_slurm(["scancel", job.id])
            record_event(run, "cancelled")


def job_state(slurm_state: str) -> JobState:
    """Slurm's state in the words that all schedulers share."""
    return _STATES.get(slurm_state, "ended")


def job_cause(slurm_state: str) -> JobCause | None:
    """Return why a whole job ended, where its Slurm state names that; ``CANCELLED by 1000`` is sacct's form."""
    return _CAUSES.get(slurm_state.partition(" ")[0])


def _preemption(spec: RunSpec) -> str:
    """The site's rule in words; nothing where Slurm cannot be asked, as in a dry run on a laptop."""
    try:
        return preemption_rule(ask_site(spec.cluster, spec.secret_env), spec.cluster)
    except SchedulerError:
        return ""


def _dependency(run: RunDir) -> list[str]:
    """Of a sweep's run, on the job before it in its lane. Not when it is resumed: its turn has come once."""
    place = read_sweep_place(run)
    if place is None or place.after is None or read_submission(run) is not None:
        return []
    before = read_submission(RunDir(run.path.parent / place.after))
    return [f"--dependency=afterany:{before.job_id}"] if before is not None else []


def _check_path(path: Path) -> None:
    if "%" in str(path) or "\\" in str(path):
        raise SchedulerError(
            f"{path}: Slurm interprets % and \\ in the path of a job's log. Move the runs root: $SCALETRAIN_RUNS."
        )
