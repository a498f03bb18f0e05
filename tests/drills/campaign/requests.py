"""Ranks get save requests and preemptions at random times, with enough time: each time the state is in a checkpoint."""

import random
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path

from tests.drills.campaign.forked_attempts import Attempt, ForkedRun, strays
from tests.drills.training_runs import drill_spec

_REQUESTS_PER_RUN = 4
_OPTIONS = {
    "stage 1, long evaluations": {"layout__zero_stage": 1, "evaluation__every": 4, "evaluation__batches": 20},
    "stage 2, four micro-batches": {"training__micro_batch_size": 1},
    "stage 3, slow saves": {"layout__zero_stage": 3, "checkpoint__every": 4},
    "stage 0, compiled": {"layout__zero_stage": 0, "training__compile": "true"},
}


@dataclass
class Requests:
    """The counts of the requests and of violated claims. ``unanswered``: no checkpoint of the step of the request."""

    requests: int = 0
    unanswered: list[str] = field(default_factory=list)
    different: list[str] = field(default_factory=list)


def request(dataset: Path, requests: int, chance: random.Random) -> Requests:
    """Send ``requests`` requests to several kinds of runs, which may be compiling, evaluating, saving or training."""
    found = Requests()
    for name, overrides in _OPTIONS.items():
        spec = drill_spec(dataset, **overrides)
        fault = "slow-save seconds=0.2" if "slow" in name else ""
        undisturbed = ForkedRun.create(spec)
        undisturbed.attempts_to_end(fault)
        took = undisturbed.seconds_of_first_attempt()
        wanted = found.requests + requests // len(_OPTIONS)
        while found.requests < wanted:
            run = ForkedRun.create(spec)
            for _ in range(min(_REQUESTS_PER_RUN, wanted - found.requests)):
                took = min(took, _ask_once(run, took, fault, found, chance))
            run.attempts_to_end(fault)
            found.different += [f"{name}: {path}" for path in strays(run, undisturbed)]
            print(f"  {name}: {found.requests} requests", flush=True)
    return found


def _ask_once(run: ForkedRun, took: float, fault: str, found: Requests, chance: random.Random) -> float:
    """Return the expected seconds of a run: later runs use what the first one compiled."""
    kind = chance.choice(("SIGTERM", "SIGUSR1", "both, twice", "save file"))
    before, asked = run.newest_step(), [False]

    def ask(attempt: Attempt) -> None:
        attempt.pids()
        attempt.over.wait(chance.uniform(0, took))
        if attempt.over.is_set():
            return
        asked[0] = True
        if kind == "save file":
            run.run.save_file.touch()
        elif kind == "both, twice":
            for rank in range(attempt.world_size):
                for number in (signal.SIGUSR1, signal.SIGTERM):
                    attempt.send(number, rank)
        else:
            attempt.send(signal.Signals[kind], chance.randrange(attempt.world_size))

    attempt = run.attempt(ask, fault)
    found.requests += asked[0]
    if not asked[0]:
        return time.time() - attempt.began_at
    left = [event for event in run.events("preempted", "finished") if event["time"] >= attempt.began_at]
    if kind == "save file":  # the run goes on to its end
        answered = attempt.exit_codes == [0] * attempt.world_size and not _is_left_over(run)
    elif left:
        answered = run.newest_step() == left[-1]["step"] and attempt.exit_codes is not None
    else:  # asked before its first step
        answered = run.newest_step() == before and attempt.exit_codes == [75] * attempt.world_size
    if not answered:
        found.unanswered.append(f"{kind}, {run.run.run_id} attempt {attempt.number}: {attempt.exit_codes}, {left}")
    return took


def _is_left_over(run: ForkedRun) -> bool:
    """Return True if a save file that is older than the last checkpoint still exists."""
    file = run.run.save_file
    return file.exists() and file.stat().st_mtime < run.events("checkpoint")[-1]["time"]
