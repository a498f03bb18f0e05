"""Connect the ranks, and reach a consensus between them; the only collectives outside DeepSpeed and ``parallel``."""

import contextlib
import dataclasses
import json
import logging
import os
import socket
import struct
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from ipaddress import ip_address
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, Store, TCPStore
from torch.distributed import distributed_c10d

from scaletrain_cli.errors import ScaletrainError
from scaletrain_cli.reasons import Reason
from scaletrain_cli.rundir.journal import record_event
from scaletrain_cli.rundir.paths import RunDir
from scaletrain_cli.worker.loop_adapter import StepDecision
from scaletrain_cli.worker.run_environment import RENDEZVOUS_VARIABLE, RUN_DIR_VARIABLE

# Values that ranks send each other, as JSON: torch's object collectives unpickle what arrives, which can run code.


_PACKAGE = __name__.partition(".")[0]


def encode(item: object) -> bytes:
    """Return the value as UTF-8 JSON. Raises TypeError for what decode() could not restore."""
    return json.dumps(_plain(item), separators=(",", ":")).encode()


def decode(data: bytes) -> Any:
    """Return the value that was encoded. Raises ValueError for anything that encode() does not produce."""
    return _restored(json.loads(data))


def _plain(item: object) -> object:
    kind = type(item)
    if item is None or kind in (bool, int, float, str):
        return item
    if isinstance(item, Path):
        return {"path": str(item)}
    if kind in (list, tuple, set, frozenset):
        return {kind.__name__: [_plain(element) for element in item]}  # type: ignore[attr-defined]
    if isinstance(item, Mapping):
        return {"dict": [[_plain(key), _plain(value)] for key, value in item.items()]}
    if kind.__module__.partition(".")[0] == _PACKAGE and "<locals>" not in kind.__qualname__:
        name = f"{kind.__module__}:{kind.__qualname__}"
        if dataclasses.is_dataclass(item):
            fields = [getattr(item, field.name) for field in dataclasses.fields(item)]
            return {name: [_plain(value) for value in fields]}
        if isinstance(item, tuple):
            return {name: [_plain(value) for value in item]}
    raise TypeError(f"ranks do not send each other values of {kind}")


def _restored(data: object) -> Any:
    if not isinstance(data, dict):
        return data
    ((name, content),) = data.items()
    match name:
        case "path":
            return Path(content)
        case "list" | "tuple" | "set" | "frozenset":
            return {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}[name](map(_restored, content))
        case "dict":
            return {_restored(key): _restored(value) for key, value in content}
    # A dataclass or named tuple of a loaded module of this package; decoding a message imports nothing.
    module, _, path = name.partition(":")
    member: Any = sys.modules.get(module) if module.partition(".")[0] == _PACKAGE else None
    for part in path.split("."):
        member = getattr(member, part, None)
    named_tuple = isinstance(member, type) and issubclass(member, tuple) and hasattr(member, "_fields")
    if (
        not isinstance(member, type)
        or member.__module__ != module
        or not (dataclasses.is_dataclass(member) or named_tuple)
    ):
        raise ValueError(f"no value that ranks send each other: {name}")
    kind: type = member
    return kind(*map(_restored, content))


logger = logging.getLogger(__name__)
JOIN_SECONDS = 45.0  # the first node may start later than the others
_CONNECT_SECONDS = 5.0
T = TypeVar("T")
SLOTS = 24  # values per step, or more if there are more of them
_LEAST_INTEGER = -(1 << 63)


@dataclass(frozen=True)
class Ranks:
    """The ranks of this process, from the environment that the node agent sets."""

    rank: int
    world_size: int
    local_rank: int

    @classmethod
    def from_environment(cls) -> "Ranks":
        """Read RANK, WORLD_SIZE and LOCAL_RANK. Raises KeyError outside a node agent."""
        return cls(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), int(os.environ["LOCAL_RANK"]))


