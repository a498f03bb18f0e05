"""Node agents that a signal has stopped: their ranks continue them, or save and exit."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from scaletrain_cli.event_texts import event_sentence
from scaletrain_cli.launch.node.processes import process_state
from scaletrain_cli.worker import agent_watch
from scaletrain_cli.worker.agent_watch import AgentWatch
from tests.launch.conftest import MakeRun, StartAgent
from tests.waiting import wait_until


def test_a_stopped_agent_is_continued_and_forwards_its_signal(make_run: MakeRun, start_agent: StartAgent) -> None:
    limits = {"limit_seconds": 0.5, "look_seconds": 0.1}
    agent = start_agent(make_run("cluster.gpus_per_node=1", steps=100_000, agent_watch=limits), real=True)
    agent.wait_until_up()
    for signum in (signal.SIGSTOP, signal.SIGTERM):
        os.kill(agent.process.pid, signum)
    assert agent.wait() == 75
    assert {"heard SIGTERM", "saved"} <= set(agent.made.log(1, 0).splitlines())
    (event,) = agent.made.events("node-agent-stopped")
    assert (event["attempt"], event["ends"]) == (1, False)
    assert agent.node.node.endswith(event["node"])
    assert "was continued by its ranks" in event_sentence(event)


def test_ranks_that_end_leave_no_stopped_agent_behind(make_run: MakeRun, start_agent: StartAgent) -> None:
    # The ranks end before their limits.
    agent = start_agent(make_run(steps=3, stay={"1:*": 2}, agent_watch={"limit_seconds": 1e6}))
    agent.wait_until_up()
    os.kill(agent.process.pid, signal.SIGSTOP)
    wait_until(lambda: process_state(agent.process.pid) == "T", "the agent is stopped")
    (agent.made.run.path / "go").touch()
    assert agent.wait() == 0
    assert agent.made.events("node-agent-stopped") == []


@contextmanager
def running(program: str) -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-S", "-c", program], stdin=subprocess.PIPE) as process:
        yield process
        process.kill()


def in_state(process: subprocess.Popen[bytes], letter: str) -> bool:
    wait_until(lambda: process_state(process.pid) == letter, f"state {letter}")
    return True


def stop(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGSTOP)
    assert in_state(process, "T")


def test_if_a_continued_agent_stops_again_its_rank_asks_and_then_kills_it(monkeypatch: pytest.MonkeyPatch) -> None:
    reported: list[tuple[float, bool]] = []
    asked: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: asked.append(number))
    try:
        with running("input()") as process:
            watch = AgentWatch(process.pid, lambda *report: reported.append(report), limit_seconds=2, look_seconds=1)
            for _ in range(4):  # whenever it is continued it stops again
                stop(process)
                watch._look()
            assert (reported, asked) == ([(2, False), (4, True)], [signal.SIGTERM])
            monkeypatch.setattr(agent_watch, "time", SimpleNamespace(sleep=lambda _: stop(process)))
            watch.leave()
            assert process.wait() == -signal.SIGKILL
    finally:
        signal.signal(signal.SIGTERM, before)


def test_other_ranks_continue_an_agent_if_one_does_not(make_run: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    made = make_run()
    with running("input()") as process:
        monkeypatch.setenv("SCALETRAIN_AGENT_PID", str(process.pid))
        watches = []
        for rank in "01":
            monkeypatch.setenv("LOCAL_RANK", rank)
            watches.append(AgentWatch.of_rank(made.run, 1, limit_seconds=2, look_seconds=1))
        first, second = watches
        stop(process)
        for watch in (second, first, second, first):
            assert in_state(process, "T")
            watch._look()
        assert in_state(process, "S")
        second._look()
        stop(process)
        for _ in range(3):
            assert in_state(process, "T")
            second._look()
        assert in_state(process, "S")
    assert len(made.events("node-agent-stopped")) == 1  # by the first


def test_suspending_the_whole_job_counts_as_no_time() -> None:
    reported: list[float] = []
    with running("input()") as process:
        watch = AgentWatch(
            process.pid, lambda seconds, _: reported.append(seconds), limit_seconds=0.3, look_seconds=0.1
        )
        stop(process)
        watch._look()
        time.sleep(0.5)  # nobody looks: this process is stopped, too
        watch._look()
        assert (process_state(process.pid), reported) == ("T", [])


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
