import itertools
import pickle
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scaletrain_cli.data.stages import (
    MixtureStage,
    batch_number,
    keeps_batches,
    merged_skip_ranges,
    planned_stages,
    shares_of,
    sources_before,
    stages_of_run,
)
from scaletrain_cli.engine.data.sample_order import (
    mixture_of_run,
    sample_at,
    sample_order,
    samples_at,
)
from scaletrain_cli.errors import InfeasibleError
from scaletrain_cli.event_texts import event_sentence
from scaletrain_cli.launch.submit import create_run
from scaletrain_cli.rundir.journal import read_events, record_event
from scaletrain_cli.rundir.paths import RunDir
from scaletrain_cli.rundir.record import RunRecord
from scaletrain_cli.spec import DataSpec
from scaletrain_cli.spec.sources import SourceSpec
from tests.data.test_mixture import webster
from tests.launch.conftest import make_plan, make_spec

SIZES = {"web": 700, "code": 90, "books": 333}


def sources(**given: dict[str, float]) -> list[SourceSpec]:
    return [SourceSpec(name=name, path=f"/data/{name}", **share) for name, share in given.items()]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"web": {"weight": 6}, "code": {"weight": 2}, "books": {"weight": 0}}, {"web": 0.75, "code": 0.25}),
        ({"web": {"weight": 3}, "code": {"epochs": 2}, "books": {"weight": 1}}, {"web": 0.615, "code": 0.18}),
        (
            {"web": {"epochs": 1}, "code": {"epochs": 2}, "books": {"epochs": 1}},
            {"web": 700 / 1213, "code": 180 / 1213},
        ),
        ({"web": {"epochs": 0.1}}, {"web": 1.0}),
    ],
)
def test_weights_share_what_epochs_leave(given: dict[str, Any], expected: dict[str, float]) -> None:
    shares = shares_of(sources(**given), SIZES, samples=1000)
    assert sum(shares.values()) == pytest.approx(1)
    assert {name: shares[name] for name in expected} == pytest.approx(expected)


def test_epochs_that_leave_nothing_for_the_weights_are_refused_with_the_figures() -> None:
    given = sources(web={"epochs": 1.5}, code={"weight": 1})
    with pytest.raises(InfeasibleError, match=r"web take 1,?050 samples and the run has 1,?050"):
        shares_of(given, SIZES, samples=1050)


def data(**given: Any) -> DataSpec:
    found = [{"name": name, "path": f"/data/{name}", "weight": 1} for name in SIZES]
    return DataSpec.model_validate({"sources": found, **given})


def test_stages_begin_at_the_first_sample_of_their_step() -> None:
    stages = [{"start": 5, "weights": {"web": 3, "code": 1}}, {"start": 0.9, "weights": {"code": 2}}]
    found = planned_stages(data(stages=stages), SIZES, total_steps=100, global_batch_size=16)
    assert [stage.first for stage in found] == [0, 4 * 16, 90 * 16]
    assert [stage.shares for stage in found[1:]] == [{"web": 0.75, "code": 0.25}, {"code": 1.0}]


STAGES = [
    MixtureStage(0, {"web": 0.7, "code": 0.2, "books": 0.1}),
    MixtureStage(4_000, {"web": 0.2, "code": 0.3, "books": 0.5}),
]


def test_samples_are_those_of_websters_method_and_no_sequence_comes_twice_in_an_epoch() -> None:
    order, samples = sample_order(7, SIZES, STAGES), 10_000
    expected = webster([7, 2, 1], 4_000) + webster([2, 3, 5], samples - 4_000)
    starts, read = dict(zip(SIZES, (0, 700, 790), strict=True)), {name: list[int]() for name in SIZES}
    for sample in range(samples):
        index = order(sample)
        name = list(SIZES)[expected[sample]]
        assert starts[name] <= index < starts[name] + SIZES[name]
        read[name].append(index - starts[name])
    for name, size in SIZES.items():
        for epoch in range(0, len(read[name]), size):
            part = read[name][epoch : epoch + size]
            assert len(set(part)) == len(part)
        assert len({tuple(read[name][epoch : epoch + size]) for epoch in range(0, len(read[name]), size)}) > 1
    for stage, begin, end in ((STAGES[0], 0, 4_000), (STAGES[1], 4_000, samples)):
        counts = Counter(expected[begin:end])
        shares = [counts[number] / (end - begin) for number in range(3)]
        assert shares == pytest.approx([stage.shares[name] for name in SIZES], abs=0.001)


