"""Robust statistics, compared with the standard library and with the formulas on known curves."""

import random
import statistics

import pytest

from scaletrain_cli.diagnosis.curves import (
    autocorrelation,
    deviation,
    median,
    noise,
    residuals,
    smoothed,
    spikes,
    theil_sen,
)

NORMAL = [random.Random(7).gauss(5.0, 0.2) for _ in range(1)] + [random.Random(n).gauss(5.0, 0.2) for n in range(999)]


def test_median_and_deviation() -> None:
    for values in ([3.0], [1.0, 2.0], NORMAL):
        assert median(values) == pytest.approx(statistics.median(values))
    assert deviation(NORMAL) == pytest.approx(statistics.stdev(NORMAL), rel=0.1)


def test_noise_is_that_around_a_trend() -> None:
    assert noise(NORMAL) == pytest.approx(0.2, rel=0.15)
    assert noise([value - place / 50 for place, value in enumerate(NORMAL)]) == pytest.approx(0.2, rel=0.15)
    assert noise([1.0, 2.0]) == 0.0


def test_the_slope_is_robust_and_its_interval_holds_the_truth() -> None:
    places = list(range(300))
    values = [0.01 * place + NORMAL[place] for place in places]
    values[100] = 1e6
    slope = theil_sen(places, values)
    assert slope.low < 0.01 < slope.high
    assert slope.value == pytest.approx(0.01, rel=0.1)
    flat = theil_sen(places, NORMAL[:300])
    assert flat.low < 0 < flat.high
    assert median(residuals(places, values)) == pytest.approx(0.0, abs=1e-9)


def test_the_autocorrelation_of_noise_and_of_an_alternation() -> None:
    assert abs(autocorrelation(NORMAL)) < 0.1
    assert autocorrelation([(-1) ** place for place in range(100)]) == pytest.approx(-0.99)
    assert autocorrelation([2.0] * 10) == 0.0


def test_smoothed_values_are_medians_of_neighbors() -> None:
    assert smoothed([1.0, 9.0, 1.0, 1.0, 1.0], 3) == [5.0, 1.0, 1.0, 1.0, 1.0]


def test_spikes_leave_their_level_alone() -> None:
    values = NORMAL[:400]
    values[200:210] = [50.0] * 10
    (spike,) = spikes(values)
    assert (spike.first, spike.after, spike.peak, spike.returned) == (200, 210, 50.0, True)
    assert spike.level == pytest.approx(5.0, rel=0.02)
    (stays,) = spikes([*values[:150], *[9.0] * 60])
    assert not stays.returned
    assert spikes([10.0 * 0.99**place for place in range(300)]) == []
    assert spikes([0.0] * 100) == []
