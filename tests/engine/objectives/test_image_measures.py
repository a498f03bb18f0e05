from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from scaletrain_cli.engine.data.images.batches import ImageMicroBatch
from scaletrain_cli.engine.model.vision.clip import ClipFeatures
from scaletrain_cli.engine.objectives import build_objective
from scaletrain_cli.engine.objectives.images import ImageObjective
from scaletrain_cli.engine.parallel.mesh import Axis, Mesh
from scaletrain_cli.spec import RunSpec, parse_spec
from tests.engine.ranks import on_ranks

COUNT, SIZE, CLASSES = 21, 4, 7  # 21 samples in rounds of 4, 8 or 12
SPEC = f"""
schema: scaletrain/v1
name: images
model: {{family: resnet, embedding_size: 8, hidden_sizes: [8], depths: [1], layer_type: basic, num_labels: {CLASSES},
        image_size: 8}}
data: {{source: images}}
training: {{global_batch_size: 24, micro_batch_size: 4, steps: 20, precision: fp32}}
cluster: {{scheduler: local, nodes: 1, gpus_per_node: 1, gpu: cpu}}
"""
TOWER = "{hidden_size: 8, num_hidden_layers: 1, num_attention_heads: 1, intermediate_size: 8}"
CLIP = f"model={{family: clip, vision_config: {TOWER}, text_config: {TOWER}}}"
REGRESSION = "training.objective=regression"


def spec_of(*overrides: str) -> RunSpec:
    return parse_spec(SPEC, file="images.yaml", base_dir=Path(), overrides=overrides)


def outputs_of(kind: str) -> tuple[Any, Tensor | None]:
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(COUNT, CLASSES, generator=generator)
    if kind == "classes":
        return logits, torch.randint(0, CLASSES, (COUNT,), generator=generator)
    if kind == "labels":
        return logits, (torch.rand(COUNT, CLASSES, generator=generator) < 0.3).float()
    if kind == "one label":
        return logits, F.one_hot(torch.arange(COUNT) % CLASSES, CLASSES).float()
    return logits, torch.randn(COUNT, CLASSES, generator=generator)


