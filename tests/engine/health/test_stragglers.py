from scaletrain_cli.engine.health.stragglers import Straggler, StragglerConfirmation, slowest


def test_the_slowest_rank_is_reported_with_the_median_of_the_others() -> None:
    assert slowest([0.1, 0.1, 0.3, 0.12], step_seconds=1.0) == Straggler(2, 0.3, 0.1)
    assert slowest([0.1, 0.3], step_seconds=1.0) == Straggler(1, 0.3, 0.1)


def test_even_ranks_and_a_single_one_have_no_straggler() -> None:
    assert slowest([0.1, 0.11, 0.14], step_seconds=1.0) is None
    assert slowest([5.0], step_seconds=5.0) is None


def test_a_difference_that_is_small_beside_the_step_is_no_straggler() -> None:
    assert slowest([0.001, 0.003], step_seconds=1.0) is None


def test_a_slow_rank_is_reported_after_two_windows_and_again_when_it_recovers() -> None:
    suspicion, slow, other = StragglerConfirmation(), Straggler(1, 0.3, 0.1), Straggler(2, 0.3, 0.1)
    windows = [slow, None, slow, slow, slow, other, other, None, None, None]
    assert [suspicion.changed(window) for window in windows] == [
        *(False, False, False, True, False),
        *(False, True, False, True, False),
    ]
