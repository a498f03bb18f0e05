import ast
import re
from collections.abc import Iterator
from pathlib import Path

import scaletrain_cli
from scaletrain_cli.reason_texts.plan import TEXTS
from scaletrain_cli.reasons import entry_of

PLAN = Path(scaletrain_cli.__file__).parent / "plan"
_CODE = re.compile(r"[a-z0-9]+(-[a-z0-9]+)+|yes|no|chosen|compiled|slower|riskier")


def codes() -> Iterator[str]:
    """Yield every code that stands in the planner: those of reasons, and those of rules, which lack the table."""
    for path in sorted(PLAN.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if (
                isinstance(node, ast.Constant)
                and isinstance(node.value, str)
                and re.fullmatch(r"plan\.[a-z0-9-]+", node.value)
            ):
                yield node.value.removeprefix("plan.")
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "Rule":
                code = node.args[2]
                assert isinstance(code, ast.Constant), ast.unparse(node)
                yield str(code.value)


def test_every_code_has_a_text_and_every_text_a_code() -> None:
    given = set(codes())
    assert given - TEXTS.keys() == set()
    assert TEXTS.keys() - given == set()
    assert all(_CODE.fullmatch(code) for code in TEXTS)


def test_no_text_ends_with_a_full_stop_and_every_remedy_is_a_sentence() -> None:
    for code in TEXTS:
        text = entry_of(f"plan.{code}")
        assert not text.text.endswith("."), code
        assert all(remedy.endswith((".", "?")) for remedy in text.remedies), code
