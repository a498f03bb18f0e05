import contextlib
import errno
import math
import os
import signal
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from scaletrain_cli.engine import context
from scaletrain_cli.engine.metrics import profiler
from scaletrain_cli.engine.metrics.profiler import StepProfiler, profiled
from scaletrain_cli.engine.metrics.trace import STEP
from scaletrain_cli.engine.process_group import Ranks
from scaletrain_cli.engine.step_sync import StepSync
from scaletrain_cli.rundir.documents import read_document
from scaletrain_cli.rundir.journal import read_events
from scaletrain_cli.rundir.paths import RunDir
from scaletrain_cli.rundir.profiles import ProfileRequest, profile_folders, rank_file, read_profile, write_request
from scaletrain_cli.worker.heartbeat import Heartbeat
from scaletrain_cli.worker.loop_adapter import StepDecision
from tests.counting import calls_of
from tests.engine.alone import Alone, context_of
from tests.waiting import Clock

STEPS = 20


def profiler_of(tmp_path: Path, clock: Clock | None = None) -> tuple[RunDir, StepProfiler]:
    run = RunDir(tmp_path / "run")
    run.attempt(1).mkdir(parents=True)
    seconds = {"compute": 1.0, "exposed_communication": 0.0, "bubble": 0.0, "optimizer": 0.5, "data_wait": 0.0}
    plan = SimpleNamespace(time=SimpleNamespace(step=1.5, **seconds), layout=SimpleNamespace(pipeline_parallel=1))
    record: Any = SimpleNamespace(spec=SimpleNamespace(total_steps=STEPS), plan=plan)
    ranks = Ranks(0, 2, 0)
    return run, StepProfiler(context_of(run, record, ranks, heartbeat=Heartbeat()), clock=clock or Clock())


def sync_of(found: StepProfiler, agreed: StepDecision) -> StepSync:
    """The step synchronization of a rank that requests nothing itself, among ranks that agree on this decision."""
    nothing: Any = SimpleNamespace(
        reach=lambda request, writing, values, sums: (agreed, False, values, sums),
        for_consensus=lambda step: [],
        compare=lambda largest: None,
        **{"writing": False, "advance": lambda anyone_writing: None, "take_costs": list},
        during=lambda category: contextlib.nullcontext(),
        raised=False,
    )
    context = context_of(found._context.run, None, Ranks(1, 2, 0), nothing, Heartbeat())
    return StepSync(context, nothing, nothing, nothing, nothing, found, nothing)


