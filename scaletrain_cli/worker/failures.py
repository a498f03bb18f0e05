"""What a rank or a node says about its own end: attempts/NNNN/failures/<name>.json. For engine and agent alike."""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass

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


@dataclass(frozen=True)
class Failure:
    """A rank (or, with rank None, a node) saying itself why it gives up; or its agent, of a rank that cannot.

    ``node`` is the node record's name for it, where an agent speaks. Not ``sure``: another node may know better.
    """

    rank: int | None
    reason: str
    message: str
    exit_code: int
    node: str = ""
    sure: bool = True


def write_failure(run: RunDir, attempt: int, name: str, failure: Failure) -> None:
    """Leave the reason where judging the attempt will look for it. Raises OSError."""
    folder = run.attempt(attempt) / "failures"
    make_folder(folder)
    write_document(folder / f"{name}.json", dataclasses.asdict(failure))


def read_failures(run: RunDir, attempt: int) -> list[Failure]:
    """Every reason left, by file name."""
    paths = sorted((run.attempt(attempt) / "failures").glob("[!.]*.json"))
    return [from_document(Failure, data, path) for path in paths if (data := read_document(path)) is not None]
