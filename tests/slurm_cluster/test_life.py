"""Runs on a real Slurm, fast: the launcher, the agents and the scheduler are real, the engine is a stand-in.

Tests of lost nodes are in test_lost_nodes, tests that need an accounting database in test_life_with_quotas, and tests
with the real engine in test_a_run_on_slurm.
"""

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.launch.sessions import ECHO_SERVER, Sessions
from tests.ports import reserved_port
from tests.slurm_cluster.site import FOREVER, Site
from tests.slurm_cluster.test_preparation import DONE, corpus, settings
from tests.waiting import wait_until

pytestmark = pytest.mark.slurm


def test_a_restart_of_the_controller_does_not_interrupt_a_run_and_its_end_is_reported(site: Site) -> None:
    run_id = site.submit({"steps": 60, "checkpoint_every": 5, "stay": {"1:*": 20}})
    site.trains(run_id)
    assert site.scaletrain("exec", run_id, "--node", "1", "--", "sh", "-c", "exit 7", check=False).returncode == 7
    site.controller_down(run_id)
    with commands_that_give_up_soon(site):
        silent = site.status(run_id)
    assert silent["state"] in ("unknown", "running")
    assert silent["step"] > 0
    site.cluster.control("controller-up")
    site.go(run_id)
    done = site.wait(run_id, lambda now: now["state"] == "finished", "it finishes")
    assert (done["attempt"], site.ends(run_id)) == (1, [(0, "done")])
    site.nothing_is_lost(run_id)


@contextlib.contextmanager
def commands_that_give_up_soon(site: Site) -> Iterator[None]:
    """Shorten the timeout of Slurm's commands, and not that of its daemons, while no controller answers."""
    environment = site.cluster.environment
    conf = Path(environment["SLURM_CONF"])
    hasty = conf.with_name("hasty.conf")
    hasty.write_text(conf.read_text().replace("MessageTimeout=100", "MessageTimeout=5"))
    environment["SLURM_CONF"] = str(hasty)
    yield
    environment["SLURM_CONF"] = str(conf)


@pytest.mark.long
def test_commands_run_beside_the_ranks_of_a_run(site: Site) -> None:
    """`exec`, `shell` and `port-forward` on a run of one rank on each of two nodes, which hold all it asked for."""
    run_id = site.submit({"steps": 60, "checkpoint_every": 5, "stay": {"1:*": 20}})
    nodes = site.trains(run_id)["nodes"]
    sessions = Sessions(run_id, site.cluster.environment)
    sessions.passes_streams_and_the_exit_code_on()
    sessions.has_the_environment_of_the_ranks(str(site.runs / run_id), rank=1)
    for number, name in enumerate(nodes):
        for node in (str(number), name):
            code, out, errors = sessions.exec("hostname", options=("--node", node))
            assert (code, out.decode()) == (0, f"{name}\n"), errors
    sessions.streams_output_and_passes_ctrl_c_on()
    sessions.ends_the_command_of_a_user_who_is_gone()
    sessions.opens_a_shell_with_a_terminal_of_the_same_size()
    with sessions.start("exec", "--node", "1", "--", sys.executable, "-c", ECHO_SERVER) as server:
        wait_until(lambda: server.out, "the server listens")
        sessions.forwards_a_port(int(server.out), reserved_port(), "--node", "1")
    refused = site.scaletrain("exec", run_id, "--node", "n9", "--", "true", check=False)
    assert (refused.returncode, "has no node n9" in refused.stderr) == (2, True)
    wait_until(lambda: len(found := steps(site)) == 2 and any(step.endswith(".batch") for step in found), "no step")
    site.cluster.control("controller-down")
    with commands_that_give_up_soon(site):
        refused = site.scaletrain("exec", run_id, "--", "true", check=False)
    assert refused.returncode in (2, 4), refused.stderr


def steps(site: Site) -> list[str]:
    return site.cluster.run("squeue", "--steps", "--noheader", "--format=%i").stdout.split()


def test_a_run_whose_ranks_die_restarts_on_the_nodes_that_its_job_keeps(site: Site) -> None:
    """No requeue, for which a job waits two minutes on most sites; the real one of a crash is in the next test."""
    fake = {
        "steps": 60,
        "checkpoint_every": 5,
        "die": {"1:1": -9, "2:0": 1},
        "die_at": 27,
        "stay": {"1:0": 20, "3:*": 40},
    }
    run_id = site.submit(fake, "cluster.slurm.partition=main")
    third = site.trains(run_id, attempt=3)
    assert site.cluster.job(third["job_id"])["Restarts"] == "0"
    assert len({tuple(attempt["nodes"]) for attempt in site.attempts(run_id)}) == 1
    site.go(run_id)
    done = site.wait(run_id, lambda now: now["state"] == "finished", "the third attempt finishes")
    assert (done["attempt"], site.ends(run_id)) == (3, [(1, "killed"), (1, "crash"), (0, "done")])
    site.nothing_is_lost(run_id)


def test_a_rank_killed_without_a_controller_ends_the_other_node_and_is_requeued(site: Site) -> None:
    fake = {"steps": 60, "checkpoint_every": 5, "stay": {"1:*": 20}, "die": {"1:1": -9}, "die_at": 40}
    run_id = site.submit(fake, "cluster.slurm.partition=main")
    site.trains(run_id)
    site.controller_down(run_id)
    site.go(run_id)
    wait_until(lambda: site.ends(run_id), "the attempt has ended")
    site.cluster.control("controller-up")
    done = site.wait(run_id, lambda now: now["state"] == "finished", "the second attempt finishes")
    assert site.ends(run_id) == [(1, "killed"), (0, "done")]
    assert done["attempt"] == 2
    site.nothing_is_lost(run_id)


