"""No code outside the back ends decides by the name of a scheduler; it uses the back end or its traits.

The names may stand where they are declared, and in texts for people. The source is read with ``ast``.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from pathlib import Path

from scaletrain_cli.spec.backend_traits import BUILT_IN
from tests.source_trees import dotted, files_with, nodes_of

PROJECT = Path(__file__).parent.parent
PACKAGE = PROJECT / "scaletrain_cli"
# The back ends themselves, and the one place in the spec that declares their traits.
HOMES = ("launch/backends/", "spec/backend_traits.py")
# Tables by the name of an extra of this package (pip install '.[slurm]'), which is not the name of a scheduler.
TABLES_OF_EXTRAS = ("extras.py", "cli/doctor.py")

# Packages of the back ends.
OWN_PACKAGES = tuple(f"scaletrain_cli.launch.backends.{name}." for name in BUILT_IN)
# The texts without which a module can have nothing that is looked for.
NAMED = tuple(text for name in BUILT_IN for text in (f'"{name}"', f"'{name}'", f"backends.{name}"))
# Calls whose argument decides something.
ASKING = ("startswith", "endswith", "get", "backend_for", "backend_traits")


def decisions(nodes: Iterable[ast.AST]) -> Iterator[ast.expr]:
    """Yield each name of a back end that is compared, matched, looked up in a table, or made a type."""
    for node in nodes:
        parts: list[ast.AST | None] = []
        if isinstance(node, ast.Compare):
            parts = [node.left, *node.comparators]
        elif isinstance(node, ast.MatchValue):
            parts = [node.value]
        elif isinstance(node, ast.Dict):
            parts = [*node.keys]
        elif isinstance(node, ast.Subscript):
            parts = [node.slice]
        elif isinstance(node, ast.Call) and dotted(node.func).rpartition(".")[2] in ASKING:
            parts = [*node.args]
        for part in parts:
            items = part.elts if isinstance(part, ast.Tuple | ast.List | ast.Set) else [part]
            yield from (item for item in items if isinstance(item, ast.Constant) and item.value in BUILT_IN)


def imports_of_back_ends(nodes: Iterable[ast.AST]) -> Iterator[ast.ImportFrom]:
    """Yield each import of a module of one back end."""
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and f"{node.module}.".startswith(OWN_PACKAGES):
            yield node


def test_comparisons_tables_and_matches_of_names_are_detected() -> None:
    source = """
if spec.cluster.scheduler == "slurm": pass
if name in ("local", "x"): pass
TABLE = {"kubernetes": 1}
match name:
    case "local" | "slurm": pass
kind: Literal["slurm"]
said = "slurm"
"""
    lines = [node.lineno for node in decisions(ast.walk(ast.parse(source))) if isinstance(node, ast.expr)]
    assert sorted(lines) == [2, 3, 4, 6, 6, 7]


def files(package: Path = PACKAGE) -> Iterator[tuple[str, Iterable[ast.AST]]]:
    """Yield the path below the package, and the nodes, of each module outside the back ends that names one."""
    for path in files_with(package, *NAMED):
        name = path.relative_to(package).as_posix()
        if not name.startswith(HOMES):
            yield name, nodes_of(path)


def test_modules_that_compare_or_import_are_found_whichever_way_they_name_a_back_end(tmp_path: Path) -> None:
    sources = {
        "import.py": "from scaletrain_cli.launch.backends.slurm import script",
        "import_within.py": "from scaletrain_cli.launch.backends.slurm.script import render",
        "single.py": "asked = name == 'local'",
        "double.py": 'asked = name == "local"',
        "launch/backends/kubernetes/own.py": 'asked = name == "kubernetes"',
        "none.py": "asked = name == kind",
    }
    for name, source in sources.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(source, encoding="utf-8")
    imports = [name for name, nodes in files(tmp_path) if list(imports_of_back_ends(nodes))]
    assert imports == ["import.py", "import_within.py"]
    assert [name for name, nodes in files(tmp_path) if list(decisions(nodes))] == ["double.py", "single.py"]


def test_no_module_outside_the_back_ends_compares_the_name_of_one() -> None:
    found = [
        f"{name}:{node.lineno}" for name, nodes in files() if name not in TABLES_OF_EXTRAS for node in decisions(nodes)
    ]
    assert not found, found


def test_no_module_outside_the_back_ends_imports_one() -> None:
    found = [f"{name}:{node.lineno}" for name, nodes in files() for node in imports_of_back_ends(nodes)]
    assert not found, found
