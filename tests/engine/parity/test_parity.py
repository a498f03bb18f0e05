"""Every layout trains the model that one process trains: a part of the table of `make parity`."""

from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch

from tests.engine.parity.comparison import BF16, FP32, Difference, assert_same, difference
from tests.engine.parity.layouts import LayoutRun, stray_activations, stray_state_bytes, train_in_layout
from tests.engine.parity.reference import Trained, train_alone
from tests.engine.parity.rows import LOCAL_SGD, MUON, Row, families, features, grid, in_bf16, rings
from tests.engine.parity.table import ACTIVATIONS

STEPS = 4  # two of the warm-up, two after it
# Each axis, ZeRO stages 0, 1 and 3 (FEATURES have 2), both numbers of micro-batches, every way to recompute, on at most
# four ranks.
CUT = [
    Row(0, data=2, accumulation=4),
    Row(0, tensor=2, sequence=2, checkpointing="full"),
    Row(1, data=2, pipeline=2, accumulation=4, checkpointing="full"),
    Row(3, data=2, tensor=2, checkpointing="selective"),
]
EVERY_AXIS = Row(1, tensor=2, pipeline=2, sequence=2, accumulation=4, checkpointing="selective")
NAMED = {row.name: row for row in [*features(), *families(), *rings()]}
GROUPS_OF_EXPERTS = NAMED["zero2 dp2 sp2 groups of experts"].overrides
FEATURES = [
    NAMED["zero2 dp2 sp2 experts"],
    replace(NAMED["zero3 dp2 ga4 offload both"], accumulation=2),
    replace(NAMED["zero3 dp2 ga4 full dropout"], accumulation=2),
    NAMED["zero3 dp2 tp2 muon"],
    NAMED["zero0 dp2 local sgd"],
    replace(NAMED["zero2 dp2 sp2 cp2"], data=1),
    replace(NAMED["zero3 dp2 tp2 experts"], overrides=GROUPS_OF_EXPERTS, title="groups of experts"),
]
_ALSO_RESUMED = (
    "zero0 dp2 local sgd",
    "zero3 dp2 tp2 muon",
    *("zero2 dp2 sp2 groups of experts", "zero1 dp2 tp2 muon experts", "zero2 dp4 sp2 local sgd", "zero3 cp4"),
    *("zero3 dp4 groups of shards", "zero3 dp4 second weights", "zero3 dp2 sp2 cp2 local sgd muon"),
)
RESUMED = [
    CUT[2],
    FEATURES[2],
    pytest.param(CUT[3], marks=pytest.mark.long),
    pytest.param(EVERY_AXIS, marks=pytest.mark.long),
]
RESUMED += [pytest.param(NAMED[name], marks=pytest.mark.long) for name in _ALSO_RESUMED]
ROWS = [*CUT, *FEATURES]
IN_LONG = (
    "zero1 tp2 pp2 sp2 ga4 dropout, zero2 dp2 offload optimizer, zero2 tp2 ga4 label smoothing, zero3 dp2 tp2 olmo2, "
    "zero1 dp2 pp2 ga4 split, zero3 dp2 sp2 document mask, zero1 tp2 pp2 sp2 ga4 deepseek, zero3 dp2 tp2 deepseek, "
    "zero1 tp2 pp2 sp2 ga4 muon, zero1 dp2 tp2 muon experts, zero1 dp2 tp2 muon gpt, "
    "zero1 dp2 sp2 experts of some capacity, zero1 tp2 pp2 sp2 ga4 groups of experts, zero3 dp2 tp2 phi3 muon, "
    "zero3 dp4 tp2 local sgd, zero2 dp2 tp2 local sgd muon, zero3 cp4, zero2 dp2 sp2 cp2, "
    "zero1 tp2 pp2 cp2 ga4 selective, zero2 dp2 cp2 groups of experts, zero2 dp2 sp2 cp2 deepseek, "
    "zero3 dp4 groups of shards, zero2 dp2 cp2 groups of shards, zero3 tp2 cp2 muon, zero1 dp2 cp2 local sgd, "
    "zero3 dp2 sp2 cp2 local sgd muon, zero3 dp4 second weights, zero3 dp4 ga2 full second weights"
).split(", ")
LONG = [
    EVERY_AXIS,
    Row(2, data=2, sequence=2, accumulation=4),
    Row(1, data=2, tensor=2, checkpointing="selective"),
    *(row for name, row in NAMED.items() if "documents" in name),
    *(NAMED[name] for name in IN_LONG),
]
rows = pytest.mark.parametrize(
    "row", [*ROWS, *(pytest.param(row, marks=pytest.mark.long) for row in LONG)], ids=lambda row: row.name
)


