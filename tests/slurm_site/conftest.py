"""The Slurm of a real site: jobs of a minute with a stand-in engine, in a partition that the environment names.

Nothing is started or stopped but the suite's own jobs. CONTRIBUTING.md has the variables.
"""

import os
import secrets
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.slurm_cluster.site import Site

# Read at import: the tests remove these variables from their environment.
SETTINGS = {name: value for name, value in os.environ.items() if name.startswith("SCALETRAIN_SLURM_")}
OUTSIDE = {name: value for name, value in os.environ.items() if not name.startswith("SCALETRAIN_")}
TIME = "10m"


class SlurmOfThisMachine:
    """Commands on this login node."""

    def __init__(self) -> None:
        self.environment = dict(OUTSIDE)

    def run(self, *argv: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(argv, env=self.environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0 or not check, f"{argv} exited {done.returncode}\n{done.stdout}{done.stderr}"
        return done


class RealSite(Site):
    """A user's command line; every job is small, short, and in the partition under test."""

    def try_to_submit(
        self, fake: dict[str, Any], *settings: str, run_id: str = "life", options: tuple[str, ...] = ()
    ) -> Any:
        slurm = {"partition": SETTINGS["SCALETRAIN_SLURM_PARTITION"], "time": TIME, "memory_per_node": "1GB"}
        slurm |= {
            name: value for name in ("account", "qos") if (value := SETTINGS.get(f"SCALETRAIN_SLURM_{name.upper()}"))
        }
        pairs = [f"cluster.slurm.{name}={value}" for name, value in slurm.items()]
        pairs.append(f"cluster.nodes={nodes()}")
        return super().try_to_submit(fake, *pairs, *settings, run_id=f"{run_id}-{self.runs.name}", options=options)

    def nothing_is_left(self, run_id: str) -> None:
        """Check that Slurm has no job of the run; processes of other nodes are not seen from here."""
        job_id = self.status(run_id)["job_id"]
        while self.cluster.run("squeue", "--noheader", "--jobs", job_id, check=False).stdout.strip():
            time.sleep(1)


def nodes() -> int:
    return int(SETTINGS.get("SCALETRAIN_SLURM_NODES", "2"))


@pytest.fixture(scope="session")
def slurm(request: pytest.FixtureRequest) -> SlurmOfThisMachine:
    if "slurm_site" not in request.config.getoption("markexpr"):
        pytest.skip("it submits jobs to the Slurm of this machine: only `make test-slurm` runs it")
    partition = SETTINGS.get("SCALETRAIN_SLURM_PARTITION")
    if not partition:
        pytest.skip("SCALETRAIN_SLURM_PARTITION names no partition for the jobs")
    if shutil.which("sbatch") is None:
        pytest.skip("this machine has no sbatch")
    slurm = SlurmOfThisMachine()
    asked = slurm.run("sinfo", "--noheader", f"--partition={partition}", "--format=%D", check=False)
    if asked.returncode:
        pytest.skip(f"Slurm does not answer: {asked.stderr.strip()}")
    if not asked.stdout.strip():
        pytest.skip(f"Slurm has no partition {partition}")
    if sum(map(int, asked.stdout.split())) < nodes():
        pytest.skip(f"partition {partition} has fewer than {nodes()} nodes; set SCALETRAIN_SLURM_NODES")
    return slurm


@pytest.fixture
def site(slurm: SlurmOfThisMachine) -> Iterator[RealSite]:
    """Return the command line; at the end of the test its jobs are cancelled and its run directories removed."""
    parent = Path(SETTINGS.get("SCALETRAIN_SLURM_RUNS", Path.home() / ".cache"))
    runs = parent / f"scaletrain-suite-{secrets.token_hex(3)}"
    runs.mkdir(parents=True)
    site = RealSite(slurm, runs)  # type: ignore[arg-type]
    try:
        yield site
    finally:
        for run in (path.name for path in runs.iterdir() if (path / "run.json").exists()):
            site.scaletrain("cancel", run, "--yes", check=False)
            site.nothing_is_left(run)
        shutil.rmtree(runs, ignore_errors=True)
