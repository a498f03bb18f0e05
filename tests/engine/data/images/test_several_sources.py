from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from scaletrain_cli.data.images.index import index_images
from scaletrain_cli.data.images.prepared import prepare_image_datasets
from scaletrain_cli.data.images.samples import ImageSettings
from scaletrain_cli.data.stages import MixtureStage
from scaletrain_cli.engine.data.images.batches import ImageMicroBatch
from scaletrain_cli.engine.data.images.opening import ImagesInfo, JoinedImages, open_sources
from scaletrain_cli.engine.data.sample_order import sample_order
from scaletrain_cli.engine.data.splits import RunData, open_reader
from scaletrain_cli.engine.objectives.images import Classification, Regression
from scaletrain_cli.engine.parallel.mesh import Axis, Mesh
from scaletrain_cli.errors import UsageError
from scaletrain_cli.launch.dataset_checks import require_usable
from scaletrain_cli.launch.resource_checks.files import row_problems
from scaletrain_cli.launch.resource_checks.view import View
from scaletrain_cli.rundir.shared_datasets import entries_of
from scaletrain_cli.spec import RunSpec, parse_spec
from tests.data.images.pictures import image_bytes, write_folder, write_shard
from tests.data.test_mixture import webster
from tests.data.texts import ignore
from tests.engine.data.images.pictures import layout

SPEC = """\
schema: scaletrain/v1
name: mixed
model: {{family: resnet, embedding_size: 8, hidden_sizes: [8], depths: [1], layer_type: basic, image_size: 8,
        num_labels: 3}}
data:
  sources: [{{name: web, path: {web}, weight: 3}}, {{name: own, path: {own}, weight: 1}}]
  stages: [{{start: 4, weights: {{web: 1, own: 2}}}}]
  validation_split: 0
training: {{global_batch_size: 12, steps: 9, precision: fp32, seed: 5, optimizer: {{lr: 1.0e-3}}}}
evaluation: {{every: 0}}
cluster: {{gpu: cpu}}
"""
NAMES, BATCH, STEPS = ("cat", "dog", "emu"), 12, 9


def write_sources(root: Path, own: Sequence[str] = NAMES) -> tuple[Path, Path]:
    """Write a folder of 21 images and one of 10 images, each with folders of classes."""
    write_folder(root / "web", [f"{NAMES[number % 3]}/{number}.png" for number in range(21)])
    write_folder(root / "own", [f"{own[number % len(own)]}/{number}.jpg" for number in range(10)])
    return root / "web", root / "own"


def spec_of(root: Path, *overrides: str) -> RunSpec:
    text = SPEC.format(web=root / "web", own=root / "own")
    return parse_spec(text, file="mixed.yaml", base_dir=root, overrides=overrides)


def opened(spec: RunSpec, root: Path) -> RunData:
    folders = prepare_image_datasets(spec, root / "runs", {}, 1, ignore)
    found = open_sources(spec, folders)
    infos: dict[str, Any] = {name: info for name, (info, _, _) in found.items()}
    assert all(isinstance(info, ImagesInfo) for info in infos.values())
    return RunData(infos, *({name: each[part] for name, each in found.items()} for part in (1, 2)))


def read(spec: RunSpec, data: RunData, ranks: int, micro: int) -> list[tuple[int, int, bytes]]:
    shares = [MixtureStage(0, {"web": 0.75, "own": 0.25}), MixtureStage(3 * BATCH, {"web": 1 / 3, "own": 2 / 3})]
    order = sample_order(5, data.sizes, shares)
    at = layout(BATCH, ranks, micro)
    found: dict[int, tuple[int, int, bytes]] = {}
    for rank in range(ranks):
        reader = open_reader(spec, data.samples, at, Mesh(data=Axis(ranks, rank)), order)
        for number in range(1, STEPS + 1):
            for batch in reader.batch(number).micro_batches():
                pixels = batch.images.permute(0, 2, 3, 1).numpy()
                rows = zip(batch.samples.tolist(), batch.sources.tolist(), batch.numbers.tolist(), pixels, strict=True)
                found |= {sample: (source, own, image.tobytes()) for sample, source, own, image in rows}
    assert sorted(found) == list(range(BATCH * STEPS))
    return [found[sample] for sample in sorted(found)]


