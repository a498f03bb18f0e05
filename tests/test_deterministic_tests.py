"""No test depends on the speed of the machine: what tests may not contain, as far as one can see it in their text.

The lists say how many places a file has. They may only shrink.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.source_trees import dotted, files_with, nodes_of

TESTS = Path(__file__).parent
# Figures of a machine belong to benchmarks/; seconds that pass, to a clock that the test sets on.
MEASURES = {
    *("process_time", "process_time_ns", "thread_time", "perf_counter", "perf_counter_ns", "monotonic"),
    *("getrusage", "ru_utime", "ru_maxrss", "resident_bytes", "tracemalloc"),
}
MEASURED = {
    # They print how long they took.
    "diagnosis/injected_bugs/__main__.py": 2,
    "diagnosis/injected_bugs/runs.py": 2,
    "drills/campaign/__main__.py": 2,
    "engine/parity/table.py": 2,
    # They choose when to kill a process.
    "data/pipeline/test_claims.py": 2,
    # A clock of the test, or a part of what is tested.
    "launch/node/test_code.py": 1,
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
# A pause before an assertion is a guess of how long something takes.
PAUSES = {
    # Stand-ins, which take the time that a test has given them, or a long time.
    "data/images/test_sources.py": 1,
    "data/pipeline/test_claims.py": 1,
    "diagnosis/injected_bugs/injection.py": 1,
    "engine/data/reading.py": 1,
    "engine/test_read_ahead.py": 1,
    "launch/fake_engine.py": 2,
    "launch/node/fake_nvml/pynvml.py": 1,
    # What must not happen has had time to; on a slow machine such a test proves less, and passes.
    "drills/test_campaign.py": 1,
    "launch/node/test_agent.py": 1,
    "launch/node/test_streams.py": 1,
    "launch/test_agent_watch.py": 1,
}
BLOCKS = (ast.Module, ast.FunctionDef, ast.With, ast.Try)


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


def pauses(node: ast.AST) -> int:
    """Count pauses outside of loops, which ask again, and of conditions."""
    statements = node.body if isinstance(node, BLOCKS) else ()
    calls = [each.value.func for each in statements if isinstance(each, ast.Expr) and isinstance(each.value, ast.Call)]
    return sum(dotted(call) in ("time.sleep", "sleep") for call in calls)


def names_sets(node: ast.AST) -> bool:
    """Tell whether names of tests contain sets, whose order differs between a compiled file and its byte code."""
    if not isinstance(node, ast.Call) or not dotted(node.func).endswith(".parametrize"):
        return False
    named = any(word.arg == "ids" and dotted(word.value) in ("str", "repr") for word in node.keywords)
    return named and any(isinstance(each, ast.Set | ast.SetComp) for each in ast.walk(node))


@pytest.mark.parametrize(
    ("rule", "texts", "allowed"),
    [
        (measures, MEASURES, MEASURED),
        (limits_a_wait, {"timeout"}, LIMITED),
        (chooses_a_port, {"free_port", "closed_port"}, CHOSEN),
        (pauses, {"sleep("}, PAUSES),
        (names_sets, {"ids=str", "ids=repr"}, {}),
    ],
)
def test_no_test_depends_on_the_speed_of_the_machine(
    rule: Callable[[ast.AST], int], texts: set[str], allowed: dict[str, int]
) -> None:
    files = {path: sum(map(rule, nodes_of(path))) for path in files_with(TESTS, *texts)}
    assert Counter({str(path.relative_to(TESTS)): number for path, number in files.items() if number}) == allowed
