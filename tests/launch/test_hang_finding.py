"""The cause of a hang, from the ranks of all nodes as they were recorded in real runs (hangs.json)."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from scaletrain_cli.launch.exit_classification import Outcome, classify_exit
from scaletrain_cli.launch.node.processes import tcp_addresses
from scaletrain_cli.launch.node.record import NodeRecord, RankRecord
from scaletrain_cli.rundir.documents import from_document
from scaletrain_cli.worker.failures import Failure
from scaletrain_cli.worker.position import Collective, Position, RankView, spans_of

RECORDED = Path(__file__).with_name("hangs.json")
RANKS = {"alpha": (0, 1), "beta": (2, 3)}
FOUND = {  # the rank, its node and the collective that it did not enter
    "gradients-zero0": (3, "beta", "all-reduce of gradients"),
    "gradients-zero3": (3, "beta", "reduce-scatter of gradients"),
    "parameters-zero1": (3, "beta", "all-gather of parameters"),
    "parameters-zero3": (3, "beta", "all-gather of parameters"),
    "norm": (3, "beta", "all-reduce of the gradient norm"),
    "step-sync": (3, "beta", "all-reduce at the end of the step"),
    "loss": (3, "beta", "all-reduce of the loss"),
    "pipeline": (1, "alpha", "receive of activations between pipeline stages"),
    "tensor": (3, "beta", "all-reduce of activations between the ranks of a layer in model.embed_tokens"),
    "data": (3, "beta", "all-reduce of gradients"),
    "checkpoint": (3, "beta", "all-gather of the files of a checkpoint"),
    "save-barrier": (3, "beta", "barrier at the end of a save"),
    "evaluation": (3, "beta", "all-reduce of an evaluation"),
    "stopped-rank": (3, "beta", "all-reduce of gradients"),
}


def recorded(name: str) -> list[Failure]:
    """Return the records of the nodes of a hang."""
    common = {"rank": None, "reason": "hang", "message": "", "exit_code": 1, "code": "node.hung"}
    params = {"silent_seconds": 6, "stacks": "attempts/0001/stacks"}
    nodes = json.loads(RECORDED.read_text(encoding="utf-8"))[name]
    return [from_document(Failure, {**common, "params": params, **node}, RECORDED) for node in nodes]


def judged(failures: Sequence[Failure], ranks: dict[str, tuple[int, ...]] = RANKS) -> Outcome:
    """Return the end of an attempt whose nodes have recorded these failures; a node without one reports no end."""
    reported, nodes = {failure.node for failure in failures}, []
    for number, (name, own) in enumerate(ranks.items()):
        node = NodeRecord(
            f"node-{number:04d}-{name}", name, number, 1, 1, 0.0, tuple(RankRecord(r, 1, 0.0) for r in own)
        )
        if node.node in reported:
            killed = tuple(rank.end(-9, 9.0, killed_by_agent=True) for rank in node.ranks)
            node = replace(node, ranks=killed, ended=9.0, exit_code=1, first_failure=own[0])
        nodes.append(node)
    return classify_exit(nodes, failures, len(nodes), cancelled=False)


def finding(outcome: Outcome) -> Any:
    assert outcome.reason == "hang"
    return outcome.why.params["finding"]


@pytest.mark.parametrize("name", FOUND)
def test_the_rank_that_did_not_enter_is_named_with_the_collective_and_its_node_is_excluded(name: str) -> None:
    rank, node, collective = FOUND[name]
    outcome = judged(recorded(name))
    found = finding(outcome)
    # A rank that waits for its batch may wait for the storage of all nodes.
    against = () if name == "data" else (node,)
    assert (found.code, found.params["rank"], outcome.against) == ("launch.hang-not-entered", rank, against)
    assert found.params["collective"] == collective
    assert f"rank {rank} on node-000{rank // 2}-{node} did not enter the {collective}, in step" in outcome.message
    assert judged(recorded(name)[::-1]).why.params["finding"] == found, "the order of the records does not matter"


def test_what_the_rank_does_and_who_waits_for_it_is_said() -> None:
    text = judged(recorded("data")).message
    assert "it runs call (tests/drills/hanging_engine.py:41) (phase: step, before its batch)" in text
    assert "Ranks that wait in it: 0, 1, 2. Stacks: attempts/0001/stacks" in text
    assert "it does not respond: stopped by a signal (state T)" in judged(recorded("stopped-rank")).message
    waiting = finding(judged(recorded("tensor"))).params["waiting"]
    assert waiting == [2], "the others wait for rank 3, too, but in a later collective"


@pytest.mark.parametrize("name", ["data", "cut link"])
def test_a_connection_that_the_end_of_another_hung_rank_breaks_is_not_the_cause(name: str) -> None:
    closed = Failure(1, "communication", "Connection closed by peer", 1)
    found = finding(judged(recorded(name)))
    assert finding(judged([closed, *recorded(name)])) == found


@pytest.mark.parametrize("name", FOUND)
def test_a_node_that_reports_nothing_is_named_by_the_ranks_that_wait_for_it(name: str) -> None:
    if name == "pipeline":  # the missing rank is on the node that reports
        assert finding(judged(recorded(name)[:1])).params["rank"] == 1
        return
    outcome = judged(recorded(name)[:1])
    assert (finding(outcome).code, outcome.against) == ("launch.hang-silent-node", ("beta",))
    assert finding(outcome).params["waiting"] in ([0, 1], [1])
    assert "node-0001-beta did not report" in outcome.message


def test_a_cut_link_is_no_fault_of_a_rank() -> None:
    outcome = judged(recorded("cut link"))
    assert (finding(outcome).code, outcome.against) == ("launch.hang-link-cut", ())
    assert "data between node-0000-alpha, node-0001-beta are not acknowledged" in outcome.message
    first, second = recorded("cut link")  # the second node may have sent nothing since
    assert finding(judged([first, replace(second, stalled=())])) == finding(outcome)
    unmeasured = [replace(failure, stalled=()) for failure in recorded("cut link")]
    outcome = judged(unmeasured)  # as with InfiniBand
    assert (finding(outcome).code, outcome.against) == ("launch.hang-entered-by-all", ())


def test_the_node_that_reaches_none_of_the_others_is_the_cause() -> None:
    outcome = judged(recorded("cut node"), {"alpha": (0,), "beta": (1,), "gamma": (2,)})
    assert (finding(outcome).code, outcome.against) == ("launch.hang-node-cut-off", ("beta",))
    assert "node-0001-beta is cut off" in outcome.message


def view(rank: int, *waits: Collective, step: int = 5, part: int = 1, **entered: int) -> RankView:
    return RankView(rank, 0, step, "step", part, 9.0, "S", True, Position("f (a.py:1)", "", waits, entered))


def test_ranks_that_call_collectives_in_different_orders_wait_for_each_other() -> None:
    first = Collective("all-reduce", "of a", ((0, 1, 1),), "g", 5, 1.0)
    second = Collective("all-gather", "of b", ((0, 1, 1),), "h", 3, 1.0)
    failures = recorded("loss")
    both = (view(0, first, g=5, h=2), view(1, second, g=4, h=3))
    outcome = judged([replace(failures[0], ranks=both)], {"alpha": (0, 1)})
    assert "ranks 0, 1 wait for each other" in outcome.message
    assert "rank 0 in the all-reduce of a, rank 1 in the all-gather of b" in outcome.message
    assert outcome.against == ()


@pytest.mark.parametrize("ranks", [[], [5], [0, 1, 2, 3], [1, 9, 17], [0, 1, 4, 5], [3, 7, 8, 9, 20]])
def test_ranks_of_a_group_are_kept_as_spans(ranks: list[int]) -> None:
    assert Collective("all-reduce", "of a", spans_of(ranks[::-1])).ranks == ranks
    assert spans_of(range(0, 8192, 8)) == ((0, 8184, 8),)


def test_without_collectives_the_rank_without_its_batch_is_behind() -> None:
    failures = recorded("loss")
    views = (view(0), view(1, part=0))
    outcome = judged([replace(failures[0], ranks=views)], {"alpha": (0, 1)})
    assert "rank 1 on node-0000-alpha is behind: in step 5 (step, before its batch)" in outcome.message
    assert outcome.against == (), "it may wait itself"


def test_a_peer_that_does_not_acknowledge_data_is_stalled(tmp_path: Path) -> None:
    head = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n"
    line = "   0: 02004D0A:9E07 03004D0A:8DE0 {} 00022B70:00000000 01:000000BE {}     0        0 151592 2\n"
    lines = [line.format(state, tries) for state, tries in (("01", "00000004"), ("01", "00000001"), ("0A", "00000009"))]
    (tmp_path / "tcp").write_text(head + "".join(lines))
    six = "0: 0000000000000000FFFF00000100007F:1 B80D0120000000000000000001000000:2 01 0:0 1:1 0000000A 0 0 1 2\n"
    (tmp_path / "tcp6").write_text(head + six)
    assert tcp_addresses(str(tmp_path)) == (("10.77.0.2", "::ffff:127.0.0.1"), ("10.77.0.3", "2001:db8::1"))
    assert tcp_addresses(str(tmp_path / "none")) == ((), ())