def test_samples_follow_websters_method_with_each_image_once_in_an_epoch_whatever_the_ranks_are(tmp_path: Path) -> None:
    write_sources(tmp_path)
    spec = spec_of(tmp_path)
    data = opened(spec, tmp_path)
    assert data.sizes == {"web": 21, "own": 10}
    assert data.to_checkpoint()["sources"].keys() == {"web", "own"}
    whole = read(spec, data, 1, 12)
    assert [source for source, _, _ in whole] == webster([3, 1], 3 * BATCH) + webster([1, 2], 6 * BATCH)
    for source, first, size in ((0, 0, 21), (1, 21, 10)):
        own = [number - first for each, number, _ in whole if each == source]
        for start in range(0, len(own), size):
            part = own[start : start + size]
            assert len(set(part)) == len(part)
            assert set(part) <= set(range(size))
    assert read(spec, data, 2, 3) == whole
    assert read(spec, data, 3, 4) == whole


def test_labels_and_parts_of_joined_sources_are_those_of_each(tmp_path: Path) -> None:
    write_sources(tmp_path)
    data = opened(spec_of(tmp_path), tmp_path)
    samples = data.samples
    assert isinstance(samples, JoinedImages)
    assert (len(samples), samples.class_names, samples.several_labels) == (31, NAMES, False)
    web, own = samples.sources
    labels = [samples.label(number) for number in range(31)]
    assert labels == [*(web.read(number).label for number in range(21)), *(own.read(n).label for n in range(10))]
    assert [samples.part(15, 12).label(number) for number in range(12)] == labels[15:27]
    with pytest.raises(IndexError):
        samples.label(31)


@pytest.mark.parametrize(
    ("own", "problem"),
    [
        (("cat", "dog"), r"1 are only in web \(emu\) and 0 only in own \(none\)"),
        (("cat", "dog", "emu", "fox"), r"0 are only in web \(none\) and 1 only in own \(fox\)"),
    ],
)
def test_sources_of_other_classes_are_refused_with_the_difference_or_have_the_numbers_of_a_file(
    own: tuple[str, ...], problem: str, tmp_path: Path
) -> None:
    write_sources(tmp_path, own)
    spec = spec_of(tmp_path, f"model.num_labels={max(3, len(own))}")
    with pytest.raises(UsageError, match=problem):
        prepare_image_datasets(spec, tmp_path / "runs", {}, 1, ignore)
    (found,) = row_problems(View(spec, tmp_path, {}))
    assert found.key == "data.sources.1.path"
    (tmp_path / "names").write_text("".join(f"{name}\n" for name in ("fox", "emu", "dog", "cat")))
    mapped = spec_of(tmp_path, "model.num_labels=4", f"data.images.classes={tmp_path / 'names'}")
    assert list(row_problems(View(mapped, tmp_path, {}))) == []
    data = opened(mapped, tmp_path)
    for samples in data.train.values():
        sample = samples.read(0)  # type: ignore[attr-defined]
        assert ("fox", "emu", "dog", "cat")[sample.label] == Path(sample.place).parent.name


def test_the_same_classes_in_another_order_are_refused_before_a_run_is_queued(tmp_path: Path) -> None:
    write_sources(tmp_path)
    indexes = {}
    for name, order in (("web", NAMES), ("own", NAMES[::-1])):
        settings = ImageSettings(class_names=order, validation_share=0.0)
        indexes[name] = index_images(str(tmp_path / name), settings, tmp_path / "runs", 1, ignore)
    spec = spec_of(tmp_path, *(f"data.sources.{at}.path={indexes[name]}" for at, name in enumerate(indexes)))
    problem = "class 0 is cat in web and emu in own"
    with pytest.raises(UsageError, match=problem):
        require_usable(spec, tmp_path / "runs", entries_of(spec, tmp_path / "runs", indexes))
    with pytest.raises(UsageError, match=problem):
        open_sources(spec, indexes)


