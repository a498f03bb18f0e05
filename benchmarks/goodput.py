"""A month of interruptions in fast time: the goodput that comes of them beside the one that the plan predicts.

Costs are measured: a short real run, one of whose ranks is killed, says what a step, a checkpoint and a restart take.
Then attempts are simulated event by event with the product's own rule for the interval, writing the ledgers that its
engine would have left, and the product adds them up. Nothing of the plan's formula is in the simulation.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scaletrain_cli.plan.reliability.durability import best_interval_steps, expected_goodput
from scaletrain_cli.rundir.goodput import AttemptSpan, Goodput, Ledger, sum_goodput

RECIPE = str(Path(__file__).parents[1] / "recipes" / "llama-10m-cpu.yaml")
SHORT = ("training.steps=24", "training.schedule.warmup_steps=2", "evaluation.every=0", "checkpoint.every=4")
KILLED_AT = 14
LEDGER_SECONDS = 15.0  # how old the ledger of a killed attempt may be
NOISE = 0.1  # a step or a save takes up to so much more or less, relative


@dataclass(frozen=True)
class Costs:
    """Seconds: of a step, of a checkpoint until it is whole, of its part that training waits for, of a restart."""

    step: float
    save: float
    blocked: float
    restart: float


# Beside the demo: what a run of another size pays, so that every term of the plan is put to the test.
LARGER = {
    "slow to restart": Costs(step=4.0, save=60.0, blocked=1.0, restart=300.0),
    "written in place": Costs(step=10.0, save=40.0, blocked=40.0, restart=240.0),
}


def measured() -> Costs:
    """Return the costs of the demo's model on this machine."""
    with tempfile.TemporaryDirectory() as runs:
        sets = [word for setting in SHORT for word in ("--set", setting)]
        fault = {"SCALETRAIN_RUNS": runs, "SCALETRAIN_FAULT": f"sigkill rank=1 step={KILLED_AT} attempt=1"}
        environment, scaletrain = os.environ | fault, [sys.executable, "-m", "scaletrain_cli"]
        submitted = subprocess.check_output([*scaletrain, "submit", RECIPE, *sets, "--yes", "--json"], env=environment)
        run_id = str(json.loads(submitted)["run_id"])
        subprocess.run([*scaletrain, "status", run_id, "--wait", "900"], env=environment, check=True, stdout=sys.stderr)
        return costs_of(read(Path(runs) / run_id / "metrics.jsonl"), read(Path(runs) / run_id / "events.jsonl"))


def costs_of(metrics: list[dict[str, Any]], events: list[dict[str, Any]]) -> Costs:
    """Return the costs from the journals of a run whose first attempt was killed."""
    saves = [event for event in events if event["event"] == "checkpoint"]
    before = max(line["time"] for line in metrics if line["attempt"] == 1)
    after = min(line["time"] - line["step_seconds"] for line in metrics if line["attempt"] == 2)
    return Costs(
        step=statistics.median(line["step_seconds"] for line in metrics),
        save=statistics.median(event["seconds"] for event in saves),
        blocked=statistics.median(event["blocked_seconds"] for event in saves),
        restart=after - before,
    )


