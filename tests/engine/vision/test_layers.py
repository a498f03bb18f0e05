import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from scaletrain_cli.engine.compose import compose
from scaletrain_cli.engine.metrics import layer_measures
from scaletrain_cli.engine.metrics.layer_measures import LayerMeasures
from scaletrain_cli.engine.optim.optimizers import set_rates
from scaletrain_cli.engine.parallel.mesh import build_mesh
from scaletrain_cli.engine.process_group import RankConsensus, Ranks
from scaletrain_cli.engine.stages import trained_at
from scaletrain_cli.engine.step import build_stepper
from scaletrain_cli.plan import make_plan
from tests.engine.alone import context_of
from tests.engine.ranks import on_ranks
from tests.engine.vision.runs import Row, conversations, global_batch, part, rows_of

TOWERS = ["vision_model embedding", "block vision_0", "block vision_1", "vision_model head"]
TEXTS = ["text_model embedding", "block text_0", "block text_1", "text_model head"]
LAYERS = {
    "resnet": ["embedding", "block 0_0", "block 1_0", "block 1_1", "head"],
    "convnext": ["embedding", "block 0_0", "block 1_0", "block 1_1", "head"],
    "vit": ["embedding", "block 0", "block 1", "head"],
    "clip": [*TEXTS, *TOWERS, "logit_scale", "visual_projection", "text_projection"],
    "llava": [
        *("vision_tower embedding", "block vision_0", "block vision_1", "vision_tower head"),
        *("multi_modal_projector", "language_model embedding", "block text_0", "block text_1", "language_model head"),
    ],
}


def measured(family: str, *overrides: str) -> tuple[list[str], dict[str, dict[str, float]], float]:
    """The layers of a family, their columns in the second step, and the norm of the gradient. It clips."""
    layer_measures._FEWEST_ROWS = 1  # type: ignore[attr-defined]
    row = Row(family, 1, ranks=2, overrides=("training.gradient_clipping=0.01", "telemetry.layers_every=2", *overrides))
    spec, device = row.spec(), torch.device("cpu")
    plan = make_plan(spec)
    layout = plan.layout
    mesh = build_mesh(layout)
    composed = compose(spec, layout, mesh, device, trained=trained_at(spec, 1))
    stepper = build_stepper(composed, mesh, device, spec.training)
    context = context_of(None, SimpleNamespace(spec=spec, plan=plan), Ranks.from_environment(), RankConsensus(600.0))
    layers = LayerMeasures(context, composed, mesh, first_step=1)
    found: Any = None
    for step in (1, 2):
        set_rates(composed.optimizer, step, 1e-3)
        first, size = mesh.data.rank * row.micro_batch_size, row.micro_batch_size
        rows = rows_of(conversations(step), first, size, 2) if family == "llava" else None
        batch = global_batch(row, step)
        layers.begin(step)
        result = stepper.train([rows or part(batch, first, size)])
        if layers._probe is not None:
            for key, block in composed.model.blocks.items():
                units = layers._probe._units[f"block {key}"].largest.numel()
                assert not hasattr(block, "pwconv2") or units == block.pwconv2.in_features
        layers.end(step, result.grad_norm, stepper.largest_norm)
        assert found is None
        found = layers.finished(step)
    assert found.step == 2
    check_that_an_error_ends_the_measurements_on_all_ranks(
        layers, lambda: stepper.train([rows or part(batch, 0, size)])
    )
    return layers.names, found.columns, float(result.grad_norm)


def check_that_an_error_ends_the_measurements_on_all_ranks(layers: LayerMeasures, train: Callable[[], Any]) -> None:
    """The error is that of a full GPU, on rank 0 alone; the step is trained, and no rank waits for another."""
    squares = layer_measures._squares

    def fail(tensors: list[Any]) -> Any:
        raise torch.OutOfMemoryError("injected")

    for step in (4, 6):
        layer_measures._squares = fail if dist.get_rank() == 0 else squares
        layers.begin(step)
        assert (layers._probe is not None) == (step == 4)
        result = train()
        assert math.isfinite(float(result.loss))
        layers.end(step, result.grad_norm, 0.0)
        found = layers.finished(step)
        assert found == (layer_measures.MeasuredLayers(4, {}) if step == 4 else None)
    layer_measures._squares = squares


SCALED = "vit"  # trained once more in fp16, whose gradients are scaled


def measured_families() -> dict[str, tuple[list[str], dict[str, dict[str, float]], float]]:
    return {family: measured(family) for family in LAYERS} | {
        f"{SCALED} fp16": measured(SCALED, "training.precision=fp16")
    }


@pytest.mark.long
def test_every_trained_parameter_is_in_one_layer() -> None:
    for title, (names, columns, norm) in on_ranks(2, measured_families)[0].items():
        family = title.split()[0]
        assert sorted(names) == sorted(LAYERS[family])
        norms = [each["gradient_norm"] for each in columns.values() if "gradient_norm" in each]
        assert math.hypot(*norms) == pytest.approx(norm, rel=1e-5)
        without = [name for name in names if "gradient_norm" not in columns.get(name, {})]
        # LLaVA takes the images' features before the norm at the end of the tower.
        assert without == (["vision_tower head"] if family == "llava" else [])
        for name, each in columns.items():
            if name.startswith("block"):
                assert each.keys() >= {"activation_rms", "dead_share"}
                assert 0 <= each["dead_share"] <= 1
            if name.endswith("embedding"):
                assert each["activation_rms"] > 0
            assert each.get("update_ratio", 1) > 1e-6
