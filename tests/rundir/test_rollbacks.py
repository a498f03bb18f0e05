"""A rollback stays in effect after its process ends, until the run starts from scratch."""

from pathlib import Path

from scaletrain_cli.rundir.journal import Rollback, read_events, read_rollbacks, record_event, record_rollback
from scaletrain_cli.rundir.paths import RunDir


def test_recorded_rollbacks_are_read_back_with_their_evidence(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    assert read_rollbacks(run) == []
    both = [Rollback(28, 20, (24, 28)), Rollback(31, 20, (33, 36))]
    for rollback in both:
        record_rollback(run, rollback, median=2.0)
    assert read_rollbacks(run) == both
    assert [(event["median"], event["lost_steps"]) for event in read_events(run)] == [(2.0, 8), (2.0, 11)]


def test_a_start_from_scratch_clears_skipped_batches(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    record_rollback(run, Rollback(28, 20, (24, 28)))
    record_event(run, "from-scratch")
    assert read_rollbacks(run) == []
    record_rollback(run, Rollback(9, 5, (7, 9)))
    assert read_rollbacks(run) == [Rollback(9, 5, (7, 9))]
