"""Runs of other trainers (TRL, Lightning) that are preempted and killed lose no step that was saved."""

import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from scaletrain_cli.launch.backends.local.backend import LocalBackend
from scaletrain_cli.rundir.checkpoints import list_checkpoints, verify
from scaletrain_cli.rundir.journal import read_metrics
from scaletrain_cli.rundir.paths import find_run
from tests.cli.command_line import PROJECT, scaletrain
from tests.drills.test_trackers import tensorboard_scalars
from tests.drills.training_runs import Drill
from tests.launch.working_tree import WorkingTree

pytestmark = [pytest.mark.drill, pytest.mark.long]
SHORT = ("--set", "training.steps=40", "--set", "checkpoint.every=10", "--set", "checkpoint.keep=3", "--yes")
# Makes the steps of an attempt after that in $SLOW so slow that a fault strikes before the next checkpoint.
SLOW = """
import os, time

def slow(step):
    after = os.environ.get("SLOW", "").split()[int(os.environ["SCALETRAIN_ATTEMPT"]) - 1 :]
    time.sleep(2 if after and step > int(after[0]) else 0)
"""
CALLBACK = f"""{SLOW}
from transformers import TrainerCallback

class Slow(TrainerCallback):
    def on_step_end(self, args, state, control, **_):
        slow(state.global_step)

"""


def copied_recipe(folder: Path) -> WorkingTree:
    """Copy recipes/trl-sft to a repository, with slow steps where $SLOW is set."""
    shutil.copytree(PROJECT / "recipes/trl-sft", folder)
    program = (folder / "train.py").read_text().replace("[scaletrain]", "[scaletrain, Slow()]")
    program = program.replace("\nif __name__", f"{CALLBACK}\nif __name__")
    (folder / "train.py").write_text(program)
    return WorkingTree(folder)


def submitted(name: str, *sets: str) -> Drill:
    words = [word for setting in sets for word in ("--set", setting)]
    scaletrain("submit", "run.yaml", "--run-id", name, *SHORT, *words, code=0)
    return Drill(find_run(name), LocalBackend())


def losses(drill: Drill) -> list[tuple[int, float]]:
    return [(line["step"], line["loss"]) for line in read_metrics(drill.run)]


def test_trl_is_preempted_and_killed_and_keeps_all_its_losses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copied_recipe(tmp_path / "mine")

    def write_half_a_checkpoint(drill: Drill) -> None:
        """While the ranks start again: a later one than the last."""
        drill.wait_for(lambda: len(drill.events("attempt-ended")) == 2)
        half = drill.run.checkpoints / "step-00000022"
        shutil.copytree(drill.run.checkpoints / "step-00000020", half)
        with (half / "optimizer.pt").open("r+b") as file:
            file.truncate(1000)

    drill = hurt_run(tmp_path / "mine", monkeypatch, write_half_a_checkpoint, "tracking=[tensorboard]")
    kept = [checkpoint for checkpoint in list_checkpoints(drill.run.checkpoints) if checkpoint.step % 10 == 0]
    assert kept[-1].step == 40
    assert all(verify(checkpoint) == [] for checkpoint in kept)
    assert [step for step, _ in tensorboard_scalars(drill)["loss"]] == list(range(1, 41))
    scaletrain("checkpoint", "verify", "hurt", "--step", "40", code=0)


def hurt_run(
    folder: Path, monkeypatch: pytest.MonkeyPatch, after_the_kill: Callable[[Drill], None], *sets: str
) -> Drill:
    """Preempt a run, then kill a rank of it; compare it with an undisturbed one."""
    monkeypatch.chdir(folder)
    undisturbed = submitted("undisturbed", "env.OMP_NUM_THREADS='1'")
    undisturbed.wait_for_end()
    assert undisturbed.events("finished"), undisturbed.log()
    drill = submitted("hurt", "env={SLOW: '13 23', OMP_NUM_THREADS: '1'}", *sets)
    drill.wait_for_step(13)
    drill.preempt()
    drill.wait_for(lambda: len(drill.beginnings()) == 2)
    first = drill.events("attempt-ended")[0]
    assert (first["exit_code"], first["reason"]) == (75, "preempted")
    left = drill.events("preempted")[0]["step"]
    assert left >= 13
    drill.wait_for_step(23)  # the checkpoint of step 20 is committed
    os.kill(drill.rank_pids()[1], signal.SIGKILL)
    after_the_kill(drill)
    drill.wait_for_end()
    assert drill.events("finished"), drill.log()
    assert drill.events("attempt-ended")[1]["reason"] == "killed"
    assert [event["step"] for event in drill.beginnings()] == [0, left, 20]
    assert losses(drill) == losses(undisturbed)
    assert [step for step, _ in losses(drill)] == list(range(1, 41))
    return drill


LIGHTNING = f"""{SLOW}
from scaletrain_cli.worker.lightning import ScaletrainLightning

scaletrain = ScaletrainLightning.start()
import torch
from lightning.pytorch import LightningModule, Trainer

class Rows:
    # This rank's batches; the position is a part of the checkpoint. Without a length, Lightning reads one batch ahead.
    def __init__(self, rank):
        self.rank, self.next = rank, 0

    def __len__(self):
        return 100

    def __iter__(self):
        while self.next < 100:
            self.next += 1
            yield torch.randn(4, 8, generator=torch.Generator().manual_seed(2 * self.next + self.rank))

    def state_dict(self):
        return {{"next": self.next}}

    def load_state_dict(self, state):
        self.next = state["next"]

class Line(LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.layer = torch.nn.Linear(8, 1)

    def training_step(self, batch, index):
        slow(self.global_step + 1)
        return self.layer(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01)

if __name__ == "__main__":
    trainer = Trainer(
        max_steps=scaletrain.rank.resolved.total_steps, accelerator="cpu", strategy="ddp", logger=False,
        enable_progress_bar=False, **scaletrain.trainer_arguments()
    )
    scaletrain.run(trainer, Line(), Rows(scaletrain.rank.environment.rank))
"""


def test_lightning_keeps_the_losses_of_an_undisturbed_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(PROJECT / "recipes/trl-sft", tmp_path / "mine")
    (tmp_path / "mine/train.py").write_text(LIGHTNING)
    WorkingTree(tmp_path / "mine")
    hurt_run(tmp_path / "mine", monkeypatch, lambda drill: None)
