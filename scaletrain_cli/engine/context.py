"""The run, the attempt and the process of a rank, which all parts of its engine use."""

from dataclasses import dataclass
from typing import Any

import torch

from scaletrain_cli.engine.metrics.reporting import report_event
from scaletrain_cli.engine.process_group import RankConsensus, Ranks
from scaletrain_cli.plan.result import Layout
from scaletrain_cli.rundir.paths import RunDir
from scaletrain_cli.rundir.record import RunRecord
from scaletrain_cli.spec import RunSpec
from scaletrain_cli.worker.heartbeat import Heartbeat


@dataclass(frozen=True)
class RankContext:
    """One rank in an attempt of a run.

    ``consensus``: of the steps. ``long_consensus``: with a timeout that is as long as set-up or a save may take.
    """

    run: RunDir
    record: RunRecord
    ranks: Ranks
    attempt: int
    device: torch.device
    heartbeat: Heartbeat
    consensus: RankConsensus
    long_consensus: RankConsensus

    @property
    def spec(self) -> RunSpec:
        return self.record.spec

    @property
    def layout(self) -> Layout:
        return self.record.plan.layout

    @property
    def rank(self) -> int:
        return self.ranks.rank

    def report(self, name: str, /, **details: Any) -> None:
        """Record an event of the run, on rank 0. Raises OSError."""
        report_event(self.run, self.rank, name, **details)
