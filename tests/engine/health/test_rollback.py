import math
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from scaletrain_cli.engine.assembly import guard_of
from scaletrain_cli.engine.health.guard import Guard
from scaletrain_cli.engine.health.rollback import GuardActions, NonFiniteGradientError, SpikeError
from scaletrain_cli.engine.metrics.goodput_ledger import LedgerClock
from scaletrain_cli.engine.metrics.step_measures import StepMeasures
from scaletrain_cli.engine.process_group import Ranks
from scaletrain_cli.plan import make_plan
from scaletrain_cli.rundir.checkpoints import Checkpoint, list_checkpoints, verify
from scaletrain_cli.rundir.journal import Rollback, read_events, read_rollbacks
from scaletrain_cli.rundir.paths import RunDir
from scaletrain_cli.rundir.record import RunRecord
from scaletrain_cli.worker import checkpoint_commit
from scaletrain_cli.worker.failures import failure_reason_of
from tests.engine.alone import Alone, context_of
from tests.spec.samples import SPEC, load


class Kept:
    """Stands for the checkpointer, and records its calls."""

    def __init__(self, folder: Path, guard: Guard) -> None:
        self.folder, self.done = folder, list[str]()
        self.guard_state = guard.state_dict()

    def finish(self) -> None:
        self.done.append("finish")

    def mark_clean_up_to(self, step: int) -> None:
        self.done.append(f"clean {step}")

    def latest_clean(self) -> Checkpoint | None:
        valid = (each for each in reversed(list_checkpoints(self.folder)) if each.clean and not verify(each))
        return next(valid, None)

    def forget_copies(self, step: int) -> None:
        self.done.append(f"forget copies after {step}")

    def delete_newer(self, step: int) -> None:
        self.done.append(f"retire {step}")

    def restore(self, checkpoint: Checkpoint) -> dict[str, Any]:
        self.done.append(f"restore {checkpoint.step}")
        return {"guard": self.guard_state}


class Logged:
    def __init__(self) -> None:
        self.steps: list[int] = []

    def log(self, step: int, **measured: float) -> None:
        self.steps.append(step)

    def flush(self) -> None:
        pass


def commit(folder: Path, step: int, *, clean: bool) -> None:
    checkpoint_commit.open_attempt(folder, 1)
    writer = checkpoint_commit.HashingWriter(checkpoint_commit.stage_checkpoint(folder, 1, step) / "shard.pt")
    writer.write(b"weights")
    checkpoint_commit.commit_checkpoint(
        folder, step, {"shard.pt": writer.close()}, world_size=1, clean=clean, attempt=1
    )


Make = Callable[..., GuardActions]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    run = RunDir(tmp_path)
    commit(run.checkpoints, 20, clean=True)
    commit(run.checkpoints, 30, clean=False)

    def made(*overrides: str, rollbacks: list[Rollback] | None = None) -> GuardActions:
        spec = load(SPEC, *overrides)
        record = RunRecord("r", time.time(), spec, make_plan(spec), {}, "", "")
        guard = Guard(factor=3.0, patience=spec.guard.spike.patience, fresh_warmup_steps=None)
        for step in range(1, 21):
            guard.observe(step, {"loss": 2.0, "grad_norm": 0.5})
        kept: Any = Kept(run.checkpoints, guard)
        consensus: Any = Alone()
        ledger = LedgerClock(run, 1, 1)
        stages: Any = SimpleNamespace(prepare_restore=lambda step: kept.done.append(f"engine of {step}"))
        ranks, skipped = Ranks(0, 1, 0), rollbacks or []
        return GuardActions(context_of(run, record, ranks, consensus), kept, guard, skipped, ledger, stages)

    return made


def test_a_nan_after_the_last_rollback_ends_the_run_as_a_nan(make: Make) -> None:
    back = Rollback(30, 20, (21, 30))
    for nan, error in ((math.nan, NonFiniteGradientError), (50.0, SpikeError)):
        actions = make("guard.nan=rollback", "guard.spike.retries=1", rollbacks=[back])
        with pytest.raises(error, match=r"after 1 rollback to step 20") as caught:
            check(actions, measures(21, *[2.0] * 13, nan, nan, nan), 36)
        assert failure_reason_of(caught.value) == ("nan" if math.isnan(nan) else "spike")


def measures(first: int, *losses: float, norm: float = 0.5) -> list[StepMeasures]:
    return [StepMeasures(first + i, 0.1, {"loss": loss, "grad_norm": norm}) for i, loss in enumerate(losses)]


def check(actions: GuardActions, found: list[StepMeasures], trained: int) -> int:
    logged: Any = Logged()
    return actions.check(found, trained, logged)


def names(actions: GuardActions) -> list[str]:
    return [event["event"] for event in read_events(actions.context.run)]


def test_a_spike_rolls_back_to_the_latest_clean_checkpoint_and_skips_its_batches(make: Make) -> None:
    actions = make()
    assert check(actions, measures(21, *[2.0] * 13, 50.0, 50.0, 50.0), 36) == 20
    (back,) = read_rollbacks(actions.context.run)
    assert back == Rollback(from_step=36, to_step=20, skip=(31, 36))
    assert actions.skipped == ((31, 36),)
    assert [actions.batch_number(step) for step in (30, 31)] == [30, 37]
    done = ["finish", "forget copies after 20", "retire 20", "engine of 20", "restore 20"]
    assert actions.checkpointer.done[-5:] == done  # type: ignore[attr-defined]
    (event,) = read_events(actions.context.run)
    assert (event["retry"], event["losses"], event["median_loss"]) == (1, [50.0] * 3, 2.0)


