"""drill with a fake engine that injects the faults: the runs, the output and the files that are left."""

import json
from pathlib import Path

import pytest

from scaletrain_cli.errors import ExitCode
from scaletrain_cli.launch.drill import KINDS
from scaletrain_cli.rundir.paths import list_runs, runs_root
from tests.cli.command_line import SMALL, Ended, scaletrain

pytestmark = pytest.mark.usefixtures("stand_in_engine", "forked_jobs")


def drill(*arguments: str) -> Ended:
    env = json.dumps({"FAKE": json.dumps({"steps": 12, "checkpoint_every": 3, "step_seconds": 0.05})})
    return scaletrain("drill", *arguments, "--spec", SMALL, "--set", f"env={env}", "--steps", "12", "--timeout", "1h")


def test_a_drill_recovers_from_a_killed_rank_and_leaves_no_files() -> None:
    ended = drill("sigkill")
    assert ended.code == 0, ended.out + ended.err
    title, row = ended.out.splitlines()
    assert title.split() == "drill survived attempts steps lost time lost matches undisturbed run".split()
    assert row.split()[:3] == ["sigkill", "survived", "2"]
    assert row.endswith("bit for bit, checkpoint files too") or row.endswith("bit for bit")
    assert [path.name for path in runs_root().iterdir()] == ["datasets"]


@pytest.mark.long
def test_a_drill_without_an_injected_fault_does_not_pass() -> None:
    """The stand-in has no gradients to poison, so the run just finishes."""
    ended = drill("nan", "slow-rank", "--json")
    assert ended.code == ExitCode.CRASHED
    assert {one["kind"]: one["survived"] for one in ended.data["drills"]} == {"nan": False, "slow-rank": True}
    assert ended.data["drills"][1]["complaints"] == ["it took 1 attempt instead of 2 (done)"]
    kept = Path(ended.data["folder"])
    assert {path.name for path in kept.iterdir()} == {"datasets", "undisturbed", "nan", "slow-rank"}
    assert list_runs() == [], "they are not among the runs"
    assert scaletrain("status", kept / "nan").code == 0, "but can be looked at"


def test_no_drill_runs_if_the_undisturbed_run_fails() -> None:
    env = json.dumps({"FAKE": json.dumps({"die": {"*:*": 93}})})
    ended = scaletrain("drill", "sigkill", "--spec", SMALL, "--set", f"env={env}", "--steps", "12", "--timeout", "1h")
    assert (ended.code, ended.out) == (ExitCode.CRASHED, "")
    assert "the undisturbed run did not finish (failed)" in " ".join(ended.err.split())


def test_a_run_that_never_ends_is_cancelled() -> None:
    env = json.dumps({"FAKE": json.dumps({"steps": 10_000, "step_seconds": 0.05})})
    ended = scaletrain("drill", "sigkill", "--spec", SMALL, "--set", f"env={env}", "--steps", "12", "--timeout", "1s")
    assert ended.code == ExitCode.CRASHED
    assert "did not finish (cancelled)" in " ".join(ended.err.split())


def test_the_kinds_are_listed_without_starting_any() -> None:
    listed = scaletrain("drill", "--list")
    assert (listed.code, listed.err) == (0, "")
    assert [row.split()[0] for row in listed.out.splitlines()] == list(KINDS)
    assert scaletrain("drill", "--list", "--json").data["kinds"].keys() == KINDS.keys()
    assert not runs_root().exists()


@pytest.mark.parametrize(
    ("arguments", "code", "expected"),
    [
        (["--steps", "5"], ExitCode.USAGE, "--steps 5: a drill needs at least 12"),
        (["--timeout", "soon"], ExitCode.USAGE, "--timeout soon: must be a duration"),
        (["--gpus-per-node", "3"], ExitCode.INFEASIBLE, "must be a multiple of 3 data-parallel ranks"),
        (["--set", "training.nonsense=1"], ExitCode.USAGE, "training.nonsense"),
        (["--set", "code.engine=mine.train"], ExitCode.USAGE, "Add --set code={} to run the drills"),
        (["--set", "code.command=[sh, run.sh]"], ExitCode.USAGE, "code.command = sh run.sh: drills inject faults"),
    ],
)
def test_an_impossible_drill_starts_nothing(arguments: list[str], code: ExitCode, expected: str) -> None:
    assert expected in " ".join(scaletrain("drill", "sigkill", "--spec", SMALL, *arguments, code=code).err.split())
    assert not runs_root().exists()