@pytest.fixture(scope="session")
def alone(dataset: Path):
    @cache
    def train(row: Row) -> Trained:
        return train_alone(row.spec(dataset, STEPS))

    return train


@pytest.fixture(scope="session")
def undisturbed(dataset: Path, tmp_path_factory: pytest.TempPathFactory):
    @cache
    def train(row: Row, steps: int) -> LayoutRun:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("SCALETRAIN_RUNS", str(tmp_path_factory.mktemp("undisturbed")))
            return train_in_layout(row.spec(dataset, steps))

    return lambda row, steps=STEPS: train(row, steps)


@rows
def test_a_layout_trains_the_model_that_one_process_trains(row: Row, alone, undisturbed) -> None:
    found = difference(undisturbed(row).trained, alone(row.reference))
    assert found.within(FP32), found


@rows
def test_each_rank_holds_the_model_states_that_were_planned(row: Row, undisturbed) -> None:
    assert stray_state_bytes(undisturbed(row)) == 0


@rows
def test_each_stage_saves_the_activations_that_were_planned(row: Row, undisturbed) -> None:
    assert abs(stray_activations(undisturbed(row))) <= ACTIVATIONS


@pytest.mark.parametrize(
    "row", [in_bf16()[0], pytest.param(in_bf16()[1], marks=pytest.mark.long)], ids=lambda row: row.name
)
def test_bf16_differs_by_rounding_alone(row: Row, alone, undisturbed) -> None:
    found = difference(undisturbed(row).trained, alone(row.reference))
    assert found.within(BF16), found
    assert not found.within(FP32)


def test_local_sgd_of_two_ranks_is_equal_to_two_plain_processes(alone, undisturbed) -> None:
    row = NAMED["zero0 dp2 local sgd"]
    ours, plain = undisturbed(row).trained, alone(row.reference)
    assert ours.losses == plain.losses
    assert all(torch.equal(ours.weights[name], values) for name, values in plain.weights.items())


@pytest.mark.long
def test_muon_with_iterations_in_bf16_differs_from_torch_by_rounding_alone(alone, undisturbed) -> None:
    row = replace(NAMED["zero3 dp2 tp2 muon"], overrides=(MUON[0].replace("fp32}}", "bf16}}"),))
    found = difference(undisturbed(row).trained, alone(row.reference))
    assert found.within(Difference(loss=1e-4, norm=1e-3, weight=1e-3)), found


@pytest.mark.parametrize("row", RESUMED, ids=lambda row: row.name)
def test_a_layout_resumed_in_other_processes_continues_bit_exactly(row: Row, dataset: Path, undisturbed) -> None:
    # Groups of local SGD synchronize at steps 3 and 6: each has weights of its own again, and all the outer momentum.
    after, steps = (4, 7) if LOCAL_SGD[0] in row.overrides else (1, STEPS)
    resumed, whole = train_in_layout(row.spec(dataset, steps), after).trained, undisturbed(row, steps).trained
    assert_same(resumed, whole)


def test_the_reference_clips_at_some_steps_and_not_at_others(dataset: Path, alone) -> None:
    threshold = Row().spec(dataset, STEPS).training.gradient_clipping
    assert min(alone(Row()).norms) < threshold < max(alone(Row()).norms)


def test_every_row_of_the_table_has_a_name_of_its_own() -> None:
    table = [*grid(), *rings(), *features(), *families(), *in_bf16()]
    assert len(table) == len({row.name for row in table})
    assert {row.ranks for row in table} == {2, 4, 8}


def test_a_wrong_weight_is_a_difference(alone) -> None:
    right = alone(Row())
    wrong = {**right.weights, "model.norm.weight": right.weights["model.norm.weight"] + 2e-5}
    assert difference(right, right).within(FP32)
    assert not difference(Trained(right.losses, right.norms, wrong), right).within(FP32)
