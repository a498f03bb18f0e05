"""JSON on stdout, the answer of every ``--json``: one document for a command line, UTF-8, and never NaN.

A verb hands its answer to ``print_json``. It is written once, when the command is over, inside the envelope that says
whether the command succeeded (docs/json.md).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from typing import Any

from scaletrain_cli.errors import ScaletrainError

_answer: dict[str, Any] = {}
_INDENTED: dict[str, Any] = {"indent": 2, "allow_nan": False}
_IN_ONE_LINE: dict[str, Any] = {"allow_nan": False}
_form = _INDENTED


def print_json(answer: Mapping[str, Any]) -> None:
    """Make ``answer`` the answer of this command line; its keys stand beside those of the envelope."""
    _answer.clear()
    _answer.update(answer)


def forget_answer() -> None:
    """Begin a command line without an answer."""
    global _form
    _answer.clear()
    _form = _INDENTED


def envelope_text(schema: str, error: ScaletrainError | None) -> str:
    """Return the envelope with the answer, and with ``error`` where there is one. Raises ValueError for NaN."""
    head: dict[str, Any] = {"schema": _answer.get("schema", schema), "ok": error is None}
    if error is not None:
        head["error"] = error.to_json()
    return json.dumps(head | {key: value for key, value in _answer.items() if key not in head}, **_form)


def write_json(document: Any) -> None:
    """Write one JSON document at once, without an envelope."""
    sys.stdout.write(json.dumps(document, **_INDENTED) + "\n")


def stream_json(document: Any) -> None:
    """Write one JSON document in a line at once, for readers that follow; the envelope is then the last line."""
    global _form
    _form = _IN_ONE_LINE
    sys.stdout.write(json.dumps(document, **_IN_ONE_LINE) + "\n")
    sys.stdout.flush()
