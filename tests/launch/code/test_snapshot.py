"""The snapshot of a working tree: the files that git tracks or would add, and a patch of uncommitted changes."""

import io
import os
import subprocess
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from scaletrain_cli.errors import UsageError
from scaletrain_cli.launch.code import Snapshot, take_snapshot
from scaletrain_cli.rundir.record import differences, hash_of
from tests.launch.conftest import make_spec
from tests.launch.working_tree import WorkingTree


def snapshot(tree: WorkingTree, *overrides: str) -> Snapshot:
    taken = take_snapshot(make_spec(f"code.path={tree.folder}", *overrides))
    assert taken is not None
    return taken


def files_in(archive: bytes) -> dict[str, str]:
    def read() -> Iterator[tuple[str, str]]:
        with tarfile.open(fileobj=io.BytesIO(archive)) as packed:
            for entry in packed:
                if (content := packed.extractfile(entry)) is not None:
                    yield entry.name, content.read().decode()

    return dict(read())


def test_a_spec_without_code_keeps_none() -> None:
    assert take_snapshot(make_spec()) is None


def test_the_snapshot_of_a_clean_tree_equals_git_archive(tree: WorkingTree) -> None:
    taken = snapshot(tree)
    archived = subprocess.run(["git", "-C", str(tree.folder), "archive", "HEAD"], check=True, capture_output=True)
    assert files_in(taken.archive) == files_in(archived.stdout)
    assert taken.record.commit == tree.git("rev-parse", "HEAD").strip()
    assert (taken.record.uncommitted, taken.record.files, taken.patch) == (0, 4, b"")
    assert taken.record.sha256 == hash_of(taken.listing)


def test_the_listing_has_the_format_of_sha256sum(tree: WorkingTree, tmp_path: Path) -> None:
    listing = tmp_path / "listing"
    listing.write_text(snapshot(tree).listing, encoding="utf-8")
    subprocess.run(["sha256sum", "--check", "--strict", "--quiet", listing], cwd=tree.folder, check=True)


def test_packing_the_same_files_gives_the_same_bytes(tree: WorkingTree, tmp_path: Path) -> None:
    first = snapshot(tree)
    os.utime(tree.folder / "train.py", (1, 1))
    copy = tmp_path / "copy"
    subprocess.run(["cp", "-r", tree.folder, copy], check=True)
    second = take_snapshot(make_spec(f"code.path={copy}"))
    assert second == first


def test_executable_files_stay_executable(tree: WorkingTree) -> None:
    with tarfile.open(fileobj=io.BytesIO(snapshot(tree).archive)) as packed:
        assert {entry.name: entry.mode for entry in packed}["run.sh"] == 0o755


def test_uncommitted_changes_are_included_and_reproduced_by_the_patch(tree: WorkingTree, tmp_path: Path) -> None:
    tree.write("train.py", "print('two')\n")
    tree.write("new file.py", "import this\n")
    (tree.folder / "run.sh").unlink()
    tree.git("config", "diff.noprefix", "true")
    tree.git("config", "color.ui", "always")
    taken = snapshot(tree)
    assert files_in(taken.archive).keys() == {"train.py", "new file.py", "src/my_model/__init__.py", ".gitignore"}
    assert files_in(taken.archive)["train.py"] == "print('two')\n"
    assert taken.record.uncommitted == 3
    elsewhere = tmp_path / "elsewhere"
    subprocess.run(["git", "clone", "--quiet", tree.folder, elsewhere], check=True)
    subprocess.run(["git", "-C", elsewhere, "apply"], input=taken.patch, check=True)
    assert differences(elsewhere, taken.listing) == []
    assert not (elsewhere / "run.sh").exists()


def test_a_change_of_the_same_length_at_the_time_of_the_commit_is_in_the_patch(tree: WorkingTree) -> None:
    """git compares the content of a file whose time is that of the index; no other time differs here."""
    index, time = tree.folder / ".git/index", (1_000_000_000, 1_000_000_000)
    tree.git("config", "core.trustctime", "false")
    tree.write("train.py", "print(1)\n")
    os.utime(tree.folder / "train.py", time)
    tree.commit()
    tree.write("train.py", "print(2)\n")
    for path in (tree.folder / "train.py", index):
        os.utime(path, time)
    assert b"+print(2)" in snapshot(tree).patch


def test_a_staged_change_counts_as_uncommitted(tree: WorkingTree) -> None:
    tree.write("train.py", "print('two')\n")
    tree.git("add", "train.py")
    assert snapshot(tree).record.uncommitted == 1
    assert b"+print('two')" in snapshot(tree).patch


def test_taking_a_snapshot_does_not_change_the_repository(tree: WorkingTree) -> None:
    def everything() -> dict[Path, bytes]:
        return {path: path.read_bytes() for path in tree.folder.rglob("*") if path.is_file()}

    tree.write("new.py", "")
    os.utime(tree.folder / "train.py", (1, 1))  # not the time in the index, so git reads the file
    before = everything()
    snapshot(tree)
    assert everything() == before


