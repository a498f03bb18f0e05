"""No test depends on the speed of the machine: what tests may not contain, as far as one can see it in their text.

The lists say how many places a file has. They may only shrink.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.source_trees import files_with, nodes_of

TESTS = Path(__file__).parent
# Figures of a machine belong to benchmarks/; seconds that pass, to a clock that the test sets on.
MEASURES = {
    *("process_time", "process_time_ns", "thread_time", "perf_counter", "perf_counter_ns", "monotonic"),
    *("getrusage", "ru_utime", "ru_maxrss", "tracemalloc"),
}
MEASURED = {
    # They print how long they took.
    "diagnosis/injected_bugs/__main__.py": 2,
    "diagnosis/injected_bugs/runs.py": 2,
    "drills/campaign/__main__.py": 2,
    "engine/objectives/layouts.py": 2,
    "engine/parity/__main__.py": 3,
    "engine/vision/table.py": 2,
    # They choose when to kill a process.
    "data/pipeline/test_claims.py": 2,
    "data/pipeline/test_prepare.py": 2,
    # A clock of the test, or a part of what is tested.
    "launch/node/test_code.py": 1,
    "launch/sessions.py": 3,
    "slurm_cluster/cluster.py": 2,
    # Suites for real clusters, which answer late or never; no part of `make test`.
    "kubernetes_cluster/place.py": 4,
    "kubernetes_cluster/server.py": 2,
    "kubernetes_cluster/site.py": 2,
}
# pytest ends a test after 1,200 s; a shorter limit ends one that is right, on a busy machine.
LIMITED = {"kubernetes_cluster/site.py": 1}
# A port that nobody holds may be another's before it is bound: tests/ports.py reserves one.
CHOSEN = {"slurm_cluster/cluster.py": 1}  # reserves it, by a folder of its name


def measures(node: ast.AST) -> bool:
    if isinstance(node, ast.ImportFrom):
        return any(name.name in MEASURES for name in node.names)
    return isinstance(node, ast.Attribute) and node.attr in MEASURES


def limits_a_wait(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and any(
        word.arg == "timeout"
        and isinstance(word.value, ast.Constant)
        and isinstance(word.value.value, int | float)
        and 0 < word.value.value < 1200
        for word in node.keywords
    )


def chooses_a_port(node: ast.AST) -> bool:
    name = node.func if isinstance(node, ast.Call) else None
    return isinstance(name, ast.Name) and name.id in ("free_port", "closed_port")


@pytest.mark.parametrize(
    ("rule", "texts", "allowed"),
    [
        (measures, MEASURES, MEASURED),
        (limits_a_wait, {"timeout"}, LIMITED),
        (chooses_a_port, {"free_port", "closed_port"}, CHOSEN),
    ],
)
def test_no_test_depends_on_the_speed_of_the_machine(
    rule: Callable[[ast.AST], bool], texts: set[str], allowed: dict[str, int]
) -> None:
    files = {path: sum(map(rule, nodes_of(path))) for path in files_with(TESTS, *texts)}
    assert Counter({str(path.relative_to(TESTS)): number for path, number in files.items() if number}) == allowed
