"""The snapshot of the user's code: selects files of a git working tree and stores them with the run."""

import contextlib
import dataclasses
import functools
import hashlib
import json
import os
import re
import shutil
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import scaletrain_cli
from scaletrain_cli.errors import Problem, UsageError
from scaletrain_cli.own_processes import absolute_paths
from scaletrain_cli.reasons import Reason
from scaletrain_cli.rundir.paths import RunDir, runs_root
from scaletrain_cli.rundir.record import CodeRecord, code_file, hash_of, listing
from scaletrain_cli.safe_files import create_file, expand_home, make_folder, replace_file
from scaletrain_cli.spec import RunSpec
from scaletrain_cli.spec.code import CodeSpec
from scaletrain_cli.spec.secrets import why_private

# git for repositories that another user may have configured: it starts no program that their configuration names.


# Overrides the configuration of repository and user. No transport: a partial clone would fetch missing objects.
_SETTINGS = (
    "core.fsmonitor=false",
    "core.hooksPath=/dev/null",
    "core.pager=cat",
    "core.askPass=",
    "core.sshCommand=false",
    "core.gitProxy=",
    "credential.helper=",
    "diff.external=",
    "diff.ignoreSubmodules=dirty",
    "diff.submodule=short",
    "protocol.allow=never",
    "safe.bareRepository=explicit",
    "submodule.recurse=false",
)
_FILTER_OFF = ("clean=", "smudge=", "process=", "required=false")
_ENVIRONMENT = {
    "GIT_ALLOW_PROTOCOL": "",
    "GIT_CONFIG_NOSYSTEM": "1",
    "GIT_NO_LAZY_FETCH": "1",
    "GIT_OPTIONAL_LOCKS": "0",
    "GIT_TERMINAL_PROMPT": "0",
    "LC_ALL": "C",
}
# Variables that locate the user's settings. All others may come from a hook or an alias that runs this process, and
# would select another repository, other paths or other programs.
_KEPT_VARIABLES = {"GIT_CONFIG_GLOBAL"}
_MOST_SECONDS = 600.0  # reading a .gitignore that is a FIFO or on a dead file system never returns


IGNORE_FILE = ".scaletrainignore"
_NAMED = 5  # most files that a message lists
# Produces a patch that git apply accepts, independent of the user's diff configuration.
_SAFE = ("--no-ext-diff", "--no-textconv", "--no-renames", "--ignore-submodules=dirty")
_PLAIN = (*_SAFE, "-U3", "--no-color", "--no-relative", "--src-prefix=a/", "--dst-prefix=b/")
_POINTER = re.compile(rb"version https://git-lfs\.github\.com/spec/v1\n(?:.*\n)*?oid sha256:([0-9a-f]{64})\nsize \d+\n")
_LONGEST_POINTER = 1024
_FOR_OTHERS = 0o044
_PATHS_AT_A_TIME = 500  # per command line, which is limited to 2 MB


class GitError(Exception):
    """git failed or timed out; the message is its output."""