def test_an_uncommitted_tree_is_rejected_if_the_spec_requires_it(tree: WorkingTree) -> None:
    assert snapshot(tree, "code.uncommitted=refuse").record.uncommitted == 0
    tree.write("train.py", "print('two')\n")
    tree.write("new.py", "")
    with pytest.raises(UsageError, match=r"2 uncommitted files: new\.py, train\.py\. Commit or stash"):
        snapshot(tree, "code.uncommitted=refuse")


def test_the_ignore_file_excludes_tracked_files_and_their_changes(tree: WorkingTree) -> None:
    tree.write("notebooks/plot.ipynb", "{}")
    tree.write("notebooks/keep.py", "")
    tree.commit()
    tree.write("notebooks/plot.ipynb", "{...}")
    tree.write("scratch.txt", "new, and of no use to a run")
    tree.write(".scaletrainignore", "*.ipynb\n/scratch.txt\n")
    taken = snapshot(tree, "code.uncommitted=patch")
    assert files_in(taken.archive).keys() >= {"notebooks/keep.py", ".scaletrainignore"}
    assert not {"notebooks/plot.ipynb", "scratch.txt"} & files_in(taken.archive).keys()
    assert b"ipynb b/" not in taken.patch
    assert taken.record.uncommitted == 1  # the ignore file itself


def test_a_runs_root_within_the_tree_is_excluded(tree: WorkingTree, monkeypatch: pytest.MonkeyPatch) -> None:
    before = snapshot(tree)
    monkeypatch.setenv("SCALETRAIN_RUNS", str(tree.folder / "runs"))
    tree.write("runs/llama-1/checkpoints/step-00000010/rank-0.safetensors", "0" * 100)
    tree.write("runs.py", "import this\n")
    after = snapshot(tree)
    assert files_in(after.archive).keys() - files_in(before.archive).keys() == {"runs.py"}
    assert after.record.uncommitted == 1
    assert b"safetensors" not in after.patch


def test_only_the_selected_folder_of_a_repository_is_kept(tree: WorkingTree) -> None:
    tree.write("train.py", "print('two')\n")
    taken = take_snapshot(make_spec(f"code.path={tree.folder / 'src'}"))
    assert files_in(taken.archive).keys() == {"my_model/__init__.py"}
    assert taken.record.uncommitted == 0


def test_a_tree_above_the_size_limit_is_rejected_with_its_largest_files(tree: WorkingTree) -> None:
    tree.write("weights.bin", "0" * 3000)
    with pytest.raises(UsageError) as refused:
        snapshot(tree, "code.max_size=2000")
    assert "code.max_size: is 2,000 bytes, and 5 files" in str(refused.value)
    assert "weights.bin (3,000)" in str(refused.value)
    assert ".scaletrainignore" in str(refused.value)


@pytest.mark.parametrize(
    ("target", "why"),
    [("/etc/hostname", "a link to /etc/hostname"), ("nowhere", "a link to nowhere"), ("src", "a link to src")],
)
def test_a_link_out_of_the_tree_is_rejected(tree: WorkingTree, target: str, why: str) -> None:
    (tree.folder / "link").symlink_to(target)
    with pytest.raises(UsageError, match=why):
        snapshot(tree)
    tree.write(".scaletrainignore", "link\n")
    assert "link" not in files_in(snapshot(tree).archive)


def test_a_link_to_a_file_of_the_tree_becomes_that_file(tree: WorkingTree) -> None:
    (tree.folder / "same.py").symlink_to("train.py")
    assert files_in(snapshot(tree).archive)["same.py"] == "print('one')\n"


def test_a_nested_repository_is_rejected_by_name(tree: WorkingTree) -> None:
    inner = tree.folder / "vendored"
    inner.mkdir()
    WorkingTree(inner)
    tree.git("add", "vendored")
    tree.commit()
    with pytest.raises(UsageError, match=r"vendored \(a repository within this one"):
        snapshot(tree)


def test_a_folder_that_is_not_a_working_tree_is_one_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"not a git repository.*git init"):
        take_snapshot(make_spec(f"code.path={tmp_path}"))
    with pytest.raises(UsageError, match="is not a folder here"):
        take_snapshot(make_spec(f"code.path={tmp_path / 'gone'}"))


