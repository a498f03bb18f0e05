"""A LLaVA begins with the weights of a CLIP and of a language model that were published alone."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from scaletrain_cli.engine.compose import _weights
from scaletrain_cli.engine.model import outline
from scaletrain_cli.engine.model.materialization import materialize
from scaletrain_cli.errors import UsageError
from scaletrain_cli.launch.resource_checks.view import View
from scaletrain_cli.launch.resource_checks.weights import weights_problems
from scaletrain_cli.spec import RunSpec
from scaletrain_cli.spec.hub_files import hub_uses
from tests.engine.model.vision.towers import TEXT, TOWER, clip, llava
from tests.engine.vision.runs import Row

CPU = torch.device("cpu")


def run_spec(folder: Path, *overrides: str, vocab_size: int = 50) -> RunSpec:
    """The spec of a LLaVA with the dimensions of ``towers.llava``."""
    tower = ", ".join(f"{key}: {value}" for key, value in TOWER.items())
    keys = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "intermediate_size")
    text = ", ".join(f"{key}: {TEXT[key]}" for key in (*keys, "max_position_embeddings"))
    model = (
        f"model={{family: llava, image_token_index: 49, vision_config: {{{tower}}}, text_config: {{family: llama,"
        f" norm_eps: 1.0e-6, seq_len: 32, vocab_size: {vocab_size}, {text}}}}}"
    )
    row = Row("llava", zero=0, overrides=(model, *overrides))
    found = row.spec()
    found.set_folder(folder)
    return found


def first(spec: RunSpec) -> dict[str, torch.Tensor]:
    model = outline(spec.model)
    materialize(model, _weights(spec, model, CPU, resuming=False), CPU)
    return model.state_dict()


def language_model(folder: Path, **changes: Any) -> Any:
    torch.manual_seed(3)
    model: Any = transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**TEXT, **changes}))
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize("kind", ["clip", "tower", "llava"])
def test_the_parts_have_the_weights_of_their_files_and_the_projector_is_drawn(kind: str, tmp_path: Path) -> None:
    files = tmp_path / kind
    if kind == "llava":
        theirs: Any = llava(files, "llama")
    elif kind == "clip":
        theirs = clip(files)
    else:
        theirs = transformers.CLIPVisionModel(transformers.CLIPVisionConfig(**TOWER))
        theirs.save_pretrained(files)
    text = language_model(tmp_path / "text")
    parts = (f"model.vision_weights={files}", f"model.text_weights={tmp_path / 'text'}")
    spec, drawn = run_spec(tmp_path, *parts), first(run_spec(tmp_path))
    assert not list(weights_problems(View(spec, tmp_path, {})))
    found = first(spec)
    pixels = torch.randn(2, 3, 12, 12)
    ours: Any = outline(spec.model)
    materialize(ours, _weights(spec, ours, CPU, resuming=False), CPU)
    tower = {"clip": "vision_model", "llava": "model.vision_tower"}.get(kind)
    with torch.no_grad():
        part = theirs.get_submodule(tower) if tower else theirs
        expected = part(pixels, output_hidden_states=True).hidden_states[-2]
        torch.testing.assert_close(ours.vision_tower.vision_model.hidden_states(pixels, 2), expected)
    for name, values in text.state_dict().items():
        assert torch.equal(found[f"language_model.{name}"], values)
    for name, values in drawn.items():
        if name.startswith("multi_modal_projector."):
            assert torch.equal(found[name], values)
    resumed = _weights(spec, ours, CPU, resuming=True)
    assert torch.equal(resumed.read("language_model.model.norm.weight", (16,), None), torch.ones(16))


def test_tokens_that_the_language_model_lacks_have_the_mean_of_all_others(tmp_path: Path) -> None:
    text = language_model(tmp_path / "text", vocab_size=47)
    spec = run_spec(tmp_path, f"model.text_weights={tmp_path / 'text'}")
    assert not list(weights_problems(View(spec, tmp_path, {})))
    found, weights = first(spec), text.state_dict()
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        rows = found[f"language_model.{name}"]
        assert torch.equal(rows[:47], weights[name])
        torch.testing.assert_close(rows[47:], weights[name].mean(0).expand(3, -1))


WRONG = [
    ("text_weights", {"rope_theta": 7.0}, "text_config.rope_theta: 7.0"),
    ("text_weights", {"vocab_size": 51}, "the model has [50, 16]"),
    ("text_weights", {"hidden_size": 32}, "embed_tokens.weight"),
    ("vision_weights", {"hidden_act": "gelu"}, "vision_config.hidden_act: gelu"),
    ("vision_weights", {"hidden_size": 48}, "Set model.vision_config.hidden_size: 48"),
]


@pytest.mark.parametrize(("key", "changes", "expected"), WRONG)
def test_files_of_another_part_are_refused_by_the_checks_and_by_the_engine(
    key: str, changes: dict[str, Any], expected: str, tmp_path: Path
) -> None:
    if key == "text_weights":
        language_model(tmp_path, **changes)
    else:
        transformers.CLIPVisionModel(transformers.CLIPVisionConfig(**{**TOWER, **changes})).save_pretrained(tmp_path)
    spec = run_spec(tmp_path, f"model.{key}={tmp_path}")
    (problem, *_) = weights_problems(View(spec, tmp_path, {}))
    assert problem.key == f"model.{key}"
    assert expected in str(problem)
    with pytest.raises(UsageError, match=f"model.{key}: "):
        first(spec)


def test_a_folder_without_an_image_tower_is_refused(tmp_path: Path) -> None:
    language_model(tmp_path)
    spec = run_spec(tmp_path, f"model.vision_weights={tmp_path}")
    (problem,) = weights_problems(View(spec, tmp_path, {}))
    assert "model_type = llama, but only clip_vision_model, clip and llava have an image tower" in str(problem)


def test_parts_of_the_hub_are_fetched_by_their_keys(tmp_path: Path) -> None:
    spec = run_spec(tmp_path, "model.vision_weights=hf://org/tower", "model.text_weights=hf://org/text@v1")
    uses = {use.key: (use.text, use.purpose) for use in hub_uses(spec) if use.key.startswith("model.")}
    assert uses == {
        "model.vision_weights": ("hf://org/tower", "weights"),
        "model.text_weights": ("hf://org/text@v1", "weights"),
    }


def test_the_whole_model_and_its_parts_cannot_both_have_files(tmp_path: Path) -> None:
    llava(tmp_path / "whole", "llama")
    with pytest.raises(UsageError, match="must be null with model"):
        run_spec(tmp_path, f"model.weights={tmp_path / 'whole'}", "model.text_weights=x")
