"""Requests for profiles from the command: refused with a reason where the run cannot serve them, else written once."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from scaletrain_cli.cli.profile import _ranks
from scaletrain_cli.errors import UsageError
from scaletrain_cli.launch import profile
from scaletrain_cli.launch.profile import ProfileError, await_profile, newest_profile, request_profile
from scaletrain_cli.rundir.journal import record_event
from scaletrain_cli.rundir.paths import RunDir
from scaletrain_cli.rundir.profiles import (
    Profile,
    ProfileRequest,
    profile_folder,
    read_request,
    write_profile,
    write_request,
)

REQUEST = ProfileRequest("mine", ranks=(0, 3), steps=2)


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = RunDir(tmp_path / "run")
    run.path.mkdir()
    return run


def record_of(*, own_program: bool = False, shared: bool = True, gpu: str = "cpu") -> Any:
    cluster = SimpleNamespace(traits=SimpleNamespace(shared_run_directory=shared), gpu=gpu)
    spec = SimpleNamespace(code=SimpleNamespace(own_program=own_program), cluster=cluster, total_steps=100)
    return SimpleNamespace(spec=spec, plan=SimpleNamespace(layout=SimpleNamespace(world_size=4)))


def status(monkeypatch: pytest.MonkeyPatch, state: str, *, over: bool = False) -> None:
    monkeypatch.setattr(profile, "run_status", lambda run: SimpleNamespace(state=state, step=50))
    monkeypatch.setattr(profile, "is_over", lambda run, status: over)


@pytest.mark.parametrize(
    ("request_", "record", "state", "code"),
    [
        (REQUEST, record_of(own_program=True), "running", "launch.profile-own-program"),
        (REQUEST, record_of(), "failed", "launch.profile-not-running"),
        (REQUEST, record_of(shared=False), "running", "launch.profile-unmounted"),
        (ProfileRequest(ranks=(4,)), record_of(), "running", "engine.profile-unknown-rank"),
        (ProfileRequest(step=99, steps=3), record_of(), "running", "engine.profile-beyond-end"),
        (ProfileRequest(step=51), record_of(), "running", "engine.profile-step-passed"),
        (ProfileRequest(nvtx=True), record_of(), "running", "engine.profile-nvtx-on-cpu"),
    ],
)
def test_a_request_is_refused_before_it_is_written(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, request_: ProfileRequest, record: Any, state: str, code: str
) -> None:
    status(monkeypatch, state)
    with pytest.raises(UsageError) as refused:
        request_profile(run, record, request_)
    assert refused.value.reason.code == code
    assert not run.profile_file.exists()


def test_one_request_waits_at_a_time_and_for_a_queued_run(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    status(monkeypatch, "queued")
    later = request_profile(run, record_of(), REQUEST)
    assert later.code == "launch.profile-later"
    assert read_request(run) == REQUEST
    with pytest.raises(UsageError, match="another request waits"):
        request_profile(run, record_of(), REQUEST)


def test_a_wait_ends_with_the_profile_or_with_the_reason(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profile, "_POLL_SECONDS", 0.001)
    changes: list[Any] = []

    def answer(seconds: float = 5.0) -> Any:
        return await_profile(run, REQUEST, seconds, lambda *change: changes.append(change))

    write_request(run, REQUEST)
    with pytest.raises(ProfileError, match="no profile within"):
        answer(0.0)
    assert read_request(run) is None  # withdrawn
    with pytest.raises(UsageError, match="has no profile"):
        newest_profile(run)

    write_request(run, ProfileRequest("another"))
    with pytest.raises(ProfileError, match="another request replaced"):
        answer()
    assert read_request(run) == ProfileRequest("another")
    run.profile_file.unlink()

    params = {"step": 5, "next": 8, "earliest": 9}
    record_event(run, "profile-refused", request="mine", code="engine.profile-step-passed", params=params, message="")
    with pytest.raises(ProfileError, match="Name step 9 or a later one"):
        answer()
    run.events.unlink()

    run.attempt(1).mkdir(parents=True)
    folder = profile_folder(run, 1, 7)
    folder.parent.mkdir()
    made = {"request": "mine", "attempt": 1, "first_step": 7, "steps": 2, "ranks": [0], "device": "cpu", "planned": {}}
    write_profile(folder, Profile(state="not-reached", **made))
    with pytest.raises(ProfileError, match="ended before step 7"):
        answer()
    write_profile(folder, Profile(state="recorded", **made))
    with pytest.raises(ProfileError, match="no profile within"):
        answer(0.01)  # rank 0 has not written its figures
    assert changes == [("recorded", 7)]
    (folder / "rank-00000.json").write_text('{"error": "no CUPTI"}')
    assert answer()["by_rank"] == [{"rank": 0, "error": "no CUPTI"}]
    assert newest_profile(run)["ranks_missing"] == []
    for damaged in ('{"causes": 3}', '{"causes": {"compute": 1}}', '{"causes": {"compute": [1]}, "step_seconds": 1}'):
        (folder / "rank-00000.json").write_text(damaged)
        with pytest.raises(UsageError, match="step-00000007"):
            newest_profile(run)


def test_ranks_are_a_list_of_ranks_and_ranges() -> None:
    assert _ranks("0,8-11, 9") == (0, 8, 9, 10, 11)
    for wrong in ("", "a", "1-", "-1", "0,,1", "1-2-3", "0-99999", "9" * 5000):
        with pytest.raises(UsageError):
            _ranks(wrong)
    with pytest.raises(UsageError, match="Write it as 3-5"):
        _ranks("0,5-3")
    with pytest.raises(ValueError, match="1 to 16 different ranks"):
        ProfileRequest(ranks=_ranks("0-16"))
