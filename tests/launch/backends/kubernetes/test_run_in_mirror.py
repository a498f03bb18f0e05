"""A run whose pods keep its directory on a volume of their own: the mirror is its only lasting place."""

import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest

from scaletrain_cli.errors import SpecError
from scaletrain_cli.launch.attempts import read_attempts
from scaletrain_cli.launch.backends.kubernetes.manifest import documents_for, manifest, require_submittable
from scaletrain_cli.launch.resume_elsewhere import find_to_move, move_here, return_from_mirror
from scaletrain_cli.mirror.checkpoints import in_line, list_folders
from scaletrain_cli.mirror.claims import own_claim, read_claims
from scaletrain_cli.mirror.object_store import open_store
from scaletrain_cli.mirror.stores import MirrorError, MirrorStore
from scaletrain_cli.mirror.sync import Mirror
from scaletrain_cli.rundir.journal import read_events
from scaletrain_cli.rundir.mirror_state import read_superseded
from scaletrain_cli.rundir.paths import RunDir
from scaletrain_cli.rundir.record import place_documents
from tests.forked import Forked
from tests.launch.backends.kubernetes.pods import put_documents
from tests.launch.backends.kubernetes.test_rendered_pods import start_pod
from tests.launch.backends.kubernetes.test_volume_of_the_pod import ALONE
from tests.launch.conftest import MadeRun, MakeRun, make_spec
from tests.mirror.conftest import MirroredRun
from tests.ports import OF_A_GANG, reserved_port
from tests.waiting import wait_until


@dataclass(frozen=True)
class Kept:
    """The run as it was submitted, and its mirror."""

    made: MadeRun
    folder: Path

    @property
    def store(self) -> MirrorStore:
        return open_store(f"{self.folder}/mirror", self.made.run.run_id)

    def documents(self) -> Path:
        put_documents(documents_for(self.made.run, self.made.record), self.folder / "documents")
        return self.folder / "documents"

    def start(self, name: str) -> tuple[Forked, RunDir]:
        """Start a pod with a new volume of this name; return it and its run directory."""
        shutil.rmtree(self.folder / name / "documents", ignore_errors=True)
        shutil.copytree(self.documents(), self.folder / name / "documents")
        rendered = manifest(self.made.record, documents_for(self.made.run, self.made.record))
        pod = start_pod(rendered, "jobset", 0, self.folder / name, reserved_port(OF_A_GANG))
        return pod, RunDir(self.folder / name / "volume" / self.made.run.run_id)

    def begin(self, name: str) -> tuple[MirroredRun, bool]:
        """Do what a pod with a new volume does before its attempt; return whether it received a checkpoint."""
        run, record = place_documents(self.documents(), self.folder / name)
        return MirroredRun(run, record), return_from_mirror(run, record, self.documents())

    def steps(self) -> list[int]:
        return [folder.step for folder in in_line(list_folders(self.store), read_claims(self.store))]


@pytest.fixture
def kept(make_run: MakeRun, tmp_path: Path) -> Kept:
    fake = {"checkpoint_every": 5, "steps": 15, "stay": {"1:*": 12}}
    text = tmp_path / "text.txt"
    text.write_text("".join(f"line {number} of a text that the pod prepares\n" for number in range(2000)))
    settings = (*ALONE, f"checkpoint.mirror.to={tmp_path}/mirror", f"data.source={text}")
    return Kept(make_run(*settings, **fake), tmp_path)


def test_a_mirror_is_enough_unless_a_program_of_the_users_needs_a_shared_volume() -> None:
    kept = (*ALONE, "checkpoint.mirror.to=s3://bucket/runs")
    require_submittable(make_spec(*kept))
    require_submittable(make_spec(*kept, "cluster.nodes=2"))
    require_submittable(make_spec(*kept, "code.engine=train", "code.path=."))
    with pytest.raises(SpecError) as refused:
        require_submittable(make_spec(*kept, "code.engine=train", "code.path=.", "cluster.nodes=2"))
    codes = [problem.reason.code for problem in refused.value.problems if problem.reason is not None]
    assert codes == ["kubernetes.per-pod-shared"]


def test_a_later_pod_continues_from_the_mirror_and_the_one_before_stops(kept: Kept) -> None:
    first, received = kept.begin("first")
    assert not received
    mirror = first.mirror()
    for step in (10, 20):
        first.commit(step)
        assert mirror.look()
    second, received = kept.begin("second")
    assert received
    assert second.here() == [20]
    assert [(claim.generation, claim.from_step) for claim in read_claims(kept.store)] == [(1, None), (2, 20)]
    first.commit(30)
    mirror.look(is_last=True)
    assert read_superseded(first.run) is not None, "a pod that is cut off, and still runs"
    assert kept.steps() == [10, 20]
    second.commit(25)
    assert Mirror(second.run, second.record, kept.store).look()
    assert kept.steps() == [20, 25]


def test_a_container_that_starts_again_continues_with_its_volume(kept: Kept) -> None:
    kept.begin("first")
    again, received = kept.begin("first")
    assert not received
    assert len(read_claims(kept.store)) == 1
    assert own_claim(again.run) == read_claims(kept.store)[-1]


def test_a_pod_of_a_run_that_another_place_continues_trains_nothing(kept: Kept) -> None:
    first, _ = kept.begin("first")
    first.commit(10)
    assert first.mirror().look()
    elsewhere = kept.folder / "elsewhere"
    found = find_to_move(f"{kept.folder}/mirror", first.run.run_id, take_over=True, root=elsewhere)
    move_here(found, root=elsewhere)
    late, received = kept.begin("late")
    assert not received
    assert read_superseded(late.run) is not None
    assert len(read_claims(kept.store)) == 2


def test_without_a_valid_checkpoint_in_a_mirror_that_has_some_a_pod_fails(kept: Kept) -> None:
    first, _ = kept.begin("first")
    mirror = first.mirror()
    for step in (10, 20):
        first.commit(step)
        mirror.look()
    newest, oldest = [folder.name for folder in list_folders(kept.store)][::-1][:2]
    kept.store.delete(f"{newest}/rank-00000.safetensors")
    second, _ = kept.begin("second")
    assert second.here() == [10], "the one before"
    kept.store.delete(f"{oldest}/rank-00000.safetensors")
    with pytest.raises(MirrorError):
        kept.begin("third")


@pytest.mark.long
def test_a_killed_pod_is_followed_by_one_that_finishes_the_run(kept: Kept) -> None:
    pod, _ = kept.start("first")
    wait_until(lambda: kept.steps()[-1:] == [10], "step 10 is mirrored")
    pod.kill()  # its ranks end with it
    pod.wait()
    pod, run = kept.start("second")
    output = pod.communicate()
    assert pod.wait() == 0, output
    attempts = {attempt.number: attempt for attempt in read_attempts(run)}
    assert attempts[2].checkpoint_at_start == 10
    assert attempts[2].reason == "done"
    assert [event["step"] for event in read_events(run) if event["event"] in ("moved", "finished")] == [10, 15]
    assert kept.steps()[-1] == 15
