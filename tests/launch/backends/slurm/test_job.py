"""The records that the batch script makes at the begin and end of an attempt, without Slurm."""

import errno
import time
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from scaletrain_cli.errors import SchedulerError
from scaletrain_cli.launch.attempts import Outcome, begin_attempt, end_attempt, read_attempt, read_attempts
from scaletrain_cli.launch.backends.slurm import explain, job
from scaletrain_cli.launch.backends.slurm.job import begin, main, time_is_up, watch_reservation
from scaletrain_cli.launch.backends.slurm.tables import moment, records
from scaletrain_cli.launch.job import Submission
from scaletrain_cli.launch.node.record import write_node_record
from scaletrain_cli.reasons import recorded
from scaletrain_cli.rundir.documents import DamagedError, UnreadableError, write_document
from tests.launch.backends.slurm.test_elastic_job import Slurm
from tests.launch.conftest import MadeRun, MakeRun
from tests.launch.test_attempts import node, rank

JOB = {"SLURM_JOB_ID": "42", "SLURMD_NODENAME": "localhost"}
ENDED_BY_SLURM = "Slurm is ending the job"
STALE = OSError(errno.ESTALE, "Stale file handle")


@pytest.fixture
def made(make_run: MakeRun, monkeypatch: pytest.MonkeyPatch) -> MadeRun:
    for name, value in JOB.items():
        monkeypatch.setenv(name, value)
    return make_run("restarts.node=1")


def say(made: MadeRun, word: str, *options: str) -> int:
    return main([word, str(made.run.path), *options])


def submitted(made: MadeRun, job_id: str) -> None:
    """Record that job ``job_id`` was submitted for the run."""
    write_document(made.run.submission, vars(Submission("slurm", job_id, submitted=1000.0, first_attempt=1)))


def close(made: MadeRun, code: int, reason: str) -> None:
    """End the latest attempt without a restart decision."""
    number = made.run.attempts()[-1]
    end_attempt(made.run, made.record.spec, number, Outcome(code, reason, recorded(reason)), None)  # type: ignore[arg-type]


def test_an_attempt_begins_with_its_number_address_and_port(made: MadeRun, capfd: pytest.CaptureFixture[str]) -> None:
    assert say(made, "begin") == 0
    number, address, port = capfd.readouterr().out.split()
    assert (number, address) == ("1", "localhost")
    assert 1024 < int(port) < 32768
    attempt = read_attempt(made.run, 1)
    assert (attempt.scheduler, attempt.job_id, attempt.nodes) == ("slurm", "42", ())


@pytest.mark.parametrize(
    ("routes", "address"),
    [({"n2": "10.0.0.1"}, "10.0.0.1"), ({"10.9.9.2": "10.9.9.1"}, "10.9.9.1"), ({}, "localhost")],
    ids=["the name of another node", "its NodeAddr", "none"],
)
def test_the_rendezvous_is_at_the_address_of_the_route_to_another_node(
    made: MadeRun,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    routes: dict[str, str],
    address: str,
) -> None:
    """The names of a cloud node may resolve on the node itself only, or to 127.0.1.1."""
    monkeypatch.setenv("SLURM_JOB_NODELIST", "localhost,n2")
    shown = SimpleNamespace(stdout="NodeName=n2 NodeAddr=10.9.9.2 NodeHostName=n2\n")
    monkeypatch.setattr(job, "call_slurm", lambda command, seconds: shown)
    monkeypatch.setattr(job, "route_address", routes.get)
    assert say(made, "begin") == 0
    assert capfd.readouterr().out.split()[:2] == ["1", address]


def test_a_job_that_slurm_ends_continues_if_slurm_requeues_it(made: MadeRun, capfd: pytest.CaptureFixture[str]) -> None:
    say(made, "begin")
    capfd.readouterr()
    say(made, "end", "--attempt=1", "--srun-exit-code=143", "--ended-by-slurm")
    assert capfd.readouterr().out == "stop\n"
    (ended,) = made.events("attempt-ended")
    assert (ended["requeue"], ended["why"].startswith(ENDED_BY_SLURM)) == (False, True)
    assert made.events("stopped") == []  # Slurm may requeue the job
    assert say(made, "begin") == 0
    assert capfd.readouterr().out.startswith("2 localhost ")


