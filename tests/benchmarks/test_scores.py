"""The statistics that the planner is judged by, on numbers small enough to check by hand."""

import pytest
from planner_truth.scores import Run, errors, kendall_tau, ranking, verdicts


def test_errors_are_shares_of_the_measured_value() -> None:
    found = errors([(110.0, 100.0), (80.0, 100.0), (100.0, 100.0)])
    assert (found.n, found.median) == (3, 0.0)
    assert found.mape == pytest.approx(0.1)
    assert found.p90 == pytest.approx(0.18)


def test_nothing_to_compare_has_no_score() -> None:
    assert errors([]) is None
    assert verdicts([]) is None
    assert ranking([[(1.0, 1.0)]]) is None


def test_false_fits_and_false_rejections_are_shares_of_all_rows() -> None:
    found = verdicts([(True, True), (True, False), (False, True), (False, False)])
    assert (found.accuracy, found.false_fits, found.false_rejections) == (0.5, 0.25, 0.25)


def test_tau_counts_pairs_in_order_against_pairs_out_of_order() -> None:
    assert kendall_tau([(1, 1), (2, 2), (3, 3)]) == 1.0
    assert kendall_tau([(1, 3), (2, 2), (3, 1)]) == -1.0
    assert kendall_tau([(1, 1), (2, 3), (3, 2)]) == pytest.approx(1 / 3)


def test_a_constant_ranking_has_no_tau() -> None:
    assert kendall_tau([(1, 1), (1, 2)]) is None


def test_ties_are_counted_out_of_tau() -> None:
    assert kendall_tau([(1, 1), (1, 2), (2, 3)]) == pytest.approx(2 / 6**0.5)


def test_regret_is_how_much_slower_the_predicted_best_was() -> None:
    found = ranking([[Run(1.0, 15.0), Run(2.0, 10.0)], [Run(1.0, 5.0), Run(2.0, 6.0)], [Run(1.0, 1.0)]])
    assert (found.panels, found.runs) == (2, 4)
    assert found.regret == pytest.approx(0.25)
    assert found.regret_worst == pytest.approx(0.5)


def test_a_run_that_the_planner_says_does_not_fit_is_not_its_choice() -> None:
    found = ranking([[Run(1.0, 20.0, fits=False), Run(2.0, 10.0)]])
    assert (found.regret, found.regret_by_time) == (0.0, 1.0)
