"""Slurm's estimate of the start, as a real Slurm printed it; its other lines remain notes."""

import pytest

from scaletrain_cli.launch.backends.slurm.preflight import read_estimate
from scaletrain_cli.launch.backends.slurm.tables import moment


def test_the_estimate_is_read_with_its_nodes_and_other_lines_are_kept() -> None:
    estimate = "Job 7 to start at 2026-11-22T00:30:00 using 16 processors on nodes n[1-2] in partition main"
    start, rest = read_estimate(f"lua: be nice\n{estimate}", 0.0)
    assert start.at == moment("2026-11-22T00:30:00")
    assert start.why.startswith("Slurm's estimate (sbatch --test-only) on n[1-2] of main; jobs of higher priority")
    assert rest == ["lua: be nice"]
    assert start.at is not None
    assert read_estimate(estimate, start.at)[0].why.endswith("n[1-2] of main")


@pytest.mark.parametrize(
    "line",
    [
        "Job 7 to start at 2026-11-22T00:30:00 using 16 processors on n1",
        "Job 7 to start at 2026-11-22T00:30:00 a usable amount of time from now",
    ],
)
def test_other_forms_of_the_estimate_are_read_for_their_time(line: str) -> None:
    assert read_estimate(line, 0.0)[0].at == moment("2026-11-22T00:30:00")


def test_without_an_estimate_the_start_is_unknown() -> None:
    start, rest = read_estimate("Job 7 to start at Unknown on nodes n1", 0.0)
    assert (start.at, start.why) == (None, "sbatch --test-only gave no start time")
    assert len(rest) == 1


def test_the_estimate_states_that_it_includes_hidden_reservations() -> None:
    estimate = "Job 7 to start at 2026-11-22T00:30:00 using 16 processors on nodes n1 in partition main"
    assert (
        "includes reservations that are hidden from you"
        in read_estimate(estimate, 0.0, hidden_reservations=True)[0].why
    )