def connect(device: torch.device, timeout_seconds: float) -> None:
    """Join the process group: NCCL on GPUs, gloo on CPUs. A collective fails after ``timeout_seconds``."""
    timeout = timedelta(seconds=timeout_seconds)
    # DeepSpeed creates groups without a timeout, which get torch's defaults; these are module variables.
    distributed_c10d.default_pg_timeout = timeout
    setattr(distributed_c10d, "default_pg_nccl_timeout", timeout)  # noqa: B010 (not an exported name)
    ranks = Ranks.from_environment()
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        timeout=timeout,
        store=_open_store(ranks, timeout),
        rank=ranks.rank,
        world_size=ranks.world_size,
    )


def _open_store(ranks: Ranks, timeout: timedelta) -> Store:
    """Open the store by which the ranks meet. It has no authentication, and torch's own listens at all addresses.

    Ranks of one node meet in a file of a private folder. The others meet at the first node's address alone, if it is
    one of its interfaces: a name may mean the loopback there, and another address on the other nodes.
    """
    if file := os.environ.get(RENDEZVOUS_VARIABLE):
        if os.path.exists("/sys/class/net/lo"):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        return FileStore(file, ranks.world_size)
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    listening = None
    if ranks.rank == 0:
        with contextlib.suppress(OSError, ValueError):  # ValueError: several addresses
            ((family, *_, address),) = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            one_node = ranks.world_size == int(os.environ.get("LOCAL_WORLD_SIZE", "0"))
            if one_node or not ip_address(str(address[0])).is_loopback:
                listening = socket.create_server(address[:2], family=family, backlog=ranks.world_size)
    descriptor = None if listening is None else listening.detach()
    # torch tries again until the timeout, which is that of a hang; nobody could tell why the run does not begin.
    watch = threading.Timer(JOIN_SECONDS, _report_unreachable, (host, port))
    watch.daemon = True
    if ranks.rank > 0 and ranks.local_rank == 0:
        watch.start()
    try:
        return TCPStore(host, port, ranks.world_size, ranks.rank == 0, timeout, master_listen_fd=descriptor)
    finally:
        watch.cancel()


def _report_unreachable(host: str, port: int) -> None:
    """Record why this node does not reach the first one, if it does not."""
    try:
        socket.create_connection((host, port), timeout=_CONNECT_SECONDS).close()
    except OSError as error:
        details = {"node": socket.gethostname(), "address": host, "port": port, "error": error.strerror or str(error)}
        logger.error("node %(node)s cannot reach the first node at %(address)s port %(port)d: %(error)s", details)
        with contextlib.suppress(OSError, KeyError):
            attempt = int(os.environ["SCALETRAIN_ATTEMPT"])
            record_event(RunDir(Path(os.environ[RUN_DIR_VARIABLE])), "unreachable", attempt=attempt, **details)


def in_slots(values: Mapping[str, float]) -> list[float]:
    """Return the values of a step padded to the same length on every rank; a pipeline stage may have fewer values.

    Only losses of sources, which all ranks have or none, can make more values than there are slots.
    """
    return [*values.values(), *[0.0] * (SLOTS - len(values))]


def from_slots(own: Mapping[str, float], agreed: Sequence[float]) -> dict[str, float]:
    """Return rank 0's values under the names of this rank; values that every rank has come first."""
    return dict(zip(own, agreed, strict=False))


