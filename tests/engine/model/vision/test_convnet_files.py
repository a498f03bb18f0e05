"""ResNets and ConvNeXts are loaded from files of transformers, and exported to files that transformers loads."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from scaletrain_cli.data.prepared import prepare_run_datasets
from scaletrain_cli.engine.checkpoint.export import export
from scaletrain_cli.engine.checkpoint.tokenizer_export import text_files
from scaletrain_cli.engine.compose import _weights
from scaletrain_cli.engine.model import outline
from scaletrain_cli.engine.model.base import VisionModel
from scaletrain_cli.engine.model.materialization import materialize
from scaletrain_cli.engine.model.safetensors import HuggingFaceFolder
from scaletrain_cli.errors import UsageError
from scaletrain_cli.launch.resource_checks.weights import config_problems, header_problems
from scaletrain_cli.spec.hugging_face import from_config, read_config
from scaletrain_cli.spec.hugging_face_weights import to_hugging_face
from scaletrain_cli.spec.presets import SourceError
from scaletrain_cli.spec.run import InitialWeights
from scaletrain_cli.spec.weight_files import read_headers
from tests.data.images.pictures import write_folder
from tests.data.texts import ignore
from tests.engine.checkpoint.test_export import NO_TEXT, checkpoint_of
from tests.engine.checkpoint.test_export import spec_of as run_spec_of
from tests.engine.model.test_safetensors import LLAMA
from tests.engine.model.vision.convnets import DIMS, fresh, images, spec_of, theirs
from tests.spec.samples import SPEC, load


def loaded(folder: Path, spec: Any) -> VisionModel:
    model: VisionModel = outline(spec)
    materialize(model, HuggingFaceFolder(folder, outline(spec)), torch.device("cpu"))
    return model.eval()


def found_before_the_run(folder: Path, spec: Any) -> list[str]:
    """Return the problems that the checks before a run report."""
    headers = read_headers(folder / "model.safetensors")
    given = InitialWeights("model.weights", str(folder), spec)
    found = (*config_problems(folder, given), *header_problems(headers, folder, given, "weights"))
    return [str(each) for each in found]


@pytest.mark.parametrize("name", DIMS)
def test_files_of_transformers_are_loaded_with_equal_logits(name: str, tmp_path: Path) -> None:
    expected, spec = theirs(DIMS[name]).eval(), spec_of(DIMS[name])
    expected.save_pretrained(tmp_path)
    assert found_before_the_run(tmp_path, spec) == []
    model, pixels = loaded(tmp_path, spec), images()
    logits = expected(pixels).logits
    assert logits.std() > 0.01
    torch.testing.assert_close(model(pixels), logits, atol=1e-5, rtol=1e-5)
    for key, values in expected.state_dict().items():
        assert torch.equal(model.state_dict()[key], values), key
        assert model.state_dict()[key].dtype == values.dtype
    imported = spec_of(from_config(read_config(tmp_path)) | {"image_size": 32})
    assert imported == spec.model_copy(update={"preset": imported.preset})


def exported(dims: dict[str, Any], weights: dict[str, Tensor], folder: Path) -> Path:
    run = run_spec_of(LLAMA).model_copy(update={"model": spec_of(dims)})
    saved = checkpoint_of(folder / "step-00000001", weights)
    written = export([saved], run, folder / "out", torch.float32, NO_TEXT)
    assert written["model_type"] == dims["family"]
    return folder / "out"


@pytest.mark.parametrize("name", DIMS)
def test_transformers_loads_an_export_with_equal_logits(name: str, tmp_path: Path) -> None:
    model = fresh(DIMS[name])
    for step in range(3):
        model(images(seed=step))  # statistics of their own
    out = exported(DIMS[name], dict(model.state_dict()), tmp_path)
    expected, report = transformers.AutoModelForImageClassification.from_pretrained(out, output_loading_info=True)
    assert not any(report.values()), report
    pixels = images(seed=9)
    torch.testing.assert_close(model.eval()(pixels), expected.eval()(pixels).logits, atol=1e-5, rtol=1e-5)
    for key, values in model.state_dict().items():
        assert torch.equal(expected.state_dict()[key], values), key
    assert found_before_the_run(out, spec_of(DIMS[name])) == []


def test_an_exported_classifier_knows_the_names_of_the_classes(tmp_path: Path) -> None:
    """Of its five outputs the last three have no class in the data."""
    write_folder(tmp_path / "images", [f"{kind}/{number}.png" for kind in ("cat", "dog") for number in range(4)])
    data = f"data={{source: '{tmp_path / 'images'}'}}"
    given = load(SPEC, "model={family: resnet, hidden_sizes: [64], depths: [1]}", data, "evaluation.every=0")
    run = given.model_copy(update={"model": spec_of(DIMS["basic"])})
    assert text_files(run, tmp_path / "runs").classes == ()
    prepare_run_datasets(run, tmp_path / "runs", {}, 1, ignore)
    text = text_files(run, tmp_path / "runs")
    saved = checkpoint_of(tmp_path / "step-00000001", dict(fresh(DIMS["basic"]).state_dict()))
    export([saved], run, tmp_path / "out", torch.float32, text)
    config: Any = transformers.AutoConfig.from_pretrained(tmp_path / "out")
    assert config.id2label == {0: "cat", 1: "dog", 2: "LABEL_2", 3: "LABEL_3", 4: "LABEL_4"}
    assert (config.label2id["dog"], config.problem_type) == (1, None)
    views = run.model_copy(update={"training": run.training.model_copy(update={"objective": "contrastive"})})
    assert text_files(views, tmp_path / "runs").classes == ()


@pytest.mark.parametrize(
    ("change", "kind"),
    [("training.loss=bce", "multi_label_classification"), ("training.objective=regression", "regression")],
)
def test_transformers_scores_the_outputs_of_an_export_as_the_loss_does(change: str, kind: str, tmp_path: Path) -> None:
    given = load(SPEC, "model={family: resnet, hidden_sizes: [64], depths: [1]}", "data={source: images}", change)
    run = given.model_copy(update={"model": spec_of(DIMS["basic"])})
    saved = checkpoint_of(tmp_path / "step-00000001", dict(fresh(DIMS["basic"]).state_dict()))
    export([saved], run, tmp_path / "out", torch.float32, NO_TEXT)
    assert transformers.AutoConfig.from_pretrained(tmp_path / "out").problem_type == kind


def test_statistics_are_exported_as_they_are_when_weights_are_rounded(tmp_path: Path) -> None:
    model = fresh(DIMS["basic"])
    model(images())
    run = run_spec_of(LLAMA).model_copy(update={"model": spec_of(DIMS["basic"])})
    saved = checkpoint_of(tmp_path / "step-00000001", dict(model.state_dict()))
    export([saved], run, tmp_path / "out", torch.bfloat16, NO_TEXT)
    stored = load_file(tmp_path / "out" / "model.safetensors")
    for name, values in model.state_dict().items():
        assert stored[name].dtype == (values.dtype if "running" in name or "num_batches" in name else torch.bfloat16)
        assert torch.equal(stored[name], values.to(stored[name].dtype)), name


def test_a_config_is_written_as_transformers_writes_it(tmp_path: Path) -> None:
    for name, dims in DIMS.items():
        theirs(dims).save_pretrained(tmp_path / name)
        expected = json.loads((tmp_path / name / "config.json").read_text())
        ours = json.loads(json.dumps(to_hugging_face(spec_of(dims))))
        common = ours.keys() & expected.keys() - {"image_size"}
        assert len(common) > 5
        for key in common:
            assert ours[key] == expected[key], key
        unwritten = {"dtype", "transformers_version", "stage_names", "out_features", "out_indices"}
        unwritten |= {"downsample_in_bottleneck", "downsample_in_first_stage"}
        assert expected.keys() - ours.keys() <= unwritten


def test_a_resnet_with_group_norm_is_not_exported() -> None:
    dims = {**DIMS["basic"], "norm": "group", "embedding_size": 32, "hidden_sizes": [32, 32, 64]}
    with pytest.raises(UsageError) as error:
        to_hugging_face(spec_of(dims))
    assert [problem.subject for problem in error.value.problems] == ["model.norm = group"]


@pytest.mark.parametrize(
    ("name", "changes", "expected"),
    [
        ("convnext", {"layer_norm_eps": 1e-6}, "layer_norm_eps"),
        ("bottleneck", {"layer_type": "basic"}, "layer_type"),
        ("basic", {"hidden_sizes": [16, 16, 48]}, "hidden_sizes"),
        ("convnext", {"depths": [1, 1, 1]}, "depths"),
    ],
)
def test_weights_of_another_network_are_refused_before_and_in_the_run(
    name: str, changes: dict[str, Any], expected: str, tmp_path: Path
) -> None:
    theirs(DIMS[name]).save_pretrained(tmp_path)
    spec = spec_of({**DIMS[name], **changes})
    assert any(expected in problem for problem in found_before_the_run(tmp_path, spec))
    with pytest.raises(UsageError) as error:
        loaded(tmp_path, spec)
    assert any(expected in str(problem) for problem in error.value.problems)


def test_wrong_tensors_are_named_before_and_in_the_run(tmp_path: Path) -> None:
    theirs(DIMS["basic"]).save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    stem = "resnet.embedder.embedder.normalization"
    del tensors[f"{stem}.running_var"]
    tensors["classifier.1.weight"] = tensors["classifier.1.weight"][:3].clone()
    tensors[f"{stem}.num_batches_tracked"] = torch.tensor(7.0)
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(UsageError) as error:
        loaded(tmp_path, spec_of(DIMS["basic"]))
    named = ("classifier.1.weight", f"{stem}.running_var", f"{stem}.num_batches_tracked")
    assert sorted(problem.subject.split(" = ")[0] for problem in error.value.problems) == sorted(named)
    (reported,) = found_before_the_run(tmp_path, spec_of(DIMS["basic"]))
    assert all(each in reported for each in named)


def test_a_config_with_another_number_of_stages_is_refused(tmp_path: Path) -> None:
    theirs(DIMS["convnext"]).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_stages": 2}))
    with pytest.raises(SourceError, match="num_stages = 2"):
        from_config(read_config(tmp_path))


@pytest.mark.parametrize("name", ["basic", "convnext"])
def test_a_new_classifier_of_other_classes_is_random_and_all_else_loaded(name: str, tmp_path: Path) -> None:
    theirs(DIMS[name]).save_pretrained(tmp_path)
    spec = spec_of({**DIMS[name], "num_labels": 7})
    with pytest.raises(UsageError) as error:
        loaded(tmp_path, spec)
    assert all("new_classifier" in str(problem.hint) for problem in error.value.problems)
    spec = spec.model_copy(update={"new_classifier": True, "weights": str(tmp_path)})
    assert found_before_the_run(tmp_path, spec) == []
    run = run_spec_of(LLAMA).model_copy(update={"model": spec})
    model, cpu = outline(spec), torch.device("cpu")
    materialize(model, _weights(run, model, cpu, resuming=False), cpu)
    drawn = fresh({**DIMS[name], "num_labels": 7}, run.training.seed)
    for key, values in load_file(tmp_path / "model.safetensors").items():
        expected = drawn.state_dict()[key] if key.startswith("classifier.") else values
        assert torch.equal(model.state_dict()[key], expected), key
