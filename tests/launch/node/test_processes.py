"""Waiting for signals: every signal that was sent is returned once, and no other."""

import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from scaletrain_cli.launch.backends.local.backend import read_supervisor
from scaletrain_cli.launch.cancel import wait_for_end
from scaletrain_cli.launch.node import processes
from scaletrain_cli.launch.node.processes import descendants, kill_descendants, next_signal, process_state
from scaletrain_cli.launch.node.record import read_node_records
from scaletrain_cli.launch.submit import submit_run
from tests.launch.conftest import LOCAL, MakeRun
from tests.waiting import wait_until

PROJECT = Path(__file__).parents[3]
LISTENER = """
import signal, sys
from scaletrain_cli.launch.node.processes import next_signal
heard = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD)
signal.pthread_sigmask(signal.SIG_BLOCK, heard)
print("up", flush=True)
while True:
    signum = next_signal(heard, 0.05)
    if signum is not None:
        print(signum, flush=True)
    if signum == signal.SIGTERM:
        break
"""


@pytest.fixture
def blocked() -> Iterator[None]:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGUSR1, signal.SIGHUP))
    yield
    signal.pthread_sigmask(signal.SIG_SETMASK, before)


@pytest.mark.usefixtures("blocked")
def test_a_pending_signal_is_returned_once_and_none_after_the_timeout() -> None:
    assert next_signal((signal.SIGUSR1,), 0.0) is None
    signal.pthread_kill(threading.get_ident(), signal.SIGUSR1)  # a thread of a library may not block it
    assert next_signal((signal.SIGUSR1, signal.SIGHUP), 5.0) == signal.SIGUSR1
    assert next_signal((signal.SIGUSR1, signal.SIGHUP), 0.1) is None


@pytest.mark.usefixtures("blocked")
def test_the_wait_for_a_signal_has_the_length_that_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, no_time = list[tuple[int, int]](), processes._Timespec(0, 0)
    monkeypatch.setattr(processes, "_Timespec", lambda *time: asked.append(time) or no_time)
    assert next_signal((signal.SIGUSR1,), 2.5) is None
    assert asked == [(2, 500_000_000)]


def test_a_process_that_was_stopped_during_its_wait_receives_only_signals_that_were_sent() -> None:
    command = [sys.executable, "-c", LISTENER]
    with subprocess.Popen(command, cwd=PROJECT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "up\n"
        for number in range(6):
            wait_until(lambda: process_state(process.pid) == "S", "it waits for a signal")
            process.send_signal(signal.SIGSTOP)
            wait_until(lambda: process_state(process.pid) == "T", "it is stopped")
            if number == 5:
                process.send_signal(signal.SIGUSR1)
            time.sleep(0.1)  # past the end of its wait
            process.send_signal(signal.SIGCONT)
        process.send_signal(signal.SIGTERM)
        heard = process.stdout.read().split()
    assert sorted(map(int, heard)) == [signal.SIGUSR1, signal.SIGTERM]


def test_a_run_that_is_suspended_and_continued_finishes(make_run: MakeRun, forked_jobs: None) -> None:
    made = make_run(steps=9, stay={"1:*": 3})
    submit_run(made.run, made.record, LOCAL)
    wait_until(lambda: "up" in made.log(1, 0) and made.run.metrics.exists(), "the ranks train")
    wait_until(lambda: read_node_records(made.run, 1)[0].ranks, "the agent has recorded its ranks")
    (node,) = read_node_records(made.run, 1)
    supervisor = read_supervisor(made.run)
    everybody = [supervisor.process.pid, node.agent.pid, *(rank.pid for rank in node.ranks)]
    for signum in (signal.SIGSTOP, signal.SIGCONT):
        for pid in everybody:
            os.kill(pid, signum)
        time.sleep(1.3)
    (made.run.path / "go").touch()
    assert wait_for_end(made.run, LOCAL, math.inf, lambda status: None).state == "finished"
    assert len(made.run.attempts()) == 1
    assert made.events("signal") == []


def test_the_process_that_diagnoses_is_not_waited_for_as_one_that_a_program_left() -> None:
    command = "sleep 60 & echo $!; wait"  # as a command that sends a notification
    with subprocess.Popen(["sh", "-c", command], stdout=subprocess.PIPE, text=True, start_new_session=True) as child:
        try:
            below = int(child.stdout.readline())
            assert {child.pid, below} <= set(descendants())
            assert {child.pid, below}.isdisjoint(descendants({child.pid}))
        finally:
            os.killpg(child.pid, signal.SIGKILL)


def test_a_process_that_reads_a_hung_driver_does_not_delay_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "descendants", lambda: [2**22 + 1])  # a pid that is never given: it never ends
    monkeypatch.setattr(processes, "reap", lambda: ())
    slept: list[float] = []
    monkeypatch.setattr(processes, "time", SimpleNamespace(monotonic=lambda: sum(slept), sleep=slept.append))
    kill_descendants((2**22 + 1,))
    assert slept == []
    kill_descendants()
    assert sum(slept) == pytest.approx(processes._KILL_WAIT_SECONDS, abs=0.02)
