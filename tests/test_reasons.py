"""Reasons: codes and parameters as data, English from one table per package."""

from __future__ import annotations

import importlib
import json
import pkgutil
import re
from pathlib import Path
from string import Formatter
from typing import Any

import pytest

from scaletrain_cli import reason_texts
from scaletrain_cli.launch.replan import may_change
from scaletrain_cli.reasons import BESIDE_CODE, Reason, Text, Texts, entry_of, reason_from, recorded, register_texts
from tests.cli.every_command import ALL, CONNECTIONS

TABLES = sorted([*BESIDE_CODE, *(module.name for module in pkgutil.iter_modules(reason_texts.__path__))])


def texts_of(table: str) -> Texts:
    texts: Texts = importlib.import_module(BESIDE_CODE.get(table, f"scaletrain_cli.reason_texts.{table}")).TEXTS
    return texts


def test_the_text_of_a_reason_has_formatted_parameters() -> None:
    register_texts(
        "example",
        {
            "too-big": Text(
                "needs {peak:bytes} of {memory:gib} on {nodes:list} for {steps:of step}, {k:of entry/entries}, {x:.1f}",
                ("scaletrain logs {run}",),
            )
        },
    )
    params = {"peak": 9.2e10, "memory": 80 * 2**30, "nodes": ["a", "b"], "steps": 1, "k": 3, "x": 0.25, "run": "r"}
    reason = Reason("example.too-big", params)
    assert str(reason) == "needs 92.0 GB of 80.0 GiB on a, b for 1 step, 3 entries, 0.2"
    assert reason.remedies == ("scaletrain logs r",)
    assert reason_from(reason.to_json()) == reason


def test_a_number_that_json_lacks_is_null_and_shown_in_words() -> None:
    params = {"step": 3, "loss": None, "grad_norm": 1.23456, "batch": 3}
    shown = str(Reason("engine.gradient-not-finite", params))
    assert shown.startswith("step 3: loss NaN or infinite, gradient norm 1.235;")


def test_an_unknown_code_is_shown_and_not_an_error() -> None:
    assert str(Reason("launch.from-the-future", {"nodes": 3})) == "launch.from-the-future nodes=3"
    assert str(Reason("nothing.of-ours")) == "nothing.of-ours"


def test_a_reason_with_missing_parameters_is_shown_and_not_an_error() -> None:
    register_texts("partial", {"slow": Text("waits {wait:seconds}")})
    assert str(Reason("partial.slow", {"wait": "?"})) == "partial.slow wait=?"
    assert str(Reason("partial.slow")) == "partial.slow"


def test_a_recorded_sentence_without_a_code_is_shown() -> None:
    assert str(reason_from({"text": "lost its node"})) == "lost its node"
    assert recorded("x").to_json()["code"] == "recorded.text"


@pytest.mark.parametrize("table", TABLES)
def test_codes_are_hyphenated_words_and_templates_parse(table: str) -> None:
    assert texts_of(table)
    for key in texts_of(table):
        entry = entry_of(f"{table}.{key}")
        assert key == key.lower().replace("_", "-").replace(" ", "-"), key
        for template in (entry.text, *entry.remedies):
            assert all(name != "" for _, name, _, _ in Formatter().parse(template)), key
        assert not entry.text.endswith("."), f"{key}: without a full stop"


def test_every_code_in_the_source_has_a_text() -> None:
    code = re.compile(r'\b(?:Reason|cause)\(\s*"([a-z]+)\.([a-z0-9-]+)"')
    sources = Path(reason_texts.__file__).parents[1].rglob("*.py")
    used = {match.groups() for path in sources for match in code.finditer(path.read_text(encoding="utf-8"))}
    assert len(used) > 100
    assert [(table, key) for table, key in sorted(used) if table != "recorded" and key not in texts_of(table)] == []


def test_texts_of_another_package_cannot_replace_built_in_texts() -> None:
    for table in ("launch", "recorded", "diagnosis"):
        with pytest.raises(ValueError, match="belongs to ScaleTrain"):
            register_texts(table, {})


def test_a_damaged_record_of_a_reason_can_be_shown() -> None:
    endless: dict[str, Any] = {"code": "launch.out-of-time", "params": {}}
    for _ in range(400):
        endless = {"code": "launch.out-of-time", "params": {"end": endless}}
    odd: list[Any] = [None, 7, "text", [], {"code": ["a"], "params": 3}, {"code": "launch.nodes-lost", "params": "x"}]
    odd += [{"code": code, "params": {}} for code in ("__init__.x", ".", "\0.x", "a b.c", "plan.")]
    odd += [{"code": "launch.last-line-age", "params": {"age": 10**400}}, endless]
    for document in odd:
        reason = reason_from(document)
        assert isinstance(str(reason), str)
        assert isinstance(reason.remedies, tuple)
        json.dumps(reason.to_json())


_COMMAND = re.compile(r"(?<![\w/.-])scaletrain ([a-z][a-z-]+(?: [a-z-]+)?)([^`\n;,)]*)")
_SET = re.compile(r"--set '?([a-z][a-z_.]+)")


def _commands() -> list[tuple[str, list[str], str]]:
    """Return (code, words of the verb, the rest) of every command that a text advises."""
    commands = []
    for table in TABLES:
        for key in texts_of(table):
            for template in entry_of(f"{table}.{key}").remedies:
                found = _COMMAND.finditer(template)
                commands += [(f"{table}.{key}", match[1].split(), match[2]) for match in found]
    return commands


def test_the_commands_in_remedies_have_verbs_and_options_that_exist() -> None:
    commands = _commands()
    assert len(commands) > 100
    for code, words, rest in commands:
        verb = ALL.get(tuple(words), ALL.get((words[0],)))
        if verb is None:
            assert words[0] in CONNECTIONS, (code, words)
            continue
        options = {name for parameter in verb.params for name in (*parameter.opts, *parameter.secondary_opts)}
        for option in re.findall(r"(?<!\S)--[a-z-]+", rest):
            assert option in options, (code, words, option)


def test_a_resume_may_change_the_keys_that_remedies_set_on_resume() -> None:
    keys = {(code, key) for code, words, rest in _commands() if words[0] == "resume" for key in re.findall(_SET, rest)}
    assert len(keys) > 10
    assert [(code, key) for code, key in keys if not may_change(key) and not key.startswith("data.sources")] == []
