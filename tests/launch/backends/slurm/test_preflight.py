"""A job that can never run is refused with all problems, one that waits gets notes; from the output of a real Slurm."""

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest

from scaletrain_cli.launch.backends.slurm import site as site_module
from scaletrain_cli.launch.backends.slurm.preflight import PreflightVerdict, check_site
from scaletrain_cli.launch.backends.slurm.script import sbatch_options
from scaletrain_cli.launch.backends.slurm.site import Site, binding_qos, cores_per_gpu, limit_factor, preemption_rule
from scaletrain_cli.launch.backends.slurm.tables import (
    Limit,
    Partition,
    QosRule,
    Reservation,
    nodes,
    partitions,
    read_associations,
    read_qos_rules,
    settings,
)
from scaletrain_cli.spec import RunSpec
from tests.launch.backends.slurm.test_tables import answer
from tests.launch.conftest import make_spec

NOW = 1_000_000.0
HOUR = 3600.0
# A site that shows nothing to this user.
SILENT = Site("root", NOW, {}, (), (), (), (), (), "", "", ())
KNOWN = (read_associations(answer("associations")), read_qos_rules(answer("qos")), "lab", "normal", ())
PARTS = (settings(answer("config")), partitions(answer("partitions")), nodes(answer("nodes")), ())
SITE = Site("root", NOW, *PARTS, *KNOWN, accounts=("lab", "root"))


def ask(*overrides: str, gpus: int = 8, nodes: int = 2) -> RunSpec:
    sizes = (f"cluster.nodes={nodes}", f"cluster.gpus_per_node={gpus}", "training.global_batch_size=64")
    return make_spec(
        "cluster.scheduler=slurm", "cluster.gpu=h100-sxm-80gb", "cluster.grace_seconds=5", *sizes, *overrides
    )


def verdict(*overrides: str, site: Site = SITE, **sizes: int) -> PreflightVerdict:
    return check_site(site, ask(*overrides, **sizes))


def partition(**changes: Any) -> tuple[Partition, ...]:
    return (dataclasses.replace(SITE.partitions[0], **changes), *SITE.partitions[1:])


def test_accounts_and_qos_are_the_same_in_capitals_as_for_sbatch() -> None:
    shown = "PartitionName=main Default=YES State=UP AllowAccounts=Lab,Root AllowQos=Normal QoS=Normal"
    (main,) = partitions(shown)
    site = dataclasses.replace(SITE, partitions=(dataclasses.replace(main, max_nodes=8), *SITE.partitions[1:]))
    assert verdict("cluster.slurm.account=LAB", "cluster.slurm.qos=Normal", site=site) == PreflightVerdict((), ())
    assert main.qos == "normal"


def test_a_job_that_fits_has_no_problem_and_no_note() -> None:
    assert verdict() == PreflightVerdict((), ())


@pytest.mark.parametrize(
    ("overrides", "sizes", "key", "said"),
    [
        (
            ["cluster.slurm.partition=mian"],
            {},
            "cluster.slurm.partition",
            "mian: this cluster has the partitions main, ",
        ),
        (["cluster.slurm.partition=mian"], {}, "cluster.slurm.partition", "Did you mean main?"),
        (["cluster.slurm.partition=main,nowhere"], {}, "cluster.slurm.partition", "nowhere"),
        ([], {"nodes": 4}, "cluster.nodes", "4: partition main has 3 nodes. Request at most 3."),
        (["cluster.slurm.exclude=n1,n2"], {}, "cluster.nodes", "has 1 node for the job, without those in exclude"),
        ([], {"gpus": 16}, "cluster.gpus_per_node", "16: nodes of partition main have at most 8 GPUs. Request 8 per"),
        (["cluster.slurm.gres_type=a100"], {}, "cluster.slurm.gres_type", "no node of partition main has GPUs of this"),
        (["cluster.slurm.gres_type=a100"], {}, "cluster.slurm.gres_type", "it has h100"),
        (
            ["cluster.cpus_per_gpu=12"],
            {},
            "cluster.cpus_per_gpu",
            "have at most 4 CPUs; the job requests 96 on each. Leave it out",
        ),
        (["cluster.slurm.memory_per_node=1TiB"], {}, "cluster.slurm.memory_per_node", "have at most 8000 MiB"),
        (["cluster.slurm.nodelist=n1,n9"], {}, "cluster.slurm.nodelist", "n9 not in partition main"),
        (["cluster.slurm.account=guests"], {}, "cluster.slurm.account", "root may use the accounts lab, root"),
        (
            ["cluster.slurm.qos=urgent"],
            {},
            "cluster.slurm.qos",
            "root may use the QOS capped, normal, scavenger in account lab",
        ),
        (["cluster.slurm.reservation=week-7"], {}, "cluster.slurm.reservation", "this cluster has no reservations now"),
    ],
)
def test_a_request_that_cannot_run_is_named(overrides: list[str], sizes: dict[str, int], key: str, said: str) -> None:
    (problem,) = verdict(*overrides, **sizes).problems
    assert problem.key == key
    assert said in str(problem)