@pytest.mark.parametrize(
    ("shown", "decision"),
    [
        ("JobId=42 JobState=RUNNING PreemptTime=None", "requeue"),
        ("JobId=42 JobState=RUNNING PreemptTime=2026-01-01T00:00:00", "stop"),
        ("JobId=42 JobState=COMPLETING PreemptTime=None", "stop"),
        ("", "stop"),
    ],
)
def test_a_sigterm_to_the_script_alone_does_not_forbid_a_requeue(
    made: MadeRun, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], shown: str, decision: str
) -> None:
    """`scancel --batch --signal=TERM` is a request to save; Slurm does not end the job."""
    monkeypatch.setattr(job, "job_fields", lambda job_id: next(records(shown), {}))
    say(made, "begin")
    capfd.readouterr()
    say(made, "end", "--attempt=1", "--srun-exit-code=1", "--ended-by-slurm")
    assert capfd.readouterr().out == f"{decision}\n"


def test_a_requeue_that_slurm_refuses_ends_the_run(made: MadeRun, capfd: pytest.CaptureFixture[str]) -> None:
    say(made, "begin")
    assert say(made, "end", "--attempt=1", "--srun-exit-code=1") == 1
    assert capfd.readouterr().out.endswith("requeue\n")
    assert say(made, "not-requeued", "--attempt=1") == 1
    attempt = read_attempt(made.run, 1)
    assert not attempt.decision.requeue
    assert "Slurm did not requeue" in made.events("stopped")[-1]["why"]
    assert "`scaletrain resume`" in made.events("stopped")[-1]["why"]


def test_a_run_that_is_cancelled_before_its_job_is_requeued_is_cancelled(made: MadeRun) -> None:
    say(made, "begin")
    say(made, "end", "--attempt=1", "--srun-exit-code=1")
    made.run.stop_file.touch()
    assert say(made, "not-requeued", "--attempt=1") == 1
    assert not read_attempt(made.run, 1).decision.requeue
    assert [event["code"] for event in made.events("stopped")] == ["launch.stop-cancelled"]
    assert len(made.events("cancelled")) == 1


@pytest.mark.parametrize(
    ("error", "options", "word", "code", "stopped"),
    [
        (STALE, (), "requeue", 1, []),
        (UnreadableError("attempt.json cannot be read: Input/output error."), (), "requeue", 1, []),
        (STALE, ("--ended-by-slurm",), "stop", 1, []),  # its owner may have deleted it
        (OSError(errno.ENOSPC, "No space left on device"), (), "stop", 93, [93]),
        (DamagedError("attempt.json is damaged."), (), "stop", 2, [2]),
        (LookupError("a bug"), (), "stop", 1, [1]),
    ],
)
def test_an_outage_of_the_file_system_at_the_end_of_an_attempt_requeues_the_job_and_another_error_ends_the_run(
    made: MadeRun,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    error: Exception,
    options: tuple[str, ...],
    word: str,
    code: int,
    stopped: list[int],
) -> None:
    monkeypatch.setenv("SCALETRAIN_TRACEBACK", "1")
    submitted(made, "42")
    say(made, "begin")
    capfd.readouterr()
    with monkeypatch.context() as outage:
        outage.setattr(job, "conclude_attempt", Mock(side_effect=error))
        assert say(made, "end", "--attempt=1", "--srun-exit-code=1", *options) == code
    assert capfd.readouterr().out == f"{word}\n"
    assert [event["exit_code"] for event in made.events("stopped")] == stopped
    say(made, "begin")
    assert read_attempt(made.run, 1).ended is not None, "the next start of the job has recorded it"


