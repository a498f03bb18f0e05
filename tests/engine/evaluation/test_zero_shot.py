"""Zero-shot classification with CLIP: against a loop over images and prompts with transformers, on random weights."""

import contextlib
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from scaletrain_cli.engine.compose import compose
from scaletrain_cli.engine.data.images.batches import ImageMicroBatch
from scaletrain_cli.engine.data.images.captions import caption_tokenizer
from scaletrain_cli.engine.data.images.opening import run_caption_tokenizer
from scaletrain_cli.engine.data.loader import BatchesAndRounds, Loader
from scaletrain_cli.engine.evaluation import zero_shot
from scaletrain_cli.engine.evaluation.measures import Figures
from scaletrain_cli.engine.evaluation.zero_shot import ZeroShot
from scaletrain_cli.engine.parallel.mesh import Axis, build_mesh
from scaletrain_cli.engine.step import build_stepper
from scaletrain_cli.engine.validation import ReadAhead, Validation
from scaletrain_cli.plan import make_plan
from scaletrain_cli.spec import parse_spec
from scaletrain_cli.spec.evaluation import TEMPLATES
from scaletrain_cli.spec.images import AugmentSpec
from tests.engine.alone import context_of
from tests.engine.data.images.pictures import Pictures, layout, reader
from tests.engine.data.images.test_captions import small_tokenizer
from tests.engine.model.vision.towers import clip, loaded, spec_of
from tests.engine.ranks import on_ranks

NAMES = ["red square", "blue circle", "photo", "cat", "edge", "café", "dog"]
COUNT, SIZE, POSITIONS = 21, 12, 40


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A CLIP of random weights with its tokenizer."""
    path = tmp_path_factory.mktemp("clip")
    torch.manual_seed(5)  # transformers draws some of the weights
    tokenizer = small_tokenizer()
    ids = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": 0}
    clip(path, text={"vocab_size": len(tokenizer), "max_position_embeddings": POSITIONS, **ids})
    tokenizer.save_pretrained(path)
    return path


def pixels(batch: ImageMicroBatch) -> Tensor:
    return batch.images.float() / 127.5 - 1


def measured(folder: Path, rank: int = 0, ranks: int = 1, group: Any = None) -> Figures:
    zero_shot._PROMPTS_AT_A_TIME = 10  # the last chunk is not full, and no chunk holds whole classes
    spec = spec_of(folder)
    model = loaded(spec, folder)
    tokenizer = caption_tokenizer(folder / "tokenizer.json", POSITIONS, spec.text_config.vocab_size)
    images = reader(Pictures(COUNT), at=layout(12, ranks, 4), rank=rank, size=SIZE)
    measure = ZeroShot(images, NAMES, TEMPLATES, tokenizer, Axis(ranks, rank, group), torch.device("cpu"))
    with torch.no_grad():
        found = measure.measure(model, pixels, images.in_order(COUNT), lambda: True)
        for uses in (0, 6 // ranks):  # before the first prompts, and before the first images
            goes_on = iter([*[True] * uses, False]).__next__
            assert measure.measure(model, pixels, images.in_order(COUNT), goes_on) is None
    return found


def measured_on_rank(folder: Path) -> Figures:
    group = torch.distributed.group.WORLD
    return measured(folder, torch.distributed.get_rank(), torch.distributed.get_world_size(), group)


@torch.no_grad()
def test_accuracy_is_that_of_a_loop_with_transformers(folder: Path) -> None:
    model, tokenizer = transformers.CLIPModel.from_pretrained(folder).eval(), small_tokenizer()
    whole = reader(Pictures(COUNT), at=layout(COUNT), size=SIZE, augment=AugmentSpec())
    single = next(iter(whole.in_order(COUNT)))
    classes = []
    for name in NAMES:
        features = []
        for template in TEMPLATES:
            ids = tokenizer(template.format(name), padding="max_length", max_length=POSITIONS, return_tensors="pt")
            text = model(input_ids=ids["input_ids"], pixel_values=pixels(single)[:1]).text_embeds[0]
            features.append(text / text.norm())
        mean = torch.stack(features).mean(0)
        classes.append(mean / mean.norm())
    hits = dict.fromkeys((1, 5), 0)
    per_class: dict[int, list[bool]] = {}
    for image, label in zip(pixels(single), single.targets.tolist(), strict=True):
        embedded = model(input_ids=ids["input_ids"], pixel_values=image.unsqueeze(0)).image_embeds[0]
        scores = [float(embedded @ feature) for feature in classes]
        order = sorted(range(len(NAMES)), key=lambda number: -scores[number])
        for k in hits:
            hits[k] += label in order[:k]
        per_class.setdefault(label, []).append(order[0] == label)
    found = measured(folder)
    assert found.metrics == {f"zero_shot_top{k}": count / COUNT for k, count in hits.items()}
    assert 0 < found.metrics["zero_shot_top1"] < found.metrics["zero_shot_top5"]
    for number, each in enumerate(found.details["zero_shot_classes"]):
        right = per_class.get(number, [])
        assert (each["class"], each["samples"]) == (NAMES[number], len(right))
        assert each["top1"] == (sum(right) / len(right) if right else None)


@pytest.mark.long  # on two ranks below
@pytest.mark.parametrize("ranks", [2, 3])
def test_any_number_of_ranks_gives_the_same_accuracy(folder: Path, ranks: int) -> None:
    assert on_ranks(ranks, measured_on_rank, folder) == [measured(folder)] * ranks


SPEC = """
schema: scaletrain/v1
name: pairs
model: {{hf_config: {folder}, weights: {folder}, vision_config: {{image_size: {size}}}}}
data: {{source: pairs, tokenizer: {{kind: file, path: {folder}/tokenizer.json}},
       images: {{mean: [0.5, 0.5, 0.5], std: [0.5, 0.5, 0.5]}}}}
