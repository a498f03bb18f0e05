"""`scaletrain status`: the state of a run, a sweep or the cluster."""

from __future__ import annotations

import dataclasses
import time
from typing import TYPE_CHECKING, Annotated

import typer

from scaletrain_cli.cli.options import AsJson, pause, run_argument, seconds_of
from scaletrain_cli.errors import ExitCode, SchedulerError, UsageError
from scaletrain_cli.rundir.paths import RunDir, Sweep, find_run_or_newest, find_run_or_sweep
from scaletrain_cli.text import either
from scaletrain_cli.ui.json import print_json

if TYPE_CHECKING:
    from scaletrain_cli.launch.run_status import RunStatus
    from scaletrain_cli.launch.sweep import SweepStatus
    from scaletrain_cli.spec import ClusterSpec

EXIT_CODES = tuple(code for code in ExitCode if code != ExitCode.INFEASIBLE)
_TIMED_OUT = 124  # as timeout(1)
_POLL_SECONDS = 2.0
_LOST_POLL_SECONDS = 10.0  # of a lost run, whose next resume has its time


def command(
    run: Annotated[
        str | None,
        run_argument(
            "Run id, run directory or sweep (default: the newest run). With --cluster: cluster of clusters.yaml "
            "(default: its default cluster)."
        ),
    ] = None,
    wait: Annotated[
        str | None,
        typer.Option(metavar="TIME", help="Wait until the run has ended, at most this long, e.g. 30m."),
    ] = None,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume", help="With --wait: resume the run if its job is lost and its spec sets restarts.lost."
        ),
    ] = False,
    cluster: Annotated[
        bool,
        typer.Option("--cluster", help="Show the cluster instead: GPUs, nodes, your quota, your jobs in the queue."),
    ] = False,
    scheduler: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="With --cluster: slurm, kubernetes or local (default: from clusters.yaml, or detected).",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show the state of a run and how its attempts ended; with --cluster, show the cluster.

    For a sweep, show the state of each of its runs. With --wait the exit code is that of the run, or 124 on timeout;
    for a sweep, it is that of the first run that did not finish. Without --wait it is 0.
    """
    if resume and wait is None:
        raise UsageError("--resume requires --wait.")
    if cluster:
        if wait is not None:
            raise UsageError("--wait cannot be combined with --cluster.")
        from scaletrain_cli.launch.backends.registry import backend_for

        section = _cluster(run, scheduler)
        shown = backend_for(section.scheduler).cluster_view(section)
        if as_json:
            print_json(shown.to_json())
        else:
            from scaletrain_cli.ui.tables import show_cluster

            show_cluster(shown)
        return
    if scheduler is not None:
        raise UsageError("--scheduler requires --cluster.")
    from scaletrain_cli.launch.status import run_status
    from scaletrain_cli.launch.view import read_view

    subject = find_run_or_newest(None) if run is None else find_run_or_sweep(run)
    if isinstance(subject, Sweep):
        if resume:
            raise UsageError("--resume is for one run. Use `scaletrain recover SWEEP --every 5m`.")
        raise typer.Exit(_show_sweep(subject, None if wait is None else seconds_of("--wait", wait), as_json))
    if wait is None:
        status, code = run_status(subject), int(ExitCode.DONE)
    else:
        status, code = wait_for_end(subject, seconds_of("--wait", wait), resume=resume)
    view = read_view(subject, status)
    if as_json:
        print_json(view.to_json() | {"attempts": [dataclasses.asdict(attempt) for attempt in view.attempts]})
    else:
        from scaletrain_cli.ui.status import show_status

        show_status(view)
    raise typer.Exit(code)


def _cluster(name: str | None, scheduler: str | None) -> ClusterSpec:
    """Return the named or default cluster of clusters.yaml, or one of ``scheduler``. Raises UsageError."""
    from scaletrain_cli.launch.backends.registry import usual_backend
    from scaletrain_cli.spec import ClusterSpec, load_cluster
    from scaletrain_cli.spec.backend_traits import backend_names

    section = load_cluster(name)
    if name is not None and section is not None and scheduler not in (None, section.scheduler):
        raise UsageError(f"--scheduler {scheduler}: cluster {name} uses {section.scheduler}. Remove --scheduler.")
    if section is not None and scheduler in (None, section.scheduler):
        return section
    if scheduler is not None and scheduler not in backend_names():
        raise UsageError(f"--scheduler {scheduler}: unknown scheduler. Use {either(backend_names())}.")
    return ClusterSpec.model_validate({"scheduler": scheduler or usual_backend().name})


def wait_for_end(run: RunDir, seconds: float, *, resume: bool = False) -> tuple[RunStatus, int]:
    """Wait until the run has ended, at most ``seconds``; return its status and the exit code of the verb.

    ``resume``: continue it each time that its job was lost.
    """
    from scaletrain_cli.launch.status import exit_code_of, is_over, run_status
    from scaletrain_cli.ui.live import StatusLine

    deadline = time.monotonic() + seconds
    with StatusLine() as line:
        while True:
            status = run_status(run)
            wait = _POLL_SECONDS
            if is_over(run, status):
                if not resume or (not _goes_on(run) and is_over(run, status := run_status(run))):
                    return status, exit_code_of(run, status)  # still over: no one else has resumed it meanwhile
                wait = _LOST_POLL_SECONDS
            if time.monotonic() >= deadline:
                return status, _TIMED_OUT
            line.update(status)
            pause(min(wait, max(0.0, deadline - time.monotonic())))


def _goes_on(run: RunDir) -> bool:
    """Resume a run that has ended if it is lost; return whether it goes on, now or later, as far as is known."""
    from scaletrain_cli.launch.recover import recover

    try:
        recovery = recover(run)
    except SchedulerError:  # asked again
        return True
    return recovery is not None and recovery.state in ("resumed", "waiting")


_POLL_SECONDS_PER_RUN = 0.2  # of a large sweep: each run is one query to the controller


def _show_sweep(sweep: Sweep, wait_seconds: float | None, as_json: bool) -> int:
    """Show a sweep and return the exit code: with ``wait_seconds`` 0 if all runs finished, 124 on timeout."""
    from scaletrain_cli.launch.sweep import exit_code_of_all, sweep_status

    if wait_seconds is None:
        status, code = sweep_status(sweep), int(ExitCode.DONE)
    else:
        status, in_time = _wait_for_sweep(sweep, wait_seconds)
        code = exit_code_of_all(status.members) if in_time else _TIMED_OUT
    if as_json:
        print_json(status.to_json())
    else:
        from scaletrain_cli.ui.status import show_sweep

        show_sweep(status)
    return code


def _wait_for_sweep(sweep: Sweep, seconds: float) -> tuple[SweepStatus, bool]:
    """Return the last status of the sweep, and whether all its runs ended within ``seconds``."""
    from scaletrain_cli.launch.sweep import refreshed_sweep_status, sweep_status
    from scaletrain_cli.ui.live import StatusLine

    deadline, status = time.monotonic() + seconds, sweep_status(sweep)
    with StatusLine() as line:
        while True:
            over, runs = sum(member.is_over or member.status is None for member in status.members), len(sweep.runs)
            if over == runs:
                return status, True
            if time.monotonic() >= deadline:
                return status, False
            line.show(f"{over}/{runs} ended", over, runs, status.states_in_words)
            wait = max(_POLL_SECONDS, _POLL_SECONDS_PER_RUN * (runs - over))
            pause(min(wait, max(0.0, deadline - time.monotonic())))
            status = refreshed_sweep_status(status)
