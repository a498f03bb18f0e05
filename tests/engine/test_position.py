"""The position of a rank in real collectives of gloo: what it waits in, and which collectives it has entered."""

import pickle
import threading
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import deepspeed
import pytest
import torch
import torch.distributed as dist
from torch._C import _distributed_c10d

import scaletrain_cli.engine
from scaletrain_cli.engine.metrics.step_split import CollectiveWaits
from scaletrain_cli.engine.process_group import RankConsensus
from scaletrain_cli.worker import position
from scaletrain_cli.worker.loop_adapter import StepDecision
from scaletrain_cli.worker.position import Position, own_position, purpose_of
from tests.engine.ranks import on_ranks
from tests.waiting import wait_until


def positions(rank: int) -> list[Position]:
    """Return where this rank was when rank 0 waited for rank 1: in an all-reduce, a receive, and one it counts."""
    consensus = RankConsensus(600.0)
    store = dist.distributed_c10d._get_default_store()
    store.set_timeout(timedelta(seconds=600))
    found: list[Position] = []

    def look(name: str) -> None:
        def waits_in_it() -> bool:
            # A collective counts as in flight for a moment after it is over, and a call before torch has numbered it.
            here = own_position()
            kind = "receive" if name == "receive" else "all-reduce"
            is_it = [(wait.kind, wait.number is None) for wait in here.waits] == [(kind, name == "receive")]
            if is_it := is_it and (name != "counted" or here.function.startswith("timed_wait (")):
                found.append(here)
            return is_it

        wait_until(waits_in_it, f"rank 0 waits in the {name}")
        store.set(name, b"")

    for name in ("all-reduce", "receive", "counted"):
        watching = threading.Thread(target=look, args=(name,))
        if rank == 0:
            watching.start()
        else:
            store.wait([name])
            found.append(own_position_of_another_thread())
        if name == "all-reduce":
            consensus.reach(StepDecision.CONTINUE, writing=False)
        elif name == "counted":
            with CollectiveWaits():
                gradient_norm(consensus)
        elif rank == 0:
            dist.recv(torch.empty(1), src=1)
        else:
            dist.send(torch.ones(1), dst=0)
        if rank == 0:
            watching.join()
    return found


def gradient_norm(consensus: RankConsensus) -> None:
    """Reach a consensus in a function with the name of one whose purpose is known."""
    consensus.reach(StepDecision.CONTINUE, writing=False)


def own_position_of_another_thread() -> Position:
    """Return the position of the main thread, which waits for the thread that looks."""
    found: list[Position] = []
    looking = threading.Thread(target=lambda: found.append(own_position()))
    looking.start()
    looking.join()
    return found[0]


def of_this_rank() -> list[Position]:
    return positions(dist.get_rank())


def test_a_rank_knows_the_collective_that_it_waits_in_and_those_that_it_has_entered() -> None:
    (in_all_reduce, in_receive, counted), (before, after, _) = on_ranks(2, of_this_rank)
    (wait,) = in_all_reduce.waits
    assert (wait.kind, wait.ranks) == ("all-reduce", [0, 1])
    assert wait.purpose == "in positions (test_position.py:" + wait.purpose.rpartition(":")[2]
    assert wait.number is not None
    assert before.waits == ()
    assert before.entered.get(wait.group, 0) < wait.number == after.entered[wait.group]
    (receive,) = in_receive.waits
    assert (receive.kind, receive.ranks, receive.number) == ("receive", [1], None)
    assert before.function.startswith("wait (") or "threading" in before.function
    (wait,) = counted.waits
    assert wait.purpose == "of the gradient norm", "what counts the wait does not hide its caller"


def test_a_receive_of_nccl_waits_for_its_peer_and_is_no_collective_of_the_group(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    frames = [{"name": "_exec_recv_activations", "filename": "deepspeed/runtime/pipe/engine.py", "line": 1}]
    entry = {"process_group": ("7", ""), "retired": False, "state": "started", "time_created_ns": 2_000_000_000}
    entries = [
        {**entry, "record_id": 0, "collective_seq_id": 4, "profiling_name": "nccl:all_reduce", "state": "completed"},
        {**entry, "record_id": 1, "collective_seq_id": 5, "profiling_name": "nccl:recv 1<-0"},
        {**entry, "record_id": 2, "collective_seq_id": 5, "profiling_name": "nccl:_reduce_scatter_base"},
    ]

    def dump(collectives: bool, stacks: bool, active: bool) -> bytes:
        return pickle.dumps({"entries": [each | ({"frames": frames} if stacks else {}) for each in entries]})

    monkeypatch.setattr(_distributed_c10d, "_dump_nccl_trace", dump, raising=False)
    monkeypatch.setattr(_distributed_c10d, "_dump_fr_trace", lambda *_: pickle.dumps({"entries": []}))
    c10d = SimpleNamespace(get_process_group_ranks=lambda group: group, _world=SimpleNamespace(pg_names={(6, 8): "7"}))
    waits, entered = position._recorded(c10d, [])
    receive, scatter = waits
    assert (receive.kind, receive.ranks, receive.number) == ("receive", [6], None)
    assert receive.purpose == "of activations between pipeline stages"
    assert (scatter.kind, scatter.ranks, scatter.number, scatter.since) == ("reduce-scatter", [6, 8], 5, 2.0)
    assert entered == {"7": 5}


def test_every_purpose_is_that_of_a_function_of_deepspeed_or_the_engine() -> None:
    roots = [Path(deepspeed.__file__).parent / "runtime", Path(scaletrain_cli.engine.__file__).parent]
    files = {path: path.read_text(encoding="utf-8") for root in roots for path in root.rglob("*.py")}
    for key in position._PURPOSES:
        file, _, name = key.rpartition(":") if not key.endswith(".py") else (key, "", "")
        texts = [text for path, text in files.items() if file in ("", path.name)]
        assert any(f"def {name}" in text for text in texts), key


def test_the_innermost_function_that_is_known_says_what_a_collective_is_for() -> None:
    stack = [
        ("all_reduce", "torch/distributed/distributed_c10d.py", 1),
        ("allreduce_bucket", "deepspeed/runtime/zero/stage_1_and_2.py", 2),
        ("average_tensor", "deepspeed/runtime/zero/stage_1_and_2.py", 3),
        ("train", "engine/step.py", 4),
    ]
    assert purpose_of(stack) == "of gradients"
    assert purpose_of(stack[:2]) == "in allreduce_bucket (stage_1_and_2.py:2)"
    assert purpose_of([("share", "engine/process_group.py", 1), ("agree", "engine/step_sync.py", 2)]) == (
        "at the end of the step"
    )
    assert purpose_of([("share", "engine/process_group.py", 1), ("_compare", "engine/metrics/data_waits.py", 2)]) == (
        "of metrics"
    )
