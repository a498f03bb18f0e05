"""Bits flipped in the state of one rank, in real engines of several layouts: each is found, and the rank named."""

import random
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from scaletrain_cli.engine.faults import STATE_PARTS
from scaletrain_cli.engine.health.state_check import (
    StateCorruptedError,
    bit_sum,
    flip_bit,
    held_tensors,
)
from scaletrain_cli.engine.trainer import Trainer
from scaletrain_cli.rundir.journal import read_events
from tests.engine.parity.layouts import begun_run, ready
from tests.engine.parity.rows import Row, features
from tests.engine.ranks import on_ranks

BF16 = ("training.precision=bf16",)
THREE = Row(0, data=3, overrides=("training.global_batch_size=6", "training.micro_batch_size=2"))


class Flip(NamedTuple):
    """A bit that is flipped on a rank; ``late``: after the comparison with the last step, as in the update itself."""

    part: str
    rank: int
    bit: int
    late: bool = False


def flips_of(*parts: str, ranks: int, late: bool = False) -> list[Flip]:
    """One flip per part and rank, in the first words, in the middle of nowhere, and near the end."""
    bits = (5, 77_777, 131, 1_000_003)
    return [Flip(part, rank, bits[(rank + n) % 4], late) for n, part in enumerate(parts) for rank in range(ranks)]


def found_by(row: Row, dataset: Path, flips: list[Flip], clean_steps: int) -> list[tuple[str, list[int]]]:
    """Train clean steps, then one step for each flip; return the code and the ranks of each corruption event."""
    run = begun_run(spec := row.spec(dataset, steps=1000))
    on_ranks(spec.world_size, train_with_flips, run.path, flips, clean_steps, connected=False)
    events = [event for event in read_events(run) if event["event"] == "corruption"]
    return [(str(event["code"]), event["ranks"]) for event in events]


def train_with_flips(path: Path, flips: list[Flip], clean_steps: int) -> None:
    trainer = ready(path)
    step = 0
    for _ in range(clean_steps):
        step = trained(trainer, step + 1)
    for flip in flips:
        step = trained(trainer, trained(trainer, step + 1) + 1)  # two clean steps before each
        with pytest.raises(StateCorruptedError) as caught:
            trained(trainer, step + 1, flip)
        assert trainer.step_sync.state_check.clean_step == step
        named = caught.value.reason.params["ranks"] if caught.value.reason is not None else []
        mine = named == [trainer.context.rank]
        reason = "crash" if len(named) != 1 else "hardware" if mine else "communication"
        assert caught.value.failure_reason == reason
        step += 1
        heal(trainer, flip)
        trainer.step_sync.state_check.forget(step)


def trained(trainer: Trainer, step: int, flip: Flip | None = None) -> int:
    check = trainer.step_sync.state_check
    mine = flip is not None and flip.rank == trainer.context.rank

    def before_update(compare: object = type(check).before_update) -> None:
        if mine and not flip.late and flip.part != "gradients":
            flip_bit(held_tensors(trainer.composed)[STATE_PARTS.index(flip.part)], flip.bit)
        type(check).before_update(check)
        if mine and flip.part == "gradients":
            gradients = [each.grad for each in trainer.composed.model.parameters() if each.grad is not None]
            flip_bit(gradients, flip.bit)
        elif mine and flip.late:
            flip_bit(held_tensors(trainer.composed)[STATE_PARTS.index(flip.part)], flip.bit)

    check.before_update = before_update  # type: ignore[method-assign]
    trainer.optimizer_step(step)
    trainer.step_sync.agree(step)
    return step


def heal(trainer: Trainer, flip: Flip) -> None:
    """Give ranks that hold the same tensors those of a healthy one of them."""
    mesh = trainer.stages.mesh
    axis = mesh.synchronous if trainer.context.layout.zero_stage == 0 else mesh.copies
    if axis.group is not None:
        source = next(rank for rank in dist.get_process_group_ranks(axis.group) if rank != flip.rank)
        for tensor in (tensor for part in held_tensors(trainer.composed) for tensor in part):
            dist.broadcast(tensor, source, group=axis.group)


def test_a_flipped_bit_of_what_an_update_alone_changes_is_found_in_the_same_step_and_its_rank_named(
    dataset: Path,
) -> None:
    for row, parts in (
        (THREE, ("weights", "optimizer-state")),
        (Row(2, data=2, overrides=BF16), ("weights", "fp32-weights", "optimizer-state")),
        (Row(3, data=2), ("weights", "fp32-weights", "optimizer-state")),
    ):
        flips = flips_of(*parts, ranks=row.ranks)
        assert found_by(row, dataset, flips, 4) == [("engine.state-changed", [flip.rank]) for flip in flips]


@pytest.mark.long
@pytest.mark.parametrize(
    "row",
    [
        Row(1, data=2, pipeline=2, accumulation=4, overrides=BF16),
        Row(1, data=2, tensor=2),
        Row(2, data=2, sequence=2),
        *(row for row in features() if row.name in ("zero2 dp2 sp2 experts", "zero3 dp4 groups of shards")),
    ],
    ids=lambda row: row.name,
)
def test_it_is_found_in_every_kind_of_layout(row: Row, dataset: Path) -> None:
    parts = [part for part in STATE_PARTS if part != "expert-weights" or "experts" in row.name]
    flips = flips_of(*parts, ranks=row.ranks)
    assert found_by(row, dataset, flips, 20) == [("engine.state-changed", [flip.rank]) for flip in flips]


