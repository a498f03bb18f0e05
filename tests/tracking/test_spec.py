"""``tracking`` in a run spec: a list or a mapping of trackers, each with options of its own."""

import json

import jsonschema
import pytest
from pydantic import BaseModel, Field, ValidationError

from scaletrain_cli.launch.resource_checks import checks
from scaletrain_cli.spec import RunSpec
from scaletrain_cli.spec.json_schema import json_schema
from scaletrain_cli.spec.problems import field_problem
from scaletrain_cli.spec.section import RECORDED
from scaletrain_cli.spec.source import Source, parse_yaml
from tests.spec.samples import SPEC, load, problem

FORMS = [
    "tracking: [{kind: wandb, project: x}, {kind: tensorboard}]",
    "tracking:\n- wandb: {project: x}\n- tensorboard",
    "tracking:\n- wandb:\n    project: x\n- tensorboard:",
    "tracking: {wandb: {project: x}, tensorboard: }",
    "tracking: {wandb: {project: x}, tensorboard: {}, mlflow: {}}",
]


@pytest.mark.parametrize("form", FORMS)
def test_trackers_are_listed_or_named_and_the_record_is_read_back_the_same(form: str) -> None:
    spec = load(f"{SPEC}{form}\n")
    assert spec.tracking.trackers["wandb"].project == "x"
    assert spec.tracking.trackers["tensorboard"].dir == "auto"
    recorded = json.loads(json.dumps(spec.model_dump(mode="json", by_alias=True)))
    assert recorded["tracking"]["wandb"] == {"project": "x", "entity": None, "mode": "online"}
    assert RunSpec.model_validate(recorded) == spec


def test_trackers_are_off_by_default() -> None:
    assert load(SPEC).tracking.trackers == {}
    assert load(SPEC + "tracking: [jsonl, {wandb: {mode: disabled}}]\n").tracking.trackers.keys() == {"jsonl"}


def test_the_record_of_an_earlier_version_has_no_tracker_on() -> None:
    data = load(SPEC).model_dump(mode="json", by_alias=True)
    data["tracking"] = {"wandb": {"project": "scaletrain", "mode": "disabled"}, "log_every": 2}
    spec = RunSpec.model_validate(data)
    assert (spec.tracking.trackers, spec.tracking.log_every) == ({}, 2)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("tracking:\n- tensorbord\n", ":19 tracking.tensorbord: unknown key. Did you mean tensorboard? Known"),
        ("tracking:\n- wandb:\n    project: x\n    mod: on\n", "21 tracking.wandb.mod: unknown key. Did you mean mode"),
        ("tracking:\n\n- kind: wandb\n  mode: on\n", ":21 tracking.wandb.mode = on: must be 'online', 'offline' or"),
        ("tracking: {wandb: {project: a/b}}\n", "project = a/b: must match the pattern ^["),
        ("tracking: {wandb: {entity: a/b}}\n", "entity = a/b: must match the pattern ^["),
        ("tracking: [wandb, wandb]\n", "must name each tracker once, not wandb twice"),
        ("tracking: {tensorboard: {dir: 's3://b/a'}}\n", "dir = s3://b/a: must be a folder: event files are not"),
        ("tracking: [3]\n", "must be a list of trackers, each a name, `name: {option: value}`"),
        ("tracking: {wandb: 3}\n", "tracking.wandb = 3: must be a section"),
        ("tracking: {plugins: {}}\n", "tracking.plugins: unknown key"),
    ],
)
def test_an_error_in_a_tracker_s_options_is_reported_with_its_line(text: str, expected: str) -> None:
    assert expected in problem(SPEC + text)


def test_a_value_that_the_pattern_of_an_option_forbids_is_reported_with_the_pattern() -> None:
    class Options(BaseModel):
        delimiter: str = Field(pattern="^[,;]$")

    with pytest.raises(ValidationError) as wrong:
        Options(delimiter="|")
    found = field_problem(wrong.value.errors()[0], Source("run.yaml"))
    assert str(found) == "run.yaml:1 delimiter = |: must match the pattern ^[,;]$."


def test_overrides_reach_the_options_of_a_listed_tracker() -> None:
    spec = load(SPEC + "tracking: [{wandb: {project: x}}]\n", "tracking.wandb.mode=offline", "tracking.log_every=4")
    assert (spec.tracking.trackers["wandb"].project, spec.tracking.trackers["wandb"].mode) == ("x", "offline")
    assert load(SPEC, "tracking=[mlflow]", "tracking.mlflow.experiment=e").tracking.trackers["mlflow"].experiment == "e"
    assert load(SPEC + "tracking: [mlflow]\n", "tracking=[]").tracking.trackers == {}


def test_the_schema_holds_the_options_of_each_tracker_and_takes_both_forms() -> None:
    validator = jsonschema.Draft202012Validator(json_schema())
    for form in (*FORMS, "tracking: {log_every: 3}"):
        assert list(validator.iter_errors(parse_yaml(f"{SPEC}{form}\n", Source("run.yaml")))) == [], form
    wrong = parse_yaml(SPEC + "tracking: {wandb: {projekt: x}}\n", Source("run.yaml"))
    assert list(validator.iter_errors(wrong)) != []


def test_a_run_whose_tracker_is_not_installed_can_be_shown() -> None:
    data = load(SPEC).model_dump(mode="json", by_alias=True)
    data["tracking"] = {"log_every": 1, "comet-of-mine": {"key": "value"}}
    spec = RunSpec.model_validate(data, context=dict(RECORDED))
    assert spec.model_dump(mode="json", by_alias=True)["tracking"] == data["tracking"]
    with pytest.raises(ValueError, match="comet-of-mine"):
        RunSpec.model_validate(data)


def test_a_tracker_without_its_library_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = load(SPEC + "tracking: [mlflow, tensorboard, {wandb: {mode: offline, entity: team}}]\n", "cluster.gpu=cpu")
    monkeypatch.setattr(checks, "find_spec", lambda name: None if name == "sqlalchemy" else object())
    found = [each for each in checks.check_external(spec).problems if each.key.startswith("tracking")]
    assert [each.key for each in found] == ["tracking.mlflow"]
    assert "mlflow is not installed here" in str(found[0])