def test_each_source_has_a_format_and_names_of_parts_of_its_own(tmp_path: Path) -> None:
    web, _ = write_sources(tmp_path)
    members: list[tuple[str, bytes]] = []
    for number in range(10):
        members += [(f"{number}.png", image_bytes(number, "PNG")), (f"{number}.kind", NAMES[number % 3].encode())]
    write_shard(tmp_path / "shards" / "a.tar", members)
    (web / "more.tar").write_bytes((tmp_path / "shards" / "a.tar").read_bytes())
    (tmp_path / "names").write_text("cat\ndog\nemu\n")
    spec = spec_of(
        tmp_path,
        "data.sources.0.format=image_folder",
        f"data.sources.1.path={tmp_path / 'shards'}",
        "data.sources.1.fields={label: kind}",
        f"data.images.classes={tmp_path / 'names'}",
    )
    data = opened(spec, tmp_path)
    assert data.sizes == {"web": 21, "own": 10}
    assert data.samples.class_names == NAMES  # type: ignore[attr-defined]
    labels = {sample.key: sample.label for number in range(10) for sample in [data.train["own"].read(number)]}  # type: ignore[attr-defined]
    assert labels == {str(number): number % 3 for number in range(10)}
    folders = {"web": data.samples.sources[0].images.folder, "own": data.samples.sources[1].images.folder}  # type: ignore[attr-defined]
    keys = [entry["settings"] for entry in entries_of(spec, tmp_path / "runs", folders)]
    other = spec.model_copy(update={"data": spec_of(tmp_path, f"data.sources.1.path={tmp_path / 'shards'}").data})
    assert entries_of(other, tmp_path / "runs", folders)[1]["settings"] not in keys


def objective_of(kind: type[Any], *overrides: str) -> Any:
    text = SPEC.format(web="w", own="o")
    spec = parse_spec(text, file="mixed.yaml", base_dir=Path(), overrides=overrides)
    found = kind(spec, Mesh())
    found.row_losses = []
    return found


@pytest.mark.parametrize(
    ("kind", "overrides"),
    [
        (Classification, ("training.label_smoothing=0.1",)),
        (Classification, ("training.label_smoothing=0.1", "data.images.augment.mixup=0.4")),
        (Classification, ("training.loss={name: bce, pos_weight: 2.5}",)),
        (Regression, ("training.objective=regression", "training.loss=mse")),
        (Regression, ("training.objective=regression", "training.loss=mae")),
        (Regression, ("training.objective=regression", "training.loss={name: huber, delta: 0.3}")),
    ],
)
def test_the_losses_of_sources_are_means_over_their_samples(kind: type[Any], overrides: tuple[str, ...]) -> None:
    objective = objective_of(kind, *overrides)
    draws = torch.Generator().manual_seed(3)
    outputs = torch.randn(6, 3, generator=draws, requires_grad=True)
    targets: Tensor = torch.tensor([0, 2, 1, 1, 0, 2])
    if kind is Regression:
        targets = torch.randn(6, 3, generator=draws)
    elif "mixup" in overrides[-1]:
        targets = torch.softmax(torch.randn(6, 3, generator=draws), 1)
    sources = torch.tensor([0, 1, 1, 0, 1, 1])
    batch: Any = SimpleNamespace(targets=targets, sources=sources)
    whole = objective.loss(None, outputs, batch)
    (rows,) = objective.row_losses
    for source in (0, 1):
        mine = sources == source
        expected = {
            "Classification": lambda chosen=mine: F.cross_entropy(
                outputs[chosen], targets[chosen], label_smoothing=0.1
            ),
            "bce": lambda chosen=mine: F.binary_cross_entropy_with_logits(
                outputs[chosen], F.one_hot(targets[chosen], 3).float(), pos_weight=torch.tensor(2.5)
            ),
            "mse": lambda chosen=mine: F.mse_loss(outputs[chosen], targets[chosen]),
            "mae": lambda chosen=mine: F.l1_loss(outputs[chosen], targets[chosen]),
            "huber": lambda chosen=mine: F.huber_loss(outputs[chosen], targets[chosen], delta=0.3),
        }
        name = next((each for each in expected if each in overrides[-1]), "Classification")
        if "mixup" in overrides[-1]:  # smoothed before mixing
            log = outputs[mine].log_softmax(1)
            loss = -(0.9 * (targets[mine] * log).sum(1) + 0.1 * log.mean(1)).mean()
        else:
            loss = expected[name]()
        assert rows.losses[mine].mean().item() == pytest.approx(loss.item(), rel=1e-6)
    assert rows.losses.mean().item() == pytest.approx(whole.item(), rel=1e-6)
    assert not rows.losses.requires_grad
    assert rows.counted.tolist() == [1.0] * 6


def test_a_prepared_batch_has_the_sources_of_its_samples() -> None:
    objective = objective_of(Classification)
    images = torch.zeros(2, 3, 8, 8, dtype=torch.uint8)
    batch = ImageMicroBatch(images, torch.arange(2), targets=torch.tensor([0, 1]), sources=torch.tensor([1, 0]))
    assert objective.prepared(batch).sources.tolist() == [1, 0]
