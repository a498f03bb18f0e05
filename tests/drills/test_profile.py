"""A living run is profiled on its ranks without a restart, and trains bit by bit what it trains without."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from scaletrain_cli.cli.running import run
from scaletrain_cli.engine.faults import VARIABLE
from scaletrain_cli.rundir.profiles import profile_folders
from tests.drills.conftest import Undisturbed
from tests.drills.training_runs import Drill, submit_drill

pytestmark = pytest.mark.drill


def profiled(drill: Drill, capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    """Return the answer of ``scaletrain profile --json``."""
    capsys.readouterr()
    code = run(["profile", str(drill.run.path), "--json", "--timeout", "15m", *words])
    answer: dict[str, Any] = json.loads(capsys.readouterr().out)
    return answer | {"exit_code": code}


@pytest.mark.long
def test_a_living_run_is_profiled_twice(
    dataset: Path, undisturbed: Undisturbed, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(VARIABLE, "slow-rank attempt=1 rank=1 step=8 seconds=0.3")  # so that the run lives long enough
    drill = submit_drill(dataset, tracking="[prometheus]")
    drill.wait_for_step(8)

    both = profiled(drill, capsys, "--ranks", "0-1", "--steps", "2", "--memory")
    assert both["exit_code"] == 0, both
    assert [figures["rank"] for figures in both["by_rank"]] == [0, 1]
    for figures in both["by_rank"]:
        assert figures.get("error") is None
        assert sum(figures["causes"].values()) == pytest.approx(figures["step_seconds"])
        assert figures["causes"]["compute"] > 0
        assert figures["causes"]["optimizer"] > 0
        assert figures["top_operators"]
        assert figures["memory"]["peak_bytes"] > 0
        with gzip.open(Path(both["folder"]) / figures["trace"]["file"]) as file:
            assert json.load(file)["distributedInfo"]["rank"] == figures["rank"]
    waits, sleeps = both["by_rank"]
    assert waits["causes"]["exposed_communication"] > sleeps["causes"]["exposed_communication"]
    assert sleeps["causes"]["host"] > waits["causes"]["host"]
    assert json.loads((Path(both["folder"]) / "summary.json").read_text())["measured"] == both["measured"]

    refused = profiled(drill, capsys, "--step", str(both["first_step"]))
    assert (refused["exit_code"], refused["error"]["reason"]["code"]) == (2, "engine.profile-step-passed")
    beyond = profiled(drill, capsys, "--step", "40", "--steps", "2")
    assert (beyond["exit_code"], beyond["error"]["reason"]["code"]) == (2, "engine.profile-beyond-end")

    (drill.run.path / "profile").write_text("")  # as `touch`
    drill.wait_for(lambda: len(profile_folders(drill.run)) == 2)
    (drill.run.path / "profile").write_text('{"steps": 0}')
    drill.wait_for_end()
    again = profiled(drill, capsys, "--show")
    assert (again["state"], again["ranks"], again["steps"]) == ("recorded", [0], 3)
    assert again["first_step"] > both["first_step"] + 1
    assert [event["code"] for event in drill.events("profile-refused")] == ["engine.profile-request-invalid"]
    ended = profiled(drill, capsys)
    assert (ended["exit_code"], ended["error"]["reason"]["code"]) == (2, "launch.profile-not-running")

    assert len(drill.beginnings()) == 1
    exported = (drill.run.path / "prometheus" / f"{drill.run.run_id}.prom").read_text()
    for line in ("step{RUN} 40.0", "training{RUN} 0.0", 'events_total{RUN,event="profiled"} 2.0'):
        assert "scaletrain_" + line.replace("RUN", f'run="{drill.run.run_id}"') in exported
    assert drill.losses() == undisturbed().losses()
