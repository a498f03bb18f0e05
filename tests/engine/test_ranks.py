import os
import signal

import pytest
import torch
import torch.distributed as dist

from tests.engine.leftovers import children
from tests.engine.ranks import RanksFailedError, on_ranks


def sum_of_ranks(factor: float) -> tuple[int, torch.Tensor]:
    total = torch.tensor([factor * dist.get_rank()])
    dist.all_reduce(total)
    return int(os.environ["RANK"]), total


def fail_on_rank_one() -> None:
    if dist.get_rank() == 1:
        raise ValueError("rank one is unwell")
    dist.barrier()


def die_on_rank_one() -> None:
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def hang_on_rank_one() -> None:
    if os.environ["RANK"] == "1":
        signal.pause()


def what_the_rank_sees() -> tuple[str | None, bool, int]:
    return os.environ.get("A_SETTING"), dist.is_initialized(), torch.get_num_threads()


def test_results_come_in_rank_order() -> None:
    assert on_ranks(3, sum_of_ranks, 2.0) == [(rank, torch.tensor([6.0])) for rank in range(3)]


def test_a_rank_has_the_environment_of_the_test_and_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A_SETTING", "set")
    assert on_ranks(2, what_the_rank_sees, connected=False) == [("set", False, 1)] * 2


@pytest.mark.parametrize(
    ("function", "reported"),
    [
        (fail_on_rank_one, "ValueError: rank one is unwell"),
        (die_on_rank_one, "rank 1 of 2: died with exit code -9"),
        (hang_on_rank_one, "rank 1 of 2: gave no answer in time"),
    ],
    ids=["raises", "dies", "hangs"],
)
def test_a_failure_is_reported_and_leaves_no_process(function: object, reported: str) -> None:
    on_ranks(1, os.getpid)  # so that the server runs
    before = children(os.getpid())
    with pytest.raises(RanksFailedError, match=reported):
        on_ranks(2, function, seconds=1.0 if function is hang_on_rank_one else None)  # type: ignore[arg-type]
    assert children(os.getpid()) <= before  # a process of an earlier test may have ended meanwhile
