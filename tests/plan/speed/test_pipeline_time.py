"""The pipeline's schedule against its simulation."""

from __future__ import annotations

import pytest

from scaletrain_cli.plan.speed.pipeline import one_forward_one_backward


def simulated(stages: list[float], micro_batches: int) -> float:
    """1F1B, event by event: a third of each stage's time forward, the rest backward."""
    p = len(stages)
    order = []
    for stage in range(p):
        warm = min(micro_batches, p - stage - 1)
        steps = [("f", i) for i in range(warm)]
        for i in range(micro_batches - warm):
            steps += [("f", warm + i), ("b", i)]
        order.append(steps + [("b", i) for i in range(micro_batches - warm, micro_batches)])
    done: dict[tuple[str, int, int], float] = {}
    free, position = [0.0] * p, [0] * p
    while any(position[stage] < len(order[stage]) for stage in range(p)):
        for stage in range(p):
            while position[stage] < len(order[stage]):
                kind, micro_batch = order[stage][position[stage]]
                if kind == "f":
                    needs = ("f", micro_batch, stage - 1) if stage else None
                else:
                    needs = ("b", micro_batch, stage + 1) if stage < p - 1 else ("f", micro_batch, stage)
                if needs is not None and needs not in done:
                    break
                begin = max(free[stage], done[needs] if needs else 0.0)
                free[stage] = begin + stages[stage] * (1 / 3 if kind == "f" else 2 / 3)
                done[kind, micro_batch, stage] = free[stage]
                position[stage] += 1
    return max(free)


@pytest.mark.parametrize(
    "stages", [[1.0] * 4, [1.0, 1.0, 1.0, 1.6], [1.2, 1.0, 1.0, 1.0], [0.7, 1.3, 0.9, 1.1, 1.0, 1.0, 0.8, 1.4]]
)
@pytest.mark.parametrize("micro_batches", [8, 16, 64])
def test_unequal_stages_take_what_their_simulation_takes(stages: list[float], micro_batches: int) -> None:
    schedule = one_forward_one_backward(stages, micro_batches)
    assert schedule.busy + schedule.bubble == pytest.approx(simulated(stages, micro_batches), rel=0.06)


def test_the_bubble_of_equal_stages_is_that_of_the_paper() -> None:
    schedule = one_forward_one_backward([2.0] * 8, 32)
    assert schedule.bubble / schedule.busy == pytest.approx(7 / 32)
    assert one_forward_one_backward([2.0] * 8, 32, chunks=4).bubble == pytest.approx(schedule.bubble / 4)
