"""Processes of a rank that read batches.

A process is a program of its own, not a fork: threads and locks of the rank are not copied, and its memory does not
grow as pages of the rank are written. It is given a function ``read(number) -> batch`` once, as a pickle, and then
numbers, or other values that name batches. Tensors come back through anonymous files in memory, which need no room in
/dev/shm, leave nothing behind when a process is killed, and are three times as fast as a socket. The kernel ends a
process when its rank ends.
"""

import contextlib
import io
import itertools
import logging
import mmap
import os
import pickle
import subprocess
import sys
import traceback
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, Pipe, wait
from typing import Any

import numpy as np
import torch
from torch import Tensor

from scaletrain_cli.errors import ScaletrainError
from scaletrain_cli.own_processes import python_command
from scaletrain_cli.reasons import Reason
from scaletrain_cli.text import signal_text

Read = Callable[[Any], Any]
logger = logging.getLogger(__name__)

_SLOTS = 2  # batches that a process may have read before the rank takes the first of them
_ALIGNMENT = 64  # bytes, of each tensor in a slot
_MOST_RESTARTS = 3
_PROGRAM = "scaletrain_cli.engine.data.reader_program"
_ENVIRONMENT = {
    **dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "RAYON_NUM_THREADS"), "1"),
    **{"TOKENIZERS_PARALLELISM": "false", "CUDA_VISIBLE_DEVICES": ""},
}


class ReaderKilledError(ScaletrainError):
    """The reader processes of a rank were killed again and again (exit 1)."""


