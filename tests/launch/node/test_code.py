"""Ranks run the submitted code, even if the tree, the run directory or the image has changed since."""

import math
import os
import shutil
import sys
import time
from pathlib import Path

import pytest

from scaletrain_cli.errors import SchedulerError, UsageError
from scaletrain_cli.launch.backends.kubernetes.manifest import documents_for
from scaletrain_cli.launch.node.attempt import code_environment, unpacked_folder
from scaletrain_cli.launch.node.heartbeats import hung_rank
from scaletrain_cli.launch.node.ranks import LocalRanks
from scaletrain_cli.launch.replan import replan
from scaletrain_cli.launch.resume import resume
from scaletrain_cli.launch.submit import create_run
from scaletrain_cli.rundir.paths import RunDir
from scaletrain_cli.rundir.record import RunRecord, code_file, read_record
from scaletrain_cli.telemetry.run import read_telemetry
from scaletrain_cli.worker.failures import read_failures
from tests.launch.conftest import MadeRun, MakeRun, StartAgent, make_plan, make_spec
from tests.launch.test_resizing import Refusing
from tests.launch.test_resume import Cluster
from tests.launch.working_tree import WorkingTree

PROGRAM = """
import os, sys
from my_model import VERSION
print("version", VERSION, "run", os.path.basename(sys.argv[1]), "in", os.environ["SCALETRAIN_CODE"], "as", __name__)
"""


@pytest.fixture
def program(tree: WorkingTree) -> WorkingTree:
    """Return a user's program with a module."""
    tree.write("src/my_model/__init__.py", "VERSION = 'submitted'\n")
    tree.write("src/my_training.py", PROGRAM)
    tree.commit()
    return tree


def submit(tree: WorkingTree, *overrides: str, run_id: str | None = None) -> MadeRun:
    spec = make_spec(f"code.path={tree.folder}", "code.import_root=src", "code.engine=my_training", *overrides)
    made = create_run(spec, make_plan(spec), run_id)
    return MadeRun(made.run, made.record)


def unpacked(made: MadeRun, attempt: int = 1) -> Path:
    return unpacked_folder(made.run, attempt, 0, os.environ)


