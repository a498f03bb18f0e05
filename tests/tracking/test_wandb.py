import subprocess
import sys
from pathlib import Path

import pytest

import scaletrain_cli
from tests.tracking.wandb_files import offline_rows

PROGRAM = """
import sys
from pathlib import Path
from scaletrain_cli.tracking.base import TrackedRun
from scaletrain_cli.tracking.wandb import WandbOptions, WandbTracker

tracker = WandbTracker(WandbOptions(mode="offline"))
tracker.start(TrackedRun("a-1", "abcdefgh", Path(sys.argv[1]), {}, 2, last_step=7))
tracker.event("resumed", {"step": 5}, 1.0)
tracker.event("diagnosed", {"state": "good"}, 2.0)
tracker.log(8, {"loss": 0.5}, 3.0)
tracker.event("diagnosed", {"state": "good"}, 4.0)
tracker.finish("finished")
"""


def test_events_of_a_resumed_attempt_are_logged_at_their_steps_offline(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    environment = {"PATH": "/usr/bin:/bin", "TMPDIR": str(tmp_path), "HOME": str(tmp_path)}
    environment["PYTHONPATH"] = str(Path(scaletrain_cli.__file__).parents[1])
    subprocess.run([sys.executable, "-c", PROGRAM, str(tmp_path)], env=environment, cwd=tmp_path, check=True)
    (file,) = tmp_path.glob("wandb/offline-run-*/run-abcdefgh.wandb")
    named = ("events/resumed", "events/diagnosed", "train/loss")
    rows = [(row["train/step"], name) for row in offline_rows(file) for name in named if name in row]
    assert rows == [(5, "events/resumed"), (7, "events/diagnosed"), (8, "train/loss"), (8, "events/diagnosed")]
