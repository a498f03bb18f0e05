"""`scaletrain train`: run in the foreground of this terminal."""

from __future__ import annotations

import contextlib
import sys
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from scaletrain_cli.cli.options import AsJson, Overrides, SpecPath
from scaletrain_cli.errors import ExitCode, ScaletrainError, sentences
from scaletrain_cli.rundir.paths import RunDir, runs_root
from scaletrain_cli.safe_files import require_writable
from scaletrain_cli.text import seconds_text, visible
from scaletrain_cli.ui.console import drop_output, say, stderr_console, warn
from scaletrain_cli.ui.json import print_json

if TYPE_CHECKING:
    from collections.abc import Callable

    from scaletrain_cli.launch.run_status import RunStatus
    from scaletrain_cli.ui.live import StatusLine

EXIT_CODES = tuple(ExitCode)
_LOOK_EVERY_SECONDS = 1.0
_LINE_EVERY_SECONDS = 10.0  # of the step, where no status line is drawn


def command(
    spec: SpecPath,
    overrides: Overrides = None,
    run_id: Annotated[str | None, typer.Option(metavar="ID", help="Run id to use.")] = None,
    as_json: AsJson = False,
) -> None:
    """Train on this machine and wait until the run ends. The exit code is that of the run.

    Ctrl-C acts as a preemption: the current step is finished, a checkpoint is committed, and the exit code is 75.
    `scaletrain resume` continues the run. Prints the run id to stdout.
    """
    from scaletrain_cli.launch.attempts import read_attempt
    from scaletrain_cli.launch.backends.registry import backend_for
    from scaletrain_cli.launch.code import take_snapshot
    from scaletrain_cli.launch.epochs import in_steps
    from scaletrain_cli.launch.preparation import prepare_data
    from scaletrain_cli.launch.resource_checks.checks import require_external
    from scaletrain_cli.launch.submit import create_run, plan_for_engine
    from scaletrain_cli.rundir.shared_datasets import shared_root_notes
    from scaletrain_cli.spec import load_spec
    from scaletrain_cli.spec.backend_traits import DEFAULT
    from scaletrain_cli.ui.live import StatusLine
    from scaletrain_cli.ui.plan import show_plan_summary
    from scaletrain_cli.ui.status import measures_text

    given = load_spec(spec, [*(overrides or ()), f"cluster.scheduler={DEFAULT}"])
    run_spec, epochs = in_steps(given, spec, "auto", say)
    plan, snapshot = plan_for_engine(run_spec, spec), take_snapshot(run_spec)
    backend = backend_for(DEFAULT)
    require_external(run_spec, snapshot)  # everything is visible to a local run
    for note in backend.preflight(run_spec, plan).notes:
        warn(note)
    require_writable(runs_root(), "no run can be started")
    notes = () if snapshot is None else snapshot.notes
    for warning in (*notes, *shared_root_notes(runs_root(), prepares=not run_spec.code.own_program)):
        warn(sentences(warning))
    show_plan_summary(run_spec, plan)
    data = replace(prepare_data(run_spec, say=say), epochs=epochs)
    made = create_run(run_spec, plan, run_id, snapshot=snapshot)
    data.record(made.run)
    say(f"run directory {made.run.path}; Ctrl-C saves a checkpoint and stops the run")
    if not as_json:
        try:
            typer.echo(visible(made.run.run_id))
        except OSError:  # a full disk, or a reader that has ended
            drop_output(sys.stdout)
    with StatusLine() as line:
        watcher = Watcher(made.run, line)
        code = backend.run_in_foreground(made.run, made.record, watcher.look)
        status = watcher.finish()
    if as_json:
        print_json(status.to_json() | {"schema": "scaletrain.train/v1", "exit_code": code})
    measured = measures_text(status)
    end = f"{status.state} at step {status.step} of {status.total_steps}, exit code {code}"
    say(f"{end}; {measured}" if measured else end)
    last = read_attempt(made.run, status.attempt)
    if last is None or last.ended is None:  # no event shows the end
        say(status.why)
    if code == ExitCode.PREEMPTED:
        say(f"stopped, checkpoint saved; `scaletrain resume {made.run.run_id}` continues the run")
    raise typer.Exit(code)


class Watcher:
    """Show a foreground run: its events, and the step in a status line or, without a terminal, every 10 seconds."""

    def __init__(self, run: RunDir, line: StatusLine, clock: Callable[[], float] = time.monotonic) -> None:
        self._run, self._line, self._clock = run, line, clock
        self._events_shown = self._step_shown = 0
        self._looked = self._step_time = float("-inf")

    def look(self) -> None:
        """Show what is new, at most once per second."""
        now = self._clock()
        if now - self._looked < _LOOK_EVERY_SECONDS:
            return
        self._looked = now
        with contextlib.suppress(OSError, ScaletrainError):  # what is shown is no part of the training
            status = self.finish()
            is_due = now - self._step_time >= _LINE_EVERY_SECONDS and status.step != self._step_shown
            if is_due and status.state == "running" and not stderr_console().is_terminal:
                self._step_time, self._step_shown = now, status.step
                from scaletrain_cli.launch.status import eta_seconds
                from scaletrain_cli.ui.status import measures_text, progress_text

                left = eta_seconds(self._run, status)
                words = [progress_text(status), measures_text(status), f"{seconds_text(left)} left" if left else ""]
                say(f"{time.strftime('%H:%M:%S')}  running         {', '.join(filter(None, words))}")

    def finish(self) -> RunStatus:
        """Show what is new now and return the status."""
        from scaletrain_cli.launch.status import run_status
        from scaletrain_cli.rundir.journal import read_events, record_event

        events = read_events(self._run)
        new, self._events_shown = events[self._events_shown :], len(events)
        try:
            for event in new:
                self._line.note_event(event)
        except OSError as error:
            drop_output(sys.stderr)
            record_event(self._run, "output-dropped", message=error.strerror or str(error))
        status = run_status(self._run)
        self._line.update(status)
        return status
