"""The parsers on the output of a real Slurm 22.05."""

import time
from pathlib import Path

import pytest

from scaletrain_cli.launch.backends.slurm.tables import gpus, is_usable, limit_seconds, partitions, reservations

ANSWERS = Path(__file__).parent / "slurm_answers"


def answer(name: str) -> str:
    return (ANSWERS / f"{name}.txt").read_text(encoding="utf-8")


def test_partitions_are_read_with_their_limits() -> None:
    found = {partition.name: partition for partition in partitions(answer("partitions"))}
    assert list(found) == ["main", "spot", "spot0", "high"]
    main, spot = found["main"], found["spot"]
    assert (main.is_default, main.state, main.max_seconds, main.default_seconds) == (True, "UP", None, 3600.0)
    assert (main.max_nodes, main.allowed_accounts, main.denied_accounts) == (None, None, frozenset())
    assert (spot.preempt_mode, spot.grace_seconds, spot.tier) == ("REQUEUE", 30.0, 1)


def test_a_partition_with_every_limit_is_read() -> None:
    line = (
        "PartitionName=gpu AllowGroups=ALL DenyAccounts=guests AllowQos=high,normal Default=NO DefaultTime=NONE "
        "GraceTime=120 MaxNodes=16 MaxTime=7-00:00:00 MinNodes=2 PriorityTier=3 PreemptMode=GANG,SUSPEND State=DRAIN\n"
    )
    (found,) = partitions(line)
    assert (found.max_nodes, found.min_nodes, found.max_seconds) == (16, 2, 7 * 86400.0)
    assert (found.allowed_accounts, found.denied_accounts) == (None, frozenset({"guests"}))
    assert (found.allowed_qos, found.default_seconds, found.state) == (frozenset({"high", "normal"}), None, "DRAIN")


def test_reservations_are_read_with_their_times() -> None:
    found = reservations(answer("reservations"))
    assert time.strftime("%H:%M", time.localtime(found[0].start)) == "21:16"
    assert reservations("No reservations in the system\n") == ()


@pytest.mark.parametrize(
    ("gres", "counts"),
    [
        ("gpu:h100:8(S:0-1)", {"h100": 8}),
        ("gpu:8", {"": 8}),
        ("gpu:8(S:0-1),nic:2", {"": 8}),
        ("gpu:a100:2(IDX:0-1),gpu:h100:6(IDX:2-7)", {"a100": 2, "h100": 6}),
        ("gpu:a100_1g.10gb:7,gpu:a100:1", {"a100_1g.10gb": 7, "a100": 1}),
        ("gpu:h100:0(IDX:N/A)", {"h100": 0}),
        ("gpu:4,shard:16,vgpu:3", {"": 4}),
        ("shard:h100:32", {}),
        ("(null)", {}),
        ("", {}),
    ],
)
def test_gpus_are_counted_by_type(gres: str, counts: dict[str, int]) -> None:
    assert gpus(gres) == counts


def test_a_node_that_boots_or_is_taken_out_of_use_is_not_usable() -> None:
    assert not any(map(is_usable, ("boot", "boot^", "drain", "drng@", "maint", "down~", "futr", "inval", "idle*")))
    assert all(map(is_usable, ("idle", "idle~", "alloc+", "mix-", "plnd", "resv", "comp")))


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("1-02:03:04", 93784.0), ("02:00:00", 7200.0), ("30:00", 1800.0), ("UNLIMITED", None), ("NONE", None), ("", None)],
)
def test_time_limits_are_read_in_seconds(text: str, seconds: float | None) -> None:
    assert limit_seconds(text) == seconds
