"""Quantities mean what the API server means by them."""

from __future__ import annotations

from fractions import Fraction

import pytest

from scaletrain_cli.launch.backends.kubernetes.nodes import parse_quantity, quantity_text


@pytest.mark.parametrize(
    ("text", "number"),
    [
        *((8, 8), ("8", 8), ("500m", Fraction(1, 2)), ("1.5", Fraction(3, 2)), (".5", Fraction(1, 2)), ("1k", 1000)),
        *(("2Gi", 2 * 2**30), ("1Ti", 2**40), ("1e3", 1000), ("12E", 12 * 10**18), ("1E2", 100), ("-1", -1)),
    ],
)
def test_a_quantity_is_the_number_that_it_says(text: str | int, number: Fraction | int) -> None:
    assert parse_quantity(text) == number


def test_amounts_are_shown_as_people_count_them() -> None:
    assert [quantity_text(parse_quantity(text)) for text in ("16", "512Gi", "500m", "2M")] == [
        "16",
        "512.0Gi",
        "0.5",
        "2e+06",
    ]
