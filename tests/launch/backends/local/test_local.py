"""The local back end with real processes: restarts, cancellation, and the end of the terminal session."""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from scaletrain_cli.errors import SchedulerError
from scaletrain_cli.launch.attempts import AttemptRecord, read_attempts
from scaletrain_cli.launch.backends.local.backend import (
    read_supervisor,
    supervisor_command,
    write_supervisor,
)
from scaletrain_cli.launch.explain import explain
from scaletrain_cli.launch.job import read_submission
from scaletrain_cli.launch.node.processes import identify
from scaletrain_cli.launch.node.record import read_node_records
from scaletrain_cli.launch.resume import resume
from scaletrain_cli.launch.status import exit_code_of, run_status
from scaletrain_cli.launch.submit import submit_run
from scaletrain_cli.safe_files import locked
from tests.launch.backends.local.launching import launching
from tests.launch.conftest import ENGINE, LOCAL, MadeRun, MakeRun, is_running, make_plan, make_spec
from tests.waiting import wait_until

ONE_RANK = ("cluster.gpus_per_node=1", "training.global_batch_size=1")


@pytest.fixture
def submit(make_run: MakeRun) -> Iterator[MakeRun]:
    """Submit a fake run, by forks unless ``real``; its processes are killed at the end of the test."""
    submitted: list[MadeRun] = []

    def start(*overrides: str, real: bool = False, **fake: object) -> MadeRun:
        made = make_run(*ONE_RANK, *overrides, **fake)
        submitted.append(made)
        if real:
            submit_run(made.run, made.record, LOCAL)
        else:
            launching("submit", made.run)
        return made

    yield start
    for made in submitted:
        kill_all_of(made)


def kill_all_of(made: MadeRun) -> None:
    supervisor = read_supervisor(made.run)
    if supervisor is not None and supervisor.is_alive_in(made.run):
        os.kill(supervisor.process.pid, signal.SIGKILL)
    for number in made.run.attempts():
        for node in read_node_records(made.run, number):
            if node.ended is None and node.agent.is_alive():
                os.kill(node.agent_pid, signal.SIGKILL)


def attempts(made: MadeRun) -> list[AttemptRecord]:
    return read_attempts(made.run)


def agent_pid(made: MadeRun, attempt: int) -> int:
    wait_until(lambda: "up" in made.log(attempt, 0), f"attempt {attempt} is up")
    return read_node_records(made.run, attempt)[0].agent_pid


def supervisor_pid(made: MadeRun) -> int:
    supervisor = read_supervisor(made.run)
    return supervisor.process.pid


def wait_for_end(made: MadeRun) -> None:
    wait_until(lambda: LOCAL.job(made.run, made.record).state == "ended", "the supervisor has ended")


def test_a_preempted_run_continues_from_its_checkpoint_until_it_is_done(submit: MakeRun) -> None:
    made = submit(steps=9, stay={"1:0": 3, "2:0": 6})
    for attempt in (1, 2):
        os.kill(agent_pid(made, attempt), signal.SIGTERM)
        wait_until(lambda: len(attempts(made)) > attempt, "the next attempt begins")  # noqa: B023
    wait_for_end(made)
    assert [(a.exit_code, a.reason) for a in attempts(made)] == [(75, "preempted"), (75, "preempted"), (0, "done")]
    assert [event["requeue"] for event in made.events("attempt-ended")] == [True, True, False]
    saved = [attempt.last_checkpoint_step for attempt in attempts(made)]
    assert saved[0] is not None
    assert saved[0] == attempts(made)[1].checkpoint_at_start
    assert made.events("stopped") == []
    assert len(made.events("finished")) == 1


@pytest.mark.long
def test_usr1_to_the_supervisor_preempts_and_the_run_continues(submit: MakeRun) -> None:
    made = submit(stay={"1:0": 1})
    agent_pid(made, 1)
    os.kill(supervisor_pid(made), signal.SIGUSR1)
    wait_for_end(made)
    assert [attempt.reason for attempt in attempts(made)] == ["preempted", "done"]
    assert "heard SIGUSR1" in made.log(1, 0)