class ReaderTraceback(Exception):
    """The traceback of an error in a reader process, as text."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


@dataclass(frozen=True)
class _Reply:
    """A batch in a slot of a process, or the error of its read. ``sizes``: bytes of each buffer of the pickle."""

    number: Hashable
    slot: int
    content: bytes
    sizes: tuple[int, ...] = ()
    failed: bool = False


@dataclass
class _Process:
    """A reader process. ``free``: slots without a request; ``requested``: numbers that it still has to read.

    ``started``: it has replied; before that it imports its libraries.
    """

    process: subprocess.Popen[bytes]
    connection: Connection
    slots: tuple[int, ...]  # file descriptors
    free: list[int] = field(default_factory=lambda: list(range(_SLOTS)))
    requested: set[Hashable] = field(default_factory=set)
    started: bool = False


class ReaderProcesses:
    """``count`` processes that read the batches that ``want`` names, each in the order of the numbers.

    While a process starts, its batches are read here. ``want`` may be called in any thread, ``take`` in one other
    thread at a time.
    """

    def __init__(self, read: Read, count: int) -> None:
        """Raises the error of pickling ``read``."""
        self._read, self._program = read, _dumps(read)
        self._wanted: tuple[Hashable, ...] = ()
        self._arrived: dict[Hashable, tuple[_Process, _Reply]] = {}
        self._restarts = 0
        self._given_up: ReaderKilledError | None = None
        self._closed = False
        self._processes = [self._start() for _ in range(count)]

    @property
    def pids(self) -> list[int]:
        return [reader.process.pid for reader in self._processes]

    def want(self, numbers: Sequence[Hashable]) -> None:
        """Set the batches to read, in the order in which they are taken; others are discarded."""
        self._wanted = tuple(numbers)

    def take(self, number: Hashable) -> Any:
        """Return a batch. Raises the error of its read, and ReaderKilledError."""
        while not self._closed:
            if self._given_up is not None:
                raise self._given_up
            self._request(number)
            if number in self._arrived:
                return self._loaded(*self._arrived.pop(number))
            readers = [reader for reader in self._processes if number in reader.requested] or self._processes
            is_read = any(reader.started for reader in readers)  # or will be
            ready = wait([reader.connection for reader in self._processes], None if is_read else 0)
            if not ready:
                return self._read(number)
            for connection in ready:
                place = next(place for place, reader in enumerate(self._processes) if reader.connection is connection)
                self._receive(place)
        raise ValueError("closed")

    def stop(self) -> None:
        """Kill the processes, so that a call of ``take`` under way raises ValueError."""
        self._closed = True
        for reader in self._processes:
            reader.process.kill()

    def close(self) -> None:
        """Free everything, after ``stop`` and the last ``take``, which may have started a process in the meantime."""
        self.stop()
        for reader in self._processes:
            reader.process.wait()
            reader.connection.close()
            for slot in reader.slots:
                os.close(slot)
        self._processes = []

    def _request(self, number: Hashable) -> None:
        """Ask for the batches that are wanted and not yet asked for, as far as there are free slots."""
        wanted = self._wanted
        order = dict.fromkeys((number, *wanted))
        for stale in [one for one in self._arrived if one not in order]:
            self._discard(stale)
        # Batches are taken in this order: those before this one are not needed again.
        following = wanted[wanted.index(number) :] if number in wanted else order
        for batch in following:
            if batch in self._arrived or any(batch in process.requested for process in self._processes):
                continue
            process = min(self._processes, key=lambda process: (not process.free, len(process.requested)))
            if not process.free:
                if batch != number or any(process.requested for process in self._processes):
                    return
                # The slots hold later batches only; the last of them is read again.
                process = self._discard(max(self._arrived, key=list(order).index))
            process.requested.add(batch)
            with contextlib.suppress(OSError):  # it is dead, which ``wait`` reports
                process.connection.send((batch, process.free.pop()))

    def _discard(self, number: Hashable) -> _Process:
        process, reply = self._arrived.pop(number)
        process.free.append(reply.slot)
        return process

    def _receive(self, place: int) -> None:
        """Take a reply of a process, or start another process in its place."""
        process = self._processes[place]
        try:
            reply: _Reply = process.connection.recv()
        except (EOFError, OSError):
            if not self._closed:
                self._replace(place)
            return
        process.started = True
        process.requested.discard(reply.number)
        self._arrived[reply.number] = process, reply

    def _replace(self, place: int) -> None:
        """Start another process for one that died; what it had read or was to read is asked for again."""
        dead = self._processes[place]
        code = dead.process.wait()
        status = signal_text(-code) if code < 0 else f"exit code {code}"
        self._arrived = {number: one for number, one in self._arrived.items() if one[0] is not dead}
        dead.connection.close()
        for slot in dead.slots:
            os.close(slot)
        logger.warning("reader process %d ended with %s", dead.process.pid, status)
        if self._restarts == _MOST_RESTARTS:
            self._processes.pop(place)
            params = {"status": status, "restarts": self._restarts}
            self._given_up = ReaderKilledError(Reason("engine.reader-killed", params))
            return
        self._restarts += 1
        self._processes[place] = self._start()

    def _start(self) -> _Process:
        own, theirs = Pipe()
        slots = tuple(os.memfd_create("batch", os.MFD_CLOEXEC) for _ in range(_SLOTS))
        descriptors = (theirs.fileno(), *slots)
        process = subprocess.Popen(
            python_command(_PROGRAM, str(os.getpid()), *map(str, descriptors)),
            stdin=subprocess.DEVNULL,
            pass_fds=descriptors,
            env=os.environ | _ENVIRONMENT,
        )
        theirs.close()
        with contextlib.suppress(OSError):  # it is dead, which ``wait`` reports
            own.send(sys.path)
            own.send_bytes(self._program)
        return _Process(process, own, slots)

    def _loaded(self, process: _Process, reply: _Reply) -> Any:
        process.free.append(reply.slot)
        if reply.failed:
            error, text = pickle.loads(reply.content)
            error.__cause__ = ReaderTraceback(text)
            raise error
        starts, size = _places(reply.sizes)
        # Filled by a read, not mapped: the slot is used again, and memory that is not mapped cannot be taken away.
        memory = torch.empty(size, dtype=torch.uint8).numpy()
        _transfer(os.preadv, process.slots[reply.slot], [memory.data] if size else [])
        buffers = [memory[start : start + length] for start, length in zip(starts, reply.sizes, strict=True)]
        return pickle.loads(reply.content, buffers=buffers)


def _places(sizes: Sequence[int]) -> tuple[list[int], int]:
    """Return the first byte of each buffer in a slot, and the bytes of all."""
    ends = list(itertools.accumulate((-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes), initial=0))
    return ends[:-1], ends[-1]


def _transfer(call: Callable[..., int], descriptor: int, parts: list[memoryview]) -> None:
    """Read or write the parts one after another from the start of a file; one call moves 2 GiB at most."""
    place = 0
    for part in parts:
        left = part.cast("B")
        while len(left):
            if not (done := call(descriptor, [left], place)):
                raise OSError(f"a batch of {place + len(left)} bytes ends at byte {place}")
            left, place = left[done:], place + done


class _Pickler(pickle.Pickler):
    """Pickles tensors by their bytes, out of band, and memory-mapped arrays by the paths of their files."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            if not value.numel():
                return _tensor, (None, value.dtype, tuple(value.shape))
            flat: Any = value.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
            return _tensor, (pickle.PickleBuffer(flat), value.dtype, tuple(value.shape))
        if (
            isinstance(value, np.memmap)
            and value.flags.c_contiguous
            and isinstance(getattr(value, "_mmap", None), mmap.mmap)
        ):
            whole: Any = value
            while isinstance(whole.base, np.ndarray):  # a part of a mapped array has the offset of the whole
                whole = whole.base
            offset = int(whole.offset + value.ctypes.data - whole.ctypes.data)
            return _mapped, (str(value.filename), value.dtype, value.shape, offset)
        return NotImplemented


