"""Worker processes: they take one task after another, and a task that is not finished leaves nothing."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from itertools import islice
from multiprocessing import get_context
from types import TracebackType
from typing import TypeVar

from scaletrain_cli.errors import ScaletrainError
from scaletrain_cli.reasons import Reason

Job = TypeVar("Job")

_WAITING_PER_WORKER = 2


class Workers:
    """``count`` processes, each of one thread; with 1 the work is done in this process."""

    def __init__(self, count: int) -> None:
        self._count = count
        # Spawned: a fork would copy locks that threads of the tokenizer hold.
        self._pool = (
            ProcessPoolExecutor(count, mp_context=get_context("spawn"), initializer=_one_thread) if count > 1 else None
        )

    def run(self, work: Callable[[Job], None], jobs: Iterable[Job]) -> Iterator[int]:
        """Run ``work(job)`` for each job; yield the number of finished jobs after each.

        Raises the error of the first job that fails, and ScaletrainError if a worker is killed.
        """
        if self._pool is None:
            for done, job in enumerate(jobs, start=1):
                work(job)
                yield done
            return
        left, running, done = iter(jobs), set[Future[None]](), 0
        try:
            while True:
                wanted = self._count * _WAITING_PER_WORKER - len(running)
                running |= {self._pool.submit(work, job) for job in islice(left, wanted)}
                if not running:
                    return
                finished, running = wait(running, return_when=FIRST_COMPLETED)
                for each in finished:
                    each.result()
                    done += 1
                    yield done
        except BrokenProcessPool as error:
            raise ScaletrainError(Reason("data.worker-killed")) from error

    def __enter__(self) -> Workers:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)


def _one_thread() -> None:
    os.environ.update(TOKENIZERS_PARALLELISM="false", RAYON_NUM_THREADS="1", OMP_NUM_THREADS="1")
