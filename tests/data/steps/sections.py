"""Steps from the text of a spec, for the tests of this folder."""

from typing import Any

from pydantic import TypeAdapter

from scaletrain_cli.data.steps import Document, Kept, Removed, Step, step_of
from scaletrain_cli.spec.preparation import AnyStep, PreparationStep

_SECTION: TypeAdapter[Any] = TypeAdapter(AnyStep)


def section(name: str, **keys: Any) -> PreparationStep:
    rules = name in ("gopher_quality", "gopher_repetition", "c4", "fineweb")
    given = {"step": "quality", "rules": name} if rules else {"step": name}
    found: PreparationStep = _SECTION.validate_python(given | keys)
    return found


def step(name: str, **keys: Any) -> Step:
    return step_of(section(name, **keys))


def run(step: Step, text: str, **columns: Any) -> Kept | Removed:
    return step(Document(text, "web", "web.jsonl:7", columns))


def rule(step: Step, text: str) -> str | None:
    result = run(step, text)
    return result.rule.rpartition(".")[2] if isinstance(result, Removed) else None


def text_after(step: Step, text: str) -> str:
    result = run(step, text)
    assert isinstance(result, Kept), result
    return result.text
