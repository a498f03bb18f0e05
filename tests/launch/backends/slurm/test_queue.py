"""Jobs are found, cancelled and counted, also where answers are lost, on a fake Slurm of shell scripts.

The scripts keep a file of jobs and append a line for each call. tests/slurm_cluster uses a real Slurm.
"""

import errno
import json
import os
import time
from pathlib import Path
from unittest.mock import Mock

import pytest

from scaletrain_cli.errors import SchedulerError, SchedulerSilentError, UsageError
from scaletrain_cli.launch.attempts import begin_attempt
from scaletrain_cli.launch.backends.slurm.backend import SlurmBackend
from scaletrain_cli.launch.backends.slurm.explain import why_it_waits
from scaletrain_cli.launch.backends.slurm.preflight import with_key
from scaletrain_cli.launch.backends.slurm.site import query_site
from scaletrain_cli.launch.backends.slurm.tables import node_names
from scaletrain_cli.launch.explain import explain
from scaletrain_cli.launch.job import open_request, read_submission
from scaletrain_cli.launch.restart import conclude_attempt
from scaletrain_cli.launch.status import run_status, run_statuses
from scaletrain_cli.launch.submit import create_run, submit_run
from scaletrain_cli.reasons import Reason
from scaletrain_cli.rundir.documents import read_document, write_document
from scaletrain_cli.rundir.preparation import PreparationJob, preparation_folder, record_job
from tests.launch.backends.slurm.test_preflight import ask
from tests.launch.conftest import MadeRun, MakeRun, make_plan

SLURM = SlurmBackend()
ANSWERS = Path(__file__).parent / "slurm_answers"
# Each command appends its command line to `calls`. If NAME.fails exists, NAME prints it and fails, before or (with
# NAME.works) after its work.
PROLOGUE = """#!/bin/sh
cd {folder}
echo "${{0##*/}} $*" >> calls
[ ! -e "${{0##*/}}.fails" ] || {{ cat "${{0##*/}}.fails" >&2; [ -e "${{0##*/}}.works" ] || exit 1; }}
"""
# `jobs` has the jobs as squeue prints them: id|state|reason|nodes|user|comment, and `names` their names.
COMMANDS = {
    "squeue": """
for word; do case $word in
    --jobs=*) grep -E "^($(echo "${word#--jobs=}" | tr , '|'))[|]" jobs;;
    --name=*) # jobs of a hidden partition are listed by id, or with --all
        case "$(ls) $*" in *hidden*--all*) ;; *hidden*) exit 0;; esac
        grep " ${word#--name=}$" names | while read -r id name; do grep "^$id|" jobs; done;;
esac; done; true
""",
    "sbatch": """
case "$*" in *--test-only*)
    cat > /dev/null
    [ ! -e test-only.says ] || { cat test-only.says >&2; exit 1; }
    echo "sbatch: Job 9 to start at 2026-11-22T08:00:00 using 2 processors on nodes n1 in partition main" >&2
    exit 0;;
esac
for word; do case $word in --comment=*) comment=${word#--comment=};; esac; done
name=$(sed -n 's/^#SBATCH --job-name=//p' "$OLDPWD/job.sh")
id=$((100 + $(wc -l < jobs)))
echo "$id|PENDING|Priority||me|$comment" >> jobs
echo "$id $name" >> names
[ ! -e then-squeue-fails ] || echo "Socket timed out" > squeue.fails
[ ! -e sbatch.fails ] || exit 1
echo "$id"
""",
    "scancel": """
for id; do :; done
case "$*" in *--signal*) ;; *) sed -i "s/^$id|[A-Z]*/$id|CANCELLED/" jobs;; esac
""",
    "scontrol": """
case "$*" in
    *config*) cat config.txt 2>/dev/null || cat {answers}/config.txt;;
    *partition*) cat {answers}/partitions.txt;;
    *reservation*) cat {answers}/reservations.txt;;
    *assoc_mgr*) cat {answers}/assoc_mgr.txt;;
esac
[ "$1" = resume ] && sed -i "s/^$2|SUSPENDED/$2|RUNNING/" jobs
true
""",
    "sacct": """cat accounted 2>/dev/null; true""",
    "sinfo": "cat {answers}/nodes.txt",
    "sacctmgr": """
case "$*" in *associations*) cat {answers}/associations.txt;; *qos*) cat {answers}/qos.txt;; *) echo lab;; esac
""",
}


