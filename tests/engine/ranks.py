"""Run a function on several ranks, each a process of its own, at the price of a fork.

A server process imports torch, DeepSpeed and the engine once (see preloaded.py) and forks every rank. It and its ranks
end when the test process does, however that ends, and they share no memory by name, so nothing is left in /dev/shm.
"""

import multiprocessing
import os
import pickle
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

_PROJECT = Path(__file__).parent.parent.parent
_GRACE_SECONDS = 1.0  # for the others to tell what they saw once one rank has failed


class RanksFailedError(AssertionError):
    """A rank raised an exception, died or was too slow; the message has the error of each."""


def on_ranks(
    world_size: int, function: Callable[..., Any], *arguments: Any, seconds: float | None = None, connected: bool = True
) -> list[Any]:
    """Return the results of ``function(*arguments)`` on each rank, in rank order.

    The function must be one of a module's own, and arguments and results must pickle. The environment is the caller's
    and that of a rank (RANK, WORLD_SIZE, MASTER_ADDR, ...); ``connected``: with a gloo process group. Raises
    RanksFailedError when a rank fails, or when none has returned for ``seconds``; none is left then.
    """
    work = pickle.dumps((function, arguments))  # not multiprocessing's pickler, to which torch has taught shared memory
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ranks: list[_Rank] = []
    outcomes: list[_Outcome] = []
    try:
        for rank in range(world_size):
            ranks.append(_start(rank, world_size, store.port, work, connected))
        outcomes = _collect(ranks, seconds)
    finally:
        let_go = len(outcomes) == world_size and all(outcome.returned for outcome in outcomes)
        for started in ranks:
            started.connection.close()
            if not let_go:
                started.process.kill()
        for started in ranks:
            started.process.join()
            started.process.close()
    if failed := [outcome for outcome in outcomes if not outcome.returned]:
        reported = "\n".join(f"--- rank {outcome.rank} of {world_size}: {outcome.value}" for outcome in failed)
        raise RanksFailedError(f"{function.__qualname__}{arguments!r:.500}\n{reported}")
    return [outcome.value for outcome in sorted(outcomes, key=lambda outcome: outcome.rank)]


@dataclass(frozen=True)
class _Outcome:
    rank: int
    returned: bool
    value: Any  # what it returned, or what went wrong


@dataclass(frozen=True)
class _Rank:
    rank: int
    process: ForkServerProcess
    connection: Connection

    def outcome(self) -> _Outcome:
        """Return the result of the rank, or None if it died."""
        try:
            returned, value = pickle.loads(self.connection.recv_bytes())
        except EOFError:
            self.process.join()
            return _Outcome(self.rank, False, f"died with exit code {self.process.exitcode}")
        return _Outcome(self.rank, returned, value)


@cache
def _server() -> ForkServerContext:
    """Started with the first rank."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([f"{__package__}.preloaded"])
    found = os.pathsep.join([str(_PROJECT), *filter(None, [os.environ.get("PYTHONPATH")])])
    with patch.dict(os.environ, PYTHONPATH=found, DS_ACCELERATOR="cpu"):
        process = context.Process(target=int)
        process.start()
        process.join()
    return context


def _start(rank: int, world_size: int, port: int, work: bytes, connected: bool) -> _Rank:
    environment = os.environ | {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # the store is there, on a port that nobody can take meanwhile
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
        "TORCHINDUCTOR_COMPILE_THREADS": "1",  # more would be processes of their own
        "DS_ACCELERATOR": "cpu",
    }
    ours, theirs = multiprocessing.Pipe()
    process = _server().Process(target=_be_rank, args=(theirs, environment, work, connected), daemon=True)
    process.start()
    theirs.close()
    return _Rank(rank, process, ours)


def _collect(ranks: list[_Rank], seconds: float | None) -> list[_Outcome]:
    """Return the outcome of each rank, failures first, in the order in which they happened."""
    outcomes: list[_Outcome] = []
    waiting = {rank.connection: rank for rank in ranks}
    while waiting:
        ready = wait(list(waiting), seconds)
        if not ready:
            late = "gave no answer in time"
            return [*outcomes, *(_Outcome(rank.rank, False, late) for rank in waiting.values())]
        for connection in ready:
            outcomes.append(waiting.pop(connection).outcome())  # type: ignore[call-overload]
            if not outcomes[-1].returned:
                seconds = _GRACE_SECONDS
    return outcomes


def _be_rank(connection: Connection, environment: dict[str, str], work: bytes, connected: bool) -> None:
    threading.Thread(target=_die_with_tests, daemon=True).start()
    os.environ.clear()
    os.environ.update(environment)
    torch.set_num_threads(1)
    # A rank's own locks are for its own children: made for a fork, they have no name that a kill would leave behind.
    multiprocessing.set_start_method("fork", force=True)
    try:
        if connected:
            dist.init_process_group("gloo")
        function, arguments = pickle.loads(work)
        answer = pickle.dumps((True, function(*arguments)))
    except BaseException:
        answer = pickle.dumps((False, traceback.format_exc()))
    connection.send_bytes(answer)
    sys.stdout.flush()
    sys.stderr.flush()
    wait([connection])  # others may still be reading what this rank has sent them
    os._exit(0)  # destructors of process groups wait for peers


def _die_with_tests() -> None:
    tests = multiprocessing.parent_process()
    tests.join()
    os.kill(os.getpid(), signal.SIGKILL)
