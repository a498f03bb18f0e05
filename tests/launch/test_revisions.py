"""run.json never changes; a revision replaces its spec and plan, completely or not at all."""

from __future__ import annotations

import pytest

from scaletrain_cli.errors import UsageError
from scaletrain_cli.launch.submit import create_run
from scaletrain_cli.rundir.record import (
    add_revision,
    read_first_record,
    read_record,
    revision_path,
    revisions,
    withdraw_revision,
)
from tests.launch.conftest import MadeRun, MakeRun, make_plan, make_spec


@pytest.fixture
def made(make_run: MakeRun) -> MadeRun:
    return make_run(run_id="mine")


def revise(made: MadeRun, *overrides: str) -> None:
    spec = make_spec(*overrides)
    add_revision(made.run, read_record(made.run), spec, make_plan(spec), overrides)


def test_the_latest_revision_replaces_the_submitted_spec_and_run_json_is_unchanged(made: MadeRun) -> None:
    before = made.run.record.read_bytes()
    revise(made, "cluster.gpus_per_node=1")
    revise(made, "cluster.gpus_per_node=4")
    record = read_record(made.run)
    assert (record.revision, record.spec.world_size, record.plan.layout.world_size) == (2, 4, 4)
    assert (record.run_id, record.wandb_run_id) == (made.record.run_id, made.record.wandb_run_id)
    assert made.run.record.read_bytes() == before
    assert read_first_record(made.run) == made.record
    assert revisions(made.run) == [1, 2]


def test_after_a_withdrawn_revision_the_previous_one_counts(made: MadeRun) -> None:
    revise(made, "cluster.gpus_per_node=1")
    revise(made, "cluster.gpus_per_node=4")
    withdraw_revision(made.run, 2)
    assert (read_record(made.run).revision, read_record(made.run).spec.world_size) == (1, 1)


def test_a_damaged_revision_is_an_error_and_the_previous_one_is_not_used(made: MadeRun) -> None:
    revise(made, "cluster.gpus_per_node=1")
    revision_path(made.run, 1).write_text("{")
    with pytest.raises(UsageError, match=r"revisions/0001\.json cannot be read"):
        read_record(made.run)


def test_a_temporary_file_of_a_crash_is_no_revision(made: MadeRun) -> None:
    revise(made, "cluster.gpus_per_node=1")
    (made.run.path / "revisions" / ".0002.json.77.tmp").write_text("{")
    assert read_record(made.run).revision == 1


def test_submitting_the_original_spec_again_finds_the_run(made: MadeRun) -> None:
    revise(made, "cluster.gpus_per_node=1")
    again = create_run(made.record.spec, made.record.plan, "mine")
    assert (again.created, again.record.revision) == (False, 1)
