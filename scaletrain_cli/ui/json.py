"""The output of ``--json``: one JSON document per command line, UTF-8, without NaN.

A verb passes its answer to ``print_json``. It is written when the command ends, inside the envelope of docs/json.md.
"""

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
    """Set the answer of this command line; its keys are added to those of the envelope."""
    _answer.clear()
    _answer.update(answer)


def forget_answer() -> None:
    """Clear the answer before a command line runs."""
    global _form
    _answer.clear()
    _form = _INDENTED


def envelope_text(schema: str, error: ScaletrainError | None) -> str:
    """Return the envelope with the answer and, if any, the error. Raises ValueError for NaN."""
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
