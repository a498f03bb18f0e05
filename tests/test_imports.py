"""The architecture: which package may import which, and which libraries verbs that only read may load.

The import graph is read with ``ast`` from the files as they are; nothing is imported for it.
"""

from __future__ import annotations

import ast
import functools
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from scaletrain_cli.extras import EXTRAS
from tests.source_trees import dotted, tree_of

PROJECT = Path(__file__).parent.parent
PACKAGE = "scaletrain_cli"
RECIPE = "recipes/llama-10m-cpu.yaml"

# Beside these, every package may import what is in this layer.
BASE_LAYER = set(
    "available_memory errors event_texts extras full_disk hub log_setup markup own_processes plugins project_files "
    "reason_texts reasons safe_files secret_text sent_run text unexpected __init__".split()
)
MAY_IMPORT: dict[str, set[str]] = {
    "__main__": {"cli"},
    "api": {"launch", "plan", "rundir", "spec"},
    "cli": set("api data diagnosis notify report ui launch plan spec rundir telemetry tracking worker".split()),
    "ui": {"data", "diagnosis", "launch", "plan", "spec", "rundir", "telemetry", "worker"},
    "report": {"diagnosis", "launch", "plan", "spec", "rundir", "telemetry"},
    "diagnosis": {"plan", "spec", "rundir", "telemetry"},
    "launch": {"data", "diagnosis", "mirror", "notify", "plan", "spec", "rundir", "telemetry", "tracking", "worker"},
    "engine": {"data", "diagnosis", "plan", "spec", "rundir", "telemetry", "tracking", "worker"},
    "mirror": {"data", "rundir", "spec"},
    "telemetry": {"rundir"},
    "notify": {"spec", "rundir"},
    "data": {"rundir", "spec"},
    "worker": {"plan", "spec", "rundir", "telemetry", "tracking"},
    "rundir": {"plan", "spec"},
    "plan": {"spec"},
    "spec": {"tracking"},
    "tracking": set(),
    **{module: set() for module in BASE_LAYER},
    "errors": {"reasons"},
}
# What a package may use beyond the standard library: each library has one home, and plan has none.
LIBRARIES_ALLOWED = {
    # jinja2 for chat templates, which checks before a run parse
    "data": {"PIL", "jinja2", "numpy", "py3langid", "rensa", "sklearn", "tokenizers"},
    "hub": {"huggingface_hub"},
    # anyio and mcp by `scaletrain mcp` alone
    "cli": {"anyio", "click", "gpuhunt", "mcp", "pydantic", "typer"},
    "ui": {"matplotlib", "rich"},
    # ruamel writes Kubernetes objects; the errors of the Kubernetes client are urllib3's
    "launch": {"kubernetes", "psutil", "pynvml", "ruamel", "submitit", "urllib3"},
    # jinja2 for chat templates; torchvision is optional, a decoder of images; transformers for checkpoint sample alone
    "engine": set(
        "PIL bitsandbytes deepspeed jinja2 liger_kernel numpy pyarrow safetensors tokenizers torch "
        "torchao torchvision transformers".split()
    ),
    "rundir": {"pydantic"},
    "spec": {"pydantic", "pydantic_core", "ruamel"},
    "tracking": {"mlflow", "pydantic", "tensorboard", "wandb"},
    "worker": {"lightning", "torch"},  # by the adapters of loop_adapter.py, in functions
}
# Run in processes of their own, which start for that work.
WITH_HEAVY_IMPORTS = {"data", "engine"}
HEAVY = set("deepspeed kubernetes matplotlib mcp mlflow numpy submitit tensorboard torch wandb".split())


@dataclass(frozen=True)
class Import:
    file: str  # relative to the project
    line: int
    package: str  # of the file that imports
    target: str  # dotted module
    name: str | None  # the name taken from the target, if any
    at_module_level: bool

    @property
    def top(self) -> str:
        return self.target.partition(".")[0]

    @property
    def target_package(self) -> str | None:
        """Return the package that is imported; None outside scaletrain_cli."""
        parts = self.target.split(".")
        if parts[0] != PACKAGE:
            return None
        return parts[1] if len(parts) > 1 else "__init__"

    def __str__(self) -> str:
        return f"{self.file}:{self.line} {self.package} imports {self.target}" + (f".{self.name}" if self.name else "")


