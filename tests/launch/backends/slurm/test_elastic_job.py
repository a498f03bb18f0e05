"""Begin and end of attempts whose number of nodes Slurm chooses, and the search for more, with recorded answers."""

import dataclasses
import json
import time
from collections.abc import Sequence
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from scaletrain_cli.errors import SchedulerError
from scaletrain_cli.launch.attempts import begin_attempt, growth_requests, read_attempt, read_stop_request, request_stop
from scaletrain_cli.launch.backends.slurm import growth, job
from scaletrain_cli.launch.backends.slurm.growth import GrowthWatch, growths_in_vain, read_idle_nodes, waiting_jobs
from scaletrain_cli.launch.backends.slurm.job import main
from scaletrain_cli.launch.backends.slurm.preflight import check_site
from scaletrain_cli.launch.backends.slurm.site import Site
from scaletrain_cli.launch.backends.slurm.tables import Limit, partitions
from scaletrain_cli.launch.node.record import NodeRecord, write_node_record
from scaletrain_cli.launch.submit import create_run, plan_run
from scaletrain_cli.reasons import Reason
from scaletrain_cli.rundir.goodput import cost_so_far
from scaletrain_cli.rundir.journal import record_event
from scaletrain_cli.rundir.record import read_record, read_size_plans, revisions
from scaletrain_cli.spec import RunSpec
from tests.launch.conftest import MadeRun, make_spec

SETS = (
    "cluster.scheduler=slurm",
    "cluster.gpus_per_node=1",
    "cluster.price_per_gpu_hour=2",
    "cluster.slurm.partition=main",
    "cluster.nodes={min: 1, max: 4, check_every: 0.01s, grow_every: 1h}",
    "training.steps=1000000",
)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> MadeRun:
    """Return a run of sizes 1, 2 and 4: three ranks do not divide its batch of 4."""
    planned = plan_run(make_spec(*SETS), "fake.yaml")
    # Placeholder rates: a plan of so small a model would not be faster on more nodes.
    plans = {
        nodes: dataclasses.replace(plan, time=dataclasses.replace(plan.time, step=4 / nodes, to_train=4e6 / nodes))
        for nodes, plan in ((size.nodes, size.plan) for size in planned.sizes)
        if plan is not None
    }
    assert list(plans) == [1, 2, 4]
    spec = planned.spec.with_changes("cluster", nodes=4)
    created = create_run(spec, plans[4], "elastic", size_plans=plans)
    monkeypatch.setenv("SLURM_JOB_ID", "42")
    monkeypatch.setenv("SLURMD_NODENAME", "localhost")
    return MadeRun(created.run, created.record)


def say(made: MadeRun, word: str, *options: str) -> int:
    return main([word, str(made.run.path), *options])


def begin(made: MadeRun, monkeypatch: pytest.MonkeyPatch, nodelist: str) -> None:
    monkeypatch.setenv("SLURM_JOB_NODELIST", nodelist)
    assert say(made, "begin") == 0


class Slurm:
    """Answers Slurm's commands from a table of the beginning of a command line to its output, and notes the calls."""

    def __init__(self, answers: dict[str, str]) -> None:
        self.answers = answers
        self.calls: list[str] = []
        self.scripts: list[object] = []

    def __call__(self, command: Sequence[str], **options: object) -> CompletedProcess[str]:
        line = " ".join(command)
        self.calls.append(line)
        self.scripts.append(options.get("text"))
        for start, answer in self.answers.items():
            if line.startswith(start):
                if answer == "fails":
                    raise SchedulerError("Slurm refuses")
                return CompletedProcess([*command], 0, answer, answer)
        raise AssertionError(f"no answer to {line}")


def test_the_run_keeps_the_plans_of_its_sizes(made: MadeRun) -> None:
    record = read_record(made.run)
    assert record.sizes == (1, 2, 4)
    assert record == made.record
    assert [plan.layout.world_size for plan in read_size_plans(made.run, record).values()] == [1, 2, 4]


