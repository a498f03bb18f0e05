"""Log lines of the processes of a run: level, UTC time, source, and lines of libraries separated."""

from __future__ import annotations

import logging
import os
import re
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

from scaletrain_cli.log_setup import (
    DescriptorHandler,
    is_library_noise,
    set_up_logging,
    take_over_library_logger,
)

LIBRARY_LINE = re.compile(r"\S+Z [A-Z]+ [^:[]+ \[([^]\s]+)\]: ")
OWN = logging.getLogger("scaletrain_cli.somewhere")


def library_of(line: str) -> str | None:
    found = LIBRARY_LINE.match(line)
    return found[1] if found else None


@pytest.fixture(autouse=True)
def logging_as_before() -> Iterator[None]:
    root, own = logging.getLogger(), logging.getLogger("scaletrain_cli")
    before = (root.level, own.level, list(root.handlers))
    yield
    logging.captureWarnings(False)
    root.setLevel(before[0])
    own.setLevel(before[1])
    root.handlers[:] = before[2]


@pytest.fixture
def log(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "rank.log"
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    set_up_logging("rank 3", descriptor=descriptor, environment={})
    yield path
    os.close(descriptor)


def test_a_line_has_the_time_in_utc_the_level_and_the_source(log: Path) -> None:
    OWN.info("step %d of %d", 5, 10)
    line = log.read_text()
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z INFO rank 3: step 5 of 10\n", line)
    assert library_of(line) is None


def test_lines_of_a_library_are_logged_under_its_name(log: Path) -> None:
    logging.getLogger("some.library").warning("first\nsecond")
    lines = log.read_text().splitlines()
    assert [library_of(line) for line in lines] == ["some.library", "some.library"]
    assert lines[1].endswith(" WARNING rank 3 [some.library]: second")
    assert all(is_library_noise(line) for line in lines)


def test_errors_of_a_library_are_shown(log: Path) -> None:
    logging.getLogger("some.library").error("the device is lost")
    assert library_of(log.read_text()) == "some.library"
    assert not is_library_noise(log.read_text())


def test_a_python_warning_is_logged_as_a_library_line(log: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        logging.captureWarnings(True)  # inside, as catch_warnings would undo it
        warnings.warn("an argument is deprecated", stacklevel=1)
        logging.captureWarnings(False)
    lines = log.read_text().splitlines()
    assert "an argument is deprecated" in lines[0]
    assert {library_of(line) for line in lines} == {"py.warnings"}


def test_a_bracket_in_a_message_does_not_make_it_a_library_line(log: Path) -> None:
    OWN.info("restored [optimizer]: 3 files")
    assert library_of(log.read_text()) is None


def test_a_library_with_its_own_handlers_logs_each_line_once(log: Path, capfd: pytest.CaptureFixture[str]) -> None:
    library = logging.getLogger("LoudLibrary")
    library.propagate = False
    library.addHandler(logging.StreamHandler(sys.stdout))
    take_over_library_logger("LoudLibrary")
    library.warning("loud")
    assert log.read_text().count("loud") == 1
    assert "loud" not in capfd.readouterr().out


@pytest.mark.parametrize(("given", "shown"), [("", False), ("DEBUG", True), ("warning", False), ("loud", False)])
def test_the_variable_sets_the_level_of_this_package_only(
    given: str, shown: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    set_up_logging("launcher", environment={"SCALETRAIN_LOG": given})
    OWN.debug("a detail")
    logging.getLogger("library").debug("a detail of a library")
    said = capfd.readouterr().err
    assert ("a detail" in said) == shown
    assert "a detail of a library" not in said
    assert ("SCALETRAIN_LOG=loud: use debug, info, warning, error" in said) == (given == "loud")


def test_a_second_set_up_replaces_the_first(capfd: pytest.CaptureFixture[str]) -> None:
    set_up_logging("node agent", environment={})
    set_up_logging("node-0000-a", environment={})
    OWN.info("once")
    assert capfd.readouterr().err.count("once") == 1
    assert sum(isinstance(handler, DescriptorHandler) for handler in logging.getLogger().handlers) == 1


def test_a_log_on_a_full_disk_changes_neither_the_program_nor_its_exit_code() -> None:
    program = (
        "import logging\n"
        "from scaletrain_cli.log_setup import set_up_logging\n"
        "set_up_logging('rank 0', descriptor=1)\n"
        "logging.getLogger('scaletrain_cli').info('not written')\n"
    )
    with Path("/dev/full").open("wb") as full:
        ended = subprocess.run([sys.executable, "-c", program], stdout=full, stderr=subprocess.PIPE)
    assert (ended.returncode, ended.stderr) == (0, b"")
