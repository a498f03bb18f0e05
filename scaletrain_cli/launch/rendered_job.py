"""The rendered job of a run: its last submitted text, the diff to the next one, and its output formats.

Independent of the scheduler: it compares texts.
"""

from __future__ import annotations

import difflib
import json
import re
from typing import Any

from scaletrain_cli.errors import UsageError
from scaletrain_cli.launch.backends.base import Backend
from scaletrain_cli.reasons import Reason
from scaletrain_cli.rundir.paths import RunDir
from scaletrain_cli.safe_files import replace_file
from scaletrain_cli.spec.source import read_documents

# Names of Kubernetes workloads contain the number of the submission, which is not a change of the job.
_NUMBERED = re.compile(r"(-s|submission: \"?)\d+")


def store_rendered_job(run: RunDir, text: str) -> None:
    """Store the text of a submission in the run directory. Raises OSError."""
    replace_file(run.sent, text)


def changes_since_sent(run: RunDir, text: str) -> list[str] | None:
    """Return the diff to the last submission, removed and added lines only; None before the first submission."""
    try:
        before = run.sent.read_text(encoding="utf-8")
    except OSError:
        return None
    old, new = (_NUMBERED.sub(r"\1N", one).splitlines() for one in (before, text))
    return [
        line for line in difflib.unified_diff(old, new, lineterm="", n=0) if not line.startswith(("---", "+++", "@@"))
    ]


def in_format(backend: Backend, text: str, output: str) -> str:
    """Return the text of Backend.render(), or its JSON. Raises UsageError for a format that the back end lacks."""
    usual = backend.output_format
    if output == usual:
        return text
    if output == "json":
        return json.dumps(_as_json(backend, text), indent=1) + "\n"
    params = {"requested": output, "scheduler": backend.traits.display_name, "format": usual}
    raise UsageError(Reason("runs.output-format", params))


def _as_json(backend: Backend, text: str) -> dict[str, Any]:
    """Return a Kubernetes List, or an object with the script as one string."""
    if backend.output_format == "script":
        return {"schema": "scaletrain.sent/v1", "scheduler": backend.name, "script": text}
    return {"apiVersion": "v1", "kind": "List", "items": read_documents(text)}
