"""Two real users of one runs root: every verb on their own runs and on those of the other user.

Each command runs in a process that was forked from this one and has given up root for good, so nothing is faked but the
program that a local job would start. The interpreter of these tests may be closed to other users: what the verbs import
is imported before.
"""

import encodings.ascii  # noqa: F401 (what the standard library imports late)
import grp  # noqa: F401
import importlib
import json
import os
import pwd  # noqa: F401
import re
import shutil
import stat
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from scaletrain_cli.launch.backends.base import PreflightResult, Start
from scaletrain_cli.launch.backends.local.backend import LocalBackend
from scaletrain_cli.reasons import Reason
from scaletrain_cli.rundir.bad_nodes import BadNode, read_bad_nodes, remember_bad_nodes
from scaletrain_cli.rundir.journal import append_line, record_event
from scaletrain_cli.rundir.paths import RunDir
from scaletrain_cli.worker.checkpoint_commit import HashingWriter, commit_checkpoint, open_attempt, stage_checkpoint
from tests.cli.command_line import PROJECT, SMALL, scaletrain
from tests.cli.every_command import start_nothing
from tests.launch.working_tree import WorkingTree

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become two other users")

TEAM = 61_000
UMASKS = (0o002, 0o022, 0o077)
LONG = pytest.mark.long


READING = (("status",), ("explain",), ("logs",), ("checkpoint", "list"), ("checkpoint", "verify"))
CHANGING = (
    ("resume", "--yes"),
    ("resume", "--yes", "--from-scratch"),
    ("cancel", "--yes"),
    ("checkpoint", "prune", "--keep", "1", "--yes"),
    ("checkpoint", "export", "-o", "exported"),
    ("checkpoint", "average", "-o", "exported"),
)


@dataclass(frozen=True)
class User:
    """One of the two, with a umask."""

    uid: int
    umask: int = 0o022

    def does(self, function: Callable[[], Any]) -> Any:
        """Call in a process of this user; what the function returns must be JSON. An error is raised here."""
        reader, writer = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                os.setgroups([TEAM])
                os.setresgid(TEAM, TEAM, TEAM)
                os.setresuid(self.uid, self.uid, self.uid)
                os.umask(self.umask)
                answer = [True, function()]
            except BaseException:
                answer = [False, traceback.format_exc()]
            os.write(writer, json.dumps(answer).encode())
            os._exit(0)
        os.close(writer)
        with os.fdopen(reader, "rb") as pipe:
            done, answer = json.loads(pipe.read())
        os.waitpid(pid, 0)
        assert done, answer
        return answer

    def calls(self, *arguments: object) -> tuple[int, str]:
        """One command line: its exit code, and what it printed."""

        def command() -> tuple[int, str]:
            ended = scaletrain(*arguments)
            return ended.code, ended.out + ended.err

        code, text = self.does(command)
        assert "Traceback" not in text, text
        return code, text


ALICE, BOB = User(61_001), User(61_002)


@pytest.fixture(scope="module", autouse=True)
def _preloaded() -> None:
    """Import what the verbs import inside their functions, standard library included."""
    for path in (PROJECT / "scaletrain_cli").rglob("*.py"):
        parts = path.relative_to(PROJECT).with_suffix("").parts
        if parts[1] == "engine" or parts[-1] in ("__main__", "__init__"):
            continue
        importlib.import_module(".".join(parts))
        for name in re.findall(r"^ +(?:import|from) ([\w.]+)", path.read_text(encoding="utf-8"), re.MULTILINE):
            if name.partition(".")[0] in sys.stdlib_module_names:
                importlib.import_module(name)
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as folder:
        start_nothing(patch)
        with_a_backend_that_starts_nothing(patch)
        patch.setattr("scaletrain_cli.launch.preparation.reads_prepared_data", lambda *_: False)
        patch.setenv("SCALETRAIN_RUNS", folder)
        patch.chdir(folder)
        scaletrain("submit", SMALL, "--run-id", "r", "--yes")  # imports what libraries import late
        with_a_checkpoint(RunDir(Path(folder) / "r"))
        for verb in (*READING, *CHANGING[:-1], ("list",), ("nodes", "list")):
            scaletrain(*verb[:2], "r", *verb[2:])


