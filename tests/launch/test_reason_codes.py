"""Every reason code in the source has a text."""

import re
from importlib import import_module

from tests.launch.conftest import PROJECT

_CODE = re.compile(r'\b(?:Reason|cause)\(\s*"([a-z]+)\.([a-z0-9-]+)"')


def test_every_code_in_the_source_has_a_text() -> None:
    found = {
        match.groups()
        for path in (PROJECT / "scaletrain_cli").rglob("*.py")
        for match in _CODE.finditer(path.read_text(encoding="utf-8"))
    }
    found = {(table, key) for table, key in found if table != "recorded"}
    assert len(found) > 100
    missing = sorted(
        f"{table}.{key}"
        for table, key in found
        if key not in import_module(f"scaletrain_cli.reason_texts.{table}").TEXTS
    )
    assert missing == []
