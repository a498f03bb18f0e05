"""Every error, problem and note has a code, every code a text with its parameters, and no text is unused."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from string import Formatter

import pytest

from scaletrain_cli.launch.backends.kubernetes.explain import _MEANINGS
from scaletrain_cli.reason_texts.kubernetes import TEXTS
from tests.launch.conftest import PROJECT

PACKAGE = PROJECT / "scaletrain_cli" / "launch" / "backends" / "kubernetes"
SOURCES = {path.stem: path.read_text(encoding="utf-8") for path in sorted(PACKAGE.glob("*.py"))}
SOURCE = "".join(SOURCES.values())
WORDS = set(re.findall(r'"([a-z]+(?:-[a-z]+)*)"', SOURCE)) | {"explain-child-refused", "explain-dead-node"}
WORDS |= {"ended-finished", "ended-cancelled"}
# Errors of damaged files and of programs that call the functions in a wrong way; the first has a code of its own.
WITHOUT_CODE = {"MissingPackageError", "ValueError", "TypeError"}


def calls(module: str) -> Iterator[tuple[str, ast.Call]]:
    """Yield the calls of a module with the name of what each calls."""
    for node in ast.walk(ast.parse(SOURCES[module])):
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func), node


def fields(template: str) -> set[str]:
    """Return the names of the parameters of a template."""
    return {name for _, name, _, _ in Formatter().parse(template) if name}


def test_every_text_is_used() -> None:
    assert set(TEXTS) - WORDS == set()


def test_every_code_has_a_text() -> None:
    codes = set(re.findall(r'\breason\(\s*"([a-z-]+)"', SOURCE)) | _MEANINGS.keys()
    codes |= {meaning.headline for meaning in _MEANINGS.values()}
    assert codes - TEXTS.keys() == set()


@pytest.mark.parametrize("module", SOURCES)
def test_every_error_and_problem_carries_a_code(module: str) -> None:
    errors = [(name, call) for name, call in calls(module) if name.endswith("Error") and name not in WITHOUT_CODE]
    bare = [call for _, call in errors if isinstance(call.args[0], ast.Constant | ast.JoinedStr)]
    bare += [call for name, call in calls(module) if name == "Problem"]  # in place of Problem.because
    assert [f"{module}:{call.lineno}" for call in bare] == []


@pytest.mark.parametrize("module", SOURCES)
def test_a_reason_is_made_with_all_parameters_of_its_text(module: str) -> None:
    """A text without one of its parameters is shown as its bare code."""
    for name, call in calls(module):
        given = {keyword.arg for keyword in call.keywords}
        if name != "reason" or not isinstance(call.args[0], ast.Constant) or None in given:
            continue  # with ** the tests of the behavior show it
        text = TEXTS[str(call.args[0].value)]
        assert fields("".join((text.text, *text.remedies))) - given == set(), f"{module}:{call.lineno}"
