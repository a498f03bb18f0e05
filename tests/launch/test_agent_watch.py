"""Node agents that a signal has stopped: their ranks continue them, or save and exit."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from scaletrain_cli.event_texts import event_sentence
from scaletrain_cli.launch.node.processes import process_state
from scaletrain_cli.worker.agent_watch import AgentWatch
from tests.launch.conftest import Agent, MakeRun, StartAgent, is_running
from tests.waiting import wait_until

FAST = {"limit_seconds": 0.5, "look_seconds": 0.1}


def started(make_run: MakeRun, start_agent: StartAgent, limits: dict[str, float], *overrides: str) -> Agent:
    agent = start_agent(make_run(*overrides, steps=100_000, agent_watch=limits))
    agent.wait_until_up()
    return agent


def test_a_stopped_agent_is_continued_by_its_ranks_and_forwards_the_signal_that_came_meanwhile(
    make_run: MakeRun, start_agent: StartAgent
) -> None:
    agent = started(make_run, start_agent, FAST)
    for signum in (signal.SIGSTOP, signal.SIGTERM):
        os.kill(agent.process.pid, signum)
    assert agent.wait() == 75
    assert all("heard SIGTERM\nsaved" in agent.made.log(1, rank) for rank in (0, 1))
    (event,) = agent.made.events("node-agent-stopped")
    assert (event["attempt"], event["ends"]) == (1, False)
    assert agent.node.node.endswith(event["node"])
    assert "was continued by its ranks" in event_sentence(event)


def test_if_a_continued_agent_stops_again_the_ranks_save_exit_and_kill_it(
    make_run: MakeRun, start_agent: StartAgent
) -> None:
    agent = started(make_run, start_agent, FAST)
    ranks = agent.ranks
    with kept_stopped(agent.process):
        assert agent.wait() == -signal.SIGKILL
    # These ranks do not agree when to leave: the first that does ends the agent, and the kernel the other rank with it.
    assert any("heard SIGTERM\nsaved" in agent.made.log(1, rank) for rank in (0, 1))
    assert agent.made.events("node-agent-stopped")[0]["ends"] is False
    wait_until(lambda: not any(is_running(rank.pid) for rank in ranks), "the ranks have ended")


@contextmanager
def kept_stopped(process: subprocess.Popen[str]) -> Iterator[None]:
    """Stop the process again whenever it is continued."""
    done = threading.Event()

    def stop() -> None:
        while not done.wait(0.005):
            process.send_signal(signal.SIGSTOP)  # none once it is reaped

    thread = threading.Thread(target=stop)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def test_ranks_that_end_leave_no_stopped_agent_behind(make_run: MakeRun, start_agent: StartAgent) -> None:
    agent = start_agent(make_run(steps=20))  # they end before their limits
    agent.wait_until_up()
    os.kill(agent.process.pid, signal.SIGSTOP)
    assert agent.wait() == 0


def test_suspending_the_whole_job_loses_nothing_and_counts_as_no_time(
    make_run: MakeRun, start_agent: StartAgent
) -> None:
    agent = started(make_run, start_agent, FAST)
    everyone = [agent.process.pid, *(rank.pid for rank in agent.ranks)]
    for signum in (signal.SIGSTOP, signal.SIGCONT):
        for pid in everyone if signum == signal.SIGSTOP else reversed(everyone):
            os.kill(pid, signum)
        time.sleep(0.6)
    agent.process.send_signal(signal.SIGTERM)
    assert agent.wait() == 75
    assert agent.made.events("node-agent-stopped") == []


@contextmanager
def running(program: str) -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-S", "-c", program], stdin=subprocess.PIPE) as process:
        yield process
        process.kill()


def in_state(process: subprocess.Popen[bytes], letter: str) -> bool:
    wait_until(lambda: process_state(process.pid) == letter, f"state {letter}")
    return True


def test_an_agent_under_a_debugger_is_not_continued() -> None:
    reported: list[float] = []
    with running("import ctypes, os; ctypes.CDLL(None).ptrace(0, 0, 0, 0); os.kill(os.getpid(), 19)") as process:
        assert in_state(process, "t")
        watch = AgentWatch(process.pid, lambda seconds, ends: reported.append(seconds), limit_seconds=1, look_seconds=1)
        for _ in range(4):
            watch._look()
        watch.leave()
        assert (process_state(process.pid), reported) == ("t", [])


def test_only_consecutive_polls_count() -> None:
    reported: list[float] = []
    with running("input()") as process:
        watch = AgentWatch(process.pid, lambda seconds, ends: reported.append(seconds), limit_seconds=2, look_seconds=1)
        for signum, letter in ((signal.SIGSTOP, "T"), (signal.SIGCONT, "S"), (signal.SIGSTOP, "T")):
            process.send_signal(signum)
            assert in_state(process, letter)
            watch._look()
        assert reported == []
        watch._look()
        assert reported == [2]
        assert in_state(process, "S")
