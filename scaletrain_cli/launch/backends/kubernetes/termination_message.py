"""Write and read how a training pod ended: its termination message, one JSON object of at most 4096 bytes.

The kubelet copies the message into the status of the pod. A reader who sees neither the volume of the run nor the log
of the pod finds it there as long as the pod object exists. A pod that was killed writes no message; the kubelet then
copies the last lines of its log (``terminationMessagePolicy: FallbackToLogsOnError``).
"""

import contextlib
import json
import os
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from scaletrain_cli.reasons import Reason, reason_from, recorded
from scaletrain_cli.secret_text import hide_values_in

PATH = "/dev/termination-log"  # the default of Kubernetes
_MARK = "pod-end"
_MOST_BYTES = 4096  # the kubelet cuts longer messages off
_MOST_TEXT_CHARACTERS = 1000  # of a reason that does not fit with its parameters; 3 bytes each at most


@dataclass(frozen=True)
class PodEnd:
    """The end of one pod. ``step``: the last one logged, ``checkpoint_step``: that of the latest valid checkpoint.

    ``requeue``: pod 0 decided that the next gang goes on; None if it made no decision that this pod knows.
    """

    exit_code: int
    reason: Reason
    attempt: int | None = None
    step: int | None = None
    checkpoint_step: int | None = None
    requeue: bool | None = None


@dataclass(frozen=True)
class TerminationMessage:
    """A termination message that was read. ``code`` is that of ``end.reason``, also where only its text fitted."""

    end: PodEnd
    code: str
    node: str


def termination_text(end: PodEnd, node: str, secrets: Collection[str] | None = ()) -> str:
    """Return the message. ``secrets``: values that must not be in it; None if they are not known.

    Without them only the code of the reason is written, as its text and parameters may contain one.
    """
    numbers = {"attempt": end.attempt, "step": end.step, "checkpoint_step": end.checkpoint_step, "requeue": end.requeue}
    whole = {"scaletrain": _MARK, "exit_code": end.exit_code, "node": node, **numbers}
    text = str(end.reason)
    reason = end.reason.to_document()
    cut = text[:_MOST_TEXT_CHARACTERS]
    code = {"code": end.reason.code}
    choices = ({**reason, "text": text}, reason, {**code, "text": cut}, code) if secrets is not None else (code,)
    for more in choices:
        found = json.dumps(hide_values_in(whole | more, secrets or ()), ensure_ascii=False, default=str)
        if len(found.encode("utf-8", "replace")) <= _MOST_BYTES:
            return found
    return json.dumps({**whole, "node": ""})


def write_termination_message(path: Path, end: PodEnd, node: str, secrets: Collection[str] | None = ()) -> None:
    """Write the message into the file that the kubelet mounts; does nothing outside a pod, where there is none."""
    with contextlib.suppress(OSError):
        file = os.open(path, os.O_WRONLY | os.O_TRUNC)
        with os.fdopen(file, "wb") as stream:
            stream.write(termination_text(end, node, secrets).encode("utf-8", "replace"))


def read_termination_message(text: str) -> TerminationMessage | None:
    """Return the message of a pod; None for any other text, such as the last lines of a log."""
    if not text.startswith("{"):
        return None
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if found.get("scaletrain") != _MARK or not isinstance(found.get("exit_code"), int):
        return None
    code = str(found.get("code", ""))
    reason = reason_from(found) if "params" in found else recorded(str(found.get("text") or code))
    keys = ("attempt", "step", "checkpoint_step")
    numbers = {key: value if type(value := found.get(key)) is int else None for key in keys}
    requeue = found["requeue"] if isinstance(found.get("requeue"), bool) else None
    return TerminationMessage(
        PodEnd(found["exit_code"], reason, **numbers, requeue=requeue), code, str(found.get("node", ""))
    )
