"""The syntax trees of source files, which several tests walk; each file is parsed once in a process.

A test that looks for something names the texts without which a file cannot have it, and parses only files that do.
"""

from __future__ import annotations

import ast
import functools
import gc
import itertools
from collections.abc import Iterator
from pathlib import Path

FILES_AT_ONCE = 100  # so that few searches for garbage walk them
_parsed = itertools.count(1)


@functools.cache
def text_of(path: Path) -> str:
    return path.read_text(encoding="utf-8")


@functools.cache
def tree_of(path: Path) -> ast.Module:
    tree = ast.parse(text_of(path), str(path))
    if next(_parsed) % FILES_AT_ONCE == 0:
        gc.collect()  # what is garbage now would never be freed
        gc.freeze()  # the trees of the package are millions of objects, which no search for garbage should walk
    return tree


@functools.cache
def nodes_of(path: Path) -> tuple[ast.AST, ...]:
    return tuple(ast.walk(tree_of(path)))


def files_with(folder: Path, *texts: str) -> Iterator[Path]:
    """Yield the Python files below a folder that contain one of the texts, in order."""
    for path in sorted(folder.rglob("*.py")):
        if any(text in text_of(path) for text in texts):
            yield path


def dotted(node: ast.AST) -> str:
    """Return the text of a name with its attributes, as ``os.path.join``; of anything else ``?``, which is quick."""
    if isinstance(node, ast.Name):
        return node.id
    return f"{dotted(node.value)}.{node.attr}" if isinstance(node, ast.Attribute) else "?"
