import ast
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import pytest

import scaletrain_cli
from scaletrain_cli.plan.frameworks.registry import FRAMEWORKS, framework_of
from scaletrain_cli.spec.run import PlannerSpec
from tests.plan.specs import spec_of

SOURCE = Path(scaletrain_cli.__file__).parent
# The registry of workloads tells the kinds of network apart, and vision/ its families.
_MAY_ASK_FOR_THE_FAMILY = (
    "plan/workloads/",
    "plan/vision/",
    "plan/parameters.py",
    "plan/trained_parameters.py",
    "plan/adapters.py",
)


def compared_names(tree: ast.AST) -> Iterator[str]:
    """Yield every string that stands on a side of a comparison, also in a tuple, a set or a list."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare):
            for side in (node.left, *node.comparators):
                for each in ast.walk(side):
                    if isinstance(each, ast.Constant) and isinstance(each.value, str):
                        yield each.value


def files(*but: str) -> Iterator[tuple[str, str]]:
    for path in sorted((SOURCE / "plan").rglob("*.py")):
        name = path.relative_to(SOURCE).as_posix()
        if not name.startswith(but):
            yield name, path.read_text(encoding="utf-8")


def test_no_module_of_the_planner_compares_the_name_of_a_framework() -> None:
    for name, text in files():
        assert not set(compared_names(ast.parse(text))) & set(FRAMEWORKS), name
    assert "deepspeed" in set(compared_names(ast.parse('spec.planner.framework in ("deepspeed", "fsdp")')))


def asked_families(tree: ast.AST) -> Iterator[str]:
    """Yield each test of a model's family or of its class."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare) and isinstance(node.left, ast.Attribute) and node.left.attr == "family":
            yield ast.unparse(node)
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "isinstance":
            yield from [ast.unparse(node)] if "ModelSpec" in ast.unparse(node) else []


def test_only_workloads_ask_for_the_kind_of_a_model() -> None:
    for name, text in files(*_MAY_ASK_FOR_THE_FAMILY):
        assert not list(asked_families(ast.parse(text))), name
    assert len(list(asked_families(ast.parse('isinstance(model, ModelSpec) and model.family == "gpt"')))) == 2


def test_the_spec_names_the_frameworks_that_the_planner_models() -> None:
    assert set(get_args(PlannerSpec.model_fields["framework"].annotation)) == set(FRAMEWORKS)
    assert [framework.name for framework in FRAMEWORKS.values() if framework.is_engine] == ["deepspeed"]


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_every_framework_keeps_all_blocks_and_states_its_sources(name: str) -> None:
    spec = spec_of("llama-7b", planner__framework=name)
    framework = framework_of(spec)
    stages = framework.pipeline_stages(spec.transformer, 4)
    assert sum(stage.blocks for stage in stages) == spec.transformer.num_hidden_layers
    assert all(str(reason) for reason in framework.memory_assumptions())
