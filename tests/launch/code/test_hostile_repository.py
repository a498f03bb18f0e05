"""A snapshot of another user's repository starts no program that it configures, and keeps files unchanged."""

import hashlib
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from scaletrain_cli.errors import UsageError
from scaletrain_cli.launch.code import WorkingTree as ReadTree
from tests.launch.code.test_snapshot import files_in, snapshot
from tests.launch.working_tree import WorkingTree

HOOKS = "applypatch-msg post-checkout post-index-change pre-commit prepare-commit-msg reference-transaction".split()


@pytest.fixture
def tree(tmp_path: Path) -> WorkingTree:
    folder = tmp_path / "repository"
    folder.mkdir()
    return WorkingTree(folder)


@pytest.fixture
def program(tmp_path: Path) -> Callable[..., str]:
    """Return a program that creates a file with its name in the folder ``ran`` and copies its input to its output."""
    (tmp_path / "ran").mkdir()

    def make(name: str, then: str = "cat") -> str:
        path = tmp_path / "programs" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"#!/bin/sh\n: >'{tmp_path}/ran/{name}'\n{then} 2>/dev/null\nexit 0\n")
        path.chmod(0o755)
        return str(path)

    return make


def plain_git(tree: WorkingTree, *arguments: str) -> None:
    """Run git as a user does: it starts the programs that a snapshot must not start."""
    command = ["git", "-C", tree.folder, *arguments]
    subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, check=False)


def ran(tmp_path: Path) -> list[str]:
    return sorted(path.name for path in (tmp_path / "ran").iterdir())


