"""Worker processes: they take one task after another, and a task that is not finished leaves nothing."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from itertools import islice
from multiprocessing import get_context
from typing import TypeVar

from scaletrain_cli.errors import ScaletrainError
from scaletrain_cli.reasons import Reason

Job = TypeVar("Job")

_WAITING_PER_WORKER = 2


def run_jobs(work: Callable[[Job], None], jobs: Iterable[Job], workers: int) -> Iterator[int]:
    """Run ``work(job)`` for each job in ``workers`` processes; yield the number of finished jobs after each.

    Raises the error of the first job that fails, after those that were begun; ScaletrainError if a worker is killed.
    """
    if workers <= 1:
        for done, job in enumerate(jobs, start=1):
            work(job)
            yield done
        return
    left, running, done = iter(jobs), set[Future[None]](), 0
    # Spawned: a fork would copy the threads' locks of the tokenizer. Each has one thread, so that workers are cores.
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn"), initializer=_one_thread) as pool:
        try:
            while True:
                wanted = workers * _WAITING_PER_WORKER - len(running)
                running |= {pool.submit(work, job) for job in islice(left, wanted)}
                if not running:
                    return
                finished, running = wait(running, return_when=FIRST_COMPLETED)
                for each in finished:
                    each.result()
                    done += 1
                    yield done
        except BrokenProcessPool as error:
            raise ScaletrainError(Reason("data.worker-killed")) from error
        finally:
            for each in running:
                each.cancel()


def _one_thread() -> None:
    os.environ.update(TOKENIZERS_PARALLELISM="false", RAYON_NUM_THREADS="1", OMP_NUM_THREADS="1")