@pytest.mark.parametrize(
    ("changes", "overrides", "said"),
    [
        ({"max_seconds": 2 * HOUR}, ["cluster.slurm.time=24h"], "1d: jobs of partition main may run for 2h (MaxTime)"),
        ({"max_seconds": HOUR}, ["cluster.slurm.time=UNLIMITED"], "UNLIMITED: jobs of partition main may run for 1h"),
        ({"max_nodes": 1}, [], "2: a job of partition main may have at most 1 node (MaxNodes)"),
        ({"min_nodes": 3}, [], "2: a job of partition main must have at least 3 nodes (MinNodes)"),
        ({"allowed_accounts": frozenset({"a", "b"})}, [], "lab: partition main accepts only a, b"),
        ({"denied_accounts": frozenset({"lab"})}, [], "lab: partition main does not accept lab"),
        ({"denied_accounts": frozenset({"root"})}, [], "lab: partition main does not accept lab"),
        ({"allowed_qos": frozenset({"high"})}, [], "normal: partition main accepts only high"),
        ({"denied_qos": frozenset({"normal"})}, [], "normal: partition main does not accept normal"),
        ({"state": "DRAIN"}, [], "main: the partition is DRAIN and accepts no jobs"),
    ],
)
def test_a_job_that_the_partition_rejects_is_refused(changes: dict[str, Any], overrides: list[str], said: str) -> None:
    (problem,) = verdict(*overrides, site=dataclasses.replace(SITE, partitions=partition(**changes))).problems
    assert said in str(problem)


@pytest.mark.parametrize(
    ("changes", "accounts"),
    [
        ({"allowed_accounts": frozenset({"root"})}, ("lab", "root")),  # which is above lab
        ({"allowed_accounts": frozenset({"physics"})}, ()),  # which may be above lab, where the site hides accounts
        ({"allowed_accounts": frozenset({"lab"}), "denied_accounts": frozenset({"root"})}, ("lab", "root")),
    ],
)
def test_a_partition_that_may_admit_the_account_refuses_no_job(changes: Any, accounts: tuple[str, ...]) -> None:
    site = dataclasses.replace(SITE, partitions=partition(**changes), accounts=accounts)
    assert verdict(site=site).problems == ()


def with_qos(*flags: str, **changes: Any) -> Site:
    """Return the site with these flags of the job's QOS, normal, and these limits of partition main."""
    rules = (QosRule("normal", frozenset(), "cluster", 0.0, frozenset(flag.lower() for flag in flags)),)
    return dataclasses.replace(SITE, qos_rules=rules, partitions=partition(**changes))


@pytest.mark.parametrize(
    ("flag", "changes", "overrides"),
    [
        ("PartitionTimeLimit", {"max_seconds": HOUR}, ["cluster.slurm.time=24h"]),
        ("PartitionMaxNodes", {"max_nodes": 1}, []),
        ("PartitionMinNodes", {"min_nodes": 3}, []),
    ],
)
def test_a_qos_flag_lifts_only_its_own_limit(flag: str, changes: dict[str, Any], overrides: list[str]) -> None:
    assert verdict(*overrides, site=with_qos(flag, **changes)).problems == ()
    others = {"PartitionTimeLimit", "PartitionMaxNodes", "PartitionMinNodes"} - {flag}
    assert len(verdict(*overrides, site=with_qos(*others, **changes)).problems) == 1


def test_a_qos_that_the_site_hides_may_lift_every_limit_of_partitions() -> None:
    hidden = dataclasses.replace(SITE, qos_rules=(), partitions=partition(max_nodes=1))
    assert verdict(site=hidden).problems == ()


def test_a_qos_that_requires_a_reservation_needs_one() -> None:
    (problem,) = verdict(site=with_qos("RequiresReservation")).problems
    assert "QOS normal accepts only jobs in a reservation" in str(problem)


def test_a_gang_in_a_qos_that_reserves_no_nodes_gets_a_note() -> None:
    (note,) = verdict(site=with_qos("NoReserve")).notes
    assert "reserves no nodes for a pending job (NoReserve)" in str(note)
    assert verdict(site=with_qos("NoReserve"), nodes=1).notes == ()