def read(path: Path) -> list[dict[str, Any]]:
    """The JSON lines of a file."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


# A vendor's published test: Llama 4 Scout on 64 H200, a failure every 2,700 to 4,500 seconds, 3,000 steps in 405
# minutes with TorchPass, 818 from checkpoints, 930 with torchft (clockwork.io, read 2026-11). The step without failures
# is not published: 8 s would be 400 minutes.
PUBLISHED = (2700.0, 4500.0)
PUBLISHED_STEPS, PUBLISHED_STEP = 3000, 8.0
# A rank's state: 12 bytes of each of 109e9 parameters, over 64 ranks.
_STATE = 12 * 109e9 / 64
_TO_HOST = 25e9  # bytes/s of a GPU to pinned host memory
_HASHED = 1.5e9  # bytes/s of SHA-256 on one core
_STORAGE = 10e9  # bytes/s of the shared storage for all ranks
_NETWORK = 5e9  # bytes/s that the 8 ranks of a node send by TCP
# From a killed process to the next step without its state: 4.8 s measured for a model of 10M on two nodes of a real
# Slurm (results/restart.md), and 25 s assumed for NCCL and the first step on GPUs. A lost node is noticed after 7.5 s
# and replaced by a spare one in 10.5 s (the same page).
_PROCESS, _NODE = 30.0, 43.0
_COPIED, _STORED = _STATE / _HASHED, 64 * _STATE / _STORAGE
_SENT = max(_COPIED, 8 * _STATE / _NETWORK)
AT_PUBLISHED_RATE = {
    "rank lost, copies in host memory": Costs(
        PUBLISHED_STEP, _STATE / _TO_HOST + _COPIED, _STATE / _TO_HOST, _PROCESS + _COPIED + _STATE / _TO_HOST
    ),
    "rank lost, checkpoints on storage": Costs(
        PUBLISHED_STEP, _STATE / _TO_HOST + _STORED, _STATE / _TO_HOST, _PROCESS + _STORED
    ),
    # Files are hashed while they are sent, at both ends.
    "node lost, copies on a second node": Costs(
        PUBLISHED_STEP,
        _STATE / _TO_HOST + _SENT,
        _STATE / _TO_HOST,
        _NODE + _SENT + _STATE / _TO_HOST,
    ),
    "node lost, checkpoints on storage": Costs(
        PUBLISHED_STEP, _STATE / _TO_HOST + _STORED, _STATE / _TO_HOST, _NODE + _STORED
    ),
}


def simulated(
    costs: Costs, between: float, horizon: float, seed: int, limits: tuple[float, float] | None = None
) -> Goodput:
    """``horizon`` seconds of attempts, interrupted every ``between`` seconds in the mean.

    Each begins at the checkpoint that was the newest whole one when the one before was killed. ``limits``: seconds
    between interruptions are drawn evenly from them, else as of independent ones.
    """
    chance = random.Random(seed)
    interval = best_interval_steps(costs.step, costs.save, costs.blocked, 1 / between)
    now, step, lost_steps, attempts = 0.0, 0, 0, list[AttemptSpan]()
    while now < horizon:
        apart = chance.uniform(*limits) if limits else chance.expovariate(1 / between)
        ends = min(now + apart, horizon)
        attempt = Attempt(chance, costs, interval, len(attempts) + 1, now, ends, step)
        reached, step = attempt.train()
        lost_steps += reached - step if ends < horizon else 0
        attempts.append(AttemptSpan(now, ends, attempt.ledger()))
        now = ends
    return sum_goodput(attempts, lost_steps)


class Attempt:
    """One attempt from its start to the moment it is killed."""

    def __init__(
        self, chance: random.Random, costs: Costs, interval: int, number: int, start: float, end: float, step: int
    ) -> None:
        self._chance, self._costs, self._interval = chance, costs, interval
        self._number, self._start, self._end, self._begun = number, start, end, step
        # The ledger as it was last written: when, seconds of steps and of saves by then, and steps.
        self._written: tuple[float, float, float, int] | None = None

    def train(self) -> tuple[int, int]:
        """The step that was reached, and that of the newest checkpoint that was whole by then."""
        now, step, whole = self._start + self._costs.restart, self._begun, self._begun
        trained = saved = 0.0
        writing: tuple[float, int] | None = None  # when it will be whole, and of which step
        self._note(now, 0.0, 0.0, step)
        while True:
            for _ in range(self._interval):
                seconds = self._noisy(self._costs.step)
                if now + seconds > self._end:
                    return step, self._whole_by(self._end, writing, whole)
                now, trained, step = now + seconds, trained + seconds, step + 1
                self._note(now, trained, saved, step)
            # At most one save is under way: the one before must be whole first.
            waits = max(0.0, writing[0] - now) if writing is not None else 0.0
            blocked = waits + self._noisy(self._costs.blocked)
            whole = self._whole_by(now + waits, writing, whole)
            writing = now + waits + max(blocked - waits, self._noisy(self._costs.save)), step
            if now + blocked > self._end:
                return step, self._whole_by(self._end, writing, whole)
            now, saved = now + blocked, saved + blocked
            self._note(now, trained, saved, step)

    def ledger(self) -> Ledger | None:
        """Return the ledger that the engine wrote last; None for a run that was killed before its first step."""
        if self._written is None:
            return None
        updated, trained, saved, steps = self._written
        seconds = {"restore": self._costs.restart, "step": trained, "save": saved}
        return Ledger(self._number, self._start, updated, False, steps, seconds)  # type: ignore[arg-type]

    def _note(self, now: float, trained: float, saved: float, step: int) -> None:
        if now <= self._end and (self._written is None or now - self._written[0] >= LEDGER_SECONDS):
            self._written = (now, trained, saved, step - self._begun)

    @staticmethod
    def _whole_by(moment: float, writing: tuple[float, int] | None, before: int) -> int:
        return writing[1] if writing is not None and writing[0] <= moment else before

    def _noisy(self, seconds: float) -> float:
        return seconds * (1 + NOISE * (2 * self._chance.random() - 1))


def row(name: str, costs: Costs, between: float, horizon: float, seeds: int) -> Iterator[str]:
    """Lines of the table."""
    interval = best_interval_steps(costs.step, costs.save, costs.blocked, 1 / between)
    predicted = expected_goodput(interval * costs.step, costs.save, costs.blocked, costs.restart, 1 / between)
    found = [simulated(costs, between, horizon, seed) for seed in range(seeds)]
    shares = [each.share for each in found]
    mean, spread = statistics.fmean(shares), statistics.stdev(shares)
    lost, saving, restoring = (
        statistics.fmean(vars(each)[part] / each.wall for each in found) for part in ("lost_work", "save", "restore")
    )
    yield (
        f"| {name} | {costs.step:.3g} | {costs.save:.3g} | {costs.blocked:.3g} | {costs.restart:.3g} | {interval} "
        f"| {mean:.2%} ± {spread:.2%} | {predicted:.2%} | {mean - predicted:+.2%} "
        f"| {lost:.2%} | {saving:.2%} | {restoring:.2%} |"
    )


def published_rate(seeds: int) -> Iterator[str]:
    """A table at the rate of failures of a published test of another system."""
    between, days = statistics.fmean(PUBLISHED), 30 * 86400.0
    yield "| 64 GPUs, 109B, a failure every 2,700 to 4,500 s | restart | steps between copies | goodput | 3,000 steps |"
    yield "|---|---:|---:|---:|---:|"
    for name, costs in AT_PUBLISHED_RATE.items():
        share = statistics.fmean(simulated(costs, between, days, seed, PUBLISHED).share for seed in range(seeds))
        interval = best_interval_steps(costs.step, costs.save, costs.blocked, 1 / between)
        minutes = PUBLISHED_STEPS * costs.step / share / 60
        yield f"| {name} | {costs.restart:.0f} s | {interval} | {share:.1%} | {minutes:.0f} min |"
    for name, minutes in {"TorchPass": 405, "its checkpoint-restart": 818, "its torchft": 930}.items():
        yield f"| {name}, as published | | | | {minutes} min |"


def lines(options: argparse.Namespace) -> Iterator[str]:
    """The whole answer in Markdown, as it comes."""
    if options.published_rate:
        yield from published_rate(options.seeds)
        return
    between, horizon = 3600 * options.hours, 86400 * options.days
    given = (options.step_seconds, options.save_seconds, options.blocked_seconds, options.restart_seconds)
    demo = Costs(*given) if None not in given else measured()
    yield (
        f"{options.days:g} days, an interruption every {options.hours:g} h (Poisson, without notice), "
        f"{options.seeds} seeds; mean ± standard deviation of a month. Costs in seconds."
    )
    yield ""
    yield (
        "| run | step | save | blocked | restart | steps between saves | simulated goodput | plan | difference "
        "| lost work | saving | restarting |"
    )
    yield "|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|"
    name = "the demo, measured" if None in given else "as given"
    for case in itertools.chain([(name, demo)], LARGER.items()):
        yield from row(*case, between, horizon, options.seeds)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hours", type=float, default=3.0, help="mean time between interruptions")
    parser.add_argument("--days", type=float, default=30.0)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--published-rate", action="store_true", help="the rate of failures of a published test")
    for part in ("step", "save", "blocked", "restart"):
        parser.add_argument(f"--{part}-seconds", type=float, help="instead of measuring; give all four")
    began = time.monotonic()
    for line in lines(parser.parse_args()):
        print(line, flush=True)
    print(f"\n{time.monotonic() - began:.0f} s", file=sys.stderr)


if __name__ == "__main__":
    main()
