"""The callback for Hugging Face Trainer, and for what is built on it: TRL, Axolotl and others.

from scaletrain_cli.worker.hugging_face import ScaletrainCallback

scaletrain = ScaletrainCallback.start()  # before torch is imported
...
trainer = SFTTrainer(..., callbacks=[scaletrain])
scaletrain.run(trainer)
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from scaletrain_cli.errors import ExitCode, UsageError
from scaletrain_cli.reasons import Reason
from scaletrain_cli.worker.loop_adapter import LoopAdapter, StepDecision
from scaletrain_cli.worker.rank import Rank

# Keys of the summary that Trainer logs once at the end of training.
_SUMMARY = "train_runtime"
_RENAMED = {"eval_loss": "validation_loss"}


class ScaletrainCallback:
    """Makes a Trainer one rank of a run: heartbeat, preemption, checkpoints, metrics, events.

    Trainer writes its checkpoints into a folder of the attempt instead of ``args.output_dir``; each becomes a verified
    checkpoint of the run, which ``checkpoint.keep`` of the run spec keeps or deletes. One is saved when Trainer saves,
    every ``checkpoint.every`` steps of the run spec, where training ends, also if another callback stops it, on a
    request (the file ``save`` in the run directory) and on a preemption.

    Not a subclass of TrainerCallback, of which Trainer uses only the methods: transformers would have to be imported
    before the signal handlers are set.
    """

    def __init__(self, rank: Rank) -> None:
        self._run = LoopAdapter(rank)
        self._output_dir: str | None = None
        self._returns = False  # train() was called and will return the exit code

    @classmethod
    def start(cls, run_dir: str | Path | None = None) -> "ScaletrainCallback":
        """Set the signal handlers and return the callback of this rank. Call it before torch is imported."""
        return cls(Rank.start(run_dir))

    @property
    def rank(self) -> Rank:
        """Return the rank of this process."""
        return self._run.rank

    def run(self, trainer: Any, *, after: Callable[[], None] | None = None, **arguments: Any) -> NoReturn:
        """Resume, train, and end the process with the exit code; failures are recorded.

        ``after`` is called at the end of a finished training, for example to save the model. ``arguments``: of
        trainer.train.
        """

        def train() -> int:
            code = self.train(trainer, **arguments)
            if code is ExitCode.DONE and after is not None:
                after()
            return code

        self.rank.run(train)

    def __getattr__(self, name: str) -> Callable[..., None]:
        """Return a method that does nothing for each event of Trainer that is not used here."""
        if name.startswith("on_"):
            return lambda *_, **__: None
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")

    def train(self, trainer: Any, **arguments: Any) -> ExitCode:
        """Resume from the latest valid checkpoint, train, and return the exit code. ``arguments``: of trainer.train."""
        self._returns = True
        folder = self.resume_folder()
        trainer.pop_callback(self)
        trainer.add_callback(self)  # as the last one, so that it knows when another one stops training
        try:
            trainer.train(resume_from_checkpoint=folder, **arguments)
        except BaseException:
            self._run.finish_trackers("failed")
            raise
        finally:
            self._restore(trainer.args)
        return ExitCode.PREEMPTED if self._run.preempted else ExitCode.DONE

    def resume_folder(self) -> str | None:
        """Return the folder of the latest valid checkpoint, for ``resume_from_checkpoint``; None if there is none.

        For a program that calls ``trainer.train`` itself; all ranks must call it. Without ``train()`` the callback ends
        the process with exit code 75 after a preemption.
        """
        folder = self._run.resume_folder()
        return str(folder) if folder is not None else None

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Check the arguments, and start."""
        _check(args)
        args.logging_nan_inf_filter = False  # otherwise Trainer would log the mean of earlier losses for a NaN
        self._run.begin(state.global_step)
        self._output_dir, args.output_dir = args.output_dir, str(self._run.scratch())
        self._run.beat("first step")

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Report that the batches of the step are here."""
        self._run.begin_work(state.global_step + 1)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Agree with the other ranks on a save or the end."""
        last = state.global_step >= state.max_steps
        request = self._run.request_after(state.global_step, last=last)
        self._run.end_work()
        if request is not StepDecision.CONTINUE:
            control.should_save = True
        if request is StepDecision.PREEMPT:
            control.should_training_stop = True
            control.should_evaluate = False  # the grace period is for the save
        if control.should_save:
            control.should_log = True  # a loss that is not finite must be noticed before it is saved
        if control.should_evaluate or control.should_save:
            self._run.beat("evaluation" if control.should_evaluate else "save")

    def on_prediction_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Send a beat."""
        self._run.beat("evaluation")

    def on_evaluate(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Send a beat, and save if the evaluation ends training, as early stopping does."""
        self._save_if_it_ends(state, control)
        self._run.beat("save")

    def _save_if_it_ends(self, state: Any, control: Any) -> None:
        if control.should_training_stop and self._run.saved_step != state.global_step:
            control.should_save = control.should_log = True

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Send a beat: the workers of the data loader start anew."""
        self._run.beat("epoch")

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Save if training ends; once preempted, prevent what Trainer does at the end of an epoch."""
        if self._run.preempted:
            control.should_evaluate = control.should_save = control.should_log = False
        else:
            self._save_if_it_ends(state, control)
        self._run.beat("epoch")

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Commit what Trainer has written."""
        written = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        self._run.commit(state.global_step, written)
        self._run.beat("saved")

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        """Record the metrics, and stop the run if the loss is not finite."""
        if not logs or _SUMMARY in logs:
            return
        values = {_RENAMED.get(name, name): value for name, value in logs.items()}
        # With fp16 a gradient that overflows is normal: the scaler skips the step.
        grad_norm = None if args.fp16 else values.get("grad_norm")
        self._run.check_finite(state.global_step, values.get("loss"), grad_norm)
        if "loss" in values:
            tokens = values.get("num_tokens", state.num_input_tokens_seen or None)
            values |= self._run.tokens_per_second(tokens)
        self._run.log(state.global_step, state.max_steps, values)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Record the end; exit after a preemption if the program does not use train()."""
        self._restore(args)
        code = self._run.end()
        if code is ExitCode.PREEMPTED and not self._returns:
            self._run.rank.exit(code)

    def _restore(self, args: Any) -> None:
        if self._output_dir is not None:
            args.output_dir, self._output_dir = self._output_dir, None
            self._run.remove_scratch()


def _check(args: Any) -> None:
    """Raise UsageError for arguments with which a run could not be resumed, or that contradict its checkpoints."""
    wrong = (
        ("save_only_model", True, "a run could not be resumed from its checkpoints", "Remove it."),
        (
            "load_best_model_at_end",
            True,
            "checkpoint.keep of the run spec decides which checkpoints are kept",
            "Remove it, and load the best checkpoint of the run after training.",
        ),
        ("enable_jit_checkpoint", True, "it handles SIGTERM on each rank alone, and ends with code 0", "Remove it."),
    )
    for key, value, problem, remedy in wrong:
        if getattr(args, key, None) is value:
            params = {"key": f"TrainingArguments.{key}", "value": value, "problem": problem, "remedy": remedy}
            raise UsageError(Reason("engine.trainer-setting", params))
    strategy = str(getattr(args.hub_strategy, "value", args.hub_strategy))
    if args.push_to_hub and strategy in ("checkpoint", "all_checkpoints"):
        problem = "a checkpoint is moved into the run directory, while it would be uploaded"
        params = {"key": "TrainingArguments.hub_strategy", "value": strategy, "problem": problem}
        raise UsageError(Reason("engine.trainer-setting", {**params, "remedy": "Use every_save or end."}))