def test_the_qos_of_a_partition_has_precedence_unless_the_jobs_has_overpartqos() -> None:
    rules = read_qos_rules("normal||cluster|00:00:00|DenyOnLimit,OverPartQOS|\nslow||cluster|00:00:00||2.000000\n")
    assert binding_qos(rules, ["part"], "slow") == ["part", "slow"]
    assert binding_qos(rules, ["part"], "normal") == ["normal", "part"]
    assert binding_qos(rules, [""], "normal") == ["normal"]
    assert binding_qos(rules, ["part", "other"], "slow") == ["slow"]  # the partition is not known
    assert (limit_factor(rules, ["part", "slow"]), limit_factor(rules, ["normal"])) == (2.0, 1.0)
    idle = [QosRule("idle", frozenset(), "", 0.0, limit_factor=0.0)]
    assert limit_factor(idle, ["idle"]) == 1.0


def test_a_reservation_that_slurm_hides_is_reported_as_unknown_and_not_as_missing() -> None:
    wanted = "cluster.slurm.reservation=week-7"
    result = verdict(wanted, site=dataclasses.replace(SITE, reservations=None))
    assert (result.problems, "whether reservation week-7 exists" in str(result.notes[0])) == ((), True)
    private = dataclasses.replace(SITE, user="ada", config={**SITE.config, "PrivateData": "jobs,reservations"})
    result = verdict(wanted, site=private)
    assert (result.problems, "exists: Slurm shows only those that you may use" in str(result.notes[0])) == ((), True)
    assert verdict(site=private) == PreflightVerdict((), ())
    assert len(verdict(wanted).problems) == 1  # root can see all reservations


def test_all_problems_are_reported_at_once() -> None:
    site = dataclasses.replace(SITE, partitions=partition(max_seconds=HOUR, max_nodes=1))
    found = verdict("cluster.slurm.time=24h", "cluster.slurm.qos=urgent", "cluster.slurm.gres_type=a100", site=site)
    assert [problem.key.rpartition(".")[2] for problem in found.problems] == ["qos", "time", "nodes", "gres_type"]


def test_one_suitable_partition_of_a_list_is_enough() -> None:
    site = dataclasses.replace(SITE, partitions=partition(max_nodes=1))
    assert verdict("cluster.slurm.partition=main,high", site=site).problems == ()
    assert len(verdict("cluster.slurm.partition=main", site=site).problems) == 1


def test_unusable_nodes_only_make_the_job_wait() -> None:
    found = verdict(nodes=3)
    assert found.problems == ()
    assert [*map(str, found.notes)] == ["2 of 3 nodes of main that fit the job are usable (n3 drain): it waits for 3"]


def test_a_partition_that_is_down_only_makes_the_job_wait() -> None:
    found = verdict(site=dataclasses.replace(SITE, partitions=partition(state="DOWN")))
    assert (found.problems, "until it is UP again" in str(found.notes[0])) == ((), True)


def test_a_job_below_the_minimum_of_a_qos_or_above_its_limit_per_node_never_runs() -> None:
    few = dataclasses.replace(SITE, limits=(Limit("QOS big", "MinTRESPJ", "gres/gpu", 32, None),))
    (problem,) = verdict(site=few).problems
    assert "all nodes: a job of QOS big must request at least 32 GPUs (MinTRESPJ). Request more" in str(problem)
    each = dataclasses.replace(SITE, limits=(Limit("QOS thin", "MaxTRESPN", "gres/gpu", 4, None),))
    assert "QOS thin may use 4 GPUs on each node (MaxTRESPN)" in str(verdict(site=each).problems[0])
    enough = dataclasses.replace(SITE, limits=(Limit("QOS thin", "MaxTRESPN", "gres/gpu", 8, None),))
    assert verdict(site=enough) == PreflightVerdict((), ())


def test_limits_that_the_site_does_not_enforce_are_ignored() -> None:
    site = dataclasses.replace(SITE, limits=(Limit("account lab", "GrpTRES", "gres/gpu", 1, 0),))
    assert len(verdict(site=site).problems) == 1
    for config in ({}, SITE.config | {"AccountingStorageEnforce": "associations"}):  # type: ignore[operator]
        assert verdict(site=dataclasses.replace(site, config=config)).problems == ()


def test_the_wall_time_limit_of_a_qos_applies_to_the_time_limit() -> None:
    site = dataclasses.replace(SITE, limits=(Limit("QOS capped", "MaxWallPJ", "seconds", 2 * HOUR, None),))
    (problem,) = verdict("cluster.slurm.time=3h", site=site).problems
    assert "cluster.slurm.time = 3h: QOS capped allows jobs of at most 2h (MaxWallPJ)" in str(problem)