def validated(
    overrides: tuple[str, ...], kind: str, rank: int, ranks: int, group: Any = None, size: int = SIZE
) -> tuple[Any, ...]:
    """Run a validation of one rank; return loss, metrics and details."""
    objective = build_objective(spec_of(*overrides), Mesh(data=Axis(ranks, rank, group)))
    assert isinstance(objective, ImageObjective)
    outputs, targets = outputs_of(kind)
    generator = torch.Generator().manual_seed(5)
    images = torch.randint(0, 256, (COUNT, 3, 8, 8), dtype=torch.uint8, generator=generator)
    tokens = torch.arange(COUNT).view(-1, 1)
    objective.begin_validation()
    for first in range(rank * size, -(-COUNT // (size * ranks)) * size * ranks, size * ranks):
        places = torch.arange(first, first + size)
        rows = places.clamp(max=COUNT - 1)
        pairs = kind == "pairs"
        batch = ImageMicroBatch(
            images[rows],
            places,
            None if pairs else targets[rows],
            tokens[rows] if pairs else None,
            real=None if COUNT % (size * ranks) == 0 else places < COUNT,
        )
        found: Any = outputs[rows]
        if pairs:
            image, text = (F.normalize(each[rows].float(), dim=1) for each in (outputs, targets + outputs))
            found = ClipFeatures(image, text, torch.tensor(2.0), torch.tensor(-1.0))
        objective.loss(None, found, objective.prepared(batch))
    loss = objective.take_validation_loss()
    figures = objective.end_validation()
    return loss, figures.metrics, figures.details


def validated_on_rank(overrides: tuple[str, ...], kind: str, size: int = SIZE) -> tuple[Any, ...]:
    group = torch.distributed.group.WORLD
    return validated(overrides, kind, torch.distributed.get_rank(), torch.distributed.get_world_size(), group, size)


RUNS = [
    ((), "classes", {"top1", "top5"}),
    (("training.loss=bce",), "labels", {"mean_average_precision"}),
    ((REGRESSION,), "numbers", {"mae", "rmse"}),
]


@pytest.mark.parametrize(("overrides", "kind", "names"), RUNS)
def test_figures_are_of_all_samples_on_any_ranks(overrides: tuple[str, ...], kind: str, names: set[str]) -> None:
    alone = validated(overrides, kind, 0, 1)
    outputs, targets = outputs_of(kind)
    plain = {"classes": F.cross_entropy, "labels": F.binary_cross_entropy_with_logits, "numbers": F.mse_loss}[kind]
    assert alone[0] == pytest.approx(plain(outputs, targets).item(), rel=1e-6)  # type: ignore[operator]
    assert alone[1].keys() == names
    assert alone[2]["samples"] == COUNT
    for ranks in (2, 3):
        found = on_ranks(ranks, validated_on_rank, overrides, kind)
        assert [each[1:] for each in found] == [alone[1:]] * ranks
        assert [each[0] for each in found] == pytest.approx([alone[0]] * ranks, rel=1e-6)


def test_retrieval_of_pairs_is_the_same_on_any_number_of_ranks() -> None:
    alone = validated((CLIP,), "pairs", 0, 1)
    assert len(alone[1]) == 6
    assert alone[2] == {"retrieval": {"pairs": COUNT, "images": COUNT, "texts": COUNT}}
    assert 1 / COUNT < alone[1]["recall_at_1/image_to_text"] < 1
    for ranks in (2, 3):
        found = on_ranks(ranks, validated_on_rank, (CLIP,), "pairs")
        assert [each[1:] for each in found] == [alone[1:]] * ranks
        assert all(each[0] > 0 for each in found)
    assert validated((CLIP, "evaluation.retrieval_pairs=0"), "pairs", 0, 1)[1] == {}


def test_accuracy_of_several_losses_is_the_same_where_each_image_has_one_class() -> None:
    classes = F.one_hot(torch.arange(COUNT) % CLASSES, CLASSES)
    right = (outputs_of("one label")[0].argmax(1) == classes.argmax(1)).double().mean()
    loss, metrics, details = validated(("training.loss=bce",), "one label", 0, 1)
    assert metrics.keys() == {"mean_average_precision", "top1", "top5"}
    assert metrics["top1"] == pytest.approx(float(right))
    for found in on_ranks(2, validated_on_rank, ("training.loss=bce",), "one label"):
        assert found == (pytest.approx(loss), metrics, details)
    assert all({"top1", "average_precision"} <= each.keys() for each in details["classes"])


@pytest.mark.parametrize("loss", ["info_nce", "sigmoid"])
def test_a_contrastive_validation_loss_compares_the_pairs_of_a_global_batch_in_every_layout(loss: str) -> None:
    overrides = (CLIP, "training.global_batch_size=12", f"training.loss={loss}", "model.logit_bias_init_value=-1")
    outputs, other = outputs_of("pairs")
    images, texts = F.normalize(outputs, dim=1).double(), F.normalize(other + outputs, dim=1).double()
    total = 0.0
    for first in range(0, COUNT, 12):  # 12 pairs, and the 9 that are left
        logits = torch.tensor(2.0).double().exp() * images[first : first + 12] @ texts[first : first + 12].T
        own = torch.arange(len(logits))
        if loss == "info_nce":
            total += len(own) * float(F.cross_entropy(logits, own) + F.cross_entropy(logits.T, own)) / 2
        else:
            total -= float(F.logsigmoid((2 * torch.eye(len(own)) - 1) * (logits - 1)).sum())
    alone = [validated(overrides, "pairs", 0, 1, size=size)[0] for size in (2, 4)]
    ranks = on_ranks(2, validated_on_rank, overrides, "pairs", 2 if loss == "sigmoid" else 6)
    assert [*alone, *(each[0] for each in ranks)] == pytest.approx([total / COUNT] * 4, rel=1e-5)


def test_the_classes_have_their_names_and_training_is_not_observed() -> None:
    objective = build_objective(spec_of(), Mesh())
    assert isinstance(objective, ImageObjective)
    objective.class_names = [f"class {number}" for number in range(CLASSES)]
    outputs, targets = outputs_of("classes")
    batch = ImageMicroBatch(torch.zeros(COUNT, 3, 8, 8, dtype=torch.uint8), torch.arange(COUNT), targets)
    objective.begin_validation()
    objective.loss(None, outputs, objective.prepared(batch))
    figures = objective.end_validation()
    assert [each["class"] for each in figures.details["classes"]] == objective.class_names
    objective.loss(None, outputs, objective.prepared(batch))
    assert objective.end_validation().metrics == {}
