"""Runs in every state, and a stand-in for the engine, for the tests of the command line."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from scaletrain_cli.launch.backends.local.backend import LocalBackend
from tests.cli.command_line import PROJECT
from tests.cli.prepared_runs import STATES, living_process, prepare
from tests.launch.conftest import ENGINE, forked_jobs, no_preparation

__all__ = ["forked_jobs", "no_preparation"]  # the second is a fixture of all tests here


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Path]]:
    """A runs root for each state, with the run r1 in it."""
    roots: dict[str, Path] = {}
    with living_process() as process, pytest.MonkeyPatch.context() as patch:
        for state in STATES:
            roots[state] = tmp_path_factory.mktemp(state)
            patch.setenv("SCALETRAIN_RUNS", str(roots[state]))
            prepare(state, "r1", process)
        yield roots


@pytest.fixture
def stand_in_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that train nothing, found by the processes that start them."""
    replace_engine(monkeypatch, tmp_path)


def replace_engine(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.setattr(LocalBackend.__init__, "__defaults__", (ENGINE,))
    inherited = os.environ.get("PYTHONPATH")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(PROJECT), *([inherited] if inherited else [])]))
    monkeypatch.chdir(folder)