@pytest.mark.parametrize(
    ("of_run", "options", "error", "stopped"),
    [
        ("42", (), STALE, [1]),
        ("42", (), LookupError("a bug"), [1]),
        ("42", ("--follows",), STALE, []),  # the script requeues the job
        ("42", ("--follows",), LookupError("a bug"), []),
        ("42", ("--follows",), DamagedError("attempt.json is damaged."), [2]),
        ("43", (), STALE, []),  # the job was requeued by hand, and the run belongs to another one
    ],
    ids=["outage", "bug", "outage between attempts", "bug between attempts", "damage between attempts", "earlier job"],
)
def test_an_error_at_the_begin_of_an_attempt_ends_the_run_with_a_notification(
    make_run: MakeRun,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    of_run: str,
    options: tuple[str, ...],
    error: Exception,
    stopped: list[int],
) -> None:
    for name, value in (JOB | {"SCALETRAIN_TRACEBACK": "1"}).items():
        monkeypatch.setenv(name, value)
    made = make_run(f"notify=[{{command: [tee, {tmp_path}/notification]}}]")
    submitted(made, of_run)
    say(made, "begin")
    say(made, "end", "--attempt=1", "--srun-exit-code=1")
    (tmp_path / "notification").unlink(missing_ok=True)
    monkeypatch.setattr(job, "begin_attempt", Mock(side_effect=error))
    assert say(made, "begin", *options) == (stopped or [1])[0]
    ends = made.events("stopped")
    assert [(end["code"], end["exit_code"]) for end in ends] == [("node.job-failed", code) for code in stopped]
    decision = read_attempt(made.run, 1).decision
    assert (decision.requeue, decision.exit_code) == ((False, stopped[0]) if stopped else (True, 1))
    notified = tmp_path / "notification"
    assert [end["why"] in notified.read_text() for end in ends] == [True] * notified.exists()


HEALTHY = {
    "scontrol --oneliner show node n1,n2": "NodeName=n1 State=ALLOCATED\nNodeName=n2 State=MIXED+PLANNED\n",
    "scontrol -o show job 42": "JobId=42 JobState=RUNNING PreemptTime=None",
    "squeue": "N/A|UNLIMITED",
}
DOWN, DRAINED = (
    HEALTHY["scontrol --oneliner show node n1,n2"].replace("ALLOCATED", s) for s in ("DOWN*", "MIXED+DRAIN")
)
PREEMPTED = HEALTHY["scontrol -o show job 42"].replace("None", "2026-01-01T00:00:00")
CREATED = "cluster.slurm.container={image: /a.sqsh, options: {container-name: a:create}}"


@pytest.mark.parametrize(
    ("differs", "environment", "setting", "word"),
    [
        ({}, {}, (), "restart 60"),
        ({"scontrol --oneliner show node n1,n2": DOWN}, {}, (), "requeue"),
        ({"scontrol --oneliner show node n1,n2": DRAINED}, {}, (), "requeue"),
        ({"scontrol --oneliner show node n1,n2": "fails"}, {}, (), "requeue"),  # no answer: srun would get none, too
        ({"scontrol -o show job 42": PREEMPTED}, {}, (), "requeue"),
        ({}, {"SLURM_JOB_END_TIME": str(int(time.time()) + 200)}, (), "requeue"),  # its signal may come meanwhile
        ({}, {"SLURM_JOB_NODELIST": "n[1-4]"}, (), "requeue"),  # of which it has given two back
        ({}, {}, (CREATED,), "requeue"),  # a container of this name is there now
    ],
    ids=["healthy", "down", "drained", "no answer", "preempted", "time limit", "fewer nodes", "container"],
)
def test_a_run_whose_rank_died_restarts_in_its_job_as_long_as_slurm_leaves_it_its_nodes(
    make_run: MakeRun,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    differs: dict[str, str],
    environment: dict[str, str],
    setting: tuple[str, ...],
    word: str,
) -> None:
    made = make_run(*setting)
    for module in (job, explain):
        monkeypatch.setattr(module, "call_slurm", Slurm(HEALTHY | differs))
    number = begin_attempt(made.run, made.record.spec, scheduler="slurm", job_id="42", nodes=("n1", "n2"))
    write_node_record(made.run, number, node(1, rank(0, -9)))
    for name, value in (JOB | {"SLURM_JOB_NODELIST": "n[1-2]"} | environment).items():
        monkeypatch.setenv(name, value)
    assert say(made, "end", "--attempt=1", "--srun-exit-code=1", "--may-restart") == 1
    assert capfd.readouterr().out == f"{word}\n"


