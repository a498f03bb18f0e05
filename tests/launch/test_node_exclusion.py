"""Bad nodes are excluded while enough others are left; which nodes are bad, and for how long."""

import time

import pytest

from scaletrain_cli.launch import restart
from scaletrain_cli.launch.attempts import begin_attempt, read_attempts
from scaletrain_cli.launch.backends.slurm import job, site
from scaletrain_cli.launch.backends.slurm.job import time_is_up
from scaletrain_cli.launch.backends.slurm.script import sbatch_options
from scaletrain_cli.launch.backends.slurm.site import exclude_option, exclusion_for, nodes_of
from scaletrain_cli.launch.node.record import write_node_record
from scaletrain_cli.launch.restart import conclude_attempt
from scaletrain_cli.reasons import recorded
from scaletrain_cli.rundir.bad_nodes import BadNode, Exclusion, exclusion, read_bad_nodes, remember_bad_nodes
from scaletrain_cli.worker.failures import Failure, write_failure
from scaletrain_cli.worker.position import RankView
from tests.launch.conftest import MadeRun, MakeRun, make_spec
from tests.launch.test_attempts import node, rank

FIVE = ["n1", "n2", "n3", "n4", "n5"]


def bad(*names: str) -> list[BadNode]:
    """Return bad nodes with these names, in the order of their evidence, latest first."""
    return [BadNode(name, "hang", "silent", "run", 1, 0.0, 9e9) for name in names]


def test_bad_nodes_are_excluded_while_enough_others_are_left() -> None:
    assert exclusion(bad("n4", "n2"), usable=FIVE, needed=3).nodes == ("n2", "n4")


def test_the_nodes_with_the_oldest_evidence_are_used_again_and_reported() -> None:
    found = exclusion(bad("n4", "n2", "n1"), usable=FIVE, needed=4)
    assert (found.nodes, found.spared) == (("n4",), ("n1", "n2"))
    assert "needs 4 of 5 usable nodes" in found.why
    assert exclusion(bad("n4"), usable=FIVE, needed=5).nodes == ()
    assert exclusion(bad("n4"), usable=["n4"], needed=2).nodes == ()  # there is no room already


def test_a_node_that_is_down_is_excluded_at_no_cost_and_a_pinned_one_is_not_excluded() -> None:
    assert exclusion(bad("n9"), usable=FIVE, needed=5).nodes == ("n9",)
    assert exclusion(bad("n1"), usable=FIVE, needed=1, pinned=["n1"]).nodes == ()


SINFO = """\
n1|idle|main*|(null)|ib,rack1
n1|idle|spot|(null)|ib,rack1
n2|mix|main*|(null)|ib,rack2
n3|drain|main*|(null)|ib,rack1
n4|idle*|main*|(null)|ib
n5|alloc|main*|(null)|(null)
n6|down*|main*|(null)|ib
n7|idle|spot|(null)|ib
"""
RESERVED = "ReservationName=week StartTime=2026-01-01T00:00:00 EndTime=2027-01-01T00:00:00 Nodes=n[2-3,5] Flags={}\n"


@pytest.fixture
def slurm(monkeypatch: pytest.MonkeyPatch) -> None:
    """A Slurm of seven nodes with recorded answers."""

    def call(command: list[str], **_: object) -> object:
        reserved = RESERVED.format("SPEC_NODES") + RESERVED.format("FLEX").replace("week", "flexible")
        texts = {"sinfo": SINFO, "squeue": "2026-01-02T03:04:05|1-00:30:00\n", "scontrol": reserved}
        text = texts[command[0]]
        return type("Answer", (), {"stdout": text})

    monkeypatch.setattr(site, "call_slurm", call)
    monkeypatch.setattr(job, "call_slurm", call)


def usable_nodes(*settings: str) -> set[str]:
    found = nodes_of(make_spec("cluster.scheduler=slurm", *settings).cluster)
    return {name for name, is_usable in found.items() if is_usable}


@pytest.mark.usefixtures("slurm")
def test_usable_nodes_are_those_on_which_slurm_would_start_a_job_of_the_partition() -> None:
    assert usable_nodes() == {"n1", "n2", "n5"}