@functools.cache
def imports_of(project: Path) -> tuple[Import, ...]:
    return tuple(_imports_of(project))


def _imports_of(project: Path) -> Iterator[Import]:
    for path in sorted((project / PACKAGE).rglob("*.py")):
        parts = path.relative_to(project).with_suffix("").parts
        # `a/__init__.py` is the package `a`, and a relative import in it starts from there.
        module, parent = (parts[:-1], parts[:-1]) if parts[-1] == "__init__" else (parts, parts[:-1])
        package = module[1] if len(module) > 1 else "__init__"
        tree = tree_of(path)
        for node, at_module_level in walk(tree, at_module_level=True):
            for target, name in targets(node, parent):
                if target == PACKAGE and name and (name in MAY_IMPORT or is_module(project / PACKAGE / name)):
                    target, name = f"{PACKAGE}.{name}", None
                yield Import(
                    str(path.relative_to(project)), getattr(node, "lineno", 0), package, target, name, at_module_level
                )


def is_module(path: Path) -> bool:
    return path.is_dir() or path.with_suffix(".py").exists()


def walk(node: ast.AST, at_module_level: bool) -> Iterator[tuple[ast.AST, bool]]:
    """Yield every node, and True if it runs when the module is imported (not in functions or for type checkers)."""
    left = [(node, at_module_level)]
    while left:
        parent, parent_runs = left.pop()
        for_types = set(map(id, parent.body)) if isinstance(parent, ast.If) and is_for_types(parent) else set()
        for child in ast.iter_child_nodes(parent):
            is_function = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            runs = parent_runs and not is_function and id(child) not in for_types
            yield child, runs
            left.append((child, runs))


def is_for_types(block: ast.If) -> bool:
    return dotted(block.test).rpartition(".")[2] == "TYPE_CHECKING"


def targets(node: ast.AST, parent: tuple[str, ...]) -> Iterator[tuple[str, str | None]]:
    """Yield the modules that a statement imports, by absolute name, with the name imported from each."""
    match node:
        case ast.Import():
            yield from ((alias.name, None) for alias in node.names)
        case ast.ImportFrom():
            base = parent[: len(parent) - node.level + 1] if node.level else ()
            target = ".".join([*base, *([node.module] if node.module else [])])
            yield from ((target, alias.name) for alias in node.names)
        case ast.Call(
            func=ast.Name(id="__import__" | "import_module") | ast.Attribute(attr="import_module"),
            args=[ast.Constant(value=str(target)), *_],
        ):
            yield target, None


def violations(project: Path) -> list[str]:
    """Return one line for each broken rule."""
    return [f"{found}: {rule}" for found in imports_of(project) for rule in broken_rules(found)]


def broken_rules(found: Import) -> Iterator[str]:
    package, target_package = found.package, found.target_package
    if package not in MAY_IMPORT:
        yield f"unknown package {package!r}; known are {', '.join(MAY_IMPORT)}"
        return
    if target_package is None:
        if found.top in HEAVY and found.at_module_level and package not in WITH_HEAVY_IMPORTS:
            yield "heavy, so outside data and engine import it inside the function that needs it"
        allowed = LIBRARIES_ALLOWED.get(package, set())
        if found.top not in sys.stdlib_module_names | allowed:
            yield f"of libraries {package} may use {', '.join(sorted(allowed)) or 'the standard one only'}"
        return
    if target_package not in {package} | base_layer_of(package) | MAY_IMPORT[package]:
        yield f"{package} may import {', '.join(sorted(MAY_IMPORT[package])) or 'no other package'}"
    elif package == "ui" and target_package in MAY_IMPORT["ui"] and not (found.name or "")[:1].isupper():
        yield "ui shows what it is given: of other packages it may take classes only"


def base_layer_of(package: str) -> set[str]:
    """Return the modules that every package may import; ``errors`` is below them and imports only ``__init__``."""
    return {"__init__"} if package == "errors" else BASE_LAYER


