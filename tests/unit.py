"""The unit tests, for ``make unit``: every test that needs neither torch nor a process. Load with ``-p tests.unit``.

A test file is left out when it, or a file of the tests that it imports, imports torch, the engine or a module that
starts processes; a single test by ``@pytest.mark.process`` or ``long``. What is left runs in an environment where
importing torch fails and where starting a process fails, so that nothing slips in.
"""

from __future__ import annotations

import ast
import functools
import importlib.abc
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

import pytest

PROJECT = Path(__file__).parents[1]
LEFT_OUT = {"bitsandbytes", "deepspeed", "torch", "torchao", "transformers", "multiprocessing", "subprocess"}
ENGINE = "scaletrain_cli.engine"
FOLDERS = tuple(
    f"tests/{name}" for name in "benchmarks drills engine kubernetes_cluster slurm_cluster slurm_site".split()
)


class Refuser(importlib.abc.MetaPathFinder):
    """Fail the import of libraries that no unit test may load."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> None:
        if name in ("torch", "deepspeed"):
            raise ImportError(f"a unit test imports {name}; leave it out of `make unit` (tests/unit.py)")


def pytest_configure(config: pytest.Config) -> None:
    sys.meta_path.insert(0, Refuser())


def pytest_runtest_setup(item: pytest.Item) -> None:
    subprocess.Popen.__init__ = _refuse  # type: ignore[method-assign]


def _refuse(self: object, *arguments: Any, **options: Any) -> NoReturn:
    raise RuntimeError("a unit test starts a process; mark it with pytest.mark.process (tests/unit.py)")


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    if collection_path.is_dir():
        return True if str(collection_path.relative_to(PROJECT)) in FOLDERS else None
    return True if collection_path.suffix == ".py" and _needs_more(collection_path) else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    left_out = [item for item in items if item.get_closest_marker("process") or item.get_closest_marker("long")]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in left_out]


def pytest_sessionfinish(session: pytest.Session) -> None:
    if loaded := sorted({"torch", "deepspeed"} & sys.modules.keys()):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
        print(f"\nthe unit tests loaded {', '.join(loaded)}")


@functools.cache
def _needs_more(path: Path) -> bool:
    """Return True if a test file imports, also through another test file, a library that unit tests must not load."""
    for name in _imports(path):
        if name.partition(".")[0] in LEFT_OUT or name == ENGINE or name.startswith(f"{ENGINE}."):
            return True
        if name.startswith("tests."):
            file = PROJECT.joinpath(*name.split(".")).with_suffix(".py")
            if any(str(file.relative_to(PROJECT)).startswith(f"{folder}/") for folder in FOLDERS):
                return True
            if file != path and file.is_file() and _needs_more(file):
                return True
    return False


def _imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
