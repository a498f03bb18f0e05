"""The next step's batch is read and copied to the device while the present one is trained on. Knows no data format."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import NamedTuple

import torch

from scaletrain_cli.engine.feeding.batches import MicroBatch, StepBatch


class _Arrival(NamedTuple):
    batch: StepBatch
    copied: torch.cuda.Event | None  # on the copying stream, behind the copies; None without a GPU


class Feed:
    """Batches by step, one step ahead. ``read`` is called in a thread and must be a pure function of the step.

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

    def take(self, step: int) -> list[MicroBatch]:
        """The micro-batches of a step; begins to fetch those of the next. Raises what reading them raised."""
        if self._ahead is None or self._ahead[0] != step:
            self._begin(step)
        assert self._ahead is not None
        arrival = self._ahead[1].result()
        self._begin(step + 1)
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

    def _begin(self, step: int) -> None:
        self._ahead = (step, self._thread.submit(self._fetch, step))

    def _fetch(self, step: int) -> _Arrival:
        batch = self._read(step)
        if self._stream is None:
            return _Arrival(batch, None)
        with torch.cuda.stream(self._stream):
            on_device = StepBatch._make(
                None if part is None else part.pin_memory().to(self._device, non_blocking=True) for part in batch
            )
            copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            copied.record(self._stream)
        return _Arrival(on_device, copied)
