"""Names, shapes and types of the tensors in model.weights and in an adapter are compared with the spec before a run."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from scaletrain_cli.errors import ExitCode
from scaletrain_cli.launch.resource_checks.weights import config_problems, header_problems
from scaletrain_cli.plan.parameters import modules_with_adapter, stored_shapes
from scaletrain_cli.rundir.paths import runs_root
from scaletrain_cli.spec import load_spec, parse_spec
from scaletrain_cli.spec.hugging_face_weights import to_hugging_face
from scaletrain_cli.spec.run import InitialWeights
from scaletrain_cli.spec.weight_files import Header, peft_shapes
from tests.cli.command_line import SMALL, Ended, scaletrain
from tests.spec.test_vision_specs import VISION as IMAGES

Shapes = dict[str, tuple[int, ...]]
SCHEDULERS = ("local", "slurm")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(path: Path, shapes: Shapes, dtype: str = "F32") -> None:
    """Write a safetensors file of zeros, which occupies no space."""
    header, end = {}, 0
    for name, shape in shapes.items():
        start, end = end, end + 4 * math.prod(shape)
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    path.parent.mkdir(exist_ok=True)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)


def shapes_of(*sets: str) -> Shapes:
    return stored_shapes(load_spec(SMALL, sets).transformer)


def submit(*sets: str, scheduler: str = "local") -> Ended:
    words = [word for one in (*sets, f"cluster.scheduler={scheduler}") for word in ("--set", one)]
    return scaletrain("submit", SMALL, "--dry-run", *words)


def without(name: str) -> Callable[[Shapes], Shapes]:
    return lambda shapes: {key: shape for key, shape in shapes.items() if key != name}


def with_shape(name: str, *shape: int) -> Callable[[Shapes], Shapes]:
    return lambda shapes: shapes | {name: shape}


CASES: tuple[tuple[Callable[[Shapes], Shapes], str], ...] = (
    (without("model.norm.weight"), "model.norm.weight: is in the model but in none of the files"),
    (with_shape("model.norm.weight", 7), "model.norm.weight = [7]: the model has ["),
    (with_shape("model.layers.99.mlp.up_proj.weight", 2, 2), "layers.99.mlp.up_proj.weight: is in the files but not"),
    (with_shape("model.layers.0.self_attn.q_proj.bias", 8), "q_proj.bias: is in the files but not in the model"),
    (lambda _: {"encoder.weight": (2, 2)}, "has 1 tensor and none of those of the spec's model"),
)


@pytest.mark.parametrize(("change", "said"), CASES, ids=[said[:30] for _, said in CASES])
def test_weights_of_another_model_are_refused(folder: Path, change: Callable[[Shapes], Shapes], said: str) -> None:
    write(folder / "weights" / "model.safetensors", change(shapes_of()))
    refused = submit("model.weights=weights")
    assert refused.code == ExitCode.USAGE
    assert "--set model.weights = weights" in refused.err
    assert said in " ".join(refused.err.split())
    assert not runs_root().exists()


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_weights_of_the_model_are_accepted_and_those_of_another_type_are_not(folder: Path, scheduler: str) -> None:
    file = folder / "weights" / "model.safetensors"
    write(file, shapes_of())
    assert submit("model.weights=weights", scheduler=scheduler).code == 0
    write(file, shapes_of(), "I32")
    refused = submit("model.weights=weights", scheduler=scheduler)
    assert refused.code == ExitCode.USAGE
    assert "= I32: must be one of F64, F32, F16, BF16" in " ".join(refused.err.split())


def test_names_of_other_architectures_and_a_copied_head_are_accepted(folder: Path) -> None:
    """Mixtral's names of experts, names without the outermost one, and a head beside a tied embedding."""
    experts = ("model.num_experts=2", "model.num_experts_per_tok=1", "model.moe_intermediate_size=16")
    theirs = {".mlp.": ".block_sparse_moe.", "gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}
    renamed: Shapes = {}
    for name, shape in shapes_of(*experts).items():
        for ours, other in theirs.items():
            name = name.replace(ours, other)
        renamed[name] = shape
    file = folder / "weights" / "model.safetensors"
    write(file, renamed)
    assert submit("model.weights=weights", *experts).code == 0
    tied = "model.tie_word_embeddings=true"
    bare = {name.removeprefix("model."): shape for name, shape in shapes_of(tied).items()}
    write(file, bare | {"lm_head.weight": bare["embed_tokens.weight"]})
    assert submit("model.weights=weights", tied).code == 0


def test_an_index_that_names_a_tensor_which_its_file_lacks_is_refused(folder: Path) -> None:
    shapes = shapes_of()
    write(folder / "weights" / "a.safetensors", without("model.norm.weight")(shapes))
    index = {"weight_map": dict.fromkeys(shapes, "a.safetensors")}
    (folder / "weights" / "model.safetensors.index.json").write_text(json.dumps(index))
    refused = submit("model.weights=weights")
    assert refused.code == ExitCode.USAGE
    assert "model.norm.weight: is in the model but in none of the files" in " ".join(refused.err.split())


def test_factors_of_another_rank_or_for_other_modules_are_refused(folder: Path) -> None:
    def adapter(rank: int, targets: str = "[q_proj]") -> str:
        return f"model.adapter={{name: lora, rank: {rank}, targets: {targets}, weights: adapter}}"

    def factors(setting: str) -> Shapes:
        model = load_spec(SMALL, (setting,)).transformer
        assert model.adapter is not None
        return peft_shapes(model.adapter, modules_with_adapter(model))

    file = folder / "adapter" / "adapter_model.safetensors"
    file.parent.mkdir()
    (file.parent / "adapter_config.json").write_text("{}")
    for stored, said in (
        (factors(adapter(8)), None),
        (factors(adapter(4)), "the adapter of the spec has [8, "),
        (factors(adapter(8, "[v_proj]")), "is in the adapter of the spec but not in the file"),
    ):
        write(file, stored)
        ended = submit(adapter(8))
        assert ended.code == (0 if said is None else ExitCode.USAGE), ended.err
        assert (said or "") in " ".join(ended.err.split())


@pytest.mark.parametrize("preset", ["vit-base-patch16", "clip-vit-base-patch32", "llava-tiny"])
def test_weights_of_models_of_images_are_compared_before_a_run(preset: str, tmp_path: Path) -> None:
    model: Any = parse_spec(IMAGES.replace("resnet-50", preset), file="run.yaml", base_dir=tmp_path).model
    headers = {name: Header("f", shape, "F32") for name, shape in stored_shapes(model).items()}
    whole = InitialWeights("model.weights", "w", model)
    assert list(header_problems(headers, tmp_path, whole, "weights")) == []
    (tmp_path / "config.json").write_text(json.dumps(to_hugging_face(model)))
    assert list(config_problems(tmp_path, whole)) == []
    name = next(name for name in headers if "patch_embedding" in name and name.endswith("weight"))
    (found,) = header_problems(headers | {name: Header("f", (1, 2), "F32")}, tmp_path, whole, "weights")
    assert f"{name} = [1, 2]: the model has [" in str(found)
    tower = getattr(model, "vision_config", None)
    same = {"hidden_act": "gelu_pytorch_tanh"}
    other = model.model_copy(update={"vision_config": tower.model_copy(update=same)} if tower is not None else same)
    (differing,) = config_problems(tmp_path, whole._replace(model=other))
    assert "hidden_act" in str(differing)
    assert "gelu_pytorch_tanh" in str(differing)
