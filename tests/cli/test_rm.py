"""rm, events and list --state: what is deleted or rejected, and what remains after a failure."""

import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from scaletrain_cli.cli.list import complete_state
from scaletrain_cli.cli.options import complete_run
from scaletrain_cli.errors import ExitCode, SchedulerError, UsageError
from scaletrain_cli.event_texts import event_sentence
from scaletrain_cli.launch import remove
from scaletrain_cli.launch.backends.local.backend import LocalBackend
from scaletrain_cli.launch.node.processes import ProcessIdentity
from scaletrain_cli.rundir.paths import RunDir, runs_root
from scaletrain_cli.ui.console import event_line
from scaletrain_cli.worker.checkpoint_commit import close_attempt
from tests.cli.command_line import scaletrain
from tests.cli.prepared_runs import living_process, prepare
from tests.rundir.test_checkpoints import ATTEMPT, save


@pytest.fixture(scope="module")
def process() -> Iterator[ProcessIdentity]:
    with living_process() as found:
        yield found


def test_an_ended_run_is_deleted_with_all_its_files() -> None:
    run = prepare("finished", "r1")
    other = prepare("failed", "r2")
    ended = scaletrain("rm", "r1", "--yes")
    assert (ended.code, ended.out) == (0, "r1\n"), ended.err
    assert "r1: finished, newest checkpoint step 2, " in ended.err
    assert sorted(path.name for path in runs_root().iterdir()) == [other.name]
    assert not run.exists()
    assert scaletrain("rm", "r1", "--yes").code == ExitCode.USAGE


def test_nothing_is_deleted_in_a_dry_run_or_without_confirmation() -> None:
    prepare("finished", "r1")
    dry = scaletrain("rm", "r1", "--dry-run", "--json")
    (row,) = dry.data["deleted"]
    assert (dry.code, dry.data["dry_run"], row["newest_checkpoint_step"]) == (0, True, 2)
    assert row["bytes"] > 5000
    silent = scaletrain("rm", "r1")
    assert (silent.code, "--yes" in silent.err) == (ExitCode.USAGE, True)
    assert RunDir(runs_root() / "r1").record.exists()


@pytest.mark.parametrize("state", ["running", "queued", "unknown"])
def test_an_active_or_unknown_run_is_rejected_and_none_is_deleted(state: str, process: ProcessIdentity) -> None:
    prepare("finished", "over")
    prepare(state, "r1", process)
    ended = scaletrain("rm", "over", "r1", "--yes", code=ExitCode.USAGE)
    assert "r1" in ended.err
    assert ("scaletrain cancel r1" in ended.err) == (state != "unknown")
    assert {"over", "r1"} <= {path.name for path in runs_root().iterdir()}


def test_a_run_whose_scheduler_does_not_answer_is_not_deleted(monkeypatch: pytest.MonkeyPatch) -> None:
    prepare("failed", "r1")

    def silent(*arguments: object) -> None:
        raise SchedulerError("squeue did not answer.")

    monkeypatch.setattr(LocalBackend, "job", silent)
    ended = scaletrain("rm", "r1", "--yes")
    assert (ended.code, "may be active" in ended.err) == (ExitCode.SCHEDULER, True)
    assert (runs_root() / "r1" / "run.json").exists()


def test_a_run_of_another_user_is_not_deleted() -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can give files away")
    run = prepare("finished", "r1")
    os.chown(run, 65534, 65534)
    ended = scaletrain("rm", "r1", "--yes")
    assert (ended.code, "belongs to" in ended.err) == (ExitCode.USAGE, True)
    assert (run / "run.json").exists()


def test_links_are_deleted_and_their_targets_are_kept(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "file").write_text("mine")
    run = prepare("finished", "r1")
    (run / "link").symlink_to(precious)
    shutil.rmtree(run / "attempts" / "0001" / "logs")
    (run / "attempts" / "0001" / "logs").symlink_to(precious)
    assert scaletrain("rm", "r1", "--yes").code == 0
    assert (precious / "file").read_text() == "mine"
    moved = prepare("finished", "r2").rename(tmp_path / "moved")
    (runs_root() / "r2").symlink_to(moved)
    linked = scaletrain("rm", "r2", "--yes")
    assert (linked.code, "symbolic link" in linked.err) == (ExitCode.USAGE, True)
    assert (moved / "run.json").exists()


