"""checkpoint list, verify and prune, on a run of a fake engine without ranks."""

import shutil
from pathlib import Path

import pytest

from scaletrain_cli.errors import ExitCode
from scaletrain_cli.launch.job import Job
from scaletrain_cli.launch.submit import create_run
from scaletrain_cli.spec import load_spec
from scaletrain_cli.worker.checkpoint_commit import close_attempt
from tests.cli.command_line import SMALL, scaletrain
from tests.launch.conftest import make_plan
from tests.rundir.test_checkpoints import ATTEMPT, flip_bit, save


@pytest.fixture
def folder() -> Path:
    """The checkpoints of steps 10 to 60, of which 30 is marked clean."""
    spec = load_spec(SMALL)
    run = create_run(spec, make_plan(spec), "r1").run
    for step in range(10, 70, 10):
        save(run.checkpoints, step, clean=step == 30)
    close_attempt(run.checkpoints, ATTEMPT)
    return run.checkpoints


def names(folder: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step-")) for path in folder.glob("step-*"))


def test_checkpoints_are_listed_oldest_first_and_the_latest_is_marked(folder: Path) -> None:
    (folder / "step-00000060" / "manifest.json").unlink()
    listed = scaletrain("checkpoint", "list", "r1", code=0)
    rows = [row.split() for row in listed.out.splitlines()]
    assert rows[0] == ["step", "age", "size", "ranks", "clean", "attempt"]
    assert [row[0] for row in rows[1:7]] == ["10", "20", "30", "40", "50", "60"]
    assert rows[3][-5:] == ["5.00", "kB", "2", "yes", "3"]
    assert rows[5][-1] == "latest"
    assert "invalid: manifest.json: missing" in " ".join(listed.out.split())
    found = scaletrain("checkpoint", "list", "r1", "--json").data["checkpoints"]
    assert (found[0]["step"], found[0]["bytes"], found[0]["problem"]) == (10, 5000, None)
    assert scaletrain("checkpoint", "list", "--json").data["checkpoints"] == found, "the newest run is meant"


def test_a_run_without_checkpoints_is_not_an_error(folder: Path) -> None:
    spec = load_spec(SMALL)
    create_run(spec, make_plan(spec), "r2")
    for verb in ("list", "verify"):
        ended = scaletrain("checkpoint", verb, "r2")
        assert (ended.code, ended.out) == (0, ""), ended.err


def test_a_flipped_bit_is_found_and_its_file_named(folder: Path) -> None:
    assert scaletrain("checkpoint", "verify", "r1").code == 0
    flip_bit(folder / "step-00000040" / "rank-00000.pt", 1234)
    (folder / "step-00000050" / "manifest.json").write_text("{}")
    verified = scaletrain("checkpoint", "verify", "r1", code=ExitCode.CRASHED)
    assert verified.out.splitlines() == [
        "step-00000040/rank-00000.pt: content does not match the recorded hash",
        "step-00000050/manifest.json: not the manifest of a checkpoint",
    ]
    assert "4 of 6 checkpoints are valid" in verified.err
    assert scaletrain("checkpoint", "verify", "r1", "--step", "30").code == 0
    one = scaletrain("checkpoint", "verify", "r1", "--step", "40", "--json")
    assert (one.code, one.data["sound"]) == (ExitCode.CRASHED, False)
    missing = scaletrain("checkpoint", "verify", "r1", "--step", "41", code=ExitCode.USAGE)
    assert "--step 41: no such checkpoint" in missing.err


def test_pruning_keeps_the_requested_number_the_latest_clean_one_and_every_mth(folder: Path) -> None:
    tried = scaletrain("checkpoint", "prune", "r1", "--keep", "2", "--dry-run")
    assert (tried.code, len(names(folder))) == (0, 6), tried.err
    assert tried.out.splitlines() == ["step-00000010", "step-00000020", "step-00000040"]
    pruned = scaletrain("checkpoint", "prune", "r1", "--keep", "2", "--keep-every", "20", "--json", code=0)
    assert (pruned.data["deleted"], pruned.data["newest_sound_step"]) == (["step-00000010"], 60)
    assert names(folder) == [20, 30, 40, 50, 60]


def test_pruning_without_options_follows_the_spec(folder: Path) -> None:
    assert scaletrain("checkpoint", "prune", "r1").code == 0
    assert names(folder) == [30, 40, 50, 60]


def test_pruning_never_deletes_the_checkpoint_that_a_resume_would_load(folder: Path) -> None:
    for step in (50, 60):
        flip_bit(folder / f"step-{step:08d}" / "rank-00000.pt", 0)
    assert scaletrain("checkpoint", "prune", "r1", "--keep", "1").code == 0
    assert names(folder) == [30, 40, 60]
    for step in (30, 40):
        flip_bit(folder / f"step-{step:08d}" / "rank-00000.pt", 0)
    before = names(folder)
    refused = scaletrain("checkpoint", "prune", "r1", "--keep", "1")
    assert (refused.code, names(folder)) == (ExitCode.CRASHED, before)
    assert "no checkpoint of r1 is valid, so none was deleted" in refused.err
    shutil.rmtree(folder)
    assert "r1 has no checkpoint in" in scaletrain("checkpoint", "prune", "r1").err


@pytest.mark.parametrize("job", [Job("7", "running"), Job("7", "queued"), Job("7", "unknown")])
def test_an_active_run_is_not_pruned(folder: Path, job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("scaletrain_cli.launch.backends.local.backend.LocalBackend.job", lambda *_: job)
    refused = scaletrain("checkpoint", "prune", "r1", "--keep", "1")
    assert (refused.code, len(names(folder))) == (ExitCode.USAGE, 6)
    assert "is or may be active" in refused.err


DAMAGED = "step-00000040 is damaged: rank-00000.pt: content does not match the recorded hash"
MISSING = "--step 41: no such checkpoint"


@pytest.mark.parametrize(
    ("verb", "words", "code", "expected"),
    [
        ("export", ["--step", "41"], ExitCode.USAGE, MISSING),
        ("export", ["--step", "40"], ExitCode.CRASHED, DAMAGED),
        ("export", ["--dtype", "int8"], ExitCode.USAGE, "'--dtype'"),
        (
            "average",
            ["--last", "6"],
            ExitCode.USAGE,
            "--last 6: r1 has 5 valid checkpoints (steps: 10, 20, 30, 50, 60)",
        ),
        ("average", ["--step", "30"], ExitCode.USAGE, "a mean needs at least two different steps"),
        ("average", ["--step", "30", "--step", "41"], ExitCode.USAGE, MISSING),
        ("average", ["--step", "30", "--step", "40"], ExitCode.CRASHED, DAMAGED),
        ("average", ["--last", "1"], ExitCode.USAGE, "'--last'"),
        ("sample", ["Hi", "--step", "41"], ExitCode.USAGE, MISSING),
        ("sample", ["Hi", "--step", "40"], ExitCode.CRASHED, DAMAGED),
        ("sample", ["Hi", "--system", "Be brief."], ExitCode.USAGE, "a text that is continued has no system message"),
        ("sample", [], ExitCode.USAGE, "Missing argument 'PROMPT...'"),
    ],
)
def test_what_cannot_be_read_or_made_is_rejected_with_the_reason(
    folder: Path, verb: str, words: list[str], code: ExitCode, expected: str, tmp_path: Path
) -> None:
    flip_bit(folder / "step-00000040" / "rank-00000.pt", 1234)
    output = () if verb == "sample" else ("--output", tmp_path / "out")
    ended = scaletrain("checkpoint", verb, "r1", *words, *output, code=code)
    assert ended.out == ""
    assert expected in " ".join(ended.err.split())
    assert not (tmp_path / "out").exists()