def test_an_agent_that_is_killed_costs_a_node_restart_and_leaves_nothing_behind(submit: MakeRun) -> None:
    made = submit(stay={"1:0": 1}, detached_child=True, checkpoint_every=1)
    agent = agent_pid(made, 1)
    wait_until(lambda: "child" in made.log(1, 0), "the grandchild is up")
    wait_until(lambda: read_node_records(made.run, 1)[0].ranks, "the agent has recorded its ranks")
    (rank,) = read_node_records(made.run, 1)[0].ranks
    os.kill(agent, signal.SIGKILL)
    wait_for_end(made)
    assert [attempt.reason for attempt in attempts(made)] == ["node", "done"]
    child = int(made.log(1, 0).split("child ")[1].split()[0])
    assert not is_running(rank.pid)
    assert not is_running(child)


def test_the_run_survives_the_end_of_the_terminal_session(make_run: MakeRun) -> None:
    made = make_run(*ONE_RANK, stay={"1:0": 1})
    program = (
        "import sys\n"
        "from pathlib import Path\n"
        "from tests.launch.conftest import LOCAL\n"
        "from scaletrain_cli.launch.submit import submit_run\n"
        "from scaletrain_cli.rundir.paths import RunDir\n"
        "from scaletrain_cli.rundir.record import read_record\n"
        "run = RunDir(Path(sys.argv[1]))\n"
        "submit_run(run, read_record(run), LOCAL)\n"
        "print('submitted', flush=True)\n"
        "sys.stdin.read()\n"
    )
    # A new session with its own terminal, as under sshd; closing the terminal sends SIGHUP to its processes.
    terminal, other_end = os.openpty()
    command = [sys.executable, "-c", program, str(made.run.path)]
    attach = (
        "import fcntl, os, signal, sys, termios\n"
        "signal.signal(signal.SIGHUP, signal.SIG_DFL)\n"  # under nohup it would be ignored
        "fcntl.ioctl(0, termios.TIOCSCTTY, 0)\n"
        "os.execv(sys.argv[1], sys.argv[1:])\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", attach, *command], stdin=other_end, stdout=subprocess.PIPE, start_new_session=True
    ) as shell:
        os.close(other_end)
        assert shell.stdout is not None
        try:
            assert shell.stdout.readline() == b"submitted\n"
            agent_pid(made, 1)
        finally:
            os.close(terminal)
        assert shell.wait() == -signal.SIGHUP
    os.kill(supervisor_pid(made), signal.SIGHUP)
    (made.run.path / "go").touch()
    wait_for_end(made)
    assert [attempt.reason for attempt in attempts(made)] == ["done"]


def test_sigterm_to_the_supervisor_saves_and_starts_no_further_attempt(submit: MakeRun) -> None:
    made = submit(steps=10_000, step_seconds=0.02)
    agent_pid(made, 1)
    os.kill(supervisor_pid(made), signal.SIGTERM)
    wait_for_end(made)
    (attempt,) = attempts(made)
    assert (attempt.exit_code, attempt.reason) == (75, "preempted")
    assert attempt.last_checkpoint_step
    assert "the supervisor was stopped" in made.events("stopped")[0]["why"]


def test_cancelling_saves_the_state_and_ends_the_run(submit: MakeRun) -> None:
    made = submit(real=True, steps=10_000, step_seconds=0.02)  # processes are known by their command lines
    agent_pid(made, 1)
    LOCAL.cancel(made.run, made.record)
    wait_for_end(made)
    (attempt,) = attempts(made)
    assert (attempt.exit_code, attempt.reason) == (75, "cancelled")
    assert attempt.last_checkpoint_step
    assert len(made.events("cancelled")) == 1


@pytest.mark.long
def test_a_stop_file_cancels_the_run(submit: MakeRun) -> None:
    made = submit(steps=10_000, step_seconds=0.02)
    agent_pid(made, 1)
    (made.run.path / "stop").touch()
    wait_for_end(made)
    (attempt,) = attempts(made)
    assert (attempt.exit_code, attempt.reason) == (75, "cancelled")
    assert attempt.last_checkpoint_step


