from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from scaletrain_cli.engine.evaluation import tasks
from scaletrain_cli.engine.evaluation.tasks import copy_weights, evaluate_checkpoint
from scaletrain_cli.errors import UsageError
from scaletrain_cli.launch.submit import create_run
from scaletrain_cli.rundir.evaluations import read_evaluation
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


def test_the_values_are_logged_before_the_evaluation_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    """In between, training would delete the checkpoint, even if it is the best one."""
    spec = make_spec()
    run, own = (create_run(spec, make_plan(spec), name).run for name in ("r", "r-evaluation"))
    monkeypatch.setenv("SCALETRAIN_EVALUATED_RUN", "r")
    monkeypatch.setenv("SCALETRAIN_EVALUATED_STEP", "2")
    monkeypatch.setattr(tasks, "copy_weights", lambda *words: words[-1].mkdir())
    states: list[str] = []
    monkeypatch.setattr(tasks, "log_evaluation", lambda *_: states.append(read_evaluation(run, 2).state))
    rank: Any = SimpleNamespace(environment=SimpleNamespace(run=own), preemption=SimpleNamespace(raised=False))
    assert evaluate_checkpoint(rank) == 0
    assert (states, read_evaluation(run, 2).state) == (["running"], "done")
