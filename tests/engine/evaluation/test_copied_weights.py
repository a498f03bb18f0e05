from pathlib import Path
from typing import Any

import pytest

from scaletrain_cli.engine.evaluation.tasks import copy_weights
from scaletrain_cli.errors import UsageError
from scaletrain_cli.launch.submit import create_run
from scaletrain_cli.rundir.paths import RunDir
from tests.launch.conftest import make_plan, make_spec


def test_what_killed_attempts_have_written_of_a_copy_is_removed(tmp_path: Path) -> None:
    """They are as large as the weights, and nothing else removes them."""
    spec = make_spec()
    record: Any = create_run(spec, make_plan(spec), "r").record
    left = tmp_path / ".weights.0123456789abcdef.tmp"
    left.mkdir()
    (left / "model.safetensors").write_bytes(b"half")
    with pytest.raises(UsageError, match="step-00000004"):
        copy_weights(RunDir(tmp_path / "run"), record, 4, tmp_path / "weights")
    assert not left.exists()