def test_a_repository_without_a_commit_is_one_error(tmp_path: Path) -> None:
    subprocess.run(["git", "-C", tmp_path, "init", "--quiet"], check=True)
    with pytest.raises(UsageError, match=r"git rev-parse failed.*git commit"):
        take_snapshot(make_spec(f"code.path={tmp_path}"))


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("code.on_nodes=/code", "Set code.path"),
        ("code.import_root=src", "Set code.path"),
        ("code.engine=my-package", "engine"),
        ("code.import_root=/src", "import_root"),
    ],
)
def test_a_code_setting_without_effect_is_rejected(override: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        make_spec(override)


def test_runs_of_another_runs_root_within_the_tree_are_excluded_with_their_secrets(tree: WorkingTree) -> None:
    tree.write("old/mine/run.json", '{\n "schema": "scaletrain.run/v1"}')
    tree.write("old/mine/secrets.json", '{"TOKEN": "hush"}')
    tree.write("data.d/run.json", '{"of": "the user"}')
    taken = snapshot(tree)
    assert files_in(taken.archive).keys() & {"old/mine/run.json", "old/mine/secrets.json", "data.d/run.json"} == {
        "data.d/run.json"
    }
    assert b"hush" not in taken.patch


def test_a_link_to_the_runs_root_is_no_code(tree: WorkingTree, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "scratch").mkdir()
    (tree.folder / "runs").symlink_to(tmp_path / "scratch")
    monkeypatch.setenv("SCALETRAIN_RUNS", str(tree.folder / "runs"))
    assert "runs" not in files_in(snapshot(tree).archive)


def test_the_ignore_file_of_a_subfolder_applies_to_that_subfolder(tree: WorkingTree) -> None:
    tree.write("src/.scaletrainignore", "/big.bin\n")
    tree.write("src/big.bin", "0")
    tree.write("src/my_model/big.bin", "0")
    taken = take_snapshot(make_spec(f"code.path={tree.folder / 'src'}"))
    assert files_in(taken.archive).keys() == {".scaletrainignore", "my_model/__init__.py", "my_model/big.bin"}
    assert "src/big.bin" not in files_in(snapshot(tree).archive)


def test_a_renamed_file_is_not_kept_under_its_old_name(tree: WorkingTree, tmp_path: Path) -> None:
    tree.git("mv", "train.py", "training.py")
    taken = snapshot(tree)
    assert taken.record.uncommitted == 2
    elsewhere = tmp_path / "elsewhere"
    subprocess.run(["git", "clone", "--quiet", tree.folder, elsewhere], check=True)
    subprocess.run(["git", "-C", elsewhere, "apply"], input=taken.patch, check=True)
    assert not (elsewhere / "train.py").exists()


@pytest.mark.parametrize("mark", ["--assume-unchanged", "--skip-worktree"])
def test_a_file_that_git_is_set_to_ignore_changes_of_is_rejected_by_name(tree: WorkingTree, mark: str) -> None:
    tree.git("update-index", mark, "train.py")
    tree.write("train.py", "print('two')\n")
    with pytest.raises(UsageError, match=r"train\.py \(git ignores changes to it; .* git update-index"):
        snapshot(tree)


def test_many_uncommitted_files_fit_into_a_patch(tree: WorkingTree, tmp_path: Path) -> None:
    for number in range(1200):
        tree.write(f"many/{number:04d}-{'x' * 100}.txt", f"{number}")
    taken = snapshot(tree)
    assert taken.record.uncommitted == 1200
    elsewhere = tmp_path / "elsewhere"
    subprocess.run(["git", "clone", "--quiet", tree.folder, elsewhere], check=True)
    subprocess.run(["git", "-C", elsewhere, "apply"], input=taken.patch, check=True)
    assert differences(elsewhere, taken.listing) == []


def test_a_repository_whose_path_has_a_colon_has_a_patch_too(tmp_path: Path) -> None:
    folder = tmp_path / "a:b"
    folder.mkdir()
    odd = WorkingTree(folder)
    odd.write("train.py", "print('two')\n")
    odd.write("new.py", "")
    assert b"print('two')" in snapshot(odd).patch


def test_variables_of_a_hook_change_nothing(tree: WorkingTree, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "other").mkdir()
    other = WorkingTree(tmp_path / "other")
    other.write("more.py", "")
    other.commit()
    expected = snapshot(tree)
    monkeypatch.setenv("GIT_DIR", str(other.folder / ".git"))
    monkeypatch.setenv("GIT_LITERAL_PATHSPECS", "1")
    assert snapshot(tree) == expected


def test_a_file_added_despite_gitignore_is_in_the_patch(tree: WorkingTree) -> None:
    tree.write("data/keep.py", "1\n")
    tree.git("add", "--force", "data/keep.py")
    tree.commit()
    tree.write("data/keep.py", "2\n")
    assert b"+2" in snapshot(tree).patch


def test_a_folder_in_place_of_a_tracked_file_is_kept_with_its_content(tree: WorkingTree) -> None:
    (tree.folder / "train.py").unlink()
    tree.write("train.py/__init__.py", "")
    taken = snapshot(tree)
    assert "train.py/__init__.py" in files_in(taken.archive)
    assert taken.record.uncommitted == 2


def test_a_folder_without_tracked_files_is_rejected(tree: WorkingTree) -> None:
    with pytest.raises(UsageError, match="has no file that git tracks"):
        take_snapshot(make_spec(f"code.path={tree.folder / 'data'}"))
