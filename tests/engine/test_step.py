from pathlib import Path

import pytest
import torch

from scaletrain_cli.engine.compose import Composed, compose
from scaletrain_cli.engine.data.batches import MicroBatch
from scaletrain_cli.engine.parallel.mesh import build_mesh
from scaletrain_cli.engine.step import Stepper, build_stepper
from scaletrain_cli.plan import make_plan
from scaletrain_cli.spec import parse_spec
from tests.engine.ranks import on_ranks

_SPEC = """
schema: scaletrain/v1
name: stepping
model: {family: llama, hidden_size: 32, num_hidden_layers: 2, num_attention_heads: 4, num_key_value_heads: 2,
        intermediate_size: 64, vocab_size: 64, seq_len: 16}
data: {source: python-stdlib, tokenizer: {vocab_size: 64}}
training: {global_batch_size: 4, micro_batch_size: 2, steps: 3, optimizer: {lr: 1.0e-2}}
cluster: {gpu: cpu, gpus_per_node: 2}
"""
_LAYOUTS = {
    "replicas without ZeRO": ("zero_stage=0", "precision=fp32"),
    "ZeRO-1": ("zero_stage=1", "precision=fp32"),
    "ZeRO-1 in bf16": ("zero_stage=1", "precision=bf16"),
    "ZeRO-2": ("zero_stage=2", "precision=fp32"),
    "ZeRO-3": ("zero_stage=3", "precision=fp32"),
    "tensor without ZeRO": ("zero_stage=0", "tensor_parallel=2", "precision=fp32"),
    "tensor": ("zero_stage=2", "tensor_parallel=2", "precision=bf16"),
    "sequence": ("zero_stage=1", "sequence_parallel=2", "precision=fp32"),
    "pipeline, first stage": ("zero_stage=1", "pipeline_parallel=2", "precision=fp32"),
    "pipeline, last stage": ("zero_stage=1", "pipeline_parallel=2", "precision=fp32"),
    "pipeline in bf16": ("zero_stage=1", "pipeline_parallel=2", "precision=bf16"),
}
_LONG = ("ZeRO-1", "tensor without ZeRO", "sequence", "pipeline, last stage")


def _driven(overrides: list[str]) -> tuple[Composed, Stepper, list[MicroBatch]]:
    """Return a model in the layout of the overrides, and this rank's part of four rows in micro-batches of two."""
    spec = parse_spec(_SPEC, file="stepping.yaml", base_dir=Path(), overrides=overrides)
    layout, device = make_plan(spec).layout, torch.device("cpu")
    mesh = build_mesh(layout)
    composed = compose(spec, layout, mesh, device)
    length = 16 // mesh.sequence.size
    start = mesh.sequence.rank * length
    rows = torch.randint(64, (4, 17), generator=torch.Generator().manual_seed(0))
    batches = [
        MicroBatch(
            rows[first : first + 2, start : start + length].contiguous(),
            rows[first : first + 2, start + 1 : start + length + 1].contiguous(),
            torch.arange(start, start + length),
            torch.arange(first, first + 2),
            None,
        )
        for first in range(2 * mesh.data.rank, 4, 2 * mesh.data.size)
    ]
    return composed, build_stepper(composed, mesh, device, spec.training), batches


def _step_with_nan(overrides: list[str], nan_rank: int) -> tuple[float, float, bool, bool]:
    """Return loss and norm of a step with a NaN gradient after a valid one, and whether each changed the weights."""
    composed, drive, batches = _driven(overrides)

    def weights() -> list[torch.Tensor]:
        held = (getattr(parameter, "ds_tensor", parameter) for parameter in composed.model.parameters())
        return [weight.detach().clone() for weight in held]

    fresh = weights()
    drive.train(batches)
    trained = weights()
    result = drive.train(batches, nan_gradient=torch.distributed.get_rank() == nan_rank)
    left = weights()
    moved = any(not torch.equal(a, b) for a, b in zip(fresh, trained, strict=True))
    changed = any(not torch.equal(a, b) for a, b in zip(trained, left, strict=True))
    return result.loss.item(), float(result.grad_norm), moved, changed


def _overrides(keys: tuple[str, ...]) -> list[str]:
    return [f"{'training' if key.startswith('precision') else 'layout'}.{key}" for key in keys]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.long if name in _LONG else []) for name in _LAYOUTS]
)
def test_a_gradient_that_is_not_finite_on_one_rank_is_applied_on_none(name: str) -> None:
    keys, nan_rank = _LAYOUTS[name], list(_LAYOUTS).index(name) % 2
    for loss, norm, moved, changed in on_ranks(2, _step_with_nan, _overrides(keys), nan_rank):
        assert moved
        assert not changed
        assert not (torch.isfinite(torch.tensor(loss)) and torch.isfinite(torch.tensor(norm)))


