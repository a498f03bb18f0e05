"""Run directories in every state, created without a scheduler or ranks. No tests here."""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from scaletrain_cli.launch.attempts import Decision, Outcome, begin_attempt, end_attempt
from scaletrain_cli.launch.backends.local.backend import write_supervisor
from scaletrain_cli.launch.node.processes import ProcessIdentity, identify
from scaletrain_cli.launch.submit import CreatedRun, create_run
from scaletrain_cli.reasons import recorded
from scaletrain_cli.rundir.journal import append_line, record_event
from scaletrain_cli.rundir.paths import SweepPlace, write_sweep_place
from scaletrain_cli.spec import load_spec
from scaletrain_cli.worker.checkpoint_commit import close_attempt
from tests.cli.command_line import SMALL
from tests.launch.conftest import make_plan
from tests.rundir.test_checkpoints import ATTEMPT, save

STATES = ("queued", "running", "preempted", "finished", "failed", "cancelled", "unknown", "damaged")
_ENDS = {
    "preempted": (75, "preempted"),
    "finished": (0, "done"),
    "failed": (1, "crash"),
    "cancelled": (75, "cancelled"),
}


@contextmanager
def living_process() -> Iterator[ProcessIdentity]:
    """A process that a test may take for a supervisor, and that a verb may stop."""
    process = subprocess.Popen(["sleep", "infinity"])
    try:
        found = identify(process.pid)
        assert found is not None
        yield found
    finally:
        process.kill()
        process.wait()


def prepare(state: str, run_id: str, supervisor: ProcessIdentity | None = None, *overrides: str) -> Path:
    """Make a run under the runs root that is in this state; one that lives needs a process as its supervisor."""
    made = create_run(spec := load_spec(SMALL, overrides), make_plan(spec), run_id)
    run = made.run
    record_event(run, "submitted", scheduler="local", job_id="7")
    if state == "queued":
        assert supervisor is not None
        before = prepare("running", f"before-{run_id}", supervisor)
        write_sweep_place(run, SweepPlace("s", 2, 2, ("training.steps=2",), before.name))
        write_supervisor(run, supervisor)
        return run.path
    if state == "unknown":
        (run.path / "supervisor.json").write_text('{"hostname": "elsewhere", "pid": 1, "start_ticks": 1}')
        return run.path
    _begin(made)
    if state == "running":
        assert supervisor is not None
        write_supervisor(run, supervisor)
        return run.path
    write_supervisor(run, ProcessIdentity(2**22 + 1, 1))  # a pid that no process has
    code, reason = _ENDS.get(state, (1, "crash"))
    outcome = Outcome(code, reason, recorded(f"{reason} happened"))  # type: ignore[arg-type]
    end_attempt(run, spec, 1, outcome, Decision(False, code, "so it was decided"))
    record_event(run, "attempt-ended", attempt=1, exit_code=code, reason=reason, message="it was so", requeue=False)
    close_attempt(run.checkpoints, ATTEMPT)
    if state == "cancelled":
        run.stop_file.touch()
    if state == "damaged":
        run.record.write_text("{")
    return run.path


def _begin(made: CreatedRun) -> None:
    run = made.run
    begin_attempt(run, made.record.spec, scheduler="local", job_id="7", nodes=("n",))
    for step in (1, 2, 3):
        append_line(run.metrics, {"step": step, "loss": 4.0 - step})
    save(run.checkpoints, 2)
    record_event(run, "checkpoint", step=2, attempt=1, bytes=5000, seconds=0.5, blocked_seconds=0.1)
    log = run.attempt(1) / "logs" / "n-00000.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    log.write_text("step 1\nstep 2\n", encoding="utf-8")
