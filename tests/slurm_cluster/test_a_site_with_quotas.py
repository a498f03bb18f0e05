"""Submissions and sweeps on a real Slurm with accounting, typed GPUs and quotas."""

import json
import time
from pathlib import Path
from typing import Any

import pytest

from scaletrain_cli.launch.backends.slurm.tables import NODES, nodes, partitions
from tests.slurm_cluster.cluster import DevCluster
from tests.slurm_cluster.site import on_login_node

pytestmark = pytest.mark.slurm
PROJECT = Path(__file__).parents[2]
SMALL = PROJECT / "tests" / "cli" / "small.yaml"
STAND_IN = "env.SCALETRAIN_ENGINE=tests.launch.fake_engine"  # no job trains, and no data are prepared for it
ON_GPUS = (
    *("cluster.scheduler=slurm", "cluster.gpu=h100-sxm-80gb", "cluster.gpus_per_node=8", "cluster.cpus_per_gpu=1"),
    *("cluster.slurm={gres_type: h100, time: 30m}", "training.global_batch_size=192", "training.micro_batch_size=auto"),
    STAND_IN,
)
ON_CPUS = ("cluster.scheduler=slurm", "cluster.gpus_per_node=2", STAND_IN)


@pytest.fixture
def cluster(accounting: DevCluster) -> DevCluster:
    return accounting


@pytest.fixture(autouse=True)
def runs(cluster: DevCluster, tmp_path: Path) -> Path:
    root = tmp_path / "runs"
    cluster.environment |= {"SCALETRAIN_RUNS": str(root), "PYTHONPATH": str(PROJECT)}
    return root


def scaletrain(cluster: DevCluster, *arguments: object, sets: tuple[str, ...] = ()) -> Any:
    overrides = [word for override in sets for word in ("--set", override)]
    return on_login_node(cluster, *map(str, arguments), *overrides, check=False)


def submit(cluster: DevCluster, spec: Path, *sets: str) -> Any:
    return scaletrain(cluster, "submit", spec, "--yes", sets=sets)


def test_the_parsers_read_the_output_of_this_slurm(cluster: DevCluster) -> None:
    found = nodes(cluster.run("sinfo", "--noheader", "--Node", "--all", f"--Format={NODES}").stdout)
    assert [(node.name, node.gpus, node.cpus) for node in found] == [(f"n{n}", {"h100": 8}, 16) for n in (1, 2, 3)]
    names = [one.name for one in partitions(cluster.run("scontrol", "-o", "show", "partition").stdout)]
    assert names == ["main", "spot", "spot0", "high"]


def test_all_reasons_why_a_job_can_never_run_are_reported_at_once(cluster: DevCluster, runs: Path) -> None:
    refused = submit(
        cluster,
        SMALL,
        *ON_GPUS,
        *("cluster.nodes=4", "cluster.slurm.gres_type=a100", "cluster.slurm.qos=capped"),
        "cluster.slurm.account=guests",
    )
    assert refused.returncode == 4
    for said in ("root may use the accounts lab", "of this type; it has h100", "QOS capped may use 8 GPUs in one job"):
        assert said in refused.stderr
    assert not runs.exists()
    assert cluster.run("squeue", "--noheader").stdout == ""


def test_a_quota_in_use_is_a_note_and_one_that_is_too_small_a_refusal(cluster: DevCluster) -> None:
    holder = cluster.submit("sleep 300", "-A", "lab", "-N1", "--gpus-per-node=h100:8", "-o/dev/null")
    cluster.wait_for_state(holder, "RUNNING")
    waits = submit(cluster, SMALL, *ON_GPUS, "cluster.nodes=2")
    run_id = waits.stdout.strip()
    shown = scaletrain(cluster, "status", "--cluster", "--json").stdout
    beyond = submit(cluster, SMALL, *ON_GPUS, "cluster.nodes=3")
    cluster.run("scancel", "-u", "root")
    assert waits.returncode == 0, waits.stderr
    assert "account lab has 8 of its 16 GPUs in use (GrpTRES): the job waits for 16." in waits.stderr
    assert beyond.returncode == 4
    assert "24 GPUs over all nodes: account lab may use 16 GPUs at the same time" in beyond.stderr
    view = json.loads(shown)
    (row,) = view["gpus"]
    assert (row["type"], row["total"], row["used"], row["free_nodes"]) == ("h100", 24, 8, 2)
    assert ["account lab", 16.0, 8.0] in [[one["owner"], one["allowed"], one["used"]] for one in view["quotas"]]
    mine = {row["name"]: row for row in view["queue"]}
    assert (mine[run_id]["state"], mine[run_id]["gpus"], mine[run_id]["ahead"]) == ("queued", 16, 0)