class WorkingTree:
    """A folder of a git working tree. Raises UsageError for any other folder, and without git."""

    def __init__(self, folder: Path, where: str) -> None:
        self.folder, self.where = folder, where
        self._filters: tuple[str, ...] = ()  # names of the content filters, which are switched off
        if not folder.is_dir():
            raise _refusal(where, Reason("checks.code-no-folder"), folder)
        if shutil.which("git") is None:
            raise _refusal(where, Reason("checks.code-no-git"), folder)
        # Those in all configurations that git reads here.
        names = set()
        for entry in self._git("config", "--null", "--name-only", "--list").split(b"\0"):
            section, _, rest = os.fsdecode(entry).partition(".")
            name, dot, _ = rest.rpartition(".")
            if section.lower() != "filter" or not dot:
                continue
            if "=" in name or "\n" in name:  # no command-line option of git can switch it off
                what = f"the filter {name!r} of its configuration has a name that cannot be switched off"
                raise self._git_failed("config", what)
            names.add(name)
        self._filters = tuple(sorted(names))
        self._git("rev-parse", "--show-toplevel")

    def _run(self, *arguments: str, environment: Mapping[str, str] | None = None, sent: bytes = b"") -> bytes:
        """Return the output of git. ``sent`` is its input. Raises GitError."""
        import subprocess

        settings = [*_SETTINGS, *(f"filter.{name}.{key}" for name in self._filters for key in _FILTER_OFF)]
        words = [word for setting in settings for word in ("-c", setting)]
        kept = {name: value for name, value in os.environ.items() if name[:4] != "GIT_" or name in _KEPT_VARIABLES}
        kept.pop("SSH_ASKPASS", None)
        try:
            done = subprocess.run(
                ["git", "-C", str(self.folder), *words, *arguments],
                env=absolute_paths(kept) | _ENVIRONMENT | dict(environment or {}),
                input=sent,
                capture_output=True,
                timeout=_MOST_SECONDS,
            )
        except subprocess.TimeoutExpired as error:
            raise GitError(f"nothing for {_MOST_SECONDS:.0f} s") from error
        if done.returncode:
            raise GitError(" ".join(done.stderr.decode(errors="replace").split()) or f"exit code {done.returncode}")
        return done.stdout

    def commit(self) -> str:
        return self._git("rev-parse", "--verify", "HEAD").decode().strip()

    @functools.cached_property
    def new(self) -> set[str]:
        """The paths below the folder that git does not track and would add."""
        return self._paths("ls-files", "--others", "--exclude-standard")

    @functools.cached_property
    def ignored(self) -> set[str]:
        """The paths that the ignore files of snapshots name."""
        return self._of_ignore_files()

    def meant(self) -> set[str]:
        """Return the paths that an ignore file of snapshots names with ``!``: they are not private."""
        import tempfile

        with tempfile.NamedTemporaryFile(suffix=IGNORE_FILE) as all_files:
            all_files.write(
                b"*\n!*/\n"
            )  # the rule of lowest rank: files alone, as nothing in an ignored folder is read
            all_files.flush()
            return (self._paths("ls-files", "--cached") | self.new) - self._of_ignore_files(
                f"--exclude-from={all_files.name}"
            )

    def _of_ignore_files(self, *rules: str) -> set[str]:
        listed = ("--ignored", f"--exclude-per-directory={IGNORE_FILE}", *rules)
        return self._paths("ls-files", "--cached", *listed) | self._paths("ls-files", "--others", *listed)

    def changed(self) -> set[str]:
        """Return the paths below the folder that differ from HEAD or are deleted."""
        with self._copied_index() as aside:
            tracked = self._paths("diff", "--name-only", "--relative", *_SAFE, "HEAD", "--", ".", environment=aside)
        return tracked - self._stored_elsewhere(tracked) - self.ignored

    def committed(self, paths: Iterable[str]) -> Iterator[tuple[str, bytes]]:
        """Yield the content in HEAD of those of the paths that HEAD has."""
        for path in paths:
            with contextlib.suppress(GitError):  # a new file
                yield path, self._run("cat-file", "blob", f"HEAD:./{path}")

    def _stored_elsewhere(self, paths: set[str]) -> set[str]:
        """Return the paths whose content matches the hash in the committed pointer, as of git-lfs.

        No filter is run, so git reports such a file as changed wherever it does not trust the file's mtime.
        """
        if not self._filters or not paths:
            return set()
        sent = b"\0".join(map(os.fsencode, sorted(paths)))
        answer = self._git("check-attr", "-z", "--stdin", "filter", sent=sent).split(b"\0")
        entries = zip(answer[0::3], answer[2::3], strict=False)  # path, attribute, value
        same = set()
        for path in sorted(os.fsdecode(path) for path, name in entries if os.fsdecode(name) in self._filters):
            place = self.folder / path
            if place.is_symlink() or not place.is_file():
                continue
            for _, committed in self.committed([path]):
                pointer = _POINTER.fullmatch(committed) if len(committed) < _LONGEST_POINTER else None
                if pointer is not None and hashlib.sha256(place.read_bytes()).hexdigest() == pointer[1].decode():
                    same.add(path)
        return same

    def kept(self, *, but: Path) -> set[str]:
        """Return the paths that belong to the snapshot. Raises UsageError for files that an archive cannot hold."""
        known = (self._paths("ls-files", "--cached") | self.new) - self.ignored
        inside = self.folder.resolve()
        there = self._without_runs(set(filter(self.holds, known)), inside, but)
        unwatched = {entry[2:] for entry in self._paths("ls-files", "-v") if entry[0] == "S" or entry[0].islower()}
        problems = [why for path in sorted(there) if (why := self._obstacle(path, inside, unwatched)) is not None]
        if problems:
            params = {"files": problems, "ignore_file": IGNORE_FILE}
            raise _refusal(self.where, Reason("checks.code-not-storable", params), self.folder)
        return there

    def holds(self, path: str) -> bool:
        """Return whether git's file is there; False where a folder that is not a repository has taken its place."""
        place = self.folder / path
        return os.path.lexists(place) and (place.is_symlink() or not place.is_dir() or (place / ".git").exists())

    def _without_runs(self, paths: set[str], inside: Path, runs: Path) -> set[str]:
        """Return the paths that are not in run directories (links resolved), which contain secrets and checkpoints."""
        out = runs.resolve()
        known = []
        for record in (self.folder / path for path in paths if path.endswith("/run.json")):
            with contextlib.suppress(OSError), record.open("rb") as file:
                if b'"scaletrain.run/' in file.read(200):
                    known.append(record.parent)
        kept = {path for path in paths if not any((self.folder / path).is_relative_to(run) for run in known)}
        if inside.is_relative_to(out):
            return kept
        return {path for path in kept if not (self.folder / path).resolve().is_relative_to(out)}

    def _obstacle(self, path: str, inside: Path, unwatched: set[str]) -> str | None:
        place, target = self.folder / path, (self.folder / path).resolve()
        if "\n" in path or "\r" in path:
            return f"{path!r} (a line break in a name)"
        if path in unwatched:
            again = "--no-assume-unchanged --no-skip-worktree"
            return f"{path} (git ignores changes to it; to track it again: git update-index {again})"
        kept = target.is_relative_to(inside) and ".git" not in target.relative_to(inside).parts
        if place.is_symlink() and not (place.is_file() and kept):
            return f"{path} (a link to {os.readlink(place)}, which is no file of this folder)"
        if (place / ".git").exists():
            return f"{path} (a repository within this one: install it in the nodes' environment)"
        return None if place.is_file() else f"{path} (neither a file nor a link to one)"

    def sizes(self, paths: set[str]) -> dict[str, int]:
        return {path: (self.folder / path).stat().st_size for path in paths}

    def patch(self, paths: Sequence[str]) -> bytes:
        """Return the patch for ``git apply`` that turns HEAD into these files, new ones included."""
        if not paths:
            return b""
        objects = self._git_path("objects")
        with self._copied_index() as aside:
            # A diff shows new files only if they are in the index. Their objects are written beside its copy.
            scratch = Path(aside["GIT_INDEX_FILE"]).parent
            aside["GIT_OBJECT_DIRECTORY"] = str(scratch)
            Path(scratch, "info").mkdir()
            create_file(scratch / "info" / "alternates", os.fsencode(f"{objects}\n"))
            literal = [f":(literal){path}" for path in paths]
            there = [named for path, named in zip(paths, literal, strict=True) if os.path.lexists(self.folder / path)]
            if there:
                add = ("add", "--force", "--intent-to-add", "--pathspec-from-file=-", "--pathspec-file-nul")
                self._git(*add, environment=aside, sent=b"\0".join(map(os.fsencode, there)))
            diff = ("diff", *_PLAIN, "--binary", "HEAD", "--")
            few = [literal[start : start + _PATHS_AT_A_TIME] for start in range(0, len(literal), _PATHS_AT_A_TIME)]
            return b"".join(self._git(*diff, *some, environment=aside) for some in few)

    @contextlib.contextmanager
    def _copied_index(self) -> Iterator[dict[str, str]]:
        """Yield the variable that selects a copy of the index: a diff writes new times of files into the index."""
        import tempfile

        index = Path(self._git_path("index"))
        with tempfile.TemporaryDirectory() as scratch:
            if index.exists():  # keep its mtime, by which git detects files that changed after it was written
                shutil.copy2(index, f"{scratch}/index")
            yield {"GIT_INDEX_FILE": f"{scratch}/index"}

    def _git_path(self, name: str) -> str:
        return os.fsdecode(self._git("rev-parse", "--path-format=absolute", "--git-path", name)).strip()

    def _paths(self, *arguments: str, environment: Mapping[str, str] | None = None) -> set[str]:
        command, *rest = arguments
        printed = self._git(command, "-z", *rest, environment=environment)
        return {os.fsdecode(path) for path in printed.split(b"\0") if path}

    def _git(self, *arguments: str, environment: Mapping[str, str] | None = None, sent: bytes = b"") -> bytes:
        try:
            return self._run(*arguments, environment=environment, sent=sent)
        except GitError as error:
            raise self._git_failed(arguments[0], str(error), about_head=arguments[-1] == "HEAD") from error

    def _git_failed(self, command: str, said: str, *, about_head: bool = False) -> UsageError:
        code = "checks.code-git-failed"
        if "dubious ownership" in said:  # words of git
            code = "checks.code-of-other-user"
        elif "not a git repository" in said or about_head:
            code = "checks.code-no-repository"
        return _refusal(self.where, Reason(code, {"command": command, "said": said}), self.folder)


