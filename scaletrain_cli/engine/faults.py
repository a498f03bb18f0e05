"""Fault injection, off by default, by kind, rank and step; drills use it to verify that nothing is lost.

``SCALETRAIN_FAULT="sigkill rank=1 step=7; slow-save seconds=0.5"``: before optimizer step 7, rank 1 kills itself; every
checkpoint write takes half a second longer. ``KINDS`` has every kind with its keys; each may name ``rank``, ``step``
and ``attempt``, and without them affects all ranks, steps or attempts.
"""

import contextlib
import errno
import logging
import math
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from scaletrain_cli.errors import UsageError
from scaletrain_cli.reasons import Reason
from scaletrain_cli.rundir.checkpoints import Checkpoint, list_checkpoints
from scaletrain_cli.safe_files import open_to_change
from scaletrain_cli.worker.checkpoint_commit import open_attempt

# Corruption of a committed checkpoint.


CORRUPTIONS = ("truncate", "flip", "delete")


def corrupt(checkpoint: Checkpoint, kind: str) -> Path:
    """Truncate, flip a bit of, or delete the largest file in the manifest, and return its path."""
    name = max(checkpoint.files, key=lambda name: checkpoint.files[name].size)
    path, middle = checkpoint.path / name, checkpoint.files[name].size // 2
    if kind == "delete":
        path.unlink()
    elif kind == "truncate":
        os.truncate(path, middle)
    else:
        with os.fdopen(open_to_change(path), "r+b") as file:
            file.seek(middle)
            byte = file.read(1)[0]
            file.seek(middle)
            file.write(bytes([byte ^ 1]))
    return path


logger = logging.getLogger(__name__)

VARIABLE = "SCALETRAIN_FAULT"


@dataclass(frozen=True)
class Fault:
    """One fault; a field that is None matches anything."""

    kind: str
    rank: int | None = None
    step: int | None = None
    attempt: int | None = None
    seconds: float = 0.0
    last: int | None = None  # the last batch of a spike, whose first is ``step``
    factor: float = 1.0
    write: int | None = None  # the first write that fails on a full disk
    offset: int | None = None  # from a token to its label
    part: str = "weights"  # in which a bit is flipped
    bit: int = 0


class InjectedError(RuntimeError):
    """The exception that an ``exception`` fault raises."""


def _signal_self(number: int) -> Callable[[], None]:
    return lambda: os.kill(os.getpid(), number)


def _kill_agent() -> None:
    """Kill the agent, as the kernel does when memory is short. The kernel then kills the rank, too."""
    os.kill(int(os.environ["SCALETRAIN_AGENT_PID"]), signal.SIGKILL)
    time.sleep(_LAST_SECONDS)


def _kill_node() -> None:
    """Kill the agent and its ranks at once, so that none of them can report its end."""
    agent = int(os.environ["SCALETRAIN_AGENT_PID"])
    os.kill(agent, signal.SIGSTOP)
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # ended meanwhile
            parent = int(entry.read_bytes().rpartition(b")")[2].split()[1])
            if parent == agent and int(entry.parent.name) != os.getpid():
                os.kill(int(entry.parent.name), signal.SIGKILL)
    os.kill(agent, signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)


_LAST_SECONDS = 60.0  # until the kernel kills this rank
_ACTIONS: dict[str, Callable[[], None]] = {
    "sigkill": _signal_self(signal.SIGKILL),
    "sigterm": _signal_self(signal.SIGTERM),
    "sigstop": _signal_self(signal.SIGSTOP),
    "sigkill-agent": _kill_agent,
    "node": _kill_node,
}
_OF_DATA = ("slow-data", "labels")


class FaultKind(NamedTuple):
    """The effect of a kind of fault, and the keys that it reads beside rank, step and attempt."""

    effect: str
    keys: tuple[str, ...] = ()


