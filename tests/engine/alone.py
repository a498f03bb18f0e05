"""The consensus of a run with one rank, without torch's process groups."""

from typing import Any

from scaletrain_cli.engine.process_group import RankConsensus


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