def test_the_samples_of_a_range_are_those_of_each_of_them() -> None:
    order = sample_order(7, SIZES, STAGES)
    for first, count in ((0, 300), (3_990, 25), (4_000, 700), (9_999, 1), (123_456, 64)):
        each = [order(sample) for sample in range(first, first + count)]
        assert sorted(order.sequences_of(first, count).tolist()) == sorted(each)


def test_the_first_source_has_the_order_of_a_run_without_others() -> None:
    order = sample_order(7, SIZES, [MixtureStage(0, {"web": 1.0}), MixtureStage(900, {"web": 0.5, "code": 0.5})])
    assert [order(sample) for sample in range(900)] == [sample_at(n, seed=7, samples=700) for n in range(900)]
    later = [index for index in map(order, range(900, 1100)) if index < 700]
    assert later == [sample_at(n, seed=7, samples=700) for n in range(900, 1000)]


def test_sources_of_equal_size_have_orders_of_their_own() -> None:
    found = sample_order(3, {"a": 500, "b": 500}, [MixtureStage(0, {"a": 0.5, "b": 0.5})])
    first, second = ([found(n) % 500 for n in range(side, 1000, 2)] for side in (0, 1))
    assert sorted(first) == sorted(second) == list(range(500))
    assert sum(a == b for a, b in zip(first, second, strict=True)) < 10


def test_an_order_is_small_when_it_is_sent_to_another_process() -> None:
    order = sample_order(7, SIZES, STAGES)
    expected = [order(sample) for sample in range(100)]
    sent = pickle.dumps(order)
    assert len(sent) < 2_000
    assert [pickle.loads(sent)(sample) for sample in range(100)] == expected


def spec_of(**weights: float) -> Any:
    given = ", ".join(f"{{name: {name}, path: /data/{name}, weight: {weight}}}" for name, weight in weights.items())
    return make_spec(
        "data.source=null", f"data.sources=[{given}]", "training.global_batch_size=16", "training.steps=1000"
    )


@pytest.fixture
def run() -> tuple[RunDir, RunRecord]:
    spec = spec_of(web=1, code=1)
    made = create_run(spec, make_plan(spec), "r1")
    return made.run, made.record


def stages_of(run: tuple[RunDir, RunRecord], batch: int, **weights: float) -> list[tuple[int, dict[str, float]]]:
    """Return the stages as an attempt finds them that continues with this batch and has these weights in its spec."""
    folder, record = run
    revised = RunRecord(**{**vars(record), "spec": spec_of(**weights)})
    sizes = {name: SIZES[name] for name in weights}
    found = mixture_of_run(folder, revised, sizes, batch).stages
    spec = revised.spec  # and so other commands find them in the events
    batch_size = spec.training.global_batch_size
    assert stages_of_run(spec.data, sizes, spec.total_steps, batch_size, read_events(folder)) == found
    return [tuple(stage) for stage in found]  # type: ignore[misc]


HALF, MOST, LEAST = ({"web": share, "code": 1 - share} for share in (0.5, 0.75, 0.25))


def test_a_change_counts_from_the_batch_of_the_first_attempt_with_it(run: tuple[RunDir, RunRecord]) -> None:
    assert stages_of(run, 1, web=1, code=1) == [(0, HALF)]
    assert stages_of(run, 61, web=1, code=1) == [(0, HALF)]
    assert stages_of(run, 101, web=3, code=1) == [(0, HALF), (1600, MOST)]
    for batch in (101, 81, 1, 500):  # of later attempts, from older checkpoints too
        assert stages_of(run, batch, web=3, code=1) == [(0, HALF), (1600, MOST)]
    # changed again at an older checkpoint: the change before was not trained up to there
    assert stages_of(run, 81, web=1, code=3) == [(0, HALF), (1280, LEAST)]
    assert stages_of(run, 400, web=1, code=1) == [(0, HALF), (1280, LEAST), (6384, HALF)]
    events = [event for event in read_events(run[0]) if event["event"] == "mixture"]
    assert [event["first_sample"] for event in events] == [0, 1600, 1280, 6384]
    assert event_sentence(events[1]) == "from batch 101 (sample 1,600) on: web 75 %, code 25 %"


