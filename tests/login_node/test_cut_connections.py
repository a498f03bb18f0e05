"""The connection to a login node with a real Slurm is cut at random moments of submit, cancel and resume.

A moment is a number of bytes that have passed in both directions, so that any part of a request or an answer may be
missing, or a number of changes that the verb has made there: files, folders and processes.
"""

import json
import os
import random
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from scaletrain_cli.errors import ExitCode
from scaletrain_cli.launch.login_node.sent_runs import sent_runs
from tests.launch.working_tree import WorkingTree
from tests.login_node.conftest import Site
from tests.login_node.server import PROJECT
from tests.slurm_cluster.cluster import DevCluster
from tests.slurm_cluster.conftest import of_all_tests, slurm
from tests.slurm_cluster.site import FOREVER
from tests.slurm_cluster.site import Site as OnSlurm
from tests.waiting import wait_until

__all__ = ["of_all_tests", "slurm"]
pytestmark = [pytest.mark.slurm, pytest.mark.long]
ROUNDS = 10  # of three verbs each


@dataclass
class Line:
    """A line between the laptop and the login node, which is cut after ``left`` bytes."""

    port: int
    listener: socket.socket = field(default_factory=lambda: socket.create_server(("127.0.0.1", 0)))
    left: int | None = None
    passed: int = 0
    is_cut: bool = False
    ends: list[socket.socket] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def serve(self) -> None:
        with suppress(OSError):  # it is shut down
            while True:
                here = self.listener.accept()[0]
                there = socket.create_connection(("127.0.0.1", self.port))
                self.ends += [here, there]
                for source, target in ((here, there), (there, here)):
                    threading.Thread(target=self._pass_on, args=(source, target), daemon=True).start()

    def cut(self) -> None:
        self.is_cut = True
        for end in self.ends:
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        self.ends.clear()

    def _pass_on(self, source: socket.socket, target: socket.socket) -> None:
        with source, suppress(OSError):
            while data := source.recv(1 << 16):
                with self.lock:
                    data = data if self.left is None else data[: self.left]
                    self.passed += len(data)
                    if self.left is not None:
                        self.left -= len(data)
                    target.sendall(data)
                    if self.left == 0:
                        self.left = None
                        self.cut()
                        return
            target.shutdown(socket.SHUT_WR)


@dataclass(frozen=True)
class Away:
    """The laptop, the line and the cluster behind it."""

    site: Site
    line: Line
    slurm: OnSlurm
    requests: socket.socket  # of tests/login_node/cut_there.py

    def verb(self, *words: str) -> subprocess.CompletedProcess[str]:
        return self.site.scaletrain(*words)

    def plan(self, at: int, hangs_up: bool = False) -> None:
        """Let the next verb ask for a cut at its change ``at``, the first one is 1."""
        document = [at, self.requests.getsockname(), hangs_up]
        (self.site.home / "cut.json").write_text(json.dumps(document))

    def hang_up(self) -> None:
        """Let the next verb make a connection of its own."""
        folder = Path(os.environ["XDG_RUNTIME_DIR"], "scaletrain-ssh")
        subprocess.run(["ssh", "-O", "exit", "-o", f"ControlPath={folder}/%C", "login.site"], capture_output=True)

    def answer_requests(self) -> None:
        with suppress(OSError):
            while True:
                client = self.requests.accept()[0]
                self.line.cut()
                client.close()

    def jobs(self, run_id: str) -> list[str]:
        """Return the ids of all jobs of a run, those that have ended included."""
        listed = self.slurm.cluster.run("squeue", "-h", "-t", "all", "-o", "%A %j").stdout.splitlines()
        return [job for job, _, name in (line.partition(" ") for line in listed) if run_id in name]


@pytest.fixture
def away(site: Site, slurm: DevCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Away]:
    config = tmp_path / "ssh" / "config"
    port = int(config.read_text().split("Port ")[1].split()[0])
    line = Line(port)
    config.write_text(config.read_text().replace(f"Port {port}", f"Port {line.listener.getsockname()[1]}"))
    (site.home / "scaletrain").write_text(
        f"#!/bin/sh\nexport PYTHONPATH={PROJECT} SLURM_CONF={slurm.environment['SLURM_CONF']}\n"
        f'exec {sys.executable} -m tests.login_node.cut_there "$@"\n'
    )
    clusters = Path(os.environ["XDG_CONFIG_HOME"], "scaletrain", "clusters.yaml")
    clusters.write_text(clusters.read_text().replace("scheduler: local", "scheduler: slurm"))
    monkeypatch.setenv("API_KEY", "secret")
    fake = json.dumps(json.dumps(FOREVER))
    (site.here / "run.yaml").write_text(
        (PROJECT / "tests/cli/small.yaml").read_text().replace("gpus_per_node: 2", "gpus_per_node: 1")
        + f"env: {{SCALETRAIN_ENGINE: tests.launch.fake_engine, FAKE: {fake}}}\n"
        + "secret_env: [API_KEY]\ncode: {path: code}\n"
    )
    (site.here / "code").mkdir()
    tree = WorkingTree(site.here / "code")
    for number in range(20):
        tree.write(f"file{number}.py", f"print({number})\n" * 500)
    tree.commit()
    requests = socket.socket(socket.AF_UNIX)
    requests.bind(str(Path(os.environ["XDG_RUNTIME_DIR"], "requests")))
    requests.listen()
    made = Away(site, line, OnSlurm(slurm, site.runs), requests)
    threads = [threading.Thread(target=serve) for serve in (line.serve, made.answer_requests)]
    for thread in threads:
        thread.start()
    yield made
    line.cut()
    for listener in (line.listener, requests):
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
    for thread in threads:
        thread.join()


