import signal
import subprocess
import sys
from pathlib import Path

from scaletrain_cli.worker.signals import PreemptionFlag

PROJECT = Path(__file__).parents[2]
PROGRAM = """
import os, select, time
from scaletrain_cli.worker.signals import PreemptionFlag
flag = PreemptionFlag()
flag.install()
print("ready", flush=True)
{body}
"""


def start(body: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", PROGRAM.format(body=body)]
    process = subprocess.Popen(command, cwd=PROJECT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "ready\n"
    return process


def ended(process: subprocess.Popen[str]) -> int:
    try:
        process.communicate()
    finally:
        process.kill()
    return process.returncode


def test_many_signals_at_once_do_not_interrupt_the_handler() -> None:
    """Each interrupts the handling of the one before. The process works until its stdin ends, after the last one."""
    process = start("while not select.select([0], [], [], 0)[0]: pass\nos._exit(7 if flag.raised else 1)")
    for _ in range(2000):
        process.send_signal(signal.SIGTERM)
        process.send_signal(signal.SIGUSR1)
    assert ended(process) == 7


def test_a_rank_exits_when_its_grace_period_is_over() -> None:
    """Here the main thread is in one long call, as in a compilation."""
    process = start("flag.call_after(0.2, lambda: os._exit(75))\nos.read(os.pipe()[0], 1)")
    process.send_signal(signal.SIGUSR1)
    assert ended(process) == 75


def test_after_a_signal_the_seconds_left_of_the_grace_period_are_counted() -> None:
    process = start(
        "while not flag.raised: time.sleep(0.01)\n"
        "left = flag.seconds_left(600)\n"
        "os._exit(7 if 600 - (time.monotonic() - flag.raised_at) <= left <= 600 else 1)"
    )
    process.send_signal(signal.SIGTERM)
    assert ended(process) == 7


def test_without_a_signal_the_seconds_left_are_infinite() -> None:
    assert PreemptionFlag().seconds_left(60) == float("inf")
