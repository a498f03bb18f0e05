"""ViT, CLIP and LLaVA compute what transformers computes: outputs, gradients, and again after training and export."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from scaletrain_cli.engine.checkpoint.export import export
from scaletrain_cli.engine.compose import _weights, wrap_blocks
from scaletrain_cli.engine.model import outline
from scaletrain_cli.engine.model.attention import assign_dropout_keys
from scaletrain_cli.engine.model.loss import logits_of
from scaletrain_cli.engine.model.materialization import materialize, matrices_of
from scaletrain_cli.engine.model.safetensors import HuggingFaceFolder
from scaletrain_cli.engine.model.vision.clip import ClipFeatures
from scaletrain_cli.errors import UsageError
from scaletrain_cli.plan.parameters import model_parameters
from scaletrain_cli.plan.vision.parameters import vision_parameters
from scaletrain_cli.spec import RunSpec
from tests.engine.checkpoint.test_export import NO_TEXT, checkpoint_of
from tests.engine.checkpoint.test_export import spec_of as run_spec_of
from tests.engine.model.test_safetensors import LLAMA
from tests.engine.model.vision.towers import CPU, IMAGE_TOKEN, clip, close, images, llava, loaded, spec_of, vit

TOKENS_PER_IMAGE = 9
END = 59  # CLIP's end of a caption, also its padding
CAPTIONS = torch.tensor(
    [
        [57, 3, 4, END, END, END, END],
        [57, 8, END, END, END, END, END],
        [57, 1, 2, 3, 4, 5, END],
        [57, 9, 9, 9, END, 0, 0],
    ]
)
REAL = torch.tensor([[1, 1, 1, 1, 0, 0, 0], [1, 1, 1, 0, 0, 0, 0], [1] * 7, [1, 1, 1, 1, 1, 0, 0]])
LABELS = torch.tensor([0, 4, 1, 3])


def conversation(per_image: int = TOKENS_PER_IMAGE) -> Tensor:
    """Return two rows; the first has two images, the second one and more text."""
    first = [1, 5, *[IMAGE_TOKEN] * per_image, 6, *[IMAGE_TOKEN] * per_image, 7, 8]
    second = [1, *range(10, 12 + per_image), *[IMAGE_TOKEN] * per_image, 9, 10]
    return torch.tensor([first, second])


def text_labels(tokens: Tensor) -> Tensor:
    labels = tokens.roll(-1, 1)
    return labels.masked_fill((labels == IMAGE_TOKEN) | (torch.arange(tokens.shape[1]) == tokens.shape[1] - 1), -100)


def logits(model: Any, tokens: Tensor, pixels: Tensor | None) -> Tensor:
    found: Tensor = model(
        tokens,
        tokens,
        pixels,
        output=lambda language, hidden: logits_of(
            language.final_norm(hidden), language.lm_head.weight, language.lm_head.softcap
        ),
    )
    return found


def gradients_as_saved(model: Any, folder: Path) -> dict[str, Tensor]:
    """Return the gradients of a model of transformers under the names that it has in files."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)
    model.save_pretrained(folder)
    return load_file(folder / "model.safetensors")


def named(model: nn.Module) -> dict[str, nn.Parameter]:
    return {matrix.name: parameter for parameter, (matrix,) in matrices_of(model).items()}


def check_gradients(ours: nn.Module, theirs: Any, folder: Path) -> None:
    """Compare the gradients of all parameters; those that ours leaves out are zero in transformers."""
    expected = gradients_as_saved(theirs, folder)
    files = HuggingFaceFolder(folder, outline(ours.spec))  # type: ignore[arg-type]
    for name, parameter in named(ours).items():
        gradient = files.read(name, tuple(parameter.shape), None)
        close(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad, gradient)
    assert len(expected) == len(named(ours))
    assert sum(float(values.abs().sum()) > 0 for values in expected.values()) > 30


def trained(model: nn.Module, loss: Any) -> dict[str, Tensor]:
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    for _ in range(3):
        optimizer.zero_grad()
        loss(model).backward()
        optimizer.step()
    return {name: parameter.detach() for name, parameter in named(model).items()}


def exported(spec: Any, weights: dict[str, Tensor], folder: Path) -> Path:
    """Save a checkpoint with these weights and export it; return the exported folder."""
    run: RunSpec = run_spec_of(LLAMA).model_copy(update={"model": spec})
    saved = checkpoint_of(folder / "step-00000001", weights)
    written = export([saved], run, folder / "out", torch.float32, NO_TEXT)
    assert written["parameters"] == sum(values.numel() for values in weights.values())
    return folder / "out"


