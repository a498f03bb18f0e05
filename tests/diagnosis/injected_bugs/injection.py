"""Bugs that neither a spec nor a fault can have, injected into the forked ranks of a run, or around them. No tests."""

import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

from scaletrain_cli.rundir.journal import read_metrics
from scaletrain_cli.rundir.paths import RunDir
from tests.diagnosis.injected_bugs.agent import Collector, connect_rank, sample_host
from tests.drills.campaign.forked_attempts import Attempt
from tests.drills.campaign.forked_attempts import be_rank as be_healthy_rank

Strike = Callable[[Attempt], None]
NETWORK, CPU_GROUP = "SCALETRAIN_TEST_NETWORK", "SCALETRAIN_TEST_CPU_GROUP"
_CPU_V1, _CPU_V2 = Path("/sys/fs/cgroup/cpu"), Path("/sys/fs/cgroup")
_CLONE_NEWNET = 0x40000000


def be_rank(path: Path, number: int) -> int:
    """Be a rank of the engine with the bugs that the environment names."""
    from scaletrain_cli.engine.metrics import rank_measures
    from tests.diagnosis.injected_bugs.runs import INJECT

    rank_measures._CLOSE_SECONDS = 600.0  # a short run has written no norm of a layer before its end
    connect_rank(RunDir(path), number, int(os.environ["RANK"]))
    for name, amounts in _parsed(os.environ.get(INJECT, "")):
        if name in _IN_RANK:
            _IN_RANK[name](*amounts)
    if CPU_GROUP in os.environ:
        (Path(os.environ[CPU_GROUP]) / "cgroup.procs").write_text(str(os.getpid()))
        threading.Thread(target=sample_host, args=(RunDir(path), number, 0.2), daemon=True).start()
    return be_healthy_rank(path, number)


@contextlib.contextmanager
def around(injected: str) -> Iterator[Strike]:
    """Inject bugs around an attempt, and yield what happens while it runs: telemetry is read, and it may be struck."""
    with contextlib.ExitStack() as stack:
        outside = [(_AROUND[name], amounts) for name, amounts in _parsed(injected) if name in _AROUND]
        strikes = [stack.enter_context(bug(*amounts)) for bug, amounts in outside]

        def strike(attempt: Attempt) -> None:
            threads = [threading.Thread(target=each, args=(attempt,)) for each in strikes]
            for thread in threads:
                thread.start()
            Collector(attempt)()
            for thread in threads:
                thread.join()

        yield strike


def is_possible(injected: str) -> bool:
    """Return whether this machine and user can have the network or the control group that an injection needs."""
    needed = [_IS_THERE[name] for name, _ in _parsed(injected) if name in _IS_THERE]
    return not needed or (os.geteuid() == 0 and all(is_there() for is_there in needed))


def _parsed(injected: str) -> list[tuple[str, list[float]]]:
    words = [part.split() for part in injected.split(";") if part.strip()]
    return [(name, [float(amount) for amount in amounts]) for name, *amounts in words]


@contextlib.contextmanager
def _slow_link(megabits: float) -> Iterator[Strike]:
    """Put rank 1 into a network of its own, behind a link of ``megabits`` Mbit/s (tc, token bucket filter)."""
    name, ours, theirs = f"bug{os.getpid()}", f"ia{os.getpid()}", f"ib{os.getpid()}"
    subnet = f"10.77.{os.getpid() % 250}"
    limit = f"root tbf rate {megabits}mbit burst 32k latency 400ms"
    inside = f"ip -n {name}"
    commands = (
        *(f"ip netns add {name}", f"ip link add {ours} type veth peer name {theirs} netns {name}"),
        *(f"ip addr add {subnet}.1/24 dev {ours}", f"{inside} addr add {subnet}.2/24 dev {theirs}"),
        *(f"ip link set {ours} up", f"{inside} link set {theirs} up", f"{inside} link set lo up"),
        *(f"tc qdisc add dev {ours} {limit}", f"tc -n {name} qdisc add dev {theirs} {limit}"),
    )
    try:
        for command in commands:
            subprocess.run(command.split(), check=True, capture_output=True)
        with patch.dict(os.environ, {NETWORK: f"{name} {ours} {theirs} {subnet}.1"}):
            yield lambda attempt: None
    finally:
        subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)
        subprocess.run(["ip", "link", "del", ours], check=False, capture_output=True)