@pytest.mark.parametrize("asked", [False, True], ids=["stay", "go"])
def test_checkpoints_in_checkpoint_dir_are_deleted_only_on_request(asked: bool, tmp_path: Path) -> None:
    prepare("finished", "r1", None, f"checkpoint.dir={tmp_path}/kept")
    folder = tmp_path / "kept" / "r1"
    save(folder, 4)
    close_attempt(folder, ATTEMPT)
    (folder / "notes.txt").write_text("not a checkpoint")
    ended = scaletrain("rm", "r1", "--yes", "--json", *(["--checkpoints"] if asked else []), code=0)
    (row,) = ended.data["deleted"]
    assert row["checkpoints_left"] == (None if asked else str(folder))
    assert sorted(path.name for path in folder.iterdir()) == ["notes.txt", *([] if asked else ["step-00000004"])]
    assert (str(folder) in ended.err) == (not asked)


def test_a_link_in_place_of_the_folder_of_checkpoints_is_not_followed(tmp_path: Path) -> None:
    other = prepare("finished", "precious")
    prepare("finished", "r1", None, f"checkpoint.dir={tmp_path}/kept")
    shutil.rmtree(tmp_path / "kept" / "r1", ignore_errors=True)
    (tmp_path / "kept" / "r1").symlink_to(other / "checkpoints")
    ended = scaletrain("rm", "r1", "--yes", "--checkpoints")
    assert (ended.code, "is not a folder of checkpoints" in ended.err) == (ExitCode.USAGE, True)
    assert (other / "checkpoints" / "step-00000002" / "manifest.json").exists()
    assert (runs_root() / "r1" / "run.json").exists()
    with pytest.raises(OSError, match=r"Not a directory|symbolic link"):
        remove._remove_checkpoints(tmp_path / "kept" / "r1")


def test_a_new_run_with_the_name_of_a_deleted_one_is_kept() -> None:
    prepare("finished", "r1")
    prepare("finished", "r2")
    found = remove.plan_removal(RunDir(runs_root() / "r1"), with_checkpoints=False)
    (runs_root() / "r1").rename(runs_root() / "away")
    (runs_root() / "r2").rename(runs_root() / "r1")
    with pytest.raises(UsageError, match="another folder"):
        remove.remove(found, with_checkpoints=False)
    assert sorted(path.name for path in runs_root().iterdir()) == ["away", "r1"]
    assert (runs_root() / "r1" / "checkpoints" / "step-00000002").is_dir()


def test_an_interrupted_removal_is_completed_by_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    prepare("finished", "r1")
    prepare("finished", "r2")
    with monkeypatch.context() as patch:

        def cut(path: Path, **options: object) -> None:
            raise KeyboardInterrupt

        patch.setattr("scaletrain_cli.launch.remove.shutil.rmtree", cut)
        assert scaletrain("rm", "r1", "--yes").code == 130
    assert [row["run_id"] for row in scaletrain("list", "--json").data["runs"]] == ["r2"]
    assert len(list(runs_root().iterdir())) == 2, "what is left of r1 is hidden"
    assert scaletrain("rm", "r2", "--yes").code == 0
    assert list(runs_root().iterdir()) == []


def test_what_a_killed_branch_has_left_a_week_ago_is_deleted() -> None:
    prepare("finished", "r1")
    kept = [".new.0123abcd", ".old", ".old.tmp", "r2.89abcdef"]
    for name in [".new.89abcdef", *kept]:
        (runs_root() / name / "checkpoints").mkdir(parents=True)
        age = time.time() - (6 if name == kept[0] else 8) * 86400
        os.utime(runs_root() / name, (age, age))
    assert scaletrain("rm", "r1", "--yes").code == 0
    assert sorted(path.name for path in runs_root().iterdir()) == kept


def test_files_that_cannot_be_deleted_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    prepare("finished", "r1")
    real = os.unlink

    def immutable(path: str, **options: int) -> None:
        if str(path).endswith("events.jsonl"):
            raise PermissionError(1, "Operation not permitted", path)
        real(path, **options)

    monkeypatch.setattr("os.unlink", immutable)
    ended = scaletrain("rm", "r1", "--yes", code=ExitCode.CRASHED)
    assert "r1 is no longer a run" in ended.err
    assert "Operation not permitted" in ended.err
    (left,) = runs_root().iterdir()
    assert str(left) in ended.err


