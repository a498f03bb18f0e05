import pytest
import torch
import torch.distributed as dist

from scaletrain_cli.engine.checkpoint.exchange import HeldState, exchange
from scaletrain_cli.engine.checkpoint.shard_file import OPAQUE, Slice
from scaletrain_cli.engine.checkpoint.snapshot import Counts
from scaletrain_cli.engine.process_group import RankConsensus
from scaletrain_cli.errors import ScaletrainError
from tests.engine.ranks import on_ranks

WHOLE = (8,)


def part(name: str, start: int, stop: int) -> Slice:
    return Slice(name, WHOLE, None, start, stop)


def exchanged(case: str) -> dict[str, list[float]] | str:
    """Return the values that a rank gets, or its error.

    Each of two ranks holds a half of ``old``, and of ``new``, which no update has reached yet, and needs the other
    half of both.
    """
    rank = dist.get_rank()
    mine, other = (4 * rank, 4 * rank + 4), (4 - 4 * rank, 8 - 4 * rank)
    slices = {name: part(name, *mine) for name in ("old", "new")}
    values = {f"weight/{name}": torch.arange(*mine).float() for name in slices}
    values["exp_avg/old"] = 10 * torch.arange(*mine).float()
    if case == "a rank without its state" and rank == 1:
        del values["exp_avg/old"]
    if case == "blocks on one rank" and rank == 1:
        values[f"{OPAQUE}/0/state1"] = torch.zeros(2)
    needed = {name: part(name, *other) for name in ("old", "new", "never held")}
    held = HeldState(slices, values, Counts({"step": 3.0}, {"new": {}}), {})
    try:
        state = exchange(held, needed, RankConsensus(600.0), torch.device("cpu"))
    except ScaletrainError as error:
        return str(error)
    assert state.counts_of("old") == {"step": 3.0}
    assert state.counts_of("new") == {}
    return {key: value.tolist() for key, value in state.values.items()}


def test_a_parameter_that_was_never_updated_has_only_its_weight() -> None:
    for rank, found in enumerate(on_ranks(2, exchanged, "complete")):
        other = [float(value) for value in range(4 - 4 * rank, 8 - 4 * rank)]
        assert found == {"weight/old": other, "weight/new": other, "exp_avg/old": [10 * value for value in other]}


@pytest.mark.parametrize(
    ("case", "said"),
    [
        ("a rank without its state", "no rank holds exp_avg of old; the state in memory is incomplete"),
        ("blocks on one rank", "the optimizer's states are quantized in blocks"),
    ],
)
def test_every_rank_raises_what_one_rank_finds(case: str, said: str) -> None:
    errors = on_ranks(2, exchanged, case)
    assert errors[0] == errors[1]
    assert errors[0].startswith(said)
