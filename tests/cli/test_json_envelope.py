"""--json: every verb prints the envelope of docs/json.md in every state of a run."""

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from scaletrain_cli.errors import ScaletrainError
from scaletrain_cli.launch.backends.local.backend import LocalBackend
from tests.cli.command_line import PROJECT, SMALL, Ended, scaletrain
from tests.cli.every_command import ALL, OF_A_RUN, command_line, start_nothing
from tests.cli.prepared_runs import STATES

PAGE = (PROJECT / "docs" / "json.md").read_text(encoding="utf-8")
CODES = {code: int(number) for code, number in re.findall(r"^\| `([a-z-]+)` \| (\d+) \|", PAGE, flags=re.MULTILINE)}
TEXT = {"type": ["string", "null"]}
LINE = {"type": ["integer", "null"], "minimum": 1}
REASON = {
    "type": ["object", "null"],
    "properties": {"code": {"type": "string", "pattern": r"^[a-z]+\.[a-z-]+$"}, "params": {"type": "object"}},
    "required": ["code", "params"],
    "additionalProperties": False,
}
PROBLEM = {
    "type": "object",
    "properties": {"where": {"type": "string"}, "file": TEXT, "line": LINE, "key": TEXT}
    | {"message": {"type": "string"}, "given": TEXT, "hint": TEXT, "reason": REASON},
    "required": ["where", "file", "line", "key", "message", "given", "hint", "reason"],
    "additionalProperties": False,
}
ERROR = {
    "type": "object",
    "properties": {"code": {"enum": sorted(CODES)}, "key": TEXT, "file": TEXT, "line": LINE}
    | {"message": {"type": "string", "minLength": 1}, "remedy": TEXT, "reason": REASON}
    | {"problems": {"type": "array", "items": PROBLEM}},
    "required": ["code", "key", "file", "line", "message", "remedy", "reason", "problems"],
    "additionalProperties": False,
}
ENVELOPE = {
    "type": "object",
    "properties": {"schema": {"type": "string", "pattern": r"^scaletrain\.[a-z-]+/v1$"}, "ok": {"type": "boolean"}},
    "required": ["schema", "ok"],
    "if": {"properties": {"ok": {"const": True}}},
    "then": {"not": {"required": ["error"]}},
    "else": {"required": ["error"], "properties": {"error": ERROR}},
}
LIKE_FINISHED = ("preempted", "failed", "cancelled")
CHECK = jsonschema.Draft202012Validator(ENVELOPE)


@pytest.fixture(autouse=True)
def nothing_is_started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    start_nothing(monkeypatch)
    monkeypatch.chdir(tmp_path)


def checked(ended: Ended) -> dict[str, Any]:
    """The envelope, which must be one and agree with the exit code."""
    assert ended.out.endswith("}\n"), ended
    data = json.loads(ended.out)
    errors = [f"{error.json_path}: {error.message}" for error in CHECK.iter_errors(data)]
    assert not errors, (errors, ended)
    assert data["ok"] == (ended.code == 0), ended
    if not data["ok"]:
        assert CODES[data["error"]["code"]] == ended.code, ended
    assert "Traceback" not in ended.err, ended
    assert not {text for text in texts_in(data) if text.lower().strip("+-") in NOT_NUMBERS}, ended
    return dict(data)


NOT_NUMBERS = ("nan", "inf", "infinity")


