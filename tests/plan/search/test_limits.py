"""Options for the choice of a cluster: defaults, and invalid values."""

from typing import Any

import pytest

from scaletrain_cli.errors import UsageError
from scaletrain_cli.plan.search.cluster_limits import Limits, parse_limits


def limits(objective: str | None = None, **given: Any) -> Limits | None:
    return parse_limits(objective, **{"max_gpus": None, "deadline": None, "budget": None, "gpus": (), **given})


def test_no_options_are_no_limits() -> None:
    assert limits() is None


def test_the_default_objective_is_gpus_with_a_deadline_and_time_otherwise() -> None:
    assert limits(deadline="30d") == Limits("gpus", None, 30 * 86400.0, None, ())
    assert limits(budget="$50k") == Limits("time", None, None, 50_000.0, ())
    assert limits(max_gpus=8, gpus=["t4", "h200-sxm-141gb", "t4"]) == Limits(
        "time", 8, None, None, ("t4-16gb", "h200-sxm-141gb")
    )
    assert limits("cost", deadline="1d") == Limits("cost", None, 86400.0, None, ())


@pytest.mark.parametrize("given", [{"deadline": "soon"}, {"deadline": "0"}, {"budget": "-1"}, {"budget": ""}])
def test_an_invalid_limit_is_an_error_that_names_its_option(given: dict[str, str]) -> None:
    with pytest.raises(UsageError, match=f"--{next(iter(given))} is invalid"):
        limits(**given)
