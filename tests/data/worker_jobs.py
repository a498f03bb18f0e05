"""Any number of jobs in the worker processes of a preparation, which keep few of them waiting."""

from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any

from scaletrain_cli.data.pipeline.schedule import Workers


def run_jobs(pool: Workers, work: Callable[[Any], None], jobs: Iterable[Any]) -> Iterator[int]:
    """Run ``work(job)`` for each job; yield the number of finished jobs after each. Raises the first error of a job."""
    left, done = enumerate(jobs), 0
    while True:
        for number, job in islice(left, 2 * pool.count - len(pool.running)):
            pool.start(work, number, job)
        if not pool.running:
            return
        for _, error in pool.finished():
            if error is not None:
                raise error
            done += 1
            yield done