def test_a_vit_equals_transformers_before_and_after_training(tmp_path: Path) -> None:
    theirs: Any = vit(tmp_path / "base", qkv_bias=False, hidden_act="gelu_new", layer_norm_eps=1e-3)
    spec = spec_of(tmp_path / "base")
    assert (spec.qkv_bias, spec.hidden_act, spec.layer_norm_eps) == (False, "gelu_pytorch_tanh", 1e-3)
    ours = loaded(spec, tmp_path / "base")
    assert list(named(ours)) == [parameter.name for parameter in vision_parameters(spec)]
    close(ours(images()), theirs(images()).logits)

    def loss(model: Any) -> Tensor:
        return nn.functional.cross_entropy(model(images()), LABELS)

    loss(ours).backward()
    nn.functional.cross_entropy(theirs(images()).logits, LABELS).backward()
    check_gradients(ours, theirs, tmp_path / "gradients")
    folder = exported(spec, trained(ours, loss), tmp_path)
    again: Any = transformers.AutoModelForImageClassification.from_pretrained(folder).eval()
    with torch.no_grad():
        close(ours(images()), again(images()).logits)
    assert spec_of(folder) == spec


def test_transformers_prepares_images_for_an_export_as_the_evaluation_of_the_run_does(tmp_path: Path) -> None:
    from PIL import Image

    from scaletrain_cli.engine.data.images.transforms import center_crop

    vit(tmp_path / "base", image_size=16)
    spec = spec_of(tmp_path / "base")
    weights = {name: values.detach() for name, values in named(loaded(spec, tmp_path / "base")).items()}
    processor: Any = transformers.AutoImageProcessor.from_pretrained(exported(spec, weights, tmp_path), backend="pil")
    noise = torch.randint(256, (37, 53, 3), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    image = Image.fromarray(noise.numpy())
    theirs = processor(image, return_tensors="pt").pixel_values[0]
    cropped = torch.tensor(np.array(center_crop(image, 16, 0.875, Image.Resampling.BICUBIC)))
    close((cropped.permute(2, 0, 1) / 255 - 0.5) / 0.5, theirs, 1e-6)


def test_positions_are_resized_to_another_image_as_in_transformers(tmp_path: Path) -> None:
    theirs: Any = vit(tmp_path / "vit")
    ours = loaded(spec_of(tmp_path / "vit", image_size=20), tmp_path / "vit")
    tower: Any = clip(tmp_path / "clip")
    spec = spec_of(tmp_path / "clip")
    larger = spec.model_copy(update={"vision_config": spec.vision_config.model_copy(update={"image_size": 20})})
    our_clip, pixels = loaded(larger, tmp_path / "clip"), images(size=20)
    with torch.no_grad():
        close(ours(pixels), theirs(pixels, interpolate_pos_encoding=True).logits)
        expected = tower(input_ids=CAPTIONS, pixel_values=pixels, interpolate_pos_encoding=True).image_embeds
        close(our_clip(pixels, CAPTIONS).image, expected)


def test_a_new_classifier_of_other_classes_is_random_and_all_else_loaded(tmp_path: Path) -> None:
    theirs: Any = vit(tmp_path)
    spec = spec_of(tmp_path, num_labels=7, new_classifier=True)
    run: RunSpec = run_spec_of(LLAMA)
    run = run.model_copy(update={"model": spec.model_copy(update={"weights": str(tmp_path)})})
    model: Any = outline(spec)
    materialize(model, _weights(run, model, CPU, resuming=False), CPU)
    with torch.no_grad():
        features = theirs.vit(images()).last_hidden_state[:, 0]
        close(model.eval()(images()), model.classifier(features))
    drawn = first_weights(spec, run.training.seed)
    assert torch.equal(model.classifier.weight, drawn["classifier.weight"])
    assert model.classifier.weight.shape == (7, 32)


def test_the_backbone_of_a_vit_is_loaded_without_its_pooling_layer(tmp_path: Path) -> None:
    """A base model lacks the outermost name; a classifier does not have its pooling layer."""
    theirs: Any = vit(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    stored = {name.removeprefix("vit."): values for name, values in weights.items()}
    pooler = {"pooler.dense.weight": torch.zeros(32, 32), "pooler.dense.bias": torch.zeros(32)}
    save_file(stored | pooler, tmp_path / "model.safetensors")
    with torch.no_grad():
        close(loaded(spec_of(tmp_path), tmp_path)(images()), theirs(images()).logits)


@pytest.mark.parametrize(
    ("activation", "end"),
    [
        ("quick_gelu", 2),
        ("gelu", END),
        *(pytest.param(*pair, marks=pytest.mark.long) for pair in (("quick_gelu", END), ("gelu", 2))),
    ],
)
def test_a_clip_equals_transformers_before_and_after_training(activation: str, end: int, tmp_path: Path) -> None:
    """With both activations, both rules for the end of a caption, and padding by the end or by zeros."""
    settings: dict[str, Any] = {"hidden_act": activation}
    theirs: Any = clip(tmp_path / "base", settings, settings | {"eos_token_id": end})
    spec = spec_of(tmp_path / "base")
    assert (spec.text_config.hidden_act, spec.text_config.eos_token_id) == (activation, end)
    ours = loaded(spec, tmp_path / "base")
    assert list(named(ours)) == [parameter.name for parameter in vision_parameters(spec)]

    def similarities(model: Any) -> Tensor:
        found: ClipFeatures = model(images(), CAPTIONS)
        assert found.logit_bias is None
        return found.logit_scale.exp() * found.image @ found.text.T

    def loss(model: Any) -> Tensor:
        scores = similarities(model)
        ways = (scores, scores.T)
        return sum(nn.functional.cross_entropy(way, torch.arange(4)) for way in ways) / 2  # type: ignore[return-value]

    expected = theirs(input_ids=CAPTIONS, attention_mask=REAL, pixel_values=images(), return_loss=True)
    found = ours(images(), CAPTIONS)
    close(found.image, expected.image_embeds)
    close(found.text, expected.text_embeds)
    close(similarities(ours), expected.logits_per_image)
    loss(ours).backward()
    expected.loss.backward()
    check_gradients(ours, theirs, tmp_path / "gradients")
    folder = exported(spec, trained(ours, loss), tmp_path)
    again: Any = transformers.AutoModel.from_pretrained(folder).eval()
    with torch.no_grad():
        output = again(input_ids=CAPTIONS, attention_mask=REAL, pixel_values=images())
        close(similarities(ours), output.logits_per_image)
    assert spec_of(folder) == spec


def test_a_clip_has_a_bias_of_similarities_and_a_limit_of_their_scale_if_the_spec_says_so(tmp_path: Path) -> None:
    clip(tmp_path)
    changes = {"logit_bias_init_value": -10.0, "logit_scale_init_value": 2.5, "max_logit_scale": 3.0}
    spec = spec_of(tmp_path).model_copy(update=changes)
    ours: Any = outline(spec)
    assert list(named(ours)) == [parameter.name for parameter in vision_parameters(spec)]
    materialize(ours, ours.first_weights(1, CPU), CPU)
    found = ours(images(), CAPTIONS)
    assert (found.logit_scale.item(), found.logit_bias.item()) == (2.5, -10.0)
    assert ours.limits() == {"logit_scale": (-math.inf, 3.0)}


def test_one_tower_of_a_clip_gives_its_features_alone(tmp_path: Path) -> None:
    clip(tmp_path)
    ours = loaded(spec_of(tmp_path), tmp_path)
    with torch.no_grad():
        whole = ours(images(), CAPTIONS)
        seen, read = ours(images(), None), ours(None, CAPTIONS)
    assert torch.equal(seen.image, whole.image)
    assert torch.equal(read.text, whole.text)
    assert (len(seen.text), len(read.image)) == (0, 0)


TEXTS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {"tie_word_embeddings": True},
    "gemma2": {"head_dim": 8, "sliding_window": 8, "attn_implementation": "eager"},
}
IMAGES = {
    "default": {},
    "full": {"vision_feature_select_strategy": "full", "vision_feature_layer": 2, "projector_hidden_act": "gelu_new"},
}


@pytest.mark.parametrize(
    ("kind", "choice"),
    [
        ("llama", "default"),
        ("qwen2", "full"),
        pytest.param("llama", "full", marks=pytest.mark.long),
        pytest.param("qwen2", "default", marks=pytest.mark.long),
        pytest.param("gemma2", "default", marks=pytest.mark.long),
    ],
)
def test_a_llava_equals_transformers_before_and_after_training(kind: str, choice: str, tmp_path: Path) -> None:
    theirs: Any = llava(tmp_path / "base", kind, TEXTS[kind], **IMAGES[choice])
    spec = spec_of(tmp_path / "base")
    ours, pixels = loaded(spec, tmp_path / "base"), images(3)
    tokens = conversation(spec.tokens_per_image)
    labels = text_labels(tokens)
    expected = theirs(input_ids=tokens, pixel_values=pixels).logits
    close(logits(ours, tokens, pixels), expected)
    with torch.no_grad():
        only_text = tokens.masked_fill(tokens == IMAGE_TOKEN, 3)
        close(logits(ours, only_text, None), theirs(input_ids=only_text).logits)

    def loss(model: Any) -> Tensor:
        return model(tokens, labels, pixels)  # type: ignore[no-any-return]

    loss(ours).backward()
    nn.functional.cross_entropy(expected.flatten(0, 1), labels.flatten()).backward()
    check_gradients(ours, theirs, tmp_path / "gradients")
    folder = exported(spec, trained(ours, loss), tmp_path)
    attention = TEXTS[kind].get("attn_implementation")
    again: Any = transformers.AutoModelForImageTextToText.from_pretrained(folder, attn_implementation=attention).eval()
    with torch.no_grad():
        close(logits(ours, tokens, pixels), again(input_ids=tokens, pixel_values=pixels).logits)
    assert spec_of(folder) == spec


def test_files_of_a_llava_are_read_under_all_names_of_transformers(tmp_path: Path) -> None:
    llava(tmp_path, "llama")
    weights = load_file(tmp_path / "model.safetensors")
    spec = spec_of(tmp_path)
    expected = {name: values.detach() for name, values in named(loaded(spec, tmp_path)).items()}
    assert "language_model.model.norm.weight" in weights
    oldest = {name.replace("vision_tower.", "vision_tower.vision_model."): each for name, each in weights.items()}
    prefixes = {"language_model.model.": "model.language_model.", "language_model.lm_head.": "lm_head."}
    prefixes |= {"vision_tower.": "model.vision_tower.", "multi_modal_projector.": "model.multi_modal_projector."}
    for layout in (oldest, weights):
        newer = {
            next(new + name.removeprefix(old) for old, new in prefixes.items() if name.startswith(old)): each
            for name, each in layout.items()
        }
        for stored in (layout, newer):
            save_file(stored, tmp_path / "model.safetensors")
            found = named(loaded(spec, tmp_path))
            assert all(torch.equal(found[name], values) for name, values in expected.items())
    save_file({"model.language_model.extra": torch.zeros(1), **newer}, tmp_path / "model.safetensors")
    with pytest.raises(UsageError, match=r"model\.language_model\.extra: is in the files but not in the model"):
        loaded(spec, tmp_path)


def test_image_tokens_that_do_not_match_the_images_are_an_error(tmp_path: Path) -> None:
    llava(tmp_path, "llama")
    ours, tokens = loaded(spec_of(tmp_path), tmp_path), conversation()
    for pixels, count in ((images(2), 2), (images(4), 4), (None, 0)):
        with pytest.raises(ValueError, match=f"27 tokens 49 .*and {count} images with 9 features.*need {9 * count}. W"):
            logits(ours, tokens, pixels)
    with pytest.raises(ValueError, match=r"0 tokens 49 .*and 1 images"):
        logits(ours, tokens.masked_fill(tokens == IMAGE_TOKEN, 3), images(1))


def test_a_batch_without_images_reaches_all_parts_of_a_llava_without_changing_it(tmp_path: Path) -> None:
    """Ranks of ZeRO-3 must visit the same modules; a part that one of them leaves out would hang the others."""
    llava(tmp_path, "llama")
    ours = loaded(spec_of(tmp_path), tmp_path)
    tokens = conversation().masked_fill(conversation() == IMAGE_TOKEN, 3)
    quiet = ours(tokens, tokens)
    loss = ours.train()(tokens, tokens)
    assert torch.equal(loss, quiet)
    loss.backward()
    computed = [parameter for parameter in ours.parameters() if parameter.requires_grad]
    assert all(parameter.grad is not None for parameter in computed)
    parts = (ours.vision_tower, ours.multi_modal_projector)
    assert all(not p.grad.any() for part in parts for p in part.parameters() if p.requires_grad)


def test_the_part_of_a_tower_behind_its_features_does_not_train(tmp_path: Path) -> None:
    llava(tmp_path, "llama")
    ours = loaded(spec_of(tmp_path), tmp_path)
    planned = model_parameters(ours.spec)
    assert [one.name for one in planned] == list(named(ours))
    still = {name for name, parameter in named(ours).items() if not parameter.requires_grad}
    assert still == {one.name for one in planned if not one.trains}
    behind = ("vision_tower.vision_model.post_layernorm.", "vision_tower.vision_model.encoder.layers.2.")
    assert still == {name for name in named(ours) if name.startswith(behind)}
    assert list(ours.blocks) == ["vision_0", "vision_1", "text_0", "text_1"]


@pytest.mark.parametrize(
    ("build", "changes", "expected"),
    [
        (vit, {"hidden_act": "quick_gelu"}, "hidden_act = gelu: the spec has quick_gelu."),
        (vit, {"layer_norm_eps": 1e-6}, "layer_norm_eps = 1e-12: the spec has 1e-06."),
        (vit, {"num_attention_heads": 2}, "num_attention_heads = 4: the spec has 2."),
        (vit, {"num_labels": 7}, "the model has"),
        (vit, {"patch_size": 6}, "patch_size = 4: the spec has 6."),
    ],
)
def test_weights_with_other_settings_are_refused(build: Any, changes: Any, expected: str, tmp_path: Path) -> None:
    build(tmp_path)
    with pytest.raises(UsageError) as raised:
        HuggingFaceFolder(tmp_path, outline(spec_of(tmp_path).model_copy(update=changes)))
    assert expected in str(raised.value)


def test_weights_with_other_settings_of_a_tower_or_language_model_are_refused(tmp_path: Path) -> None:
    clip(tmp_path / "clip")
    llava(tmp_path / "llava", "llama")
    pairs, reader = spec_of(tmp_path / "clip"), spec_of(tmp_path / "llava")
    wrong = (
        (pairs, "text_config", {"eos_token_id": 2}, "text_config.eos_token_id = 59: the spec has 2."),
        (pairs, "vision_config", {"hidden_act": "gelu"}, "vision_config.hidden_act = quick_gelu: the spec has gelu."),
        (reader, "text_config", {"rope_theta": 7.0}, "text_config.rope_theta = 10000.0: the spec has 7.0."),
    )
    for spec, part, changes, expected in wrong:
        other = spec.model_copy(update={part: getattr(spec, part).model_copy(update=changes)})
        with pytest.raises(UsageError) as raised:
            HuggingFaceFolder(tmp_path / spec.family, outline(other))
        assert expected in str(raised.value)
    layer = reader.model_copy(update={"vision_feature_layer": -1})
    with pytest.raises(UsageError, match="vision_feature_layer = -2: the spec has -1"):
        HuggingFaceFolder(tmp_path / "llava", outline(layer))


def first_weights(spec: Any, seed: int = 1) -> dict[str, Tensor]:
    model: Any = outline(spec)
    materialize(model, model.first_weights(seed, CPU), CPU)
    return {name: parameter.detach() for name, parameter in named(model).items()}


@pytest.mark.parametrize("family", ["vit", "clip", "llava"])
def test_first_weights_have_the_distributions_of_transformers(family: str, tmp_path: Path) -> None:
    wide = {"hidden_size": 96, "intermediate_size": 128, "image_size": 32, "initializer_range": 0.03}
    torch.manual_seed(0)
    if family == "vit":
        theirs: Any = transformers.ViTForImageClassification(
            transformers.ViTConfig(**wide, num_hidden_layers=3, num_attention_heads=4, patch_size=4, num_labels=50)
        )
    elif family == "clip":
        layers = {"num_hidden_layers": 3, "num_attention_heads": 4}
        text = {"hidden_size": 64, "intermediate_size": 128, "vocab_size": 300, "bos_token_id": 1, "eos_token_id": 2}
        theirs = transformers.CLIPModel(
            transformers.CLIPConfig(vision_config=wide | layers | {"patch_size": 4}, text_config=text | layers)
        )
    else:
        theirs = transformers.LlavaForConditionalGeneration(
            transformers.LlavaConfig(
                vision_config=transformers.CLIPVisionConfig(
                    **wide, num_hidden_layers=3, num_attention_heads=4, patch_size=4
                ),
                text_config=transformers.LlamaConfig(
                    hidden_size=96, num_hidden_layers=1, num_attention_heads=4, intermediate_size=128, vocab_size=300
                ),
                image_token_index=299,
            )
        )
    theirs.save_pretrained(tmp_path)
    spec = spec_of(tmp_path)
    ours, files = first_weights(spec), HuggingFaceFolder(tmp_path, outline(spec))
    for name, values in ours.items():
        expected = files.read(name, tuple(values.shape), None)
        if family == "llava" and name.endswith(("o_proj.weight", "down_proj.weight")):
            continue  # divided by the root of the depth, as in all language models of this engine
        if expected.numel() < 50 or expected.std() == 0:
            torch.testing.assert_close(values.mean(), expected.mean(), atol=0.15, rtol=0)
            assert (values.std(correction=0) == 0) == (expected.std(correction=0) == 0)
        else:
            assert abs(float(values.std() / expected.std()) - 1) < 0.3, name
            assert abs(float(values.mean())) < 0.3 * float(values.std()), name
    again, other = first_weights(spec), first_weights(spec, seed=2)
    drawn = [name for name, values in ours.items() if values.numel() > 1 and values.std() > 0]
    assert all(torch.equal(ours[name], again[name]) for name in ours)
    assert drawn
    assert not any(torch.equal(ours[name], other[name]) for name in drawn)


def test_paths_are_dropped_by_the_numbers_of_the_images_and_only_in_training(tmp_path: Path) -> None:
    vit(tmp_path)
    whole = loaded(spec_of(tmp_path), tmp_path)
    ours = loaded(spec_of(tmp_path, drop_path_rate=0.5), tmp_path)
    assign_dropout_keys(ours, 3)
    pixels, samples = images(8), torch.arange(8) + 100
    with torch.no_grad():
        expected = whole(pixels)
        assert torch.equal(ours(pixels, samples), expected)
        dropped = ours.train()(pixels, samples)
        shuffled = torch.randperm(8, generator=torch.Generator().manual_seed(0))
        close(ours(pixels[shuffled], samples[shuffled]), dropped[shuffled], 1e-6)
        assert not torch.allclose(ours(pixels, samples + 8), dropped)
    assert [layer.attention_drop_path.p for layer in ours.blocks.values()] == [0.0, 0.25, 0.5]


@pytest.mark.parametrize("family", ["vit", "clip", "llava"])
def test_recomputed_blocks_have_the_same_gradients(family: str, tmp_path: Path) -> None:
    from scaletrain_cli.spec.training import LayoutSpec

    {"vit": vit, "clip": clip, "llava": lambda folder: llava(folder, "llama")}[family](tmp_path)
    inputs: dict[str, tuple[Any, ...]] = {
        "vit": (images(), torch.arange(4)),
        "clip": (images(), CAPTIONS),
        "llava": (conversation(), text_labels(conversation()), images(3)),
    }

    def gradients(mode: str) -> dict[str, Tensor]:
        model = loaded(spec_of(tmp_path, **({"drop_path_rate": 0.3} if family == "vit" else {})), tmp_path).train()
        assign_dropout_keys(model, 1)
        wrap_blocks(model, LayoutSpec(), mode)
        result = model(*inputs[family])
        loss = (result.image * result.text).sum() if isinstance(result, ClipFeatures) else result.square().sum()
        loss.backward()
        return {name: parameter.grad for name, parameter in named(model).items() if parameter.grad is not None}

    plain, recomputed = gradients("none"), gradients("full")
    assert plain.keys() == recomputed.keys()
    assert all(torch.equal(plain[name], recomputed[name]) for name in plain)


def test_a_config_is_written_as_transformers_writes_it(tmp_path: Path) -> None:
    """A newer or older transformers finds every key that it needs to build the model."""
    from scaletrain_cli.spec.hugging_face_weights import to_hugging_face

    for name, build in (("vit", vit), ("clip", clip), ("llava", lambda folder: llava(folder, "llama"))):
        build(tmp_path / name)
        theirs = json.loads((tmp_path / name / "config.json").read_text())
        ours = json.loads(json.dumps(to_hugging_face(spec_of(tmp_path / name))))
        assert ours["architectures"] == theirs["architectures"]
        assert (name == "vit") == ("vision_config" not in ours)
        for part in ("vision_config", "text_config"):
            for key, value in ours.pop(part, {}).items():
                assert theirs[part].get(key, value) == value or key == "projection_dim"
        common = ours.keys() & theirs.keys() - {"image_seq_length"}
        assert len(common) > 2
        for key in common:
            assert ours[key] == theirs[key], key
