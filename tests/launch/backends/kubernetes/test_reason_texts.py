"""Every reason code of the back end has a text, and every text a code that uses it."""

from __future__ import annotations

import re

from scaletrain_cli.launch.backends.kubernetes.explain import _MEANINGS
from scaletrain_cli.reason_texts.kubernetes import TEXTS
from tests.launch.conftest import PROJECT

PACKAGE = PROJECT / "scaletrain_cli" / "launch" / "backends" / "kubernetes"
SOURCE = "".join(path.read_text(encoding="utf-8") for path in sorted(PACKAGE.glob("*.py")))
WORDS = set(re.findall(r'"([a-z]+(?:-[a-z]+)*)"', SOURCE)) | {"explain-child-refused", "explain-dead-node"}
WORDS |= {"ended-finished", "ended-cancelled"}


def test_every_text_is_used() -> None:
    assert set(TEXTS) - WORDS == set()


def test_every_code_has_a_text() -> None:
    codes = set(re.findall(r'\breason\(\s*"([a-z-]+)"', SOURCE)) | _MEANINGS.keys()
    codes |= {meaning.headline for meaning in _MEANINGS.values()}
    assert codes - TEXTS.keys() == set()