@pytest.mark.parametrize(
    ("wanted", "found"),
    [
        (["--state", "finished"], ["r-finished"]),
        (["--state", "failed", "--state", "damaged"], ["r-damaged", "r-failed"]),
        (["--state", "over"], ["r-failed", "r-finished"]),
        (["--state", "active"], ["r-running"]),
        (["--state", "finished", "--limit", "1"], ["r-finished"]),
    ],
    ids=str,
)
def test_the_list_is_filtered_by_state(wanted: list[str], found: list[str], process: ProcessIdentity) -> None:
    for state in ("finished", "failed", "damaged", "running"):
        prepare(state, f"r-{state}", process)
    listed = scaletrain("list", *wanted, "--json").data
    assert sorted(row["run_id"] for row in listed["runs"]) == found
    assert listed["not_shown"] == 0
    assert set(found) <= set(scaletrain("list", *wanted).out.split())


def test_an_unknown_state_is_rejected_and_an_empty_list_is_reported() -> None:
    prepare("finished", "r1")
    wrong = scaletrain("list", "--state", "runing")
    assert (wrong.code, "Did you mean running? Use active, cancelled" in wrong.err) == (ExitCode.USAGE, True)
    none = scaletrain("list", "--state", "failed")
    assert (none.code, none.out) == (0, "")
    assert "none of the 1 run" in none.err


def test_a_run_without_failures_reports_no_lost_steps(process: ProcessIdentity) -> None:
    prepare("running", "r1", process)
    resumed = scaletrain("resume", "r1", code=ExitCode.USAGE)
    assert "still active" in resumed.err
    assert "lost" not in resumed.err
    assert "left without" not in resumed.err
    shown = scaletrain("status", "r1").out
    assert "why" not in shown.split("attempt  began")[0], "nothing asks for a reason"
    assert "the supervisor is running" in shown


def test_completed_states_are_accepted_by_list() -> None:
    prepare("finished", "r1")
    assert complete_run("r") == ["r1"]
    assert complete_state("f") == ["failed", "finished"]
    assert all(scaletrain("list", "--state", name).code == 0 for name in complete_state(""))


def test_each_event_has_a_sentence() -> None:
    prepare("failed", "r1")
    shown = scaletrain("events", "r1", code=0)
    lines = shown.out.splitlines()
    assert lines[0].endswith("submitted       job 7 on local")
    assert lines[-1].endswith("attempt 1 ended with exit code 1, crash: it was so")
    followed = scaletrain("events", "r1", "--follow")
    assert followed.out == shown.out
    assert scaletrain("events", "r1", "--json").data["events"][0]["event"] == "submitted"


@pytest.mark.parametrize(
    ("event", "sentence"),
    [
        ({"event": "resumed", "step": 40, "lost_steps": 1, "passed_over": []}, "from step 40; 1 step to repeat"),
        ({"event": "finished", "step": 9}, "at step 9"),
        ({"event": "spike"}, ""),
        ({"event": "of another version", "a_b": 0.123456789, "none": None, "yes": True}, "a b 0.12346, yes yes"),
        ({"event": "checkpoint", "step": "x"}, "step x"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_an_event_of_an_unknown_form_is_printed(event: dict[str, object], sentence: str) -> None:
    assert event_sentence(event) == sentence


@pytest.mark.parametrize("moment", [1e300, -1e18, "x", None, [1]], ids=str)
def test_an_event_with_an_invalid_time_is_printed(moment: object) -> None:
    assert event_line({"event": "finished", "step": 9, "time": moment}).plain.endswith("at step 9")


def test_no_event_text_contains_none() -> None:
    values: list[object] = [None, [], ""]
    for name in ("resumed", "preempted", "attempt-ended", "hang", "nodes-excluded", "stragglers", "of another version"):
        for value in values:
            text = event_sentence({"event": name, "step": 1, "message": value, "rank": value, "spared": value})
            assert text
            assert "None" not in text