def test_a_submission_while_the_controller_is_down_is_refused_and_leaves_nothing(site: Site) -> None:
    site.cluster.control("controller-down")
    with commands_that_give_up_soon(site):
        refused = site.try_to_submit(FOREVER, run_id="refused")
    site.cluster.control("controller-up")
    assert refused.returncode == 4, refused.stderr
    assert "slurm" in refused.stderr.lower()
    assert not list(site.runs.glob("*/run.json"))
    assert not site.processes("refused")
    # By name: a controller that was killed may list jobs again that had ended just before.
    assert "refused" not in site.cluster.run("squeue", "-h", "--me", "-o", "%j").stdout


def test_a_run_that_is_cancelled_during_a_save_commits_the_checkpoint_and_leaves_nothing(site: Site) -> None:
    run_id = site.submit({**FOREVER, "save_seconds": 2})
    site.trains(run_id)
    site.scaletrain("cancel", run_id, "--yes")
    site.cancel(run_id)  # again, during the save
    assert site.ends(run_id) == [(75, "cancelled")], site.attempts(run_id)


def test_a_run_preempted_by_another_partition_continues_on_other_nodes_without_losing_a_step(site: Site) -> None:
    run_id = site.submit(FOREVER, "cluster.slurm.partition=spot")
    before = site.trains(run_id)
    held = ("-N", "2", "-w", ",".join(before["nodes"]), "--exclusive", "-o/dev/null")
    urgent = site.cluster.submit("sleep 300", "-p", "high", *held)
    after = site.trains(run_id, attempt=2)
    assert not set(after["nodes"]) & set(before["nodes"])
    assert after["job_id"] == before["job_id"]
    assert site.cluster.job(after["job_id"])["Restarts"] == "1"
    site.cluster.run("scancel", urgent)
    site.cancel(run_id)
    assert site.ends(run_id) == [(75, "preempted"), (75, "cancelled")]


def test_a_run_whose_node_is_lost_continues_on_other_nodes_without_it(site: Site) -> None:
    """As soon as Slurm knows of it; test_lost_nodes.py waits until it does."""
    run_id = site.submit(FOREVER)
    before = site.trains(run_id)
    lost = before["nodes"][-1]
    site.cluster.lose_node(lost)
    again = site.trains(run_id, attempt=2)
    assert (lost in again["nodes"], again["job_id"]) == (False, before["job_id"])
    assert site.ends(run_id)[0] == (1, "node")
    assert [node["node"] for node in site.scaletrain("nodes", "list", "--json")["nodes"]] == [lost]
    site.cancel(run_id)


def test_a_run_at_its_time_limit_saves_in_time_and_continues_in_the_same_job(site: Site) -> None:
    run_id = site.submit(FOREVER, "cluster.slurm.time=30m")
    before = site.trains(run_id)
    site.cluster.end_soon(before["job_id"])
    site.cluster.wait_for(before["job_id"], lambda job: job["Restarts"] == "1")
    site.cluster.run("scontrol", "update", f"jobid={before['job_id']}", "TimeLimit=30")  # the short limit would stay
    site.trains(run_id, attempt=2)
    site.cancel(run_id)
    assert site.ends(run_id) == [(75, "time-limit"), (75, "cancelled")]


@pytest.mark.long
def test_a_run_whose_reservation_ends_saves_in_time_and_continues_in_the_next_one(site: Site) -> None:
    reserved = ("reservationname=week", "starttime=now", "duration=60", "nodes=ALL", "users=root")
    site.cluster.run("scontrol", "create", "reservation", *reserved)
    run_id = site.submit(FOREVER, "cluster.slurm.reservation=week", "cluster.slurm.time=UNLIMITED")
    before = site.trains(run_id)
    site.cluster.run("scontrol", "update", "reservationname=week", "duration=4")
    site.wait(run_id, lambda now: "Reservation" in now["job"]["detail"], "it waits for the reservation")
    assert (site.ends(run_id), site.cluster.job(before["job_id"])["Restarts"]) == ([(75, "time-limit")], "1")
    assert site.scaletrain("explain", run_id, "--json")["findings"][0]["code"] == "slurm.wait-reservation"
    site.cluster.run("scontrol", "update", "reservationname=week", "duration=60")
    site.trains(run_id, attempt=2)
    site.cancel(run_id)
    delete = ("scontrol", "delete", "reservationname=week")  # refused while its job ends
    wait_until(lambda: site.cluster.run(*delete, check=False).returncode == 0, "other tests get the nodes")


def test_the_gang_never_starts_without_its_data_and_resume_prepares_them_again(site: Site, tmp_path: Path) -> None:
    path = corpus(tmp_path, 500)
    whole = path.read_text(encoding="utf-8")
    path.write_text(f"{whole}not JSON\n", encoding="utf-8")
    run_id = site.submit(DONE, *settings(path), options=("--prepare", "job"))
    failed = site.wait(run_id, lambda now: now["state"] not in ("queued", "unknown"), "the gang is deleted")
    assert (failed["state"], failed["attempt"]) == ("failed", 0)
    finding = site.scaletrain("explain", run_id, "--json")["findings"][0]
    assert f"{path}:501" in finding["headline"]
    assert any("scaletrain resume" in action for action in finding["actions"])
    recorded = site.runs / run_id / "preparation" / "failure.json"
    recorded.rename(recorded.with_name("aside"))  # as of a task that was killed
    assert site.status(run_id)["code"] == "preparation.job-failed"
    path.write_text(whole, encoding="utf-8")
    site.scaletrain("resume", run_id, "--yes", "--prepare", "job")
    done = site.wait(run_id, lambda now: now["state"] in ("finished", "failed"), "it trains")
    assert (done["state"], done["attempt"]) == ("finished", 1)
