"""A real run whose first place is lost continues in another one from its mirror, as if nothing had happened."""

from pathlib import Path

import pytest

from scaletrain_cli.launch.backends.local.backend import LocalBackend
from scaletrain_cli.mirror.checkpoints import in_line, list_folders
from scaletrain_cli.mirror.claims import read_claims
from scaletrain_cli.mirror.object_store import open_store
from scaletrain_cli.rundir.paths import RunDir
from tests.cli.command_line import scaletrain
from tests.data.remote.conftest import BUCKET, s3, s3_server
from tests.data.remote.faults import FaultyProxy
from tests.drills.conftest import Undisturbed
from tests.drills.training_runs import STEPS, Drill, submit_drill

__all__ = ["s3", "s3_server"]
PLACE = f"s3://{BUCKET}/mirror"
pytestmark = pytest.mark.long


def mirrored_steps(run_id: str) -> list[int]:
    store = open_store(PLACE, run_id)
    return [folder.step for folder in in_line(list_folders(store), read_claims(store))]


def test_a_run_that_was_taken_over_stops_in_its_first_place(
    s3: FaultyProxy, dataset: Path, undisturbed: Undisturbed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SCALETRAIN_RUNS", str(tmp_path / "first"))
    # Time for the command below and for the mirroring process, which has a low priority.
    monkeypatch.setenv("SCALETRAIN_FAULT", "slow-rank attempt=1 step=11 seconds=2")
    first = submit_drill(dataset, checkpoint__mirror=PLACE)
    run_id = first.run.run_id
    first.wait_for(lambda: mirrored_steps(run_id))
    monkeypatch.setenv("SCALETRAIN_RUNS", str(tmp_path / "second"))
    monkeypatch.delenv("SCALETRAIN_FAULT")
    scaletrain("resume", run_id, "--from-mirror", PLACE, "--take-over", "--yes", "--gpus-per-node", "1", code=0)
    first.wait_for_end()
    assert first.step() < STEPS, "it stops at a checkpoint after the claim"
    (stopped,) = first.events("stopped")
    assert stopped["code"] == "launch.stop-superseded"
    assert first.events("cancelled") == []
    assert len(first.events("mirror-superseded")) == 1
    second = Drill(RunDir(tmp_path / "second" / run_id), LocalBackend())
    second.wait_for_end()
    assert second.events("finished")
    assert len(second.losses()) == STEPS
    assert second.losses()[:10] == undisturbed().losses()[:10]
    for mine, other in zip(second.losses(), undisturbed().losses(), strict=True):
        assert mine == pytest.approx(other, rel=1e-5), "the same samples on one device"
    monkeypatch.setenv("SCALETRAIN_RUNS", str(tmp_path / "first"))
    assert "continues in" in scaletrain("resume", run_id, "--yes", code=2).err
