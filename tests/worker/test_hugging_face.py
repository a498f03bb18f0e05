import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from scaletrain_cli.errors import ExitCode, UsageError
from scaletrain_cli.launch.submit import create_run
from scaletrain_cli.rundir.checkpoints import list_checkpoints, verify
from scaletrain_cli.rundir.journal import read_events, read_metrics
from scaletrain_cli.rundir.paths import RunDir
from scaletrain_cli.worker import Rank, RunEnvironment, loop_adapter
from scaletrain_cli.worker.heartbeat import HEARTBEAT_VARIABLE
from scaletrain_cli.worker.hugging_face import ScaletrainCallback
from scaletrain_cli.worker.loop_adapter import NotFiniteError
from scaletrain_cli.worker.run_environment import read_resolved_run
from scaletrain_cli.worker.telemetry import read_telemetry_line
from tests.launch.conftest import make_plan, make_spec

pytestmark = [pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")]
STEPS = 12


class Line(nn.Module):
    """A model as Trainer needs it: y = a x + b, with dropout, so that the random state matters."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.Sequential(nn.Linear(4, 16), nn.Dropout(0.3), nn.Linear(16, 1))
        self.nan_at: int | None = None
        self.calls = 0

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        self.calls += 1
        loss = (self.layers(x).squeeze(-1) - labels).square().mean()
        return {"loss": loss * float("nan") if self.training and self.calls == self.nan_at else loss}


class Stops:
    """Ends training after the first evaluation, as early stopping may."""

    def on_evaluate(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_training_stop = True

    def __getattr__(self, name: str) -> Any:
        if name.startswith("on_"):
            return lambda *_, **__: None
        raise AttributeError(name)


class At:
    """Calls a function after a step. Has the methods of a callback that Trainer calls for it."""

    def __init__(self, step: int, function: Any) -> None:
        self.step, self.function = step, function

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self.step:
            self.function()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("on_"):
            return lambda *_, **__: None
        raise AttributeError(name)


def made_run(run_id: str, *overrides: str) -> RunDir:
    spec = make_spec(f"training.steps={STEPS}", "checkpoint.every=5", "checkpoint.keep=9", *overrides)
    return create_run(spec, make_plan(spec), run_id).run


def callback_of(run: RunDir, attempt: int = 1) -> ScaletrainCallback:
    return ScaletrainCallback(Rank(RunEnvironment(run, attempt, 0, 1, 0, 1, 0), read_resolved_run(run)))


def trainer_of(callback: Any, folder: Path, *others: Any, **settings: Any) -> Any:
    from transformers import Trainer, TrainingArguments

    generator = torch.Generator().manual_seed(2)
    data = [{"x": torch.randn(4, generator=generator), "labels": torch.tensor(i / 50.0)} for i in range(50)]
    keys = {"save_strategy": "no", "logging_steps": 1, "report_to": "none", "max_steps": STEPS, "use_cpu": True}
    arguments = TrainingArguments(
        output_dir=str(folder), per_device_train_batch_size=5, disable_tqdm=True, **{**keys, **settings}
    )
    callbacks = [callback, *others]
    return Trainer(Line(), arguments, train_dataset=data, eval_dataset=data[:10], callbacks=callbacks)


def losses(run: RunDir) -> list[tuple[int, float]]:
    return [(line["step"], line["loss"]) for line in read_metrics(run) if "loss" in line]


def names(run: RunDir) -> list[str]:
    return [event["event"] for event in read_events(run)]


def test_a_preempted_training_resumes_from_the_latest_valid_checkpoint_with_the_same_losses(tmp_path: Path) -> None:
    undisturbed = made_run("undisturbed")
    callback = callback_of(undisturbed)
    assert callback.train(trainer_of(callback, tmp_path / "a", eval_strategy="epoch")) is ExitCode.DONE
    assert [checkpoint.step for checkpoint in list_checkpoints(undisturbed.checkpoints)] == [5, 10, 12]

    run = made_run("preempted")
    callback = callback_of(run)
    preempt = At(7, lambda: callback.rank.preemption._raise(0, None))
    trainer = trainer_of(callback, tmp_path / "b", preempt, eval_strategy="epoch")
    assert callback.train(trainer) is ExitCode.PREEMPTED
    assert trainer.args.output_dir == str(tmp_path / "b")
    assert names(run)[-1] == "preempted"
    assert not [line for line in read_metrics(run) if "validation_loss" in line], "evaluated in the grace period"
    # A later checkpoint that is damaged, and one that was never committed.
    shutil.copytree(run.checkpoints / "step-00000007", run.checkpoints / "step-00000009")
    (run.checkpoints / "attempt-0001.tmp/scratch/checkpoint-11").mkdir(parents=True)

    callback = callback_of(run, attempt=2)
    assert callback.train(trainer_of(callback, tmp_path / "b", eval_strategy="epoch")) is ExitCode.DONE
    assert read_events(run)[-4]["event"] == "resumed"
    assert read_events(run)[-4]["step"] == 7
    assert losses(run) == losses(undisturbed)
    assert [step for step, _ in losses(run)] == list(range(1, STEPS + 1))
    assert [line["step"] for line in read_metrics(run) if "validation_loss" in line] == [10, 12]
    committed = [checkpoint for checkpoint in list_checkpoints(run.checkpoints) if checkpoint.step != 9]
    assert [(checkpoint.step, checkpoint.attempt) for checkpoint in committed] == [(5, 1), (7, 1), (10, 2), (12, 2)]
    assert all(verify(checkpoint) == [] for checkpoint in committed)
    assert {"model.safetensors", "optimizer.pt", "rng_state.pth", "trainer_state.json"} <= committed[-1].files.keys()


def test_a_loss_that_is_nan_stops_the_run_before_it_is_saved(tmp_path: Path) -> None:
    run = made_run("nan")
    callback = callback_of(run)
    trainer = trainer_of(callback, tmp_path, logging_steps=100)  # noticed at the save, not by the log
    trainer.model.nan_at = 8
    with pytest.raises(NotFiniteError, match="step 10: the loss is NaN or infinite") as raised:
        callback.train(trainer)
    assert (raised.value.exit_code, raised.value.failure_reason) == (93, "nan")
    assert [checkpoint.step for checkpoint in list_checkpoints(run.checkpoints)] == [5]
    assert json.dumps(read_metrics(run)).count("NaN") == 0


class Slow(list[Any]):
    """A data set whose samples take 4 ms each by ``clock``, a batch of five 20 ms."""

    def __init__(self, samples: Any, clock: list[float]) -> None:
        super().__init__(samples)
        self.clock = clock

    def __getitem__(self, place: Any) -> Any:
        self.clock[0] += 0.004
        return super().__getitem__(place)


def test_each_rank_sends_step_times_waits_for_data_and_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reads, writes = os.pipe2(os.O_NONBLOCK)
    monkeypatch.setenv(HEARTBEAT_VARIABLE, str(writes))
    run = made_run("measured", "telemetry.interval=0.1s")
    callback = callback_of(run)
    trainer = trainer_of(callback, tmp_path)
    now = [0.0]

    def clock() -> float:
        return now[0]

    def work(*_: Any) -> None:
        now[0] += 0.01

    trainer.train_dataset = Slow(trainer.train_dataset, now)
    trainer.model.register_forward_hook(work)
    monkeypatch.setattr(callback.rank.step_times, "_clock", clock)
    monkeypatch.setattr(loop_adapter, "time", SimpleNamespace(perf_counter=clock, monotonic=clock, time=clock))
    assert callback.train(trainer) is ExitCode.DONE
    callback.rank.step_times.close()
    rows = [row for row in map(read_telemetry_line, os.read(reads, 1 << 20).splitlines()) if row is not None]
    os.close(reads)
    os.close(writes)
    # Not steps 5, 10 and 12: a save or the end of an epoch follows.
    assert sum(row.count for row in rows) == STEPS - 3
    assert all(row.mean["data_wait_seconds"] < row.mean["step_seconds"] for row in rows)
    assert any("memory_bytes" in row.mean for row in rows)
    logged = [line for line in read_metrics(run) if "step_seconds" in line]
    assert [line["step"] for line in logged] == [2, 3, 4, 5, 7, 8, 9, 10, 12]
    # Trainer reads a batch ahead, so that it does not wait for the last one of an epoch.
    waits = {line["step"]: line["data_wait"] for line in logged}
    assert waits == pytest.approx({step: 0.0 if step == 10 else 0.02 for step in waits}), logged
    assert [line["step_seconds"] for line in logged] == pytest.approx([waits[step] + 0.01 for step in waits])


def test_a_requested_checkpoint_is_saved_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("scaletrain_cli.worker.loop_adapter._CHECK_SECONDS", 0.0)
    run = made_run("asked", "checkpoint.every=100")
    callback = callback_of(run)
    assert callback.train(trainer_of(callback, tmp_path, At(3, run.save_file.touch))) is ExitCode.DONE
    assert [checkpoint.step for checkpoint in list_checkpoints(run.checkpoints)] == [3, 12]
    assert not run.save_file.exists()


@pytest.mark.parametrize(
    ("evaluates", "last"), [({"eval_strategy": "steps", "eval_steps": 7}, 7), ({"eval_strategy": "epoch"}, 10)]
)
def test_a_training_that_another_callback_stops_is_saved_where_it_ends(
    tmp_path: Path, evaluates: dict[str, Any], last: int
) -> None:
    run = made_run("stopped", "checkpoint.every=4")
    callback = callback_of(run)
    trainer = trainer_of(callback, tmp_path, Stops(), **evaluates)
    assert callback.train(trainer) is ExitCode.DONE
    assert trainer.state.global_step == last
    assert list_checkpoints(run.checkpoints)[-1].step == last
    assert [name for name in names(run) if name == "checkpoint"] == ["checkpoint"] * (1 + last // 4)


@pytest.mark.parametrize(
    "settings",
    [
        {"save_only_model": True},
        {"load_best_model_at_end": True, "eval_strategy": "steps", "save_strategy": "steps", "eval_steps": 500},
    ],
    ids=lambda settings: next(iter(settings)),
)
def test_arguments_that_contradict_checkpoints_of_a_run_are_refused(tmp_path: Path, settings: dict[str, Any]) -> None:
    callback = callback_of(made_run("refused"))
    with pytest.raises(UsageError, match=f"TrainingArguments.{next(iter(settings))} = True") as raised:
        callback.train(trainer_of(callback, tmp_path, **settings))
    assert raised.value.exit_code == 2
