"""A run in which memory fails on one rank ends in the state of a run on sound memory."""

import time
from pathlib import Path
from typing import Any

import pytest

from scaletrain_cli.engine.faults import VARIABLE
from scaletrain_cli.rundir.bad_nodes import read_bad_nodes
from tests.drills.conftest import Undisturbed
from tests.drills.training_runs import assert_same_run, submit_drill

pytestmark = [pytest.mark.drill, pytest.mark.long]


@pytest.mark.parametrize(
    ("fault", "kind", "reasons", "found"),
    [
        pytest.param(
            "bit-flip rank=1 step=33 part=optimizer-state bit=12345 attempt=1",
            {"layout__zero_stage": 2, "guard__checksum": 1},
            ["hardware", "done"],
            {"step": 33, "clean_step": 32, "ranks": [1], "code": "engine.state-changed"},
            id="named",
        ),
        pytest.param(
            "bit-flip rank=1 step=16 part=weights bit=12345 attempt=1",
            {"layout__zero_stage": 0, "guard__checksum": 7},
            ["crash", "done"],
            {"step": 21, "clean_step": 14, "ranks": [0, 1], "code": "engine.replicas-differ"},
            id="two replicas",
        ),
        pytest.param(
            "bit-flip rank=1 step=33 part=optimizer-state bit=12345 attempt=1",
            {"layout__zero_stage": 2, "guard__checksum": 1, "checkpoint__in_memory": 1},
            ["hardware", "done"],
            {"step": 33, "clean_step": 32, "ranks": [1], "code": "engine.state-changed"},
            id="named, with copies in host memory",
        ),
        pytest.param(
            "bit-flip rank=1 step=16 part=weights bit=12345 attempt=1",
            {"layout__zero_stage": 0, "guard__checksum": 7, "checkpoint__in_memory": 1},
            ["crash", "done"],
            {"step": 21, "clean_step": 14, "ranks": [0, 1], "code": "engine.replicas-differ"},
            id="two replicas, with copies of the corrupt state in host memory",
        ),
        pytest.param(
            "wrong-output rank=1 step=33 attempt=1",
            {"layout__zero_stage": 2, "cluster__gpus_per_node": 4, "guard__checksum": 1, "guard__replay": 10},
            ["hardware", "done"],
            {"step": 40, "clean_step": 30, "ranks": [1], "code": "engine.output-differs"},
            id="a device that computes wrongly",
        ),
    ],
)
def test_a_run_resumes_from_before_the_corruption(
    fault: str,
    kind: dict[str, Any],
    reasons: list[str],
    found: dict[str, Any],
    dataset: Path,
    undisturbed: Undisturbed,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(VARIABLE, fault)
    drill = submit_drill(dataset, **kind)
    drill.wait_for_end()
    (event,) = drill.events("corruption")
    assert {key: event[key] for key in found} == found
    assert [each["reason"] for each in drill.events("attempt-ended")] == reasons
    (resumed,) = drill.events("resumed")
    copied = "checkpoint__in_memory" in kind and found["step"] == 33  # after step 32, the last clean one
    assert resumed["step"] == (found["clean_step"] if copied else found["clean_step"] // 10 * 10)
    assert drill.run.checkpoints.joinpath("damaged-step-00000020").exists() == (found["step"] == 21)
    assert len(read_bad_nodes(drill.run.path.parent, time.time())) == reasons.count("hardware")
    monkeypatch.delenv(VARIABLE)
    assert_same_run(drill, undisturbed(**{key: each for key, each in kind.items() if key != "checkpoint__in_memory"}))


def test_what_a_wrong_device_has_saved_before_a_preemption_is_set_aside_too(
    dataset: Path, undisturbed: Undisturbed, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = "; ".join(f"wrong-output rank=1 step=33 attempt={attempt}" for attempt in (1, 2))
    monkeypatch.setenv(VARIABLE, f"{wrong}; sigterm rank=0 step=36 attempt=1")
    kind = {"layout__zero_stage": 2, "cluster__gpus_per_node": 4, "guard__checksum": 1, "guard__replay": 10}
    drill = submit_drill(dataset, **kind)
    drill.wait_for_end()
    assert [each["reason"] for each in drill.events("attempt-ended")] == ["preempted", "hardware", "done"]
    (event,) = drill.events("corruption")
    assert (event["step"], event["clean_step"], event["ranks"]) == (40, 30, [1])
    (saved, resumed) = (each["step"] for each in drill.events("resumed"))
    assert 33 < saved < 40
    assert resumed == 30
    assert drill.run.checkpoints.joinpath(f"damaged-step-{saved:08}").exists()
    monkeypatch.delenv(VARIABLE)
    assert_same_run(drill, undisturbed(**kind))