training: {{global_batch_size: 12, micro_batch_size: 6, steps: 5, precision: fp32}}
evaluation: {{zero_shot: {{source: pictures}}}}
layout: {{zero_stage: {zero}}}
cluster: {{gpu: cpu, gpus_per_node: {ranks}}}
"""


def validated_on_rank(folder: Path, ranks: int, zero: int) -> tuple[Figures | None, Figures | None, float]:
    """Return the figures of a validation, those of one that is preempted, and the loss of a step after both."""
    text = SPEC.format(folder=folder, ranks=ranks, zero=zero, size=SIZE)
    spec = parse_spec(text, file="pairs.yaml", base_dir=Path())
    layout, device = make_plan(spec).layout, torch.device("cpu")
    mesh = build_mesh(layout)
    composed = compose(spec, layout, mesh, device)
    tokenizer = run_caption_tokenizer(spec)
    plain = {"at": layout, "rank": mesh.data.rank, "size": SIZE, "augment": AugmentSpec(random_resized_crop=None)}
    pairs = reader(Pictures(COUNT), labeled=False, captions=tokenizer, **plain)
    pictures = replace(reader(Pictures(COUNT), **plain), mesh=mesh)
    answers = [True]
    parts: dict[str, Any] = {
        "step_sync": SimpleNamespace(goes_on=lambda step: answers.pop() if answers[1:] else answers[0]),
    }
    stepper = build_stepper(composed, mesh, device, spec.training)
    record = SimpleNamespace(spec=spec, plan=SimpleNamespace(layout=layout))
    validation = Validation(
        context_of(None, record),
        composed=composed,
        stepper=stepper,
        average=None,
        readers={"source": pairs},
        shares={"source": 1.0},
        zero_shot=ZeroShot(pictures, NAMES, TEMPLATES, tokenizer, mesh.data, device),
        **parts,
    )
    own = {name: each.without_groups() for name, each in (("source", pairs), *validation.zero_shot_readers.items())}
    with torch.no_grad(), contextlib.closing(Loader(BatchesAndRounds(pairs.batch, own), device)) as loader:
        found = validation._measured(1, {"source": COUNT}, "validation_", ReadAhead(loader, [2], 2))
        answers += [False, *[True] * 3]  # while images are classified
        left = validation._measured(1, {"source": COUNT}, "validation_", ReadAhead(loader, [2], 2))
    loss = stepper.train(pairs.batch(1).micro_batches()).loss
    return found, left, float(loss)


@pytest.mark.parametrize(("ranks", "zero"), [(2, 3), pytest.param(1, 0, marks=pytest.mark.long)])
def test_a_validation_has_the_figures_in_every_layout_and_training_goes_on(folder: Path, ranks: int, zero: int) -> None:
    alone = measured(folder)
    for found, left, loss in on_ranks(ranks, validated_on_rank, folder, ranks, zero):
        assert {name: value for name, value in found.metrics.items() if "zero_shot" in name} == {
            f"validation_{name}": value for name, value in alone.metrics.items()
        }
        assert found.metrics.keys() > {"validation_loss", "validation_recall_at_1/image_to_text"}
        assert {name: value for name, value in found.details.items() if "zero_shot" in name} == alone.details
        assert left is None
        assert math.isfinite(loss)
