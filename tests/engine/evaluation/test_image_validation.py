"""A validation of a network for images, from reading its samples to its figures: beside a plain loop."""

import contextlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from scaletrain_cli.engine.compose import compose
from scaletrain_cli.engine.data.loader import BatchesAndRounds, Loader
from scaletrain_cli.engine.evaluation.measures import Figures
from scaletrain_cli.engine.parallel.mesh import build_mesh
from scaletrain_cli.engine.step import build_stepper
from scaletrain_cli.engine.validation import ReadAhead, Validation
from scaletrain_cli.plan import make_plan
from scaletrain_cli.spec import parse_spec
from tests.engine.alone import context_of
from tests.engine.data.images.pictures import Pictures, reader
from tests.engine.ranks import on_ranks

COUNT, SIZE, LABELS = 21, 16, 7  # the last round is not full on any number of ranks
SPEC = f"""
schema: scaletrain/v1
name: images
model: {{family: resnet, embedding_size: 8, hidden_sizes: [16], depths: [1], layer_type: basic, num_labels: {LABELS},
        image_size: {SIZE}, memory_format: contiguous_format}}
data: {{source: images}}
training: {{global_batch_size: 16, micro_batch_size: 4, steps: 5, precision: fp32}}
cluster: {{gpu: cpu}}
"""


def validated(ranks: int, zero: int) -> tuple[Figures | None, Figures]:
    """Return the figures of a validation by the trainer, and those of a loop over single images."""
    overrides = (f"cluster.gpus_per_node={ranks}", f"layout.zero_stage={zero}")
    spec = parse_spec(SPEC, file="images.yaml", base_dir=Path(), overrides=overrides)
    layout, device = make_plan(spec).layout, torch.device("cpu")
    mesh = build_mesh(layout)
    composed = compose(spec, layout, mesh, device)
    images = reader(Pictures(COUNT), at=layout, rank=mesh.data.rank, size=SIZE)
    own = images.without_groups()
    parts: Any = {
        "step_sync": SimpleNamespace(goes_on=lambda step: True),
    }
    record = SimpleNamespace(spec=spec, plan=SimpleNamespace(layout=layout))
    validation = Validation(
        context_of(None, record),
        composed=composed,
        stepper=build_stepper(composed, mesh, device, spec.training),
        average=None,
        readers={"source": images},
        shares={"source": 1.0},
        **parts,
    )
    with torch.no_grad(), contextlib.closing(Loader(BatchesAndRounds(own.batch, {"source": own}), device)) as loader:
        ahead = ReadAhead(loader, [2, 3], 2)
        found = validation._measured(1, {"source": COUNT}, "validation_", ahead)
        again = validation._measured(1, {"source": COUNT}, "validation_", ahead)
    assert again == found  # nothing of the first validation is left
    logits, targets = [], []
    composed.engine.eval()
    for batch in images.in_order(COUNT) if zero < 3 else ():
        pixels = composed.objective.prepared(batch).inputs[0]  # type: ignore[attr-defined]
        with torch.no_grad():
            outputs = [composed.model(image.unsqueeze(0)) for image in pixels]
        real = range(len(outputs)) if batch.real is None else batch.real.nonzero().flatten().tolist()
        logits += [outputs[number][0] for number in real]
        targets += [int(batch.targets[number]) for number in real]
    if not logits:
        return found, Figures({}, {})
    whole, labels = torch.stack(logits), torch.tensor(targets)
    order = whole.argsort(1, descending=True)
    plain = {f"validation_top{k}": float((order[:, :k] == labels[:, None]).any(1).double().mean()) for k in (1, 5)}
    return found, Figures({"validation_loss": F.cross_entropy(whole, labels).item(), **plain}, {})


def test_loss_and_accuracy_are_those_of_a_plain_loop_over_the_samples() -> None:
    ((found, plain),) = on_ranks(1, validated, 1, 0)
    assert found.metrics == pytest.approx(plain.metrics, rel=1e-5)
    assert [each["samples"] for each in found.details["classes"]] == [7, 7, 7, 0, 0, 0, 0]


@pytest.mark.parametrize(("ranks", "zero"), [(2, 3), (4, 1)])
def test_ranks_and_zero_stages_have_the_same_figures(ranks: int, zero: int) -> None:
    ((alone, _),) = on_ranks(1, validated, 1, 0)
    for found, _ in on_ranks(ranks, validated, ranks, zero):
        assert found.metrics == pytest.approx(alone.metrics, rel=1e-6)
        assert found.details == alone.details
