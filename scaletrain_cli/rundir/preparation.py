"""The preparation job of a run, on which its gang depends: the files in ``<run>/preparation/``.

spec.json is what the tasks prepare, job.json has the ids of the job, failure.json the reason if a task has failed, and
done.json is written by the last process when the data are prepared; the scripts and logs are beside them.
"""

from dataclasses import asdict, dataclass
from pathlib import Path

from scaletrain_cli.reasons import Reason, reason_from
from scaletrain_cli.rundir.documents import read_as, read_document, reporting_damage, typed, write_document
from scaletrain_cli.rundir.paths import RunDir


@dataclass(frozen=True)
class PreparationJob:
    """The latest preparation job of a run. ``job_id``: the job that the gang waits for; ``others``: its tasks.

    The other fields are of a job after which the submitter creates the gang: ``prepared`` once it has done its work,
    ``submission`` the number of the gang's submission, ``number`` that of the job for it, from 1, ``data`` a digest of
    what it prepares, and the place of the job.
    """

    scheduler: str
    job_id: str
    others: str
    tasks: int
    revision: int = 0
    prepared: bool = False
    submission: int = 0
    number: int = 1
    data: str = ""
    namespace: str = ""
    context: str | None = None


def preparation_folder(run: RunDir) -> Path:
    """Return the folder of the preparation job of a run."""
    return run.path / "preparation"


def preparation_name(run: RunDir) -> str:
    """Return the name of the preparation jobs of a run."""
    return f"prepare-{run.run_id}"


def forget_job(folder: Path) -> None:
    """Remove the records of an earlier preparation job; its logs stay."""
    for name in ("job.json", "failure.json", "done.json"):
        (folder / name).unlink(missing_ok=True)


def record_job(folder: Path, job: PreparationJob) -> None:
    """Record the ids of a job that was queued."""
    write_document(folder / "job.json", asdict(job))


def read_job(folder: Path) -> PreparationJob | None:
    """Return the preparation job that was queued last; None if there is none."""
    return read_as(PreparationJob, folder / "job.json")


def read_failure(folder: Path) -> Reason | None:
    """Return why a task of the job has failed; None if none has."""
    failure = read_document(folder / "failure.json")
    return None if failure is None else reason_from(failure.get("reason"))


def record_job_failure(folder: Path, why: Reason, exit_code: int) -> None:
    """Record why the job has failed, where its tasks cannot write to the folder."""
    write_document(folder / "failure.json", {"reason": why.to_document(), "exit_code": exit_code})


def exit_code_of_failure(folder: Path) -> int | None:
    """Return the exit code with which the job has failed; None if no failure is recorded."""
    failure = read_document(folder / "failure.json")
    with reporting_damage(folder / "failure.json"):
        return None if failure is None else typed(int, failure.get("exit_code", 1))


def is_done(folder: Path) -> bool:
    """Return whether the job has prepared the data."""
    job = read_job(folder)
    return (folder / "done.json").is_file() or (job is not None and job.prepared)


def why_not_prepared(run: RunDir) -> Reason | None:
    """Return why the preparation job of a run has failed, as its tasks have recorded it; None if they have not."""
    folder = preparation_folder(run)
    failure = None if is_done(folder) else read_failure(folder)
    return None if failure is None else Reason("preparation.failed", {"cause": failure, "run": run.run_id})
