"""The agreement between two steps: one all-reduce for the wishes of all ranks and the measures of rank 0."""

from __future__ import annotations

import math

import torch.distributed as dist

from scaletrain_cli.engine.process_group import Agreement, Verdict
from tests.engine.ranks import on_ranks

VALUES = [2.5, -1e300, math.inf, -math.inf, math.nan, -0.0, 5e-324]


def agree() -> list[tuple[Verdict, bool, list[float]]]:
    agreement, rank = Agreement(30), dist.get_rank()
    wishes = [(Verdict.CONTINUE, False), (Verdict.SAVE, False), (Verdict.PREEMPT, True)]
    own = VALUES if rank == 0 else [1e308] * len(VALUES)
    return [agreement.reach(*wishes[rank], own), agreement.reach(Verdict.CONTINUE, False)]


def test_the_strongest_wish_wins_and_every_rank_has_the_values_of_rank_zero_to_the_bit() -> None:
    for first, second in on_ranks(3, agree):
        assert first[:2] == (Verdict.PREEMPT, True)
        assert [value.hex() for value in first[2]] == [value.hex() for value in VALUES]
        assert second == (Verdict.CONTINUE, False, [])
