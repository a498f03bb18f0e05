import json

import pytest

from scaletrain_cli.errors import SpecError
from scaletrain_cli.spec import RunSpec, changed_keys, override_spec
from tests.spec.samples import SPEC, load, schema_validator

SLURM = "cluster.scheduler=slurm"
RANGE = "cluster.nodes={min: 2, max: 8}"


def rejection(*overrides: str) -> str:
    with pytest.raises(SpecError) as caught:
        load(SPEC, *overrides)
    return "\n".join(map(str, caught.value.problems))


def test_a_range_is_planned_on_its_largest_size_at_first() -> None:
    cluster = load(SPEC, SLURM, RANGE).cluster
    assert cluster.nodes == 8
    assert list(cluster.node_range.sizes) == [2, 3, 4, 5, 6, 7, 8]
    assert (cluster.node_range.grow, cluster.node_range.check_every, cluster.node_range.grow_every) == (True, 300, 1800)
    assert load(SPEC, SLURM, "cluster.nodes=8").cluster.node_range is None


def test_a_range_round_trips_through_json_with_the_size_of_the_current_plan() -> None:
    spec = load(SPEC, SLURM, RANGE)
    smaller = spec.with_changes("cluster", nodes=4)
    dumped = json.loads(json.dumps(smaller.model_dump(mode="json", by_alias=True)))
    assert dumped["cluster"]["nodes"] == {
        **{"min": 2, "max": 8, "planned": 4},
        **{"grow": True, "check_every": 300.0, "grow_every": 1800.0},
    }
    assert "node_range" not in dumped["cluster"]
    assert RunSpec.model_validate(dumped) == smaller
    assert changed_keys(spec, smaller) == {"cluster.nodes.planned": ("8", "4")}


def test_one_override_replaces_the_range_or_a_part_of_it() -> None:
    spec = load(SPEC, SLURM, RANGE)
    fixed = override_spec(spec, ["cluster.nodes=4"], file="run.json").cluster
    assert (fixed.nodes, fixed.node_range) == (4, None)
    narrower = override_spec(spec, ["cluster.nodes.max=6"], file="run.json").cluster
    assert (narrower.nodes, narrower.node_range and narrower.node_range.max) == (6, 6)


@pytest.mark.parametrize(
    ("table", "expected"),
    [
        ("{min: 8, max: 2}", "cluster.nodes.min: must be below nodes.max = 2. For one size, write nodes: 2."),
        ("{min: 4, max: 4}", "cluster.nodes.min: must be below nodes.max = 4."),
        ("{min: 0, max: 4}", "cluster.nodes.min = 0: must be at least 1."),
        ("{min: true, max: 4}", "cluster.nodes.min = true: must be a whole number."),
        ("{min: 2}", "cluster.nodes.max: is missing."),
        ("{min: 2, max: 4, gro: 1}", "cluster.nodes.gro = 1: unknown key; known keys: min, max, grow, check_every"),
        ("{min: 2, max: 4, check_every: 0s}", "cluster.nodes.check_every = 0s: must be above 0."),
        ("{min: 1, max: 1000}", "cluster.nodes.min: must be at least 745 with nodes.max = 1000: each size is planned."),
        ("[2, 4]", "cluster.nodes = [2, 4]: must be a whole number."),
    ],
)
def test_a_wrong_range_is_rejected_with_what_is_allowed(table: str, expected: str) -> None:
    assert expected in rejection(SLURM, f"cluster.nodes={table}")


def test_a_range_is_rejected_where_the_scheduler_starts_all_nodes_or_none() -> None:
    kubernetes = rejection("cluster.scheduler=kubernetes", RANGE)
    assert "must be one number with scheduler: kubernetes, because partial admission of Kueue" in kubernetes
    assert "must be 1 with scheduler: local" in rejection(RANGE)


def test_a_range_is_rejected_with_an_optimizer_whose_states_keep_their_layout() -> None:
    assert "cluster.nodes = 8: must be one number with optimizer.name: adamw_8bit" in rejection(
        SLURM, RANGE, "training.optimizer.name=adamw_8bit"
    )


def test_the_internal_field_is_not_a_key_of_the_file() -> None:
    shown = rejection(SLURM, "cluster.node_range={min: 2, max: 4}")
    assert "cluster.node_range: unknown key." in shown
    assert "node_range," not in shown


@pytest.mark.parametrize(
    ("nodes", "valid"),
    [
        (2, True),
        ({"min": 2, "max": 8}, True),
        ({"min": 2, "max": 8, "grow": False, "check_every": "1m"}, True),
        ({"min": 2}, False),
        ({"min": 0, "max": 8}, False),
        ({"min": 2, "max": 8, "step": 2}, False),
        ("2-8", False),
    ],
)
def test_the_json_schema_accepts_a_number_and_a_range(nodes: object, valid: bool) -> None:
    spec = load(SPEC, SLURM).model_dump(mode="json", by_alias=True)
    spec["cluster"]["nodes"] = nodes
    assert schema_validator().is_valid(spec) == valid
