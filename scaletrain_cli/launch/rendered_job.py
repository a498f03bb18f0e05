"""What a scheduler was sent last for a run, kept beside it, and how the next text differs; forms for other programs.

Knows no scheduler: it compares texts.
"""

from __future__ import annotations

import difflib
import json
import re
from typing import Any

from scaletrain_cli.errors import UsageError
from scaletrain_cli.rundir.paths import RunDir
from scaletrain_cli.safe_files import replace_file
from scaletrain_cli.spec.source import read_documents

FORMATS = {"local": "script", "slurm": "script", "kubernetes": "yaml"}
# A workload on Kubernetes is numbered by submission; that alone is no change.
_NUMBERED = re.compile(r"(-s|submission: \"?)\d+")


def keep_sent(run: RunDir, text: str) -> None:
    """Remember the text of a submission. Raises OSError."""
    replace_file(run.sent, text)


def changes_since_sent(run: RunDir, text: str) -> list[str] | None:
    """Lines that went and came, as diff shows them; None where nothing was sent yet."""
    try:
        before = run.sent.read_text(encoding="utf-8")
    except OSError:
        return None
    old, new = (_NUMBERED.sub(r"\1N", one).splitlines() for one in (before, text))
    return [
        line for line in difflib.unified_diff(old, new, lineterm="", n=0) if not line.startswith(("---", "+++", "@@"))
    ]


def in_format(scheduler: str, text: str, wanted: str) -> str:
    """The text, or its JSON. Raises UsageError for a form that this scheduler's text does not have."""
    usual = FORMATS[scheduler]
    if wanted == usual:
        return text
    if wanted == "json":
        return json.dumps(_as_json(scheduler, text), indent=1) + "\n"
    raise UsageError(f"--output {wanted}: {scheduler} gets a {usual}. Use {usual} or json.")


def _as_json(scheduler: str, text: str) -> dict[str, Any]:
    """A List that kubectl and the API read, or the script as one string."""
    if FORMATS[scheduler] == "script":
        return {"schema": "scaletrain.sent/v1", "scheduler": scheduler, "script": text}
    return {"apiVersion": "v1", "kind": "List", "items": read_documents(text)}
