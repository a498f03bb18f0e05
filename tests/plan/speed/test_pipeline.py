"""The timeline of a pipeline is a valid schedule of the length that theory gives, and the formula agrees with it."""

import itertools
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scaletrain_cli.plan.speed.pipeline import Timeline, one_forward_one_backward, timeline


@pytest.mark.parametrize(
    ("stages", "micro_batches", "chunks"), [(1, 4, 1), (4, 8, 1), (4, 8, 2), (4, 100, 1), (16, 256, 1), (8, 64, 4)]
)
def test_equal_stages_idle_as_long_as_the_papers_say(stages: int, micro_batches: int, chunks: int) -> None:
    drawn = timeline([(1.0, 2.0)] * stages, micro_batches, chunks)
    ideal = 3.0 * (micro_batches + (stages - 1) / chunks)
    assert drawn.seconds + drawn.left_out_seconds == pytest.approx(ideal, rel=0.03)


@given(
    st.lists(st.tuples(st.floats(0.1, 3), st.floats(0.1, 3)), min_size=1, max_size=6),
    st.integers(1, 24),
    st.integers(1, 3),
)
def test_every_pass_runs_once_and_in_order(times: list[tuple[float, float]], micro_batches: int, chunks: int) -> None:
    drawn = timeline(times, micro_batches, chunks)
    chunks = 1 + max(each.chunk for each in drawn.passes)
    assert set(Counter((p.stage, p.backward, p.chunk, p.micro_batch) for p in drawn.passes).values()) == {1}
    assert len(drawn.passes) == 2 * len(times) * drawn.drawn * chunks
    _no_overlap(drawn)
    ends = {(p.stage, p.backward, p.chunk, p.micro_batch): p.start + p.seconds for p in drawn.passes}
    for each in drawn.passes:
        if each.backward:
            assert each.start >= ends[each.stage, False, each.chunk, each.micro_batch] - 1e-9
        elif each.stage:
            assert each.start >= ends[each.stage - 1, False, each.chunk, each.micro_batch] - 1e-9


def test_a_timeline_leaves_out_the_middle_of_a_long_step() -> None:
    drawn = timeline([(1.0, 1.0)] * 4, 1000)
    assert (drawn.drawn, drawn.micro_batches, drawn.left_out_seconds) == (8, 1000, 2.0 * 992)


def _no_overlap(drawn: Timeline) -> None:
    for stage in range(drawn.stages):
        passes = sorted((p for p in drawn.passes if p.stage == stage), key=lambda p: p.start)
        for one, next_one in itertools.pairwise(passes):
            assert next_one.start >= one.start + one.seconds - 1e-9


@pytest.mark.parametrize(
    "stages", [[1.0] * 4, [1.0, 1.0, 1.0, 1.6], [1.2, 1.0, 1.0, 1.0], [0.7, 1.3, 0.9, 1.1, 1.0, 1.0, 0.8, 1.4]]
)
@pytest.mark.parametrize("micro_batches", [8, 16, 64])
def test_the_formula_for_unequal_stages_equals_their_timeline(stages: list[float], micro_batches: int) -> None:
    schedule = one_forward_one_backward(stages, micro_batches)
    drawn = timeline([(seconds / 3, 2 * seconds / 3) for seconds in stages], micro_batches)
    assert schedule.busy + schedule.bubble == pytest.approx(drawn.seconds + drawn.left_out_seconds, rel=0.06)


def test_the_bubble_of_equal_stages_is_that_of_the_paper() -> None:
    schedule = one_forward_one_backward([2.0] * 8, 32)
    assert schedule.bubble / schedule.busy == pytest.approx(7 / 32)
    assert one_forward_one_backward([2.0] * 8, 32, chunks=4).bubble == pytest.approx(schedule.bubble / 4)
