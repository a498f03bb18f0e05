from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from scaletrain_cli.errors import UsageError
from scaletrain_cli.launch.attempts import begin_attempt, read_attempts
from scaletrain_cli.launch.backends.kubernetes.job_ref import (
    JobRef,
    next_submission_number,
    read_job_ref,
    shares_volume,
    submission_recorded,
    update,
)
from scaletrain_cli.launch.replan import replan
from scaletrain_cli.launch.resume import inspect_resume, refuse
from scaletrain_cli.launch.resume_elsewhere import complete_from_mirror, find_to_move, move_here
from scaletrain_cli.launch.submit import create_run
from scaletrain_cli.mirror.claims import own_claim
from scaletrain_cli.rundir.paths import RunDir
from scaletrain_cli.rundir.record import (
    RunRecord,
    add_revision,
    documents_of,
    is_elsewhere,
    place_documents,
    read_record,
)
from tests.launch.backends.kubernetes.conftest import SETTINGS
from tests.launch.conftest import make_plan, make_spec
from tests.mirror.conftest import MakeMirrored, MirroredRun, newest_valid, owned

JOB = "jobset/moving-s1"


@dataclass(frozen=True)
class Moved:
    """``here``: the directory of the submitting machine; ``pods``: that of the pods, on their own volume."""

    here: RunDir
    pods: MirroredRun

    def end(self) -> None:
        """Record the end of the job, as a status does that has seen it."""
        ref = read_job_ref(self.here)
        update(self.here, ref, replace(ref, ended=True, exit_code=75))

    @property
    def place(self) -> str:
        return self.pods.to


def train_in_pods(here: RunDir, record: RunRecord, folder: Path) -> Moved:
    """Submit the run to pods, which train to step 30 and mirror it; no pod has recorded the end of the run."""
    documents = folder / "documents"
    documents.mkdir()
    for name, text in documents_of(here, record).items():
        (documents / name).write_text(text)
    run, there = place_documents(documents, folder / "volume")
    complete_from_mirror(run, there)
    pods = MirroredRun(run, there)
    pods.commit(30)
    begin_attempt(run, there.spec, scheduler="kubernetes", job_id=JOB, nodes=("a", "b"))
    pods.mirror().look(is_last=True)
    with submission_recorded(here, JobRef(JOB, "ml", None)):
        pass
    return Moved(here, pods)


@pytest.fixture
def moved(make_mirrored: MakeMirrored, tmp_path: Path) -> Moved:
    """A run that moved from another machine to this one, which submitted it to pods."""
    made = make_mirrored(str(tmp_path / "other-disk"))
    begin_attempt(made.run, made.record.spec, scheduler="slurm", job_id="7", nodes=("gone",))
    made.commit(20)
    made.mirror().look(is_last=True)
    found = find_to_move(made.to, "moving", take_over=True, root=tmp_path / "second")
    here = move_here(found, root=tmp_path / "second").run
    record = read_record(here)
    spec = make_spec(*SETTINGS, f"checkpoint.mirror.to={made.to}")
    add_revision(here, record, spec, make_plan(spec), SETTINGS)
    return train_in_pods(here, read_record(here), tmp_path)


def test_what_was_received_from_the_mirror_is_not_taken_for_the_pods_own(moved: Moved) -> None:
    assert [attempt.job_id for attempt in read_attempts(moved.here)] == ["7"]
    assert is_elsewhere(moved.here, read_record(moved.here))
    assert not shares_volume(moved.here)
    moved.end()
    report = inspect_resume(moved.here)
    assert report.unseen
    assert (report.checkpoint, report.last_attempt, report.steps_lost) == (None, None, 0)
    refuse(moved.here, report)  # the pods continue on their volume


def test_a_resume_here_without_the_mirror_would_lose_the_pods_steps_and_is_refused(moved: Moved) -> None:
    moved.end()
    here = replan(moved.here, ["cluster.scheduler=local", "cluster.kubernetes=null", "cluster.nodes=1"])
    report = inspect_resume(moved.here)
    with pytest.raises(UsageError, match=f"--from-mirror {moved.place}") as refused:
        refuse(moved.here, report, resize=here)
    assert refused.value.reason.code == "launch.resume-unseen-mirrored"


def test_the_run_comes_back_once_its_job_is_over(moved: Moved) -> None:
    root = moved.here.path.parent
    with pytest.raises(UsageError, match="may still train in"):
        find_to_move(moved.place, "moving", root=root)
    moved.end()
    back = move_here(find_to_move(moved.place, "moving", root=root), root=root)
    assert (back.run.path, back.checkpoint.step) == (moved.here.path, 30)
    assert [attempt.job_id for attempt in read_attempts(back.run)] == ["7", JOB]
    assert (root / ".moving.generation-2" / "kubernetes.json").is_file()
    assert owned(back.run)[0] == 3


def test_the_objects_of_a_later_submission_have_other_names(moved: Moved) -> None:
    moved.end()
    root = moved.here.path.parent
    back = move_here(find_to_move(moved.place, "moving", root=root), root=root).run
    assert next_submission_number(back) == 2
    assert not shares_volume(back), "its pods would have another volume again"


def test_a_run_that_was_submitted_to_pods_comes_here_too(tmp_path: Path) -> None:
    spec = make_spec(*SETTINGS, f"checkpoint.mirror.to={tmp_path / 'other-disk'}")
    made = create_run(spec, make_plan(spec), "moving", root=tmp_path / "second")
    pods = train_in_pods(made.run, made.record, tmp_path)
    assert own_claim(made.run) is None
    pods.end()
    back = move_here(find_to_move(pods.place, "moving", root=tmp_path / "second"), root=tmp_path / "second").run
    assert newest_valid(back)[0] == 30


def test_another_run_of_the_same_name_is_not_set_aside(tmp_path: Path) -> None:
    spec = make_spec(*SETTINGS, f"checkpoint.mirror.to={tmp_path / 'other-disk'}")
    made = create_run(spec, make_plan(spec), "moving", root=tmp_path / "first")
    pods = train_in_pods(made.run, made.record, tmp_path)
    other = create_run(spec, make_plan(spec), "moving", root=tmp_path / "second").run
    found = find_to_move(pods.place, "moving", take_over=True, root=tmp_path / "second")
    with pytest.raises(UsageError, match="is a directory of this run"):
        move_here(found, root=tmp_path / "second")
    assert other.record.is_file()
