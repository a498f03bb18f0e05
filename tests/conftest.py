"""For every test: a clean environment, golden files, and skips that count as failures in CI."""

from __future__ import annotations

import difflib
import gc
import itertools
import os
import re
import signal
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import hypothesis
import pytest

# Workers and ranks share the cores; threads that wait for threads of another process cost far more than they gain. Read
# when torch and NumPy load.
for _name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ.setdefault(_name, "1")

# Tests of several folders import it, before the conftest of its own folder is read.
pytest.register_assert_rewrite("tests.drills.training_runs")

TESTS = Path(__file__).parent
# The folders that take longest, first: the last file should be a short one.
LONGEST = ("slurm_cluster", "drills", "engine")
# Its tests share their clusters, so one worker has all of them.
ONE_WORKER = "tests/slurm_cluster"
GOLDEN_FOLDER = TESTS / "golden"

# No deadline: on a shared machine a slow example says nothing. `make test` has few examples, the same ones every time;
# `make test-long`, which selects properties by the marker of hypothesis, has many new ones and prints their seeds.
hypothesis.settings.register_profile("same", deadline=None, derandomize=True, max_examples=25)
hypothesis.settings.register_profile("new", deadline=None, print_blob=True, max_examples=200)


def in_ci() -> bool:
    return os.environ.get("CI") == "true"


def pytest_configure(config: pytest.Config) -> None:
    gc.disable()  # a fifth of the time of a collection; enabled again at its end
    selects_long = "hypothesis" in str(config.getoption("markexpr"))
    hypothesis.settings.load_profile("new" if selects_long else "same")
    # A shell without job control starts background jobs with SIGINT ignored; the processes under test would inherit it.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--accept-goldens", action="store_true", help="write the golden files instead of comparing")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not hasattr(config, "workerinput"):  # of pytest-xdist; one at a time they stay in their order
        return

    def turn(item: pytest.Item) -> int:
        folder = item.path.relative_to(TESTS).parts[0]
        return LONGEST.index(folder) if folder in LONGEST else len(LONGEST)

    items.sort(key=turn)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Give each file to one worker, and the files of ONE_WORKER to the same."""
    from xdist.scheduler import LoadFileScheduling

    class ByFile(LoadFileScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            return ONE_WORKER if nodeid.startswith(f"{ONE_WORKER}/") else str(super()._split_scope(nodeid))

    return ByFile(config, log)


def pytest_collection_finish() -> None:
    gc.freeze()  # a million objects of the collection, which no later search for garbage walks
    gc.enable()


_numbers = itertools.count()


@pytest.fixture
def tmp_path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As pytest's fixture, which lists the folders of all earlier tests to choose a name: 5 ms after 4,000 tests."""
    name = re.sub(r"\W", "_", request.node.name)[:30]
    path = tmp_path_factory.getbasetemp() / f"{name}-{next(_numbers)}"
    path.mkdir(mode=0o700)
    return path


@pytest.fixture(autouse=True)
def isolated_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the caller's cluster, runs, settings, W&B login and object stores out of the tests.

    A test that talks to a cluster of its own sets that cluster's variables itself, after this.
    """
    isolate(monkeypatch, tmp_path)


def isolate(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """The same for a fixture of a module or the session, which is set up before those of a test."""
    outside = tuple("SCALETRAIN_ SLURM_ SBATCH_ SRUN_ SQUEUE_ WANDB_ KUBERNETES_ AWS_ GOOGLE_ AZURE_".split())
    launched = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
    for name in list(os.environ):
        if name.startswith(outside) or name in launched:
            monkeypatch.delenv(name)
    monkeypatch.setenv("SCALETRAIN_RUNS", str(folder / "runs"))
    monkeypatch.setenv("KUBECONFIG", str(folder / "no-kubeconfig"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(folder / "config"))
    monkeypatch.setenv("XDG_STATE_HOME", str(folder / "state"))
    for name in ("AWS_SHARED_CREDENTIALS_FILE", "AWS_CONFIG_FILE"):
        monkeypatch.setenv(name, str(folder / "no-aws"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """Compare a text with ``tests/golden/<name>``; ``pytest --accept-goldens`` writes it instead."""
    accept = request.config.getoption("--accept-goldens")

    def compare(name: str, text: str) -> None:
        path = GOLDEN_FOLDER / name
        if accept:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
            return
        expected = path.read_text(encoding="utf-8") if path.exists() else ""
        if not path.exists() or text != expected:
            shown = f"tests/golden/{name}"
            difference = difflib.unified_diff(
                expected.splitlines(keepends=True), text.splitlines(keepends=True), shown, "this run"
            )
            ended = (line if line.endswith("\n") else f"{line}\n\\ no newline at the end\n" for line in difference)
            state = "differs" if path.exists() else "does not exist"
            command = f"pytest --accept-goldens '{request.node.nodeid}'"
            pytest.fail(f"{shown} {state}:\n{''.join(ended)}\nIf the new text is right: {command}", pytrace=False)

    return compare


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Count a skipped Slurm test as a failure in CI, where a real Slurm is always available."""
    report = yield
    expected_failure = hasattr(report, "wasxfail")
    if report.skipped and not expected_failure and in_ci() and item.get_closest_marker("slurm"):
        reason = call.excinfo.value if call.excinfo else "no reason given"
        report.outcome = "failed"
        report.longrepr = f"{item.nodeid} skipped, but in CI every Slurm test must run: {reason}"
    return report