def test_a_range_with_one_usable_size_is_a_run_of_that_size() -> None:
    planned = plan_run(make_spec(*SETS, "cluster.nodes={min: 2, max: 3}", "training.global_batch_size=2"), "fake.yaml")
    assert planned.spec.cluster.nodes == 2
    assert len(planned.sizes) == 2
    assert planned.size_plans == {}


def test_an_attempt_takes_the_plan_of_the_nodes_that_the_job_got(
    made: MadeRun, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    begin(made, monkeypatch, "n[1-4]")
    assert capfd.readouterr().out.split()[3:] == ["4", "n1,n2,n3,n4"] * 2
    assert revisions(made.run) == []
    begin(made, monkeypatch, "n[7-8]")
    assert capfd.readouterr().out.split()[3:] == ["2", "n7,n8"] * 2
    record, attempt = read_record(made.run), read_attempt(made.run, 2)
    assert (record.revision, record.spec.cluster.nodes, record.plan.layout.world_size) == (1, 2, 2)
    assert record.plan.layout.global_batch_size == made.record.plan.layout.global_batch_size == 4
    assert (attempt.nodes, attempt.revision) == (("n7", "n8"), 1)
    (event,) = made.events("resized")
    assert (event["before"], event["nodes"], event["revision"]) == (4, 2, 1)
    assert event["code"] == "launch.resized"
    begin(made, monkeypatch, "n[1-4]")
    assert (read_record(made.run).revision, read_record(made.run).spec) == (2, made.record.spec)


def test_a_killed_attempt_is_judged_by_its_own_number_of_nodes(made: MadeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    begin(made, monkeypatch, "n[1-4]")
    for rank in range(3):  # the agent of n4 never started
        name = f"n{rank + 1}"
        node = NodeRecord(f"node-{rank:04d}-{name}", name, rank, 1, 1, 0.0, ended=1.0, exit_code=75)
        write_node_record(made.run, 1, node)
    begin(made, monkeypatch, "n[1-2]")
    begin(made, monkeypatch, "n[1-2]")
    first, second = (read_attempt(made.run, number) for number in (1, 2))
    assert "n4" in first.message
    assert "n4" not in second.message


def test_nodes_that_no_size_uses_are_given_back(
    made: MadeRun, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    slurm = Slurm({"scontrol update": "", "squeue": "n[1-2]\n"})
    monkeypatch.setattr(job, "call_slurm", slurm)
    monkeypatch.setattr(job, "route_address", lambda name: "10.0.0.1")
    begin(made, monkeypatch, "n[1-3]")
    assert capfd.readouterr().out.split()[3:] == ["2", "n1,n2"] * 2
    assert slurm.calls == ["scontrol update JobId=42 NumNodes=2", "squeue --noheader --jobs=42 --format=%N"]


def test_nodes_that_slurm_does_not_take_back_stay_idle_with_a_warning(
    made: MadeRun, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(job, "call_slurm", Slurm({"scontrol": "fails"}))
    begin(made, monkeypatch, "n[1-3]")
    shown = capfd.readouterr()
    assert shown.out.split()[3:] == ["2", "n1,n2"] * 2
    assert "job 42 holds 1 nodes that the run does not use: Slurm refuses" in shown.err


def test_the_end_of_an_attempt_that_was_asked_to_grow_is_a_resize_and_no_preemption(
    made: MadeRun, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(job, "time_is_up", lambda *_: False)
    begin(made, monkeypatch, "n[1-2]")
    for rank in range(2):
        name = f"n{rank + 1}"
        node = NodeRecord(f"node-{rank:04d}-{name}", name, rank, 1, 1, 0.0, ended=1.0, exit_code=75)
        write_node_record(made.run, 1, node)
    params = {"nodes": 4, "before": 2, "cost": 30.0, "gain": 900.0}
    request_stop(made.run, 1, "growth", Reason("launch.asked-to-grow", params))
    capfd.readouterr()
    assert say(made, "end", "--attempt=1", "--srun-exit-code=75") == 75
    assert capfd.readouterr().out == "requeue\n"
    (ended,) = made.events("attempt-ended")
    assert (ended["reason"], ended["requeue"], ended["code"]) == ("resize", True, "launch.asked-to-grow")
    assert ended["message"].startswith("stopped at a checkpoint to restart on 4 nodes instead of 2")


def test_each_attempt_costs_what_its_own_size_costs(made: MadeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    record_event(made.run, "submitted", first_attempt=1, revision=0)
    began = time.time()
    for nodelist, hours in (("n[1-4]", 1.0), ("n[1-2]", 3.0)):
        begin(made, monkeypatch, nodelist)
        path = made.run.attempt(max(made.run.attempts())) / "attempt.json"
        document = json.loads(path.read_text())
        path.write_text(json.dumps(document | {"started": began, "ended": began + 3600 * hours}))
    found = cost_so_far(made.run, read_record(made.run), is_over=True, now=began)
    assert found == pytest.approx(2 * (4 * 1 + 2 * 3))


# ---- the search for more nodes ---------------------------------------------------------------------------------------

SINFO = """\
n1|mix|main*|up|(null)
n2|mix|main*|up|(null)
n3|idle|main*|up|(null)
n3|idle|high|up|(null)
n4|idle|main*|up|(null)
n5|idle~|main*|up|(null)
n6|idle|main*|up|(null)
n7|idle|other|up|(null)
"""
STARTS = "sbatch: Job 9 to start at {at} using 2 processors on nodes n[3-4] in partition main\n"


CPUS = make_spec("cluster.scheduler=slurm").cluster


def test_only_nodes_that_are_idle_in_the_partition_of_the_job_count() -> None:
    idle = read_idle_nodes(SINFO, "main", ("n6",), CPUS)
    assert (idle.names, idle.partitions) == (("n3", "n4"), ("high", "main"))
    assert read_idle_nodes(SINFO.replace("|up", "|drain"), "main", (), CPUS).names == ()


def test_only_jobs_that_wait_for_nodes_count() -> None:
    assert waiting_jobs("1|Resources\n2|Dependency\n3|Priority\n4|JobHeldUser\n5|BeginTime\n") == 2
    assert waiting_jobs("") == 0


def site(most_nodes: str = "UNLIMITED", *limits: Limit) -> Site:
    """Return a site with the partition main, whose jobs may have so many nodes, and these limits of the account."""
    main = partitions(f"PartitionName=main State=UP Default=YES MinNodes=0 MaxNodes={most_nodes}")
    enforced = {"AccountingStorageType": "accounting_storage/slurmdbd", "AccountingStorageEnforce": "limits"}
    return Site("ada", time.time(), enforced, main, (), (), (), (), "lab", "", tuple(limits))


@pytest.fixture
def watch(made: MadeRun, monkeypatch: pytest.MonkeyPatch) -> GrowthWatch:
    """Return the watch over an attempt on two nodes, where a checkpoint is committed at each look."""
    begin(made, monkeypatch, "n[1-2]")
    looks = iter(range(1, 1000))
    monkeypatch.setattr(growth, "committed_folders", lambda folder: [Path(f"step-{next(looks):08d}")])
    monkeypatch.setattr(growth, "_POLL_SECONDS", 0.0)
    monkeypatch.setattr(growth, "query_site", lambda cluster, without: site())
    monkeypatch.setattr(growth, "usable_held_nodes", lambda *of_the_job: ("n1", "n2"))
    environment = {"SLURM_JOB_ID": "42", "SLURM_JOB_PARTITION": "main", "SLURM_JOB_NODELIST": "n[1-4]"}
    return GrowthWatch(made.run, read_record(made.run), 1, environment)


def answers(**changed: str) -> dict[str, str]:
    at = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime())
    usual = {"sinfo": SINFO, "squeue": "", "sbatch": STARTS.format(at=at), "scancel": ""}
    return usual | changed


def test_ranks_stop_for_idle_nodes_after_a_checkpoint(watch: GrowthWatch, monkeypatch: pytest.MonkeyPatch) -> None:
    slurm = Slurm(answers())
    monkeypatch.setattr(growth, "call_slurm", slurm)
    watch.until_requested()
    assert watch.run.save_file.exists(), "a checkpoint was requested, not waited for"
    why = read_stop_request(watch.run, 1, "growth")
    assert (why.code, why.params["nodes"], why.params["before"]) == ("launch.asked-to-grow", 4, 2)
    programs = [call.split()[0] for call in slurm.calls]
    assert programs == [*("sinfo", "squeue", "sbatch") * 2, "scancel"], "checked again after the checkpoint"
    assert slurm.calls[-1] == "scancel --signal=USR1 42"
    assert "--partition=high,main" in slurm.calls[1]


@pytest.mark.parametrize(
    ("changed", "asked"),
    [
        ({"sinfo": SINFO.replace("idle", "mix")}, ["sinfo"]),
        ({"squeue": "77|Priority\n"}, ["sinfo", "squeue"]),
        ({"sbatch": STARTS.format(at="2099-01-01T00:00:00")}, ["sinfo", "squeue", "sbatch"]),
    ],
    ids=["no idle nodes", "other jobs wait", "slurm could not start it"],
)
def test_a_run_does_not_grow_without_free_nodes_or_before_waiting_jobs(
    watch: GrowthWatch, monkeypatch: pytest.MonkeyPatch, changed: dict[str, str], asked: list[str]
) -> None:
    slurm = Slurm(answers(**changed))
    monkeypatch.setattr(growth, "call_slurm", slurm)
    assert watch._candidate() is None
    assert [call.split()[0] for call in slurm.calls] == asked


def test_a_run_grows_onto_nodes_of_its_own_job_that_have_returned(
    watch: GrowthWatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(growth, "call_slurm", Slurm({}))  # no other nodes are looked for
    monkeypatch.setattr(growth, "usable_held_nodes", lambda *of_the_job: ("n1", "n2", "n3", "n4"))
    found = watch._candidate()
    assert found.nodes == 4


def test_the_nodes_are_asked_for_with_the_cores_of_the_job(watch: GrowthWatch, monkeypatch: pytest.MonkeyPatch) -> None:
    with_cores = dataclasses.replace(site(), cores_per_gpu=6)
    monkeypatch.setattr(growth, "query_site", lambda cluster, without: with_cores)
    checked: list[RunSpec] = []
    monkeypatch.setattr(growth, "check_site", lambda site, spec: checked.append(spec) or check_site(site, spec))
    slurm = Slurm(answers())
    monkeypatch.setattr(growth, "call_slurm", slurm)
    assert watch._candidate() is not None
    cores = 6 * watch.record.spec.cluster.gpus_per_node
    assert f"#SBATCH --cpus-per-task={cores}" in str(slurm.scripts[-1]).splitlines()
    assert {spec.cluster.cpus_per_gpu for spec in checked} == {6}
    assert {spec.cluster.nodes for spec in checked} == set(watch.record.sizes)


def test_a_restart_that_does_not_pay_is_not_asked_for(watch: GrowthWatch, monkeypatch: pytest.MonkeyPatch) -> None:
    slurm = Slurm(answers())
    monkeypatch.setattr(growth, "call_slurm", slurm)
    monkeypatch.setattr(growth, "last_logged_step", lambda run: 999_999)
    assert watch._candidate() is None
    assert [call.split()[0] for call in slurm.calls] == ["sinfo"]


def test_a_request_is_withdrawn_if_ranks_cannot_be_told(watch: GrowthWatch, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(growth, "call_slurm", Slurm(answers(scancel="fails")))
    with pytest.raises(SchedulerError, match="Slurm refuses"):
        watch._request()
    assert read_stop_request(watch.run, 1, "growth") is None


def test_a_run_that_has_just_grown_is_not_stopped_again(watch: GrowthWatch, monkeypatch: pytest.MonkeyPatch) -> None:
    request_stop(watch.run, 1, "growth", Reason("launch.asked-to-grow", {}))
    assert growth_requests(watch.run)[-1].time == pytest.approx(time.time(), abs=60)
    monkeypatch.setattr(growth, "call_slurm", Slurm({}))  # which answers nothing
    lives = iter([True] * 3)
    monkeypatch.setattr(watch, "_wait", lambda seconds: next(lives, False))
    watch.until_requested()


ONE_JOB = Limit("QOS normal", "MaxTRESPerJob", "node", 3.0, None)
ALL_JOBS = Limit("QOS normal", "GrpTRES", "node", 2.0, 2.0)


@pytest.mark.parametrize(
    "limited",
    [site("2"), site("UNLIMITED", ONE_JOB), site("UNLIMITED", ALL_JOBS)],
    ids=["MaxNodes of the partition", "MaxTRESPerJob", "GrpTRES"],
)
def test_a_run_grows_within_its_limits(watch: GrowthWatch, monkeypatch: pytest.MonkeyPatch, limited: Site) -> None:
    """Slurm would start two more nodes as a job of their own; a job of four would start on two again."""
    queries: list[object] = []
    monkeypatch.setattr(growth, "query_site", lambda cluster, without: queries.append(cluster) or limited)
    slurm = Slurm(answers())
    monkeypatch.setattr(growth, "call_slurm", slurm)
    assert watch._candidate() is None
    assert watch._candidate() is None
    assert [call.split()[0] for call in slurm.calls] == ["sinfo", "sinfo"]
    assert len(queries) == 1, "the limits are queried once per attempt"


def test_each_restart_without_more_nodes_doubles_the_wait(watch: GrowthWatch, monkeypatch: pytest.MonkeyPatch) -> None:
    run, spec = watch.run, watch.record.spec
    params = {"nodes": 4, "before": 2, "cost": 30.0, "gain": 900.0}
    for attempt in (1, 2):
        request_stop(run, attempt, "growth", Reason("launch.asked-to-grow", params))
        begin_attempt(run, spec, scheduler="slurm", job_id="42", nodes=("n1", "n2"), revision=1)
    assert growths_in_vain(run) == 2
    asked = growth_requests(run)[-1].time
    monkeypatch.setattr(growth, "call_slurm", Slurm({}))  # which answers nothing
    lives = iter([True] * 3)
    monkeypatch.setattr(watch, "_wait", lambda seconds: next(lives, False))
    monkeypatch.setattr(time, "time", lambda: asked + 4 * 3600 - 1)
    watch.until_requested()
    slurm = Slurm(answers())
    monkeypatch.setattr(growth, "call_slurm", slurm)
    lives = iter([True])
    monkeypatch.setattr(time, "time", lambda: asked + 4 * 3600 + 1)
    watch.until_requested()
    assert slurm.calls, "the watch looks again after four hours"
    request_stop(run, 3, "growth", Reason("launch.asked-to-grow", params))
    begin_attempt(run, spec, scheduler="slurm", job_id="42", nodes=("n1", "n2", "n3", "n4"), revision=2)
    assert growths_in_vain(run) == 0
    request_stop(run, 4, "growth", Reason("launch.asked-to-grow", params | {"before": 4}))
    begin_attempt(run, spec, scheduler="slurm", job_id="43", nodes=("n1", "n2"), revision=3)
    assert growths_in_vain(run) == 0, "another job may be under other limits"
