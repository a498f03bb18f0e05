import random

from scaletrain_cli.engine.health.guard import DeadGradients, FlatLoss, LossScaleCollapse


def test_a_collapsing_loss_scale_is_reported_once() -> None:
    watch, scale, reported = LossScaleCollapse(), 65536.0, []
    for step in range(200):
        skipped = step > 20 and step % 4 == 0 and scale > 1
        scale = scale / 2 if skipped else scale
        reported.append(watch.observe(scale, skipped=skipped))
    (found,) = [each for each in reported if each]
    assert (found["fell_from"], found["loss_scale"]) == (65536.0, 2048.0)


def test_the_search_for_the_first_loss_scale_is_no_collapse() -> None:
    watch = LossScaleCollapse()
    found = [watch.observe(2.0**power, skipped=True) for power in range(32, 10, -1)]
    found += [watch.observe(2.0**10, skipped=False) for _ in range(200)]
    assert not any(found)


def test_a_scale_that_grows_and_overflows_every_few_steps_is_healthy() -> None:
    watch = LossScaleCollapse()
    scales = [2.0 ** (12 + step % 2) for step in range(300)]
    assert not any(watch.observe(scale, skipped=step % 2 == 1) for step, scale in enumerate(scales))


def test_vanishing_gradients_are_reported_once_with_their_norms() -> None:
    watch = DeadGradients(3)

    def observe(norm: float, median: float | None = 0.5) -> object:
        return watch.observe(norm, dead=watch.is_dead(norm, median))

    assert [observe(norm) for norm in (0.4, 0.0, 1e-9, 0.3, 0.0, 0.0)] == [None] * 6
    assert observe(1e-8) == {"norms": [0.0, 0.0, 1e-8]}
    assert [observe(0.0) for _ in range(50)] == [None] * 50


def test_without_a_median_only_a_norm_of_zero_is_dead() -> None:
    assert DeadGradients.is_dead(0.0, None)
    assert not DeadGradients.is_dead(1e-12, None)


def flat_reports(losses: list[float], warmup_steps: int = 10) -> list[int]:
    watch = FlatLoss(warmup_steps)
    return [step for step, loss in enumerate(losses, 1) if watch.observe(step, loss, losses[max(0, step - 64) : step])]


def noisy(level: float, count: int, noise: float, seed: int = 0) -> list[float]:
    chance = random.Random(seed)
    return [level + chance.gauss(0, noise) for _ in range(count)]


def test_a_model_that_learns_nothing_is_reported_once_early() -> None:
    assert flat_reports(noisy(10.4, 3000, 0.05)) == [200]
    assert flat_reports(noisy(10.4, 3000, 0.05), warmup_steps=2000) == [2064]


def test_a_loss_that_fell_at_first_is_not_reported_as_flat_later() -> None:
    for noise in (0.02, 0.5):
        falling = [10.4 - 0.02 * step for step in range(150)]
        assert flat_reports(falling + noisy(7.4, 3000, noise)) == []


def test_a_slow_fall_within_noise_is_not_reported_as_flat() -> None:
    chance = random.Random(1)
    assert flat_reports([10.4 - 0.0025 * step + chance.gauss(0, 0.5) for step in range(400)]) == []