@pytest.mark.usefixtures("slurm")
@pytest.mark.parametrize(
    ("setting", "usable"),
    [
        ("constraint=ib", {"n1", "n2"}),
        ("constraint=ib&rack1", {"n1"}),
        ("constraint=rack2|(rack1&ib)", {"n1", "n2"}),
        ('constraint="[rack1*1&rack2*1]"', {"n1", "n2"}),
        ("reservation=week", {"n2", "n5"}),
        ("reservation=flexible", {"n1", "n2", "n5"}),  # its jobs may use other nodes
        ("reservation=hidden", {"n1", "n2", "n5"}),
    ],
)
def test_nodes_that_the_job_may_not_have_do_not_count_as_a_replacement(setting: str, usable: set[str]) -> None:
    """Else Slurm holds a job of which it has excluded a node that no other one can replace."""
    assert usable_nodes(f"cluster.slurm.{setting}") == usable


@pytest.mark.usefixtures("slurm")
def test_nodes_that_the_user_excludes_are_merged_with_bad_nodes(make_run: MakeRun) -> None:
    made = make_run("cluster.scheduler=slurm", "cluster.slurm.exclude=n5", "cluster.nodes=1")
    remember_bad_nodes(made.run.path.parent, bad("n2", "n1"), now=1.0)
    excluded = exclusion_for(made.run, made.record.spec)
    assert (excluded.nodes, excluded.spared) == (("n2",), ("n1",))
    option = exclude_option(made.record.spec, excluded)
    assert option == "n5,n2"
    assert "exclude=n5,n2" in list(sbatch_options(made.record.spec, "run", option))


@pytest.mark.usefixtures("slurm")
def test_a_bad_node_that_slurm_does_not_know_is_not_excluded(make_run: MakeRun) -> None:
    """Slurm refuses such a job: the node was renamed, or is of another cluster or a machine that shares the root."""
    made = make_run("cluster.scheduler=slurm", "cluster.nodes=1")
    remember_bad_nodes(made.run.path.parent, bad("laptop", "n2", "n3"), now=1.0)
    excluded = exclusion_for(made.run, made.record.spec)
    assert (excluded.nodes, excluded.spared) == (("n2", "n3"), ())


@pytest.mark.usefixtures("slurm")
def test_a_job_that_excludes_nothing_forgets_what_the_job_before_it_has_excluded(make_run: MakeRun) -> None:
    """Else a node that fails again later counts as excluded by this job, and gets the next attempt."""
    made = make_run("cluster.scheduler=slurm", "cluster.nodes=1")
    site.record_exclusion(made.run, Exclusion(("n2",)))
    site.record_exclusion(made.run, exclusion_for(made.run, made.record.spec))
    assert site.last_exclusion(made.run) == ()
    site.record_exclusion(made.run, Exclusion())
    assert len(made.events("nodes-excluded")) == 2


@pytest.mark.usefixtures("slurm")
def test_bad_nodes_are_excluded_while_the_smallest_size_of_a_range_remains(make_run: MakeRun) -> None:
    made = make_run("cluster.scheduler=slurm", "cluster.nodes={min: 2, max: 3}")
    spec = made.record.spec.with_changes("cluster", nodes=3)
    remember_bad_nodes(made.run.path.parent, bad("n2", "n1"), now=1.0)
    excluded = exclusion_for(made.run, spec)
    assert (excluded.nodes, excluded.spared) == (("n2",), ("n1",))


@pytest.mark.usefixtures("slurm")
def test_a_warning_before_the_time_limit_makes_the_end_a_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = make_spec("cluster.scheduler=slurm", "cluster.grace_seconds=120").cluster
    end = time.mktime(time.strptime("2026-01-03T03:34:05", "%Y-%m-%dT%H:%M:%S"))
    extended = {"SLURM_JOB_END_TIME": f"{end - 3600:.0f}"}  # when the job started; its administrator has added an hour
    for environment in ({"SLURM_JOB_END_TIME": f"{end:.0f}"}, {}, extended):
        for left, is_up in ((120, True), (600, False)):
            monkeypatch.setattr(time, "time", lambda now=end - left: now)
            assert time_is_up("7", cluster, environment) == is_up


def conclude(made: MadeRun, *failures: Failure, code: int = 1, **reported: object) -> None:
    number = begin_attempt(made.run, made.record.spec, scheduler="local", job_id="1", nodes=("n0",))
    write_node_record(made.run, number, node(code, rank(0, code)))
    for failure in failures:
        write_failure(made.run, number, "rank-00000", failure)
    conclude_attempt(made.run, made.record, number, first_attempt=1, **reported)  # type: ignore[arg-type]