def texts_in(value: Any) -> Iterator[str]:
    """Every text of a JSON document: none of them stands for a number that JSON lacks."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for each in value.values() if isinstance(value, dict) else value:
            yield from texts_in(each)


@pytest.mark.parametrize("words", ALL, ids=" ".join)
def test_without_runs_every_command_prints_the_json_envelope(words: tuple[str, ...]) -> None:
    data = checked(scaletrain(*command_line(words), "--json"))
    assert data["schema"] == SCHEMAS.get(words, f"scaletrain.{'-'.join(words)}/v1")


# Answers whose schema has another name than the command, as docs/json.md says.
SCHEMAS = {("preflight",): "scaletrain.preflight-report/v1", ("drill",): "scaletrain.drill-list/v1"}


@pytest.mark.parametrize("words", ALL, ids=" ".join)
def test_a_wrong_command_line_prints_the_json_envelope(words: tuple[str, ...]) -> None:
    parameters = ALL[words].params
    assert checked(scaletrain(*command_line(words), "--no-such-option", "--json"))["error"]["code"] == "usage"
    if any(parameter.required for parameter in parameters):
        assert checked(scaletrain(*words, "--json"))["error"]["code"] == "usage"
    if not any(parameter.nargs == -1 for parameter in parameters):
        assert checked(scaletrain(*command_line(words), "too", "many", "--json"))["error"]["code"] == "usage"


@pytest.mark.parametrize("arguments", [["vaildate"], ["data"], ["checkpoint", "lst"], [], ["--versoin"]], ids=str)
def test_an_unknown_verb_prints_the_json_envelope(arguments: list[str]) -> None:
    data = checked(scaletrain(*arguments, "--json"))
    assert data["error"]["code"] == "usage"


@pytest.mark.parametrize(
    "state", [pytest.param(state, marks=pytest.mark.long) if state in LIKE_FINISHED else state for state in STATES]
)
def test_in_every_state_of_a_run_every_command_prints_the_json_envelope(
    state: str, prepared: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LocalBackend, "cancel", lambda self, run, record: None)
    seen = set()
    for number, words in enumerate(OF_A_RUN):
        root = shutil.copytree(prepared[state], tmp_path / str(number), symlinks=True)
        monkeypatch.setenv("SCALETRAIN_RUNS", str(root))
        data = checked(scaletrain(*command_line(words), "--json"))
        seen.add(data["schema"])
        if words == ("status",):
            assert data.get("state") == (state if state != "damaged" else None)
        listed = checked(scaletrain("list", "--json"))
        rows = {row["run_id"]: row for row in listed["runs"]}
        assert words == ("rm",) or "r1" in rows
        if state == "damaged" and "r1" in rows:
            errors = list(jsonschema.Draft202012Validator(ERROR).iter_errors(rows["r1"]["error"]))
            assert (rows["r1"]["state"], errors) == ("damaged", [])
    assert {f"scaletrain.{'-'.join(words)}/v1" for words in OF_A_RUN} == seen


def test_an_interrupted_command_prints_the_json_envelope(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*arguments: object, **options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("scaletrain_cli.spec.load_spec", interrupt)
    data = checked(scaletrain("plan", SMALL, "--json"))
    assert data["error"]["code"] == "interrupted"


def test_a_problem_in_a_spec_has_file_and_line_as_separate_keys(tmp_path: Path) -> None:
    spec = tmp_path / "a:7.yaml"  # a name that looks like a file and a line
    lines = SMALL.read_text(encoding="utf-8").splitlines()
    spec.write_text("\n".join([*lines, "no_such_key: 1"]), encoding="utf-8")
    error = checked(scaletrain("validate", spec, "--json"))["error"]
    assert (error["code"], error["key"], error["file"]) == ("spec", "no_such_key", str(spec))
    assert error["line"] == len(lines) + 1
    assert error["remedy"] == error["problems"][0]["hint"]


def test_a_dry_run_prints_the_json_envelope() -> None:
    data = checked(scaletrain("submit", SMALL, "--dry-run", "--json"))
    assert "local.supervisor" in data["would_send"]
    sweep = checked(scaletrain("submit", SMALL, "--dry-run", "--json", "--sweep", "training.seed=1,2"))
    assert [len(run["overrides"]) for run in sweep["runs"]] == [1, 1]


def test_an_output_that_is_not_valid_json_is_reported_as_a_bug(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("scaletrain_cli.spec.json_schema.json_schema", lambda: {"a": float("nan")})
    ended = scaletrain("schema", "--json", expect_bug=True)
    assert checked(ended)["error"]["code"] == "internal"


def test_every_code_of_an_error_is_documented() -> None:
    def codes(kind: type[ScaletrainError]) -> Iterator[str]:
        yield kind.code
        for below in kind.__subclasses__():
            yield from codes(below)

    assert set(codes(ScaletrainError)) <= CODES.keys()


def test_follow_prints_one_json_document_per_line(prepared: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SCALETRAIN_RUNS", str(prepared["finished"]))
    for verb, field in (("logs", "text"), ("events", "event")):
        ended = scaletrain(verb, "r1", "--follow", "--json")
        *lines, last = [json.loads(line) for line in ended.out.splitlines()]
        assert last == {"schema": f"scaletrain.{verb}/v1", "ok": True, "run_id": "r1"}
        assert lines
        assert all(field in line for line in lines)