def test_a_step_trained_before_the_guard_sees_the_spike_is_in_the_skip_range(make: Make) -> None:
    actions = make()
    assert check(actions, measures(31, 50.0, 50.0, 50.0), 34) == 20
    assert actions.skipped == ((28, 34),)


def test_a_second_spike_adds_a_skip_range_in_batch_numbers(make: Make) -> None:
    actions = make()
    check(actions, measures(31, 50.0, 50.0, 50.0), 33)
    assert actions.skipped == ((28, 33),)
    assert check(actions, measures(21, *[2.0] * 9, 50.0, 50.0, 50.0), 32) == 20
    assert actions.rollbacks[1].skip == (27, 38)  # steps 27 to 32, six batches further on
    assert actions.skipped == ((27, 38),)


def test_the_skip_range_never_starts_before_the_checkpoint(make: Make) -> None:
    actions = make()
    check(actions, measures(21, 50.0, 50.0, 50.0), 23)
    assert actions.skipped == ((21, 23),)


def test_after_the_allowed_number_of_rollbacks_the_run_stops_with_the_details(make: Make) -> None:
    earlier = [Rollback(36, 20, (31, 36)), Rollback(34, 20, (37, 41))]
    actions = make("guard.spike.retries=2", rollbacks=[Rollback(9, 5, (8, 9)), *earlier])
    with pytest.raises(SpikeError, match=r"steps 31, 32, 33 with losses 50.0, 50.0, 50.0, after 2 rollbacks"):
        check(actions, measures(31, 50.0, 50.0, 50.0), 33)
    assert make("guard.spike.retries=3", rollbacks=earlier).skipped == ((31, 41),)
    assert names(actions) == []


def test_a_spike_without_a_clean_checkpoint_is_recorded_and_training_continues(make: Make) -> None:
    actions = make()
    (actions.context.run.checkpoints / "step-00000020" / "shard.pt").write_bytes(b"damage")
    assert check(actions, measures(31, 50.0, 50.0, 50.0, 50.0), 34) == 34
    (event,) = read_events(actions.context.run)
    assert (event["event"], event["step"]) == ("spike", 33)
    assert "no checkpoint is known to be clean" in event["then"]
    assert "retire 20" not in actions.checkpointer.done  # type: ignore[attr-defined]


def test_with_the_action_warn_a_spike_is_recorded_once(make: Make) -> None:
    actions = make("guard.spike={action: warn, patience: 1}")
    assert check(actions, measures(31, 50.0, 50.0, 50.0), 33) == 33
    assert names(actions) == ["spike"]


@pytest.mark.parametrize("found", [measures(31, math.nan), measures(31, 2.0, norm=math.inf)], ids=["loss", "norm"])
def test_a_value_that_is_not_finite_ends_the_run_or_rolls_it_back(found: list[StepMeasures], make: Make) -> None:
    with pytest.raises(NonFiniteGradientError, match=r"step 31: .* inspect batch 31"):
        check(make(), found, 31)
    actions = make("guard.nan=rollback")
    assert check(actions, found, 32) == 20
    assert actions.skipped == ((30, 32),)
    event = read_events(actions.context.run)[0]
    assert event["cause"] == "nan"
    assert (event["loss"], event["grad_norm"]) in ((None, 0.5), (2.0, None)), "numbers, or null where JSON has none"


def test_a_nan_that_cannot_be_rolled_back_ends_the_run(make: Make) -> None:
    actions = make("guard.nan=rollback")
    for checkpoint in list_checkpoints(actions.context.run.checkpoints):
        checkpoint_commit.delete_checkpoint(checkpoint.path)
    with pytest.raises(NonFiniteGradientError):
        check(actions, measures(31, math.nan), 31)


def test_skip_ranges_of_the_spec_and_of_rollbacks_are_merged(make: Make) -> None:
    actions = make("data.skip=[[4, 5], [30, 32]]", rollbacks=[Rollback(36, 20, (31, 36))])
    assert actions.skipped == ((4, 5), (30, 36))


def test_a_stage_of_the_mixture_begins_at_its_batch_whatever_was_skipped(make: Make) -> None:
    for batch, is_spike in ((26, False), (25, True), (40, True)):
        # batches 5 to 9 are skipped: step 21 trains on batch 26
        actions = replace(make("data.skip=[[5, 9]]", "guard.spike.action=warn"), mixture_batches=(batch,))
        check(actions, measures(21, *[9.0] * 8), 28)
        assert ("spike" in names(actions)) == is_spike


@pytest.mark.parametrize(
    ("overrides", "reported"),
    [
        ((), True),
        (("model.weights=/weights",), False),
        (("model.adapter={name: lora}",), False),
        (("training.objective=dpo", "data.source=python-docstrings"), False),
    ],
    ids=["random weights", "given weights", "an adapter", "preference pairs"],
)
def test_the_first_loss_is_compared_for_new_models(make: Make, overrides: tuple[str, ...], *, reported: bool) -> None:
    actions = make(*overrides)
    check(actions, measures(1, 2.0), 1)
    assert [event["event"] for event in read_events(actions.context.run)] == ["first-loss"] * reported


@pytest.mark.parametrize("key", ["model.weights=/weights", "model.adapter={name: lora}", ""])
def test_a_flat_loss_is_an_alarm_for_new_models_alone(key: str) -> None:
    spec = load(SPEC, *filter(None, [key]))
    unused: Any = None
    guard = guard_of(spec, make_plan(spec).layout, unused, unused)
    found = [guard.observe(step, {"loss": 5.5 + step % 2 / 100, "grad_norm": 0.5})[1] for step in range(1, 400)]
    warm_up = spec.training.schedule.warmup_steps
    assert [event for each in found for event in each] == ([] if key or warm_up > 300 else ["flat-loss"])
