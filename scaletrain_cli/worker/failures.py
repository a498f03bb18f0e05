"""Why a rank or a node failed: the reason as one word, its record in attempts/NNNN/failures/<name>.json.

Reasons are ``oom``, ``host-oom``, ``hardware``, ``communication``, ``disk-full``, ``nan``, ``spike``, ``data``,
``unreadable``, ``wrong-nodes``, ``hang``, ``usage`` and ``crash``; the restart decision depends on them.
"""

from __future__ import annotations

import dataclasses
import errno
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from scaletrain_cli.errors import ExitCode, ScaletrainError
from scaletrain_cli.full_disk import is_full
from scaletrain_cli.reasons import Reason, reason_from
from scaletrain_cli.rundir.documents import from_document, read_document, write_document
from scaletrain_cli.rundir.paths import RunDir
from scaletrain_cli.safe_files import make_folder

# Words of NVIDIA's driver, CUDA, NCCL, gloo, torch and the C library, in an error or at the end of a log.
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
# Types of torch, by name, so that this module needs no torch.
_TORCH_TYPES = {
    "OutOfMemoryError": "oom",
    "MemoryError": "host-oom",
    **dict.fromkeys(("DistBackendError", "DistNetworkError", "DistStoreError"), "communication"),
}
# The reason that each code of an exception's Reason stands for; all others are a crash.
EXIT_REASON_OF_CODE: Mapping[str, str] = {
    "engine.gradient-not-finite": "nan",
    "engine.gradient-not-finite-again": "nan",
    "engine.loss-scale-at-floor": "nan",
    "engine.loss-spike": "spike",
    "engine.world-size-differs": "wrong-nodes",
    "engine.gpu-missing": "wrong-nodes",
    "engine.preflight-failed": "wrong-nodes",
    "engine.checkpoint-unreadable-here": "wrong-nodes",
    "engine.disk-too-small": "disk-full",
    "engine.too-few-inodes": "disk-full",
    "engine.disk-full": "disk-full",
    "engine.checkpoints-unreadable": "unreadable",
    "engine.checkpoint-folder-unreadable": "unreadable",
    "engine.data-corrupt": "data",
    "engine.out-of-memory": "oom",
    "engine.host-out-of-memory": "host-oom",
    "engine.connection-lost": "communication",
    "engine.device-failed": "hardware",
}
# The codes of errors that Python, torch or the system raise, by the reason that is recognized.
_CODE_OF_FOREIGN = {
    "oom": "engine.out-of-memory",
    "host-oom": "engine.host-out-of-memory",
    "disk-full": "engine.disk-full",
    "communication": "engine.connection-lost",
    "hardware": "engine.device-failed",
}
_MESSAGE_CHARACTERS = 2000


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
        return reason_from({"code": self.code, "params": self.params, "text": self.message})


def failure_of(error: BaseException, rank: int | None) -> Failure:
    """Return the failure that an exception means: its reason, exit code, message with notes, and reason code.

    An exception states it by an attribute ``failure_reason`` (the word), or by the code of an attribute ``reason``.
    """
    reason = failure_reason_of(error)
    message = "\n".join([str(error), *getattr(error, "__notes__", [])])[:_MESSAGE_CHARACTERS]
    stated = getattr(error, "reason", None)
    if not (isinstance(stated, Reason) and _fits_in_json(stated)):
        params = {"type": type(error).__name__, "error": message}
        stated = Reason(_CODE_OF_FOREIGN.get(reason, "engine.failed"), params)
    return Failure(rank, reason, message, exit_code_of(error, reason), **stated.to_document())


def _fits_in_json(reason: Reason) -> bool:
    """Return whether a record can hold the parameters, which may be those of a user's program."""
    try:
        json.dumps(reason.to_document(), allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        return False
    return True


def failure_reason_of(error: BaseException) -> str:
    """Return the reason of an exception: what it states, else what caused it; ``crash`` where nothing is known."""
    if isinstance(stated := getattr(error, "failure_reason", None), str):
        return stated
    if isinstance(because := getattr(error, "reason", None), Reason) and because.code in EXIT_REASON_OF_CODE:
        return EXIT_REASON_OF_CODE[because.code]
    found = [reason for link in _chain(error) if (reason := _reason_of_link(link)) is not None]
    # The oldest in the chain is the cause; a broken connection on the way to it is not.
    causes = [reason for reason in found if reason != "communication"]
    if found:
        return causes[-1] if causes else "communication"
    stops = isinstance(error, ScaletrainError) and error.exit_code != ExitCode.CRASHED
    return "usage" if stops else "crash"


def exit_code_of(error: BaseException, reason: str) -> int:
    """Return the exit code; 93 for a full disk, since each retry would fail at its first save."""
    if reason == "disk-full":
        return int(ExitCode.DO_NOT_REQUEUE)
    return int(error.exit_code if isinstance(error, ScaletrainError) else ExitCode.CRASHED)


def reason_in(text: str) -> str | None:
    """Return the reason that words of a library or driver point to; None for all other text."""
    return next((reason for reason, sign in _SIGNS if sign.search(text)), None)


def write_failure(run: RunDir, attempt: int, name: str, failure: Failure) -> None:
    """Write the record that the exit classification of the attempt reads. Raises OSError."""
    folder = run.attempt(attempt) / "failures"
    make_folder(folder)
    write_document(folder / f"{name}.json", dataclasses.asdict(failure))


def read_failures(run: RunDir, attempt: int) -> list[Failure]:
    """Return the failure records of an attempt, by file name. Raises UsageError for a damaged one."""
    paths = sorted((run.attempt(attempt) / "failures").glob("[!.]*.json"))
    return [from_document(Failure, data, path) for path in paths if (data := read_document(path)) is not None]


def _reason_of_link(error: BaseException) -> str | None:
    words = str(error)
    if (known := _TORCH_TYPES.get(type(error).__name__)) is not None:
        return "hardware" if reason_in(words) == "hardware" else known
    if isinstance(error, OSError):
        return "disk-full" if is_full(error) else "host-oom" if error.errno == errno.ENOMEM else None
    return None if isinstance(error, ScaletrainError) else reason_in(words)


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yield the error, what it was raised from or during, and so on. A loop, which Python permits, is cut."""
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        yield link
        link = link.__cause__ or (None if link.__suppress_context__ else link.__context__)
