"""The conditions under which a drill is survived, by kind, and under which two runs are the same."""

import json
from dataclasses import replace

import pytest

from scaletrain_cli.launch.drill import KINDS, Course, compare_runs

STEPS = tuple({"step": step, "loss": 8.0 / step, "grad_norm": 1.0} for step in range(1, 41))
UNDISTURBED = Course(
    state="finished",
    why="",
    steps=STEPS,
    attempts=1,
    ends=("done",),
    exit_codes=(0,),
    steps_lost=0,
    passed_over=(),
    rolled_back=False,
    seconds=10.0,
    final_files={"shard": "abc"},
)
RESTARTED = replace(UNDISTURBED, attempts=2, ends=("crash", "done"), exit_codes=(1, 0), steps_lost=6, seconds=17.0)
STOPPED = replace(RESTARTED, exit_codes=(93, 0), resumed=True)


def complaints(kind: str, faulted: Course, *, exact: bool = True) -> str:
    """Return the failures as text; every result can be written as JSON."""
    result = compare_runs(KINDS[kind], "runs/x", faulted, UNDISTURBED, exact=exact)
    json.dumps([result.match.to_document(), *(failure.to_document() for failure in result.failures)], allow_nan=False)
    return "; ".join(result.complaints)


def drifted(by: float, first: int = 30) -> tuple[dict[str, float], ...]:
    return tuple({**line, "loss": line["loss"] * (1 + by)} if line["step"] >= first else line for line in STEPS)


def test_a_run_that_restarted_and_is_identical_to_the_bit_has_survived() -> None:
    verdict = compare_runs(KINDS["sigkill"], "runs/x", RESTARTED, UNDISTURBED, exact=True)
    assert verdict.survived
    assert (verdict.attempts, verdict.steps_lost, verdict.seconds_lost) == (2, 6, 7.0)
    assert verdict.sameness == "bit for bit, checkpoint files too"


@pytest.mark.parametrize(
    ("kind", "faulted", "expected"),
    [
        ("sigkill", UNDISTURBED, "it took 1 attempt instead of 2 (done)"),
        (
            "sigkill",
            replace(RESTARTED, state="failed", why="no room"),
            "the run did not finish; its state is failed: no room",
        ),
        ("sigterm", RESTARTED, "6 steps lost despite the warning"),
        ("truncate", RESTARTED, "the damaged file was not reported"),
        ("spike", UNDISTURBED, "it did not roll back to before the spike"),
        ("slow-rank", RESTARTED, "it took 2 attempts instead of 1 (crash, done)"),
        ("sigkill", STOPPED, "it did not restart without a resume"),
        ("nan", replace(STOPPED, exit_codes=(1, 0)), "it stopped with exit code 1 instead of 93"),
        (
            "sigkill",
            replace(RESTARTED, steps=drifted(1e-7)),
            "it does not match the undisturbed run: different from step 30 on; relative difference of the final loss: "
            "1.0e-07",
        ),
        (
            "sigkill",
            replace(RESTARTED, steps=STEPS[:-1]),
            "it does not match the undisturbed run: 39 steps logged instead of 40",
        ),
        (
            "sigkill",
            replace(RESTARTED, steps=drifted(float("nan"))),
            "it does not match the undisturbed run: the final loss is NaN or infinite instead of",
        ),
        ("sigkill", replace(RESTARTED, steps=()), "it does not match the undisturbed run: no step was logged"),
    ],
)
def test_a_run_with_other_attempts_or_another_end_has_not_survived(kind: str, faulted: Course, expected: str) -> None:
    assert complaints(kind, faulted).startswith(expected)


@pytest.mark.parametrize(
    ("kind", "faulted"),
    [
        ("sigterm", replace(RESTARTED, steps_lost=0)),
        ("truncate", replace(RESTARTED, passed_over=("step-00000020/shard: cut",))),
        ("spike", replace(UNDISTURBED, rolled_back=True, steps=drifted(0.05))),
        ("slow-rank", UNDISTURBED),
        ("nan", STOPPED),
        ("sigkill", replace(RESTARTED, final_files={"shard": "another"})),
    ],
)
def test_a_run_with_the_expected_end_has_survived(kind: str, faulted: Course) -> None:
    assert complaints(kind, faulted) == ""


def test_on_gpus_the_final_loss_may_differ_within_a_tolerance() -> None:
    assert complaints("sigkill", replace(RESTARTED, steps=drifted(5e-5)), exact=False) == ""
    assert "does not match" in complaints("sigkill", replace(RESTARTED, steps=drifted(5e-4)), exact=False)
    assert "does not match" in complaints("sigkill", replace(RESTARTED, steps=drifted(float("nan"))), exact=False)


def test_a_run_with_a_higher_loss_after_a_rollback_has_not_survived() -> None:
    assert "does not match" in complaints("spike", replace(UNDISTURBED, rolled_back=True, steps=drifted(0.5)))