def test_no_program_that_a_repository_configures_is_started(
    tree: WorkingTree, program: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree.write(".gitattributes", "*.py filter=evil diff=evil\n*.sh filter=worse\n")
    tree.write("new.py", "print('committed')\n")
    tree.commit()
    hooks = tree.folder / ".git" / "hooks"
    hooks.mkdir(exist_ok=True)
    for name in HOOKS:
        shutil.copy(program(f"hook-{name}"), hooks / name)
    settings = {
        "core.fsmonitor": program("fsmonitor"),
        "core.pager": program("pager"),
        "pager.diff": program("pager-diff"),
        "core.askPass": program("askpass"),
        "core.sshCommand": program("ssh"),
        "core.gitProxy": program("proxy"),
        "credential.helper": program("credential"),
        "diff.external": program("diff-external"),
        "diff.evil.command": program("diff-command"),
        "diff.evil.textconv": program("textconv"),
        "filter.evil.clean": program("clean"),
        "filter.evil.smudge": program("smudge"),
        "filter.evil.required": "true",
        "filter.worse.process": program("process"),
        "alias.diff": f"!{program('alias')}",
        "alias.rev-parse": f"!{program('alias-rev-parse')}",
        "extensions.worktreeConfig": "true",
        "gpg.program": program("gpg"),
        "log.showSignature": "true",
    }
    for name, value in settings.items():
        tree.git("config", name, value)
    (tree.folder / ".git" / "config.worktree").write_text(f"[core]\n\tfsmonitor = {program('worktree-fsmonitor')}\n")
    included = tmp_path / "included"
    included.write_text(f'[filter "included"]\n\tclean = {program("included-clean")}\n')
    tree.git("config", "include.path", str(included))
    # Of who runs the command, from a hook or a session that somebody prepared.
    monkeypatch.setenv("GIT_EXTERNAL_DIFF", program("variable-diff"))
    monkeypatch.setenv("GIT_PAGER", program("variable-pager"))
    monkeypatch.setenv("GIT_SSH_COMMAND", program("variable-ssh"))
    monkeypatch.setenv("GIT_CONFIG_COUNT", "1")
    monkeypatch.setenv("GIT_CONFIG_KEY_0", "core.fsmonitor")
    monkeypatch.setenv("GIT_CONFIG_VALUE_0", program("variable-fsmonitor"))
    monkeypatch.setenv("GIT_EXEC_PATH", str(tmp_path / "programs"))
    for name in ("train.py", "run.sh", "src/added.py"):
        tree.write(name, "print('changed')\n")
    Path(tree.folder, ".git", "info").mkdir(exist_ok=True)
    Path(tree.folder, ".git", "info", "attributes").write_text("*.bin filter=included\n")
    tree.write("weights.bin", "1")

    taken = snapshot(tree)

    assert ran(tmp_path) == []
    kept = files_in(taken.archive)
    assert {name: kept[name] for name in ("train.py", "run.sh", "src/added.py", "weights.bin")} == {
        "train.py": "print('changed')\n",
        "run.sh": "print('changed')\n",
        "src/added.py": "print('changed')\n",
        "weights.bin": "1",
    }
    assert taken.record.uncommitted == 4
    monkeypatch.delenv("GIT_EXEC_PATH")
    plain_git(tree, "diff", "HEAD")
    assert len(ran(tmp_path)) >= 3, "the traps must work, or this test shows nothing"


def test_missing_objects_of_a_partial_clone_are_not_fetched_by_a_program_of_the_repository(
    tree: WorkingTree, program: Callable[..., str], tmp_path: Path
) -> None:
    blob = tree.git("rev-parse", "HEAD:train.py").strip()
    (tree.folder / ".git" / "objects" / blob[:2] / blob[2:]).unlink()
    for name, value in {
        "core.repositoryFormatVersion": "1",
        "extensions.partialClone": "origin",
        "remote.origin.promisor": "true",
        "remote.origin.url": f"ext::{program('transport', 'true')}",
        "remote.origin.uploadpack": program("uploadpack", "true"),
        "protocol.ext.allow": "always",
    }.items():
        tree.git("config", name, value)
    tree.write("train.py", "print('changed')\n")
    with pytest.raises(UsageError):
        snapshot(tree)
    assert ran(tmp_path) == []
    plain_git(tree, "diff", "HEAD")
    assert ran(tmp_path) != [], "the trap must work, or this test shows nothing"


def test_programs_of_a_submodule_do_not_start(tree: WorkingTree, program: Callable[..., str], tmp_path: Path) -> None:
    inner = tree.folder / "inner"
    inner.mkdir()
    submodule = WorkingTree(inner)
    tree.git("-c", "advice.addEmbeddedRepo=false", "add", "inner")
    tree.commit()
    submodule.write(".gitattributes", "*.py filter=evil\n")
    submodule.git("config", "filter.evil.clean", program("clean"))
    submodule.git("config", "core.fsmonitor", program("fsmonitor"))
    tree.git("config", "submodule.inner.ignore", "none")
    tree.git("config", "diff.submodule", "diff")
    submodule.write("train.py", "print('changed')\n")
    ReadTree(tree.folder, "run.yaml").changed()
    assert ran(tmp_path) == []
    plain_git(tree, "status")
    assert ran(tmp_path) != [], "the trap must work, or this test shows nothing"


def test_a_filter_whose_name_cannot_be_disabled_by_an_option_is_rejected(tree: WorkingTree) -> None:
    tree.git("config", "filter.a=b.clean", "false")
    with pytest.raises(UsageError, match="cannot be switched off"):
        snapshot(tree)


def test_files_of_git_lfs_are_kept_by_content(tree: WorkingTree, program: Callable[..., str], tmp_path: Path) -> None:
    weights = "w" * 5000
    digest = hashlib.sha256(weights.encode()).hexdigest()
    pointer = f"version https://git-lfs.github.com/spec/v1\noid sha256:{digest}\nsize {len(weights)}\n"
    tree.write(".gitattributes", "*.bin filter=lfs diff=lfs -text\n")
    tree.write("a.bin", pointer)
    tree.write("b.bin", pointer)
    tree.commit()
    tree.git("config", "filter.lfs.process", program("lfs"))
    tree.git("config", "filter.lfs.required", "true")
    tree.write("a.bin", weights)  # as git-lfs leaves it in the folder
    tree.write("b.bin", weights[:-1] + "x")
    os.utime(tree.folder / "a.bin", (1, 1))
    taken = snapshot(tree)
    assert files_in(taken.archive)["a.bin"] == weights
    assert taken.record.uncommitted == 1
    assert b"b.bin" in taken.patch
    assert b"a.bin" not in taken.patch
    assert ran(tmp_path) == []


def test_a_repository_of_others_is_refused(tree: WorkingTree, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can give a folder to somebody else")
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(tmp_path / "none"))
    for path in (tree.folder, *tree.folder.rglob("*")):
        os.chown(path, 12345, 12345, follow_symlinks=False)
    monkeypatch.setenv("GIT_TEST_ASSUME_DIFFERENT_OWNER", "0")
    with pytest.raises(UsageError, match=r"safe\.directory"):
        snapshot(tree)
