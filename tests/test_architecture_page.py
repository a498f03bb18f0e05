"""docs/architecture.md names files and functions that exist, and Mermaid can parse its sequence diagrams."""

from __future__ import annotations

import re
from pathlib import Path

PROJECT = Path(__file__).parent.parent
PAGE = (PROJECT / "docs" / "architecture.md").read_text(encoding="utf-8")


def test_every_file_and_package_of_the_page_exists() -> None:
    named = set(re.findall(r"(?<![\w/<])((?:[a-z_]+/)*[a-z_]+\.py|(?:[a-z_]+/)+)(?=[^\w.]|$)", PAGE))
    assert len(named) > 30
    missing = {name for name in named if not (PROJECT / "scaletrain_cli" / name).exists()}
    assert {name for name in missing if not (PROJECT / name).exists()} == set()


def test_sequence_diagrams_avoid_what_mermaid_cannot_parse() -> None:
    """Mermaid ends a statement at a semicolon, and reserves the names of its blocks."""
    reserved = {"alt", "and", "box", "break", "critical", "else", "end", "loop", "note", "opt", "par", "rect"}
    diagrams = re.findall(r"```mermaid\nsequenceDiagram\n(.*?)```", PAGE, flags=re.DOTALL)
    assert len(diagrams) == 3
    for diagram in diagrams:
        assert ";" not in diagram
        assert not set(re.findall(r"participant (\w+)", diagram)) & reserved


def test_functions_of_the_diagrams_are_defined_in_the_named_files() -> None:
    """``file.py: name`` in flowcharts, and ``A->>B: name(...)`` in sequence diagrams, where B is a file."""
    named = set(re.findall(r"([a-z_/]+\.py): ([A-Za-z_.]+)<br/>", PAGE))
    for diagram in re.findall(r"```mermaid\nsequenceDiagram\n(.*?)```", PAGE, flags=re.DOTALL):
        files = dict(re.findall(r"participant (\w+) as (\S+\.py)$", diagram, flags=re.MULTILINE))
        files = {alias: file for alias, file in files.items() if "NAME" not in file}
        calls = re.findall(r"->>(\w+): (\w+)\(", diagram)
        named |= {(files[alias], name) for alias, name in calls if alias in files}
    assert len(named) > 15
    missing = set()
    for file, name in named:
        text = (PROJECT / "scaletrain_cli" / file).read_text(encoding="utf-8")
        missing |= {(file, part) for part in name.split(".") if not re.search(rf"\b(def|class) {part}\b", text)}
    assert missing == set()
