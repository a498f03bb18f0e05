"""The answers of Slurm 22.05 to 26.05 are read alike. slurm_answers/versions/README.md has the origin of each."""

from collections.abc import Callable
from pathlib import Path

import pytest

from scaletrain_cli.errors import SchedulerError
from scaletrain_cli.launch.backends.slurm import explain, queue
from scaletrain_cli.launch.backends.slurm.explain import make_view, why_it_waits
from scaletrain_cli.launch.backends.slurm.growth import read_idle_nodes
from scaletrain_cli.launch.backends.slurm.preflight import read_estimate, with_key
from scaletrain_cli.launch.backends.slurm.site import Site
from scaletrain_cli.launch.backends.slurm.tables import (
    limits_of,
    nodes,
    partitions,
    read_associations,
    read_qos_rules,
    reservations,
    settings,
)
from scaletrain_cli.reasons import Reason
from tests.launch.conftest import make_spec

ANSWERS = Path(__file__).parent / "slurm_answers" / "versions"
VERSIONS = sorted(path.name for path in ANSWERS.iterdir() if path.is_dir())
every_version = pytest.mark.parametrize("version", VERSIONS)


def answer(version: str, name: str) -> str:
    """Return the answer of this version, or of the latest one before it that differs."""
    found = [ANSWERS / one / f"{name}.txt" for one in VERSIONS if one <= version]
    return [path for path in found if path.exists()][-1].read_text(encoding="utf-8")


def site(version: str) -> Site:
    return Site(
        user="root",
        now=0.0,
        config=settings(answer(version, "config")),
        partitions=partitions(answer(version, "partitions")),
        nodes=nodes(answer(version, "nodes")),
        reservations=reservations(answer(version, "reservations")),
        associations=read_associations(answer(version, "associations")),
        qos_rules=read_qos_rules(answer(version, "qos")),
        account="lab",
        qos="capped",
        limits=limits_of(answer(version, "assoc_mgr"), user="root", uid=0, account="lab", qos=["capped"], factor=2.0),
    )


