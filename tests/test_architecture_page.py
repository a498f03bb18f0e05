"""docs/architecture.md names files that exist, and its sequence diagrams can be parsed by Mermaid."""

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
