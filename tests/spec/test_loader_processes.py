"""``data.loader.workers: auto`` is a thread for tokens and on CPUs, and the free cores of a rank for images on GPUs."""

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from scaletrain_cli.launch.backends.slurm.script import cores_per_node, sbatch_options
from scaletrain_cli.own_processes import usable_cores
from scaletrain_cli.spec import RunSpec, parse_spec
from scaletrain_cli.spec.loader_processes import cores_per_rank, loader_processes
from scaletrain_cli.spec.sources import LoaderSpec
from tests.plan.vision.test_vision_plan import spec_of


def images(preset: str = "resnet-50", **changes: Any) -> RunSpec:
    """A run on eight A100 with ``workers: auto``."""
    return spec_of(preset, **{"data__loader": {}, **changes})


def tokens() -> RunSpec:
    """The same for a language model."""
    text = (
        "{schema: scaletrain/v1, name: text, model: {preset: gpt2}, data: {source: python-stdlib}, "
        "training: {global_batch_size: 8, steps: 1}, cluster: {gpus_per_node: 8, gpu: a100-sxm-80gb, scheduler: slurm}}"
    )
    return parse_spec(text, file="text.yaml", base_dir=Path())


@pytest.mark.parametrize(("cores", "processes"), [(None, 3), (1, 1), (2, 1), (8, 7), (16, 15), (100, 15)])
def test_images_on_gpus_have_a_process_for_each_core_but_one(cores: int | None, processes: int) -> None:
    assert loader_processes(images(), cores) == processes
    assert loader_processes(images("clip-vit-base-patch32"), cores) == processes


def test_a_thread_reads_tokens_and_on_cpus_and_a_number_is_a_number() -> None:
    on_cpus = images(cluster__gpu="cpu", training__precision="fp32")
    digits = images(data__source="sklearn-digits")
    assert [loader_processes(spec, 16) for spec in (tokens(), on_cpus, digits)] == [0, 0, 0]
    for count in (0, 2, 64):
        assert loader_processes(images(data__loader={"workers": count}), 16) == count


def test_the_cores_that_a_job_requests_are_those_that_are_counted_on() -> None:
    def requested(spec: RunSpec) -> list[str]:
        return [option for option in sbatch_options(spec, "run") if option.startswith("cpus-per-task")]

    default, chosen = images(), images(cluster__cpus_per_gpu=10)
    ranks = default.cluster.gpus_per_node
    assert (cores_per_rank(default), loader_processes(default)) == (4, 3)
    assert requested(default) == [f"cpus-per-task={4 * ranks}"]
    assert (cores_per_rank(chosen), loader_processes(chosen)) == (10, 9)
    assert requested(chosen) == [f"cpus-per-task={10 * ranks}"]
    assert cores_per_node(tokens()) is None  # tokens: as many as the cluster gives
    own = images(code__command=["python", "train.py"])
    assert cores_per_node(own) is None  # a program of the user's own
    pod = {"scheduler": "kubernetes", "kubernetes": {"namespace": "x", "image": "y:1", "cpus_per_node": 12 * ranks}}
    assert cores_per_rank(images(**{f"cluster__{key}": value for key, value in pod.items()})) == 12


@pytest.mark.parametrize("value", [-1, 65, True, 1.5, "two"])
def test_other_numbers_of_workers_are_refused(value: Any) -> None:
    with pytest.raises(ValidationError, match="whole number from 0 to 64, or auto"):
        LoaderSpec.model_validate({"workers": value})


@pytest.mark.parametrize(
    ("files", "most"),
    [
        ({"cpu.max": "100000 100000"}, 1),
        ({"cpu.max": "50000 100000"}, 1),
        ({"cpu.max": "max 100000"}, None),
        ({"cpu/cpu.cfs_quota_us": "100000", "cpu/cpu.cfs_period_us": "100000"}, 1),
        ({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, None),
        ({}, None),
    ],
)
def test_the_quota_of_a_container_limits_its_cores(tmp_path: Path, files: dict[str, str], most: int | None) -> None:
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(content)
    everything = usable_cores(str(tmp_path / "none"))
    assert usable_cores(str(tmp_path)) == (everything if most is None else min(everything, most))