def join_network() -> None:
    """Use the link that ``_slow_link`` made: rank 1 from the other side."""
    name, ours, theirs, address = os.environ[NETWORK].split()
    os.environ["GLOO_SOCKET_IFNAME"] = theirs if os.environ["RANK"] == "1" else ours
    if os.environ["RANK"] == "1":
        os.environ["MASTER_ADDR"] = address
        with open(f"/run/netns/{name}", encoding="ascii") as namespace:
            if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), _CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), "setns")


@contextlib.contextmanager
def _cpu_limit(cores: float) -> Iterator[Strike]:
    """Limit the ranks to ``cores`` cores by a control group, of version 1 or 2."""
    parent = next(each for each in (_CPU_V1, _CPU_V2) if _has_cpu_control(each))
    folder, period = parent / f"bug{os.getpid()}", 100_000
    folder.mkdir()
    try:
        if parent == _CPU_V1:
            (folder / "cpu.cfs_period_us").write_text(str(period))
            (folder / "cpu.cfs_quota_us").write_text(str(int(cores * period)))
        else:
            (folder / "cpu.max").write_text(f"{int(cores * period)} {period}")
        with patch.dict(os.environ, {CPU_GROUP: str(folder)}):
            yield lambda attempt: None
    finally:
        _remove_group(folder)


def _remove_group(folder: Path) -> None:
    for _ in range(100):
        with contextlib.suppress(OSError):  # its processes have not ended yet
            folder.rmdir()
            return
        time.sleep(0.05)


def _has_cpu_control(parent: Path) -> bool:
    if parent == _CPU_V1:
        return (parent / "cpu.cfs_quota_us").exists() or (parent / "cpu.shares").exists()
    control = parent / "cgroup.subtree_control"
    return control.exists() and "cpu" in control.read_text().split()


@contextlib.contextmanager
def _stopped_in_part(share: float) -> Iterator[Strike]:
    """Stop rank 1 for a share of each 50 ms."""

    def strike(attempt: Attempt) -> None:
        attempt.pids()
        while not attempt.over.is_set():
            attempt.send(signal.SIGSTOP, 1)
            attempt.over.wait(0.05 * share)
            attempt.send(signal.SIGCONT, 1)
            attempt.over.wait(0.05 * (1 - share))

    yield strike


def yield_to_others(niceness: float) -> None:
    """Give rank 1 a lower priority than that of other processes on its cores (``_busy_cores``)."""
    if os.environ["RANK"] == "1":
        os.nice(int(niceness))


@contextlib.contextmanager
def _busy_cores(_niceness: float) -> Iterator[Strike]:
    """Keep every core busy with a process of the usual priority."""
    command = [sys.executable, "-c", "while True: pass"]
    busy = [subprocess.Popen(command) for _ in os.sched_getaffinity(0)]
    try:
        yield lambda attempt: None
    finally:
        for process in busy:
            process.kill()
            process.wait()


@contextlib.contextmanager
def _preempted_after(step: float) -> Iterator[Strike]:
    """Preempt the run after a step, which leaves the rest of its steps to another attempt."""

    def strike(attempt: Attempt) -> None:
        def reached() -> bool:
            lines = read_metrics(attempt.run)
            return bool(lines) and lines[-1]["step"] >= step

        if attempt.wait_for(reached):
            attempt.send(signal.SIGTERM, 0)

    yield strike


def labels_of_the_token_after_next() -> None:
    """Shift labels a second time, as when both the data and the model shift them."""
    import torch.nn.functional as F

    from scaletrain_cli.engine.data.rows import NOT_COUNTED

    _with_labels(lambda batch: F.pad(batch.labels[:, 1:], (0, 1), value=NOT_COUNTED))


def labels_of_the_same_token() -> None:
    """Leave labels unshifted: each token is to be predicted from itself."""
    _with_labels(lambda batch: batch.tokens)


def _with_labels(labels: Callable[[Any], Any]) -> None:
    from scaletrain_cli.engine.objectives.base import NextToken

    loss = NextToken.loss

    def changed(self: Any, model: Any, hidden: Any, batch: Any) -> Any:
        return loss(self, model, hidden, batch._replace(labels=labels(batch)))

    NextToken.loss = changed  # type: ignore[method-assign]


