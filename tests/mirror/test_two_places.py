"""If two clusters resume a run from its mirror at the same time, exactly one of them trains it."""

import contextlib
import os
import random
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from scaletrain_cli.data.sources import places
from scaletrain_cli.errors import ExitCode
from scaletrain_cli.launch.job import read_submission
from scaletrain_cli.mirror.claims import own_claim, read_claims
from scaletrain_cli.rundir.paths import RunDir
from tests.cli.command_line import scaletrain
from tests.data.remote.faults import FaultyProxy, Request
from tests.forked import Forked
from tests.mirror.conftest import MakeMirrored, MirroredRun, newest_valid

PLACES = ("second", "third")


@dataclass
class Turns:
    """Requests of the places to the store, of which one goes on at a time, drawn once each place waits or has ended."""

    draw: random.Random
    order: list[str] = field(default_factory=list)
    waiting: dict[str, list[threading.Event]] = field(default_factory=lambda: {name: [] for name in PLACES})
    changed: threading.Condition = field(default_factory=threading.Condition)

    def wait(self, name: str, request: Request) -> None:
        turn = threading.Event()
        with self.changed:
            self.waiting[name].append(turn)
            self.changed.notify()
        turn.wait()

    def give(self, processes: dict[str, Forked]) -> None:
        """Give turns until all processes have ended."""
        with self.changed:
            while running := [name for name, process in processes.items() if process.poll() is None]:
                if not all(self.waiting[name] for name in running):
                    self.changed.wait(0.02)  # also for one that ends
                    continue
                name = self.draw.choice(running)
                self.order.append(name)
                self.waiting[name].pop(0).set()
                self.changed.wait(0.02)


@contextlib.contextmanager
def at_once(s3: FaultyProxy, tmp_path: Path, turns: Turns) -> Iterator[dict[str, Forked]]:
    """Start a resume in each place; the requests of each go through a proxy of its own."""
    with contextlib.ExitStack() as opened:
        processes = {}
        for name in PLACES:
            proxy = opened.enter_context(FaultyProxy(s3.server))
            proxy.fault = lambda request, name=name: turns.wait(name, request)
            environment = os.environ | {"SCALETRAIN_RUNS": str(tmp_path / name), "AWS_ENDPOINT_URL": proxy.url}
            environment[places.TIMEOUT] = "600"  # each waits for the turns of the other
            words = ["resume", "moving", "--from-mirror", "s3://training-data/mirror", "--take-over", "--yes"]
            processes[name] = Forked("tests.mirror.resuming", words, environment)
        yield processes


def resume_in_both(mirrored: MirroredRun, s3: FaultyProxy, tmp_path: Path, seed: int) -> str:
    turns = Turns(random.Random(seed))
    with at_once(s3, tmp_path, turns) as processes:
        turns.give(processes)
        said = {name: (process.wait(), process.communicate()) for name, process in processes.items()}
    runs = {name: RunDir(tmp_path / name / "moving") for name in PLACES}
    winners = [name for name, run in runs.items() if run.path.exists() and read_submission(run) is not None]
    assert len(winners) == 1, said
    (loser,) = set(PLACES) - set(winners)
    assert (said[winners[0]][0], said[loser][0]) == (ExitCode.DONE, ExitCode.CRASHED), said
    assert "another place has just continued" in said[loser][1]
    assert not runs[loser].path.exists()
    claims = read_claims(mirrored.store)
    assert len(claims) == 2
    assert claims[-1] == own_claim(runs[winners[0]])
    assert newest_valid(runs[winners[0]]) == (20, [])
    return f"{winners[0]} of {len(turns.order)} requests, of which {turns.order.count('second')} of second"


@pytest.fixture
def mirrored(s3: FaultyProxy, make_mirrored: MakeMirrored) -> MirroredRun:
    made = make_mirrored()
    made.mirror_of(10, 20).look(is_last=True)
    return made


@pytest.mark.long
@pytest.mark.parametrize("seed", range(20))
def test_of_two_places_that_are_told_to_continue_one_trains(
    mirrored: MirroredRun, s3: FaultyProxy, tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    print(resume_in_both(mirrored, s3, tmp_path, seed))
    for name in PLACES:  # the other one is refused as long as the first may be active
        if not (tmp_path / name / "moving").exists():
            monkeypatch.setenv("SCALETRAIN_RUNS", str(tmp_path / name))
            refused = scaletrain("resume", "moving", "--from-mirror", mirrored.to, "--yes", code=ExitCode.USAGE)
            assert "--take-over" in refused.err
