"""Measurements of an attempt are read back, those of the newest attempt that has any."""

from pathlib import Path

import pytest

from scaletrain_cli.rundir.measured import Figure, Measured, StageFigures, read_measured, write_measured
from scaletrain_cli.rundir.paths import RunDir


def measured(attempt: int) -> Measured:
    def stage(number: int, weights: int) -> StageFigures:
        figures = {"parameters": Figure(100, weights), "gradients": Figure(50, 50), "optimizer_states": Figure(0, 0)}
        return StageFigures(number, figures)

    return Measured(attempt, 2, 4, "cpu", 1, (stage(0, 100), stage(1, 103)))


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    found = RunDir(tmp_path)
    for _ in range(3):
        found.new_attempt()
    return found


def test_the_measurements_of_the_latest_attempt_are_read_back_unchanged(run: RunDir) -> None:
    assert read_measured(run) is None
    write_measured(run, measured(1))
    write_measured(run, measured(2))
    assert read_measured(run) == measured(2)
    run.measured(2).write_text("{")
    assert read_measured(run) == measured(1)


def test_differences_are_shares_of_what_was_planned(run: RunDir) -> None:
    assert Figure(100, 103).difference == pytest.approx(0.03)
    assert Figure(0, 7).difference is None
    assert measured(1).model_states == Figure(150, 153)
    stored = measured(1).to_json()["stages"][1]
    assert stored["parameters"] == {"planned": 100, "measured": 103, "difference": pytest.approx(0.03)}
