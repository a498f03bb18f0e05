"""Reading batches ahead of the training loop, in a thread or in processes, and copying them to the device."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, NamedTuple, TypeVar, cast

import torch
from torch import Tensor

from scaletrain_cli.engine.data.reader_processes import ReaderProcesses

Batch = TypeVar("Batch")


def map_tensors(value: Batch, change: Callable[[Tensor], Tensor]) -> Batch:
    """Return a batch with each tensor in it changed: a tensor, or tuples, lists and dictionaries of tensors."""
    batch: Any = value
    if isinstance(value, Tensor):
        batch = change(value)
    elif isinstance(value, tuple):
        parts = [map_tensors(part, change) for part in value]
        batch = type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    elif isinstance(value, list):
        batch = [map_tensors(part, change) for part in value]
    elif isinstance(value, dict):
        batch = {name: map_tensors(part, change) for name, part in value.items()}
    return cast(Batch, batch)


class _Arrival(NamedTuple):
    batch: Any
    copied: torch.cuda.Event | None  # on the copying stream, after the copies; None without a GPU


class Round(NamedTuple):
    """A round of an evaluation of the first ``samples`` of a source. ``number``: of the round, from 1 on."""

    source: str
    number: int
    samples: int


@dataclass(frozen=True)
class BatchesAndRounds:
    """Reads batches of training by their numbers, and rounds of validation, so that one loader reads both.

    ``validation``: readers of images, which read any round of an evaluation by its number alone.
    """

    training: Callable[[int], Any]
    validation: Mapping[str, Any]

    def __call__(self, request: int | Round) -> Any:
        if isinstance(request, Round):
            return self.validation[request.source].round(request.number, request.samples)
        return self.training(request)


class Loader(Generic[Batch]):
    """Reads batches by number ahead of their use; ``read`` must be a pure function of the number.

    Other values that can be pickled and hashed may name batches as well as numbers do.

    ``workers``: processes that read, to which ``read`` is pickled; 0: a thread of this process reads. ``pin_memory``:
    on a GPU the copies go from page-locked memory on a separate stream, in parallel with the computation.
    """

    def __init__(
        self, read: Callable[[Any], Batch], device: torch.device, *, workers: int = 0, pin_memory: bool = True
    ) -> None:
        self._device, self._pin = device, pin_memory
        self._processes = ReaderProcesses(read, workers) if workers else None
        self._read: Callable[[Any], Batch] = read if self._processes is None else self._processes.take
        on_gpu = device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if on_gpu else None  # type: ignore[no-untyped-call]
        # the current GPU is a setting per thread
        choose_gpu = partial(torch.cuda.set_device, device) if on_gpu else None
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="feed", initializer=choose_gpu)
        self._ahead: dict[Hashable, Future[_Arrival]] = {}

    def take(self, number: Hashable, following: Sequence[Hashable] = ()) -> Batch:
        """Return a batch, and read the ``following`` ones ahead. Raises the error of the read of this batch.

        Batches that were read ahead and are neither are discarded.
        """
        wanted = tuple(dict.fromkeys((number, *following)))
        for stale in self._ahead.keys() - set(wanted):
            self._ahead.pop(stale).cancel()
        if self._processes is not None:
            self._processes.want(wanted)
        if number not in self._ahead:  # the thread reads in the order of the calls
            for later in self._ahead.values():
                later.cancel()
            self._ahead = {}
        for one in wanted:
            if one not in self._ahead:
                self._ahead[one] = self._thread.submit(self._fetch, one)
        arrival = self._ahead.pop(number).result()
        if arrival.copied is not None:
            stream = torch.cuda.current_stream(self._device)
            stream.wait_event(arrival.copied)
            map_tensors(arrival.batch, partial(_recorded, stream))
        return cast(Batch, arrival.batch)

    def close(self) -> None:
        """End the processes, and wait for the batch in flight and discard it."""
        if self._processes is not None:
            self._processes.stop()
        self._thread.shutdown(wait=True, cancel_futures=True)
        if self._processes is not None:
            self._processes.close()

    def _fetch(self, number: Hashable) -> _Arrival:
        batch = self._read(number)
        if self._stream is None:
            return _Arrival(batch, None)
        with torch.cuda.stream(self._stream):
            pin = self._pin
            on_device = map_tensors(
                batch, lambda tensor: (tensor.pin_memory() if pin else tensor).to(self._device, non_blocking=pin)
            )
            copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            copied.record()
        return _Arrival(on_device, copied)


def _recorded(stream: torch.cuda.Stream, tensor: Tensor) -> Tensor:
    """Return the tensor, whose memory the copying stream then does not reuse too early."""
    tensor.record_stream(stream)
    return tensor