def _tensor(content: Any, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    if content is None:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(content, dtype=dtype).view(shape)


def _mapped(path: str, dtype: np.dtype[Any], shape: tuple[int, ...], offset: int) -> Any:
    if not all(shape):
        return np.empty(shape, dtype)
    return np.memmap(path, dtype=dtype, mode="r", offset=offset, shape=shape)


def _dumps(value: Any, buffers: list[pickle.PickleBuffer] | None = None) -> bytes:
    file = io.BytesIO()
    _Pickler(file, protocol=5, buffer_callback=None if buffers is None else buffers.append).dump(value)
    return file.getvalue()


def _portable_error(error: BaseException, text: str) -> bytes:
    """Return the pickle of an error and its traceback; an error that cannot be pickled becomes a RuntimeError."""
    for form in (error, _ByState(error)):
        with contextlib.suppress(Exception):
            content = pickle.dumps((form, text))
            if str(pickle.loads(content)[0]) == str(error):
                return content
    return pickle.dumps((RuntimeError(f"{type(error).__name__}: {error}"), text))


class _ByState:
    """An error that is restored without its ``__init__``, which may take other arguments than ``args``."""

    def __init__(self, error: BaseException) -> None:
        self._error = error

    def __reduce__(self) -> Any:
        return _restored, (type(self._error), self._error.args, self._error.__dict__)


def _restored(kind: type[BaseException], arguments: tuple[Any, ...], state: dict[str, Any]) -> BaseException:
    error = kind.__new__(kind, *arguments)
    error.args = arguments
    error.__dict__.update(state)
    return error


def serve(descriptor: int, slots: Sequence[int]) -> None:
    """Read batches for a rank, until it ends: the main function of a reader process."""
    connection = Connection(descriptor)
    with contextlib.suppress(EOFError, ConnectionError):  # the rank has ended
        sys.path[:] = connection.recv()
        read: Read | None = None
        content = connection.recv_bytes()
        while True:
            number, slot = connection.recv()
            try:
                read = read or pickle.loads(content)
                reply = _read_into(slots[slot], slot, number, read)
            except Exception as error:
                reply = _Reply(number, slot, _portable_error(error, traceback.format_exc()), failed=True)
            connection.send(reply)


def _read_into(descriptor: int, slot: int, number: Hashable, read: Read) -> _Reply:
    buffers: list[pickle.PickleBuffer] = []
    content = _dumps(read(number), buffers)
    views = [buffer.raw() for buffer in buffers]
    sizes = tuple(len(view) for view in views)
    starts, size = _places(sizes)
    os.ftruncate(descriptor, size)
    for view, start in zip(views, starts, strict=True):
        _transfer(lambda file, parts, place, start=start: os.pwritev(file, parts, start + place), descriptor, [view])
    return _Reply(number, slot, content, sizes)
