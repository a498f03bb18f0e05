"""``--set a.b=c``: the value is parsed as YAML, and errors name the option instead of a line."""

import pytest

from scaletrain_cli.errors import UsageError
from scaletrain_cli.spec import override_spec
from scaletrain_cli.spec.json_schema import json_schema
from scaletrain_cli.spec.source import MAPPINGS, variants
from tests.spec.samples import SPEC, load, problem, problems


def test_overrides_replace_keys_of_the_file_and_the_last_one_wins() -> None:
    assert load(SPEC, "training.steps=20", "training.steps=30").training.steps == 30


def test_an_override_creates_missing_sections() -> None:
    spec = load(SPEC, "cluster.slurm.extra.exclusive=true", "tracking.wandb.mode=offline")
    assert spec.cluster.slurm.extra == {"exclusive": True}
    assert spec.tracking.trackers["wandb"].mode == "offline"


@pytest.mark.parametrize(
    ("override", "section", "expected"),
    [
        ("training.optimizer.lr=3e-4", "training.optimizer.lr", 3e-4),
        ("training.steps=1_000", "training.steps", 1000),
        ("training.optimizer.betas=[0.8, 0.9]", "training.optimizer.betas", (0.8, 0.9)),
        ("training.optimizer={lr: 1e-3}", "training.optimizer.lr", 1e-3),
        ("name=a=b", "name", "a=b"),
        ('name="a: b # c"', "name", "a: b # c"),
        ("name=$(rm -rf /)", "name", "$(rm -rf /)"),
        (" training.steps = 7", "training.steps", 7),
        ("cluster.slurm.time=24:00:00", "cluster.slurm.time", 86400.0),
        ("cluster.gpu=h100-sxm-80gb", "cluster.gpu", "h100-sxm-80gb"),
    ],
)
def test_a_value_is_read_as_yaml(override: str, section: str, expected: object) -> None:
    value: object = load(SPEC, override)
    for part in section.split("."):
        value = getattr(value, part)
    assert value == expected


def test_null_unsets_a_key() -> None:
    spec = load(SPEC, "training.steps=null", "training.tokens=1M")
    assert spec.training.tokens == 10**6
    assert load(SPEC + "cluster: {gpus_per_node: 3}\n", "cluster=").cluster.gpus_per_node == 1


@pytest.mark.parametrize("override", ["training.steps", "=3", "", "a..b=3", ".a=3", "a.=3"])
def test_an_invalid_override_is_rejected_with_an_example(override: str) -> None:
    assert problem(SPEC, override).startswith("--set: must look like section.key=value, as in training.steps=100, not")


@pytest.mark.parametrize("override", ["name=a: b", "name=[", "name='", "name=\t", "name=*a", "name=@a", "name=\x00"])
def test_an_override_that_is_not_yaml_is_rejected(override: str) -> None:
    assert all(one.where == "--set" for one in problems(SPEC, override))


def test_an_override_below_a_value_is_rejected() -> None:
    assert "cannot be set: training.steps is not a section." in problem(SPEC, "training.steps.a=3")


def test_problems_name_the_option_or_the_line_that_set_the_key() -> None:
    text = SPEC + "layout: {zero_stage: 9}\n"
    assert [one.where for one in problems(text, "layout.data_parallel=0")] == ["--set", "run.yaml:18"]
    assert [one.where for one in problems(text, "layout={zero_stage: 8}")] == ["--set"]


def test_keys_that_later_overrides_leave_keep_the_lines_of_the_file() -> None:
    before = load(SPEC, "training.seed=3")
    after = override_spec(before, ["training.steps=7", "checkpoint.every=2"], file="the drills' spec")
    changed = {"training.steps": "--set", "checkpoint.every": "--set", "training.seed": "--set"}
    assert {key: place for key, place in after.lines.items() if key in changed} == changed
    kept = {key: place for key, place in before.lines.items() if key not in changed}
    assert kept.items() <= after.lines.items()
    assert all(place.startswith("run.yaml:") for place in kept.values())
    assert after.where("training.optimizer.lr").startswith("run.yaml:"), "and errors name it, too"


def test_an_item_of_a_list_can_be_set() -> None:
    two = "data.sources=[{name: a, path: /a, weight: 1}, {name: b, path: /b, weight: 1}]"
    spec = load(SPEC, "data.source=null", two, "data.sources.1.weight=3")
    assert [source.weight for source in spec.data.sources] == [1, 3]
    assert "data.sources has 2 items, numbered from 0." in problem(
        SPEC, "data.source=null", two, "data.sources.2.weight=3"
    )


def mappings(schema: object, name: str = "") -> set[str]:
    """Return the names of properties of a JSON schema that are mappings with names that the user chooses."""
    if isinstance(schema, list):
        return set().union(*(mappings(part, name) for part in schema))
    if not isinstance(schema, dict):
        return set()
    found = {name} if isinstance(schema.get("additionalProperties"), dict) or "patternProperties" in schema else set()
    for key, part in schema.items():
        inner = part.items() if key in ("properties", "$defs") else [(name, part)]
        found |= set().union(*(mappings(value, inner_name) for inner_name, value in inner))
    return found


def test_null_removes_an_entry_of_a_mapping() -> None:
    spec = load(f"{SPEC}env: {{A: x, B: y}}\n", "env.A=null", "env.C=null", "env.D=")
    assert spec.env == {"B": "y"}
    assert (
        load(SPEC, "cluster.slurm.extra.exclusive=true", "cluster.slurm.extra.exclusive=null").cluster.slurm.extra == {}
    )
    assert "env.B = null: must be text." in problem(f"{SPEC}env: {{B: null}}\n"), "in a file it may be a slip"
    assert mappings(json_schema()) - {""} == MAPPINGS


def test_each_value_is_an_override() -> None:
    assert variants(["layout.zero_stage=1, 2,3"]) == [
        ("layout.zero_stage=1",),
        ("layout.zero_stage=2",),
        ("layout.zero_stage=3",),
    ]
    assert variants([]) == [()]


def test_several_settings_are_combined() -> None:
    assert variants(["a=1,2", "b=x"]) == [("a=1", "b=x"), ("a=2", "b=x")]


def test_commas_within_a_value_do_not_split_it() -> None:
    assert variants(["model={preset: a, seq_len: 8},{preset: b}"]) == [
        ("model={preset: a, seq_len: 8}",),
        ("model={preset: b}",),
    ]
    assert variants(["name='a,b',c"]) == [("name='a,b'",), ("name=c",)]


@pytest.mark.parametrize("setting", ["", "layout.zero_stage", "=1", "a=", "a=1,,2"])
def test_an_invalid_setting_is_rejected(setting: str) -> None:
    with pytest.raises(UsageError, match="--vary"):
        variants([setting])


def test_too_many_variants_are_rejected() -> None:
    with pytest.raises(UsageError, match="more than 24 variants"):
        variants(["a=1,2,3,4,5,6,7,8,9", "b=1,2,3"])
    with pytest.raises(UsageError, match="more than 24 variants"):
        variants(["a=1,2,3,4"] * 40)
