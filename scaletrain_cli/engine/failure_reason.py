"""The reason that a rank gives for its end, from its exception and what caused that. Standard library only."""

from __future__ import annotations

import errno
from collections.abc import Iterator

from scaletrain_cli.errors import ExitCode, ScaletrainError
from scaletrain_cli.worker.failures import reason_in

_VERDICTS = {"NonFiniteGradientError": "nan", "LossScaleAtFloorError": "nan"}
_VERDICTS |= {"SpikeError": "spike", "WrongNodesError": "wrong-nodes", "NoRoomError": "disk-full"}
_VERDICTS |= {"UnreadableCheckpointsError": "unreadable", "DamagedDataError": "data"}
_TYPES = {
    "OutOfMemoryError": "oom",
    "MemoryError": "host-oom",
    **dict.fromkeys(("DistBackendError", "DistNetworkError", "DistStoreError"), "communication"),
}
_NUMBERS = {errno.ENOSPC: "disk-full", errno.EDQUOT: "disk-full", errno.ENOMEM: "host-oom"}


def reason_of(error: BaseException) -> str:
    """In the words of the launcher's judgement; what is no one's in particular is a crash."""
    if type(error).__name__ in _VERDICTS:
        return _VERDICTS[type(error).__name__]
    found = [reason for link in _chain(error) if (reason := _sign(link)) is not None]
    # The oldest in the chain is the cause; a broken connection on the way to it is not.
    causes = [reason for reason in found if reason != "communication"]
    if found:
        return causes[-1] if causes else "communication"
    stops = isinstance(error, ScaletrainError) and error.exit_code != ExitCode.CRASHED
    return "usage" if stops else "crash"


def exit_code_of(error: BaseException, reason: str) -> int:
    """A full disk is a verdict: no retry makes room, and each would fail at its first save."""
    if reason == "disk-full":
        return ExitCode.DO_NOT_REQUEUE
    return error.exit_code if isinstance(error, ScaletrainError) else ExitCode.CRASHED


def _sign(error: BaseException) -> str | None:
    words = str(error)
    if (known := _TYPES.get(type(error).__name__)) is not None:
        return "hardware" if reason_in(words) == "hardware" else known
    if isinstance(error, OSError):
        return _NUMBERS.get(error.errno or 0)
    return None if isinstance(error, ScaletrainError) else reason_in(words)


def _chain(error: BaseException) -> Iterator[BaseException]:
    """The error, what it was raised from or during, and so on. A loop, which Python permits, is cut."""
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        yield link
        link = link.__cause__ or (None if link.__suppress_context__ else link.__context__)