def words_of(verb: str, run_id: str) -> list[str]:
    if verb == "submit":
        return ["submit", "run.yaml", "--cluster", "site", "--run-id", run_id, "--yes"]
    return [verb, run_id, "--yes"]


def check(away: Away, verb: str, run_id: str, jobs: int) -> None:
    """Check that one run and one job are there after the verb, which was repeated, and nothing of it was lost."""
    assert [run.run_id for run in sent_runs()].count(run_id) == 1
    assert [path.name for path in away.site.runs.iterdir() if path.name == run_id] == [run_id]
    assert verb == "cancel" or (away.site.runs / run_id / "secrets.json").exists()
    listed = away.jobs(run_id)
    assert len(listed) == jobs, (verb, listed)
    assert json.loads((away.site.runs / run_id / "submission.json").read_text())["job_id"] == max(listed)


def test_a_cut_connection_doubles_no_job_and_loses_no_run(away: Away) -> None:
    draw, sizes, cuts = random.Random(48), dict[str, tuple[int, int]](), []
    for number in range(ROUNDS + 1):
        run_id, jobs = f"cut-{number:02d}", 0
        for verb in ("submit", "cancel", "resume"):
            jobs += verb != "cancel"
            words = words_of(verb, run_id)
            away.hang_up()
            away.line.passed, away.line.is_cut = 0, False
            if number == 0:  # as it is without a cut
                away.plan(0)
                done = away.verb(*words)
                assert done.returncode == ExitCode.DONE, done.stderr
                sizes[verb] = away.line.passed, int((away.site.home / "changes").read_text())
            else:
                all_bytes, all_changes = sizes[verb]
                moment = draw.choice(["bytes", "change", "change, hung up"])
                at = draw.randint(1, all_bytes if moment == "bytes" else all_changes)
                if moment == "bytes":
                    away.line.left = at
                else:
                    away.plan(at, hangs_up=moment != "change")
                cut = away.verb(*words)
                away.line.left = None
                (away.site.home / "cut.json").unlink(missing_ok=True)
                cuts.append((number, verb, moment, at, away.line.is_cut, cut.returncode))
                assert cut.returncode in (ExitCode.DONE, ExitCode.SCHEDULER), (cuts[-1], cut.stderr)
                again = away.verb(*words)
                is_refused = verb == "resume" and again.returncode == ExitCode.USAGE and "active" in again.stderr
                assert again.returncode == ExitCode.DONE or is_refused, (cuts[-1], again.stderr, cut.stderr)
            if verb == "cancel":
                away.slurm.wait(run_id, lambda now: now["state"] == "cancelled", "it is cancelled")
                away.slurm.nothing_is_lost(run_id)
            else:
                away.slurm.trains(run_id, attempt=jobs)
            check(away, verb, run_id, jobs)
        away.verb("cancel", run_id, "--yes")
        away.slurm.wait(run_id, lambda now: now["state"] == "cancelled", "it is cancelled")
    wait_until(lambda: not away.slurm.processes("cut-"), "no process is left")
    print(*cuts, sep="\n")
    assert len(cuts) == 3 * ROUNDS
    assert sum(is_cut for *_, is_cut, _ in cuts) > 2 * ROUNDS


VERBS = (
    *("status", "status --json", "watch --once", "logs --tail 5", "events", "explain", "diagnose", "checkpoint list"),
    *("checkpoint verify", "evaluation list", "notify list", "report -o page.html", "profile --show", "data stats"),
)
# With what the stand-in engine lacks: nothing to show, which is not an error of the connection.
LACKING = ("profile --show", "data stats")


def test_verbs_of_a_run_on_slurm_work_from_the_laptop(away: Away) -> None:
    assert away.verb(*words_of("submit", "shown")).returncode == ExitCode.DONE
    away.slurm.trains("shown")
    failed = {}
    for line in VERBS:
        verb, option, rest = line.partition(" -")
        done = away.verb(*verb.split(), "shown", *f"{option}{rest}".split())
        if done.returncode != (ExitCode.USAGE if line in LACKING else ExitCode.DONE):
            failed[line] = done.stderr
    assert failed == {}
    assert (away.site.here / "page.html").read_text().startswith("<!DOCTYPE html>")
    assert "shown" in away.verb("list", "--cluster", "site").stdout
    assert "main" in away.verb("status", "site", "--cluster").stdout, "a partition of Slurm"
    assert away.verb("exec", "shown", "--", "sh", "-c", "echo $SLURM_JOB_ID").stdout.strip().isdigit()
    assert away.verb("cancel", "shown", "--yes").returncode == ExitCode.DONE
    away.slurm.wait("shown", lambda now: now["state"] == "cancelled", "it is cancelled")
    assert away.verb("rm", "shown", "--yes").returncode == ExitCode.DONE
    assert sent_runs() == []
