"""Checkpoints of runs with several groups of local SGD."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path

from scaletrain_cli.engine.checkpoint.shard_file import Slice, StateReader
from scaletrain_cli.engine.checkpoint.snapshot import WEIGHT
from scaletrain_cli.rundir.checkpoints import list_checkpoints
from scaletrain_cli.worker.checkpoint_commit import open_attempt
from tests.engine.parity.layouts import assembled, begun_run
from tests.engine.parity.rows import LOCAL_SGD, Row
from tests.engine.ranks import on_ranks

BIASED = (
    *("model.num_experts_per_tok=2", "model.moe_intermediate_size=48"),
    *("model.num_experts=4", "model.scoring_func=sigmoid", "model.topk_method=noaux_tc", "model.norm_topk_prob=true"),
)


def biases(path: Path, given: float | None) -> list[float]:
    """Train a step from the newest checkpoint and save it, with the router's biases if they are given; return them."""
    with contextlib.redirect_stdout(io.StringIO()):
        trainer = assembled(path, 1 if given is not None else 2)
        step = trainer.resume().step
        buffers = [each for name, each in trainer.composed.model.named_buffers() if name.endswith("correction_bias")]
        if given is not None:
            for buffer in buffers:
                buffer.fill_(given)
            assert trainer.prepare_batches(step)
            trainer.optimizer_step(step + 1)
            trainer.save(step + 1, wait=True)
        return [float(each) for buffer in buffers for each in buffer]


def test_every_group_and_an_export_read_the_buffers_of_the_model_that_no_gradient_trains(dataset: Path) -> None:
    spec = Row(1, data=2, overrides=(*BIASED, *LOCAL_SGD)).spec(dataset, steps=10)
    run = begun_run(spec)
    before = on_ranks(2, biases, run.path, 0.25, connected=False)
    (saved,) = list_checkpoints(run.checkpoints)
    of_no_rank = StateReader(saved.path, -1, (), saved.files)  # as for an export
    names = [f"model.layers.{layer}.mlp.gate.e_score_correction_bias" for layer in range(len(before[0]) // 4)]
    found = [of_no_rank.read(WEIGHT, Slice(name, (4,), None, 0, 4)).tolist() for name in names]
    assert [each for of_layer in found for each in of_layer] == before[0]
    open_attempt(run.checkpoints, 2)
    assert on_ranks(2, biases, run.path, None, connected=False) == before
    assert set(before[1]) == {0.25}
