"""docs/spec-reference.md shows every key with its default, and its examples load."""

import json
import re
from typing import Any

from pydantic import BaseModel

from scaletrain_cli.spec.preparation import QUALITY_RULES, STEPS, DuplicatesSpec
from scaletrain_cli.spec.section import OpenSection
from scaletrain_cli.spec.source import Source, parse_yaml
from tests.spec.samples import PROJECT, SPEC, load

PAGE = (PROJECT / "docs" / "spec-reference.md").read_text(encoding="utf-8")
EVERY_KEY, _, ITEMS = re.findall(r"```yaml\n(.*?)```", PAGE, flags=re.DOTALL)
NEEDED = {"model", "data.source", "training.global_batch_size", "training.steps", "name", "schema"}


def keys(spec: BaseModel, before: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, field in type(spec).model_fields.items():
        if field.exclude:  # written as a part of another key
            continue
        key, value = f"{before}{field.alias or name}", getattr(spec, name)
        if name == "plugins" and isinstance(spec, OpenSection):
            found |= {k: v for plugin, section in value.items() for k, v in keys(section, f"{before}{plugin}.").items()}
            continue
        found |= keys(value, f"{key}.") if isinstance(value, BaseModel) else {key: value}
    return found


def test_the_page_shows_every_key() -> None:
    shown = set(re.findall(r"(?<![\w.])([a-z_]+):", EVERY_KEY))
    assert {part for key in keys(load(EVERY_KEY)) for part in key.split(".")} <= shown


def test_the_page_shows_the_defaults() -> None:
    sparse = load(SPEC.replace("precision: fp32", "") + "tracking: [wandb, tensorboard, prometheus, mlflow]\n")
    shown, usual = keys(load(EVERY_KEY)), keys(sparse)
    different = {key for key in shown if shown[key] != usual[key]}
    assert {key for key in different if not key.startswith("model.")} - NEEDED == {"data.tokenizer.vocab_size"}
    assert {key: usual[key] for key in different if key in ("model.rope_theta", "model.norm_eps")} == {}


def test_the_page_shows_every_key_of_sources_stages_and_steps_with_its_default() -> None:
    data = load(SPEC.replace("  source: python-stdlib\n", ITEMS.removeprefix("data:\n"))).data
    written = parse_yaml(ITEMS, Source("items"))["data"]
    given = {"name", "path", "weight", "start", "weights", "step", "rules", "keep", "column", "min", "files"}
    shown = set()
    items = (data.sources[0], data.stages[0], *data.prepare)
    for item, text in zip(items, (written["sources"][0], written["stages"][0], *written["prepare"]), strict=True):
        shown.add(type(item))
        for name, field in type(item).model_fields.items():
            assert name in text or (name == "only" and item is not data.prepare[0]), f"{type(item).__name__}.{name}"
            assert name in ("step", "rules", "placeholders") or field.description, f"{name} has no description"
            if name not in given and name != "placeholders":
                assert getattr(item, name) == field.get_default(call_default_factory=True), name
            if isinstance(value := getattr(item, name), BaseModel):
                assert value == type(value)()
                assert text[name].keys() == type(value).model_fields.keys()
    assert {*STEPS.values(), *QUALITY_RULES.values(), DuplicatesSpec} <= shown


def test_every_yaml_example_of_every_page_is_valid() -> None:
    docs = sorted(set((PROJECT / "docs").rglob("*.md")) - {PROJECT / "docs" / "extending.md"})  # needs its packages
    pages = [PROJECT / "README.md", *docs, *sorted(PROJECT.glob("*/README.md"))]
    base, tried = parse_yaml(SPEC, Source("base")), 0
    for page in pages:
        for example in re.findall(r"```ya?ml\n(.*?)```", page.read_text(encoding="utf-8"), flags=re.DOTALL):
            found = parse_yaml(example, Source(page.name))
            if "slurm" in found:  # a part of the cluster section
                found = {"cluster": found}
            if "clusters" not in found:  # the user's own clusters, which tests of those read
                under = {} if "schema" in found else base
                if "sources" in found.get("data", {}):  # in place of the single source
                    under = {**under, "data": {k: v for k, v in under.get("data", {}).items() if k != "source"}}
                sections = {
                    key: {**under.get(key, {}), **value} if isinstance(value, dict) else value
                    for key, value in found.items()
                }
                if "source" not in (given := found.get("data", {})) and "sources" in given:
                    sections["data"].pop("source", None)  # that of the base
                load(json.dumps({**under, **sections}))
                tried += 1
    assert tried >= 6
