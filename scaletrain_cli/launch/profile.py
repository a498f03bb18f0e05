"""Request a profile of a living run through its run directory, and wait for the result; the scheduler is only asked."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from scaletrain_cli.errors import ExitCode, ScaletrainError, UsageError
from scaletrain_cli.launch.run_status import OVER
from scaletrain_cli.launch.status import is_over, run_status
from scaletrain_cli.reasons import Reason, reason_from
from scaletrain_cli.rundir.journal import read_lines_backwards
from scaletrain_cli.rundir.paths import RunDir
from scaletrain_cli.rundir.profiles import (
    ProfileRequest,
    profile_folders,
    read_profile,
    read_request,
    summary_of,
    withdraw_request,
    write_request,
)
from scaletrain_cli.rundir.record import RunRecord, is_elsewhere

_POLL_SECONDS = 0.5
_SECONDS_BETWEEN_STATUSES = 10.0
_EVENTS_SEARCHED = 200


class ProfileError(ScaletrainError):
    """The run did not make the profile that was requested (exit 1)."""

    exit_code = ExitCode.CRASHED
    code = "no-profile"


def request_profile(run: RunDir, record: RunRecord, request: ProfileRequest) -> Reason | None:
    """Write the request; return why the run does not train yet, or None if it does. Raises UsageError."""
    spec = record.spec
    if spec.code.own_program:
        raise UsageError(Reason("launch.profile-own-program"))
    status = run_status(run)
    if status.state in OVER or is_over(run, status):
        raise UsageError(Reason("launch.profile-not-running", {"run": run.run_id, "state": status.state}))
    if status.state == "running" and is_elsewhere(run, record):
        raise UsageError(Reason("launch.profile-unmounted", {"folder": str(run.path)}))
    highest, ranks = max(request.ranks), record.plan.layout.world_size
    if highest >= ranks:
        raise UsageError(Reason("engine.profile-unknown-rank", {"rank": highest, "ranks": ranks}))
    last = max(request.step, 2) + request.steps - 1
    if last > spec.total_steps:
        raise UsageError(Reason("engine.profile-beyond-end", {"last": last, "total": spec.total_steps}))
    if 0 < request.step < status.step + 2:
        next_steps = {"next": status.step + 1, "earliest": status.step + 2}
        raise UsageError(Reason("engine.profile-step-passed", {"step": request.step, **next_steps}))
    if request.nvtx and spec.cluster.gpu == "cpu":
        raise UsageError(Reason("engine.profile-nvtx-on-cpu"))
    if run.profile_file.exists():
        raise UsageError(Reason("launch.profile-waiting", {"path": str(run.profile_file)}))
    write_request(run, request)
    return None if status.state == "running" else Reason("launch.profile-later", {"state": status.state})


def await_profile(
    run: RunDir, request: ProfileRequest, timeout_seconds: float, on_change: Callable[[str, int], None]
) -> dict[str, Any]:
    """Return the summary of the requested profile once every rank has written its figures.

    ``on_change`` gets ``scheduled`` with the first step of the trace. Raises ProfileError if the run refuses the
    request or ends before, and at the timeout. A request that the run has not taken is withdrawn.
    """
    deadline, asked, shown, over = time.monotonic() + timeout_seconds, time.monotonic(), "", False
    try:
        while True:
            folder = _folder_of(run, request.id)
            profile = None if folder is None else read_profile(folder)
            if folder is not None and profile is not None:
                summary = summary_of(folder)
                if profile.state == "recorded" and summary is not None and not summary["ranks_missing"]:
                    return summary
                if profile.state == "not-reached":
                    raise ProfileError(Reason("launch.profile-not-reached", {"step": profile.first_step}))
                if profile.state != shown:
                    shown = profile.state
                    on_change(shown, profile.first_step)
            elif (refusal := _refusal(run, request.id)) is not None:
                raise ProfileError(refusal)
            elif _is_replaced(run, request.id):
                raise ProfileError(Reason("launch.profile-replaced"))
            if over:
                raise ProfileError(Reason("launch.profile-run-ended", {"run": run.run_id}))
            if time.monotonic() > deadline:
                raise ProfileError(Reason("launch.profile-timeout", {"seconds": timeout_seconds, "run": run.run_id}))
            if time.monotonic() - asked > _SECONDS_BETWEEN_STATUSES:
                asked, over = time.monotonic(), is_over(run, run_status(run))
            time.sleep(_POLL_SECONDS)
    finally:
        withdraw_request(run, request.id)


def newest_profile(run: RunDir) -> dict[str, Any]:
    """Return the summary of the newest profile of a run. Raises UsageError if there is none."""
    for folder in reversed(profile_folders(run)):
        if (summary := summary_of(folder)) is not None:
            return summary
    raise UsageError(Reason("launch.profile-none", {"run": run.run_id}))


def _folder_of(run: RunDir, request_id: str) -> Path | None:
    for folder in reversed(profile_folders(run)):
        profile = read_profile(folder)
        if profile is not None and profile.request == request_id:
            return folder
    return None


def _refusal(run: RunDir, request_id: str) -> Reason | None:
    for count, event in enumerate(read_lines_backwards(run.events)):
        if event.get("event") == "profile-refused" and event.get("request") == request_id:
            return reason_from({"code": event.get("code"), "params": event.get("params")})
        if count > _EVENTS_SEARCHED:
            break
    return None


def _is_replaced(run: RunDir, request_id: str) -> bool:
    try:
        waiting = read_request(run)
    except ValueError:
        return True
    return waiting is not None and waiting.id != request_id
