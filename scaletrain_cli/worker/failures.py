"""What a rank or a node says about its own end: attempts/NNNN/failures/<name>.json. For engine and agent alike."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from scaletrain_cli.reasons import Reason, recorded
from scaletrain_cli.rundir.documents import from_document, read_document, write_document
from scaletrain_cli.rundir.paths import RunDir
from scaletrain_cli.safe_files import make_folder

# What the words of an error, or of the end of a log, give away about its cause.


# Cause before consequence: a device that breaks also breaks the connections of its rank.
_SIGNS: tuple[tuple[str, re.Pattern[str]], ...] = (
    (
        "hardware",
        # NVIDIA's names for what no program can do to a device: docs.nvidia.com/deploy/xid-errors. A device-side
        # assertion or an illegal address is a program's own error, whatever Xid the driver logs for it.
        re.compile(
            r"[Uu]ncorrectable (ECC|NVLink)|ECC error|\bXid \(|fallen off the bus|GPU is lost|hardware stack error"
        ),
    ),
    ("disk-full", re.compile(r"No space left on device|Disk quota exceeded")),
    ("oom", re.compile(r"CUDA out of memory|CUDA error: out of memory|CUBLAS_STATUS_ALLOC_FAILED")),
    ("host-oom", re.compile(r"DefaultCPUAllocator: .*allocate memory|Cannot allocate memory")),
    (
        "communication",
        re.compile(
            r"NCCL error|\bnccl(System|Remote|Internal|Unhandled)\w*Error|Watchdog caught collective operation timeout"
            r"|\bgloo\b.*(closed|reset|refused|timed? ?out|pair)|Connection closed by peer|Timed out waiting \d+ ?ms"
            r"|Socket Timeout",
            re.I,
        ),
    ),
)


def reason_in(text: str) -> str | None:
    """The reason that the words point to; None when they say nothing of the kind."""
    return next((reason for reason, sign in _SIGNS if sign.search(text)), None)


# The exit reason (launch/exit_classification.py) that each code of a failure stands for; all others are a crash.
EXIT_REASON_OF_CODE: Mapping[str, str] = {
    "engine.gradient-not-finite": "nan",
    "engine.loss-scale-at-floor": "nan",
    "engine.loss-spike": "spike",
    "engine.wrong-nodes": "wrong-nodes",
    "engine.disk-full": "disk-full",
    "engine.checkpoints-unreadable": "unreadable",
    "engine.data-damaged": "data",
    "engine.out-of-memory": "oom",
    "engine.host-out-of-memory": "host-oom",
    "engine.connection-lost": "communication",
    "engine.device-failed": "hardware",
}


@dataclass(frozen=True)
class Failure:
    """Why a rank (or, with rank None, a node) failed, by itself or by its agent.

    ``reason`` is the exit reason; ``code`` and ``params`` are those of the Reason that ``message`` is the text of,
    empty where there is only the message. ``node`` is the name of the node record where an agent reports. Not ``sure``:
    another node may have better evidence.
    """

    rank: int | None
    reason: str
    message: str
    exit_code: int
    node: str = ""
    sure: bool = True
    code: str = ""
    params: Mapping[str, Any] = field(default_factory=dict)

    @property
    def why(self) -> Reason:
        """The code and parameters, or the message alone as ``recorded.text``."""
        return Reason(self.code, self.params) if self.code else recorded(self.message)


def write_failure(run: RunDir, attempt: int, name: str, failure: Failure) -> None:
    """Leave the reason where judging the attempt will look for it. Raises OSError."""
    folder = run.attempt(attempt) / "failures"
    make_folder(folder)
    write_document(folder / f"{name}.json", dataclasses.asdict(failure))


def read_failures(run: RunDir, attempt: int) -> list[Failure]:
    """Every reason left, by file name."""
    paths = sorted((run.attempt(attempt) / "failures").glob("[!.]*.json"))
    return [from_document(Failure, data, path) for path in paths if (data := read_document(path)) is not None]
