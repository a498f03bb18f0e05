"""The consensus between two steps: one all-reduce for the requests of all ranks and the measures of rank 0."""

from __future__ import annotations

import math

import torch.distributed as dist

from scaletrain_cli.engine.process_group import SLOTS, RankConsensus, StepDecision, from_slots, in_slots
from tests.engine.ranks import on_ranks

VALUES = [2.5, -1e300, math.inf, -math.inf, math.nan, -0.0, 5e-324]


def agreed_on() -> tuple[dict[str, float], dict[str, float]]:
    """Return the agreed values in a pipeline in which only the second stage has experts."""
    consensus, rank = RankConsensus(30), dist.get_rank()
    own = {"loss": 2.0 + rank, "grad_norm": 0.5} | ({"router_balance": 1.5} if rank else {})
    _, _, values = consensus.reach(StepDecision.CONTINUE, False, in_slots(own))
    assert len(values) == SLOTS
    return from_slots(own, values), consensus.on_values(own)


def test_a_rank_with_more_measures_than_rank_zero_gets_its_loss() -> None:
    for first, second in on_ranks(2, agreed_on):
        assert first == second
        assert (first["loss"], first["grad_norm"]) == (2.0, 0.5)


def agree() -> list[tuple[StepDecision, bool, list[float]]]:
    consensus, rank = RankConsensus(30), dist.get_rank()
    wishes = [(StepDecision.CONTINUE, False), (StepDecision.SAVE, False), (StepDecision.PREEMPT, True)]
    own = VALUES if rank == 0 else [1e308] * len(VALUES)
    return [consensus.reach(*wishes[rank], own), consensus.reach(StepDecision.CONTINUE, False)]


def test_the_largest_request_wins_and_every_rank_has_the_values_of_rank_zero_to_the_bit() -> None:
    for first, second in on_ranks(3, agree):
        assert first[:2] == (StepDecision.PREEMPT, True)
        assert [value.hex() for value in first[2]] == [value.hex() for value in VALUES]
        assert second == (StepDecision.CONTINUE, False, [])
