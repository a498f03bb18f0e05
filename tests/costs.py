"""A plugin (``-p tests.costs``) that prints the CPU seconds and started processes of tests.

``--costs=dear`` prints the tests that exceed the limits of ``make test``, ``--costs=files`` also each file. CPU seconds
are those of the test process and its children. The first test that uses a fixture of a module or of the session pays
for it. Daemons do not count.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections import Counter, defaultdict
from collections.abc import Generator
from pathlib import Path

import pytest

MOST_CPU_SECONDS = 5.0
MOST_STARTS = 12
STARTS = {"subprocess.Popen", "os.fork", "os.forkpty", "scaletrain.tests.forked"}
_started = 0


def _count(event: str, _arguments: tuple[object, ...]) -> None:
    global _started
    _started += event in STARTS


def _cpu_seconds() -> float:
    """Also of children that still run, such as a server that forks, with the children that those have waited for."""
    ticks = 0
    for thread in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # a thread or a child that has ended
            for pid in (thread / "children").read_text().split():
                fields = Path("/proc", pid, "stat").read_text().rpartition(")")[2].split()
                ticks += sum(map(int, fields[11:15]))
    return sum(os.times()[:4]) + ticks / os.sysconf("SC_CLK_TCK")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--costs", choices=("dear", "files"), default="dear", help="what tests.costs prints")


def pytest_configure(config: pytest.Config) -> None:
    sys.addaudithook(_count)
    config.pluginmanager.register(_Costs(config.getoption("--costs") == "files"))


class _Costs:
    def __init__(self, by_file: bool) -> None:
        self._by_file = by_file
        self._began = (0.0, 0)
        self._costs: dict[str, tuple[float, int]] = {}

    def pytest_runtest_logstart(self) -> None:
        self._began = (_cpu_seconds(), _started)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Write the cost into the last report of a test, which reaches the process that prints."""
        if call.when == "teardown":
            item.user_properties.append(("cost", (_cpu_seconds() - self._began[0], _started - self._began[1])))
        return (yield)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        for name, value in report.user_properties:
            if name == "cost" and isinstance(value, list | tuple):
                self._costs[report.nodeid] = (float(value[0]), int(value[1]))

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        write = terminalreporter.write_line
        dear = {name: cost for name, cost in self._costs.items() if cost[0] > MOST_CPU_SECONDS or cost[1] > MOST_STARTS}
        write(f"{len(dear)} tests cost more than {MOST_CPU_SECONDS:g} CPU seconds or {MOST_STARTS} processes")
        for name, (seconds, starts) in sorted(dear.items(), key=lambda one: -one[1][0]):
            write(f"{seconds:7.1f} s {starts:5} processes  {name}")
        if not self._by_file:
            return
        seconds_by_file, starts_by_file = defaultdict[str, float](float), Counter[str]()
        for name, (seconds, starts) in self._costs.items():
            seconds_by_file[name.split("::")[0]] += seconds
            starts_by_file[name.split("::")[0]] += starts
        write(f"all tests: {sum(seconds_by_file.values()):.0f} CPU seconds, {sum(starts_by_file.values())} processes")
        for file, seconds in sorted(seconds_by_file.items(), key=lambda one: -one[1]):
            write(f"{seconds:7.1f} s {starts_by_file[file]:5} processes  {file}")
