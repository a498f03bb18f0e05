"""A run resumed with other sizes and ZeRO stages keeps the samples of each step and every value of its state."""

import contextlib
import io
import json
import os
import signal
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from scaletrain_cli.engine.data.batches import BatchReader, StepBatch
from scaletrain_cli.launch.replan import replan
from scaletrain_cli.rundir.checkpoints import checkpoint_path
from scaletrain_cli.rundir.journal import read_metrics
from scaletrain_cli.rundir.paths import RunDir
from scaletrain_cli.rundir.record import add_revision, read_record
from scaletrain_cli.worker.checkpoint_commit import open_attempt
from tests.drills.campaign.forked_attempts import Attempt, ForkedRun, be_rank
from tests.drills.training_runs import STEPS, drill_spec
from tests.engine.checkpoint.whole_state import save_again, whole_state
from tests.engine.ranks import on_ranks

# Ranks and stages one after the other, and the step up to which each trains.
CHAINS: dict[str, list[tuple[dict[str, int | str], int]]] = {
    "ranks 4, 2, 3, 4, 1": [({"cluster.gpus_per_node": ranks}, 8 * n) for n, ranks in enumerate((4, 2, 3, 4, 1), 1)],
    "context ranks 2, 1, 4": [({"layout.context_parallel": ranks}, 13 * n) for n, ranks in enumerate((2, 1, 4), 1)],
    "ZeRO-3 over 2 ranks, over 4 with 2 for a second copy, over 2": [
        ({"layout.zero_stage": 3, "layout.zero_shard_size": 2}, 13),
        ({"layout.zero_shard_size": "null", "layout.zero_secondary_shard_size": 2}, 26),
        ({"layout.zero_shard_size": 2, "layout.zero_secondary_shard_size": 1}, STEPS),
    ],
    "ZeRO 3, 1, 2": [({"layout.zero_stage": stage}, 13 * n) for n, stage in enumerate((3, 1, 2), 1)],
}
_BATCH = {"training__global_batch_size": 12, "training__micro_batch_size": 1, "cluster__gpus_per_node": 4}


@dataclass
class Elastic:
    """The results of the chains. ``loss``: relative difference of the final loss from the undisturbed run's."""

    reshards: int = 0
    values: int = 0
    loss: float = 0.0
    other_values: list[str] = field(default_factory=list)
    other_samples: list[str] = field(default_factory=list)


def reshard(dataset: Path, chains: Collection[str] = CHAINS.keys(), **overrides: Any) -> Elastic:
    """Run the chains and return the sum of their results."""
    found = Elastic()
    spec = drill_spec(dataset, **_BATCH, **overrides)
    undisturbed = ForkedRun.create(spec, noting_samples)
    undisturbed.attempts_to_end()
    for name, links in ((name, CHAINS[name]) for name in chains):
        run = ForkedRun.create(spec, noting_samples)
        for number, (settings, last) in enumerate(links):
            resize(run, [f"{key}={value}" for key, value in settings.items()])
            if number:
                _hold_states_together(run, name, found)
            if last < STEPS and number < len(links) - 1:
                run.attempt(lambda attempt, last=last: _leave_at(attempt, last))
        run.attempts_to_end()
        losses = [read_metrics(each.run)[-1]["loss"] for each in (run, undisturbed)]
        found.loss = max(found.loss, abs(losses[0] - losses[1]) / losses[1])
        ours, theirs = samples_by_step(run.run), samples_by_step(undisturbed.run)
        found.other_samples += [f"{name}: step {step}" for step in range(1, STEPS + 1) if ours[step] != theirs[step]]
        print(f"  {name}: final loss {losses[0]:.6f}, undisturbed {losses[1]:.6f}", flush=True)
    return found


def resize(run: ForkedRun, overrides: list[str]) -> None:
    """Plan the run again as `scaletrain resume` does, without a scheduler."""
    resize = replan(run.run, overrides)
    if resize.changes:
        add_revision(run.run, resize.before, resize.spec, resize.plan, overrides)


def _leave_at(attempt: Attempt, step: int) -> None:
    attempt.wait_for(lambda: any(line["step"] >= step for line in read_metrics(attempt.run)))
    attempt.send(signal.SIGTERM, 0)


def _hold_states_together(run: ForkedRun, name: str, found: Elastic) -> None:
    """Load the newest checkpoint in the layout that the run has now, save it again at once, and compare every value."""
    step, again = run.newest_step(), run.run.path / f"again-{len(run.run.attempts())}"
    number = run.run.new_attempt()
    open_attempt(run.run.checkpoints, number)
    with contextlib.redirect_stdout(io.StringIO()):
        on_ranks(read_record(run.run).spec.world_size, save_again, run.run.path, number, again, connected=False)
    before, after = (whole_state(checkpoint_path(folder, step)) for folder in (run.run.checkpoints, again))
    found.reshards += 1
    found.values += sum(values.numel() for values in before.values())
    found.other_values += [f"{name}: keys"] if before.keys() != after.keys() else []
    found.other_values += [
        f"{name}: {key}" for key, was in before.items() if not torch.equal(was, after.get(key, was[:0]))
    ]


def noting_samples(path: Path, number: int) -> int:
    """Run a rank that records the samples of each batch before it enters the engine."""
    read, rank = BatchReader.batch, int(os.environ["RANK"])
    notes = RunDir(path).attempt(number) / f"samples-{rank}.jsonl"

    def reading(reader: BatchReader, batch: int) -> StepBatch:
        found = read(reader, batch)
        with notes.open("a") as file:
            file.write(json.dumps([batch, found.samples.flatten().tolist()]) + "\n")
        return found

    BatchReader.batch = reading  # type: ignore[method-assign]
    return be_rank(path, number)


def samples_by_step(run: RunDir) -> dict[int, list[int]]:
    """Return the samples of each batch over all ranks, in order, from the last attempt that read it."""
    found: dict[int, list[int]] = {}
    for number in run.attempts():
        read: dict[int, list[int]] = {}
        for path in run.attempt(number).glob("samples-*.jsonl"):
            for batch, samples in map(json.loads, path.read_text().splitlines()):
                read.setdefault(batch, []).extend(samples)
        found |= {batch: _once_each(samples) for batch, samples in read.items()}
    return found


def _once_each(samples: list[int]) -> list[int]:
    """Return the samples in order, once each if all were read by equally many ranks, as those with parts of them do."""
    times = Counter(samples)
    return sorted(times if len(set(times.values())) == 1 else samples)