# The weights that replicas have alike, those of experts, and what belongs to the update.
STATE_PARTS = ("weights", "expert-weights", "fp32-weights", "optimizer-state")
_IN_CHECKPOINT = "in the latest checkpoint, from the step on and once there are two, and the rank kills itself"
KINDS: dict[str, FaultKind] = {
    "sigkill": FaultKind("the rank kills itself before the step"),
    "sigterm": FaultKind("the rank gets SIGTERM before the step, as in a preemption"),
    "sigstop": FaultKind("the rank is stopped before the step"),
    "sigkill-agent": FaultKind("the rank kills its node agent before the step"),
    "node": FaultKind("the agent and all ranks of the node are killed at once before the step"),
    "exception": FaultKind("the rank raises an exception before the step"),
    "stale-attempt": FaultKind("the checkpoints are opened to a later attempt, as if this one had been superseded"),
    "truncate": FaultKind(f"a file is truncated {_IN_CHECKPOINT}"),
    "flip": FaultKind(f"one bit is flipped {_IN_CHECKPOINT}"),
    "delete": FaultKind(f"a file is deleted {_IN_CHECKPOINT}"),
    "nan": FaultKind("the rank's loss becomes NaN in the step"),
    "spike": FaultKind(
        "the loss of the batches of the steps (`step=20-23`) is multiplied by `factor` (20) on all ranks, so that a "
        "run that leaves these batches out avoids the spike",
        ("factor",),
    ),
    "slow-save": FaultKind("every checkpoint write takes `seconds` longer", ("seconds",)),
    "slow-copy": FaultKind("every copy in host memory takes `seconds` longer", ("seconds",)),
    "slow-rank": FaultKind(
        "the rank waits `seconds` before every step, with `step=5` from that on, with `step=5-9` before these",
        ("seconds",),
    ),
    "disk-full": FaultKind(
        "from the step on, checkpoint write number `write` (1) of a rank and all later ones fail", ("write",)
    ),
    "slow-data": FaultKind("each read of a batch takes `seconds` longer", ("seconds",)),
    "labels": FaultKind(
        "the label of a token is the `offset`-th one after it (1 in correct data): with 2 as in data that were shifted "
        "twice, with 0 as in data that were not",
        ("offset",),
    ),
    "bit-flip": FaultKind(
        f"bit number `bit` (0) of a `part` of the rank's state ({', '.join(STATE_PARTS)}) is flipped before the update "
        "of the step",
        ("part", "bit"),
    ),
    "wrong-output": FaultKind("from the step on, the rank's device computes one value of the embeddings wrongly"),
    "non-causal": FaultKind("each token also has the embedding of the next one"),
}
_COMMON_KEYS = ("rank", "step", "attempt")


@dataclass(frozen=True)
class FaultyReading:
    """Reads batches by number with the faults of data; can be pickled if ``read`` can."""

    read: Callable[[int], Any]
    faults: tuple[Fault, ...]

    def __call__(self, number: int) -> Any:
        batch = self.read(number)
        for fault in self.faults:
            if fault.kind == "slow-data":
                time.sleep(fault.seconds)
            elif hasattr(batch, "labels"):
                offset = 1 if fault.offset is None else fault.offset
                moved = batch.tokens.roll(-offset, -1)
                batch = batch._replace(labels=moved.where(batch.labels >= 0, batch.labels))
        return batch


