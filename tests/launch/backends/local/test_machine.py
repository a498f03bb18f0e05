"""A machine is known by its ids and not by its name, and the recorded end of a run decides on every machine."""

import socket
from dataclasses import dataclass

import pytest

from scaletrain_cli.errors import SchedulerError, UsageError
from scaletrain_cli.launch.attempts import Decision, Outcome, begin_attempt, end_attempt
from scaletrain_cli.launch.backends.local import backend
from scaletrain_cli.launch.backends.local.backend import write_supervisor
from scaletrain_cli.launch.node.processes import ProcessIdentity, own_identity
from scaletrain_cli.launch.node.record import NodeRecord, write_node_record
from scaletrain_cli.launch.remove import plan_removal
from scaletrain_cli.launch.resume import inspect_resume
from scaletrain_cli.reasons import recorded
from scaletrain_cli.safe_files import locked
from tests.launch.conftest import LOCAL, MadeRun, MakeRun

GONE = ProcessIdentity(2**22 + 1, 1)  # a pid that no process has


@dataclass(frozen=True)
class Machine:
    name: str
    machine: str
    boot: str

    def use(self, patch: pytest.MonkeyPatch) -> None:
        patch.setattr(socket, "gethostname", lambda: self.name)
        patch.setattr(backend, "machine_id", lambda: self.machine)
        patch.setattr(backend, "boot_id", lambda: self.boot)


FIRST = Machine("a", "m1", "b1")
RENAMED = Machine("b", "m1", "b1")
RENAMED_AND_BOOTED = Machine("b", "m1", "b2")
CONTAINER = Machine("c", "", "b1")  # another one on the same machine
OTHER = Machine("d", "m2", "b3")
WITHOUT_IDS = Machine("a", "", "")


def supervised(made: MadeRun, process: ProcessIdentity, patch: pytest.MonkeyPatch) -> None:
    """A run that a process of the first machine supervises."""
    FIRST.use(patch)
    write_supervisor(made.run, process)
    begin_attempt(made.run, made.record.spec, scheduler="local", job_id="1", nodes=("a",))


def ended(made: MadeRun) -> None:
    outcome = Outcome(1, "crash", recorded("it was so"))
    end_attempt(made.run, made.record.spec, 1, outcome, Decision(False, 1, "so it was decided"))


@pytest.mark.parametrize("machine", [FIRST, RENAMED, RENAMED_AND_BOOTED, CONTAINER, OTHER, WITHOUT_IDS])
def test_a_recorded_end_is_one_everywhere(machine: Machine, make_run: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    made = make_run()
    supervised(made, GONE, monkeypatch)
    ended(made)
    machine.use(monkeypatch)
    assert LOCAL.job(made.run, made.record).state == "ended"
    assert not inspect_resume(made.run, LOCAL).active
    assert plan_removal(made.run, with_checkpoints=False).state == "failed"


@pytest.mark.parametrize(
    ("machine", "state"), [(FIRST, "running"), (RENAMED, "running"), (RENAMED_AND_BOOTED, "ended"), (OTHER, "unknown")]
)
def test_a_run_lives_on_the_machine_and_the_boot_that_started_it(
    machine: Machine, state: str, make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = make_run()
    supervised(made, own_identity(), monkeypatch)
    machine.use(monkeypatch)
    assert LOCAL.job(made.run, made.record).state == state
    if state == "ended":
        assert not inspect_resume(made.run, LOCAL).active
        return
    with pytest.raises((UsageError, SchedulerError)):
        plan_removal(made.run, with_checkpoints=False)
    if state == "unknown":
        with pytest.raises(SchedulerError, match="was started on a"):
            LOCAL.cancel(made.run, made.record)


def test_in_another_container_the_lock_says_if_it_lives(make_run: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    made = make_run()
    supervised(made, GONE, monkeypatch)
    with locked(made.run.path / "supervisor.lock"):
        CONTAINER.use(monkeypatch)
        assert LOCAL.job(made.run, made.record).state == "running"
    assert LOCAL.job(made.run, made.record).state == "ended"


def test_an_end_from_before_the_supervisor_does_not_count(make_run: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    made = make_run()
    supervised(made, GONE, monkeypatch)
    ended(made)
    write_supervisor(made.run, GONE)  # of a resume
    OTHER.use(monkeypatch)
    assert LOCAL.job(made.run, made.record).state == "unknown"


def test_a_process_with_the_pid_of_an_agent_of_an_earlier_boot_is_not_that_agent(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, me = make_run(), own_identity()
    supervised(made, GONE, monkeypatch)
    for boot, state in ((me.boot, "running"), ("b1", "ended")):
        agent = NodeRecord("node-0000-a", "a", 0, me.pid, me.start_ticks, 0.0, agent_boot=boot)
        write_node_record(made.run, 1, agent)
        assert LOCAL.job(made.run, made.record).state == state
