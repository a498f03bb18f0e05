"""The text of explanations, comparisons, cluster sizes and traces, from stored data, at two widths."""

from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from scaletrain_cli.plan.advice.answer import Compared
from scaletrain_cli.plan.advice.explanation import Question, Row
from scaletrain_cli.plan.reliability.spot_trace import Spread, TraceOutcome
from scaletrain_cli.plan.search.cluster_limits import ClusterLimits, Considered
from scaletrain_cli.plan.search.sizing import Sizing
from scaletrain_cli.reasons import Reason
from scaletrain_cli.ui.plan_answer import show_explanation, show_sizing, show_trace
from scaletrain_cli.ui.plan_comparison import show_comparison
from tests.cli.stored_plans import STORED, printed, stored

PLANS = {path.stem: path for path in STORED}
GB = 10**9
EXPLANATION = (
    Question(
        "states",
        Reason("plan.ask-states"),
        (
            Row("weights", 138 * GB, note=Reason("plan.bytes-per-parameter", {"bytes_per_parameter": 2.0})),
            Row("total", 1240 * GB, share=14.6, note=Reason("plan.bytes-per-parameter", {"bytes_per_parameter": 18})),
        ),
        None,
        (Reason("plan.states-total", {"bytes_per_parameter": 18.0, "parameters": 68_976_648_192}),),
        (Reason("plan.states-of-device", {"share": 14.6, "device": "h100-sxm-80gb"}),),
    ),
    Question(
        "one_rank",
        Reason("plan.ask-one-rank", {"device": "h100-sxm-80gb"}),
        (Row("recompute none", 1530 * GB, 3780.0, 18.0, False), Row("recompute full", 61 * GB, 4200.0, 0.72, True)),
        False,
        (Reason("plan.one-rank-too-small", {"times": 18.03}),),
        (Reason("plan.spread-states"),),
    ),
    Question(
        "sharding",
        Reason("plan.ask-sharding", {"ranks": 32}),
        (Row("ZeRO-3", 40 * GB, 5.5, 0.5, True, Reason("plan.chosen")),),
        True,
        (Reason("plan.yes"),),
    ),
)
OUTCOME = TraceOutcome(
    name="aws-p3-us-east-1a.json",
    trace_days=14.2,
    repeats=2.5,
    nodes_needed=4,
    nodes_assumed=Reason("plan.trace-as-recorded"),
    starts=16,
    finished=15,
    days=Spread(12.25, 10.0, 19.5),
    goodput=Spread(0.91, 0.84, 0.95),
    interruptions=Spread(41.0, 30.0, 77.0),
    lost_hours=Spread(3.5, 2.0, 9.0),
    waiting_hours=Spread(80.0, 12.0, 240.0),
    spot_usd=Spread(5200.0, 5100.0, 5900.0),
    on_demand_days=6.0,
    on_demand_usd=13750.0,
    notes=(Reason("plan.trace-repeats", {"seconds": 14.2 * 86400}),),
)


def compared(*names: str) -> tuple[Compared, ...]:
    reasons = {
        "too_large": Reason(
            "plan.run-does-not-fit",
            {"name": "llama-70b", "gpus": "1 x 8 h100-sxm-80gb", "peak": 273e9, "capacity": 84.9e9},
        )
    }
    return tuple(Compared(name, *stored(PLANS[name]), reasons.get(name)) for name in names)


def sizing() -> Sizing:
    spec, plan = stored(PLANS["fits"])
    too_large = Reason("plan.cluster-does-not-fit", {"what": "needs 273 GB of 84.9 GB"})
    late = Reason("plan.too-late", {"by": 66 * 3600})
    rows = (
        Considered("h100-sxm-80gb", 1, 8, None, None, None, None, None, False, too_large),
        Considered("h100-sxm-80gb", 2, 16, 1.1e6, 14200.0, 0.998, 30.0, None, False, late),
        Considered("h100-sxm-80gb", 4, 32, 5.2e5, 13756.0, 0.9995, 15.5, plan.layout, True, None),
    )
    return Sizing(spec, plan, ClusterLimits("gpus", 64, 864000.0, 20000.0), rows)


VIEWS: dict[str, Callable[[Console], None]] = {
    "explain": lambda console: show_explanation(EXPLANATION, console),
    "compare": lambda console: show_comparison(compared("fits", "pipeline"), console),
    "compare-many": lambda console: show_comparison(compared("fits", "pipeline", "cpu", "too_large", "fits"), console),
    "sizing": lambda console: show_sizing(sizing(), console),
    "trace": lambda console: show_trace(OUTCOME, console),
}


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("name", VIEWS)
def test_each_comparison_matches_the_golden_file(name: str, width: int, golden: Callable[[str, str], None]) -> None:
    text = printed(VIEWS[name], width)
    assert max(map(len, text.splitlines())) <= width
    golden(f"plan/{name}-{width}.txt", text)


@pytest.mark.parametrize("name", VIEWS)
def test_each_comparison_can_be_shown_without_unicode(name: str) -> None:
    text = printed(VIEWS[name], 80, "ascii")
    assert "?" not in text.replace("?\n", "\n")


def test_a_layout_that_does_not_divide_is_a_column_with_the_reason() -> None:
    first, _ = compared("fits", "cpu")
    odd = Compared("data=3", first.spec, None, "layout.data_parallel = 3: must divide 32")
    text = printed(lambda console: show_comparison((first, odd), console), 80)
    assert "does not divide" in text
    assert "data=3: layout.data_parallel = 3: must divide 32." in text


def test_the_stored_plans_are_found() -> None:
    assert {"cpu", "fits", "pipeline", "too_large"} == set(PLANS), Path(__file__).parent
