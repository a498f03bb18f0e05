"""`scaletrain drill` on this machine with the real engine: its results are true."""

from pathlib import Path

import pytest

from tests.cli.command_line import scaletrain
from tests.drills.training_runs import STEPS, spec_text

pytestmark = [pytest.mark.drill, pytest.mark.long]


def test_the_drill_verb_reports_that_the_run_recovered(dataset: Path, tmp_path: Path) -> None:
    spec = tmp_path / "drill.yaml"
    spec.write_text(spec_text(dataset))
    ended = scaletrain("drill", "sigkill", "truncate", "--spec", spec, "--steps", STEPS, code=0)
    rows = [row.split() for row in ended.out.splitlines()[1:]]
    assert [row[:3] for row in rows] == [["sigkill", "survived", "2"], ["truncate", "survived", "2"]]
    assert ended.out.count("bit for bit") == 2
