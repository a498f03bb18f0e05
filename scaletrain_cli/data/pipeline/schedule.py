"""The order of the work: stages one after another, the units of a stage in any order and by any number of processes.

Worker processes take one task after another, and a task that is not finished leaves nothing.
"""

import ctypes
import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import active_children, get_context
from pathlib import Path
from typing import Any

from scaletrain_cli.data.drafts import own_drafts_as
from scaletrain_cli.data.pipeline.claims import Claims
from scaletrain_cli.errors import ScaletrainError
from scaletrain_cli.reasons import Reason
from scaletrain_cli.safe_files import make_folder

_PR_SET_PDEATHSIG = 1


class Workers:
    """``count`` processes, each of one thread; with 1 the work is done in this process.

    ``owner``: in whose name the processes write drafts; by default each in its own.
    """

    def __init__(self, count: int, owner: str | None = None) -> None:
        self.count = count
        self._others = set(active_children())
        self._running: dict[Future[None], int] = {}
        self._done: list[tuple[int, Exception | None]] = []
        # Spawned: a fork would copy locks that threads of the tokenizer hold.
        self._pool = (
            ProcessPoolExecutor(count, get_context("spawn"), _begin, (os.getpid(), owner)) if count > 1 else None
        )
        if self._pool is None and owner is not None:
            own_drafts_as(owner)

    @property
    def running(self) -> set[int]:
        """The jobs that were started and not returned by finished()."""
        return {*self._running.values(), *(job for job, _ in self._done)}

    def start(self, work: Callable[[Any], None], job: int, argument: Any) -> None:
        """Start ``work(argument)`` as the job of a number; without worker processes, run it."""
        if self._pool is not None:
            try:
                self._running[self._pool.submit(work, argument)] = job
            except BrokenProcessPool as error:
                raise _killed(error) from error
            return
        try:
            work(argument)
            self._done.append((job, None))
        except Exception as error:
            self._done.append((job, error))

    def finished(self, seconds: float | None = None) -> Iterator[tuple[int, Exception | None]]:
        """Yield the jobs that have ended, with their errors, after waiting at most ``seconds`` for the first.

        Raises ScaletrainError if a worker process was killed.
        """
        if self._running:
            ended, _ = wait(self._running, timeout=seconds, return_when=FIRST_COMPLETED)
            for future in ended:
                error = future.exception()
                if isinstance(error, BrokenProcessPool):
                    raise _killed(error)
                if error is not None and not isinstance(error, Exception):
                    raise error
                self._done.append((self._running.pop(future), error))
        done, self._done = self._done, []
        yield from done

    def __enter__(self) -> "Workers":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._pool is not None:
            if kind is not None:  # nobody waits for the jobs that run
                for process in set(active_children()) - self._others:
                    process.kill()
            self._pool.shutdown(wait=True, cancel_futures=True)


def _killed(error: BrokenProcessPool) -> ScaletrainError:
    failure = ScaletrainError(Reason("data.worker-killed"))
    failure.__cause__ = error
    return failure


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


Progress = Callable[[str, int, int], None]

# Listing the results of many units is slow on some file systems. The pause before the next listing is a multiple of the
# duration of the last one, and never longer than ``_LONGEST_WAIT`` seconds.
_TIMES_A_LOOK, _LONGEST_WAIT = 20, 30.0


@dataclass(frozen=True)
class Stage:
    """Units of work that need all stages before. ``results``: the file or folder in ``folder`` that each unit writes.

    ``key``: a name of the stage that other settings do not share. ``work``: called with the ``argument`` of a unit, by
    its number; it writes the result whole or not at all, and any process can do it.
    """

    name: str
    key: str
    folder: Path
    results: tuple[str, ...]
    work: Callable[[Any], None]
    argument: Callable[[int], Any] = lambda unit: unit
    is_over: Callable[[], bool] = lambda: False  # all later stages are done too, and results may be removed


def run_stage(stage: Stage, claims: Claims, workers: Workers, progress: Progress) -> None:
    """Return when all results of a stage are there. Other processes may do any part of it.

    Raises the error of the first unit that fails, here or in another process of the same job.
    """
    left = _Left(stage)
    left.look()
    if not left.units:
        return
    make_folder(stage.folder, parents=True)
    losses: dict[int, int] = {}
    while True:
        claims.raise_failure()
        if left.is_due(claims.timing.poll_seconds):
            left.look()
            claims.refresh(stage.key)
            left.looked()
            progress(stage.name, len(stage.results) - len(left.units), len(stage.results))
        running = workers.running
        if (not left.units and not running) or stage.is_over():
            for unit, error in workers.finished():
                _settle(stage, unit, error, claims, losses, left)
            return
        free = workers.count - len(running)
        for unit in [unit for unit in left.from_place(claims.owner) if unit not in running] if free else []:
            if claims.claim(stage.key, stage.results[unit]):
                if (stage.folder / stage.results[unit]).exists():  # its owner has ended since the last look
                    del left.units[unit]
                    continue
                losses[unit] = claims.losses
                workers.start(stage.work, unit, stage.argument(unit))
                free -= 1
            if not free:
                break
        if not workers.running:  # the rest is done by others
            time.sleep(claims.timing.poll_seconds)
        for unit, error in workers.finished(claims.timing.poll_seconds):
            _settle(stage, unit, error, claims, losses, left)
            progress(stage.name, len(stage.results) - len(left.units), len(stage.results))


class _Left:
    """The units of a stage whose results are missing, as of the last look."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self.units = dict.fromkeys(range(len(stage.results)))
        self.is_stale = True
        self._began = self._looked = 0.0

    def is_due(self, seconds: float) -> bool:
        """Return whether it is time to look again: after at least ``seconds``, later if the last look took long."""
        wait = max(seconds, min(_LONGEST_WAIT, _TIMES_A_LOOK * (self._looked - self._began)))
        return self.is_stale or time.monotonic() - self._looked >= wait

    def looked(self) -> None:
        """Note that a look has ended."""
        self._looked = time.monotonic()

    def look(self) -> None:
        """Read which results are there."""
        self._began = time.monotonic()
        there: set[str] = set()
        with suppress(FileNotFoundError, NotADirectoryError):
            there = set(os.listdir(self._stage.folder))
        self.units = {unit: None for unit in self.units if self._stage.results[unit] not in there}
        self.is_stale, self._looked = False, time.monotonic()

    def from_place(self, owner: str) -> list[int]:
        """Return the units, beginning at a place that differs from process to process."""
        units = list(self.units)
        start = int(owner, 16) % len(units) if units else 0
        return units[start:] + units[:start]


def _settle(
    stage: Stage, unit: int, error: Exception | None, claims: Claims, losses: dict[int, int], left: _Left
) -> None:
    """Take note of the end of a unit. Raises its error, unless the unit is done or will be done again."""
    if (stage.folder / stage.results[unit]).exists():
        left.units.pop(unit, None)
        return
    if error is None or stage.is_over():
        left.is_stale = True  # removed again, or not visible here yet
        return
    with suppress(OSError):
        claims.beat()
    if claims.losses != losses[unit]:  # others took this process for dead and removed its drafts
        return
    raise claims.fail(error, f"{stage.name} {unit}")
