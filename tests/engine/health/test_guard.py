import json

from scaletrain_cli.engine.health.guard import Guard


def guard(patience: int = 3) -> Guard:
    return Guard(factor=3.0, patience=patience, fresh_warmup_steps=5)


def train(watch: Guard, first: int, losses: list[float], norm: float = 0.5) -> list[str]:
    return [watch.observe(first + i, {"loss": loss, "grad_norm": norm})[0] for i, loss in enumerate(losses)]


def test_a_checkpoint_is_clean_once_ten_healthy_steps_have_followed_it() -> None:
    watch = guard()
    cleans = []
    for step in range(1, 31):
        watch.observe(step, {"loss": 2.0 if step != 16 else 50.0, "grad_norm": 0.5})
        cleans.append(watch.clean_step(step))
    assert cleans[:10] == [None] * 10
    assert cleans[10:15] == [1, 2, 3, 4, 5]
    assert cleans[15:25] == [None] * 10
    assert cleans[25:] == [16, 17, 18, 19, 20]


def test_a_longer_patience_waits_longer_for_a_clean_checkpoint() -> None:
    watch = guard(patience=25)
    train(watch, 1, [2.0] * 30)
    assert watch.clean_step(30) == 5


def test_a_spike_is_reported_with_its_values_and_the_medians() -> None:
    watch = guard()
    train(watch, 1, [2.0] * 40)
    assert train(watch, 41, [40.0, 41.0, 42.0], norm=9.0) == ["suspicious", "suspicious", "spike"]
    assert watch.first_outlier(43) == 41
    assert watch.evidence() == {
        "steps": [41, 42, 43],
        "losses": [40.0, 41.0, 42.0],
        "grad_norms": [9.0, 9.0, 9.0],
        "median_loss": 2.0,
        "median_grad_norm": 0.5,
    }


def test_the_losses_of_another_mixture_are_no_spike() -> None:
    for expected, found in ((False, ["suspicious", "suspicious", "spike"]), (True, ["fine"] * 3)):
        watch = guard()
        train(watch, 1, [2.0] * 40)
        if expected:
            watch.expect_new_level()
        assert train(watch, 41, [8.0] * 3, norm=0.6) == found


def test_gradients_that_recover_from_zero_are_no_spike() -> None:
    watch = guard(patience=1)
    train(watch, 1, [2.0] * 40)
    _, found = watch.observe(41, {"loss": 2.0, "grad_norm": 0.0})
    assert list(found) == ["dead-gradients"]
    train(watch, 42, [2.0] * 80, norm=0.0)
    assert train(watch, 122, [2.0] * 3) == ["fine"] * 3


def test_the_guard_sees_the_loss_scale_of_fp16_steps() -> None:
    watch = guard()
    for step in range(1, 21):
        measured = {"loss": 2.0, "grad_norm": 0.5, "loss_scale": 1024.0, "skipped": 0.0}
        assert watch.observe(step, measured) == ("fine", {})
    reported = []
    for step in range(21, 31):
        measured = {"loss": 2.0, "loss_scale": 1024.0 / 2 ** (step - 20), "skipped": 1.0}
        reported += watch.observe(step, measured)[1]
    assert reported == ["loss-scale-collapsed"]


def test_a_reported_failure_is_not_reported_again_after_a_resume() -> None:
    first, second = guard(1), guard(1)
    measured = {"loss": 6.0, "grad_norm": 0.0, "loss_scale": 2.0, "skipped": 0.0}
    names = [event for step in range(1, 220) for event in first.observe(step, measured)[1]]
    assert names == ["dead-gradients", "flat-loss"]
    state = first.state_dict()
    assert {name: list(part) for name, part in state.items()} == {  # the keys that checkpoints have
        "spikes": ["losses", "norms", "outliers", "healthy"],
        "scale": ["scales", "settled", "told"],
        "dead": ["norms", "told"],
        "flat": ["first"],
    }
    second.load_state_dict(json.loads(json.dumps(state)))
    assert [second.observe(step, measured)[1] for step in range(220, 300)] == [{}] * 80
