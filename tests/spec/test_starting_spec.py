"""The specs that `init` writes load as written, and with their commented lines."""

import itertools
import re
from collections.abc import Iterator
from typing import Any

import pytest

from scaletrain_cli.plan.advice.recipe_checks import starting_preset
from scaletrain_cli.spec import RunSpec
from scaletrain_cli.spec.presets import presets
from scaletrain_cli.spec.starting_spec import starting_spec
from tests.spec.samples import load


def every_form() -> Iterator[Any]:
    """The forms without a preset and one for each preset; the other forms of presets are long tests."""
    for preset, gpu, scheduler in itertools.product(
        (None, *presets()), ("cpu", "h100-sxm-80gb"), ("local", "slurm", "kubernetes")
    ):
        is_short = preset is None or (gpu, scheduler) == ("h100-sxm-80gb", "slurm")
        yield pytest.param(preset, gpu, scheduler, marks=[] if is_short else pytest.mark.long)


@pytest.mark.parametrize(("preset", "gpu", "scheduler"), [*every_form()])
def test_every_starting_spec_loads(preset: str | None, gpu: str, scheduler: str) -> None:
    spec = load(
        starting_spec(preset=starting_preset(preset) if preset else None, gpu=gpu, scheduler=scheduler, gpus_per_node=4)
    )
    assert (spec.cluster.gpu, spec.cluster.scheduler, spec.world_size) == (gpu, scheduler, 4)


def test_a_starting_spec_has_short_lines_and_no_blanks_at_their_ends() -> None:
    for preset in (None, *presets()):
        for line in starting_spec(preset=starting_preset(preset) if preset else None).splitlines():
            assert line == line.rstrip()
            assert len(line) <= 120, line


def test_commented_lines_of_a_starting_spec_are_valid() -> None:
    text = starting_spec(preset=starting_preset("llama-3-8b"), gpu="h100-sxm-80gb", scheduler="slurm", gpus_per_node=8)
    commented = re.sub(r"^( *)# (?=\w+: )", r"\1", text, flags=re.MULTILINE)
    assert commented.count("#") < text.count("#")
    spec = load(commented)
    assert spec.cluster.slurm.partition == "gpu"
    assert spec.secret_env == ["WANDB_API_KEY"]
    assert spec.model == load(text).model


def test_commented_lines_of_a_kubernetes_starting_spec_are_valid() -> None:
    text = starting_spec(
        preset=starting_preset("llama-3-8b"), gpu="h100-sxm-80gb", scheduler="kubernetes", nodes=2, gpus_per_node=8
    )
    kubernetes = load(re.sub(r"^( *)# (?=\w+: )", r"\1", text, flags=re.MULTILINE)).cluster.kubernetes
    assert (kubernetes.queue, kubernetes.priority) == ("team-a", "training-normal")
    assert kubernetes.image is not None
    assert kubernetes.rdma_resource is not None
    assert "WANDB_API_KEY" in kubernetes.secrets


def test_every_section_is_shown() -> None:
    shown = set(re.findall(r"^#? ?(\w+):", starting_spec(), flags=re.MULTILINE))
    assert set(RunSpec.model_fields) - {"schema_version", "guard", "planner"} <= shown