@pytest.fixture
def slurm(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Return a function that sets the answers by the name of the command."""

    def use(**answers: str) -> None:
        def call(command: list[str], **_: object) -> object:
            return type("Answer", (), {"stdout": answers[command[0]]})

        monkeypatch.setattr(explain, "call_slurm", call)
        monkeypatch.setattr(queue, "call_slurm", call)

    return use


def test_all_versions_from_the_oldest_supported_one_have_answers() -> None:
    assert VERSIONS == ["22.05.8", "23.02", "23.11", "24.05", "24.11.5", "25.05", "25.11", "26.05.5"]


@every_version
def test_nodes_and_partitions_are_read_alike(version: str) -> None:
    found = site(version)
    assert [(node.name, node.state, dict(node.gpus), dict(node.gpus_used)) for node in found.nodes] == [
        ("n1", "mix", {"h100": 8}, {"h100": 8}),
        ("n2", "mix", {"h100": 8}, {"h100": 2}),
        ("n3", "mix", {"a100": 4}, {"a100": 2}),
        ("n4", "idle", {"h100": 2, "a100": 2}, {"h100": 0, "a100": 0}),
        ("n5", "drain", {"a100_1g.10gb": 7}, {"a100_1g.10gb": 0}),
    ]
    assert all(node.partitions == {"main", "spot", "spot0", "high"} for node in found.nodes)
    assert found.partitions == site("22.05.8").partitions
    assert [one.name for one in found.partitions] == ["main", "spot", "spot0", "high"]


@every_version
def test_limits_and_reservations_are_read_alike(version: str) -> None:
    found = site(version)
    assert found.enforces("limits")
    assert found.qos_has("OverPartQOS")
    assert [(limit.kind, limit.resource, limit.allowed, limit.used) for limit in found.limits] == [
        ("MaxTRESPJ", "gres/gpu", 8.0, None),
        ("MaxWallPJ", "seconds", 7200.0, None),
        ("GrpTRES", "gres/gpu", 32.0, 12.0),
    ]
    assert [(one.name, sorted(one.nodes), one.is_maintenance, one.end - one.start) for one in found.reservations] == [
        ("maint1", ["n1", "n2", "n3"], True, 7200.0),
        ("course", ["n3"], False, 3600.0),
    ]
    assert {one.account: one.qos for one in found.associations} == {
        "lab": {"capped", "normal", "scavenger"},
        "root": {"normal"},
    }


@every_version
def test_the_gpus_of_queued_and_running_jobs_are_read_alike(version: str) -> None:
    view = make_view(site(version), answer(version, "queue"))
    assert {row.job_id: (row.state, row.nodes, row.gpus) for row in view.queue} == {
        "7001": ("queued", 2, 16),
        "7005": ("queued", 1, None),
        "7002": ("queued", 1, 2),
        "7006": ("running", 1, 2),
        "7007": ("running", 1, 2),
        "7000": ("running", 1, 8),
    }
    assert {row.type: (row.total, row.free) for row in view.gpus} == {
        "h100": (18, 8),
        "a100": (6, 4),
        "a100_1g.10gb": (7, 0),
    }


@every_version
def test_jobs_and_their_ends_are_read_alike(version: str, slurm: Callable[..., None]) -> None:
    slurm(squeue=answer(version, "jobs_by_id"), sacct=answer(version, "accounted"))
    rows = queue._rows_by_id(["7000"])
    queued, over = (
        dict.fromkeys(("7001", "7002", "7005_1", "7005_3"), "queued"),
        dict.fromkeys(("7003", "7004"), "ended"),
    )
    assert {job_id: row.state for job_id, row in rows.items()} == {"7000": "running", **queued, **over}
    assert rows["7004"].job.cause == "cancelled"
    assert rows["7002"].comment == "c|1"
    pending = dict.fromkeys(("7001", "7005_1", "7005_3"), "PENDING")
    assert queue._accounted_states(["7004"]) == pending | {
        **{"7000": "RUNNING", "7003": "FAILED", "7004": "CANCELLED by 0"}
    }


def test_a_job_in_a_state_of_a_later_version_is_not_taken_to_be_over() -> None:
    assert queue.job_state("EXPEDITING") == "queued"
    assert queue.job_state("RESV_DEL_HOLD") == "queued"
    assert queue.job_state("HIBERNATING") == "unknown"
    assert queue.job_state("OUT_OF_MEMORY") == "ended"


@every_version
def test_what_a_pending_job_requests_is_shown_in_every_version(version: str, slurm: Callable[..., None]) -> None:
    slurm(scontrol=answer(version, "job_pending"), sinfo="3|mix\n1|idle\n1|drain\n", squeue="7001\n7002\n")
    finding = why_it_waits("7001", "a-1")
    texts = {evidence.source: evidence.text for evidence in finding.evidence}
    assert finding.cause == "quota"
    assert "gpu:h100:8" in texts["requested"]
    assert "TRES=cpu=2,mem=2000M,node=2,billing=2,gres/gpu=16" in texts["requested"]
    assert "NumNodes=2-2" in texts["requested"]
    assert texts["squeue, partition main"] == "0 of 2 pending jobs are ahead of it"


@every_version
def test_the_estimate_of_the_start_names_nodes_and_partition(version: str) -> None:
    (line,) = answer(version, "estimate").splitlines()
    start, rest = read_estimate(line, 2e9)
    assert start.at is not None
    assert (rest, str(start.reason)) == ([], "Slurm's estimate (sbatch --test-only) on n[1-2] of main")


@pytest.mark.parametrize("version", ["22.05.8", "24.11.5", "26.05.5"])
def test_refusals_of_sbatch_are_assigned_to_the_key_that_they_are_about(version: str) -> None:
    keys = ("constraint", "partition", "account", "qos", "reservation", "constraint", "licenses", "nodelist")
    for key, said in zip(keys, answer(version, "refusals").splitlines(), strict=True):
        spec = make_spec("cluster.scheduler=slurm", f"cluster.slurm.{key}=x")
        reason = Reason("slurm.command-failed", {"command": "sbatch --test-only", "said": said})
        (problem,) = with_key(spec, SchedulerError(reason)).problems
        assert problem.key == f"cluster.slurm.{key}", said


@pytest.mark.parametrize("version", ["22.05.8", "24.11.5", "26.05.5"])
def test_idle_nodes_are_those_with_enough_gpus_of_the_type(version: str) -> None:
    sets = ("cluster.scheduler=slurm", "cluster.gpu=a100-sxm-80gb", "cluster.slurm.gres_type=a100")
    found = {
        count: read_idle_nodes(
            answer(version, "idle"), "main", ("n1",), make_spec(*sets, f"cluster.gpus_per_node={count}").cluster
        ).names
        for count in (2, 4, 8)
    }
    assert found == {2: ("n3", "n4"), 4: ("n3",), 8: ()}