def test_a_script_from_before_an_upgrade_is_never_told_to_restart(
    made: MadeRun, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Slurm keeps the script that was submitted; it ends the job at a word that it does not know."""
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n1")
    monkeypatch.setattr(job, "call_slurm", Slurm({}))
    number = begin_attempt(made.run, made.record.spec, scheduler="slurm", job_id="42", nodes=("n1",))
    write_node_record(made.run, number, node(1, rank(0, -9)))
    say(made, "end", "--attempt=1", "--srun-exit-code=1")
    assert capfd.readouterr().out == "requeue\n"


def test_nodes_that_slurm_does_not_give_to_an_attempt_in_place_are_no_failure_of_the_run(
    made: MadeRun, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """As where it cannot kill what the attempt before has left: srun ends after a minute."""
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n1")
    for module in (job, explain):
        monkeypatch.setattr(module, "call_slurm", Slurm(HEALTHY | {"scontrol --oneliner show node n1": "NodeName=n1"}))
    for _ in range(2):
        number = begin_attempt(made.run, made.record.spec, scheduler="slurm", job_id="42", nodes=("n1",))
        if number == 1:
            write_node_record(made.run, number, node(1, rank(0, -9)))
        say(made, "end", f"--attempt={number}", "--srun-exit-code=1", "--may-restart")
    assert capfd.readouterr().out == "restart 60\nrequeue\n"
    assert [attempt.reason for attempt in read_attempts(made.run)] == ["killed", "preempted"]


def test_an_attempt_with_a_killed_script_ends_and_is_charged(made: MadeRun, capfd: pytest.CaptureFixture[str]) -> None:
    say(made, "begin")
    assert say(made, "begin") == 0  # Slurm has requeued the job from a lost node
    assert [(event["attempt"], event["reason"]) for event in made.events("attempt-ended")] == [(1, "node")]
    assert say(made, "begin") == 1  # a second time, which restarts.node = 1 does not permit
    assert "restarts.node = 1 is used up" in capfd.readouterr().err
    assert made.run.attempts() == [1, 2]
    assert made.events("stopped")[-1]["exit_code"] == 1


UP, DOWN = "NodeName=n1 State=IDLE BootTime=2026-01-01T00:00:00 Reason=x y", "NodeName=n1 State=DOWN*+DRAIN"
REBOOTED = "NodeName=n1 State=IDLE BootTime=2036-01-01T00:00:00"
EARLIER, LATER = "2026-01-01T00:00:00", "2036-01-01T00:00:00"


@pytest.mark.parametrize(
    ("accounting", "node", "reason"),
    [
        (None, UP, "out-of-grace"),
        (None, DOWN, "node"),
        (None, REBOOTED, "node"),
        (None, None, "node"),
        (f"{EARLIER}|PREEMPTED\n{LATER}|RUNNING\n", DOWN, "out-of-grace"),
        (f"{EARLIER}|NODE_FAIL\n{LATER}|RUNNING\n", UP, "node"),
        (f"{EARLIER}|REQUEUED\n", UP, "out-of-grace"),
        (f"{LATER}|NODE_FAIL\n", UP, "out-of-grace"),
    ],
)
def test_a_job_that_slurm_requeued_lost_a_node_only_if_slurm_says_so(
    made: MadeRun, monkeypatch: pytest.MonkeyPatch, accounting: str | None, node: str | None, reason: str
) -> None:
    """As after a preemption without a grace time: nothing of the attempt could record its end."""
    answers = {"sacct": accounting, "scontrol": node}

    def call(command: list[str], **_: object) -> object:
        if (text := answers[command[0]]) is None:
            raise SchedulerError("no answer")
        return SimpleNamespace(stdout=text)

    monkeypatch.setattr(job, "call_slurm", call)
    begin_attempt(made.run, made.record.spec, scheduler="slurm", job_id="42", nodes=("n1",))
    assert say(made, "begin") == 0
    (ended,) = made.events("attempt-ended")
    assert ended["reason"] == reason
    assert "reported no start: n1" in ended["message"]


def test_a_finished_or_cancelled_run_begins_no_attempt(made: MadeRun, capfd: pytest.CaptureFixture[str]) -> None:
    begin_attempt(made.run, made.record.spec, scheduler="slurm", job_id="42", nodes=())
    close(made, 0, "done")
    assert say(made, "begin") == 0
    assert capfd.readouterr().out == ""
    made.run.stop_file.touch()
    assert say(made, "begin") == 75
    assert capfd.readouterr().out == ""
    assert made.run.attempts() == [1]
    assert len(made.events("cancelled")) == 1


def test_each_job_of_a_run_has_its_own_restart_budgets(made: MadeRun) -> None:
    for _ in range(3):
        begin_attempt(made.run, made.record.spec, scheduler="slurm", job_id="41", nodes=())
        close(made, 1, "node")
    assert begin(made.run, made.record, JOB) == 0


def test_a_job_from_before_a_resize_that_is_requeued_changes_nothing(
    made: MadeRun, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SLURM_JOB_NUM_NODES", "4")
    before = sorted(made.run.path.rglob("*"))
    assert say(made, "begin") == 2
    assert "job 42 has 4 nodes, and the run uses 1" in capfd.readouterr().err
    assert sorted(made.run.path.rglob("*")) == before
    monkeypatch.setenv("SLURM_JOB_NUM_NODES", "1")
    assert say(made, "begin") == 0


@pytest.mark.parametrize(
    ("overrun", "flags", "signaled"),
    [
        ("0 min", "SPEC_NODES", 3000.0 - 300),
        ("10 min", "SPEC_NODES", 3600.0 - 300),
        ("UNLIMITED", "SPEC_NODES", None),
        ("0 min", "FLEX,SPEC_NODES", None),
    ],
)
def test_the_ranks_are_signaled_as_long_before_the_end_of_the_reservation_as_before_a_time_limit(
    made: MadeRun, monkeypatch: pytest.MonkeyPatch, overrun: str, flags: str, signaled: float | None
) -> None:
    """Slurm ends the jobs of a reservation without a signal, and SLURM_JOB_END_TIME does not tell of it.

    With FLEX they continue.
    """
    began, passed = moment("2026-01-01T00:00:00") or 0.0, [0.0]
    shown = f"ReservationName=week EndTime=2026-01-01T00:50:00 Nodes=n1 Flags={flags}"
    slurm = Slurm(
        {
            "scontrol --oneliner show reservation": shown,
            "scontrol show config": f"ResvOverRun             = {overrun}\n",
            "scancel --signal=USR1 42": "",
        }
    )
    clock = SimpleNamespace(time=lambda: began + passed[0], sleep=lambda seconds: passed.append(passed.pop() + seconds))
    parents = (1 if passed[0] < 4000 else 2 for _ in range(1000))  # the batch script ends after 4000 s
    monkeypatch.setattr(job, "call_slurm", slurm)
    monkeypatch.setattr(job, "time", clock)
    monkeypatch.setattr(job.os, "getppid", lambda: next(parents))
    cluster = made.record.spec.cluster.model_copy(update={"grace_seconds": 300.0})
    environment = JOB | {"SLURM_JOB_RESERVATION": "week", "SLURM_JOB_END_TIME": f"{began + 9000:.0f}"}
    assert watch_reservation(cluster, environment) == 0
    assert ("scancel --signal=USR1 42" in slurm.calls) == (signaled is not None)
    assert signaled is None or passed == [signaled]
    assert time_is_up("42", cluster, environment) == (signaled is not None)


@pytest.mark.parametrize(("now", "is_up"), [("09:37:28", True), ("09:33:00", False)])
def test_a_limit_that_slurm_shows_too_late_counts_as_reached(
    made: MadeRun, monkeypatch: pytest.MonkeyPatch, now: str, is_up: bool
) -> None:
    """As Slurm 22.05 showed it after `scontrol update EndTime=2026-12-01T09:38:28`, a minute before that."""
    shown = {"squeue --noheader --states=all --jobs=42 --format=%S|%l": "2026-12-01T09:36:51|3:00\n"}
    monkeypatch.setattr(job, "call_slurm", Slurm(shown))
    monkeypatch.setattr(job, "time", SimpleNamespace(time=lambda: moment(f"2026-12-01T{now}")))
    cluster = made.record.spec.cluster.model_copy(update={"grace_seconds": 30.0})
    assert time_is_up("42", cluster, JOB) == is_up


def test_a_job_whose_reservation_is_about_to_end_begins_again_only_after_that(
    made: MadeRun, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Until then Slurm would start it again at once."""
    say(made, "begin")
    capfd.readouterr()
    end = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(time.time() + 50))
    shown = f"ReservationName=week EndTime={end}"
    answers = {"scontrol --oneliner show reservation": shown, "scontrol show config": "", "squeue": "N/A|UNLIMITED"}
    monkeypatch.setattr(job, "call_slurm", Slurm(answers))
    monkeypatch.setenv("SLURM_JOB_RESERVATION", "week")
    say(made, "end", "--attempt=1", "--srun-exit-code=75")
    word, _, wait = capfd.readouterr().out.strip().partition(" StartTime=now+")
    assert (word, 0 < int(wait) <= 52) == ("requeue", True)