class RankConsensus:
    """Consensus of all ranks by an all-reduce on a gloo group of its own, so that it never waits for the GPU."""

    def __init__(self, timeout_seconds: float) -> None:
        self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_seconds))

    def reach(
        self, request: StepDecision, writing: bool, values: Sequence[float] = (), whole: Sequence[int] = ()
    ) -> tuple[StepDecision, bool, list[float], list[int]]:
        """Return the largest request of any rank, whether any is writing a checkpoint, rank 0's values, and the largest
        ``whole`` numbers of any rank.

        One all-reduce with MAX. Values travel as int64 bit patterns; other ranks contribute the smallest integer, so
        that a NaN arrives unchanged.
        """
        count = len(values)
        bits = struct.unpack(f"{count}q", struct.pack(f"{count}d", *values))
        mine = bits if dist.get_rank() == 0 else (_LEAST_INTEGER,) * count
        requests = torch.tensor([int(request), int(writing), *mine, *whole])
        dist.all_reduce(requests, op=dist.ReduceOp.MAX, group=self._group)
        largest, anyone_writing, *agreed = requests.tolist()
        return (
            StepDecision(largest),
            bool(anyone_writing),
            list(struct.unpack(f"{count}d", struct.pack(f"{count}q", *agreed[:count]))),
            agreed[count:],
        )

    @property
    def leads(self) -> bool:
        """True on rank 0."""
        return dist.get_rank() == 0

    def least(self, value: float) -> float:
        """Return the smallest value of any rank."""
        smallest = torch.tensor(value, dtype=torch.float64)
        dist.all_reduce(smallest, op=dist.ReduceOp.MIN, group=self._group)
        return float(smallest)

    def total(self, values: Sequence[float]) -> list[float]:
        """Return the sums of the ranks' values, the same on every rank."""
        sums = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(sums, group=self._group)
        return [float(total) for total in sums]

    def on_values(self, values: dict[str, float]) -> dict[str, float]:
        """Return rank 0's values under the same names; sums of other groups may differ in their last bits."""
        agreed = torch.tensor(in_slots(values), dtype=torch.float64)
        dist.broadcast(agreed, src=0, group=self._group)
        return from_slots(values, agreed.tolist())

    def gather(self, item: T) -> list[T] | None:
        """Return every rank's item in rank order on rank 0, None on other ranks."""
        data = encode(item)
        sizes = [int(size) for size in self.share(len(data))]
        mine = torch.zeros(max(sizes), dtype=torch.uint8)
        mine[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        parts = [torch.empty_like(mine) for _ in sizes] if dist.get_rank() == 0 else None
        dist.gather(mine, parts, dst=0, group=self._group)
        if parts is None:
            return None
        return [decode(part.numpy().tobytes()[:size]) for part, size in zip(parts, sizes, strict=True)]

    def share(self, value: float) -> list[float]:
        """Return every rank's value in rank order, on every rank."""
        mine = torch.tensor([value], dtype=torch.float64)
        values = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(values, mine, group=self._group)
        return [float(tensor) for tensor in values]

    def follow_rank_zero(self, item: T) -> T:
        """Return rank 0's item on every rank."""
        leads = self.leads
        data = encode(item) if leads else b""
        size = torch.tensor([len(data)])
        dist.broadcast(size, src=0, group=self._group)
        content = (
            torch.frombuffer(bytearray(data), dtype=torch.uint8) if leads else torch.empty(int(size), dtype=torch.uint8)
        )
        dist.broadcast(content, src=0, group=self._group)
        if leads:
            return item
        followed: T = decode(content.numpy().tobytes())
        return followed

    def from_rank_zero(self, work: Callable[[], T], raises: type[ScaletrainError] | None = None) -> T:
        """Return what ``work`` returns on rank 0 on every rank; the others do not call it. Collective.

        ``raises``: an error of this type is raised on every rank.
        """
        value: T | None = None
        problem: Reason | None = None
        if self.leads:
            try:
                value = work()
            except ScaletrainError as error:
                if raises is None or not isinstance(error, raises):
                    raise
                problem = error.reason
        value, problem = self.follow_rank_zero((value, problem))
        if problem is not None and raises is not None:
            raise raises(problem)
        return cast(T, value)

    def gather_everywhere(self, item: T) -> list[T]:
        """Return every rank's item in rank order, on every rank. Collective."""
        return self.follow_rank_zero(self.gather(item) or [])

    def exchange(
        self, outgoing: Sequence[tuple[int, int, torch.Tensor]], incoming: Sequence[tuple[int, int, torch.Tensor]]
    ) -> None:
        """Send tensors on the host to ranks, and fill those that ranks send here: (rank, tag, tensor), none empty.

        Not collective. Raises RuntimeError if a rank is lost.
        """
        works = [dist.irecv(values, rank, self._group, tag) for rank, tag, values in incoming]
        works += [dist.isend(values, rank, self._group, tag) for rank, tag, values in outgoing]
        for work in works:
            assert work is not None, "this rank is in the group"
            work.wait()

    def barrier(self) -> None:
        """Wait for every rank."""
        dist.barrier(group=self._group)
