"""Runs on a test cluster that train with a fake engine; everything else about them is real.

The fake engine implements the engine contract and commits real checkpoints. The checks are those of a user: how a run
ended, whether each attempt resumed from the latest committed checkpoint, whether a process is left.
"""

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

from tests.cli.command_line import PROJECT, scaletrain
from tests.slurm_cluster.cluster import DevCluster
from tests.waiting import wait_until

ENDED = ("cancelled", "ended-idle", "failed", "finished")
FOREVER = {"steps": 100_000, "step_seconds": 0.2, "checkpoint_every": 5}


class Site:
    """The command line of a user on the cluster; each run has one rank on each of two nodes."""

    def __init__(self, cluster: DevCluster, runs: Path) -> None:
        self.cluster, self.runs = cluster, runs
        cluster.environment |= {"SCALETRAIN_RUNS": str(runs), "PYTHONPATH": str(PROJECT)}

    def scaletrain(self, *arguments: str, check: bool = True) -> Any:
        return on_login_node(self.cluster, *arguments, check=check)

    def submit(self, fake: dict[str, Any], *settings: str, run_id: str = "life", options: tuple[str, ...] = ()) -> str:
        done = self.try_to_submit(fake, *settings, run_id=run_id, options=options)
        assert done.returncode == 0, done.stderr
        return str(json.loads(done.stdout)["run_id"])

    def try_to_submit(
        self, fake: dict[str, Any], *settings: str, run_id: str = "life", options: tuple[str, ...] = ()
    ) -> Any:
        pairs = (
            *("cluster.scheduler=slurm", "cluster.nodes=2", "cluster.gpus_per_node=1", "cluster.grace_seconds=45"),
            *("training.micro_batch_size=1", "env.SCALETRAIN_ENGINE=tests.launch.fake_engine"),
            f"env.FAKE={json.dumps(json.dumps(fake))}",
            *settings,
        )
        sets = [word for pair in pairs for word in ("--set", pair)]
        spec = str(PROJECT / "tests" / "cli" / "small.yaml")
        return self.scaletrain("submit", spec, "--run-id", run_id, "--yes", "--json", *options, *sets, check=False)

    def status(self, run_id: str) -> dict[str, Any]:
        return dict(self.scaletrain("status", run_id, "--json"))

    def wait(self, run_id: str, reached: Callable[[dict[str, Any]], bool], what: str) -> dict[str, Any]:
        """Return the first status that is reached. Fails if the run stays at an end that is not."""
        polls_after_end, pause = 0, 0.3
        while not reached(now := self.status(run_id)):
            is_over = now["state"] in ENDED and now["job"]["state"] not in ("queued", "running")
            polls_after_end = polls_after_end + 1 if is_over else 0
            assert polls_after_end < 50, f"the run has ended, and not: {what}; {now}"
            time.sleep(pause)
            pause = min(1.3 * pause, 0.6)  # a status costs three commands of Slurm
        if now["state"] == "finished":  # from the event of rank 0: the job script records the end of the attempt later
            wait_until(lambda: len(self.ends(run_id)) >= now["attempt"], "the end of its last attempt is recorded")
        return now

    def trains(self, run_id: str, attempt: int = 1) -> dict[str, Any]:
        """Wait until the attempt has committed a checkpoint; return the status."""

        def saves(now: dict[str, Any]) -> bool:
            assert (now["attempt"] or 0) <= attempt, now
            return now["attempt"] == attempt and (now["last_checkpoint_step"] or 0) > self.began_at(run_id)

        return self.wait(run_id, saves, f"attempt {attempt} saves")

    def began_at(self, run_id: str) -> int:
        """Return the step of the checkpoint from which the newest attempt started; 0 for none."""
        attempts = self.attempts(run_id)
        return (attempts[-1]["checkpoint_at_start"] or 0) if attempts else 0

    def go(self, run_id: str) -> None:
        """Let the ranks that wait at a step continue."""
        (self.runs / run_id / "go").touch()

    def attempts(self, run_id: str) -> list[dict[str, Any]]:
        found = sorted((self.runs / run_id / "attempts").glob("*/attempt.json"))
        return [json.loads(path.read_text()) for path in found]

    def events(self, run_id: str, name: str) -> list[dict[str, Any]]:
        lines = [json.loads(line) for line in (self.runs / run_id / "events.jsonl").read_text().splitlines()]
        return [line for line in lines if line["event"] == name]

    def ends(self, run_id: str) -> list[tuple[int, str]]:
        return [(event["exit_code"], event["reason"]) for event in self.events(run_id, "attempt-ended")]

    def committed(self, run_id: str) -> set[str]:
        return {path.name for path in (self.runs / run_id / "checkpoints").glob("step-????????")}

    def cancel(self, run_id: str) -> None:
        """Cancel the run; check that it saves its last step first and that no step was lost."""
        self.scaletrain("cancel", run_id, "--yes")
        ended = self.wait(run_id, lambda now: now["state"] == "cancelled", "it is cancelled")
        assert ended["last_checkpoint_step"] == ended["step"], ended
        self.nothing_is_lost(run_id)

    def nothing_is_lost(self, run_id: str) -> None:
        """Check that no attempt lost a committed step, or any step if it had time to save, and no process is left."""
        commits = self.events(run_id, "checkpoint")
        for attempt in self.attempts(run_id):
            before = [commit["step"] for commit in commits if commit["time"] < attempt["started"]]
            assert (attempt["checkpoint_at_start"] or 0) >= max(before, default=0), (attempt, commits)
            assert attempt["exit_code"] != 75 or attempt["last_checkpoint_step"] == attempt["last_step"], attempt
        assert {f"step-{commit['step']:08d}" for commit in commits} <= self.committed(run_id)
        self.nothing_is_left(run_id)

    def controller_down(self, run_id: str) -> None:
        """Kill slurmctld once it has saved the state of the run's job: it restarts from its saved state."""
        saved = self.cluster.directory / "state" / "job_state"
        started = self.attempts(run_id)[-1]["started"]

        def has_saved() -> bool:
            with contextlib.suppress(FileNotFoundError):  # slurmctld removes the file before it links the new one
                return saved.stat().st_mtime >= started
            return False

        wait_until(has_saved, "slurmctld has saved it")
        self.cluster.control("controller-down")

    def processes(self, run_id: str) -> list[str]:
        """Return the pids of the run's node agents and ranks on all nodes, which share this machine's processes."""
        found = self.cluster.run("pgrep", "-f", "--", f"(node.agent|fake_engine) .*{self.runs}/{run_id}", check=False)
        return str(found.stdout).split()

    def nothing_is_left(self, run_id: str) -> None:
        wait_until(lambda: not self.processes(run_id), "no process is left")


def on_login_node(cluster: DevCluster, *arguments: str, check: bool = True) -> Any:
    """Run a command line on the login node of a cluster, in this process; return its JSON if it says ``--json``.

    `exec` gets a process of its own, since its streams are those of the process.
    """
    if arguments[0] == "exec":
        return cluster.run(sys.executable, "-m", "scaletrain_cli", *arguments, check=check)
    with patch.dict(os.environ, cluster.environment, clear=True):
        ended = scaletrain(*arguments)
    assert ended.code == 0 or not check, f"{arguments} exited {ended.code}\n{ended.out}{ended.err}"
    if "--json" in arguments and check:
        return ended.data
    return subprocess.CompletedProcess(arguments, ended.code, ended.out, ended.err)
