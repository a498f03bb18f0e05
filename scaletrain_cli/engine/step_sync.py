"""The consensus of all ranks between two steps: train on, save, or stop; and the progress of a save in flight.

One all-reduce per step. A request that reaches one rank takes effect on all ranks at the same step.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, chain

from scaletrain_cli.engine.checkpoint.checkpointing import Checkpointer
from scaletrain_cli.engine.checkpoint.schedule import CheckpointSchedule
from scaletrain_cli.engine.context import RankContext
from scaletrain_cli.engine.health.state_check import StateCheck
from scaletrain_cli.engine.metrics.goodput_ledger import LedgerClock
from scaletrain_cli.engine.metrics.profiler import StepProfiler
from scaletrain_cli.engine.metrics.step_measures import StepMeasures
from scaletrain_cli.engine.process_group import from_slots, in_slots
from scaletrain_cli.worker.loop_adapter import StepDecision
from scaletrain_cli.worker.signals import PreemptionFlag

_CHECK_SECONDS = 1.0  # between two checks for a file that requests a save


@dataclass
class StepSync:
    """One rank's part in the step synchronization. Every method is collective."""

    context: RankContext
    checkpointer: Checkpointer
    schedule: CheckpointSchedule
    flag: PreemptionFlag
    ledger: LedgerClock
    profiler: StepProfiler
    state_check: StateCheck
    _checked: float = field(default=0.0, init=False)
    _requested: bool = field(default=False, init=False)

    def agree(self, step: int, measures: Sequence[StepMeasures] = ()) -> tuple[StepDecision, list[StepMeasures]]:
        """Return what all ranks do after ``step`` steps, the largest request of any rank; and rank 0's measures.

        Sums over other groups of ranks may differ in their last bits, so all ranks use the values of rank 0. Raises
        StateCorruptedError.
        """
        self.context.heartbeat.wait_for_ranks()
        slots = [in_slots(measured.values) for measured in measures]
        values = [float(self.profiler.is_requested()), *chain.from_iterable(slots)]
        decision, anyone_writing, (profile_requested, *agreed), largest = self.context.consensus.reach(
            self._own_request(step), self.checkpointer.writing, values, self.state_check.for_consensus(step)
        )
        self.state_check.compare(largest)
        agreed_measures = [
            measured._replace(values=from_slots(measured.values, agreed[start:]))
            for measured, start in zip(measures, accumulate(map(len, slots), initial=0), strict=False)
        ]
        if decision is StepDecision.PREEMPT:
            self.profiler.end_soon()
        if profile_requested:
            self.profiler.accept(step, self.context.consensus)
        with self.ledger.during("save"):
            self.checkpointer.advance(anyone_writing)
        for cost in self.checkpointer.take_costs():
            self.schedule.save_took(cost.blocked_seconds, cost.seconds)
        return decision, agreed_measures

    def goes_on(self, step: int) -> bool:
        """Agree between two parts of an evaluation; return False on every rank after a preemption signal."""
        if self.agree(step)[0] is StepDecision.PREEMPT:
            return False
        self.context.heartbeat.beat(step, "evaluation")
        return True

    def save_begins(self, step: int) -> None:
        """Record that a save of the state after ``step`` steps starts."""
        self.schedule.begin_at(step)
        self._requested = False
        self.clear_save_request()  # which this save answers

    def clear_save_request(self) -> None:
        """Remove a save request, as one that arrived during the last save of a finished run."""
        if self.context.rank == 0:
            self._take_file()

    def seconds_to_save(self, step: int, grace_seconds: float) -> tuple[float, float]:
        """Return the seconds left of the grace period, the least of all ranks, and the expected seconds of a save.

        If another save is in flight, its seconds are added.
        """
        left = self.context.consensus.least(self.flag.seconds_left(grace_seconds))
        saves = 1 if self.checkpointer.in_flight_step in (None, step) else 2
        return left, -self.context.consensus.least(-saves * self.checkpointer.expected_seconds)

    def _own_request(self, step: int) -> StepDecision:
        if self.flag.raised:
            return StepDecision.PREEMPT
        # Only rank 0 decides, because clocks and file systems differ between ranks.
        if self.context.rank == 0 and (self.schedule.is_due(step) or self._requested_by_file()):
            return StepDecision.SAVE
        return StepDecision.CONTINUE

    def _requested_by_file(self) -> bool:
        if not self._requested and time.monotonic() - self._checked >= _CHECK_SECONDS:
            self._checked = time.monotonic()
            self._requested = self._take_file()
        return self._requested

    def _take_file(self) -> bool:
        try:
            self.context.run.save_file.unlink()
        except OSError:
            return False
        return True
