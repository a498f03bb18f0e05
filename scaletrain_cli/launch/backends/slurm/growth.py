"""Look for more idle nodes while a run trains on fewer than it could use, and stop its ranks if a restart on them pays.

``python -m scaletrain_cli.launch.backends.slurm.growth RUN_DIR --attempt N`` runs beside the step in the batch script,
on the first node. It requests a checkpoint; when that is committed, it checks again, records the request to stop, and
signals the ranks, which save and exit. ``job.py`` then has the job requeued without charge. The attempt does not depend
on this process.
"""

import argparse
import logging
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from scaletrain_cli.errors import ExitCode, ScaletrainError, SchedulerError
from scaletrain_cli.launch.attempts import growth_requests, read_attempt, read_attempts, request_stop, withdraw_growth
from scaletrain_cli.launch.backends.slurm.array import own_job_id
from scaletrain_cli.launch.backends.slurm.commands import call_slurm
from scaletrain_cli.launch.backends.slurm.job import chosen_size, usable_held_nodes
from scaletrain_cli.launch.backends.slurm.preflight import check_site, read_estimate
from scaletrain_cli.launch.backends.slurm.script import sbatch_options
from scaletrain_cli.launch.backends.slurm.site import Site, exclude_option, exclusion_for, has_gpus, query_site
from scaletrain_cli.launch.backends.slurm.tables import gpus, node_names
from scaletrain_cli.log_setup import set_up_logging
from scaletrain_cli.own_processes import leave_current_folder
from scaletrain_cli.plan.reliability.node_sizes import Growth, growth, largest_usable
from scaletrain_cli.plan.result import RunPlan
from scaletrain_cli.reasons import Reason
from scaletrain_cli.rundir.checkpoints import committed_folders
from scaletrain_cli.rundir.goodput import newest_steps, planned_step_seconds, typical_seconds, without_first_steps
from scaletrain_cli.rundir.journal import last_logged_step
from scaletrain_cli.rundir.paths import RunDir
from scaletrain_cli.rundir.record import RunRecord, checkpoint_folder, read_record, read_size_plans
from scaletrain_cli.safe_files import touch
from scaletrain_cli.spec import ClusterSpec, RunSpec

logger = logging.getLogger(__name__)
_POLL_SECONDS = 1.0
_STARTS_WITHIN_SECONDS = 60.0  # Slurm's estimate for a job that it could start now
# Reasons of pending jobs that wait for nodes. Others wait for a time, a dependency, a person or a limit.
_WAITING_FOR_NODES = ("Resources", "Priority", "None", "")
_NICE = 10


def main(arguments: Sequence[str] | None = None) -> int:
    """Watch until a restart is requested or the batch script ends; return an exit code, which nobody needs."""
    leave_current_folder()
    set_up_logging("slurm growth")
    parser = argparse.ArgumentParser(prog="slurm_growth", description="Look for more idle nodes while a run trains.")
    parser.add_argument("run_folder", type=Path)
    parser.add_argument("--attempt", type=int, required=True)
    options = parser.parse_args(arguments)
    os.nice(_NICE)
    run = RunDir(options.run_folder.absolute())
    try:
        record = read_record(run)
        GrowthWatch(run, record, options.attempt, os.environ).until_requested()
    except (ScaletrainError, OSError) as error:
        logger.warning("no more nodes are looked for in this attempt: %s", error)
    return ExitCode.DONE


@dataclass(frozen=True)
class IdleNodes:
    """Nodes of a partition that are idle, and the partitions that have any of them."""

    names: tuple[str, ...]
    partitions: tuple[str, ...]


def read_idle_nodes(text: str, partition: str, without: Sequence[str], cluster: ClusterSpec) -> IdleNodes:
    """Return the idle nodes of ``partition`` with the job's GPUs except ``without``.

    ``text``: lines ``node|state|partition|availability|gres``.
    Nodes that are powered down, drained, reserved or do not answer have another state or a mark behind it.
    """
    rows = [line.strip().split("|") for line in text.splitlines()]
    whole = [
        (row[0], row[1], row[2].rstrip("*"), row[3])
        for row in rows
        if len(row) == 5 and has_gpus(cluster, gpus(row[4]))
    ]
    names = {name for name, state, where, up in whole if state == "idle" and where == partition and up == "up"}
    names -= set(without)
    partitions = {where for name, _, where, _ in whole if name in names}
    return IdleNodes(tuple(sorted(names)), tuple(sorted(partitions)))


