import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic_core import PydanticCustomError

from scaletrain_cli.spec.quantities import parse_bandwidth, parse_bytes, parse_count, parse_flops, parse_seconds

PARSERS = [parse_bytes, parse_seconds, parse_count, parse_bandwidth, parse_flops]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        *(("80GB", 80 * 10**9), ("80GiB", 80 * 2**30), ("80 gb", 80 * 10**9), ("1.5TiB", 3 * 2**39), ("0.5kB", 500)),
        *(("12B", 12), (12, 12), (1.5e9, 1_500_000_000)),
    ],
)
def test_sizes_are_parsed_to_bytes(text: str | float, expected: int) -> None:
    assert parse_bytes(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        *((90, 90), ("90", 90), ("90s", 90), ("30m", 1800), ("30min", 1800), ("24h", 86400), ("7d", 604800)),
        *(("1w", 604800), ("0.5h", 1800), ("1h30m", 5400), ("1d 2h", 93600), ("24:00:00", 86400), ("00:00:30", 30)),
        *(("2-12:00:00", 216000), ("2-12:30", 217800), ("14-0", 14 * 86400)),
    ],
)
def test_durations_are_parsed_to_seconds(text: str | float, expected: float) -> None:
    assert parse_seconds(text) == expected


@pytest.mark.parametrize(("text", "expected"), [("300B", 300 * 10**9), ("2.5M", 2_500_000), ("10k", 10_000), (7, 7)])
def test_counts_are_parsed(text: str | float, expected: int) -> None:
    assert parse_count(text) == expected


def test_bandwidths_and_flops_are_parsed() -> None:
    assert parse_bandwidth("50GB/s") == 50e9
    assert parse_bandwidth(5e9) == 5e9
    assert parse_flops("989TFLOPS") == 989e12
    assert parse_flops(989e12) == 989e12


@pytest.mark.parametrize("parse", PARSERS)
@pytest.mark.parametrize("value", [True, None, [], {}, "", "x", "-1", -1, "1e400", float("nan"), float("inf"), 10**30])
def test_an_invalid_quantity_is_rejected(parse, value: object) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ValueError, match="must be"):
        parse(value)


@pytest.mark.parametrize("text", ["30:00", "1:2:3", "24:60:00", "h", "1x", "1h30", "30m1"])
def test_an_invalid_duration_is_rejected(text: str) -> None:
    with pytest.raises(ValueError, match="must be a duration"):
        parse_seconds(text)


def test_a_bandwidth_without_per_second_is_rejected() -> None:
    with pytest.raises(ValueError, match="50GB/s"):
        parse_bandwidth("50GB")


@given(st.text(max_size=30) | st.integers() | st.floats() | st.booleans() | st.none())
def test_any_text_gives_a_finite_number_or_an_error(value: object) -> None:
    for parse in PARSERS:
        with contextlib.suppress(PydanticCustomError):
            assert 0 <= parse(value) <= 10**18