def test_maintenance_before_the_jobs_end_is_a_note_with_its_times() -> None:
    soon = Reservation("maint1", NOW + 2 * HOUR, NOW + 4 * HOUR, frozenset({"n1", "n2", "n3"}), is_maintenance=True)
    site = dataclasses.replace(SITE, reservations=(soon,))
    (note,) = verdict("cluster.slurm.time=3h", site=site).notes
    assert str(note).startswith("maintenance maint1 takes 3 nodes of main from 1970-01-12 ")
    assert "at most 2h" in str(note)
    assert verdict("cluster.slurm.time=1h", site=site).notes == ()
    assert verdict("cluster.slurm.time=2h", "cluster.slurm.reservation=maint1", site=site) == PreflightVerdict((), ())
    elsewhere = dataclasses.replace(soon, nodes=frozenset({"n3"}))
    assert verdict("cluster.slurm.time=3h", site=dataclasses.replace(site, reservations=(elsewhere,))).notes == ()


def test_a_reservation_that_ends_before_the_job_or_has_too_few_nodes_is_a_note() -> None:
    mine = Reservation("lab1", NOW - HOUR, NOW + 2 * HOUR, frozenset({"n1"}), is_maintenance=False)
    site = dataclasses.replace(SITE, reservations=(mine,))
    ends, small = verdict("cluster.slurm.time=3h", "cluster.slurm.reservation=lab1", site=site).notes
    assert str(ends).startswith("reservation lab1 ends at 1970-01-12 ")
    assert str(small) == "reservation lab1 has 1 node that fit the job"
    assert verdict("cluster.slurm.time=2h", "cluster.slurm.reservation=lab1", site=site, nodes=1).notes == ()


def test_options_that_sbatch_would_take_from_the_environment_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SBATCH_ACCOUNT", "SLURM_CLUSTERS", "SLURM_CONF"):
        monkeypatch.setenv(name, "lab")
    (note,) = verdict().notes
    assert str(note) == "sbatch gets no options from SBATCH_ACCOUNT, SLURM_CLUSTERS here"
    assert "SLURM_CONF" in note.remedies[0]


def test_a_flexible_reservation_ends_no_job_and_limits_no_nodes() -> None:
    mine = Reservation("lab1", NOW - HOUR, NOW + HOUR, frozenset({"n1"}), is_maintenance=False, is_flexible=True)
    site = dataclasses.replace(SITE, reservations=(mine,))
    assert verdict("cluster.slurm.time=3h", "cluster.slurm.reservation=lab1", site=site) == PreflightVerdict((), ())


def test_nodes_of_a_cloud_that_slurm_hides_while_they_are_powered_down_may_be_what_a_job_needs() -> None:
    hidden = dataclasses.replace(SITE, partitions=partition(total_nodes=8))
    assert verdict(site=hidden, nodes=8).problems == ()
    assert verdict("cluster.slurm.nodelist=cloud[1-2]", site=hidden).problems == ()
    assert SITE.partitions[0].total_nodes == 3
    assert len(verdict(nodes=8).problems) == 1


def test_a_job_may_name_several_qos_of_which_slurm_uses_one() -> None:
    site = dataclasses.replace(SITE, qos="capped,normal", partitions=partition(allowed_qos=frozenset({"normal"})))
    assert verdict("cluster.slurm.qos=capped,normal", site=site).problems == ()
    site = dataclasses.replace(site, partitions=partition(denied_qos=frozenset({"capped"})))
    assert verdict("cluster.slurm.qos=capped,normal", site=site).problems == ()
    (problem,) = verdict("cluster.slurm.qos=capped,urgent").problems
    assert (problem.key, problem.given) == ("cluster.slurm.qos", "urgent")


def test_a_job_may_name_several_reservations_of_which_slurm_uses_one() -> None:
    nodes = frozenset({"n1", "n2", "n3"})
    there = tuple(Reservation(name, NOW, NOW + 9 * HOUR, nodes, False) for name in ("lab1", "lab2"))
    site, wanted = dataclasses.replace(SITE, reservations=there), "cluster.slurm.reservation=lab2,lab1"
    assert verdict("cluster.slurm.time=2h", wanted, site=site) == PreflightVerdict((), ())
    (problem,) = verdict("cluster.slurm.time=2h", f"{wanted},lab3", site=site).problems
    assert (problem.given, "has the reservations lab1, lab2" in str(problem)) == ("lab3", True)


