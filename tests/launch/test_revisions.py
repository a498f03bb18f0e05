"""run.json never changes; a revision replaces its spec and plan, completely or not at all."""

import errno
import json
from pathlib import Path
from typing import Any

import pytest

from scaletrain_cli.errors import UsageError
from scaletrain_cli.launch.attempts import begin_attempt
from scaletrain_cli.launch.submit import create_run
from scaletrain_cli.rundir import record
from scaletrain_cli.rundir.documents import write_document
from scaletrain_cli.rundir.record import (
    add_revision,
    read_first_record,
    read_record,
    read_record_of,
    read_size_plans,
    revision_path,
    revisions,
    withdraw_revision,
    write_size_plans,
)
from scaletrain_cli.safe_files import replace_file
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
    latest = read_record(made.run)
    assert (latest.revision, latest.spec.world_size, latest.plan.layout.world_size) == (2, 4, 4)
    assert (latest.run_id, latest.wandb_run_id) == (made.record.run_id, made.record.wandb_run_id)
    assert made.run.record.read_bytes() == before
    assert read_first_record(made.run) == made.record
    assert revisions(made.run) == [1, 2]


def test_the_record_of_an_attempt_is_its_revision(made: MadeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    revise(made, "cluster.gpus_per_node=1")
    revise(made, "cluster.gpus_per_node=4")
    named = begin_attempt(made.run, made.record.spec, scheduler="slurm", job_id="1", nodes=("n1",), revision=2)
    unnamed = begin_attempt(made.run, made.record.spec, scheduler="slurm", job_id="1", nodes=("n1",))
    monkeypatch.setattr(record, "revisions", lambda run: [1])  # as a network file system lists it for some seconds
    assert read_record_of(made.run, named).spec.world_size == 4
    assert read_record_of(made.run, unnamed).spec.world_size == 1


def test_a_plan_without_the_blocks_of_each_stage_has_those_of_the_spec(make_run: MakeRun) -> None:
    """Version 0.2 recorded them in the spec alone, and a layout without them means another division."""
    split = ("model.num_hidden_layers=4", "layout.pipeline_parallel=2", "layout.pipeline_split=[1,3]")
    made = make_run(*split)
    document = json.loads(made.run.record.read_text())
    document["plan"]["layout"].pop("pipeline_split", None)
    document["plan"]["layout"]["pipeline_parallel"] = 2
    made.run.record.write_text(json.dumps(document))
    assert read_record(made.run).plan.layout.pipeline_split == (1, 3)


def test_after_a_withdrawn_revision_the_previous_one_counts(made: MadeRun) -> None:
    revise(made, "cluster.gpus_per_node=1")
    revise(made, "cluster.gpus_per_node=4")
    withdraw_revision(made.run, 2)
    assert (read_record(made.run).revision, read_record(made.run).spec.world_size) == (1, 1)


@pytest.mark.parametrize("change", [{"schema": "scaletrain.run/v2"}, {"plan": {}}])
def test_a_record_of_another_version_is_not_called_damaged(made: MadeRun, change: dict[str, object]) -> None:
    document = json.loads(made.run.record.read_text())
    replace_file(made.run.record, json.dumps(document | change))
    with pytest.raises(UsageError, match=r"run\.json is damaged"):
        read_record(made.run)
    replace_file(made.run.record, json.dumps(document | change | {"versions": {"scaletrain": "9.0.0"}}))
    with pytest.raises(UsageError, match=r"run\.json is of ScaleTrain 9\.0\.0.*Use ScaleTrain 9\.0\.0 for this run"):
        read_record(made.run)


def test_a_damaged_revision_is_an_error_and_the_previous_one_is_not_used(made: MadeRun) -> None:
    revise(made, "cluster.gpus_per_node=1")
    revision_path(made.run, 1).write_text("{")
    with pytest.raises(UsageError, match=r"revisions/0001\.json is damaged"):
        read_record(made.run)


def test_plans_of_sizes_that_an_interrupted_revision_left_are_not_those_of_a_later_one(made: MadeRun) -> None:
    plans = {1: make_plan(make_spec("cluster.gpus_per_node=1")), 2: make_plan(make_spec("cluster.gpus_per_node=2"))}
    left = {nodes: make_plan(make_spec("cluster.gpus_per_node=4")) for nodes in plans}
    add_revision(made.run, made.record, made.record.spec, made.record.plan, [], size_plans=plans)
    write_size_plans(made.run, 2, left)  # and the process was killed
    first = read_record(made.run)
    revised = add_revision(made.run, first, first.spec, first.plan, [])
    assert (revised.revision, read_size_plans(made.run, revised)) == (2, plans)


def test_a_revision_that_fails_leaves_no_plans_of_sizes(made: MadeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    def write(path: Path, data: dict[str, Any]) -> None:
        if not path.name.endswith("-sizes.json"):
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        write_document(path, data)

    monkeypatch.setattr(record, "write_document", write)
    with pytest.raises(OSError, match="No space left"):
        add_revision(made.run, made.record, made.record.spec, made.record.plan, [], size_plans={2: made.record.plan})
    assert list((made.run.path / "revisions").iterdir()) == []


def test_a_temporary_file_of_a_crash_is_no_revision(made: MadeRun) -> None:
    revise(made, "cluster.gpus_per_node=1")
    (made.run.path / "revisions" / ".0002.json.77.tmp").write_text("{")
    assert read_record(made.run).revision == 1


def test_submitting_the_original_spec_again_finds_the_run(made: MadeRun) -> None:
    revise(made, "cluster.gpus_per_node=1")
    again = create_run(made.record.spec, made.record.plan, "mine")
    assert (again.created, again.record.revision) == (False, 1)
