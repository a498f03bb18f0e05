"""Worker processes: they take one task after another, and a task that is not finished leaves nothing."""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from itertools import islice
from multiprocessing import active_children, get_context
from types import TracebackType
from typing import Any, Generic, TypeVar

from scaletrain_cli.data.drafts import own_drafts_as
from scaletrain_cli.errors import ScaletrainError
from scaletrain_cli.reasons import Reason

Job = TypeVar("Job")

_WAITING_PER_WORKER = 2
_PR_SET_PDEATHSIG = 1


class Workers(Generic[Job]):
    """``count`` processes, each of one thread; with 1 the work is done in this process.

    ``owner``: in whose name the processes write drafts; by default each in its own.
    """

    def __init__(self, count: int, owner: str | None = None) -> None:
        self.count = count
        self._others = set(active_children())
        self._running: dict[Future[None], Job] = {}
        self._done: list[tuple[Job, Exception | None]] = []
        # Spawned: a fork would copy locks that threads of the tokenizer hold.
        self._pool = (
            ProcessPoolExecutor(count, get_context("spawn"), _begin, (os.getpid(), owner)) if count > 1 else None
        )
        if self._pool is None and owner is not None:
            own_drafts_as(owner)

    @property
    def running(self) -> set[Job]:
        """The jobs that were started and not returned by finished()."""
        return {*self._running.values(), *(job for job, _ in self._done)}

    def start(self, work: Callable[[Any], None], job: Job, argument: Any = None) -> None:
        """Start ``work(argument)`` as the job of a name; without worker processes, run it. None: ``work(job)``."""
        given = job if argument is None else argument
        if self._pool is not None:
            try:
                self._running[self._pool.submit(work, given)] = job
            except BrokenProcessPool as error:
                raise _killed(error) from error
            return
        try:
            work(given)
            self._done.append((job, None))
        except Exception as error:
            self._done.append((job, error))

    def finished(self, seconds: float | None = None) -> Iterator[tuple[Job, Exception | None]]:
        """Yield the jobs that have ended, with their errors, after waiting at most ``seconds`` for the first.

        Raises ScaletrainError if a worker process was killed.
        """
        if self._running:
            ended, _ = wait(self._running, timeout=seconds, return_when=FIRST_COMPLETED)
            for each in ended:
                error = each.exception()
                if isinstance(error, BrokenProcessPool):
                    raise _killed(error)
                if error is not None and not isinstance(error, Exception):
                    raise error
                self._done.append((self._running.pop(each), error))
        done, self._done = self._done, []
        yield from done

    def run(self, work: Callable[[Job], None], jobs: Iterable[Job]) -> Iterator[int]:
        """Run ``work(job)`` for each job; yield the number of finished jobs after each.

        Raises the error of the first job that fails, and ScaletrainError if a worker is killed.
        """
        left, done = iter(jobs), 0
        while True:
            most = 1 if self._pool is None else self.count * _WAITING_PER_WORKER - len(self._running)
            for job in islice(left, most):
                self.start(work, job)
            if not self._running and not self._done:
                return
            for _, error in self.finished():
                if error is not None:
                    raise error
                done += 1
                yield done

    def __enter__(self) -> Workers[Job]:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._pool is not None:
            if kind is not None:  # nobody waits for the jobs that run
                for process in set(active_children()) - self._others:
                    process.kill()
            self._pool.shutdown(wait=True, cancel_futures=True)


def _killed(error: BrokenProcessPool) -> ScaletrainError:
    found = ScaletrainError(Reason("data.worker-killed"))
    found.__cause__ = error
    return found


def _begin(parent: int, owner: str | None) -> None:
    """Prepare a worker process: one thread, and an end with its parent, which alone handles signals."""
    os.environ.update(TOKENIZERS_PARALLELISM="false", RAYON_NUM_THREADS="1", OMP_NUM_THREADS="1")
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    with suppress(AttributeError, OSError):  # not on Linux
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # which died before
            os.kill(os.getpid(), signal.SIGKILL)
    if owner is not None:
        own_drafts_as(owner)
