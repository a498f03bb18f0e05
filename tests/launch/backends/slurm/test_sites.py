"""The example clusters files of slurm/sites: each of their clusters plans a recipe and renders its job."""

from pathlib import Path

import pytest

from scaletrain_cli.launch.backends.slurm.script import job_script
from scaletrain_cli.plan import make_plan
from scaletrain_cli.spec import load_spec
from scaletrain_cli.spec.clusters_file import choose_cluster, cluster_names
from tests.launch.conftest import PROJECT

RECIPE = PROJECT / "recipes" / "llama-7b-h100.yaml"
SITES = sorted((PROJECT / "slurm" / "sites").glob("*.yaml"))
# Lines of the job, by cluster.
LINES = {
    "university": ["#SBATCH --gpus-per-node=a100:4", "#SBATCH --time=2880:00", "module load gcc/12 cuda/12.4"],
    "university-preemptible": ["#SBATCH --partition=scavenge", "#SBATCH --requeue"],
    "national": [
        "#SBATCH --qos=regular",
        "#SBATCH --constraint=gpu",
        "#SBATCH --licenses=scratch",
        "#SBATCH --exclusive",
    ],
    "national-debug": ["#SBATCH --qos=debug", "#SBATCH --time=30:00"],
    "cloud": ["#SBATCH --partition=gpu", "--container-image=/fsx/CHANGE-ME/images/scaletrain.sqsh"],
    "cloud-spot": ["#SBATCH --partition=gpu-spot", "#SBATCH --requeue"],
}


def test_there_are_examples_of_three_kinds_of_sites() -> None:
    assert [site.stem for site in SITES] == ["cloud", "national", "university"]


@pytest.mark.parametrize("site", SITES, ids=lambda site: site.stem)
def test_each_cluster_of_an_example_renders_a_job_of_a_recipe(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SCALETRAIN_CLUSTERS", str(site))
    assert cluster_names()
    for name in cluster_names():
        # The recipe's layout is for other GPUs; that of the site decides.
        spec = load_spec(RECIPE, ["cluster.nodes=4", "layout.zero_stage=auto"], cluster=name)
        assert make_plan(spec).memory.fits, name
        script = job_script(spec, "run", Path("/runs/run"))
        assert ("--partition" in script) == (not name.startswith("national")), name
        missing = [line for line in LINES[name] if line not in script]
        assert not missing, f"{name}: {missing} not in\n{script[:1500]}"
    default = choose_cluster(None)
    assert default.name == site.stem


def test_the_cloud_example_is_submitted_through_its_head_node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SCALETRAIN_CLUSTERS", str(SITES[0]))
    cluster = choose_cluster("cloud")
    assert cluster.login_node.runs == "/fsx/CHANGE-ME/runs"