def test_a_look_costs_nothing_within_a_second(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    _, found = profiler_of(tmp_path, clock)
    looks: list[Any] = []
    monkeypatch.setattr(profiler.os, "stat", lambda path: looks.append(path) or os.lstat(path))
    for _ in range(1000):
        assert not found.is_requested()
    assert len(looks) == 1
    clock.now += 1.0
    found.is_requested()
    assert len(looks) == 2

    def step() -> None:
        found.is_requested()
        found.before_step(1)
        with profiled(STEP), profiled("x"):
            pass
        found.after_step(1)

    assert calls_of(step) < 20  # microseconds; a step of the smallest model takes milliseconds


@pytest.mark.parametrize(
    ("request_", "code"),
    [
        (ProfileRequest(step=6), "engine.profile-step-passed"),
        (ProfileRequest(step=19, steps=3), "engine.profile-beyond-end"),
        (ProfileRequest(ranks=(1, 2)), "engine.profile-unknown-rank"),
        (ProfileRequest(nvtx=True), "engine.profile-nvtx-on-cpu"),
        ("[]", "engine.profile-request-invalid"),
        ('{"steps": "3"}', "engine.profile-request-invalid"),
        ('{"step": -1}', "engine.profile-request-invalid"),
        ('{"ranks": [0, 0]}', "engine.profile-request-invalid"),
        ('{"stack": true}', "engine.profile-request-invalid"),
    ],
)
def test_a_request_that_cannot_be_served_is_refused_once(tmp_path: Path, request_: Any, code: str) -> None:
    clock = Clock()
    run, found = profiler_of(tmp_path, clock)
    if isinstance(request_, str):
        run.profile_file.write_text(request_)
    else:
        write_request(run, request_)
    assert found.is_requested()
    found.accept(5, Alone())
    (event,) = read_events(run)
    assert (event["event"], event["code"]) == ("profile-refused", code)
    clock.now += 1.0
    assert not found.is_requested()
    assert profile_folders(run) == []


def test_an_empty_file_has_the_default_request(tmp_path: Path) -> None:
    run, found = profiler_of(tmp_path)
    run.profile_file.touch()
    found.accept(5, Alone())
    assert not run.profile_file.exists()
    (folder,) = profile_folders(run)
    scheduled = read_profile(folder)
    assert (scheduled.state, scheduled.first_step, scheduled.steps, scheduled.ranks) == ("scheduled", 7, 3, [0])
    found.close()
    ended = read_profile(folder)
    assert ended.state == "not-reached"


def test_a_profiler_that_fails_does_not_end_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(**options: Any) -> None:
        raise RuntimeError("CUPTI_ERROR_MULTIPLE_SUBSCRIBERS_NOT_SUPPORTED")

    monkeypatch.setattr(profiler, "torch_profile", failing)
    run, found = profiler_of(tmp_path)
    write_request(run, ProfileRequest("a", steps=1))
    found.accept(5, Alone())
    for step in (6, 7, 8):
        found.before_step(step)
        with profiled(STEP):
            pass
        found.after_step(step)
    (folder,) = profile_folders(run)
    figures = read_document(rank_file(folder, 0))
    assert "CUPTI_ERROR" in figures["error"]
    recorded = read_profile(folder)
    assert recorded.state == "recorded"
    assert [event["event"] for event in read_events(run)] == ["profiled"]


def test_a_request_file_that_cannot_be_removed_is_looked_at_once(tmp_path: Path) -> None:
    clock = Clock()
    run, found = profiler_of(tmp_path, clock)
    run.profile_file.mkdir()
    assert found.is_requested()
    found.accept(5, Alone())
    clock.now += 60.0
    assert not found.is_requested()
    assert len(read_events(run)) == 1


@pytest.mark.parametrize("has_signal", [True, False], ids=["with the signal", "on a node without it"])
def test_a_preempted_rank_does_not_wait_for_the_summary_of_its_trace(
    has_signal: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(profiler, "_PREEMPTED_SECONDS", 0.1)
    monkeypatch.setattr(profiler, "_SUMMARY_SECONDS", math.inf)
    run, found = profiler_of(tmp_path)
    found._preempted = lambda: has_signal
    if not has_signal:
        sync_of(found, StepDecision.PREEMPT).agree(7)
    folder, raw = run.attempt(1) / "profile", tmp_path / "raw.json"
    folder.mkdir()
    raw.touch()
    process = subprocess.Popen(["sleep", "infinity"])
    found._summaries.append(profiler._Summary(process, raw, folder))
    found.close()
    assert process.returncode == -signal.SIGKILL
    assert not raw.exists()  # it may have hundreds of megabytes
    figures = read_document(rank_file(folder, 0))
    assert figures["error"] == "the attempt ended before the trace was summarized"


def test_a_full_disk_and_damaged_profiles_do_not_end_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(profiler, "torch_profile", full)
    monkeypatch.setattr(context, "report_event", full)
    run, found = profiler_of(tmp_path)
    write_request(run, ProfileRequest("a", steps=1, ranks=(0, 1)))
    found.accept(5, Alone())
    (folder,) = profile_folders(run)
    rank_file(folder, 1).write_text('{"causes": {"compute": "x"}}')
    for step in (6, 7):
        found.before_step(step)
        found.after_step(step)
    recorded = read_profile(folder)
    assert recorded.state == "recorded"
