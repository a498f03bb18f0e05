"""Charts in characters: points are where their values are, spikes stay visible and leave height for the rest."""

import math
import random

import pytest

from scaletrain_cli.ui.watch.plot import Line, Mark, ceiling, plot

DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))


def drawn(line: Line, columns: int = 49, rows: int = 12, **more: object) -> list[str]:
    texts = plot([line], columns, rows, x_text=lambda x: f"{x:g}", y_text=lambda y: f"{y:g}", **more)  # type: ignore[arg-type]
    assert len(texts) == rows
    assert all(text.cell_len <= columns for text in texts)
    return [text.plain for text in texts]


def points(rows: list[str]) -> set[tuple[int, int]]:
    """The points of the Braille cells right of the axis, from the lower left."""
    body = [row[9:] for row in rows[:-2]]
    found = set()
    for number, row in enumerate(body):
        for column, character in enumerate(row):
            bits = ord(character) - 0x2800
            if 0 < bits < 256:
                dots = [(down, across) for down in range(4) for across in range(2) if bits & DOTS[down][across]]
                found |= {(2 * column + across, 4 * (len(body) - number) - 1 - down) for down, across in dots}
    return found


def test_a_straight_line_is_a_diagonal() -> None:
    rows = drawn(Line(range(81), [0.5 * x for x in range(81)]))
    width, height = 2 * 40, 4 * 10
    found = points(rows)
    assert {(0, 0), (width - 1, height - 1)} <= found
    for across, up in found:
        assert up == pytest.approx((height - 1) * across / (width - 1), abs=1.0)
    assert rows[-1].split() == ["0", "40", "80"]
    assert {"10", "20", "30", "40"} <= {row[:8].strip() for row in rows}


def test_a_line_of_few_points_has_no_gaps() -> None:
    assert {across for across, _ in points(drawn(Line([0, 10], [0.0, 1.0])))} == set(range(80))


def test_ticks_are_beside_their_values() -> None:
    chance = random.Random(3)
    values = [chance.uniform(-4, 9) for _ in range(30)]
    rows = drawn(Line(range(30), values), rows=22)
    ticks = {float(row[:8]): 19 - number for number, row in enumerate(rows[:-2]) if row[8] == "┤"}
    assert len(ticks) >= 4
    for value, row in ticks.items():
        assert row == pytest.approx(19 * (value - min(values)) / (max(values) - min(values)), abs=0.51)


def test_a_wide_spread_is_logarithmic() -> None:
    rows = drawn(Line(range(81), [10 ** (x / 20) for x in range(81)]))
    assert all(up == pytest.approx(39 * across / 79, abs=1.0) for across, up in points(rows))
    assert {row[:8].strip() for row in rows} >= {"1", "100", "10000"}


def test_one_step_among_many_is_visible() -> None:
    values = [1.0 + 0.001 * (number % 7) for number in range(20_000)]
    values[12_345] = 1.02
    assert drawn(Line(range(20_000), values)) != drawn(Line(range(20_000), [min(v, 1.01) for v in values]))
    values[12_345] = 5.0
    rows = drawn(Line(range(20_000), values))
    assert [row.count("▲") for row in rows[:-2]] == [1, *[0] * 9]
    assert rows[0].index("▲") == 9 + int(12_345 / 20_000 * 40)


@pytest.mark.parametrize("seed", range(20))
def test_noise_and_the_fall_at_the_start_are_no_spikes(seed: int) -> None:
    chance = random.Random(seed)
    curve = [3 + 7 / (1 + step / 20) + chance.gauss(0, 0.15) for step in range(1, 3001)]
    assert ceiling(curve) == math.inf
    assert ceiling([chance.lognormvariate(0, 0.3) for _ in range(1000)]) == math.inf
    curve[1500] = 80.0
    assert 5 < ceiling(curve) < 20


def test_values_that_are_missing_constant_or_few() -> None:
    assert "no values yet" in drawn(Line([1, 2], [math.nan, math.inf]))[5]
    assert "no values yet" in "".join(drawn(Line([], [])))
    assert {up for _, up in points(drawn(Line(range(9), [2.0] * 9)))} == {19}
    assert len(points(drawn(Line([5], [1e-300])))) == 1
    for columns, rows in ((3, 1), (9, 2), (20, 4), (200, 60)):
        assert len(plot([Line(range(9), range(9))], columns, rows, x_text=str, y_text=str)) == rows


def test_marks_stand_on_the_axis_and_never_over_each_other() -> None:
    marks = [Mark(0.0, "2"), Mark(0.1, "3"), Mark(50.0, "R"), Mark(99.9, "12"), Mark(500.0, "4")]
    axis = drawn(Line(range(101), [1.0, 2.0] * 50 + [1.0]), marks=marks)[-2]
    assert axis[9] == "2"
    assert "3" not in axis
    assert axis.index("R") == 9 + 20
    assert "4" not in axis


def test_validations_are_marked_apart_from_each_other() -> None:
    rows = drawn(Line(range(1000), [1.0 + number / 1000 for number in range(1000)], mark="o"))
    assert 8 <= sum(row.count("o") for row in rows) <= 11
    assert rows[0].endswith("o")


def test_ascii() -> None:
    rows = drawn(Line(range(50), [float(x) for x in range(49)] + [1e6]), unicode=False, marks=[Mark(3.0, "2")])
    assert all(map(str.isascii, rows))
    assert "*" in "".join(rows)