def waiting_jobs(text: str) -> int:
    """Return how many pending jobs wait for nodes, from lines ``job id|reason``."""
    rows = (line.strip().split("|", 1) for line in text.splitlines() if "|" in line)
    return sum(row[1] in _WAITING_FOR_NODES for row in rows)


def growths_in_vain(run: RunDir) -> int:
    """Return how many of the latest requests of the same job, without a break, were followed by no more nodes."""
    attempts = {attempt.number: attempt for attempt in read_attempts(run)}
    newest = max(attempts, default=None)
    count = 0
    for asked in reversed(growth_requests(run)):
        after = attempts.get(min((number for number in attempts if number > asked.attempt), default=0))
        stopped = attempts.get(asked.attempt)
        if after is None or stopped is None or newest is None or stopped.job_id != attempts[newest].job_id:
            break
        if asked.before is None or not after.nodes or len(after.nodes) > asked.before:
            break
        count += 1
    return count


@dataclass
class GrowthWatch:
    """The watch over one attempt. ``environment``: that of the batch script."""

    run: RunDir
    record: RunRecord
    attempt: int
    environment: Mapping[str, str]
    plans: dict[int, RunPlan] = field(init=False)
    _parent: int = field(default_factory=os.getppid, init=False)

    def __post_init__(self) -> None:
        self.plans = read_size_plans(self.run, self.record)

    def until_requested(self) -> None:
        """Check every ``check_every`` seconds. Returns once the ranks are signaled, or the batch script has ended."""
        given = self.record.spec.cluster.node_range
        assert given is not None, f"{self.run.run_id} has no range of nodes"
        while self._wait(given.check_every):
            asked = growth_requests(self.run)
            if asked and time.time() - asked[-1].time < given.grow_every * 2 ** growths_in_vain(self.run):
                continue
            try:
                if self._candidate() is not None and self._wait_for_checkpoint() and self._request():
                    return
            except SchedulerError as error:
                logger.info("idle nodes are not known now: %s", error)

    def _wait(self, seconds: float) -> bool:
        """Wait; return whether the attempt still runs."""
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0 and self._runs():
            time.sleep(min(_POLL_SECONDS, left))
        return self._runs()

    def _runs(self) -> bool:
        return os.getppid() == self._parent and not self.run.is_cancelled

    def _wait_for_checkpoint(self) -> bool:
        """Request a checkpoint and wait until one is committed; return whether the attempt still runs.

        If the last save takes longer than the grace period, no more than the steps since this one are lost.
        """
        before = self._newest_checkpoint()
        touch(self.run.save_file)
        while self._runs() and self._newest_checkpoint() == before:
            time.sleep(_POLL_SECONDS)
        return self._runs()

    def _newest_checkpoint(self) -> str:
        folders = committed_folders(checkpoint_folder(self.run, self.record.spec))
        return folders[-1].name if folders else ""

    def _request(self) -> bool:
        """Check again, record the request, and signal the ranks; return whether that was done."""
        restart = self._candidate()
        if restart is None:
            return False
        now = self.record.spec.cluster.nodes
        params = {"nodes": restart.nodes, "before": now, "cost": restart.cost_seconds, "gain": restart.gain_seconds}
        why = Reason("launch.asked-to-grow", params)
        request_stop(self.run, self.attempt, "growth", why)
        try:
            call_slurm(
                ["scancel", "--signal=USR1", self.environment["SLURM_JOB_ID"]]
            )  # to the agents, as at a time limit
        except SchedulerError:
            withdraw_growth(self.run, self.attempt)
            raise
        logger.info("%s", why)
        return True

    def _candidate(self) -> Growth | None:
        """Return the restart on the nodes that are idle now; None if there is none, or it does not pay.

        The nodes of the job itself come first. If too few nodes are idle, as is usual, that takes three calls of Slurm;
        the limits of the site are queried once per attempt.
        Raises SchedulerError.
        """
        names, now = node_names(self.environment["SLURM_JOB_NODELIST"]), self.record.spec.cluster.nodes
        held = usable_held_nodes(self.run, names, own_job_id(self.environment))
        size = chosen_size(self.record, len(held), follows=True) or now
        if size > now:  # a node of the job itself has returned
            restart = growth(self.plans, now, size, left=self._left(), pace=self._pace())
            return restart if restart.pays else None
        attempt = read_attempt(self.run, self.attempt)
        own = () if attempt is None else attempt.nodes
        excluded = node_names(exclude_option(self.record.spec, exclusion_for(self.run, self.record.spec)) or "")
        partition = self.environment["SLURM_JOB_PARTITION"]
        answer = call_slurm(["sinfo", "--noheader", "--Node", "--states=idle", "--format=%N|%t|%P|%a|%G"])
        idle = read_idle_nodes(answer.stdout, partition, (*own, *excluded), self.record.spec.cluster)
        if pinned := node_names(self.record.spec.cluster.slurm.nodelist or ""):
            idle = IdleNodes(tuple(name for name in idle.names if name in pinned), idle.partitions)
        missing = max(0, now + self.record.spec.cluster.spare_nodes - len(held)) if held else 0  # of the spare nodes
        most = now + len(idle.names) - missing
        if (largest_usable(self.record.sizes, most) or 0) <= now:
            return None
        target = largest_usable(self._permitted_sizes, most)
        if target is None or target <= now:
            return None
        restart = growth(self.plans, now, target, left=self._left(), pace=self._pace())
        if not restart.pays:
            return None
        command = ["squeue", "--noheader", "--states=PENDING", f"--partition={','.join(idle.partitions)}"]
        if waiting := waiting_jobs(call_slurm([*command, "--format=%A|%r"]).stdout):
            logger.info(
                "%d nodes are idle, and %d jobs wait for nodes: the run does not grow", len(idle.names), waiting
            )
            return None
        return restart if self._would_start(target - now, (*own, *excluded)) else None

    @cached_property
    def _site(self) -> Site:
        return query_site(self._moved.cluster, self._moved.secret_env)

    @property
    def _moved(self) -> RunSpec:
        """Return the spec of a job on any nodes of the partition that Slurm has chosen for this one."""
        chosen = {"partition": self.environment["SLURM_JOB_PARTITION"], "nodelist": None}
        slurm = self.record.spec.cluster.slurm.model_copy(update=chosen)
        return self.record.spec.with_changes("cluster", slurm=slurm, spare_nodes=0)

    def _requested(self, nodes: int) -> RunSpec:
        """Return the spec of such a job on ``nodes`` nodes, with the CPU cores that it requests."""
        return self._site.with_cores(self._moved).with_changes("cluster", nodes=nodes)

    @cached_property
    def _permitted_sizes(self) -> tuple[int, ...]:
        """Return the sizes that the limits on a whole job permit in this partition, by the checks before a submission.

        Returns all sizes if the checks find a problem with the current size, which runs: they then know too little.
        """
        now = self.record.spec.cluster.nodes
        by_size = {size: check_site(self._site, self._requested(size)).problems for size in self.record.sizes}
        permitted = tuple(size for size in by_size if not by_size[size] or by_size[now])
        for size in sorted(set(by_size) - set(permitted)):
            if size > now:
                logger.info("the run does not grow to %d nodes: %s", size, by_size[size][0].message)
        return permitted

    def _would_start(self, nodes: int, without: Sequence[str]) -> bool:
        """Return whether Slurm, with all its limits, could start the job on ``nodes`` other nodes now."""
        options = sbatch_options(self._requested(nodes), "growth", ",".join(without) or None)
        script = "\n".join(["#!/bin/bash", *(f"#SBATCH --{option}" for option in options), "true", ""])
        answer = call_slurm(["sbatch", "--test-only"], text=script, without=self.record.spec.secret_env)
        now = time.time()
        start, _ = read_estimate(answer.stderr, now)
        return start.at is not None and start.at <= now + _STARTS_WITHIN_SECONDS

    def _left(self) -> float:
        """Return the share of the steps that is left."""
        total = self.record.spec.total_steps
        return max(0, total - (last_logged_step(self.run) or 0)) / total

    def _pace(self) -> float:
        """Return measured over planned seconds of a step of this attempt; 1 before enough steps are measured."""
        steps = [step for step in newest_steps(self.run) if step.attempt == self.attempt]
        seconds = typical_seconds(without_first_steps(steps))
        return 1.0 if seconds is None else seconds / planned_step_seconds(self.record.plan, steps[-1].step)


if __name__ == "__main__":
    sys.exit(main())
