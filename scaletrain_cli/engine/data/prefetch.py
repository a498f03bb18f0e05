"""The next batch is read and copied to the device while the present one is trained on. Knows no data format."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import NamedTuple

import torch

from scaletrain_cli.engine.data.batches import MicroBatch, StepBatch


class _Arrival(NamedTuple):
    batch: StepBatch
    copied: torch.cuda.Event | None  # on the copying stream, behind the copies; None without a GPU


class Feed:
    """Batches by number, one ahead. ``read`` is called in a thread and must be a pure function of the number.

    On a GPU the copies leave pinned memory on a stream of their own, beside the computation.
    """

    def __init__(self, read: Callable[[int], StepBatch], device: torch.device) -> None:
        self._read, self._device = read, device
        on_gpu = device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if on_gpu else None  # type: ignore[no-untyped-call]
        # The current GPU is a setting of each thread.
        choose_gpu = partial(torch.cuda.set_device, device) if on_gpu else None
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="feed", initializer=choose_gpu)
        self._ahead: tuple[int, Future[_Arrival]] | None = None

    def take(self, number: int) -> list[MicroBatch]:
        """The micro-batches of a batch; begins to fetch the next one. Raises what reading it raised.

        What was fetched and then not asked for, because the data between are left out, is dropped.
        """
        if self._ahead is None or self._ahead[0] != number:
            self._begin(number)
        assert self._ahead is not None
        arrival = self._ahead[1].result()
        self._begin(number + 1)
        if arrival.copied is not None:
            stream = torch.cuda.current_stream(self._device)
            stream.wait_event(arrival.copied)
            for part in arrival.batch:
                if part is not None:
                    part.record_stream(stream)  # or the copying stream would reuse the memory too early
        return arrival.batch.micro_batches()

    def close(self) -> None:
        """Wait for what is under way, and drop it."""
        self._thread.shutdown(wait=True, cancel_futures=True)

    def _begin(self, number: int) -> None:
        self._ahead = (number, self._thread.submit(self._fetch, number))

    def _fetch(self, number: int) -> _Arrival:
        batch = self._read(number)
        if self._stream is None:
            return _Arrival(batch, None)
        with torch.cuda.stream(self._stream):
            on_device = StepBatch._make(
                None if part is None else part.pin_memory().to(self._device, non_blocking=True) for part in batch
            )
            copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            copied.record(self._stream)
        return _Arrival(on_device, copied)
