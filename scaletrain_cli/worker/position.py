"""The position of a rank that hangs: the collectives that it waits in, and the last one of each group that it entered.

They come from torch's flight recorder, which records collectives of NCCL and gloo, and from the frames of the main
thread, which show a blocking send or receive of gloo, too. The agent asks for a position by the signal for the stacks
(heartbeat.py). The flight recorder and torch's groups have no public interface: without them a position has less.
"""

import contextlib
import dataclasses
import json
import os
import pickle
import re
import sys
import threading
import time
import traceback
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

Function = tuple[str, str, int]  # name, file and line
_POLL_SECONDS = 0.2
_MOST_WAITS = 8
# Functions of torch.distributed in which a rank of gloo waits.
_BLOCKING = frozenset(
    "all_reduce all_gather all_gather_into_tensor reduce reduce_scatter reduce_scatter_tensor broadcast barrier gather "
    "scatter all_to_all all_to_all_single send recv".split()
)
_VARIANT = re.compile(r"^_|_(into_tensor|tensor|single|base|coalesced)$")
_PEER = re.compile(r"(?:->|<-)(\d+)$")  # the rank in the group, of "nccl:send 0->1" and "nccl:recv 1<-0"
_PEERS = {"send": "dst", "recv": "src"}
# What a collective is for, by a function on the stack of its caller ("file:function", "function" or "file"): the
# innermost one that is listed. Of DeepSpeed, then of the engine.
_PURPOSES = {
    "average_tensor": "of gradients",
    "allreduce_gradients": "of gradients",
    "__avg_scatter_grads": "of gradients",
    "_exec_reduce_grads": "of gradients",
    "_exec_reduce_tied_grads": "of gradients of tied weights",
    "all_gather_dp_groups": "of parameters",
    "_all_gather": "of parameters",
    "all_gather_coalesced": "of parameters",
    "get_grad_norm_direct": "of the gradient norm",
    "gradient_norm": "of the gradient norm",
    "has_overflow": "of the overflow check",
    "_exec_send_activations": "of activations between pipeline stages",
    "_exec_recv_activations": "of activations between pipeline stages",
    "_exec_send_grads": "of gradients between pipeline stages",
    "_exec_recv_grads": "of gradients between pipeline stages",
    "_aggregate_total_loss": "of the loss",
    "eval_batch": "of an evaluation",
    "validation_loss": "of an evaluation",
    "_mean_of_step": "of the loss",
    "mesh.py": "of activations between the ranks of a layer",
    "tensor.py": "of activations between the ranks of a layer",
    "expert.py": "of tokens between experts",
    "batch_norm.py": "of batch statistics",
    "_begin_commit": "of the files of a checkpoint",
    "checkpointing.py:finish": "at the end of a save",
    "seconds_to_save": "of the time that is left to save",
    "rank_measures.py": "of metrics",
    "data_waits.py": "of metrics",
    "stragglers.py": "of step times",
    "resume_point.py": "of the checkpoint to resume from",
    "preflight.py": "of the preflight",
    "rollback.py": "of a rollback",
    "step_sync.py:agree": "at the end of the step",
}


@dataclass(frozen=True)
class Collective:
    """A collective, or a send or receive, that a rank has entered and not left.

    ``purpose`` follows the kind in a sentence. ``spans``: the global ranks that take part, as first, last and step of
    each span: the record of a node with thousands of ranks in a group must stay small. ``number`` of the group's
    collectives, the same on all of them, entered at ``since`` (Unix seconds); without a number, as for a receive of
    gloo, the rank waits for all of the others.
    """

    kind: str
    purpose: str
    spans: tuple[tuple[int, ...], ...]
    group: str = ""
    number: int | None = None
    since: float = 0.0

    @property
    def ranks(self) -> list[int]:
        """Return the global ranks that take part, in ascending order."""
        return [rank for first, last, step in self.spans for rank in range(first, last + 1, step or 1)]


@dataclass(frozen=True)
class Position:
    """Where a rank is. ``function``: the one that its main thread executes; ``layer``: the module that it computes.

    ``layer`` is empty outside of a model. ``entered``: the number of the last collective that it entered, by group.
    """

    function: str
    layer: str = ""
    waits: tuple[Collective, ...] = ()
    entered: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class RankView:
    """One rank of a node whose ranks hang, as its agent sees it: its last beat, and where it is.

    ``state``: of its process, as in /proc; ``responded``: it wrote its stacks. ``position``: None if no thread of
    Python ran in it, or if it is a program that does not use this package.
    """

    rank: int
    turn: int
    step: int
    phase: str
    part: int
    silent_seconds: float
    state: str
    responded: bool
    position: Position | None = None


def spans_of(ranks: Iterable[int]) -> tuple[tuple[int, ...], ...]:
    """Return ranks as first, last and step of each span."""
    spans: list[tuple[int, int, int]] = []
    for rank in sorted(ranks):
        first, last, step = spans.pop() if spans else (rank, rank, 0)
        spans += [(first, rank, rank - last)] if step in (0, rank - last) else [(first, last, step), (rank, rank, 0)]
    return tuple(spans)