def test_notifications_delay_a_restart_for_a_second(make_run: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    limits: list[float] = []
    monkeypatch.setattr(restart, "_send_notifications", lambda *given: limits.append(given[-1]))
    made = make_run()
    conclude(made, code=75)  # the scheduler may kill the job soon, before it has submitted itself again
    conclude(made, code=1)
    assert limits == [1.0, 5.0]


def test_evidence_against_a_node_expires_after_the_time_of_its_kind(make_run: MakeRun) -> None:
    made = make_run()
    root = made.run.path.parent
    stopped = RankView(0, 0, 5, "step", 1, 9.0, "T", responded=False)
    hang = Failure(None, "hang", "", 1, "node-0000-n0", params={"silent_seconds": 9, "stacks": "s"}, ranks=(stopped,))
    failed = [Failure(0, reason, f"{reason} it is", 1) for reason in ("wrong-nodes", "hardware")]
    for failure, days in zip((hang, *failed), (0.25, 1.0, 7.0), strict=True):
        reason = failure.reason
        conclude(made, failure)
        (found,) = read_bad_nodes(root, time.time())
        assert (found.node, found.reason, found.run_id) == ("n0", reason, made.run.run_id)
        assert found.expires - found.time == days * 86400
    assert found.attempt == 3
    assert "hardware it is" in found.message


def test_a_full_cache_excludes_the_first_node_for_an_hour_and_the_second_one_ends_the_run(make_run: MakeRun) -> None:
    made = make_run()
    root = made.run.path.parent
    params = {"needed": 2.0**40, "cache": "/local/hf", "free": 2.0**30}
    full = Failure(0, "wrong-nodes", "full", 5, code="hub.no-space", params=params)
    conclude(made, full, code=5)
    (first,) = read_bad_nodes(root, time.time())
    assert (first.attempt, first.expires - first.time) == (1, 3600)
    conclude(made, Failure(0, "preempted", "x", 75), code=75)
    conclude(made, full, code=5)
    (found,) = read_bad_nodes(root, time.time())
    assert found.attempt == 1
    decision = read_attempts(made.run)[-1].decision
    assert (decision.requeue, decision.exit_code, decision.code) == (False, 93, "launch.stop-caches")
    assert "2 attempts" in decision.why
    assert "/local/hf" in decision.why


@pytest.mark.parametrize("reason", ["crash", "oom", "host-oom", "nan", "communication", "disk-full"])
def test_a_failure_of_the_program_is_no_evidence_against_a_node(make_run: MakeRun, reason: str) -> None:
    made = make_run()
    conclude(made, Failure(0, reason, "x", 1))
    assert read_bad_nodes(made.run.path.parent, time.time()) == []


def test_a_silent_node_of_an_ended_job_is_lost_only_if_the_scheduler_reports_it(make_run: MakeRun) -> None:
    for down, names in ((frozenset({"n1"}), ["n1"]), (frozenset(), []), (None, ["n1"])):
        made = make_run("cluster.scheduler=slurm", "cluster.nodes=2")
        root = made.run.path.parent
        (root / "bad-nodes.json").unlink(missing_ok=True)
        number = begin_attempt(made.run, made.record.spec, scheduler="slurm", job_id="1", nodes=("n0", "n1"))
        write_node_record(made.run, number, node(75, rank(0, 75)))
        write_node_record(made.run, number, node(None, number=1))
        conclude_attempt(made.run, made.record, number, first_attempt=1, down=down)
        assert [found.node for found in read_bad_nodes(root, time.time())] == names


@pytest.mark.parametrize(("down", "reason"), [(frozenset({"n1"}), "node"), (frozenset(), "out-of-grace")])
def test_a_silent_node_at_the_end_is_lost_if_it_is_down(make_run: MakeRun, down: frozenset[str], reason: str) -> None:
    made = make_run("cluster.scheduler=slurm", "cluster.nodes=2")
    number = begin_attempt(made.run, made.record.spec, scheduler="slurm", job_id="1", nodes=("n0", "n1"))
    write_node_record(made.run, number, node(75, rank(0, 75)))
    write_node_record(made.run, number, node(None, number=1))
    conclude_attempt(
        made.run, made.record, number, first_attempt=1, stop_reason=recorded("Slurm is ending the job"), down=down
    )
    (ended,) = made.events("attempt-ended")
    assert ended["reason"] == reason
    assert ("lost" in ended["message"]) == (reason == "node")


def test_a_preemption_at_the_time_limit_counts_as_a_time_limit_and_uses_no_budget(make_run: MakeRun) -> None:
    made = make_run("restarts.preemption=0")
    conclude(made, code=75, time_is_up=lambda: True)
    (ended,) = made.events("attempt-ended")
    assert (ended["exit_code"], ended["reason"], ended["requeue"]) == (75, "time-limit", True)
