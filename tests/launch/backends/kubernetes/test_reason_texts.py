"""Every error, problem and note has a code, every code a text with its parameters, and no text is unused."""

import ast
import re
from string import Formatter

from scaletrain_cli.launch.backends.kubernetes.explain import _MEANINGS
from scaletrain_cli.reason_texts.kubernetes import TEXTS
from scaletrain_cli.reasons import entry_of
from tests.launch.conftest import PROJECT

PACKAGE = PROJECT / "scaletrain_cli" / "launch" / "backends" / "kubernetes"
SOURCES = {path.stem: path.read_text(encoding="utf-8") for path in sorted(PACKAGE.glob("*.py"))}
SOURCE = "".join(SOURCES.values())
WORDS = set(re.findall(r'"([a-z]+(?:-[a-z]+)*)"', SOURCE)) | {"explain-child-refused", "explain-dead-node"}
WORDS |= {"ended-finished", "ended-cancelled"}
# Errors of damaged files and of programs that call the functions in a wrong way; the first has a code of its own.
WITHOUT_CODE = {"MissingPackageError", "ValueError", "TypeError"}


# The name of what each call of a module calls.
CALLS = [
    (f"{module}:{node.lineno}", ast.unparse(node.func), node)
    for module, source in SOURCES.items()
    for node in ast.walk(ast.parse(source))
    if isinstance(node, ast.Call)
]


def fields(template: str) -> set[str]:
    """Return the names of the parameters of a template."""
    return {name for _, name, _, _ in Formatter().parse(template) if name}


def test_every_text_is_used() -> None:
    assert set(TEXTS) - WORDS == set()


def test_every_code_has_a_text() -> None:
    codes = set(re.findall(r'\breason\(\s*"([a-z-]+)"', SOURCE)) | _MEANINGS.keys()
    codes |= {meaning.headline for meaning in _MEANINGS.values()}
    assert codes - TEXTS.keys() == set()


def test_every_error_and_problem_carries_a_code() -> None:
    errors = [(where, call) for where, name, call in CALLS if name.endswith("Error") and name not in WITHOUT_CODE]
    assert [where for where, call in errors if isinstance(call.args[0], ast.Constant | ast.JoinedStr)] == []
    assert [where for where, name, _ in CALLS if name == "Problem"] == []  # in place of Problem.because


def test_a_reason_is_made_with_all_parameters_of_its_text() -> None:
    """A text without one of its parameters is shown as its bare code."""
    for where, name, call in CALLS:
        given = {keyword.arg for keyword in call.keywords}
        if name != "reason" or not isinstance(call.args[0], ast.Constant) or None in given:
            continue  # with ** the tests of the behavior show it
        text = entry_of(f"kubernetes.{call.args[0].value}")
        assert fields("".join((text.text, *text.remedies))) - given == set(), where