def test_a_source_that_is_added_later_moves_no_earlier_sample(run: tuple[RunDir, RunRecord]) -> None:
    assert stages_of(run, 1, web=1, code=1) == [(0, HALF)]
    third = {"web": 0.25, "code": 0.25, "books": 0.5}
    assert stages_of(run, 101, web=1, code=1, books=2) == [(0, HALF), (1600, third)]
    assert stages_of(run, 201, web=1, code=1, books=0) == [(0, HALF), (1600, third), (3200, HALF)]


def test_a_run_with_one_source_records_no_mixture_until_a_second_one_is_added(run: tuple[RunDir, RunRecord]) -> None:
    assert stages_of(run, 1, web=1) == [(0, {"web": 1.0})]
    assert stages_of(run, 51, web=1) == [(0, {"web": 1.0})]
    assert not [event for event in read_events(run[0]) if event["event"] == "mixture"]
    assert stages_of(run, 51, web=1, code=1) == [(0, {"web": 1.0}), (800, HALF)]
    assert stages_of(run, 11, web=1, code=1) == [(0, {"web": 1.0}), (800, HALF)]


def test_a_run_that_begins_again_from_scratch_begins_with_its_present_mixture(run: tuple[RunDir, RunRecord]) -> None:
    assert stages_of(run, 1, web=1, code=1) == [(0, HALF)]
    assert stages_of(run, 101, web=3, code=1) == [(0, HALF), (1600, MOST)]
    record_event(run[0], "from-scratch")
    assert stages_of(run, 1, web=3, code=1) == [(0, MOST)]
    assert stages_of(run, 51, web=3, code=1) == [(0, MOST)]


def test_a_source_that_was_added_and_gave_no_sample_may_go_again(run: tuple[RunDir, RunRecord]) -> None:
    assert stages_of(run, 1, web=1, code=1) == [(0, HALF)]
    stages_of(run, 101, web=1, code=1, books=2)
    assert sources_before(read_events(run[0]), 1600, "web") == {"web", "code"}
    assert sources_before(read_events(run[0]), 1601, "web") == {"web", "code", "books"}
    assert stages_of(run, 101, web=1, code=1) == [(0, HALF)]


def test_the_validation_loss_keeps_the_shares_that_were_first_planned(run: tuple[RunDir, RunRecord]) -> None:
    folder, record = run
    stages_of(run, 1, web=1, code=1)
    revised = RunRecord(**{**vars(record), "spec": spec_of(web=1, code=1, books=8)})
    found = mixture_of_run(folder, revised, SIZES, 11)
    assert found.validation_shares(SIZES) == {"web": 0.5, "code": 0.5, "books": 0.0}


def test_the_validation_loss_keeps_its_shares_when_the_run_becomes_longer(run: tuple[RunDir, RunRecord]) -> None:
    folder, record = run
    begun = {"start": 51, "weights": {"code": 1}}
    shares = []
    for steps, batch in ((100, 1), (200, 101)):
        spec = spec_of(web=1, code=0)
        spec = spec.model_copy(
            update={
                "data": data(sources=[each.model_dump() for each in spec.data.sources], stages=[begun]),
                "training": spec.training.model_copy(update={"steps": steps}),
            }
        )
        found = mixture_of_run(folder, RunRecord(**{**vars(record), "spec": spec}), SIZES, batch)
        shares.append(found.validation_shares(SIZES))
    assert shares[0] == shares[1] == {"web": 0.5, "code": 0.5, "books": 0.0}