def test_the_confirmation_shows_slurms_estimate_of_the_start(cluster: DevCluster) -> None:
    free = submit(cluster, SMALL, *ON_GPUS, "cluster.nodes=1")
    cluster.run("scancel", "-u", "root")
    assert "Start      now: Slurm's estimate (sbatch --test-only) on n" in free.stderr
    holder = cluster.submit("sleep 900", "-A", "lab", "-N3", "--ntasks-per-node=1", "-c16", "-t60", "-o/dev/null")
    cluster.wait_for_state(holder, "RUNNING")
    waits = scaletrain(cluster, "submit", SMALL, "--yes", "--json", sets=(*ON_GPUS, "cluster.nodes=1"))
    cluster.run("scancel", "-u", "root")
    assert waits.returncode == 0, waits.stderr
    start = json.loads(waits.stdout)["start"]
    assert 0.8 * 3600 < start["at"] - time.time() < 1.2 * 3600
    assert "warning: Job" not in waits.stderr


@pytest.mark.long
def test_flags_of_a_qos_have_the_same_effect_as_in_slurm(cluster: DevCluster) -> None:
    """A job that Slurm would never start is refused; one that a flag permits is accepted, and Slurm runs it."""
    for words in (
        *("add qos partcap MaxTRESPerJob=gres/gpu=8", "add qos over Flags=OverPartQOS MaxTRESPerJob=gres/gpu=16"),
        *("add qos long Flags=PartitionTimeLimit,PartitionMaxNodes", "add qos big MinTRESPerJob=gres/gpu=16"),
        *("add qos booked Flags=RequiresReservation", "modify account lab set QOS+=partcap,over,long,big,booked"),
    ):
        cluster.run("sacctmgr", "-i", *words.split())
    cluster.run("scontrol", "update", "partitionname=main", "qos=partcap", "maxtime=60", "maxnodes=2")
    two = ("-A", "lab", "-N2", "--gpus-per-node=h100:8", "-t30", "-o/dev/null")
    long = ("-A", "lab", "-N1", "--gpus-per-node=h100:8", "--qos=long", "-t120", "-o/dev/null")
    try:
        held = cluster.submit("sleep 300", *two)
        cluster.wait_for(held, lambda job: job["Reason"] == "QOSMaxGRESPerJob")
        for said, *sets in (
            ("QOS partcap may use 8 GPUs in one job", "cluster.nodes=2"),
            ("partition main may have at most 2 nodes (MaxNodes)", "cluster.nodes=3", "cluster.slurm.qos=over"),
            ("jobs of partition main may run for 1h (MaxTime)", "cluster.nodes=1", "cluster.slurm.time=2h"),
            ("a job of QOS big must request at least 16 GPUs", "cluster.nodes=1", "cluster.slurm.qos=big"),
            ("QOS booked accepts only jobs in a reservation", "cluster.nodes=1", "cluster.slurm.qos=booked"),
        ):
            refused = submit(cluster, SMALL, *ON_GPUS, *sets)
            assert refused.returncode == 4, refused.stderr
            assert said in " ".join(refused.stderr.split())
        for options, *sets in (
            (two, "cluster.nodes=2", "cluster.slurm.qos=over"),
            (long, "cluster.nodes=1", "cluster.slurm.qos=long", "cluster.slurm.time=2h"),
        ):
            qos = next(one.partition("qos=")[2] for one in sets if "qos" in one)
            taken = submit(cluster, SMALL, *ON_GPUS, "cluster.slurm.extra={hold: true}", *sets)
            assert taken.returncode == 0, taken.stderr
            job = cluster.submit("sleep 300", *options, f"--qos={qos}")
            cluster.wait_for_state(job, "RUNNING")
            cluster.run("scancel", "-u", "root")
            cluster.wait_for_state(job, "CANCELLED")
    finally:
        cluster.run("scancel", "-u", "root")
        cluster.run("scontrol", "update", "partitionname=main", "qos=", "maxtime=UNLIMITED", "maxnodes=UNLIMITED")


