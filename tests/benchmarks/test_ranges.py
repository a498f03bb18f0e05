import math
import random
from dataclasses import replace
from pathlib import Path

import planner_accuracy
import pytest
from planner_truth.ranges import COMMAND, Observation, best_spread, by_framework, kinds_left_out, left_out, side

from scaletrain_cli.plan.ranges import Quantiles


def drawn(sources: int, each: int, between: float, within: float, seed: int = 0) -> list[Observation]:
    """Return runs whose error has one part per source and one per run, both normal in logarithms."""
    draw, found = random.Random(seed), []
    for number in range(sources):
        shift = draw.gauss(0.0, between)
        for _ in range(each):
            ratio = math.exp(shift + draw.gauss(0.0, within))
            found.append(Observation("fsdp", "usual sizes", "hopper", f"source {number}", ratio, ratio, None))
    return found


@pytest.mark.parametrize(("between", "within"), [(0.0, 0.1), (0.1, 0.03), (0.2, 0.2)])
def test_the_ranges_contain_four_of_five_runs_of_a_source_left_out(between: float, within: float) -> None:
    spread, covered = best_spread(left_out(drawn(8, 40, between, within)))
    assert covered.rows == 320
    assert 0.75 <= covered.inside <= 0.85
    assert -0.2 <= spread < 0.4


def test_one_source_alone_has_no_range_once_it_is_left_out() -> None:
    seen = drawn(1, 20, 0.1, 0.1)
    assert [error for _, error in left_out(seen)] == [None] * 20
    spread, covered = best_spread(left_out(seen))
    assert (spread, covered.rows, covered.without) == (0.0, 0, 20)
    assert by_framework(seen, 0.3)["fsdp"]["regimes"]["usual sizes"]["spread"] == 0.3


@pytest.mark.parametrize("between", [0.05, 0.2])
def test_the_spread_between_kinds_is_that_of_architectures_left_out(between: float) -> None:
    draw, seen = random.Random(1), []
    for hardware in ("volta", "turing", "ampere", "hopper", "blackwell"):
        shift = draw.gauss(0.0, between)
        seen += [replace(each, hardware=hardware, ratio=each.ratio * math.exp(shift)) for each in drawn(3, 30, 0, 0.03)]
    pairs = kinds_left_out(seen)
    assert len(pairs) == len(seen)
    spread, covered = best_spread(pairs)
    assert 0.6 * between < spread < 3 * between
    assert covered.inside >= 0.6


def test_a_large_source_counts_no_more_than_a_small_one() -> None:
    """Ten runs that are as planned, and a thousand that take twice as long."""
    few = [Observation("fsdp", "usual sizes", "hopper", "few", math.exp(0.001 * i), 1.0, None) for i in range(10)]
    many = [Observation("fsdp", "usual sizes", "hopper", "many", 2 + 1e-5 * i, 1.0, None) for i in range(1000)]
    new = Observation("fsdp", "usual sizes", "hopper", "new", 1.0, 1.0, None)
    error = dict(left_out([*few, *many, new]))[new]
    assert error.p10 == pytest.approx(1.0, abs=0.02)
    assert error.p90 == pytest.approx(2.0, abs=0.02)


def test_the_planned_value_is_always_inside() -> None:
    slower = Quantiles(1.2, 1.3, 1.5)
    planned, faster, slow = (Observation("a", "b", "c", "d", ratio, ratio, None) for ratio in (1.0, 0.9, 1.6))
    assert [side(slower, each) for each in (planned, faster, slow)] == [0, -1, 1]


def test_the_page_gets_the_tables_between_its_markers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "page.md"
    markers = (f"<!-- {name}: {COMMAND} -->\nold\n<!-- end of {name} -->\n" for name in ("accuracy", "ranges"))
    page.write_text(f"before\n{''.join(markers)}after\n")
    monkeypatch.setattr(planner_accuracy, "ERRORS", tmp_path / "errors.json")
    monkeypatch.setattr(planner_accuracy, "PAGE", page)
    planner_accuracy.write({"time": {"frameworks": {}}, "memory": {"frameworks": {}}}, [])
    text = page.read_text()
    assert (text.startswith("before"), text.endswith("after\n"), "old" in text) == (True, True, False)
    assert "| published runs |" in text
    assert "| framework |" in text