def test_every_package_imports_only_what_it_may() -> None:
    assert not violations(PROJECT), "\n" + "\n".join(violations(PROJECT))


def test_no_modules_import_each_other_in_a_cycle() -> None:
    """Imports inside functions and for type checkers count too: they hide a cycle and do not undo it."""
    modules = {
        ".".join((path.parent if path.name == "__init__.py" else path.with_suffix("")).relative_to(PROJECT).parts): path
        for path in (PROJECT / PACKAGE).rglob("*.py")
    }
    by_file = {str(path.relative_to(PROJECT)): module for module, path in modules.items()}
    graph: dict[str, set[str]] = {module: set() for module in modules}
    for found in imports_of(PROJECT):
        target = f"{found.target}.{found.name}" if f"{found.target}.{found.name}" in modules else found.target
        if target in modules and target != by_file[found.file]:
            graph[by_file[found.file]].add(target)
    # Raises CycleError, which names the modules of the cycle.
    assert set(TopologicalSorter(graph).static_order()) == set(modules)


def test_every_package_is_in_the_table() -> None:
    found = {path.stem for path in (PROJECT / PACKAGE).iterdir() if path.is_dir() or path.suffix == ".py"}
    assert found - {"__pycache__"} <= set(MAY_IMPORT)


@pytest.mark.parametrize(
    ("file", "source", "expected"),
    [
        ("plan/memory/states.py", "import scaletrain_cli.launch.backends.slurm.backend", "plan may import spec"),
        ("plan/memory/states.py", "from scaletrain_cli import engine", "plan may import spec"),
        ("plan/memory/states.py", "from ...rundir import records", "plan may import spec"),
        ("plan/__init__.py", "from ..rundir import records", "plan may import spec"),
        ("plan/memory/states.py", "import pydantic", "plan may use the standard one only"),
        ("spec/run.py", "def load():\n    from scaletrain_cli.plan import make_plan", "spec may import tracking"),
        (
            "launch/backends/local/backend.py",
            "import importlib\nimportlib.import_module('scaletrain_cli.engine.train')",
            "launch may",
        ),
        (
            "launch/backends/local/backend.py",
            "import rich.table",
            "launch may use kubernetes, psutil, pynvml, ruamel, submitit, urllib3",
        ),
        (
            "launch/backends/local/backend.py",
            "from scaletrain_cli.cli.main import app",
            "launch may import data, diagnosis, mirror, notify, plan, rundir, spec, telemetry, tracking, worker",
        ),
        ("launch/probe.py", "try:\n    import submitit\nexcept ImportError:\n    pass", "heavy"),
        ("launch/probe.py", "class Probe:\n    import submitit", "heavy"),
        ("launch/probe.py", "def probe():\n    import torch", "launch may use"),
        (
            "engine/train.py",
            "from scaletrain_cli.launch import agent",
            "engine may import data, diagnosis, plan, rundir, spec, telemetry, tracking, worker",
        ),
        ("ui/tables.py", "from scaletrain_cli.plan import make_plan", "classes only"),
        ("ui/tables.py", "import scaletrain_cli.plan", "classes only"),
        ("errors.py", "from scaletrain_cli.spec import RunSpec", "errors may import reasons"),
        ("utils/text.py", "import os", "unknown package 'utils'"),
    ],
)
def test_a_violated_rule_is_reported(tmp_path: Path, file: str, source: str, expected: str) -> None:
    write_module(tmp_path, file, source)
    assert any(expected in line for line in violations(tmp_path)), violations(tmp_path)