@pytest.mark.long
@pytest.mark.parametrize("zero", [0, 2, 3])
def test_ten_random_flips_are_found_and_no_clean_step_is_taken_for_one(zero: int, dataset: Path) -> None:
    draw = random.Random(zero)
    row = THREE if zero == 0 else Row(zero, data=2, overrides=BF16)
    parts = ("weights", "gradients", "optimizer-state") if zero == 0 else ("weights", "fp32-weights", "optimizer-state")
    flips = [Flip(draw.choice(parts), draw.randrange(row.ranks), draw.randrange(1 << 40)) for _ in range(10)]
    # The low bits of a gradient are lost in the rounding of the update.
    flips = [flip._replace(bit=flip.bit // 32 * 32 + 26) if flip.part == "gradients" else flip for flip in flips]
    codes = ["engine.replica-differs" if flip.part == "gradients" else "engine.state-changed" for flip in flips]
    found = found_by(row, dataset, flips, 170)
    assert found == [(code, [flip.rank]) for code, flip in zip(codes, flips, strict=True)]


def test_a_replica_that_updates_wrongly_is_named_by_the_others_and_of_two_neither_can_be(dataset: Path) -> None:
    flips = flips_of("weights", ranks=3, late=True)
    assert found_by(THREE, dataset, flips, 0) == [("engine.replica-differs", [flip.rank]) for flip in flips]
    two = found_by(Row(0, data=2), dataset, flips_of("weights", ranks=1, late=True), 0)
    assert two == [("engine.replicas-differ", [0, 1])]


def train_with_a_wrong_device(path: Path, wrong: int) -> None:
    """Train six steps, from the fifth on with a rank whose embedding returns one wrong value per micro-batch."""
    trainer = ready(path)

    def compute_wrongly(module: nn.Module, inputs: object, output: Tensor) -> Tensor:
        output = output.clone()
        output.view(-1)[5] *= 1 + 2**-12
        return output

    for step in range(1, 5):
        trained(trainer, step)
    if trainer.context.rank == wrong:
        embedding = next(each for each in trainer.composed.model.modules() if isinstance(each, nn.Embedding))
        embedding.register_forward_hook(compute_wrongly)
    trained(trainer, 5)
    with pytest.raises(StateCorruptedError):
        trained(trainer, 6)
    assert trainer.step_sync.state_check.clean_step == 3


REPLAY = ("guard.replay=3",)


@pytest.mark.parametrize(
    ("row", "named"),
    [
        (replace(THREE, overrides=(*THREE.overrides, *REPLAY)), [1]),
        pytest.param(Row(3, data=3, overrides=(*THREE.overrides, *REPLAY)), [1], marks=pytest.mark.long),
        pytest.param(Row(2, data=2, overrides=REPLAY), [0, 1], marks=pytest.mark.long),
        pytest.param(  # on the first stage of the second replica, seen in the outputs of its last stage
            Row(1, data=3, pipeline=2, accumulation=2, overrides=("training.global_batch_size=12", *REPLAY)),
            [1, 4],
            marks=pytest.mark.long,
        ),
    ],
    ids=lambda row: row.name if isinstance(row, Row) else "",
)
def test_a_device_that_computes_wrongly_is_found_by_repeating_a_micro_batch(
    row: Row, named: list[int], dataset: Path
) -> None:
    run = begun_run(spec := row.spec(dataset, steps=1000))
    on_ranks(spec.world_size, train_with_a_wrong_device, run.path, 1, connected=False)
    (event,) = [event for event in read_events(run) if event["event"] == "corruption"]
    code = "engine.output-differs" if len(named) == 1 else "engine.outputs-differ"
    assert (event["code"], event["ranks"]) == (code, named)


def train(path: Path, steps: int) -> int:
    trainer = ready(path)
    for step in range(1, steps + 1):
        trained(trainer, step)
    return trainer.step_sync.state_check.clean_step


@pytest.mark.long
@pytest.mark.parametrize("row", [row for row in features() if row.data > 1], ids=lambda row: row.name)
def test_replicas_have_equal_outputs_in_every_kind_of_layout(row: Row, dataset: Path) -> None:
    row = replace(row, overrides=(*row.overrides, "guard.replay=2"))
    run = begun_run(spec := row.spec(dataset, steps=1000))
    assert on_ranks(spec.world_size, train, run.path, 6, connected=False) == [6] * spec.world_size


def test_the_sum_changes_with_every_bit_and_reads_all_bytes_of_any_slice() -> None:
    whole = torch.arange(61, dtype=torch.int16)
    for start, stop in ((0, 61), (1, 61), (3, 8), (5, 6), (7, 7)):
        part = whole[start:stop].clone() if start == 5 else whole[start:stop]
        before = int(bit_sum([part], torch.device("cpu")))
        seen = {before}
        for place in range(len(part)):
            for bit in range(16):
                mask = torch.tensor(-(1 << 15) if bit == 15 else 1 << bit, dtype=torch.int16)
                part[place] ^= mask
                seen.add(int(bit_sum([part], torch.device("cpu"))))
                part[place] ^= mask
        assert int(bit_sum([part], torch.device("cpu"))) == before
        assert (len(seen) == 1) == (start == stop)
