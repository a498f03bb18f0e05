"""The training loop: what happens between two step boundaries, and what is decided at each."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import Any

import torch

from scaletrain_cli.engine.checkpointing import Checkpointer
from scaletrain_cli.engine.dataset import DatasetInfo, TokenSequences
from scaletrain_cli.engine.faults import Faults
from scaletrain_cli.engine.metrics import MetricsLog
from scaletrain_cli.engine.process_group import Agreement, Ranks, Verdict, mean_over_ranks
from scaletrain_cli.engine.sampling import batch_indices
from scaletrain_cli.engine.schedule import learning_rate
from scaletrain_cli.engine.signals import PreemptionFlag
from scaletrain_cli.engine.spike import SpikeWatch
from scaletrain_cli.errors import DoNotRequeueError, ExitCode, UsageError
from scaletrain_cli.rundir.checkpoints import newest_that_verifies, remove_staging
from scaletrain_cli.rundir.journal import has_committed, last_logged_step, read_metrics, record_event
from scaletrain_cli.rundir.paths import RunDir
from scaletrain_cli.rundir.record import RunRecord


class NonFiniteGradientError(DoNotRequeueError):
    """The gradient was NaN or infinite on some rank; the weights were left as they were."""


@dataclass
class Trainer:
    """One rank's parts, put together by assembly.assemble()."""

    run: RunDir
    record: RunRecord
    ranks: Ranks
    attempt: int
    device: torch.device
    engine: Any
    optimizer: torch.optim.Optimizer
    agreement: Agreement
    checkpointer: Checkpointer
    dataset: DatasetInfo
    train: TokenSequences
    validation: TokenSequences
    faults: Faults

    def fit(self, flag: PreemptionFlag) -> ExitCode:
        """Train from the newest checkpoint to the last step, or until a signal asks to leave."""
        spec = self.record.spec
        total, every, checkpoint_steps = spec.total_steps, spec.evaluation.every, self._checkpoint_interval()
        step = start = self.resume()
        history = [line["loss"] for line in read_metrics(self.run) if line["step"] <= start]
        watch = SpikeWatch(spec.guard.spike.factor, history)
        with MetricsLog(self.run, self.record, self.ranks.rank, self.attempt) as metrics:
            while True:
                wish = Verdict.PREEMPT if flag.raised else Verdict.CONTINUE
                verdict, anyone_writing = self.agreement.reach(wish, self.checkpointer.writing)
                self.checkpointer.settle(anyone_writing)
                if step == total or verdict is Verdict.PREEMPT:
                    self.save(step, wait=True)
                    break
                if step % checkpoint_steps == 0 and step > start:
                    self.save(step, wait=not spec.checkpoint.asynchronous)
                step += 1
                started = time.perf_counter()
                measured = self.step(step)
                seconds = time.perf_counter() - started
                if (median := watch.median_if_spike(measured["loss"])) is not None:
                    self._event("spike", step=step, loss=measured["loss"], median=median)
                if every and (step % every == 0 or step == total):
                    measured["validation_loss"] = self.evaluate()
                if step % spec.tracking.log_every == 0 or step in (1, total) or "validation_loss" in measured:
                    tokens = spec.training.global_batch_size * spec.model.seq_len
                    metrics.log(step, tokens=tokens, step_seconds=seconds, **measured)
        self._event("finished" if step == total else "preempted", step=step)
        return ExitCode.DONE if step == total else ExitCode.PREEMPTED

    def step(self, step: int) -> dict[str, float]:
        """Optimizer step ``step`` (1-based): mean loss over the global batch, gradient norm before clipping, rate."""
        training, layout = self.record.spec.training, self.record.plan.layout
        self.faults.before_step(step)
        rate = learning_rate(step, self.record.spec.total_steps, training)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        batches = batch_indices(
            seed=training.seed,
            step=step - 1,
            global_batch_size=layout.global_batch_size,
            samples=len(self.train),
            rank=self.ranks.rank,
            data_parallel=layout.data_parallel,
            micro_batch_size=layout.micro_batch_size,
        )
        total, norm = torch.zeros((), device=self.device), 0.0
        for indices in batches:
            loss = self._loss(self.train, indices)
            if self.faults.poisons_gradient(step):
                loss = loss * float("nan")
            total += loss.detach()
            self.engine.backward(loss)
            if self.engine.is_gradient_accumulation_boundary():
                norm = self._update()
            else:
                self.engine.step()  # which only counts
        mean = mean_over_ranks(total / len(batches)).item()
        if not math.isfinite(norm) or not math.isfinite(mean):
            raise NonFiniteGradientError(
                f"step {step}: loss {mean}, gradient norm {norm}. The update was not applied; the newest checkpoint is "
                f"sound. Lower the learning rate, lengthen the warm-up, or look at the batch."
            )
        if step == 1:
            self._report_first_loss(mean)
        return {"loss": mean, "grad_norm": norm, "learning_rate": rate}

    def _update(self) -> float:
        """Clip and apply the accumulated gradient; its norm before clipping. One that is not finite is not applied.

        DeepSpeed sees to that from stage 1 on; stage 0 in fp32 neither looks nor reports.
        """
        if self.record.plan.layout.zero_stage > 0:
            self.engine.step()
            return float(self.engine.get_global_grad_norm())
        gradients = [parameter.grad for parameter in self.engine.module.parameters() if parameter.grad is not None]
        norm = float(torch.nn.utils.get_total_norm(gradients))
        if math.isfinite(norm):
            self.engine.step()
        return norm

    @torch.no_grad()
    def evaluate(self) -> float:
        """Mean validation loss in nats over the first ``evaluation.batches`` global batches, the same at every call."""
        layout = self.record.plan.layout
        width = layout.micro_batch_size * layout.data_parallel
        wanted = self.record.spec.evaluation.batches * layout.global_batch_size
        rounds = min(wanted, len(self.validation)) // width
        self.engine.eval()
        total = torch.zeros((), device=self.device)
        for turn in range(rounds):
            first = turn * width + self.ranks.rank * layout.micro_batch_size
            total += self._loss(self.validation, list(range(first, first + layout.micro_batch_size)))
        self.engine.train()
        mean: float = mean_over_ranks(total / rounds).item()
        return mean

    def _loss(self, sequences: TokenSequences, indices: list[int]) -> torch.Tensor:
        rows = torch.from_numpy(sequences.rows(indices)).to(self.device, non_blocking=True)
        return self.engine(rows[:, :-1], rows[:, 1:])  # type: ignore[no-any-return]

    def save(self, step: int, *, wait: bool) -> None:
        """Begin a checkpoint of the state after ``step`` steps; the data position is that one number."""
        self.checkpointer.save(step, {"step": step, "dataset": self.dataset.fingerprint}, wait=wait)

    def resume(self) -> int:
        """Restore the newest checkpoint that verifies; the number of steps it holds, 0 when the run is new."""
        found = None
        if self.ranks.rank == 0:  # one reader hashes, and all ranks take the same checkpoint
            remove_staging(self.checkpointer.folder)
            found = newest_that_verifies(self.checkpointer.folder)
        newest, passed_over = self.agreement.follow_rank_zero(found) or (None, [])
        logged = last_logged_step(self.run) or 0
        if newest is None:
            if has_committed(self.run):
                damage = "; ".join(passed_over[:5]) or "those that were committed are gone"
                raise UsageError(f"no sound checkpoint: {damage}. `scaletrain resume --from-scratch` starts over.")
            self._event("started", step=0, attempt=self.attempt, lost_steps=logged, passed_over=passed_over)
            return 0
        state = self.checkpointer.restore(newest)
        if state["dataset"] != self.dataset.fingerprint:
            raise UsageError(
                f"{newest.path.name} was trained on dataset {state['dataset'][:12]} and this one is "
                f"{self.dataset.fingerprint[:12]}: resuming would train on other data. Restore the data, or start anew."
            )
        lost = max(0, logged - newest.step)
        self._event("resumed", step=newest.step, attempt=self.attempt, lost_steps=lost, passed_over=passed_over)
        return int(state["step"])

    def _checkpoint_interval(self) -> int:
        every = self.record.spec.checkpoint.every
        return self.record.plan.durability.interval_steps if every == "auto" else every

    def _report_first_loss(self, loss: float) -> None:
        """A fresh model knows nothing, so its loss must be near that of a uniform guess."""
        expected = math.log(self.record.spec.model.vocab_size)
        self._event("first-loss", loss=loss, ln_vocab_size=expected, plausible=abs(loss - expected) < 0.1 * expected)

    def _event(self, name: str, **details: Any) -> None:
        if self.ranks.rank == 0:
            record_event(self.run, name, **details)
            print(f"{name}: " + "  ".join(f"{key} {value}" for key, value in details.items()), flush=True)