def _refusal(where: str, reason: Reason, given: object, key: str = "code.path") -> UsageError:
    """Return the error about one key of the section ``code``."""
    return UsageError(Reason("checks.code-not-kept"), (Problem.because(where, key, reason, given),))


# The exact version of this package: the release number does not identify a checkout or an image.


def code_hash() -> str:
    """Return the SHA-256 over the names and contents of the Python files of this package."""
    package = Path(scaletrain_cli.__file__).parent
    digest = hashlib.sha256()
    for path in sorted(package.rglob("*.py"), key=str):  # text: paths take half as long again to compare
        digest.update(f"{path.relative_to(package)}\0".encode() + hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


@dataclass(frozen=True)
class Snapshot:
    """The record of a working tree, and the contents of the files to store in the run directory."""

    record: CodeRecord
    listing: str
    archive: bytes
    patch: bytes  # empty where everything is committed
    left_out: tuple[str, ...] = ()  # new files with secrets, and why
    private: bool = False  # for the user alone, as the folder or one of the files is

    @property
    def files(self) -> dict[str, bytes]:
        """The contents of the files that code_file() names, by suffix: the listing and the archive."""
        return {"sha256": self.listing.encode("utf-8", "surrogateescape"), "tar.gz": self.archive}

    @property
    def notes(self) -> tuple[Reason, ...]:
        """The note that names the files that were left out."""
        params = {"files": list(self.left_out), "ignore_file": IGNORE_FILE}
        return (Reason("checks.code-secrets-left-out", params),) if self.left_out else ()


def take_snapshot(spec: RunSpec, working_folder: str = "", runs: Path | None = None) -> Snapshot | None:
    """Return the snapshot of ``code.path``, relative to here or to ``working_folder``; None without ``code.path``.

    A folder that pack_snapshot() made is that snapshot. ``runs`` (the folder of a run, or the runs root) is left out
    even if git does not ignore it. Raises one UsageError for all files that cannot be stored.
    """
    return None if spec.code.path is None else snapshot_of(spec.code, spec.where, working_folder, runs)


def snapshot_of(
    code: CodeSpec, where: Callable[[str], str], working_folder: str = "", runs: Path | None = None
) -> Snapshot:
    """Return the snapshot of ``code.path``, which is set; ``where`` gives the place of a key. As take_snapshot()."""
    assert code.path is not None
    folder = Path(working_folder, expand_home(code.path)).absolute()
    if (folder / PACKED_RECORD).is_file():
        return _unpack_snapshot(folder, where("code.path"))
    tree = WorkingTree(folder, where("code.path"))
    commit = tree.commit()
    kept, changed = tree.kept(but=runs or runs_root()), tree.changed()
    if kept:
        _require_size(code, where, tree.sizes(kept))
    contents = {path: (tree.folder / path).read_bytes() for path in sorted(kept)}
    uncommitted = sorted(path for path in changed | tree.new if path in kept or not tree.holds(path))
    private, left_out = _private_files(tree, contents, uncommitted)
    for path in left_out:
        del contents[path]
    uncommitted = [path for path in uncommitted if path not in left_out]
    if uncommitted and code.uncommitted == "refuse":
        params = {"count": len(uncommitted), "files": uncommitted}
        raise _refusal(tree.where, Reason("checks.code-uncommitted", params), tree.folder)
    if not contents:
        raise _refusal(tree.where, Reason("checks.code-empty"), tree.folder)
    text = listing({path: hashlib.sha256(content).hexdigest() for path, content in contents.items()})
    record = CodeRecord(commit, len(uncommitted), hash_of(text), len(contents), sum(map(len, contents.values())))
    executable = {path for path in contents if os.access(tree.folder / path, os.X_OK)}
    named = tuple(f"{path} ({why})" for path, why in left_out.items())
    private = private or _is_private(folder.resolve(), runs or runs_root())
    return Snapshot(record, text, _pack(contents, executable), tree.patch(uncommitted), named, private)


def _private_files(
    tree: WorkingTree, contents: Mapping[str, bytes], uncommitted: Sequence[str]
) -> tuple[bool, dict[str, str]]:
    """Return whether any file of the snapshot is its owner's alone, and why, the new files that must not be in it.

    Raises UsageError for a tracked file with a secret, which the program may need, and for a patch that would show one.
    """
    inside = tree.folder.resolve()
    targets = {path: (inside / path).resolve() for path in contents}
    folders = {folder for target in targets.values() for folder in target.parents} - {inside, *inside.parents}
    closed = {folder for folder in folders if not folder.stat().st_mode & 0o011}
    owned = {
        path
        for path, target in targets.items()
        if not target.stat().st_mode & _FOR_OTHERS or not closed.isdisjoint(target.parents)
    }
    by_mode = bool(contents.keys() - tree.new - owned)  # else the umask of this user closes every file
    reasons: dict[str, str] = {}
    for path, content in contents.items():
        for name in {path, str(targets[path].relative_to(inside))}:  # a link may have a harmless name
            if (why := why_private(name, content, tracked=path not in tree.new)) is not None:
                reasons[path] = why
        if by_mode and path in owned and (path in tree.new or (tree.folder / path).is_symlink()):
            reasons.setdefault(path, "only its owner may read it")
    tracked = {path: why for path, why in reasons.items() if path not in tree.new}
    for path, before in tree.committed([path for path in uncommitted if path not in tree.new and path not in tracked]):
        if (why := why_private(path, before, tracked=True)) is not None:
            tracked[path] = f"in its last commit {why}, and a patch of your changes would show it"
    meant = tree.meant() if reasons or tracked else set()
    if refused := [f"{path} ({why})" for path, why in sorted(tracked.items()) if path not in meant]:
        params = {"files": refused, "ignore_file": IGNORE_FILE}
        raise _refusal(tree.where, Reason("checks.code-secrets-tracked", params), tree.folder)
    left_out = {path: why for path, why in sorted(reasons.items()) if path in tree.new and path not in meant}
    return bool(owned - left_out.keys()), left_out


def _is_private(folder: Path, runs: Path) -> bool:
    """Return whether users who may read files in ``runs`` may not read ``folder``."""
    there = next(path for path in (runs, *runs.absolute().parents) if path.exists()).stat()
    group = there.st_gid if there.st_mode & stat.S_ISGID else os.getegid()
    for place in (folder, *folder.parents):
        status, needed = place.stat(), 0o005 if place == folder else 0o001
        for_group = status.st_gid == group and status.st_mode >> 3 & needed == needed
        if status.st_mode & needed != needed and not for_group:
            return True
    return False


PACKED_RECORD = "scaletrain-snapshot.json"
_PACKED_LISTING, _PACKED_ARCHIVE, _PACKED_PATCH = "files.sha256", "files.tar.gz", "uncommitted.patch"


def pack_snapshot(snapshot: Snapshot) -> dict[str, bytes]:
    """Return the snapshot as files by name, for a folder on a machine that does not have the working tree."""
    return {
        PACKED_RECORD: json.dumps(dataclasses.asdict(snapshot.record) | {"private": snapshot.private}).encode(),
        _PACKED_LISTING: snapshot.listing.encode("utf-8", "surrogateescape"),
        _PACKED_ARCHIVE: snapshot.archive,
        _PACKED_PATCH: snapshot.patch,
    }


def _unpack_snapshot(folder: Path, where: str) -> Snapshot:
    """Return the snapshot that pack_snapshot() made. Raises UsageError for one that is incomplete or was changed."""
    try:
        packed = json.loads((folder / PACKED_RECORD).read_bytes())
        private = packed.pop("private")
        record = CodeRecord(**packed)
        text = (folder / _PACKED_LISTING).read_bytes().decode("utf-8", "surrogateescape")
        archive, patch = (folder / _PACKED_ARCHIVE).read_bytes(), (folder / _PACKED_PATCH).read_bytes()
    except (OSError, ValueError, TypeError, LookupError, AttributeError) as error:
        raise _refusal(where, Reason("checks.code-packed-broken", {"said": str(error)}), folder) from error
    if hash_of(text) != record.sha256 or _hashes_in(archive) != text:
        raise _refusal(where, Reason("checks.code-packed-changed"), folder)
    return Snapshot(record, text, archive, patch, private=private is not False)


def _hashes_in(archive: bytes) -> str | None:
    """Return the listing of the files in an archive; None for one that cannot be read."""
    import io
    import tarfile

    hashes = {}
    try:
        with tarfile.open(fileobj=io.BytesIO(archive), mode="r:gz") as packed:
            for entry in packed:
                if (file := packed.extractfile(entry)) is None:
                    return None
                hashes[entry.name] = hashlib.sha256(file.read()).hexdigest()
    except (OSError, tarfile.TarError, EOFError):
        return None
    return listing(hashes)


def _require_size(code: CodeSpec, where: Callable[[str], str], sizes: Mapping[str, int]) -> None:
    whole, most = sum(sizes.values()), code.max_size
    if whole <= most:
        return
    largest = sorted(sizes, key=lambda path: -sizes[path])
    params = {"folder": str(code.path), "files": len(sizes), "bytes": whole, "max_bytes": most}
    shown = {"largest": [f"{path} ({sizes[path]:,})" for path in largest[:_NAMED]], "ignore_file": IGNORE_FILE}
    raise _refusal(where("code.max_size"), Reason("checks.code-too-large", params | shown), None, "code.max_size")


def write_snapshot(run: RunDir, snapshot: Snapshot) -> list[Path]:
    """Store the files in the run directory; return those that are new. Raises OSError, and then leaves none of them."""
    record, made = snapshot.record, list[Path]()
    of_pods = run.path.stat().st_mode & stat.S_IWGRP  # which read it as another user with this group
    private = snapshot.private and not of_pods
    for suffix, content in (snapshot.files | ({"patch": snapshot.patch} if snapshot.patch else {})).items():
        path = code_file(run, record, suffix)
        try:
            make_folder(path.parent)
            if not path.exists():
                replace_file(path, content, private=private)
                made.append(path)
        except OSError:
            remove_snapshot(made)
            raise
    return made


def remove_snapshot(files: Sequence[Path]) -> None:
    """Remove the files that write_snapshot() returned: nothing refers to them."""
    for path in files:
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)


def _pack(contents: Mapping[str, bytes], executable: set[str]) -> bytes:
    import gzip
    import io
    import tarfile

    packed = io.BytesIO()
    # Without times and owners: the same files give the same archive.
    with gzip.GzipFile(fileobj=packed, mode="wb", mtime=0) as outer, tarfile.open(fileobj=outer, mode="w") as archive:
        for path, content in contents.items():
            entry = tarfile.TarInfo(path)
            entry.size, entry.mode = len(content), 0o755 if path in executable else 0o644
            archive.addfile(entry, io.BytesIO(content))
    return packed.getvalue()