def test_ranks_run_the_submitted_code_and_not_later_edits(
    program: WorkingTree, start_agent: StartAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(program.folder / "src")  # where `python -m` would find the tree itself
    made = submit(program)
    program.write("src/my_model/__init__.py", "VERSION = 'newer'\n")
    agent = start_agent(made)
    assert agent.wait() == 0, agent.errors
    place = unpacked(made)
    assert made.log(1, 0) == made.log(1, 1)
    assert made.log(1, 0) == f"version submitted run {made.run.run_id} in {place} as __main__\n"
    assert not place.parent.exists()


def test_run_json_identifies_the_code(program: WorkingTree) -> None:
    made = submit(program)
    code = read_record(made.run).code
    assert code == made.record.code
    assert code.commit == program.git("rev-parse", "HEAD").strip()
    assert {path.name for path in (made.run.path / "code").iterdir()} == {f"{code.name}.tar.gz", f"{code.name}.sha256"}


def test_the_patch_of_uncommitted_changes_is_kept(program: WorkingTree) -> None:
    program.write("src/my_model/__init__.py", "VERSION = 'in the works'\n")
    made = submit(program)
    assert b"+VERSION = 'in the works'" in code_file(made.run, made.record.code, "patch").read_bytes()


def test_the_folder_of_a_killed_agent_is_removed_by_the_next(program: WorkingTree, start_agent: StartAgent) -> None:
    made = submit(program)
    left = unpacked(made)
    left.parent.mkdir(mode=0o700)
    left.mkdir()
    (left / "my_model.py").write_text("VERSION = 'left over'", encoding="utf-8")
    start_agent(made).wait()
    start_agent(made).wait()
    assert "version submitted" in made.log(1, 0)
    assert "version submitted" in made.log(2, 0)
    assert not left.parent.exists()


@pytest.mark.parametrize("suffix", ["tar.gz", "sha256"])
@pytest.mark.parametrize("damage", ["missing", "cut", "another tree's"])
def test_no_rank_starts_other_code(program: WorkingTree, start_agent: StartAgent, suffix: str, damage: str) -> None:
    made = submit(program)
    path = code_file(made.run, made.record.code, suffix)
    if damage == "missing":
        path.unlink()
    elif damage == "cut":
        path.write_bytes(path.read_bytes()[:-40])
    else:
        program.write("src/my_model/__init__.py", "VERSION = 'another'\n")
        other = submit(program)
        shutil.copy(code_file(other.run, other.record.code, suffix), path)
    agent = start_agent(made)
    assert agent.wait() == (5 if damage == "missing" else 2), agent.errors
    assert str(path) in agent.errors or "src/my_model/__init__.py differs" in agent.errors
    assert made.log(1, 0) == ""
    assert not unpacked(made).parent.exists()


def test_code_in_the_image_is_verified_and_run(program: WorkingTree, start_agent: StartAgent, tmp_path: Path) -> None:
    image = tmp_path / "image"
    shutil.copytree(program.folder, image)
    made = submit(program, f"code.on_nodes={image}")
    agent = start_agent(made)
    assert agent.wait() == 0, agent.errors
    assert f"in {image} as" in made.log(1, 0)

    (image / "src/my_model/__init__.py").write_text("VERSION = 'older'\n", encoding="utf-8")
    (image / "train.py").unlink()
    agent = start_agent(made)
    assert agent.wait() == 2
    assert "src/my_model/__init__.py differs, train.py is missing. Put the submitted tree into" in agent.errors
    (failure,) = read_failures(made.run, 2)
    assert failure.code == "node.code-differs-in-image"
    assert failure.params["files"] == ["src/my_model/__init__.py differs", "train.py is missing"]
    assert image.is_dir()


def test_a_run_of_the_same_name_with_other_code_is_another_run(program: WorkingTree) -> None:
    first = submit(program, run_id="mine")
    assert submit(program, run_id="mine").record == first.record
    program.write("src/my_model/__init__.py", "VERSION = 'newer'\n")
    with pytest.raises(UsageError, match=r"exists with other code: it has .* Use another run id"):
        submit(program, run_id="mine")


def test_the_engine_imports_nothing_from_a_recorded_tree(program: WorkingTree, start_agent: StartAgent) -> None:
    program.write("json.py", "raise RuntimeError('not the one that was meant')")
    spec = make_spec(f"code.path={program.folder}")
    made = create_run(spec, make_plan(spec))
    agent = start_agent(MadeRun(made.run, made.record), real=True)
    assert agent.wait() == 0, agent.errors
    assert made.record.code is not None


def test_a_dry_run_renders_the_same_code_as_the_submission_that_follows(program: WorkingTree) -> None:
    made = submit(program)
    before = documents_for(made.run, made.record)
    shutil.rmtree(made.run.path / "code")
    assert documents_for(made.run, made.record) == before


def test_a_program_without_heartbeat_never_counts_as_hung() -> None:
    gang = LocalRanks(math.inf)
    gang.start(0, [sys.executable, "-c", "import time; time.sleep(60)"], os.environ, Path(os.devnull))
    try:
        assert hung_rank(gang.listen(), time.monotonic() + 1e9) is None
    finally:
        gang.kill()
        pid, status = os.waitpid(gang.ranks[0].pid, 0)
        gang.ended(pid, os.waitstatus_to_exitcode(status))


def test_a_resume_uses_the_same_code_without_the_option_new_code(
    program: WorkingTree, start_agent: StartAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = submit(program)
    program.write("src/my_model/__init__.py", "VERSION = 'fixed'\n")
    monkeypatch.chdir("/")
    assert replan(made.run, ["cluster.grace_seconds=30"]).after.code == made.record.code

    resize = replan(made.run, [], new_code=True)
    assert resize.changes.keys() == {"code"}
    resume(made.run, resize=resize, scheduler=Cluster())
    record = read_record(made.run)
    assert (record.revision, record.code) == (1, resize.after.code)
    agent = start_agent(MadeRun(made.run, record))
    assert agent.wait() == 0, agent.errors
    assert "version fixed" in made.log(1, 0)
    assert read_telemetry(made.run).nodes  # those of a program of the user, too
    assert {path.suffix for path in (made.run.path / "code").iterdir()} == {".gz", ".sha256", ".patch"}
    assert len(list((made.run.path / "code").iterdir())) == 5


def test_code_that_has_not_changed_makes_no_revision(program: WorkingTree) -> None:
    made = submit(program)
    resume(made.run, resize=replan(made.run, [], new_code=True), scheduler=Cluster())
    assert read_record(made.run).revision == 0


class Confused(Cluster):
    def render(self, run: RunDir, record: RunRecord) -> str:
        raise UsageError("a ConfigMap has no room for it")


@pytest.mark.parametrize(("scheduler", "error"), [(Refusing, SchedulerError), (Confused, UsageError)])
def test_a_rejected_job_leaves_no_new_code(
    program: WorkingTree, scheduler: type[Cluster], error: type[Exception]
) -> None:
    made = submit(program)
    before = {path.name for path in (made.run.path / "code").iterdir()}
    program.write("src/my_model/__init__.py", "VERSION = 'fixed'\n")
    with pytest.raises(error):
        resume(made.run, resize=replan(made.run, [], new_code=True), scheduler=scheduler())
    assert {path.name for path in (made.run.path / "code").iterdir()} == before
    assert read_record(made.run) == made.record


def test_an_override_selects_another_part_of_the_tree(program: WorkingTree) -> None:
    made = submit(program)
    resize = replan(made.run, [f"code.path={program.folder / 'src'}", "code.import_root=."])
    assert resize.changes.keys() == {"code", "code.path", "code.import_root"}


def test_a_run_keeps_its_code_and_a_run_without_code_has_none_to_renew(program: WorkingTree, make_run: MakeRun) -> None:
    with pytest.raises(UsageError, match="a run keeps its code"):
        replan(submit(program).run, ["code.path=null", "code.import_root=."])
    with pytest.raises(UsageError, match=r"no code of yours to take again.*code\.path=FOLDER"):
        replan(make_run().run, [], new_code=True)


def test_a_node_without_space_is_replaced(program: WorkingTree, start_agent: StartAgent, tmp_path: Path) -> None:
    made = submit(program)
    (tmp_path / "full").write_text("no folder", encoding="utf-8")
    agent = start_agent(made, {"TMPDIR": str(tmp_path / "full")})
    assert agent.wait() == 5
    assert "cannot be unpacked" in agent.errors


def test_code_is_unpacked_into_a_private_folder(program: WorkingTree, start_agent: StartAgent) -> None:
    made = submit(program)
    unpacked(made).parent.mkdir(mode=0o755)
    agent = start_agent(made)
    assert agent.wait() == 5
    assert "is not private to this user" in agent.errors


def test_entries_of_pythonpath_in_the_tree_are_mapped_to_the_copy(program: WorkingTree, tmp_path: Path) -> None:
    made = submit(program)
    live = program.folder
    reported = {"PYTHONPATH": f"{live}/src:{live}::/opt/lib:{tmp_path}/elsewhere"}
    found = code_environment(made.record, Path("/kept"), reported)
    assert found["PYTHONPATH"] == f"/kept/src:/kept/src:/kept:/opt/lib:{tmp_path}/elsewhere"


def test_code_that_is_missing_in_the_run_is_not_replaced_by_the_present_tree(program: WorkingTree) -> None:
    made = submit(program)
    shutil.rmtree(made.run.path / "code")
    program.write("src/my_model/__init__.py", "VERSION = 'newer'\n")
    with pytest.raises(UsageError, match=r"does not hold the code.*--new-code"):
        documents_for(made.run, made.record)


def test_runs_of_one_name_under_two_roots_share_no_folder_on_a_node(tmp_path: Path) -> None:
    one, other = (unpacked_folder(RunDir(tmp_path / root / "mine"), 1, 0, {}) for root in ("a", "b"))
    assert one.parent != other.parent
