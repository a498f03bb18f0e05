"""Runs with a mirror: checkpoints of random bytes, committed as training commits them, and a real S3 server."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest

from scaletrain_cli.launch.submit import create_run
from scaletrain_cli.mirror.checkpoints import MirroredFolder, in_line, list_folders
from scaletrain_cli.mirror.claims import Claim, own_claim, read_claims
from scaletrain_cli.mirror.object_store import open_store
from scaletrain_cli.mirror.stores import MirrorStore
from scaletrain_cli.mirror.sync import Mirror
from scaletrain_cli.rundir.checkpoints import (
    Checkpoint,
    checkpoint_path,
    latest_valid,
    list_checkpoints,
    read_checkpoint,
)
from scaletrain_cli.rundir.journal import append_line, read_events, record_event
from scaletrain_cli.rundir.paths import RunDir
from scaletrain_cli.rundir.record import RunRecord
from scaletrain_cli.worker.checkpoint_commit import (
    HashingWriter,
    commit_checkpoint,
    open_attempt,
    remove_checkpoint,
    stage_checkpoint,
)
from tests.data.remote.conftest import BUCKET, s3, s3_server
from tests.launch.conftest import make_plan, make_spec

__all__ = ["s3", "s3_server"]
PLACE = f"s3://{BUCKET}/mirror"
# What is the same at both is tested in a folder; `make test-long` has all of it at the S3 server, too.
at_both_places = pytest.mark.parametrize("place", ["store", "folder"], indirect=True)


@dataclass(frozen=True)
class MirroredRun:
    """A run of the first place, whose training is played by the test."""

    run: RunDir
    record: RunRecord
    store_seconds: ClassVar[float] = 600.0  # for which a request is repeated

    @property
    def to(self) -> str:
        return str(self.record.spec.checkpoint.mirror.to)

    @property
    def store(self) -> MirrorStore:
        return open_store(self.to, self.run.run_id, self.store_seconds)

    def mirror(self) -> Mirror:
        return Mirror(self.run, self.record, self.store)

    def mirror_of(self, *steps: int) -> Mirror:
        """Commit checkpoints, and return a mirror that has looked at each."""
        mirror = self.mirror()
        for step in steps:
            self.commit(step)
            mirror.look()
        return mirror

    def commit(self, step: int, sizes: tuple[int, ...] = (70_000, 30_000), *, seed: int = 0) -> Checkpoint:
        """Commit a checkpoint of random files, log its step and record its event."""
        folder = self.run.checkpoints
        open_attempt(folder, 1)
        staging, draw, files = stage_checkpoint(folder, 1, step), random.Random(1000 * step + seed), {}
        for rank, size in enumerate(sizes):
            writer = HashingWriter(staging / f"rank-{rank:05d}.safetensors")
            writer.write(draw.randbytes(size))
            files[f"rank-{rank:05d}.safetensors"] = writer.close()
        append_line(self.run.metrics, {"step": step, "loss": 1 / step, "time": float(step)})
        commit_checkpoint(folder, step, files, world_size=len(sizes), clean=False, attempt=1)
        record_event(self.run, "checkpoint", step=step, bytes=sum(sizes), seconds=1.0)
        found = read_checkpoint(checkpoint_path(folder, step))
        assert isinstance(found, Checkpoint)
        return found

    def remove(self, step: int) -> None:
        remove_checkpoint(checkpoint_path(self.run.checkpoints, step), 1)

    def here(self) -> list[int]:
        return [each.step for each in list_checkpoints(self.run.checkpoints)]

    def mirrored(self) -> list[MirroredFolder]:
        """Return the checkpoints in the mirror that the run could continue from."""
        return in_line(list_folders(self.store), read_claims(self.store))

    def steps(self) -> list[int]:
        return [folder.step for folder in self.mirrored()]

    def events(self, name: str) -> list[dict[str, Any]]:
        return [event for event in read_events(self.run) if event["event"] == name]


def claimed(store: MirrorStore) -> Claim:
    return read_claims(store)[-1]


def owned(run: RunDir) -> tuple[int, int | None]:
    """Return the generation and the first step of the claim of a place."""
    claim = own_claim(run)
    return claim.generation, claim.from_step


def newest_valid(run: RunDir) -> tuple[int, list[str]]:
    """Return the step of the newest valid checkpoint, and what is wrong with others."""
    checkpoint, problems = latest_valid(run.checkpoints)
    return checkpoint.step, problems


MakeMirrored = Callable[..., MirroredRun]


@pytest.fixture(params=[pytest.param("store", marks=pytest.mark.long), "folder"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A mirror at an S3 server, and one in a folder."""
    if request.param == "store":
        request.getfixturevalue("s3")
        return PLACE
    return str(tmp_path / "other-disk")


@pytest.fixture
def make_mirrored(tmp_path: Path) -> MakeMirrored:
    """Return what creates a run with a mirror; its first place is the runs root ``first``."""

    def make(to: str = PLACE, *overrides: str, run_id: str = "moving") -> MirroredRun:
        spec = make_spec(f"checkpoint.mirror.to={to}", *overrides)
        made = create_run(spec, make_plan(spec), run_id, root=tmp_path / "first")
        return MirroredRun(made.run, made.record)

    return make