def test_a_mixture_that_is_replaced_before_the_first_step_leaves_no_trace(run: tuple[RunDir, RunRecord]) -> None:
    folder, record = run
    stages_of(run, 1, web=1, code=1)
    assert stages_of(run, 1, books=1, code=3) == [(0, {"books": 0.25, "code": 0.75})]
    revised = RunRecord(**{**vars(record), "spec": spec_of(books=1, code=3)})
    sizes = {name: SIZES[name] for name in ("books", "code")}
    for batch in (1, 7):
        shares = mixture_of_run(folder, revised, sizes, batch).validation_shares(sizes)
        assert shares == {"books": 0.25, "code": 0.75}


@given(seed=st.integers(0, 2**63 - 1), samples=st.integers(1, 300))
def test_every_epoch_visits_every_sample_once(seed: int, samples: int) -> None:
    for epoch in range(3):
        seen = [sample_at(epoch * samples + i, seed=seed, samples=samples) for i in range(samples)]
        assert sorted(seen) == list(range(samples))


def test_epochs_and_seeds_have_different_orders() -> None:
    def order(seed: int, epoch: int) -> list[int]:
        return [sample_at(epoch * 500 + i, seed=seed, samples=500) for i in range(500)]

    assert len({tuple(order(seed, epoch)) for seed in (1, 2, 3) for epoch in (0, 1)}) == 6


@pytest.mark.parametrize(("samples", "seed"), [(1, 0), (2, 3), (7, 1), (1000, 2**63), (70_001, 5)])
def test_many_samples_are_those_of_each_position(samples: int, seed: int) -> None:
    for first, count in ((0, 50), (samples - 1, 3 * min(samples, 40)), (10**12, 33)):
        expected = [sample_at(first + place, seed=seed, samples=samples) for place in range(count)]
        assert samples_at(first, count, seed=seed, samples=samples).tolist() == expected


window = st.tuples(st.integers(1, 60), st.integers(0, 12)).map(lambda pair: (pair[0], sum(pair)))
windows = st.lists(window, max_size=8)


def batches_of(found: list[tuple[int, int]] | tuple[tuple[int, int], ...]) -> set[int]:
    return {number for first, last in found for number in range(first, last + 1)}


@given(windows)
def test_steps_take_the_batches_outside_of_skip_ranges_in_order(found: list[tuple[int, int]]) -> None:
    skipped = batches_of(found)
    allowed = [number for number in range(1, 400) if number not in skipped]
    assert [batch_number(step, merged_skip_ranges(found)) for step in range(1, 200)] == allowed[:199]


@given(windows)
def test_merged_skip_ranges_hold_the_same_batches_in_order_and_are_not_adjacent(found: list[tuple[int, int]]) -> None:
    few = merged_skip_ranges(found)
    assert batches_of(few) == batches_of(found)
    assert all(before[1] + 1 < after[0] for before, after in itertools.pairwise(few))
    assert merged_skip_ranges(few) == few


@given(windows, window, st.integers(1, 200))
def test_a_later_skip_range_does_not_change_earlier_steps(
    found: list[tuple[int, int]], ahead: tuple[int, int], step: int
) -> None:
    before = batch_number(step, merged_skip_ranges(found))
    if before < ahead[0]:
        assert batch_number(step, merged_skip_ranges([*found, ahead])) == before


def test_ranges_keep_the_batches_of_a_checkpoint_if_its_steps_have_the_same_ones() -> None:
    assert keeps_batches(0, [], [(1, 3)])
    assert keeps_batches(5, [], [(6, 6)])
    assert not keeps_batches(5, [], [(5, 5)])
    assert keeps_batches(5, [(2, 3)], [(2, 2), (3, 3), (8, 8)])  # trained are 1, 4, 5, 6, 7
    assert not keeps_batches(5, [(2, 3)], [(2, 3), (7, 7)])
    assert not keeps_batches(5, [(2, 3)], [(3, 4)])
    assert not keeps_batches(5, [(2, 3)], [])
    assert keeps_batches(5, [(2, 3), (90, 99)], [(2, 3)])
    assert keeps_batches(5, iter([(2, 3)]), iter([(2, 3)]))  # as those of a checkpoint's state are given
