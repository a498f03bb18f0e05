"""The text of a plan, from stored plans, so that changes of the planner do not affect these tests."""

import io
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from scaletrain_cli.plan.result import MeasuredError, Range, Ranges
from scaletrain_cli.text import (
    binary_bytes_text,
    bytes_text,
    count_text,
    dollars_text,
    percent_text,
    ratio_text,
    seconds_text,
)
from scaletrain_cli.ui.plan import rejected_view, show_plan
from scaletrain_cli.ui.plan_breakdown import waterfall
from tests.cli.stored_plans import STORED, printed, stored


def shown(path: Path, width: int, *, everything: bool = False, encoding: str = "utf-8") -> str:
    spec, plan = stored(path)
    return printed(lambda console: show_plan(spec, plan, everything=everything, console=console), width, encoding)


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("path", STORED, ids=lambda path: path.stem)
def test_the_text_of_a_plan_matches_the_golden_file(path: Path, width: int, golden: Callable[[str, str], None]) -> None:
    text = shown(path, width)
    assert max(map(len, text.splitlines())) <= width
    golden(f"plan/{path.stem}-{width}.txt", text)


def test_all_shows_every_layout_and_every_assumption() -> None:
    _, plan = stored(STORED[0])
    text = " ".join(shown(STORED[0], 120, everything=True).split())
    assert all(" ".join(str(assumption).split()) in text for assumption in plan.assumptions)
    assert "--all shows them" not in text


@pytest.mark.parametrize("path", STORED, ids=lambda path: path.stem)
def test_a_plan_can_be_shown_without_unicode_bars(path: Path) -> None:
    assert not set(shown(path, 80, encoding="ascii")) & set("█▏▎▍▌▋▊▉")


def test_bar_segments_are_adjacent_and_fill_the_bar() -> None:
    bars = waterfall([1.0, 2.0, 1.0], 4.0, 8, unicode=True)
    assert bars == ["██", "  ████", "      ██"]
    assert waterfall([1.0, 2.0, 1.0], 4.0, 8, unicode=False) == ["##", "  ####", "      ##"]
    assert waterfall([0.0, 1e-9], 4.0, 8, unicode=True) == ["", "▏"], "a part too small to see is a tick"
    assert waterfall([1.0], 0.0, 8, unicode=True) == [""]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (bytes_text(0), "0 B"),
        (bytes_text(999), "999 B"),
        (bytes_text(1000), "1.00 kB"),
        (bytes_text(999_600), "1.00 MB"),
        (bytes_text(80 * 10**9), "80.0 GB"),
        (binary_bytes_text(80 * 10**9), "74.5 GiB"),
        (binary_bytes_text(80 * 2**30), "80.0 GiB"),
        (count_text(6_738_415_616), "6.74 B"),
        (count_text(12), "12"),
        (count_text(1260.4), "1.26 k"),
        (seconds_text(0), "0 ms"),
        (seconds_text(2e-5), "20.0 µs"),
        (seconds_text(0.83), "830 ms"),
        (seconds_text(1), "1 s"),
        (seconds_text(12.34), "12.3 s"),
        (seconds_text(60), "60 s"),
        (seconds_text(120), "2 min"),
        (seconds_text(250), "4 min 10 s"),
        (seconds_text(3599), "59 min 59 s"),
        (seconds_text(3600), "1 h"),
        (seconds_text(5066), "1 h 24 min"),
        (seconds_text(200_000), "2 d 8 h"),
        (seconds_text(1e12), "11,574,074 d"),
        (dollars_text(3.456), "$3.46"),
        (dollars_text(12345.6), "$12,346"),
        (percent_text(0.421), "42 %"),
        (percent_text(0.0042), "0.4 %"),
        (percent_text(0), "0 %"),
        (ratio_text(1.054), "x1.05"),
        (ratio_text(0.0004321), "x0.00043"),
        (ratio_text(1234.5), "x1,234.50"),
    ],
)
def test_numbers_are_formatted_with_units(text: str, expected: str) -> None:
    assert text == expected


def test_the_ranges_of_a_plan_are_shown_with_their_source() -> None:
    spec, plan = stored(STORED[1])
    measured = {"basis": "published runs", "measured_framework": "deepspeed", "measured_regime": "usual sizes"}
    error = MeasuredError(True, "deepspeed", "usual sizes", "hopper", **measured, n=131)
    times = {"step_seconds": Range(12.34, 17.89), "to_train_seconds": Range(864_000, 1_123_456)}
    others = {"on_demand_usd": Range(12_345, 15_678), "peak_bytes": Range(60_000_000_000, 71_234_000_000)}
    near = replace(error, calibrated=False, measured_hardware="ampere", n=56)
    ranges = Ranges(error, near, **times, **others)

    def text(ranges: Ranges) -> str:
        changed = replace(plan, ranges=ranges)
        return " ".join(printed(lambda console: show_plan(spec, changed, console=console), 120).split())

    shown = text(ranges)
    assert "p10 to p90: 12.3 s to 17.9 s per step, 10 d to 13 d in all (131 published runs of deepspeed:" in shown
    nearest = "nearest evidence: 56 published runs of deepspeed: usual sizes, ampere"
    assert f"p10 to p90: 60.0 GB to 71.0 GB ({nearest})" in shown
    assert "($12,300 to $15,700)" in shown
    unknown = MeasuredError(False, "deepspeed", "usual sizes", "cpu")
    said = "not calibrated: no published run of deepspeed was measured with usual sizes on cpu"
    assert text(Ranges(unknown, unknown)).count(said) == 1  # of memory and time
    assert "p10 to p90" not in text(Ranges(unknown, unknown))


def test_gpus_of_ones_own_may_cost_nothing() -> None:
    spec, plan = stored(next(path for path in STORED if path.stem == "fits"))
    assert plan.cost.on_demand is not None
    free = replace(plan.cost.on_demand, price_per_gpu_hour=0.0, usd=0.0)
    plan = replace(plan, cost=replace(plan.cost, price_per_gpu_hour=0.0, on_demand_usd=0.0, on_demand=free))
    assert "$0.00 per GPU-hour" in printed(lambda console: show_plan(spec, plan, console=console), 120, "utf-8")


def test_one_further_reason_is_written_in_the_singular() -> None:
    console = Console(width=80, file=io.StringIO())
    console.print(rejected_view([], hidden=1))
    console.print(rejected_view([], hidden=2))
    assert isinstance(console.file, io.StringIO)
    said = console.file.getvalue()
    assert "and 1 more reason; --all shows it\n" in said
    assert "and 2 more reasons; --all shows them\n" in said


def test_the_first_line_names_the_spare_nodes_that_the_costs_count() -> None:
    spec, plan = stored(next(path for path in STORED if path.stem == "fits"))
    spare = spec.with_changes("cluster", spare_nodes=2)
    first = printed(lambda console: show_plan(spare, plan, console=console), 120, "utf-8").splitlines()[0]
    assert f"{spec.cluster.gpu_name}, and 2 spare nodes: fits" in first