@pytest.mark.parametrize(
    ("file", "source"),
    [
        (
            "plan/memory/states.py",
            "import math\nfrom scaletrain_cli.spec.model import Model\nfrom .compute import flops",
        ),
        (
            "plan/memory/states.py",
            "from scaletrain_cli import __version__, errors\nfrom scaletrain_cli.errors import Problem",
        ),
        ("launch/probe.py", "def probe():\n    import submitit"),
        ("launch/probe.py", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import submitit"),
        ("engine/train.py", "import torch\nimport deepspeed\nfrom scaletrain_cli.rundir import events"),
        ("ui/tables.py", "import rich.table\nfrom scaletrain_cli.plan import RunPlan"),
        ("cli/plan.py", "import typer\nfrom scaletrain_cli.plan import make_plan\nfrom scaletrain_cli import ui"),
        ("__main__.py", "from scaletrain_cli.cli import main"),
    ],
)
def test_an_observed_rule_is_not_reported(tmp_path: Path, file: str, source: str) -> None:
    for package in ("cli", "engine", "launch", "plan", "spec", "ui"):
        write_module(tmp_path, f"{package}/__init__.py", "")
    write_module(tmp_path, "errors.py", "")
    write_module(tmp_path, file, source)
    assert violations(tmp_path) == []


def write_module(project: Path, file: str, source: str) -> None:
    path = project / PACKAGE / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(source, encoding="utf-8")


@pytest.mark.parametrize(
    ("arguments", "most_modules"),
    [
        (["--help"], 25),
        pytest.param(["schema"], 70, marks=pytest.mark.long),
        (["list"], 80),
        (["status"], 133),
        pytest.param(["doctor"], 235, marks=pytest.mark.long),
        pytest.param(["init", "-o", "-"], 149, marks=pytest.mark.long),
        pytest.param(["validate", RECIPE], 191, marks=pytest.mark.long),
        (["plan", RECIPE], 160),
        pytest.param(["plan", RECIPE, "--json"], 160, marks=pytest.mark.long),
        (["submit", RECIPE, "--dry-run", "--set", "cluster.scheduler=slurm"], 200),
        (["watch", "--help"], 30),
        pytest.param(["diagnose", "--help"], 30, marks=pytest.mark.long),
        pytest.param(["report", "--help"], 30, marks=pytest.mark.long),
    ],
    ids=lambda given: " ".join(given[:3]) if isinstance(given, list) else "",
)
def test_verbs_that_only_read_load_few_modules_and_no_heavy_library(
    arguments: list[str], most_modules: int, tmp_path: Path
) -> None:
    """Imports are most of the cost of a start (benchmarks/command_startup.py); this counts those of this package."""
    report = tmp_path / "modules.json"
    program = (
        "import json, pathlib, sys\n"
        f"from {PACKAGE}.__main__ import main\n"
        "report, *sys.argv[1:] = sys.argv[1:]\n"
        "try:\n"
        "    main()\n"
        "finally:\n"
        "    pathlib.Path(report).write_text(json.dumps(sorted(sys.modules)))\n"
    )
    command = [sys.executable, "-c", program, str(report), *arguments]
    result = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True)
    assert "Traceback" not in result.stderr
    assert result.returncode == 0 or arguments in (["doctor"], ["status"]), result.stdout + result.stderr
    loaded = json.loads(report.read_text(encoding="utf-8"))
    assert f"{PACKAGE}.errors" in loaded
    assert [name for name in loaded if name.partition(".")[0] in HEAVY | {"tokenizers"}] == []
    assert [name for name in loaded if name.startswith(f"{PACKAGE}.engine")] == []
    assert arguments != ["--help"] or "importlib.metadata" not in loaded  # no package here has plug-ins
    assert sum(name.startswith(f"{PACKAGE}.") for name in loaded) <= most_modules


def test_without_any_extra_the_text_of_a_run_is_looked_at_and_the_run_is_planned_and_rendered() -> None:
    """A process of about a second, in which nothing can be imported that an extra installs."""
    extras = {module.partition(".")[0] for modules in EXTRAS.values() for module in modules} - {"google"}
    program = (
        f"import sys\nsys.modules.update(dict.fromkeys({sorted(extras)}))\n"
        f"from {PACKAGE}.__main__ import main\n"
        "for verb in (['plan'], ['validate'], ['submit', '--dry-run']):\n"
        "    try:\n"
        "        main([*verb, *sys.argv[1:]])\n"
        "    except SystemExit as end:\n"
        "        assert end.code == 0, (verb, end.code)\n"
    )
    words = ["recipes/llama-7b-h100.yaml", "--set", "data.source=docs/*.md"]
    result = subprocess.run([sys.executable, "-c", program, *words], cwd=PROJECT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
