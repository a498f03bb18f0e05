"""docs/architecture.md names files and functions that exist."""

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


def test_functions_of_the_page_are_defined_in_the_named_files() -> None:
    named = set(re.findall(r"`([a-z_/]+\.py): ([A-Za-z_.]+)`", PAGE))
    assert len(named) > 15
    missing = set()
    for file, name in named:
        text = (PROJECT / "scaletrain_cli" / file).read_text(encoding="utf-8")
        missing |= {(file, part) for part in name.split(".") if not re.search(rf"\b(def|class) {part}\b", text)}
    assert missing == set()
