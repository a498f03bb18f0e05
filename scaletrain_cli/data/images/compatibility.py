"""Checks that prepared images and the tokenizer of captions are those that a spec asks for, without numpy."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from scaletrain_cli.errors import UsageError
from scaletrain_cli.reasons import Reason
from scaletrain_cli.safe_files import expand_home
from scaletrain_cli.spec import ClipSpec, RunSpec


def caption_tokenizer_digest(spec: RunSpec, folder: Path = Path()) -> str | None:
    """Return the SHA-256 of the tokenizer.json that encodes the captions of a run; None for a run without captions.

    ``folder``: the base of a relative path. Raises UsageError if it cannot be read.
    """
    if not isinstance(spec.model, ClipSpec) or spec.data.tokenizer.path is None:
        return None
    path = folder / expand_home(spec.data.tokenizer.path)
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError as error:
        problem = {"path": str(path), "error": error.strerror or str(error)}
        raise UsageError(Reason("data.caption-tokenizer-unreadable", problem)) from error


def require_same_tokenizer(spec: RunSpec, checkpoint: str, saved: Mapping[str, Any], folder: Path = Path()) -> None:
    """Raise UsageError if the captions of a checkpoint had another tokenizer.json than the spec names now.

    ``saved``: what the checkpoint states of its data; one of an earlier version does not state the tokenizer.
    """
    trained = saved.get("caption_tokenizer")
    if isinstance(trained, str) and (found := caption_tokenizer_digest(spec, folder)) not in (None, trained):
        params = {"checkpoint": checkpoint, "path": spec.data.tokenizer.path, "saved": trained[:12]}
        raise UsageError(Reason("data.caption-tokenizer-differs", params | {"found": str(found)[:12]}))
