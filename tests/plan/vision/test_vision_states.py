import warnings
from typing import Any, NamedTuple

import pytest

from scaletrain_cli.plan.axes import resolve_axes
from scaletrain_cli.plan.catalogue.hardware import find_accelerator
from scaletrain_cli.plan.memory.states import ModelStates
from scaletrain_cli.plan.result import Layout
from scaletrain_cli.plan.search.layouts import build_layout
from scaletrain_cli.plan.trained_parameters import trained_at
from scaletrain_cli.plan.vision.memory import saved_vision_bytes
from scaletrain_cli.plan.vision.states import vision_states
from scaletrain_cli.spec import RunSpec
from tests.plan.vision.test_vision_modules import MODELS

RANKS = 2
# Odd widths, so that every group is padded and every parameter rounded up.
ODD: dict[str, dict[str, Any]] = {
    "bottleneck": {"embedding_size": 13, "hidden_sizes": (36, 60), "depths": (2, 2), "num_labels": 7},
    "convnext": {"hidden_sizes": (13, 27), "num_labels": 7},
    "vit": {"hidden_size": 36, "num_attention_heads": 4, "intermediate_size": 50, "num_labels": 7},
    "clip": {"projection_dim": 13},
}


class Row(NamedTuple):
    """One run of ``batches`` micro-batches a step; ``trainable``: patterns, each of a group with its own rate."""

    name: str
    zero: int
    types: str = "fp32 fp32"
    optimizer: str = "adamw"
    trainable: tuple[str, ...] = ()
    checkpointing: str = "none"
    batches: int = 2

    @property
    def spec(self) -> RunSpec:
        precision, grad_dtype = self.types.split()
        return RunSpec.model_validate(
            {
                "schema": "scaletrain/v1",
                "name": "states",
                "model": MODELS[self.name] | ODD[self.name],
                "data": {"source": "images"},
                "training": {
                    "global_batch_size": 2 * self.batches * RANKS,
                    "micro_batch_size": 2,
                    "steps": 10,
                    "precision": precision,
                    "grad_dtype": grad_dtype,
                    "optimizer": {"name": self.optimizer},
                    "loss_scale": {"initial": 16},
                    "trainable": [{"match": [each], "lr": 1e-4 * n} for n, each in enumerate(self.trainable, start=1)],
                },
                "layout": {"zero_stage": self.zero},
                "cluster": {"gpus_per_node": RANKS, "gpu": "cpu", "scheduler": "local"},
            }
        )

    @property
    def layout(self) -> Layout:
        return build_layout(self.spec, resolve_axes(self.spec), self.zero, self.checkpointing, 2)


ROWS = [
    Row("bottleneck", 0),
    Row("bottleneck", 1, "bf16 fp32", optimizer="momentum"),
    Row("bottleneck", 3, "bf16 fp32"),
    Row("convnext", 2, "bf16 bf16"),
    Row("convnext", 1, checkpointing="full"),
    Row("vit", 2),
    Row("vit", 1, "fp16 fp32", trainable=("vit.encoder.layer.0.*", "*.layernorm*")),
    Row("vit", 3, "bf16 bf16", trainable=("vit.encoder.layer.1.*", "classifier.*")),
    Row("clip", 1, "bf16 fp32"),
    Row("clip", 3, batches=1),
]


def held(row: tuple[Any, ...]) -> tuple[ModelStates, ModelStates, int, int]:
    """One rank's states, counted from its tensors and planned; the activations of a micro-batch, both."""
    import torch

    from scaletrain_cli.engine.compose import compose
    from scaletrain_cli.engine.data.images.batches import ImageMicroBatch
    from scaletrain_cli.engine.metrics.memory_measurement import watching_activations, watching_model_states
    from scaletrain_cli.engine.parallel.mesh import build_mesh
    from scaletrain_cli.engine.step import build_stepper

    warnings.simplefilter("ignore")
    spec, layout, cpu = Row(*row).spec, Row(*row).layout, torch.device("cpu")
    mesh, stage = build_mesh(layout), trained_at(spec, 1)
    composed = compose(spec, layout, mesh, cpu, trained=stage)
    steps = build_stepper(composed, mesh, cpu, spec.training)
    model: Any = spec.model
    pairs = model.family == "clip"
    side = model.vision_config.image_size if pairs else model.image_size
    images = torch.randint(0, 256, (2, 3, side, side), dtype=torch.uint8)
    tokens = torch.randint(0, 90, (2, model.text_config.max_position_embeddings)) if pairs else None
    batch = ImageMicroBatch(images, torch.arange(2), None if pairs else torch.tensor([0, 1]), tokens)
    for _ in range(2):  # the optimizer has its moments after the first step
        with watching_model_states(composed.engine) as watched, watching_activations(composed.model) as saved:
            steps.train([batch] * Row(*row).batches)
    counted = ModelStates(watched.bytes.parameters, watched.bytes.gradients, watched.bytes.optimizer_states)
    planned = vision_states(spec, layout, stage, mesh.replicas.rank)
    composed.engine.destroy()
    return counted, planned, saved.bytes or 0, saved_vision_bytes(spec, layout, find_accelerator(spec.cluster))


def held_of_each(rows: list[tuple[Any, ...]]) -> list[tuple[ModelStates, ModelStates, int, int]]:
    """The same for several rows, one after the other in the same processes."""
    return [held(row) for row in rows]


@pytest.mark.long
def test_every_rank_holds_and_a_micro_batch_saves_what_is_planned() -> None:
    """States are equal; activations are within 5 %, whose smallest parts the plan rounds to whole operations."""
    for library in ("torch", "deepspeed"):
        pytest.importorskip(library)
    from tests.engine.ranks import on_ranks

    for ranks in on_ranks(RANKS, held_of_each, [tuple(row) for row in ROWS]):
        for row, (counted, planned, saved, activations) in zip(ROWS, ranks, strict=True):
            assert counted == planned, row
            if row.name != "clip" or row.batches == 1:  # GradCache saves nothing in the first of its passes
                assert activations == pytest.approx(saved, rel=0.05), row
