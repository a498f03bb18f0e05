"""The consensus of a run with one rank, without torch's process groups, and the context of such a rank."""

from typing import Any

import torch

from scaletrain_cli.engine.context import RankContext
from scaletrain_cli.engine.process_group import RankConsensus, Ranks
from scaletrain_cli.worker.heartbeat import Heartbeat


class Alone(RankConsensus):
    leads = True

    def __init__(self) -> None:
        pass

    def gather(self, item: Any) -> Any:
        return [item]

    def follow_rank_zero(self, item: Any) -> Any:
        return item

    def least(self, value: float) -> float:
        return value

    def barrier(self) -> None:
        pass


def context_of(run: Any, record: Any = None, ranks: Any = None, consensus: Any = None, heartbeat: Any = None) -> Any:
    """Return the context of a rank in attempt 1 on a CPU; of parts that a test does not need, nothing."""
    ranks, beats = ranks or Ranks(0, 1, 0), heartbeat or Heartbeat(None)
    of_steps, of_saves = consensus or Alone(), consensus or Alone()
    return RankContext(run, record, ranks, 1, torch.device("cpu"), beats, of_steps, of_saves)
