"""Checkpoints damaged at random, and disks that are full at every write: a damaged checkpoint is never restored."""

import random
import shutil
from dataclasses import dataclass, field
from pathlib import Path

import torch

from scaletrain_cli.rundir.checkpoints import MANIFEST, latest_valid, list_checkpoints
from scaletrain_cli.rundir.paths import RunDir
from tests.drills.campaign.forked_attempts import ForkedRun, strays
from tests.drills.training_runs import drill_spec
from tests.engine.checkpoint.whole_state import whole_state

_KINDS = ("truncate", "flip", "delete")


@dataclass
class Damages:
    """The counts of the damaged checkpoints and of violated claims."""

    damages: int = 0
    full_disks: int = 0
    wrong_restores: list[str] = field(default_factory=list)
    unreported: list[str] = field(default_factory=list)
    different: list[str] = field(default_factory=list)


def damage_files(finished: RunDir, damages: int, chance: random.Random) -> Damages:
    """Damage files of copies of a run's checkpoints ``damages`` times at random."""
    found = Damages()
    committed = list_checkpoints(finished.checkpoints)
    states = {checkpoint.step: whole_state(checkpoint.path) for checkpoint in committed}
    while found.damages < damages:
        _damage_once(finished.checkpoints, states, found, chance)
    print(f"  {found.damages} damages", flush=True)
    return found


def fill_disks(dataset: Path, found: Damages) -> None:
    """Run with a disk that is full at each write of a save in turn, on each rank."""
    small = drill_spec(dataset, model__num_hidden_layers=1, checkpoint__every=2)
    undisturbed = ForkedRun.create(small)
    undisturbed.attempts_to_end()
    for rank in range(small.world_size):
        _fill_up(ForkedRun.create(small), undisturbed, rank, found)
        print(f"  {found.full_disks} full disks", flush=True)


def _damage_once(
    folder: Path, states: dict[int, dict[str, torch.Tensor]], found: Damages, chance: random.Random
) -> None:
    """Damage one or two of the latest checkpoints; then load the one that is used instead, and compare every value."""
    hurt = folder.with_name("damaged")
    shutil.rmtree(hurt, ignore_errors=True)
    shutil.copytree(folder, hurt)
    checkpoints = list_checkpoints(hurt)
    doomed = checkpoints[-chance.choice((1, 1, 2)) :]
    names = []
    for checkpoint in doomed:
        name = chance.choice([*checkpoint.files, MANIFEST])
        names.append(f"{checkpoint.path.name}/{name}")
        _hurt(checkpoint.path / name, chance.choice(_KINDS), chance)
    taken, passed_over = latest_valid(hurt)
    found.damages += 1
    valid = [checkpoint.step for checkpoint in checkpoints if checkpoint not in doomed]
    if taken is None or taken.step != valid[-1]:
        found.wrong_restores.append(f"{names}: took {taken}")
        return
    restored = whole_state(taken.path)
    if any(not torch.equal(restored[key], value) for key, value in states[taken.step].items()):
        found.wrong_restores.append(f"{names}: another state of step {taken.step}")
    found.unreported += [name for name in names if not any(line.startswith(name) for line in passed_over)]


def _hurt(path: Path, kind: str, chance: random.Random) -> None:
    data = bytearray(path.read_bytes())
    if kind == "delete":
        path.unlink()
    elif kind == "truncate":
        path.write_bytes(data[: chance.randrange(len(data))])
    else:
        # In a manifest a bit of white space may flip and leave the same content: that is no damage.
        places = [i for i, byte in enumerate(data) if path.name != MANIFEST or chr(byte).isalnum()]
        data[chance.choice(places)] ^= 1 << chance.randrange(8)
        path.write_bytes(data)


def _fill_up(run: ForkedRun, undisturbed: ForkedRun, rank: int, found: Damages) -> None:
    """Make the disk full at the first, second, ... write of this rank, until a save succeeds."""
    write = 0
    while True:
        write += 1
        committed = run.newest_step()
        attempt = run.attempt(fault=f"disk-full rank={rank} write={write}")
        evidence = run.run.attempt(attempt.number) / "failures" / f"rank-{rank:05d}.json"
        if run.newest_step() > committed:
            break
        found.full_disks += 1
        if "No space left on device" not in (evidence.read_text() if evidence.exists() else ""):
            found.unreported.append(f"disk full at write {write} of rank {rank}")
        if run.newest_step() != committed:
            found.wrong_restores.append(f"disk full at write {write} of rank {rank}: committed all the same")
    run.attempts_to_end()
    found.different += [f"after full disks: {path}" for path in strays(run, undisturbed)]
