"""The parsers on the output of a real Slurm 22.05."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from scaletrain_cli.launch.backends.slurm.tables import (
    gpus,
    limit_seconds,
    nodes,
    partitions,
    records,
    reservations,
    settings,
)

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


def test_lines_per_node_and_partition_become_one_node() -> None:
    n1, n2, n3 = nodes(answer("nodes"))
    assert (n1.name, n1.state, n1.gpus, n1.gpus_used) == ("n1", "mix", {"h100": 8}, {"h100": 8})
    assert n1.partitions == {"main", "spot", "spot0", "high"}
    assert (n2.gpus_used, n2.cpus, n2.memory_mib, n2.is_usable) == ({"h100": 0}, 4, 8000, True)
    assert not n3.is_usable


def test_reservations_are_read_with_their_times() -> None:
    found = reservations(answer("reservations"))
    assert [(one.name, one.is_maintenance, one.nodes) for one in found] == [
        ("maint1", True, {"n1", "n2", "n3"}),
        ("course", False, {"n3"}),
    ]
    assert time.strftime("%H:%M", time.localtime(found[0].start)) == "21:16"
    assert found[0].end - found[0].start == 7200.0
    assert reservations("No reservations in the system\n") == ()


def test_settings_are_read_by_name() -> None:
    found = settings(answer("config"))
    assert (found["PreemptType"], found["KillWait"]) == ("preempt/partition_prio", "5 sec")


def test_a_value_may_contain_blanks_and_equals_signs() -> None:
    (node,) = records("NodeName=n1 OS=Linux 6.1 #1 SMP @0  State=IDLE CfgTRES=cpu=4,gres/gpu=8 Reason=bad disk [root]")
    assert node == {
        "NodeName": "n1",
        "OS": "Linux 6.1 #1 SMP @0",
        "State": "IDLE",
        "CfgTRES": "cpu=4,gres/gpu=8",
        "Reason": "bad disk [root]",
    }


@pytest.mark.parametrize(
    ("gres", "counts"),
    [
        ("gpu:h100:8(S:0-1)", {"h100": 8}),
        ("gpu:8", {"": 8}),
        ("gpu:8(S:0-1),nic:2", {"": 8}),
        ("gpu:a100:2(IDX:0-1),gpu:h100:6(IDX:2-7)", {"a100": 2, "h100": 6}),
        ("gpu:a100_1g.10gb:7,gpu:a100:1", {"a100_1g.10gb": 7, "a100": 1}),
        ("gpu:h100:0(IDX:N/A)", {"h100": 0}),
        ("(null)", {}),
        ("", {}),
    ],
)
def test_gpus_are_counted_by_type(gres: str, counts: dict[str, int]) -> None:
    assert gpus(gres) == counts


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("1-02:03:04", 93784.0), ("02:00:00", 7200.0), ("30:00", 1800.0), ("UNLIMITED", None), ("NONE", None), ("", None)],
)
def test_time_limits_are_read_in_seconds(text: str, seconds: float | None) -> None:
    assert limit_seconds(text) == seconds