class Faults:
    """The faults of one rank in one attempt; ``folder`` holds the run's checkpoints."""

    def __init__(self, text: str, rank: int, attempt: int, folder: Path | None = None) -> None:
        parsed = [_parse(part) for part in text.split(";") if part.strip()]
        self._mine = [f for f in parsed if f.rank in (None, rank) and f.attempt in (None, attempt)]
        self._folder, self._attempt = folder, attempt
        self._step = self._writes = 0

    @classmethod
    def from_environment(cls, rank: int, attempt: int, folder: Path | None = None) -> "Faults":
        """Read $SCALETRAIN_FAULT. Raises UsageError."""
        return cls(os.environ.get(VARIABLE, ""), rank, attempt, folder)

    @property
    def save_delay_seconds(self) -> float:
        """Additional seconds of each checkpoint write of this rank."""
        return sum(fault.seconds for fault in self._mine if fault.kind == "slow-save")

    @property
    def copy_delay_seconds(self) -> float:
        """Additional seconds of each copy of this rank in host memory."""
        return sum(fault.seconds for fault in self._mine if fault.kind == "slow-copy")

    def before_write(self) -> None:
        """Called before each write to a checkpoint. Raises OSError for an injected full disk."""
        full = [f for f in self._mine if f.kind == "disk-full" and self._step >= (f.step or 0)]
        self._writes += bool(full)
        if any(self._writes >= (f.write or 1) for f in full):
            raise OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)} (injected at write {self._writes})")

    def before_step(self, step: int) -> None:
        """Inject the faults that are due before optimizer step ``step`` (1-based)."""
        self._step = step
        for fault in self._mine:
            if fault.kind in CORRUPTIONS:
                # From its step on, once there are two checkpoints.
                committed = list_checkpoints(self._folder) if self._folder and step >= (fault.step or 1) else []
                if len(committed) > 1:
                    logger.warning("injected: %s %s", fault.kind, corrupt(committed[-1], fault.kind))
                    os.kill(os.getpid(), signal.SIGKILL)
            elif fault.kind == "slow-rank" and (fault.step or 1) <= step <= (fault.last or step):
                time.sleep(fault.seconds)
        for fault in self._due(step):
            if fault.kind in _ACTIONS:
                _ACTIONS[fault.kind]()
            elif fault.kind == "stale-attempt" and self._folder is not None:
                open_attempt(self._folder, self._attempt + 1)
            elif fault.kind == "exception":
                raise InjectedError(f"injected before step {step}")

    def bit_flips(self, step: int) -> list[tuple[str, int]]:
        """Return the part of the state and the number of each bit to flip before the update of ``step`` (1-based)."""
        return [(fault.part, fault.bit) for fault in self._due(step) if fault.kind == "bit-flip"]

    def injects_nan(self, step: int) -> bool:
        """Return True if this rank's loss is to become NaN at ``step``."""
        return any(fault.kind == "nan" for fault in self._due(step))

    def loss_factor(self, batch: int) -> float:
        spikes = [fault for fault in self._mine if fault.kind == "spike"]
        return math.prod([fault.factor for fault in spikes if (fault.step or 1) <= batch <= (fault.last or batch)])

    def reading(self, read: Callable[[int], Any]) -> Callable[[int], Any]:
        """Return what reads batches of training by number, with the faults of data if there are any."""
        faults = tuple(fault for fault in self._mine if fault.kind in _OF_DATA)
        return FaultyReading(read, faults) if faults else read

    def change_model(self, model: Any) -> None:
        """Inject the faults of the model, once it is built. Of a pipeline only the first stage has the embedding."""
        for fault in self._mine if model.language is not None else ():
            embedding, first = model.language.token_embedding, fault.step or 1
            if fault.kind == "non-causal":
                embedding.register_forward_hook(lambda module, given, output: output + output.roll(-1, 1))
            elif fault.kind == "wrong-output":
                embedding.register_forward_hook(partial(self._compute_wrongly, first))

    def _compute_wrongly(self, first: int, module: Any, given: Any, output: Any) -> Any:
        """Return the output of the module with one wrong value, from the step ``first`` on."""
        output = output.clone()
        output.view(-1)[0] += self._step >= first
        return output

    def _due(self, step: int) -> list[Fault]:
        return [fault for fault in self._mine if fault.step == step]


def _parse(text: str) -> Fault:
    kind, *settings = text.split()
    try:
        given = dict(setting.split("=", 1) for setting in settings)
        names = list(given)
        first, _, last = given.pop("step", "").partition("-")
        whole = {key: int(given.pop(key)) for key in ("rank", "attempt", "write", "offset", "bit") if key in given}
        step, last_step = int(first) if first else None, int(last) if last else None
        seconds, factor = float(given.pop("seconds", 0)), float(given.pop("factor", 20))
    except ValueError as error:
        params = {"variable": VARIABLE, "text": text.strip(), "error": str(error)}
        raise UsageError(Reason("engine.fault-invalid", params)) from error
    place = {"variable": VARIABLE, "text": text.strip()}
    if kind not in KINDS:
        raise UsageError(Reason("engine.fault-unknown", {**place, "kinds": list(KINDS)}))
    keys = (*_COMMON_KEYS, *KINDS[kind].keys)
    if unknown := [key for key in names if key not in keys]:
        raise UsageError(Reason("engine.fault-key-unknown", {**place, "unknown": unknown, "kind": kind, "keys": keys}))
    if kind == "spike" and last_step is None:
        last_step = step
    part = given.get("part", Fault.part)
    if part not in STATE_PARTS:
        raise UsageError(Reason("engine.fault-part-unknown", {**place, "part": part, "parts": list(STATE_PARTS)}))
    return Fault(kind, step=step, last=last_step, seconds=seconds, factor=factor, part=part, **whole)