def _validation_loss(overrides: list[str]) -> float:
    _, drive, batches = _driven(overrides)
    first = drive.validation_loss(batches).item()
    assert drive.validation_loss(batches).item() == first
    return first


@pytest.fixture(scope="module")
def validation_loss_alone() -> float:
    alone = on_ranks(1, _validation_loss, ["cluster.gpus_per_node=1", "training.precision=fp32"])
    return float(alone[0])


@pytest.mark.parametrize("name", ["ZeRO-3", "sequence", "pipeline, first stage"])
def test_the_validation_loss_is_that_of_one_process(name: str, validation_loss_alone: float) -> None:
    for loss in on_ranks(2, _validation_loss, _overrides(_LAYOUTS[name])):
        assert loss == pytest.approx(validation_loss_alone, rel=1e-6)


def _losses_by_source(overrides: list[str], chunk: int | None) -> tuple[float, dict[str, float], float, float]:
    """Return loss, losses of sources, norm and next loss of a run on rows of two sources out of three."""
    composed, drive, batches = _driven(overrides)
    if composed.model.lm_head is not None:
        composed.model.lm_head.tokens_at_once = chunk
    sources = torch.tensor([2, 0, 2, 2])
    labelled = []
    for batch in batches:
        labels = batch.labels.clone()
        labels[(batch.samples == 1)[:, None] & (batch.positions < 3)] = -100
        labelled.append(batch._replace(labels=labels, sources=sources[batch.samples], divisor=torch.tensor(20.0)))
    drive._sources = ("web", "code", "books")  # type: ignore[attr-defined]
    result = drive.train(labelled)
    found = {name: value.item() for name, value in result.measures.items()}
    following = drive.train(labelled)
    drive.validation_loss(labelled)
    return result.loss.item(), found, float(result.grad_norm), following.loss.item()


def _losses_of_rows() -> tuple[list[float], float, float, float]:
    """Return the mean loss of each row by itself, and of a run without sources: loss, norm and next loss."""
    _, drive, batches = _driven(["training.precision=fp32", "cluster.gpus_per_node=1"])
    labelled = []
    for batch in batches:
        labels = batch.labels.clone()
        labels[(batch.samples == 1)[:, None] & (batch.positions < 3)] = -100
        labelled.append(batch._replace(labels=labels))
    rows = [
        drive.validation_loss([MicroBatch(each.tokens[row : row + 1], each.labels[row : row + 1], *each[2:])]).item()
        for each in labelled
        for row in range(2)
    ]
    divided = [batch._replace(divisor=torch.tensor(20.0)) for batch in labelled]
    result = drive.train(divided)
    return rows, result.loss.item(), float(result.grad_norm), drive.train(divided).loss.item()


@pytest.mark.parametrize(
    ("keys", "chunk"),
    [
        (("zero_stage=0", "precision=fp32"), None),
        (("zero_stage=3", "precision=fp32"), 5),
        (("zero_stage=2", "tensor_parallel=2", "precision=fp32"), 7),
        (("zero_stage=1", "sequence_parallel=2", "precision=fp32"), None),
    ],
    ids=["replicas", "ZeRO-3 in chunks", "tensor in chunks", "sequence"],
)
def test_sources_have_the_mean_loss_of_their_labels_and_train_alike(keys: tuple[str, ...], chunk: int | None) -> None:
    ((rows, loss, norm, following),) = on_ranks(1, _losses_of_rows)
    counts = [16, 13, 16, 16]
    books = sum(rows[row] * counts[row] for row in (0, 2, 3)) / 48
    scale = 2 if any("sequence" in key for key in keys) else 1  # a rank has half of the labels
    for found, sources, found_norm, found_next in on_ranks(2, _losses_by_source, _overrides(keys), chunk):
        assert sources["loss/web"] == pytest.approx(rows[1], rel=1e-5)
        assert sources["loss/books"] == pytest.approx(books, rel=1e-5)
        assert sources["loss/code"] != sources["loss/code"], "no row has this source"
        expected = (loss / scale, norm / scale, following / scale)
        assert (found, found_norm) == pytest.approx(expected[:2], rel=1e-4)
        if scale == 1:
            assert found_next == pytest.approx(following, rel=1e-4)


def test_a_pipeline_has_no_losses_of_sources() -> None:
    for _, sources, _, _ in on_ranks(2, _losses_by_source, _overrides(_LAYOUTS["pipeline, last stage"]), None):
        assert sources == {}