@pytest.mark.long
def test_after_the_supervisor_is_killed_the_ranks_save_and_a_resumed_run_continues(submit: MakeRun) -> None:
    made = submit(stay={"1:0": 1}, save_seconds=600)
    agent_pid(made, 1)
    os.kill(supervisor_pid(made), signal.SIGKILL)
    assert LOCAL.job(made.run, made.record).state == "running"  # the agent still saves, so no other attempt may start
    (made.run.path / "save").touch()
    wait_for_end(made)
    left = run_status(made.run, LOCAL)
    assert (left.state, exit_code_of(made.run, left)) == ("preempted", 75)
    report = resume(made.run, scheduler=LOCAL).report
    assert "without reporting an exit status: the ranks stopped, and the latest checkpoint" in str(report.why_ended)
    wait_for_end(made)
    assert [attempt.reason for attempt in attempts(made)] == ["preempted", "done"]
    assert attempts(made)[1].checkpoint_at_start == report.checkpoint.step


def test_a_run_has_one_supervisor_at_a_time(submit: MakeRun) -> None:
    made = submit(steps=10_000)
    with pytest.raises(SchedulerError, match="already has a supervisor"):
        LOCAL.submit(made.run, made.record)
    with locked(made.run.path / "supervisor.lock", wait_seconds=0) as alone:
        assert not alone


def test_a_supervisor_is_not_mistaken_for_a_later_process_with_its_pid(submit: MakeRun) -> None:
    made = submit(steps=1)
    wait_for_end(made)
    path = made.run.path / "supervisor.json"
    path.write_text(path.read_text().replace(f'"pid": {supervisor_pid(made)}', f'"pid": {os.getpid()}'))
    assert LOCAL.job(made.run, made.record).state == "ended"


def test_training_in_the_foreground_returns_the_runs_exit_code(make_run: MakeRun) -> None:
    done, stuck = make_run(*ONE_RANK), make_run(*ONE_RANK, die={"*:*": 93})
    ticks: list[None] = []
    code = LOCAL.run_in_foreground(done.run, done.record, lambda: ticks.append(None))
    assert code == 0
    assert ticks
    assert launching("foreground", stuck.run).wait() == 93


def test_ctrl_c_in_the_foreground_saves_the_state(make_run: MakeRun) -> None:
    made = make_run(*ONE_RANK, steps=10_000)
    training = launching("foreground", made.run)
    wait_until(lambda: "up" in made.log(1, 0), "the rank is up")
    training.send_signal(signal.SIGINT)
    assert training.wait() == 75
    assert attempts(made)[0].last_checkpoint_step


def test_a_machine_without_the_gpus_is_refused_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    with pytest.raises(SchedulerError, match=r"1 GPU .* needs 2"):
        LOCAL.preflight(spec := make_spec("cluster.gpu=h100-sxm-80gb"), make_plan(spec))
    outlook = LOCAL.preflight(make_spec(), make_plan(make_spec()))
    assert (outlook.notes, outlook.start.why) == ((), "this machine has no queue")


def test_the_rendered_command_is_the_one_that_is_run(make_run: MakeRun) -> None:
    made = make_run()
    text = LOCAL.render(made.run, made.record)
    shown = subprocess.run(["bash", "-c", f"printf '%s\\n' {text}"], capture_output=True, text=True, check=True).stdout
    assert shown.splitlines() == supervisor_command(made.run, ENGINE)
    assert Path(shown.splitlines()[0]) == Path(sys.executable)