def validation_of_other_tokens() -> None:
    """Validate on other numbers for the same tokens, as on data that another tokenizer has prepared."""
    import torch

    from scaletrain_cli.engine.data.batches import BatchReader
    from scaletrain_cli.engine.data.rows import NOT_COUNTED

    in_order = BatchReader.in_order

    def others(tokens: Any) -> Any:
        return torch.where(tokens == NOT_COUNTED, tokens, (tokens * 5 + 1) % 384)

    def changed(self: Any, count: int) -> Iterator[Any]:
        for batch in in_order(self, count):
            yield batch._replace(tokens=others(batch.tokens), labels=others(batch.labels))

    BatchReader.in_order = changed  # type: ignore[method-assign, assignment]


def slow_reads(seconds: float) -> None:
    """Let each read of a batch take longer, as on a slow disk."""
    from scaletrain_cli.engine.data.batches import BatchReader

    batch = BatchReader.batch

    def slow(self: Any, number: int) -> Any:
        time.sleep(seconds)
        return batch(self, number)

    BatchReader.batch = slow  # type: ignore[method-assign]


def class_of_chance() -> None:
    """Give each image a class by chance."""
    import torch

    generator = torch.Generator().manual_seed(1)
    _with_classes(lambda targets: torch.randint(10, targets.shape, generator=generator))


def one_class() -> None:
    """Give all images the same class, as when a column of labels is not read."""
    import torch

    _with_classes(lambda targets: torch.full_like(targets, 3))


def _with_classes(change: Callable[[Any], Any]) -> None:
    from scaletrain_cli.engine.objectives.images import ImageObjective

    prepared = ImageObjective.prepared

    def changed(self: Any, batch: Any) -> Any:
        found = prepared(self, batch)
        return found._replace(targets=change(found.targets))

    ImageObjective.prepared = changed  # type: ignore[method-assign]


def dead_layer() -> None:
    """Let the second block begin with weights of nearly zero: hardly any gradient reaches them."""
    _with_model(lambda model: [weight.data.mul_(1e-8) for weight in list(model.blocks.values())[1].parameters()])


def exploding_layer(factor: float) -> None:
    """Let the MLP of the second block begin with weights that are ``factor`` times as large."""
    _with_model(lambda model: [weight.data.mul_(factor) for weight in list(model.blocks.values())[1].mlp.parameters()])


def _with_model(change: Callable[[Any], Any]) -> None:
    from scaletrain_cli.engine import compose

    materialize = compose.materialize

    def changed(*arguments: Any, **named: Any) -> Any:
        found = materialize(*arguments, **named)
        change(arguments[0])
        return found

    compose.materialize = changed


def large_gradients(factor: float) -> None:
    """Multiply the gradient that reaches the second block's MLP, so that it leaves the range of fp16."""
    _with_model(lambda model: list(model.blocks.values())[1].mlp.register_forward_hook(_times(factor)))


def _times(factor: float) -> Callable[..., None]:
    def hook(_module: Any, _inputs: Any, output: Any) -> None:
        if output.requires_grad:
            output.register_hook(lambda gradient: gradient * factor)

    return hook


def leak(size: float) -> None:
    """Let rank 1 keep ``size`` bytes of every step."""
    if os.environ["RANK"] != "1":
        return
    from scaletrain_cli.engine.trainer import Trainer

    step, kept = Trainer.optimizer_step, []

    def leaking(self: Any, number: int) -> None:
        kept.append(b"x" * int(size))
        step(self, number)

    Trainer.optimizer_step = leaking  # type: ignore[method-assign]


_IN_RANK: dict[str, Callable[..., None]] = {
    "labels-twice": labels_of_the_token_after_next,
    "labels-unshifted": labels_of_the_same_token,
    "slow-reads": slow_reads,
    "other-validation": validation_of_other_tokens,
    "niced": yield_to_others,
    "class-of-chance": class_of_chance,
    "one-class": one_class,
    "dead-layer": dead_layer,
    "exploding-layer": exploding_layer,
    "large-gradients": large_gradients,
    "leak": leak,
    "slow-link": lambda _megabits: join_network(),
}

_AROUND: dict[str, Callable[..., contextlib.AbstractContextManager[Strike]]] = {
    "stopped": _stopped_in_part,
    "niced": _busy_cores,
    "slow-link": _slow_link,
    "cpu-limit": _cpu_limit,
    "preempted": _preempted_after,
}
_IS_THERE: dict[str, Callable[[], bool]] = {
    "slow-link": lambda: shutil.which("ip") is not None and shutil.which("tc") is not None,
    "cpu-limit": lambda: _has_cpu_control(_CPU_V1) or _has_cpu_control(_CPU_V2),
}