def test_maintenance_before_the_end_of_a_job_is_reported_with_its_times(cluster: DevCluster) -> None:
    words = "starttime=now+900 duration=60 flags=maint,ignore_jobs nodes=ALL users=root reservationname=work"
    cluster.run("scontrol", "create", "reservation", *words.split())
    done = submit(cluster, SMALL, *ON_GPUS, "cluster.nodes=1")
    cluster.run("scancel", "-u", "root")
    cluster.run("scontrol", "delete", "reservationname=work")
    assert done.returncode == 0, done.stderr
    assert "maintenance work takes 3 nodes of main from " in done.stderr
    assert "cluster.slurm.time is at most 1" in done.stderr


def test_jobs_of_a_sweep_depend_on_each_other_or_none_is_left(cluster: DevCluster, runs: Path) -> None:
    """The jobs are held, so that no engine starts: only their dependencies are checked."""
    held = ("cluster.slurm.extra={hold: true}", *ON_CPUS)
    cap = ("--max-concurrent", "1", "--sweep", "training.seed=1,2,3")
    done = scaletrain(cluster, "submit", SMALL, "--yes", "--json", "--run-id", "s", *cap, sets=held)
    assert done.returncode == 0, done.stderr
    jobs = [run["job_id"] for run in json.loads(done.stdout)["runs"]]
    depends = [cluster.job(job)["Dependency"] for job in jobs]
    cluster.run("scancel", *jobs)
    assert depends == ["(null)", f"afterany:{jobs[0]}(unfulfilled)", f"afterany:{jobs[1]}(unfulfilled)"]

    limit = ("sacctmgr", "-i", "modify", "user", "root", "where", "account=lab", "set")
    cluster.run(*limit, "MaxSubmitJobs=2")
    try:
        refused = scaletrain(cluster, "submit", SMALL, "--yes", "--run-id", "t", *cap, sets=held)
    finally:
        cluster.run(*limit, "MaxSubmitJobs=-1")
    assert refused.returncode == 4
    assert "t-seed-3 (training.seed=3) could not be submitted, so none is submitted" in refused.stderr
    assert sorted(path.name for path in runs.iterdir()) == ["s-seed-1", "s-seed-2", "s-seed-3"]
    assert cluster.run("squeue", "--noheader").stdout == ""


def test_a_job_that_depends_on_a_requeued_job_waits_for_its_end(cluster: DevCluster) -> None:
    first = cluster.submit("sleep 300", "--requeue", "-N1", "-o/dev/null")
    second = cluster.submit("true", f"--dependency=afterany:{first}", "-N1", "-o/dev/null")
    cluster.wait_for_state(first, "RUNNING")
    cluster.run("scontrol", "requeue", first)
    cluster.wait_for(first, lambda job: job["Restarts"] == "1" and job["JobState"] == "RUNNING")
    assert cluster.job(second)["Reason"] == "Dependency"
    cluster.run("scancel", first)
    cluster.wait_for_state(second, "COMPLETED")


def test_a_job_gets_only_allowed_environment_variables(cluster: DevCluster, tmp_path: Path) -> None:
    """The rendered script is submitted with the whole environment of this shell, and `env` in place of the agent."""
    shown = scaletrain(cluster, "submit", SMALL, "--dry-run", sets=(*ON_CPUS, "env={NOTE: of the spec}")).stdout
    lines = shown[: shown.index("# The node agents forward signals")].splitlines()
    step = '"$(type -P srun)" --export=ALL --mpi=none'
    lines += [f'env "${{dropped[@]}}" NOTE="of the spec" {step} env -0 >{tmp_path}/environment']
    script = tmp_path / "job.sh"
    script.write_text("\n".join(lines))
    stray = {"HF_TOKEN": "hf_1", "dotted.name": "hf_2", "BASH_FUNC_ls%%": "() { true; }", "NCCL_DEBUG": "WARN"}
    before = dict(cluster.environment)
    cluster.environment |= stray
    job = cluster.run("sbatch", "--parsable", "--export=ALL", "-o/dev/null", str(script)).stdout.strip()
    cluster.environment = before
    cluster.wait_for_state(job, "COMPLETED")
    pairs = (tmp_path / "environment").read_text().split("\0")[:-1]
    found = dict(pair.partition("=")[::2] for pair in pairs)
    assert (found["NOTE"], found["NCCL_DEBUG"], found["SLURM_JOB_ID"]) == ("of the spec", "WARN", job)
    assert not stray.keys() & found.keys() - {"NCCL_DEBUG"}
