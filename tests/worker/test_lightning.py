import time
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn

from scaletrain_cli.errors import ExitCode
from scaletrain_cli.rundir.checkpoints import list_checkpoints, verify
from scaletrain_cli.rundir.journal import read_events, read_metrics
from scaletrain_cli.rundir.paths import RunDir
from scaletrain_cli.worker import Rank, RunEnvironment
from scaletrain_cli.worker.lightning import ScaletrainLightning
from scaletrain_cli.worker.loop_adapter import NotFiniteError
from scaletrain_cli.worker.run_environment import read_resolved_run
from tests.worker.test_hugging_face import STEPS, losses, made_run

pytestmark = [pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")]


class Line(LightningModule):
    """y = a x + b, with dropout."""

    def __init__(self, nan_at: int | None = None) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.Sequential(nn.Linear(4, 16), nn.Linear(16, 1))
        self.nan_at = nan_at

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.layers(batch).square().mean()
        return loss * float("nan") if self.global_step + 1 == self.nan_at else loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val_loss", self.layers(batch).square().mean())

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


class Batches:
    """Eight batches per epoch in an order of their own. Its position is a part of a checkpoint."""

    def __init__(self) -> None:
        self.data = torch.randn(8, 5, 4, generator=torch.Generator().manual_seed(3))
        self.next = 0

    def __iter__(self) -> Any:
        while self.next < len(self.data):
            self.next += 1
            yield self.data[self.next - 1]
        self.next = 0

    def __len__(self) -> int:
        return len(self.data)

    def state_dict(self) -> dict[str, int]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.next = state["next"]


class At(Callback):
    def __init__(self, step: int, function: Any) -> None:
        self.step, self.function = step, function

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step + 1 == self.step:
            self.function()


def adapter_of(run: RunDir, monkeypatch: pytest.MonkeyPatch, attempt: int = 1) -> ScaletrainLightning:
    for name, value in (("RANK", 0), ("WORLD_SIZE", 1), ("LOCAL_RANK", 0), ("MASTER_ADDR", "127.0.0.1")):
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("GROUP_RANK", "0")
    adapter = ScaletrainLightning(Rank(RunEnvironment(run, attempt, 0, 1, 0, 1, 0), read_resolved_run(run)))
    monkeypatch.setattr(adapter.rank.preemption, "set_handlers", lambda: None)  # they would be those of the tests
    return adapter


def trainer_of(adapter: ScaletrainLightning, folder: Path, *others: Any) -> Any:
    arguments = adapter.trainer_arguments()
    arguments["callbacks"] = [*others, *arguments["callbacks"]]
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    return Trainer(max_steps=STEPS, accelerator="cpu", default_root_dir=folder, **quiet, **arguments)


def test_a_preempted_training_resumes_with_the_same_losses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    undisturbed, run = made_run("undisturbed"), made_run("preempted")
    adapter = adapter_of(undisturbed, monkeypatch)
    assert adapter.fit(trainer_of(adapter, tmp_path), Line(), Batches(), Batches()) is ExitCode.DONE
    assert [checkpoint.step for checkpoint in list_checkpoints(undisturbed.checkpoints)] == [5, 10, 12]

    adapter = adapter_of(run, monkeypatch)
    trainer = trainer_of(adapter, tmp_path, At(7, lambda: adapter.rank.preemption._raise(0, None)))
    assert adapter.fit(trainer, Line(), Batches(), Batches()) is ExitCode.PREEMPTED
    assert read_events(run)[-1]["event"] == "preempted"
    assert not [line for line in read_metrics(run) if "validation_loss" in line], "evaluated in the grace period"

    adapter = adapter_of(run, monkeypatch, attempt=2)
    assert adapter.fit(trainer_of(adapter, tmp_path), Line(), Batches(), Batches()) is ExitCode.DONE
    assert losses(run) == losses(undisturbed)
    assert [step for step, _ in losses(run)] == list(range(1, STEPS + 1))
    validated = [(line["step"], line["validation_loss"]) for line in read_metrics(run) if "validation_loss" in line]
    assert [step for step, _ in validated] == [8]
    committed = list_checkpoints(run.checkpoints)
    assert [(checkpoint.step, checkpoint.attempt) for checkpoint in committed] == [(5, 1), (7, 1), (10, 2), (12, 2)]
    assert all(verify(checkpoint) == [] for checkpoint in committed)
    assert [event["event"] for event in read_events(run)].count("finished") == 1


def test_a_loss_that_is_nan_stops_the_run_before_it_is_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = made_run("nan")
    adapter = adapter_of(run, monkeypatch)
    with pytest.raises(NotFiniteError, match="step 8: the loss is NaN or infinite"):
        adapter.fit(trainer_of(adapter, tmp_path), Line(nan_at=8), Batches())
    assert [checkpoint.step for checkpoint in list_checkpoints(run.checkpoints)] == [5]


def test_times_and_waits_are_recorded_with_accumulation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Slow(Batches):
        def __iter__(self) -> Any:
            for batch in super().__iter__():
                time.sleep(0.01)
                yield batch

    run = made_run("measured")
    adapter = adapter_of(run, monkeypatch)
    trainer = trainer_of(adapter, tmp_path)
    trainer.accumulate_grad_batches = 2
    assert adapter.fit(trainer, Line(), Slow()) is ExitCode.DONE
    logged = [line for line in read_metrics(run) if "step_seconds" in line]
    # Four steps an epoch, and saves after 5 and 10.
    assert [line["step"] for line in logged] == [2, 3, 4, 7, 8, 10, 12], logged
    assert all(0.009 < line["data_wait"] < line["step_seconds"] for line in logged), logged