def with_a_backend_that_starts_nothing(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(LocalBackend, "submit", lambda self, run, record: "1")
    start = Start(time.time(), Reason("local.no-queue"))
    patch.setattr(LocalBackend, "preflight", lambda *_: PreflightResult(start))


@pytest.fixture
def root(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A runs root as a team has it: setgid, writable by the group, sticky."""
    # Not below pytest's own folder, which is closed to everybody else.
    folder = Path(tempfile.mkdtemp(dir="/tmp", prefix="two-users-"))
    folder.chmod(0o755)
    root = folder / "runs"
    root.mkdir()
    os.chown(root, 0, TEAM)
    root.chmod(0o3775)
    monkeypatch.setenv("SCALETRAIN_RUNS", str(root))
    monkeypatch.setenv("HOME", str(folder))
    for name in ("XDG_CONFIG_HOME", "KUBECONFIG", "NETRC"):
        monkeypatch.setenv(name, str(folder / "none"))
    monkeypatch.setenv("TMPDIR", "/tmp")
    monkeypatch.chdir(folder)
    with_a_backend_that_starts_nothing(monkeypatch)
    monkeypatch.setattr(tempfile, "tempdir", None)
    yield root
    shutil.rmtree(folder)


def submit(user: User, run_id: str, *more: str) -> tuple[int, str]:
    return user.calls("submit", SMALL, "--run-id", run_id, "--yes", *more)


def with_a_checkpoint(run: RunDir) -> None:
    """The run is as an attempt leaves it that was preempted at step 2."""
    number = run.new_attempt()
    open_attempt(run.checkpoints, number)
    for step in (1, 2):
        writer = HashingWriter(stage_checkpoint(run.checkpoints, number, step) / "rank-00000.safetensors")
        writer.write(b"weights")
        commit_checkpoint(
            run.checkpoints, step, {"rank-00000.safetensors": writer.close()}, world_size=1, clean=True, attempt=number
        )
        append_line(run.metrics, {"step": step, "loss": 1.0, "time": time.time()})
    record_event(run, "checkpoint", step=2)


def files_below(folder: Path) -> dict[str, tuple[int, int, int, bytes]]:
    """Mode, owner, time and content of all that is there."""
    found = {}
    for path in [folder, *folder.rglob("*")]:
        about = path.lstat()
        content = path.read_bytes() if stat.S_ISREG(about.st_mode) else b""
        found[str(path)] = (about.st_mode, about.st_uid, about.st_mtime_ns, content)
    return found


@pytest.mark.parametrize("umask", [UMASKS[0], pytest.param(UMASKS[1], marks=LONG), UMASKS[2]], ids=oct)
def test_every_verb_on_an_own_run_and_on_a_run_of_another_user(root: Path, umask: int) -> None:
    alice, bob = User(ALICE.uid, umask), User(BOB.uid, umask)
    for user, run_id in ((alice, "run-of-alice"), (bob, "run-of-bob")):
        code, text = submit(user, run_id)
        assert code == 0, text
        run = RunDir(root / run_id)
        user.does(lambda run=run: with_a_checkpoint(run))
        assert run.path.stat().st_uid == user.uid
        assert run.path.stat().st_gid == TEAM
        assert not run.path.stat().st_mode & 0o027
        assert not run.record.stat().st_mode & 0o037
    before = files_below(root / "run-of-alice")
    closed = umask & 0o040

    for verb in READING:
        code, text = bob.calls(*verb[:2], "run-of-alice", *verb[2:])
        assert code == (2 if closed else 0), (verb, text)
        assert not closed or "cannot be read" in text, (verb, text)
        code, text = bob.calls(*verb[:2], "run-of-bob", *verb[2:])
        assert code == 0, (verb, text)
    code, text = bob.calls("list")
    assert code == 0
    assert "run-of-bob" in text
    assert closed or "run-of-alice" in text

    for verb in CHANGING:
        name = 2 if verb[0] == "checkpoint" else 1
        for more in ((), ("--trust-owner",)):
            if verb[-1] == "exported" and more:
                continue  # it only reads, and starts a process for that, which this user may not be able to
            code, text = bob.calls(*verb[:name], "run-of-alice", *verb[name:], *more)
            assert code == 2, (verb, more, text)
            expected = "cannot be read" if closed else "belongs to" if not more else "cannot be written to by uid 61002"
            assert expected in text, (verb, more, text)
    code, text = submit(bob, "run-of-alice")
    assert code == 2
    assert "belongs to uid 61001" in text
    assert files_below(root / "run-of-alice") == before

    for verb in CHANGING[2:4]:
        name = 2 if verb[0] == "checkpoint" else 1
        code, text = bob.calls(*verb[:name], "run-of-bob", *verb[name:])
        assert code == 0, (verb, text)
    code, text = bob.calls("resume", "run-of-bob", "--yes")
    assert code == 0, text


def test_nodes_excluded_by_one_user_can_be_cleared_by_another(root: Path) -> None:
    now = time.time()

    def remember(name: str) -> None:
        remember_bad_nodes(root, [BadNode(name, "hardware", "ECC", "r", 1, now, now + 3600)], now)

    for umask in UMASKS:
        User(ALICE.uid, umask).does(lambda: remember("n1"))
        User(BOB.uid, umask).does(lambda: remember("n2"))
        assert {node.node for node in read_bad_nodes(root, now)} == {"n1", "n2"}
        code, text = BOB.calls("nodes", "list")
        assert (code, "n1" in text) == (0, True)
        code, text = BOB.calls("nodes", "clear", "n1")
        assert code == 0, text
        assert [node.node for node in read_bad_nodes(root, now)] == ["n2"]


def test_a_checkpoint_folder_of_another_user_is_rejected(root: Path) -> None:
    place = root.parent / "checkpoints"
    place.mkdir()
    place.chmod(0o1777)
    BOB.does(lambda: (place / "run-of-alice").mkdir())
    options = ("--set", f"checkpoint.dir={place}")
    code, text = submit(ALICE, "run-of-alice", *options)
    assert code == 2, text
    assert f"the checkpoint folder {place / 'run-of-alice'} belongs to uid 61002" in text.replace("\n", " ")
    assert submit(ALICE, "another", *options)[0] == 0


@pytest.mark.parametrize("kind", ["folder", "closed", "fifo"])
def test_an_invalid_bad_nodes_file_does_not_prevent_a_submission(root: Path, kind: str) -> None:
    def plant() -> None:
        path = root / "bad-nodes.json"
        if kind == "folder":
            path.mkdir()
        elif kind == "fifo":
            os.mkfifo(path)
        else:
            path.write_text("{}")
            path.chmod(0o600)

    BOB.does(plant)
    assert ALICE.calls("nodes", "list")[0] == 0
    assert submit(ALICE, "run-of-alice")[0] == 0


def test_an_unwritable_runs_root_is_one_error_with_a_remedy(root: Path) -> None:
    assert submit(ALICE, "run-of-alice")[0] == 0
    root.chmod(0o2755)
    for verb in (
        ("submit", SMALL, "--yes"),
        ("submit", SMALL, "--dry-run"),
        ("train", SMALL),
        ("submit", SMALL, "--yes", "--sweep", "training.steps=20,30"),
        ("submit", SMALL, "--dry-run", "--sweep", "training.steps=20,30"),
    ):
        code, text = BOB.calls(*verb)
        assert code == 2, text
        assert f"{root} cannot be written to by uid 61002: it belongs to" in text.replace("\n", " ")
        assert f"chmod g+rwxs {root}" in text
        assert "SCALETRAIN_RUNS" in text
    code, text = BOB.calls("nodes", "clear")
    assert code in (0, 2)
    assert sorted(path.name for path in root.iterdir()) == ["run-of-alice"]


def test_foreign_files_in_the_runs_root_hide_no_runs_and_are_not_acted_on(root: Path) -> None:
    assert submit(ALICE, "run-of-alice")[0] == 0

    def plant() -> None:
        os.mkfifo(root / "bad-nodes.json")
        for name, content in (("p1", "{"), ("p2", "[]"), ("p3", '{"schema": "scaletrain.run/v1"}')):
            (root / name).mkdir()
            (root / name / "run.json").write_text(content)
        shutil.copytree(root / "run-of-alice", root / "p4", ignore=shutil.ignore_patterns("*.lock"))
        (root / "p4" / "submission.json").write_text('{"scheduler": 7}')
        shutil.copytree(root / "p4", root / "p5")
        (root / "p5" / "events.jsonl").unlink()
        os.mkfifo(root / "p5" / "events.jsonl")
        os.mkfifo(root / "p5" / "metrics.jsonl")
        (root / "p6").symlink_to(root / "run-of-alice")
        (root / "p7").mkdir(mode=0o700)

    BOB.does(plant)
    code, text = ALICE.calls("list")
    assert code == 0, text
    assert "run-of-alice" in text
    for planted in ("p1", "p2", "p3", "p4", "p5", "p7"):
        for verb in (("status",), ("explain",), ("logs",), ("resume", "--yes"), ("cancel", "--yes")):
            code, text = ALICE.calls(verb[0], planted, *verb[1:])
            assert code in (0, 2) or verb[0] == "status", (planted, verb, text)
            assert verb[0] not in ("resume", "cancel") or code == 2, (planted, verb, text)
    code, text = ALICE.calls("resume", "p6", "--yes")
    assert code == 2, text
    code, text = submit(ALICE, "p4")
    assert code == 2
    assert "belongs to uid 61002" in text


def test_another_user_reads_no_code_of_a_private_repository_and_no_secret_beside_it(root: Path) -> None:
    repository = root.parent / "code"
    repository.mkdir(mode=0o700)
    tree = WorkingTree(repository)
    tree.write(".env", "TEAM_NAME=blue-horse\n")
    for path in (repository, *repository.rglob("*")):
        os.chown(path, ALICE.uid, TEAM)
    code, text = submit(ALICE, "run-of-alice", "--set", f"code.path={repository}")
    assert code == 0, text
    assert "the snapshot is without .env" in " ".join(text.split())
    run = root / "run-of-alice"
    kept = sorted((run / "code").iterdir())
    assert [path.name.partition(".")[2] for path in kept] == ["sha256", "tar.gz"]
    assert BOB.does(lambda: [os.access(path, os.R_OK) for path in (run / "run.json", *kept)]) == [True, False, False]
