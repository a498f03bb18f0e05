"""`scaletrain exec`, `shell` and `port-forward` on a real run of this machine, and what they refuse."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from scaletrain_cli.errors import ExitCode, SchedulerError, UsageError
from scaletrain_cli.launch.attempts import begin_attempt
from scaletrain_cli.launch.backends.base import Backend, JobNode, NodeCommand
from scaletrain_cli.launch.backends.local.backend import LocalBackend
from scaletrain_cli.launch.backends.slurm.backend import session_command as slurm_session_command
from scaletrain_cli.launch.job import Job
from scaletrain_cli.launch.node_session import PortPair, node_of_run, node_session, port_pair
from scaletrain_cli.launch.submit import create_run, submit_run
from scaletrain_cli.reasons import Reason
from tests import forked
from tests.cli.command_line import scaletrain
from tests.conftest import isolate
from tests.launch.backends.local.test_local import kill_all_of
from tests.launch.conftest import LOCAL, PROJECT, MadeRun, MakeRun, make_plan, make_spec
from tests.launch.sessions import ECHO_SERVER, Sessions
from tests.ports import reserved_port
from tests.waiting import wait_until


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MadeRun]:
    """A run of two ranks that trains until it is killed: with real ranks, whose variables a session reads."""
    folder = tmp_path_factory.mktemp("made")
    with pytest.MonkeyPatch.context() as patch:
        isolate(patch, folder)
        patch.setenv("PYTHONPATH", str(PROJECT))
        spec = make_spec("training.global_batch_size=2", fake={"steps": 100_000})
        new = create_run(spec, make_plan(spec), root=folder / "runs")
        made = MadeRun(new.run, new.record)
        try:
            submit_run(made.run, made.record, LOCAL)
            wait_until(lambda: all("up" in made.log(1, rank) for rank in (0, 1)), "the ranks are up")
            yield made
        finally:
            kill_all_of(made)


@pytest.fixture
def sessions(made: MadeRun) -> Sessions:
    return Sessions(str(made.run.path), os.environ | {"PYTHONPATH": str(PROJECT)})


def test_a_command_beside_the_ranks_of_a_local_run(sessions: Sessions, made: MadeRun) -> None:
    sessions.passes_streams_and_the_exit_code_on()
    sessions.has_the_environment_of_the_ranks(str(made.run.path), rank=1)
    sessions.streams_output_and_passes_ctrl_c_on()
    sessions.ends_the_command_of_a_user_who_is_gone()


def test_a_shell_beside_the_ranks_of_a_local_run(sessions: Sessions) -> None:
    sessions.opens_a_shell_with_a_terminal_of_the_same_size()


def test_a_port_of_a_local_run_is_named_and_forwarded_only_to_another_one(sessions: Sessions, made: MadeRun) -> None:
    with subprocess.Popen([sys.executable, "-c", ECHO_SERVER], stdout=subprocess.PIPE, text=True) as server:
        port = int(server.stdout.readline())
        named = scaletrain("port-forward", made.run.path, port)
        assert (named.code, f"is at 127.0.0.1:{port} already" in named.err) == (ExitCode.DONE, True)
        sessions.forwards_a_port(port, reserved_port())
        taken = scaletrain("port-forward", made.run.path, f"{port}:1", code=ExitCode.USAGE)
        assert f"port {port} of this machine cannot be used" in taken.err
        server.kill()


def test_what_a_run_does_not_have_is_refused_and_nothing_starts(made: MadeRun) -> None:
    for options, said in (
        (("--node", "1"), "has no node 1"),
        (("--node", "elsewhere"), "has no node elsewhere; its nodes are"),
        (("--rank", "2"), "the run has no rank 2. Give a number from 0 to 1."),
        (("--rank", "0", "--node", "0"), "exclude each other"),
    ):
        refused = scaletrain("exec", made.run.path, *options, "--", "touch", made.run.path / "started")
        assert refused.code == ExitCode.USAGE
        assert said in refused.err
    shell = scaletrain("shell", made.run.path)
    assert (shell.code, "needs a terminal" in shell.err) == (ExitCode.USAGE, True)
    assert not (made.run.path / "started").exists()


def test_a_run_that_does_not_run_is_refused(make_run: MakeRun) -> None:
    made = make_run()
    for verb, words in (("exec", ("--", "true")), ("port-forward", ("8080",))):
        assert "does not run; its state is" in scaletrain(verb, made.run.path, *words, code=ExitCode.USAGE).err


def test_a_run_of_another_user_is_refused(make_run: MakeRun) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can give a file away")
    made = make_run()
    os.chown(made.run.path, 12345, -1)
    assert "12345" in scaletrain("exec", made.run.path, "--", "true", code=ExitCode.USAGE).err


class Running(LocalBackend):
    """A back end whose jobs always run."""

    def job(self, run: object, record: object) -> Job:
        return Job("1", "running", nodes=("here",))


class Unreachable(Running):
    def node_command(self, run: object, record: object, node: JobNode) -> NodeCommand:
        return NodeCommand(("/bin/sh", "-c", "echo from the scheduler; echo no such step >&2; exit 3"))


class Larger(Running):
    """A job that holds two nodes more than its run uses."""

    def job(self, run: object, record: object) -> Job:
        return Job("1", "running", nodes=("n1", "n2", "n3"))


class Silent(Running):
    def job(self, run: object, record: object) -> Job:
        raise SchedulerError(Reason("slurm.no-command", {"command": "squeue"}))


def install(monkeypatch: pytest.MonkeyPatch, backend: Backend) -> None:
    for module in ("status", "node_session"):
        monkeypatch.setattr(f"scaletrain_cli.launch.{module}.backend_for", lambda name: backend)


def test_a_back_end_that_cannot_reach_the_node_is_an_error_of_the_scheduler(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """What it prints is shown, and taken neither for output of the command nor for its exit code."""
    made = make_run()
    install(monkeypatch, Unreachable())
    record, node = node_of_run(made.run)
    with pytest.raises(SchedulerError, match="ended with exit code 3"), node_session(made.run, record, node, {}):
        pytest.fail("no session was opened")
    shown = capfd.readouterr()
    assert shown.out == ""
    assert shown.err.split("\n")[:2] in (["from the scheduler", "no such step"], ["no such step", "from the scheduler"])


def test_a_silent_scheduler_refuses_with_its_own_exit_code(make_run: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    made = make_run()
    begin_attempt(made.run, made.record.spec, scheduler="local", job_id="1", nodes=("here",))
    install(monkeypatch, Silent())
    with pytest.raises(SchedulerError, match="does not say whether"):
        node_of_run(made.run)


def test_the_nodes_are_those_of_the_attempt(make_run: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    made = make_run()
    install(monkeypatch, Larger())
    record, unknown = node_of_run(made.run)
    assert not unknown.named
    with pytest.raises(SchedulerError, match="no record names node 0"):
        slurm_session_command(record.spec, made.run.path, unknown)
    begin_attempt(made.run, record.spec, scheduler="local", job_id="1", nodes=("n2",))
    for node in (None, "0", "n2"):
        assert node_of_run(made.run, node)[1] == JobNode("1", 0, "n2")
    assert "--nodelist=n2" in slurm_session_command(record.spec, made.run.path, JobNode("1", 0, "n2"))
    begin_attempt(made.run, record.spec, scheduler="local", job_id="2", nodes=("n3",))
    assert not node_of_run(made.run)[1].named, "the latest attempt is that of another job"


def test_a_back_end_without_the_method_refuses(make_run: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    made = make_run()

    class Without(Running):
        node_command = Backend.node_command

    install(monkeypatch, Without())
    record, node = node_of_run(made.run)
    with pytest.raises(UsageError, match="not implemented"), node_session(made.run, record, node, {}):
        pytest.fail("no session was opened")


def test_a_job_without_an_attempt_refuses_a_command(make_run: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    made = make_run()
    install(monkeypatch, Running())
    record, node = node_of_run(made.run)
    with pytest.raises(UsageError, match="no attempt of"), node_session(made.run, record, node, {"words": ["true"]}):
        pytest.fail("no session was opened")


@pytest.mark.parametrize(
    ("text", "pair"), [("6006", PortPair(6006, 6006)), ("8080:80", PortPair(8080, 80)), ("0:80", PortPair(0, 80))]
)
def test_ports_are_read_as_kubectl_reads_them(text: str, pair: PortPair) -> None:
    assert port_pair(text) == pair


@pytest.mark.parametrize("text", ["", "0", "a", "80:", ":80", "1:2:3", "70000", "8080:0", "-1"])
def test_other_ports_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="must be"):
        port_pair(text)


def test_no_file_is_needed_on_the_node_but_the_run_directory(tmp_path: Path, made: MadeRun) -> None:
    """The command starts in any folder: srun starts it in that of the user."""
    done = forked.scaletrain(
        "exec", str(made.run.path), "--", "pwd", environment=forked.forking(os.environ), folder=tmp_path
    )
    assert done.stdout.strip() == str(made.run.path)
