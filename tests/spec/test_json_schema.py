import io
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from annotated_types import Ge, Gt, Le, Lt, MaxLen, MinLen
from pydantic import ValidationError
from ruamel.yaml import YAML

from scaletrain_cli.spec.json_schema import json_schema
from scaletrain_cli.spec.presets import presets
from scaletrain_cli.spec.section import Section
from scaletrain_cli.spec.starting_spec import starting_spec
from tests.spec.samples import RECIPES, SPEC, load, schema_validator
from tests.spec.test_round_trip import FULL

MODEL = {"family": "gpt", "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "vocab_size": 9}


def complaints(text: str, **changes: Any) -> list[str]:
    data = YAML(typ="safe", pure=True).load(io.StringIO(text)) | changes
    return [error.message for error in schema_validator().iter_errors(data)]


def test_the_schema_is_a_valid_json_schema() -> None:
    jsonschema.Draft202012Validator.check_schema(json_schema())


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.name)
def test_the_schema_accepts_every_recipe(path: Path) -> None:
    assert complaints(path.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize("text", [SPEC, SPEC + FULL, starting_spec()], ids=["small", "full", "starting"])
def test_the_schema_accepts_every_kind_of_value_that_loads(text: str) -> None:
    load(text)
    assert complaints(text) == []


@pytest.mark.parametrize(
    "model",
    [{"preset": "gpt2"}, {"hf_config": "config.json"}, {"preset": "llama-7b", "seq_len": 512}, MODEL],
    ids=["preset", "config", "beside", "dims"],
)
def test_dimensions_are_required_only_without_a_preset_or_config(model: dict[str, Any]) -> None:
    assert complaints(SPEC, model=model) == []


def test_the_schema_accepts_a_resolved_spec() -> None:
    resolved = load(SPEC + FULL).model_dump(mode="json", by_alias=True)
    assert list(schema_validator().iter_errors(resolved)) == []


@pytest.mark.parametrize(
    "changes",
    [
        {"model": {"family": "llama"}},
        {"model": {"preset": "llama-8b"}},
        {"model": MODEL | {"family": "llama"}},
        {"model": None},
        {"trainin": {}},
        {"training": {"global_batch_size": 8, "steps": "many"}},
        {"training": {"global_batch_size": 8, "steps": 1, "precision": "fp23"}},
        {"layout": {"zero_stage": 4}},
        {"layout": {"data_parallel": "all"}},
        {"cluster": {"slurm": {"partition": "a b"}}},
        {"restarts": {"preemption": "often"}},
    ],
    ids=str,
)
def test_the_schema_rejects_common_mistakes(changes: dict[str, Any]) -> None:
    assert complaints(SPEC, **changes)


def test_the_schema_lists_all_presets() -> None:
    offered = json_schema()["$defs"]["ModelSpec"]["properties"]["preset"]["enum"]
    assert set(presets()) < set(offered)


def sections(base: type[Section] = Section) -> Iterator[type[Section]]:
    for section in base.__subclasses__():
        if section.__module__.startswith("scaletrain_cli.spec."):
            yield section
        yield from sections(section)


def bounds(schema: dict[str, Any]) -> Iterator[tuple[str, float]]:
    """The maxima and minima that the schema of a key states for a number."""
    for each in (schema, *schema.get("anyOf", ())):
        if each.get("type") in ("integer", "number"):
            yield from ((name, each[name]) for name in ("maximum", "minimum") if name in each)


def test_each_bound_that_the_schema_states_is_enforced() -> None:
    found = 0
    for section in sections():
        for key, schema in section.model_json_schema()["properties"].items():
            for name, bound in bounds(schema):
                found += 1
                value = bound + (1 if name == "maximum" else -1)
                with pytest.raises(ValidationError) as caught:
                    section.model_validate({key: value})
                assert key in {error["loc"][0] for error in caught.value.errors() if error["loc"]}, (section, key)
    assert found > 200


def test_no_key_has_two_bounds_of_one_kind_of_which_pydantic_keeps_the_last() -> None:
    assert len(list(sections())) > 20
    for section in sections():
        for key, field in section.model_fields.items():
            kinds = Counter(type(one) for one in field.metadata if isinstance(one, Ge | Gt | Le | Lt | MinLen | MaxLen))
            assert not [kind.__name__ for kind, count in kinds.items() if count > 1], (section, key)