def test_a_node_that_cannot_start_ranks_reports_the_reason(submit: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    """A missing secrets file is an error of the run, not a lost node: no retry, and the attempt records the reason."""
    monkeypatch.setenv("TOKEN", "hidden")
    made = submit("secret_env=[TOKEN]", stay={"1:0": 1})
    agent_pid(made, 1)
    made.run.secrets.unlink()
    os.kill(agent_pid(made, 1), signal.SIGTERM)
    wait_for_end(made)
    last = read_attempts(made.run)[-1]
    assert (last.exit_code, last.reason) == (2, "usage")
    assert "does not hold TOKEN" in last.message


def block_checkpoints(made: MadeRun) -> Path:
    """Make it impossible to create a checkpoint folder, even as root."""
    folder = made.run.path / "checkpoints"
    if folder.exists():
        shutil.rmtree(folder)
    folder.write_text("in the way")
    return folder


def test_a_submission_fails_with_the_reason_why_the_supervisor_cannot_begin(make_run: MakeRun) -> None:
    made = make_run()
    block_checkpoints(made)
    with pytest.raises(SchedulerError, match=r"checkpoints"):
        submit_run(made.run, made.record, LOCAL)
    assert read_submission(made.run) is None


def test_a_resume_that_cannot_begin_fails_with_the_reason_that_status_shows(submit: MakeRun) -> None:
    made = submit("restarts.crash=0", die={"1:0": 93})
    wait_for_end(made)
    folder = block_checkpoints(made)
    before = read_submission(made.run)
    with pytest.raises(RuntimeError, match=r"SchedulerError.*the supervisor cannot continue.*checkpoints"):
        launching("resume", made.run)
    assert read_submission(made.run) == before
    assert "cannot continue" in LOCAL.job(made.run, made.record).detail
    status = run_status(made.run, LOCAL)
    assert status.state == "failed"
    assert str(status.reason).startswith(f"the supervisor cannot continue: {folder}")
    assert "Before that, attempt 1 ended with exit code 93" in str(status.reason)
    first, *_ = explain(made.run).findings
    assert first.code == "local.supervisor-failed"
    assert first.needs_action
    assert [event["why"] for event in made.events("stopped")][-1].startswith("the supervisor cannot continue")
    folder.unlink()
    launching("resume", made.run)
    wait_for_end(made)
    assert run_status(made.run, LOCAL).state == "finished"


def test_a_supervisor_that_cannot_read_its_run_any_more_records_why(make_run: MakeRun) -> None:
    made = make_run(*ONE_RANK)
    attempt = made.run.attempt(1) / "attempt.json"
    attempt.parent.mkdir(parents=True)
    attempt.write_text('{"number": "one"}')
    ended = subprocess.run(supervisor_command(made.run, ENGINE), capture_output=True, text=True)
    assert ended.returncode == 2
    (stopped,) = made.events("stopped")
    assert (stopped["code"], stopped["exit_code"]) == ("local.supervisor-failed", 2)
    assert str(attempt) in stopped["why"]
    assert "cannot continue" in LOCAL.job(made.run, made.record).detail


FAILING_SUPERVISOR = """
import sys
from scaletrain_cli.errors import UsageError
from scaletrain_cli.launch.backends.local import supervisor
def fail(self, first):
    self.on_begin()
    raise {error}
supervisor.Supervision._attempt = fail
sys.exit(supervisor.main())
"""


@pytest.mark.parametrize(("error", "code"), [("UsageError('the record is damaged')", 2), ("TypeError('a bug')", 1)])
def test_a_supervisor_that_fails_after_its_start_tells_it_and_keeps_no_secret(
    error: str, code: int, make_run: MakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOKEN", "hidden")
    monkeypatch.setenv("SCALETRAIN_TRACEBACK", "1")
    made = make_run(*ONE_RANK, "secret_env=[TOKEN]", f"notify=[{{command: [tee, {tmp_path}/told]}}]")
    assert made.run.secrets.exists()
    command = [sys.executable, "-c", FAILING_SUPERVISOR.format(error=error), str(made.run.path)]
    assert subprocess.run(command, capture_output=True, text=True).returncode == code
    (stopped,) = made.events("stopped")
    assert (stopped["code"], stopped["exit_code"]) == ("local.supervisor-failed", code)
    assert stopped["why"] in (tmp_path / "told").read_text()
    assert not made.run.secrets.exists()


def test_cancel_signals_no_process_that_was_not_started_for_the_run(make_run: MakeRun) -> None:
    """Other users who can write to the run directory could name any process of the user who cancels."""
    made = make_run(*ONE_RANK)
    bystander = subprocess.Popen(["cat"], stdin=subprocess.PIPE)
    try:
        identity = identify(bystander.pid)
        assert identity is not None
        write_supervisor(made.run, identity)
        LOCAL.cancel(made.run, made.record)
        assert bystander.communicate() == (None, None)
        assert bystander.returncode == 0  # by the end of its input, and by no signal
    finally:
        bystander.kill()
        bystander.wait()
