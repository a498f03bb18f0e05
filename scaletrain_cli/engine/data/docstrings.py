"""Questions and answers about Python's standard library, made from its docstrings: rows for tests and recipes."""

import ast
import inspect
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from scaletrain_cli.spec.corpus_files import PYTHON_STDLIB, find_files

_FEWEST_CHARACTERS = 20
_MOST_CHARACTERS = 600
_NAMES_PER_PAIR = 5


class _Documented(NamedTuple):
    name: str
    kind: str
    signature: str
    summary: str


def docstring_rows(*, pairs: bool) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (place, row) for each documented function, method and class, in a fixed order.

    A row is a conversation: what something does and, for functions, how it is called. With ``pairs`` it has a
    ``chosen`` answer, and as the ``rejected`` one the answer about something else; pairs are made of fewer names,
    because a reference model reads all of them before training.
    """
    before: _Documented | None = None
    for where, found in _documented()[:: _NAMES_PER_PAIR if pairs else 1]:
        asked = {"role": "user", "content": f"What does the {found.kind} `{found.name}` do?"}
        answer = {"role": "assistant", "content": found.summary}
        if not pairs:
            messages = [asked, answer]
            if found.signature:
                messages.append({"role": "user", "content": "How is it called?"})
                messages.append({"role": "assistant", "content": f"`{found.signature}`"})
            yield where, {"messages": messages}
        elif before is not None and before.summary != found.summary:
            rejected = {"role": "assistant", "content": before.summary}
            yield where, {"prompt": [asked], "chosen": [answer], "rejected": [rejected]}
        before = found


@lru_cache(maxsize=1)  # a tokenizer is trained on the rows before they are encoded
def _documented() -> tuple[tuple[str, _Documented], ...]:
    return tuple(_read_library())


def _read_library() -> Iterator[tuple[str, _Documented]]:
    files = find_files(PYTHON_STDLIB)
    root = Path(ast.__file__).parent
    for path in files.files:
        relative = path.relative_to(root) if path.is_relative_to(root) else Path(path.name)
        parts = [part for part in relative.with_suffix("").parts if part != "__init__"]
        if any(part.startswith("_") for part in parts) or not parts:
            continue
        try:
            tree = ast.parse(path.read_bytes())
        except (SyntaxError, ValueError, OSError):  # a file of the library that this interpreter does not run
            continue
        for node, name in _definitions(tree, ".".join(parts)):
            text = _first_paragraph(ast.get_docstring(node))
            if text is None:
                continue
            is_class = isinstance(node, ast.ClassDef)
            signature = "" if isinstance(node, ast.ClassDef) else f"{name}({ast.unparse(node.args)})"
            yield f"{path}:{node.lineno}", _Documented(name, "class" if is_class else "function", signature, text)


_Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def _definitions(tree: ast.Module | ast.ClassDef, before: str) -> Iterator[tuple[_Definition, str]]:
    for node in tree.body:
        if isinstance(node, _Definition) and not node.name.startswith("_"):
            name = f"{before}.{node.name}"
            yield node, name
            if isinstance(node, ast.ClassDef):
                yield from _definitions(node, name)


def _first_paragraph(docstring: str | None) -> str | None:
    """Return the first paragraph on one line; None if it is very short or very long."""
    if docstring is None:
        return None
    text = " ".join(inspect.cleandoc(docstring).partition("\n\n")[0].split())
    return text if _FEWEST_CHARACTERS <= len(text) <= _MOST_CHARACTERS else None
