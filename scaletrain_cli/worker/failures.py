"""The failure of a rank or a node: its exit reason, and its record in attempts/NNNN/failures/<name>.json.

Exit reasons are ``oom``, ``host-oom``, ``hardware``, ``communication``, ``disk-full``, ``nan``, ``spike``, ``data``,
``unreadable``, ``wrong-nodes``, ``hang``, ``usage`` and ``crash``; the restart decision depends on them. An exception
states its exit reason in the attribute ``failure_reason`` of its class; that of an error of Python, torch or the system
is derived from its type and message.
"""

import contextlib
import dataclasses
import errno
import json
import os
import re
import sys
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from scaletrain_cli.errors import ExitCode, ScaletrainError
from scaletrain_cli.full_disk import is_full
from scaletrain_cli.reasons import Reason, reason_from
from scaletrain_cli.rundir.documents import documents_in, read_as, write_document
from scaletrain_cli.rundir.paths import RunDir
from scaletrain_cli.safe_files import make_folder
from scaletrain_cli.secret_text import hide_values, hide_values_in, secret_values
from scaletrain_cli.worker.position import RankView
from scaletrain_cli.worker.run_environment import read_resolved_run

# Messages of NVIDIA's driver, CUDA, NCCL, gloo, torch and the C library, in an error or at the end of a log.
# Causes precede consequences: a failed device also breaks the connections of its rank.
_SIGNS: tuple[tuple[str, re.Pattern[str]], ...] = (
    (
        "hardware",
        # Xid errors that no program can cause (docs.nvidia.com/deploy/xid-errors). A device-side
        # assertion or an illegal address is an error of the program, even if the driver logs an Xid for it.
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
# Exception types of torch, by name, so that this module does not import torch.
_TORCH_TYPES = {
    "OutOfMemoryError": "oom",
    "MemoryError": "host-oom",
    **dict.fromkeys(("DistBackendError", "DistNetworkError", "DistStoreError"), "communication"),
}
# Reason codes for errors of Python, torch or the system, by exit reason.
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
    """The failure of a rank (or, with rank None, of a node), reported by itself or by its agent.

    ``reason`` is the exit reason; ``code`` and ``params`` are those of the Reason whose text is ``message``, empty if
    there is only the message. ``node``: the name of the node record, if an agent reports. At a hang, ``ranks`` are
    those of the node, ``addresses`` its own, and ``stalled`` those of peers that do not acknowledge data.
    ``sure``: of records of earlier versions.
    """

    rank: int | None
    reason: str
    message: str
    exit_code: int
    node: str = ""
    sure: bool = True
    code: str = ""
    params: Mapping[str, Any] = field(default_factory=dict)
    ranks: tuple[RankView, ...] = ()
    addresses: tuple[str, ...] = ()
    stalled: tuple[str, ...] = ()

    @property
    def why(self) -> Reason:
        """Return the Reason; its code is ``recorded.text`` if there is only the message."""
        return reason_from({"code": self.code, "params": self.params, "text": self.message})


def failure_of(error: BaseException, rank: int | None) -> Failure:
    """Return the failure for an exception: exit reason, exit code, message with notes, and reason code."""
    reason = failure_reason_of(error)
    message = "\n".join([str(error), *getattr(error, "__notes__", [])])[:_MESSAGE_CHARACTERS]
    stated = getattr(error, "reason", None)
    if isinstance(stated, Reason) and isinstance(error, ScaletrainError) and error.problems:
        stated = Reason("engine.with-problems", {"cause": stated, "problems": "; ".join(map(str, error.problems))})
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
    """Return the exit reason of an exception: the stated one, else that of its causes, else ``crash``."""
    if isinstance(stated := getattr(error, "failure_reason", None), str):
        return stated
    reasons = [reason for link in _chain(error) if (reason := _reason_of_link(link)) is not None]
    # The oldest exception in the chain is the cause; a broken connection is only a consequence.
    causes = [reason for reason in reasons if reason != "communication"]
    if reasons:
        return causes[-1] if causes else "communication"
    stops = isinstance(error, ScaletrainError) and error.exit_code != ExitCode.CRASHED
    return "usage" if stops else "crash"


def exit_code_of(error: BaseException, reason: str) -> int:
    """Return the exit code of an exception; 93 for a full disk, since each retry would fail at its first save."""
    if reason == "disk-full":
        return int(ExitCode.DO_NOT_REQUEUE)
    return int(error.exit_code if isinstance(error, ScaletrainError) else ExitCode.CRASHED)


def reason_in(text: str) -> str | None:
    """Return the exit reason for a message of a library or driver; None for all other text."""
    return next((reason for reason, sign in _SIGNS if sign.search(text)), None)


def report_exception(run: RunDir, attempt: int, rank: int, error: Exception) -> int:
    """Print the traceback of an exception that ends a rank, record the failure, and return the rank's exit code."""
    text = "".join(traceback.format_exception(error))
    with contextlib.suppress(OSError):
        print(hide_values(text, _secrets_of(run)), end="", file=sys.stderr, flush=True)
    failure = failure_of(error, rank)
    with contextlib.suppress(OSError):  # a full disk must not change the exit code
        write_failure(run, attempt, f"rank-{rank:05d}", failure)
    return failure.exit_code


def write_failure(run: RunDir, attempt: int, name: str, failure: Failure) -> None:
    """Write the record that the exit classification of the attempt reads, with secrets hidden. Raises OSError.

    Errors of libraries quote addresses and keys that they were given, and every reader of the run can read the record.
    """
    folder = run.attempt(attempt) / "failures"
    make_folder(folder)
    secrets = _secrets_of(run)
    message, params = hide_values(failure.message, secrets), hide_values_in(failure.params, secrets)
    write_document(
        folder / f"{name}.json", dataclasses.asdict(dataclasses.replace(failure, message=message, params=params))
    )


def _secrets_of(run: RunDir) -> list[str]:
    """Return the values of the secret variables of this process: those in ``secret_env``, and those named like one."""
    names: list[str] = []
    with contextlib.suppress(ScaletrainError, OSError, KeyError, TypeError, AttributeError):  # a damaged run.json
        names = read_resolved_run(run).spec.get("secret_env", [])
    return secret_values(os.environ, names)


def read_failures(run: RunDir, attempt: int) -> list[Failure]:
    """Return the failure records of an attempt, by file name. Raises UsageError for a damaged one."""
    failures = [read_as(Failure, path) for path in documents_in(run.attempt(attempt) / "failures")]
    return [failure for failure in failures if failure is not None]


def _reason_of_link(error: BaseException) -> str | None:
    words = str(error)
    if (known := _TORCH_TYPES.get(type(error).__name__)) is not None:
        return "hardware" if reason_in(words) == "hardware" else known
    if isinstance(error, OSError):
        return "disk-full" if is_full(error) else "host-oom" if error.errno == errno.ENOMEM else None
    return None if isinstance(error, ScaletrainError) else reason_in(words)


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yield the exception, its cause or context, and so on. Stops at a cycle, which Python permits."""
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        yield link
        link = link.__cause__ or (None if link.__suppress_context__ else link.__context__)
