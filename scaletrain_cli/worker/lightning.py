"""The adapter for Lightning's Trainer.

    from scaletrain_cli.worker.lightning import ScaletrainLightning

    scaletrain = ScaletrainLightning.start()  # before torch is imported
    ...
    trainer = lightning.Trainer(max_steps=1000, **scaletrain.trainer_arguments())
    scaletrain.run(trainer, model, data)

Lightning restores the position in an epoch only for data loaders with ``state_dict`` and ``load_state_dict``.
"""

import datetime
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from scaletrain_cli.errors import ExitCode
from scaletrain_cli.safe_files import make_folder
from scaletrain_cli.worker.heartbeat import collective_seconds
from scaletrain_cli.worker.loop_adapter import LoopAdapter, StepDecision, wait_for_all
from scaletrain_cli.worker.rank import Rank

_FILE = "lightning.ckpt"


class ScaletrainLightning:
    """Makes a Lightning Trainer one rank of a run: heartbeat, preemption, checkpoints, metrics, events.

    A checkpoint of the run is saved every ``checkpoint.every`` steps of the run spec, at the end, on a request (file
    ``save`` in the run directory) and on a preemption. Steps are Lightning's ``global_step``.
    """

    def __init__(self, rank: Rank) -> None:
        self.rank = rank
        self._loop = LoopAdapter(rank)

    @classmethod
    def start(cls, run_dir: str | Path | None = None) -> "ScaletrainLightning":
        """Set the signal handlers and return the adapter of this rank. Call it before torch is imported."""
        return cls(Rank.start(run_dir))

    def trainer_arguments(self) -> dict[str, Any]:
        """Return arguments for Trainer: the callback, the number of devices and nodes, and the ranks of the launcher.

        The last prevents that Lightning takes its ranks from Slurm, and requeues the job itself.
        """
        from lightning.fabric.plugins.environments.torchelastic import TorchElasticEnvironment

        place = self.rank.environment
        os.environ.setdefault("GROUP_RANK", str(place.node_rank))
        return {
            "callbacks": [self.callback()],
            "devices": place.local_world_size,
            "num_nodes": place.world_size // place.local_world_size,
            "plugins": [TorchElasticEnvironment()],
            "enable_checkpointing": False,
        }

    def run(self, trainer: Any, *arguments: Any, after: Callable[[], None] | None = None, **named: Any) -> NoReturn:
        """Resume, train, and end the process with the exit code; failures are recorded.

        ``after`` is called at the end of a finished training. The other arguments are those of trainer.fit.
        """

        def train() -> int:
            code = self.fit(trainer, *arguments, **named)
            if code is ExitCode.DONE and after is not None:
                after()
            return code

        self.rank.run(train)

    def fit(self, trainer: Any, *arguments: Any, **named: Any) -> ExitCode:
        """Resume from the latest valid checkpoint, call trainer.fit, and return the exit code."""
        self._connect(trainer)
        folder = self._loop.resume_folder()
        try:
            trainer.fit(*arguments, ckpt_path=None if folder is None else str(folder / _FILE), **named)
        except SystemExit:  # Lightning's answer to SIGTERM before training begins, where its own handlers are set
            if not self.rank.preemption.raised:
                raise
            return ExitCode.PREEMPTED
        return ExitCode.PREEMPTED if self._loop.preempted else ExitCode.DONE

    def _connect(self, trainer: Any) -> None:
        """Create the process group, which Lightning would create later: rank 0 alone looks for the checkpoint."""
        import torch
        import torch.distributed as dist

        place = self.rank.environment
        if place.world_size == 1 or dist.is_initialized():
            return
        on_gpu = trainer.strategy.root_device.type == "cuda"
        if on_gpu:
            torch.cuda.set_device(place.local_rank)
        seconds = collective_seconds(None)
        dist.init_process_group("nccl" if on_gpu else "gloo", timeout=datetime.timedelta(seconds=seconds))

    def callback(self) -> Any:
        """Return the lightning.pytorch.Callback of this rank."""
        from lightning.pytorch import Callback

        adapter, loop, rank = self, self._loop, self.rank

        class ScaletrainCallback(Callback):
            """Calls the adapter at the events of Trainer."""

            def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
                environment: Any = getattr(trainer.strategy, "cluster_environment", None)
                if hasattr(environment, "auto_requeue"):
                    environment.auto_requeue = False  # it calls scontrol, and bypasses SIGTERM

            def on_train_start(self, trainer: Any, pl_module: Any) -> None:
                rank.preemption.set_handlers()  # Lightning's handler raises SystemExit, and broadcasts
                loop.begin(trainer.global_step)
                loop.beat("first step")

            def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
                loop.beat("epoch")

            def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
                loop.begin_work(trainer.global_step + 1)

            def on_train_batch_end(
                self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
            ) -> None:
                if trainer.global_step > loop.step:  # else gradients are accumulated
                    adapter._after_step(trainer, outputs)
                loop.end_work()

            def on_validation_batch_start(self, trainer: Any, *_: Any) -> None:
                loop.beat("evaluation")

            def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
                if not trainer.sanity_checking:
                    adapter._log(trainer, {})
                    loop.beat("evaluated")

            def on_train_end(self, trainer: Any, pl_module: Any) -> None:
                if not loop.preempted and loop.saved_step != trainer.global_step:
                    adapter._save(trainer)
                loop.end()

            def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
                loop.finish_trackers("failed")

        return ScaletrainCallback()

    def _after_step(self, trainer: Any, outputs: Any) -> None:
        loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        step = trainer.global_step
        request = self._loop.request_after(step, last=step == trainer.max_steps)
        value = None if loss is None else float(loss)
        self._loop.check_finite(step, value, None)
        self._log(trainer, {} if value is None else {"loss": value * trainer.accumulate_grad_batches})
        if request is not StepDecision.CONTINUE:
            self._save(trainer)
        if request is StepDecision.PREEMPT:
            trainer.should_stop = True
            # Otherwise Trainer would evaluate first, or go on to its minimum.
            trainer.limit_val_batches = 0
            trainer.fit_loop.min_epochs, trainer.fit_loop.epoch_loop.min_steps = 0, None

    def _log(self, trainer: Any, values: dict[str, float]) -> None:
        """Record the loss of a step, or the metrics that the model has logged."""
        logged = trainer.callback_metrics if not values else {}
        renamed = {"val_loss": "validation_loss"}
        numbers = {renamed.get(name, name): float(value) for name, value in logged.items() if value.numel() == 1}
        self._loop.log(trainer.global_step, trainer.max_steps, values or numbers)

    def _save(self, trainer: Any) -> None:
        step = trainer.global_step
        self._loop.step = step
        self._loop.beat("save")
        written = self._loop.scratch() / f"step-{step}"
        if self.rank.environment.rank == 0:
            make_folder(written)
        wait_for_all()
        trainer.save_checkpoint(written / _FILE)
        self._loop.commit(step, written)
        self._loop.beat("saved")
