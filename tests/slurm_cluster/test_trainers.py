"""Other programs on a real Slurm of two nodes that are preempted: torchrun and a shell script."""

import json
import sys
from pathlib import Path

import pytest

from tests.slurm_cluster.cluster import DevCluster
from tests.slurm_cluster.test_a_run_on_slurm import Login, ends

pytestmark = [pytest.mark.slurm, pytest.mark.long]
ON_SLURM = ("cluster={scheduler: slurm, nodes: 2, gpus_per_node: 1, gpu: cpu, slurm: {partition: spot, time: 30m}}",)
RANK = """
import time
from scaletrain_cli.worker import ExitCode, Rank
rank = Rank.start()
import torch.distributed as dist
import torch

def train():
    dist.init_process_group("gloo")
    total = torch.tensor(float(rank.environment.rank + 1))
    dist.all_reduce(total)
    step = 0
    while rank.environment.attempt == 1:
        step += 1
        rank.log_metrics(step, loss=total.item())
        preempted = torch.tensor(float(rank.preemption.raised))
        dist.all_reduce(preempted, dist.ReduceOp.MAX)
        if preempted:
            (rank.environment.run.path / f"saved-{rank.environment.rank}").touch()
            return ExitCode.PREEMPTED
        time.sleep(0.1)
    return ExitCode.DONE

rank.run(train)
"""


@pytest.fixture
def login(slurm: DevCluster, tmp_path: Path) -> Login:
    return Login(slurm, tmp_path / "runs")


def submitted(login: Login, spec: Path, *sets: str) -> str:
    done = login.scaletrain("submit", str(spec), "--yes", "--json", sets=sets)
    return str(done["run_id"])


def preempted_by_a_higher_partition(login: Login, run_id: str) -> str:
    """Preempt the run, wait until its first attempt has ended, and return its run directory."""
    urgent = login.cluster.submit("sleep 600", "-p", "high", "-N", "4", "--exclusive", "-o/dev/null")
    before = login.wait(run_id, lambda now: len(ends(now["run_dir"])) == 1)
    assert ends(before["run_dir"]) == [(75, "preempted")]
    login.cluster.run("scancel", urgent)
    return str(before["run_dir"])


def losses(run_dir: str) -> list[tuple[int, float]]:
    lines = [json.loads(line) for line in (Path(run_dir) / "metrics.jsonl").read_text().splitlines()]
    return sorted({line["step"]: line["loss"] for line in lines}.items())


def test_torchrun_is_the_program_of_each_node_and_its_ranks_have_the_grace_period(login: Login, tmp_path: Path) -> None:
    (tmp_path / "ranks.py").write_text(RANK)
    command = json.dumps([sys.executable, "-m", "torch.distributed.run", str(tmp_path / "ranks.py")])
    spec = Path(__file__).parents[2] / "recipes" / "trl-sft" / "run.yaml"
    code = f"code={{command: {command}, processes_per_node: 1}}"
    run_id = submitted(login, spec, *ON_SLURM, code, "env={OMP_NUM_THREADS: '1'}")
    login.wait(run_id, lambda now: now["step"] >= 2)
    run_dir = preempted_by_a_higher_partition(login, run_id)
    assert sorted(path.name for path in Path(run_dir).glob("saved-*")) == ["saved-0", "saved-1"]
    login.wait(run_id, lambda now: now["state"] == "finished", "finished")
    assert ends(run_dir) == [(75, "preempted"), (0, "done")]
    assert set(losses(run_dir)) == {(step, 3.0) for step, _ in losses(run_dir)}  # the sum over two ranks: 1 + 2


def test_a_shell_script_that_the_preemption_ends_is_requeued(login: Login, tmp_path: Path) -> None:
    script = "echo up > $SCALETRAIN_RUN_DIR/up-$RANK-$SCALETRAIN_ATTEMPT; [ $SCALETRAIN_ATTEMPT = 2 ] || sleep 600"
    spec = Path(__file__).parents[2] / "recipes" / "trl-sft" / "run.yaml"
    run_id = submitted(login, spec, *ON_SLURM, f"code={{command: {json.dumps(['bash', '-c', script])}}}")
    before = login.wait(run_id, lambda now: len(list(Path(now["run_dir"]).glob("up-*-1"))) == 2)
    preempted_by_a_higher_partition(login, run_id)
    login.wait(run_id, lambda now: now["state"] == "finished", "finished")
    assert len(list(Path(before["run_dir"]).glob("up-*-2"))) == 2
