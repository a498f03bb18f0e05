import contextlib
import math
import os
import re
import socket
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from scaletrain_cli.engine import process_group
from scaletrain_cli.engine.process_group import SLOTS, RankConsensus, connect, from_slots, in_slots
from scaletrain_cli.event_texts import event_sentence
from scaletrain_cli.rundir.journal import read_events
from scaletrain_cli.rundir.paths import RunDir
from scaletrain_cli.worker.loop_adapter import StepDecision
from tests.engine.ranks import on_ranks

VALUES = [2.5, -1e300, math.inf, -math.inf, math.nan, -0.0, 5e-324]


def agreed_on() -> tuple[dict[str, float], dict[str, float]]:
    """Return the agreed values in a pipeline in which only the second stage has experts."""
    consensus, rank = RankConsensus(600.0), dist.get_rank()
    own = {"loss": 2.0 + rank, "grad_norm": 0.5} | ({"router_balance": 1.5} if rank else {})
    _, _, values, _ = consensus.reach(StepDecision.CONTINUE, False, in_slots(own))
    assert len(values) == SLOTS
    return from_slots(own, values), consensus.on_values(own)


def test_a_rank_with_more_measures_than_rank_zero_gets_its_loss() -> None:
    for first, second in on_ranks(2, agreed_on):
        assert first == second
        assert (first["loss"], first["grad_norm"]) == (2.0, 0.5)


def agree() -> list[tuple[StepDecision, bool, list[float], list[int]]]:
    consensus, rank = RankConsensus(600.0), dist.get_rank()
    wishes = [(StepDecision.CONTINUE, False), (StepDecision.SAVE, False), (StepDecision.PREEMPT, True)]
    own = VALUES if rank == 0 else [1e308] * len(VALUES)
    whole = [rank, -rank, (1 << 62) - rank]
    return [consensus.reach(*wishes[rank], own, whole), consensus.reach(StepDecision.CONTINUE, False)]


def test_the_largest_request_wins_and_every_rank_has_the_values_of_rank_zero_to_the_bit() -> None:
    for first, second in on_ranks(3, agree):
        assert first[:2] == (StepDecision.PREEMPT, True)
        assert [value.hex() for value in first[2]] == [value.hex() for value in VALUES]
        assert first[3] == [2, 0, 1 << 62]  # the largest of any rank
        assert second == (StepDecision.CONTINUE, False, [], [])


def connected_listening_at() -> set[str]:
    """Join the process group as the engine does; return the addresses at which this process listens."""
    connect(torch.device("cpu"), 600)
    assert RankConsensus(600.0).share(1.0) == [1.0] * dist.get_world_size()
    own = set()
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # that of this listing
            own.add(os.readlink(f"/proc/self/fd/{number}"))
    found = set()
    for family, table in ((socket.AF_INET, "tcp"), (socket.AF_INET6, "tcp6")):
        for line in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]:
            local, state, inode = (line.split()[index] for index in (1, 3, 9))
            if state == "0A" and f"socket:[{inode}]" in own:  # LISTEN
                words = re.findall("." * 8, local.partition(":")[0])
                found.add(socket.inet_ntop(family, b"".join(bytes.fromhex(word)[::-1] for word in words)))
    return found


def meet(**environment: str) -> set[str]:
    for name in ("MASTER_ADDR", "MASTER_PORT", "GLOO_SOCKET_IFNAME", "TORCHELASTIC_USE_AGENT_STORE"):  # of on_ranks
        del os.environ[name]
    os.environ.update(environment)
    return connected_listening_at()


def meet_in_a_file(file: str) -> set[str]:
    return meet(SCALETRAIN_RENDEZVOUS=file)


def meet_at_the_loopback() -> set[str]:
    return meet(MASTER_ADDR="127.0.0.1", MASTER_PORT="0", GLOO_SOCKET_IFNAME="lo")


def test_ranks_of_one_node_meet_in_a_file_and_listen_at_no_address_of_a_network(tmp_path: Path) -> None:
    for addresses in on_ranks(2, meet_in_a_file, str(tmp_path / "store"), connected=False):
        assert addresses == {"127.0.0.1"}


def test_a_node_that_does_not_reach_the_first_one_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SCALETRAIN_ATTEMPT", "2")
    monkeypatch.setenv("SCALETRAIN_RUN_DIR", str(tmp_path))
    with socket.create_server(("127.0.0.1", 0)) as first:
        port = first.getsockname()[1]
        process_group._report_unreachable("127.0.0.1", port)
    assert read_events(RunDir(tmp_path)) == []
    process_group._report_unreachable("127.0.0.1", port)
    (event,) = read_events(RunDir(tmp_path))
    assert (event["event"], event["attempt"], event["address"]) == ("unreachable", 2, "127.0.0.1")
    assert event["error"] == "Connection refused"
    assert "does not reach the first node, 127.0.0.1 port" in event_sentence(event)


def test_the_first_rank_listens_at_the_address_in_use_alone() -> None:
    (addresses,) = on_ranks(1, meet_at_the_loopback, connected=False)
    assert addresses == {"127.0.0.1"}
