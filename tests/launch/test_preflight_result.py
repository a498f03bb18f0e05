"""What a job means before it is queued: its price by the hour, and that of the steps that are left."""

from __future__ import annotations

import dataclasses

import pytest

from scaletrain_cli.launch.backends.base import Start, SubmissionSummary
from scaletrain_cli.plan.result import Cost
from tests.launch.conftest import make_plan, make_spec

SPEC = make_spec()  # 20 steps on 2 ranks
PRICED = dataclasses.replace(make_plan(SPEC), cost=Cost(3.0, "a list", 100.0, None, 120.0))
START = Start(None, "nobody knows")


@pytest.mark.parametrize(("step", "left", "usd"), [(0, 20, 120.0), (15, 5, 30.0), (20, 0, 0.0), (99, 0, 0.0)])
def test_only_the_steps_that_are_left_are_paid_for(step: int, left: int, usd: float) -> None:
    prospect = SubmissionSummary(SPEC, PRICED, START, step)
    assert (prospect.steps_left, prospect.expected_usd, prospect.usd_per_hour) == (left, usd, 6.0)


def test_without_a_price_nothing_is_said_of_the_cost() -> None:
    prospect = SubmissionSummary(SPEC, make_plan(SPEC), START)
    assert prospect.to_json() == {
        "start": {"at": None, "why": "nobody knows", "reason": None},
        "cost": {"expected_usd": None, "usd_per_hour": None, "steps": 20},
        "notes": [],
    }
