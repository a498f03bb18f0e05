"""A run that gets more steps, and a branch from its checkpoint, equal the run that had that length from the start."""

from pathlib import Path
from typing import Any

import psutil
import pytest

from scaletrain_cli.api import prepare_branch
from scaletrain_cli.engine.faults import VARIABLE
from scaletrain_cli.launch.attempts import Outcome, end_attempt
from scaletrain_cli.launch.replan import replan
from scaletrain_cli.launch.resume import resume
from scaletrain_cli.launch.submit import create_run
from scaletrain_cli.reasons import recorded
from scaletrain_cli.rundir.checkpoints import list_checkpoints
from scaletrain_cli.rundir.goodput import steps_lost
from scaletrain_cli.rundir.journal import read_events, read_metrics
from scaletrain_cli.rundir.paths import RunDir
from scaletrain_cli.rundir.record import read_record
from scaletrain_cli.spec.training import learning_rate
from tests.cli.command_line import scaletrain
from tests.drills.campaign.forked_attempts import ForkedRun
from tests.drills.training_runs import Drill, differences, drill_spec, submit_drill
from tests.engine.checkpoint.whole_state import whole_state
from tests.launch.test_resume import Cluster

pytestmark = pytest.mark.drill
COOLED = ("training.steps=9", "training.schedule.name=wsd", "training.schedule.cooldown_steps=3")


def steps_of(run: RunDir) -> dict[int, tuple[float, float]]:
    """Return the loss and the learning rate by step."""
    return {line["step"]: (line["loss"], line["learning_rate"]) for line in read_metrics(run)}


def final_state(run: RunDir) -> dict[str, Any]:
    """Return every matrix of the last checkpoint, and the hash of each rank's file."""
    newest = list_checkpoints(run.checkpoints)[-1]
    files = {name: file.sha256 for name, file in newest.files.items() if name != "state.json"}
    return {"step": newest.step, "files": files, **whole_state(newest.path)}


def test_a_run_with_more_steps_and_a_branch_equal_the_run_that_had_them_from_the_start(dataset: Path) -> None:
    one_rank: dict[str, Any] = {"cluster__gpus_per_node": 1, "layout__zero_stage": 0, "checkpoint__every": 4}
    one_rank |= {"checkpoint__keep": 4, "evaluation__every": 0, "training__schedule__warmup_steps": 2}
    cooled = {f"training__{key}": value for key, value in (("schedule__name", "wsd"), ("schedule__cooldown_steps", 3))}
    whole = ForkedRun.create(drill_spec(dataset, **one_rank, **cooled, training__steps=9))
    whole.attempts_to_end()
    longer = ForkedRun.create(drill_spec(dataset, **one_rank, training__steps=6, training__schedule__name="constant"))
    longer.attempts_to_end()
    end_attempt(longer.run, read_record(longer.run).spec, 1, Outcome(0, "done", recorded("finished")), None)

    prepared = prepare_branch(longer.run.path, "cooled", COOLED, step=4)
    made = create_run(prepared.spec, prepared.plan, "cooled", branch=prepared.branch)
    branch = ForkedRun(made.run, longer.be_rank)
    branch.attempts_to_end()
    resume(longer.run, resize=replan(longer.run, COOLED), scheduler=Cluster())
    longer.attempts_to_end()

    expected = steps_of(whole.run)
    training = read_record(whole.run).spec.training
    assert [rate for _, rate in expected.values()] == [learning_rate(step, 9, training) for step in range(1, 10)]
    for run, began in ((longer.run, 6), (branch.run, 4)):
        assert steps_of(run) == expected
        assert differences(final_state(run), final_state(whole.run)) == []
        last = ForkedRun(run, whole.be_rank).events("resumed")[-1]
        assert (last["step"], last["lost_steps"]) == (began, 0)


@pytest.mark.long
def test_a_cool_down_branches_off_and_its_run_goes_on(dataset: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept: dict[str, Any] = {"checkpoint__keep": 9, "checkpoint__every": 5}
    wsd = kept | {"training__schedule__name": "wsd", "training__schedule__cooldown_steps": 6}
    whole, short = (submit_drill(dataset, **wsd, training__steps=steps) for steps in (30, 21))
    whole.wait_for_end()
    short.wait_for_end()
    monkeypatch.setenv(VARIABLE, "sigstop rank=0 step=13 attempt=1")  # as a step that takes longer than the commands
    kept["checkpoint__async"] = "false"  # that of step 10 is committed by then
    main = submit_drill(dataset, **kept, training__schedule__name="constant", training__steps=20)
    rank = psutil.Process(main.rank_pids()[0])
    main.wait_for(lambda: rank.status() == psutil.STATUS_STOPPED)
    monkeypatch.delenv(VARIABLE)
    refused = scaletrain("resume", main.run.path, "--branch", "cooled", "--at", 7, "--yes")
    assert (refused.code, "there are those of steps 5, 10" in " ".join(refused.err.split())) == (2, True), refused.err
    sets = [word for key in ("name=wsd", "cooldown_steps=6") for word in ("--set", f"training.schedule.{key}")]
    words = ("--branch", "cooled", "--at", 10, *sets, "--set", "training.steps=21", "--yes", "--json")
    branched = scaletrain("resume", main.run.path, *words, code=0)
    assert branched.data["branch_of"] == {"run_id": main.run.run_id, "run_dir": str(main.run.path), "step": 10}
    assert branched.data["resize"]["schedule"]["same_past"] is True
    assert main.active(), "the main run goes on"
    rank.resume()
    cooled = Drill(RunDir(Path(branched.data["run_dir"])), main.scheduler)
    cooled.wait_for_end()
    main.wait_for_end()
    extended = scaletrain("resume", main.run.path, *sets, "--set", "training.steps=30", "--yes", "--json", code=0)
    assert (extended.data["checkpoint_step"], extended.data["steps_lost"]) == (20, 0)
    assert extended.data["resize"]["schedule"]["total_steps"] == {"was": 20, "now": 30}
    main.wait_for_end()
    for run, expected in ((cooled, short), (main, whole)):
        assert run.events("finished"), run.events()
        assert steps_of(run.run) == steps_of(expected.run)
        assert differences(final_state(run.run), final_state(expected.run)) == []
    assert "branch   of " in scaletrain("status", cooled.run.path).out


@pytest.mark.long
def test_a_branch_skips_the_batches_that_the_other_run_has_skipped_before_its_checkpoint(dataset: Path) -> None:
    averaged = {"guard__nan": "rollback", "training__averaging": "{name: ema, every: 1, decay: 0.9}"}
    main = ForkedRun.create(drill_spec(dataset, **averaged))
    main.attempts_to_end(fault="spike step=31 factor=nan")
    (back,) = main.events("rolled-back")
    assert (back["to_step"], back["skip"]) == (20, [30, 31])
    prepared = prepare_branch(main.run.path, "again", step=30)
    branch = ForkedRun(create_run(prepared.spec, prepared.plan, "again", branch=prepared.branch).run, main.be_rank)
    branch.attempts_to_end()
    assert steps_of(branch.run) == steps_of(main.run)
    assert differences(final_state(branch.run), final_state(main.run)) == []
    assert steps_lost(read_events(branch.run)) == 0