class Controller:
    """The state of the fake Slurm."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "bin").mkdir(parents=True)
        for name, body in COMMANDS.items():
            path = folder / "bin" / name
            path.write_text(PROLOGUE.format(folder=folder) + body.replace("{answers}", str(ANSWERS)))
            path.chmod(0o755)
        for name in ("jobs", "names", "calls"):
            (folder / name).touch()

    @property
    def calls(self) -> list[str]:
        return (self.folder / "calls").read_text().splitlines()

    def called(self, name: str) -> list[str]:
        return [call for call in self.calls if call.split()[0] == name]

    @property
    def jobs(self) -> dict[str, str]:
        rows = (line.split("|") for line in (self.folder / "jobs").read_text().splitlines())
        return {row[0]: row[1] for row in rows}

    def becomes(self, state: str, user: str = "root") -> None:
        """Set the state and the user of all jobs."""
        rows = [line.split("|") for line in (self.folder / "jobs").read_text().splitlines()]
        lines = ["|".join([row[0], state, "None", "n1", user, row[5]]) for row in rows]
        (self.folder / "jobs").write_text("\n".join(lines) + "\n")

    def forgets(self) -> None:
        (self.folder / "jobs").write_text("")

    def fails(self, name: str, words: str, *, works: bool = False) -> None:
        (self.folder / f"{name}.fails").write_text(words)
        if works:
            (self.folder / f"{name}.works").touch()

    def recovers(self) -> None:
        for path in (*self.folder.glob("*.fails"), *self.folder.glob("*.works")):
            path.unlink()


@pytest.fixture
def controller(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Controller:
    made = Controller(tmp_path / "controller")
    monkeypatch.setenv("PATH", f"{made.folder / 'bin'}:/usr/bin:/bin")
    monkeypatch.setattr("scaletrain_cli.launch.backends.slurm.commands._SEARCH_PAUSE_SECONDS", 0.01)
    monkeypatch.setattr("scaletrain_cli.launch.backends.slurm.queue.user_name", lambda: "root")
    return made


@pytest.fixture
def made(make_run: MakeRun) -> MadeRun:
    return make_run("cluster.scheduler=slurm", run_id="life")


TIMED_OUT = "sbatch: error: Batch job submission failed: Socket timed out on send/recv operation"


def test_a_lost_answer_is_no_refusal_and_a_second_submit_adds_no_job(controller: Controller, made: MadeRun) -> None:
    controller.fails("sbatch", TIMED_OUT, works=True)
    (controller.folder / "then-squeue-fails").touch()
    with pytest.raises(SchedulerSilentError, match=r"Slurm may have accepted the job of life.*--run-id life"):
        submit_run(made.run, made.record, SLURM)
    silent = run_status(made.run)
    assert (silent.state, silent.job.may_be_active) == ("unknown", True)
    controller.recovers()
    found = run_status(made.run)
    assert (found.state, found.job_id) == ("queued", "100")
    assert submit_run(made.run, made.record, SLURM).job_id == "100"
    assert len(controller.jobs) == len(controller.called("sbatch")) == 1


@pytest.mark.parametrize(
    ("said", "is_found"),
    [
        ("Unable to contact slurm controller (receive failure)", True),
        ("Zero Bytes were transmitted or received", True),
        ("Unable to contact slurm controller (connect failure)", False),
    ],
)
def test_a_job_is_looked_for_if_the_controller_may_have_got_the_request(
    controller: Controller, made: MadeRun, said: str, *, is_found: bool
) -> None:
    controller.fails("sbatch", f"sbatch: error: Batch job submission failed: {said}", works=is_found)
    if is_found:
        assert submit_run(made.run, made.record, SLURM).job_id == "100"
    else:
        with pytest.raises(SchedulerError, match="connect failure"):
            submit_run(made.run, made.record, SLURM)
        assert open_request(made.run) is None


def test_a_job_that_ran_without_an_answer_is_not_submitted_again(controller: Controller, made: MadeRun) -> None:
    controller.fails("sbatch", TIMED_OUT, works=True)
    (controller.folder / "then-squeue-fails").touch()
    with pytest.raises(SchedulerSilentError):
        submit_run(made.run, made.record, SLURM)
    controller.recovers()
    begin_attempt(made.run, made.record.spec, scheduler="slurm", job_id="100", nodes=("n1",))
    controller.becomes("COMPLETED")
    assert submit_run(made.run, made.record, SLURM).job_id == "100"
    assert len(controller.jobs) == len(controller.called("sbatch")) == 1
    assert (open_request(made.run), read_submission(made.run) is not None) == (None, True)


def test_cancel_ends_a_job_whose_id_was_never_received(controller: Controller, made: MadeRun) -> None:
    controller.fails("sbatch", TIMED_OUT, works=True)
    submit_run(made.run, made.record, SLURM)
    write_document(made.run.path / "submission.json", asked(made, time.time()))
    controller.recovers()
    SLURM.cancel(made.run, made.record)
    assert controller.jobs == {"100": "CANCELLED"}
    assert run_status(made.run).state == "cancelled"


@pytest.mark.parametrize(
    "said", ["", "scancel: error: Kill job error on job id 100: Job/step already completing or completed"]
)
def test_a_requeued_job_that_is_still_completing_does_not_start_after_a_cancel(
    controller: Controller, make_run: MakeRun, monkeypatch: pytest.MonkeyPatch, said: str
) -> None:
    monkeypatch.setenv("TOKEN_OF_HUB", "secret")
    made = make_run("cluster.scheduler=slurm", "secret_env=[TOKEN_OF_HUB]", run_id="life")
    submit_run(made.run, made.record, SLURM)
    number = begin_attempt(made.run, made.record.spec, scheduler="slurm", job_id="100", nodes=("n1",))
    conclude_attempt(made.run, made.record, number, first_attempt=1, launcher_exit_code=1)
    controller.becomes("COMPLETING")
    if said:
        controller.fails("scancel", said)
    SLURM.cancel(made.run, made.record)
    assert controller.called("scancel") == ["scancel 100"]
    assert len(made.events("cancelled")) == 1, "no attempt follows that would record it"
    assert not made.run.secrets.exists()


def test_a_job_in_a_hidden_partition_is_found_without_its_id(controller: Controller, made: MadeRun) -> None:
    (controller.folder / "hidden").touch()
    controller.fails("sbatch", TIMED_OUT, works=True)
    assert submit_run(made.run, made.record, SLURM).job_id == "100"


def asked(made: MadeRun, when: float) -> dict[str, object]:
    return {"state": "asked", "scheduler": "slurm", "asked": when, "first_attempt": 1, "revision": 0, "before": None}


def test_a_job_of_an_unanswered_sbatch_may_appear_for_five_minutes(controller: Controller, made: MadeRun) -> None:
    write_document(made.run.path / "submission.json", asked(made, time.time()))
    job = SLURM.job(made.run, made.record)
    assert (job.state, job.may_be_active) == ("unknown", True)
    request = open_request(made.run)
    with pytest.raises(SchedulerError, match="Submit again in 5 min"):  # two jobs of a run must never overlap
        submit_run(made.run, made.record, SLURM)
    assert open_request(made.run) == request
    assert not controller.called("sbatch")
    write_document(made.run.path / "submission.json", asked(made, time.time() - 3600))
    job = SLURM.job(made.run, made.record)
    assert (job.state, job.may_be_active) == ("ended", False)
    assert submit_run(made.run, made.record, SLURM).job_id == "100"


@pytest.mark.parametrize("banner", ["", "    Welcome to cluster 3\n--> Checking available allocation...OK\n"])
@pytest.mark.parametrize("answer", ["$id", "$id;cluster", "Submitted"])
def test_the_id_of_a_job_is_known_whatever_a_plugin_prints_with_it(
    controller: Controller, made: MadeRun, banner: str, answer: str
) -> None:
    sbatch = controller.folder / "bin" / "sbatch"
    sbatch.write_text(sbatch.read_text().replace('echo "$id"\n', f'printf "%s" "{banner}{answer}"\n'))
    assert submit_run(made.run, made.record, SLURM).job_id == "100"
    assert run_status(made.run).state == "queued"


def test_a_refusal_leaves_no_request_and_keeps_the_earlier_submission(controller: Controller, made: MadeRun) -> None:
    controller.fails("sbatch", "sbatch: error: Batch job submission failed: Invalid qos specification")
    with pytest.raises(SchedulerError, match="Invalid qos"):
        submit_run(made.run, made.record, SLURM)
    assert (open_request(made.run), read_submission(made.run)) == (None, None)
    controller.recovers()
    before = submit_run(made.run, made.record, SLURM)
    assert read_document(made.run.path / "submission.json")["state"] == "submitted"  # type: ignore[index]
    assert read_submission(made.run) == before


@pytest.mark.parametrize(("command", "user"), [("squeue", "root"), ("scancel", "root"), ("scancel", "someone-else")])
def test_a_cancel_that_fails_changes_nothing(controller: Controller, made: MadeRun, command: str, user: str) -> None:
    submit_run(made.run, made.record, SLURM)
    controller.becomes("RUNNING", user)
    controller.fails(command, f"{command}: error: Access/permission denied")
    with pytest.raises(SchedulerError, match="permission denied"):
        SLURM.cancel(made.run, made.record)
    assert not made.run.is_cancelled
    assert not made.events("cancelled")


def test_a_suspended_job_is_resumed_before_its_ranks_are_signaled(controller: Controller, made: MadeRun) -> None:
    submit_run(made.run, made.record, SLURM)
    controller.becomes("SUSPENDED")
    SLURM.cancel(made.run, made.record)
    assert [call for call in controller.calls if call.startswith(("scontrol resume", "scancel"))] == [
        "scontrol resume 100",
        "scancel --signal=TERM 100",
    ]
    assert made.run.is_cancelled


def test_a_stopped_job_is_continued_by_a_signal_before_its_ranks_are_signaled(
    controller: Controller, made: MadeRun
) -> None:
    submit_run(made.run, made.record, SLURM)
    controller.becomes("STOPPED")
    assert run_status(made.run).state == "suspended"
    SLURM.cancel(made.run, made.record)
    assert controller.called("scancel") == ["scancel --signal=CONT 100", "scancel --signal=TERM 100"]
    assert not any(call.startswith("scontrol resume") for call in controller.calls)


def test_a_suspended_job_that_the_user_may_not_resume_is_not_changed(controller: Controller, made: MadeRun) -> None:
    submit_run(made.run, made.record, SLURM)
    controller.becomes("SUSPENDED")
    controller.fails("scontrol", "Access/permission denied")
    with pytest.raises(SchedulerError, match=r"Nothing was changed.*`scancel 100`, which loses"):
        SLURM.cancel(made.run, made.record)
    assert not made.run.is_cancelled
    assert not controller.called("scancel")


def test_the_status_of_many_runs_needs_one_request_to_slurm(controller: Controller, make_run: MakeRun) -> None:
    runs = [make_run("cluster.scheduler=slurm", run_id=f"life-{index}") for index in range(4)]
    for one in runs:
        submit_run(one.run, one.record, SLURM)
        begin_attempt(one.run, one.record.spec, scheduler="slurm", job_id="1", nodes=("n1",))
    controller.becomes("RUNNING")
    before = len(controller.calls)
    found = run_statuses([one.run for one in runs])
    assert [status.state for status in found if not isinstance(status, Exception)] == ["running"] * 4
    assert len(controller.calls) - before == 1
    controller.fails("squeue", "slurm_load_jobs error: Unable to contact slurm controller")
    found = run_statuses([one.run for one in runs])
    assert {status.state for status in found if not isinstance(status, Exception)} == {"unknown"}
    assert len(controller.calls) - before == 2
    for damaged in ("submission.json", "attempts/0001/attempt.json"):
        (runs[0].run.path / damaged).write_text('{"state": "submitted", "job_id": 7}')
        first, *others = run_statuses([one.run for one in runs])
        assert isinstance(first, UsageError)
        assert not any(isinstance(other, Exception) for other in others)


@pytest.mark.parametrize(("accounting", "calls"), [("accounting_storage/slurmdbd", 12), ("(null)", 8)])
def test_a_submission_calls_slurm_twelve_times(controller: Controller, accounting: str, calls: int) -> None:
    config = (ANSWERS / "config.txt").read_text().replace("accounting_storage/slurmdbd", accounting)
    (controller.folder / "config.txt").write_text(config)
    spec, scheduler = ask(), SlurmBackend()
    plan = make_plan(spec)
    scheduler.preflight(spec, plan)
    made = create_run(spec, plan, "life")
    submit_run(made.run, made.record, scheduler)
    asked = sorted(" ".join(call.split()[:4]) for call in controller.calls)
    assert len(asked) == len(set(asked)) == calls, asked


@pytest.mark.parametrize(
    ("setting", "said", "key"),
    [
        ("constraint=a100", "sbatch: error: Invalid feature specification", "constraint"),
        ("licenses=matlab:1", "allocation failure: Invalid license specification", "licenses"),
    ],
)
def test_a_value_that_sbatch_refuses_has_its_line(controller: Controller, setting: str, said: str, key: str) -> None:
    (controller.folder / "test-only.says").write_text(said)
    spec = ask(f"cluster.slurm.{setting}")
    with pytest.raises(SchedulerError) as caught:
        SlurmBackend().preflight(spec, make_plan(spec))
    (problem,) = caught.value.problems
    assert (problem.key, problem.where) == (f"cluster.slurm.{key}", spec.where(f"cluster.slurm.{key}"))
    assert said.rpartition(": ")[2] in problem.message


@pytest.mark.parametrize(("overrides", "refused"), [((), False), (("cluster.slurm.constraint=a100",), True)])
def test_a_test_that_refuses_is_only_a_note(controller: Controller, overrides: tuple[str, ...], refused: bool) -> None:
    said = "allocation failure: Requested node configuration is not available"
    (controller.folder / "test-only.says").write_text(said)
    spec = ask(*overrides)
    if refused:
        with pytest.raises(SchedulerError):
            SlurmBackend().preflight(spec, make_plan(spec))
        return
    found = SlurmBackend().preflight(spec, make_plan(spec))
    assert "sbatch --test-only answers `Requested node configuration" in found.notes[-1]
    assert found.start.at is None


def test_a_message_of_a_site_that_is_no_utf_8_is_shown(controller: Controller, made: MadeRun) -> None:
    (controller.folder / "sbatch.fails").write_bytes("sbatch: error: compte épuisé".encode("latin-1"))
    with pytest.raises(SchedulerError, match=r"sbatch: error: compte .puis"):
        submit_run(made.run, made.record, SLURM)


def test_the_associations_of_an_account_in_capitals_are_found(controller: Controller) -> None:
    site = query_site(ask("cluster.slurm.account=LAB", "cluster.slurm.qos=Capped").cluster)
    assert (site.account, site.accounts, site.qos) == ("lab", ("lab", "root"), "capped")
    assert "QOS capped" in {limit.owner for limit in site.limits}


def test_sbatch_finds_the_kerberos_ticket_of_the_submitter(
    controller: Controller, made: MadeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KRB5CCNAME", "FILE:/tmp/krb5cc_1000_x")
    sbatch = controller.folder / "bin" / "sbatch"
    sbatch.write_text(sbatch.read_text().replace('echo "$id"', 'env > sent; echo "$id"'))
    submit_run(made.run, made.record, SLURM)
    assert "KRB5CCNAME=FILE:/tmp/krb5cc_1000_x" in (controller.folder / "sent").read_text().splitlines()


def test_a_missing_sbatch_is_not_reported_as_a_problem_of_a_key(controller: Controller) -> None:
    missing = SchedulerError(Reason("slurm.no-command", {"command": "Invalid qos"}))
    spec = ask("cluster.slurm.qos=night")
    assert with_key(spec, missing) is missing


def test_a_job_that_slurm_does_not_list_has_the_state_of_the_accounting(
    controller: Controller, made: MadeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    submit_run(made.run, made.record, SLURM)
    begin_attempt(made.run, made.record.spec, scheduler="slurm", job_id="100", nodes=("n1",))
    controller.forgets()
    found = run_status(made.run)
    assert "the cause is not known; Slurm reports: Slurm no longer lists the job" in found.why
    (controller.folder / "accounted").write_text("100|CANCELLED by 1000\n")
    found = run_status(made.run)
    assert found.state == "cancelled"
    assert "its job was cancelled" in found.why
    (controller.folder / "accounted").write_text("100|FAILED|93:0\n")
    found = run_status(made.run)
    assert found.state == "failed"
    assert f"the file system of {made.run.path} was full; Slurm reports: FAILED with exit code 93" in found.why
    read_only = OSError(errno.EROFS, "Read-only file system")
    monkeypatch.setattr(os, "statvfs", Mock(side_effect=read_only))
    found = run_status(made.run)
    assert (found.state, found.reason.code) == ("failed", "launch.unreported-read-only")


def test_a_job_that_slurm_no_longer_lists_is_not_reported_as_pending(controller: Controller) -> None:
    finding = why_it_waits("100", "life")
    assert (finding.cause, finding.needs_action) == ("not-known", False)
    assert "no longer lists job 100" in finding.headline


def test_a_completing_job_is_ending_and_its_log_is_named_if_it_exists(controller: Controller, made: MadeRun) -> None:
    submit_run(made.run, made.record, SLURM)
    controller.becomes("COMPLETING")
    assert (run_status(made.run).state, run_status(made.run).why) == ("ending", "COMPLETING")
    controller.becomes("FAILED")
    assert "slurm-100.log" not in run_status(made.run).why
    (made.run.path / "slurm-100.log").touch()
    assert "see slurm-100.log" in run_status(made.run).why


def test_the_request_is_recorded_before_sbatch_is_called(controller: Controller, made: MadeRun) -> None:
    sbatch = controller.folder / "bin" / "sbatch"
    sbatch.write_text(f"#!/bin/sh\ncp submission.json {controller.folder}/then\necho 7\n")
    submit_run(made.run, made.record, SLURM)
    assert json.loads((controller.folder / "then").read_text())["state"] == "asked"


@pytest.mark.parametrize(
    ("hostlist", "names"),
    [
        ("", ()),
        ("n1", ("n1",)),
        ("n[1-3,7],login", ("n1", "n2", "n3", "n7", "login")),
        ("r[0-1]n[08-10]", ("r0n08", "r0n09", "r0n10", "r1n08", "r1n09", "r1n10")),
        ("gpu-[001,100]-ib", ("gpu-001-ib", "gpu-100-ib")),
    ],
)
def test_a_hostlist_is_expanded_as_by_slurm(hostlist: str, names: tuple[str, ...]) -> None:
    assert node_names(hostlist) == names


@pytest.mark.parametrize(
    ("gang", "preparation", "accounted", "done", "state", "code"),
    [
        ("CANCELLED|DependencyNeverSatisfied", "FAILED|NonZeroExitCode", "", False, "failed", "preparation.job-failed"),
        ("CANCELLED|None", "CANCELLED|None", "", False, "cancelled", "launch.job-without-attempt"),
        ("CANCELLED|None", "COMPLETED|None", "", True, "cancelled", "launch.job-without-attempt"),
        ("FAILED|NonZeroExitCode", "COMPLETED|None", "", True, "failed", "launch.job-without-attempt"),
        ("FAILED|NonZeroExitCode", "", "", True, "failed", "launch.job-without-attempt"),
        ("", "", "100|CANCELLED\n90|OUT_OF_MEMORY\n", False, "failed", "preparation.job-failed"),
        ("", "", "100|CANCELLED by 0\n90|COMPLETED\n", True, "cancelled", "launch.job-without-attempt"),
        ("", "RUNNING|None", "", False, "unknown", "launch.job-without-attempt"),
        ("", "", "", False, "failed", "preparation.job-failed"),
        ("", "", "", True, "unknown", "launch.job-without-attempt"),
    ],
)
def test_a_failed_preparation_is_reported_only_if_it_ended_the_gang(
    controller: Controller,
    made: MadeRun,
    gang: str,
    preparation: str,
    accounted: str,
    done: bool,
    state: str,
    code: str,
) -> None:
    assert submit_run(made.run, made.record, SLURM).job_id == "100"
    folder = preparation_folder(made.run)
    folder.mkdir()
    record_job(folder, PreparationJob("slurm", "90", "89", 2))
    if done:
        write_document(folder / "done.json", {"folders": []})
    rows = [f"{job}|{words}||root|" for job, words in (("100", gang), ("90", preparation)) if words]
    (controller.folder / "jobs").write_text("".join(f"{row}\n" for row in rows))
    (controller.folder / "accounted").write_text(accounted)
    status = run_status(made.run)
    assert (status.state, status.reason.code) == (state, code)
    assert (explain(made.run).findings[0].code == code) == (code == "preparation.job-failed")
    write_document(folder / "failure.json", {"reason": Reason("data.no-text").to_document()})
    assert (run_status(made.run).reason.code == "preparation.failed") == (not done)