@pytest.mark.parametrize(
    ("overrides", "changes", "cores"),
    [
        ((), {}, 12),
        (("cluster.cpus_per_gpu=3",), {}, 3),
        ((), {"gives_cores": True}, "auto"),
        ((), {"max_cores_per_node": 64}, 8),
        (("cluster.slurm.partition=nowhere",), {}, "auto"),
    ],
)
def test_a_job_requests_the_cores_of_its_gpus_where_slurm_gives_none_by_default(
    monkeypatch: pytest.MonkeyPatch, overrides: tuple[str, ...], changes: dict[str, Any], cores: int | str
) -> None:
    """On nodes of 100 CPUs, four of which are kept for the system."""
    shown = SimpleNamespace(stdout="NodeName=n1 CPUAlloc=0 CPUEfctv=96 CPUTot=100\n")
    monkeypatch.setattr(site_module, "call_slurm", lambda command: shown)
    large = tuple(dataclasses.replace(node, cpus=100) for node in SITE.nodes)
    site = dataclasses.replace(SITE, nodes=large, partitions=partition(**changes))
    spec = ask(*overrides, gpus=4)
    asked = dataclasses.replace(site, cores_per_gpu=cores_per_gpu(site, spec.cluster)).with_cores(spec)
    assert asked.cluster.cpus_per_gpu == cores
    wanted = [] if cores == "auto" else [f"cpus-per-task={4 * int(cores)}"]
    assert [option for option in sbatch_options(asked, "r") if option.startswith("cpus-per-task")] == wanted


def test_a_site_that_hides_everything_causes_no_problem() -> None:
    assert verdict(site=SILENT) == PreflightVerdict((), ())
    assert preemption_rule(SILENT, ask().cluster) == ""


def test_with_a_job_submit_plugin_unknown_names_are_only_notes() -> None:
    site = dataclasses.replace(SITE, config={**SITE.config, "JobSubmitPlugins": "lua"})
    result = verdict("cluster.slurm.partition=regular", site=site)
    assert result.problems == ()
    assert any("regular" in str(note) and "plugin of the cluster" in str(note) for note in result.notes)
    assert verdict("cluster.slurm.partition=regular").problems


def test_the_preemption_rule_is_described_for_each_kind_of_site() -> None:
    def rule(*overrides: str, **config: str) -> str:
        site = dataclasses.replace(SITE, config={**SITE.config, **config})
        return preemption_rule(site, ask(*overrides).cluster)

    assert rule("cluster.slurm.partition=high").endswith("Jobs of high are not preempted (PreemptMode=OFF).")
    graced = rule("cluster.slurm.partition=spot")
    assert "Jobs of spot are preempted by main, high: PreemptMode=REQUEUE. SIGTERM to the node agents, Grace" in graced
    assert "KillWait 5 s (no GraceTime), SIGKILL. Slurm requeues the job." in rule("cluster.slurm.partition=spot0")
    gang = dataclasses.replace(SITE, partitions=partition(preempt_mode="SUSPEND,GANG", tier=0))
    shown = preemption_rule(gang, ask("cluster.slurm.partition=main").cluster)
    assert shown.endswith(
        "PreemptMode=SUSPEND,GANG. Slurm suspends the job (SIGTSTP, then SIGSTOP) and continues it later."
    )
    assert rule(PreemptType="preempt/none") == "Preemption: none on this cluster (PreemptType=preempt/none)."
    assert rule(PreemptType="preempt/qos") == "Preemption: by QOS. No QOS preempts normal."


def test_the_rule_of_preemption_by_qos_names_the_preempting_qos() -> None:
    prod = QosRule("prod", frozenset({"scavenger"}), "cluster", 0)
    config = {**SITE.config, "PreemptType": "preempt/qos"}
    site = dataclasses.replace(SITE, config=config, qos="scavenger", qos_rules=(*SITE.qos_rules, prod))
    rule = preemption_rule(site, ask().cluster)
    assert "Jobs of scavenger are preempted by prod: PreemptMode=REQUEUE. SIGTERM to the node agents, Grace" in rule


def test_a_grace_period_longer_than_that_of_the_site_is_a_note() -> None:
    (note,) = verdict("cluster.slurm.partition=spot", "cluster.grace_seconds=120").notes
    assert "cluster.grace_seconds = 120, but partition spot gives a preempted job 30 s (GraceTime)" in str(note)
    (note,) = verdict("cluster.slurm.partition=spot0", "cluster.grace_seconds=120").notes
    assert "5 s (no GraceTime, so KillWait)" in str(note)
    cancels = dataclasses.replace(SITE, partitions=partition(preempt_mode="CANCEL", grace_seconds=60.0))
    assert "`scaletrain resume` continues the run" in str(verdict(site=cancels).notes[0])
