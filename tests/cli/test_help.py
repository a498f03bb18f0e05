"""The help of every verb has a summary, its arguments and its exit codes, in the same form."""

import re
from pathlib import Path

import pytest

from scaletrain_cli.cli.app import GROUPS
from scaletrain_cli.cli.options import MEANINGS
from scaletrain_cli.errors import ExitCode
from tests.cli.command_line import PROJECT, scaletrain
from tests.cli.every_command import CONNECTIONS

VERBS = [verb.name for verbs in GROUPS.values() for verb in verbs]
# Verbs that are groups, and what is in them.
IN_GROUPS = {
    "data": ("prepare", "show", "stats", "upload"),
    "notify": ("test", "list", "send"),
    "cluster": ("setup",),
    "nodes": ("list", "clear"),
    "checkpoint": ("list", "mirror", "verify", "export", "average", "sample", "prune"),
    "evaluation": ("submit", "list", "show"),
}
COMMANDS = [[verb, word] for verb, words in IN_GROUPS.items() for word in words]
COMMANDS += [[verb] for verb in VERBS if verb not in IN_GROUPS]


def test_the_help_lists_every_verb() -> None:
    assert re.findall(r"^  ([a-z][a-z-]*)  ", scaletrain("--help", code=0).out, flags=re.MULTILINE) == VERBS


def test_every_verb_has_a_module_and_every_module_of_a_verb_is_listed() -> None:
    modules = {path.stem for path in (PROJECT / "scaletrain_cli" / "cli").glob("*.py")}
    shared = {"__init__", "app", "options", "running", "models", "elsewhere", "login_node"}
    assert modules - shared == {verb.replace("-", "_") for verb in VERBS}


@pytest.mark.parametrize("arguments", COMMANDS, ids=" ".join)
def test_each_verb_documents_itself_and_its_exit_codes(arguments: list[str]) -> None:
    ended = scaletrain(*arguments, "--help", code=0)
    assert ended.out.startswith(f"Usage: scaletrain {' '.join(arguments)} ")
    assert "Exit codes: 0 done; " in ended.out
    assert ("--json" in ended.out) == (arguments[0] not in CONNECTIONS)
    assert max(map(len, ended.out.splitlines())) <= 80


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["valdate", "x"], "No such command 'valdate'. Did you mean validate?"),
        (["frobnicate"], "No such command 'frobnicate'. See --help."),
        (["plan"], "Missing argument"),
        (["validate", "a", "b"], "unexpected extra argument"),
        (["plan", "a", "--jsn"], "--jsn"),
        (["logs", "a", "--rank", "x"], "'--rank'"),
        (["logs", "a", "--rank", "-1"], "'--rank'"),
        (["data", "prepair"], "prepair"),
        (["checkpoint", "prune", "a", "--keep", "0"], "'--keep'"),
        (["drill", "earthquake"], "unknown drill: earthquake. Available drills: exception, sigterm, "),
        ([], "Usage: scaletrain"),
        (["data"], "Usage: scaletrain data"),
    ],
    ids=str,
)
def test_a_wrong_command_line_ends_with_2_and_the_reason(arguments: list[str], expected: str) -> None:
    ended = scaletrain(*arguments, code=ExitCode.USAGE)
    assert expected in ended.out + ended.err


def test_the_version_is_printed() -> None:
    assert re.fullmatch(r"scaletrain \d+\.\d+\.\d+\n", scaletrain("--version").out)


def test_the_exit_codes_page_lists_every_code_and_every_verb() -> None:
    page = (Path(PROJECT) / "docs" / "exit-codes.md").read_text(encoding="utf-8")
    codes, verbs = page.split("## By verb")
    assert {int(code) for code in re.findall(r"^\| (\d+) \|", codes, flags=re.MULTILINE)} == {*ExitCode, 124, 130}
    assert MEANINGS.keys() == set(ExitCode)
    named = set(re.findall(r"`([a-z][a-z -]*)`", " ".join(re.findall(r"^\| (.*?) \|", verbs, flags=re.MULTILINE))))
    assert named == {" ".join(command) for command in COMMANDS}
