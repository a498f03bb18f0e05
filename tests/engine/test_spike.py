"""A loss spike is a value far above the running median; it never becomes part of what is normal."""

from scaletrain_cli.engine.spike import SpikeWatch


def test_a_steady_loss_is_no_spike() -> None:
    watch = SpikeWatch(3.0)
    assert [watch.median_if_spike(2.0 + 0.1 * (step % 3)) for step in range(200)] == [None] * 200


def test_a_spike_is_reported_with_the_median_it_left() -> None:
    watch = SpikeWatch(3.0, recent_losses=[2.0] * 20)
    assert watch.median_if_spike(6.1) == 2.0
    assert watch.median_if_spike(5.9) is None


def test_spikes_in_a_row_are_all_reported() -> None:
    watch = SpikeWatch(3.0, recent_losses=[2.0] * 20)
    assert [watch.median_if_spike(50.0) for _ in range(500)] == [2.0] * 500


def test_the_first_steps_of_a_run_are_not_judged() -> None:
    watch = SpikeWatch(3.0)
    assert [watch.median_if_spike(loss) for loss in (8.0, 40.0, 7.0)] == [None] * 3