def purpose_of(functions: Sequence[Function]) -> str:
    """Return what a collective is for; ``functions``: the stack of its caller, innermost first."""
    other = ""
    for name, path, line in functions:
        file = os.path.basename(path)
        for key in (f"{file}:{name}", name, file):
            if key in _PURPOSES:
                return _PURPOSES[key]
        if not other and not any(part in path for part in ("torch/", "deepspeed/comm/", "process_group.py")):
            other = f"in {name} ({file}:{line})"
    return other


def own_position() -> Position:
    """Return the position of the main thread of this process. Call from another thread."""
    frames = [frame for frame, _ in traceback.walk_stack(sys._current_frames()[threading.main_thread().ident or 0])]
    stack = [(frame.f_code.co_name, frame.f_code.co_filename, frame.f_lineno) for frame in frames]
    name, path, line = stack[0]
    position = Position(f"{name} ({'/'.join(path.split('/')[-3:])}:{line})")
    c10d: Any = sys.modules.get("torch.distributed.distributed_c10d")
    with contextlib.suppress(Exception):  # private interfaces of torch, and locals of any code
        if c10d is not None and c10d.is_initialized():
            position = dataclasses.replace(position, layer=_layer(frames))
            waits, entered = _recorded(c10d, stack)
            if (blocking := _blocking(c10d, frames, stack)) is not None:
                # gloo does not record a receive, and records a reduce-scatter as the all-reduce that it uses for it.
                if waits and len(blocking.ranks) > 1:
                    blocking = dataclasses.replace(waits.pop(), kind=blocking.kind)
                waits.append(blocking)
            position = dataclasses.replace(position, waits=tuple(waits[-_MOST_WAITS:]), entered=entered)
    return position


def _recorded(c10d: Any, stack: Sequence[Function]) -> tuple[list[Collective], dict[str, int]]:
    """Return the collectives in flight by torch's flight recorder, and the last number of each group.

    ``stack``: of the main thread, which is inside its collective of gloo. With NCCL it runs ahead, and the recorder has
    the stack; it finds those of all 2,000 entries of gloo in 6 seconds, as it does not learn which are over.
    """
    import torch._C._distributed_c10d as recorders

    ranks = {name: tuple(c10d.get_process_group_ranks(group)) for group, name in c10d._world.pg_names.items()}
    waits: list[Collective] = []
    entered: dict[str, int] = {}
    for recorder in ("_dump_nccl_trace", "_dump_fr_trace"):
        if (dump := getattr(recorders, recorder, None)) is None:
            continue
        active = pickle.loads(dump(True, True, True))["entries"] if "nccl" in recorder else ()
        stacks = {call["record_id"]: [(f["name"], f["filename"], f["line"]) for f in call["frames"]] for call in active}
        for entry in pickle.loads(dump(True, False, False))["entries"]:
            group, number = entry["process_group"][0], entry["collective_seq_id"]
            members, peer = ranks.get(group, ()), _PEER.search(entry["profiling_name"])
            if peer is not None:  # a send or receive of NCCL
                number, members = None, members[int(peer[1]) :][:1]
            else:
                entered[group] = max(entered.get(group, 0), number)
            if not entry["retired"] and entry["state"] != "completed":
                kind = _kind(entry["profiling_name"].rpartition(":")[2].split()[0])
                purpose = purpose_of(stacks.get(entry["record_id"], stack))
                since = entry["time_created_ns"] / 1e9
                waits.append(Collective(kind, purpose, spans_of(members), group, number, since))
    return waits, entered


def _blocking(c10d: Any, frames: Sequence[FrameType], stack: Sequence[Function]) -> Collective | None:
    """Return the function of torch.distributed in which the main thread is, if any."""
    for index, (name, path, _) in enumerate(stack):
        if name in _BLOCKING and path == c10d.__file__:
            given = frames[index].f_locals
            members = c10d.get_process_group_ranks(given.get("group") or c10d.group.WORLD)
            peer = given.get(_PEERS.get(name, ""))
            ranks = tuple(members) if name not in _PEERS else (peer,) if peer is not None else ()
            return Collective(_kind(name), purpose_of(stack[index + 1 :]), spans_of(ranks))
    return None


def _kind(name: str) -> str:
    """Return the collective of a function of torch.distributed or an entry of the flight recorder."""
    return {"recv": "receive"}.get(name) or _VARIANT.sub("", name).replace("_", "-")


def _layer(frames: Sequence[FrameType]) -> str:
    """Return the name of the innermost module whose method is on the stack; empty if there is none."""
    import torch

    modules = [own for frame in frames if isinstance(own := frame.f_locals.get("self"), torch.nn.Module)]
    if not modules:
        return ""
    name = next((name for name, module in modules[-1].named_modules() if module is modules[0]), "")
    return name.removeprefix("module.")  # of DeepSpeed's engine, which is a module, too


def answer_requests(descriptor: int) -> None:
    """Write the position as a line of JSON after each dump of stacks to ``descriptor``, from a thread."""

    def answer() -> None:
        size = os.fstat(descriptor).st_size
        while True:
            time.sleep(_POLL_SECONDS)
            if os.fstat(descriptor).st_size != size:
                os.write(descriptor, b"\n%s\n" % json.dumps(dataclasses.asdict(own_position())).encode())
                size = os.fstat(descriptor).st_size

    threading.Thread(target=answer, name="position", daemon=True).start()
