import os
import random
from pathlib import Path

import pytest

from scaletrain_cli.mirror.checkpoints import download_checkpoint, read_mirrored
from scaletrain_cli.mirror.history import restore_history
from scaletrain_cli.mirror.restore import find_in_mirror
from scaletrain_cli.rundir.checkpoints import Checkpoint
from tests.data.remote.faults import FaultyProxy, Request
from tests.forked import Forked
from tests.mirror.conftest import MakeMirrored, MirroredRun

_SIZES = (40_000, 6_000, 90_000)
_REQUESTS = 50  # of a pass, about; kills after the last one are passes that end


def start(made: MirroredRun) -> Forked:
    return Forked("tests.mirror.mirroring", [str(made.run.path)], os.environ)


def restored(made: MirroredRun, folder: Path) -> tuple[int, dict[str, bytes]] | None:
    """Return the step and the files that a resume from the mirror would have now; None before the first checkpoint."""
    if not made.steps():
        return None
    found = find_in_mirror(made.to, made.run.run_id)
    restore_history(found.store, found.index, folder / "history")
    assert f'"event":"checkpoint","step":{found.folders[0].step}' in (folder / "history" / "events.jsonl").read_text()
    checkpoint = read_mirrored(found.store, found.folders[0])
    assert isinstance(checkpoint, Checkpoint), checkpoint
    target = folder / "checkpoint"
    download_checkpoint(found.store, found.folders[0], checkpoint, target)
    return checkpoint.step, {name: (target / name).read_bytes() for name in checkpoint.files}


def kill_often(made: MirroredRun, s3: FaultyProxy, tmp_path: Path, most: int, seed: int) -> str:
    """Kill the process at ``most`` random requests, and compare what can be restored after each kill."""
    draw, saved = random.Random(seed), dict[int, dict[str, bytes]]()
    kills, finished, newest, point = 0, 0, 0, 0
    while kills < most:
        point += 1
        if point == 1 or draw.random() < 0.7:  # else the same checkpoint again
            checkpoint = made.commit(10 * point, _SIZES)
            saved[checkpoint.step] = {name: (checkpoint.path / name).read_bytes() for name in checkpoint.files}
        for old in made.here()[:-2]:
            made.remove(old)
        at = len(s3.seen) + draw.randint(1, _REQUESTS)
        process = start(made)

        def kill(request: Request, at: int = at, process: Forked = process) -> str | None:
            if request.number == at:
                process.kill()
                return draw.choice([None, "reset"])  # the server has the request, or its answer is lost
            return None

        s3.fault = kill
        code = process.wait()
        s3.fault = lambda request: None
        kills, finished = kills + (code == -9), finished + (code == 0)
        assert code in (0, -9)
        found = restored(made, tmp_path / f"restored-{point}")
        if code == 0:
            assert found[0] == made.here()[-1]
        if found is not None:
            step, files = found
            assert files == saved[step], f"wrong bytes of step {step} after point {point}"
            assert step >= newest, "a kill lost a mirrored checkpoint"
            newest = step
    assert start(made).wait() == 0
    found = restored(made, tmp_path / "restored")
    assert found[0] == made.here()[-1]
    return f"{kills} kills, {finished} passes that ended, newest mirrored step {newest} of {10 * point}"


def test_a_killed_process_leaves_whole_checkpoints_only(
    s3: FaultyProxy, make_mirrored: MakeMirrored, tmp_path: Path
) -> None:
    kill_often(make_mirrored(), s3, tmp_path, most=3, seed=2)


@pytest.mark.long
def test_sixty_kills_give_no_wrong_restore(s3: FaultyProxy, make_mirrored: MakeMirrored, tmp_path: Path) -> None:
    print(kill_often(make_mirrored(), s3, tmp_path, most=60, seed=1))
