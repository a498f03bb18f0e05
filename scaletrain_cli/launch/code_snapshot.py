"""A snapshot of the user's working tree: the files that git knows or would take, read as they are now.

git says which files; nothing is written into its repository. The same files make the same bytes, whoever packs them.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from scaletrain_cli.errors import Problem, UsageError
from scaletrain_cli.rundir.code import CodeRecord, code_file, hash_of, listing
from scaletrain_cli.rundir.paths import RunDir, runs_root
from scaletrain_cli.spec import RunSpec

IGNORE_FILE = ".scaletrainignore"
_NAMED = 5  # files that a message names
# Whatever the user's own configuration of diff is: a patch that git apply takes.
_PLAIN = "--no-color --no-ext-diff --no-textconv --no-relative --src-prefix=a/ --dst-prefix=b/".split()


@dataclass(frozen=True)
class Snapshot:
    """What is recorded of the tree, and the files that go into the run directory."""

    record: CodeRecord
    listing: str
    archive: bytes
    patch: bytes  # empty where everything is committed


def take_snapshot(spec: RunSpec, working_folder: str = "", runs: Path | None = None) -> Snapshot | None:
    """The tree that ``code.path`` names, seen from here or from a run's own working folder; None where it names none.

    ``runs`` below it stay out, whether git ignores them or not: the folder that a run is in, or the runs root. Raises
    UsageError, one for all files in the way.
    """
    code = spec.code
    if code.path is None:
        return None
    tree = _Tree(Path(working_folder, Path(code.path).expanduser()).absolute(), spec.where("code.path"))
    commit = tree.commit()
    kept, changed = tree.kept(but=runs or runs_root()), tree.changed()
    uncommitted = sorted(path for path in changed if path in kept or not os.path.lexists(tree.folder / path))
    if uncommitted and code.uncommitted == "refuse":
        raise _refusal(
            tree.where,
            f"has {_count(uncommitted)} that are not committed: {_some(uncommitted)}.",
            tree.folder,
            "Commit or stash them, or set code.uncommitted: patch.",
        )
    sizes = tree.sizes(kept)
    if sum(sizes.values()) > code.max_size:
        largest = sorted(sizes, key=lambda path: -sizes[path])
        raise _refusal(
            spec.where("code.max_size"),
            f"is {code.max_size:,} bytes, and {_count(kept)} of {tree.folder} take {sum(sizes.values()):,}; the "
            f"largest are {_some([f'{path} ({sizes[path]:,})' for path in largest])}.",
            None,
            f"Name what a run does not need in {IGNORE_FILE}, or raise it.",
            key="code.max_size",
        )
    contents = {path: (tree.folder / path).read_bytes() for path in sorted(kept)}
    text = listing({path: hashlib.sha256(content).hexdigest() for path, content in contents.items()})
    record = CodeRecord(commit, len(uncommitted), hash_of(text), len(contents), sum(map(len, contents.values())))
    executable = {path for path in contents if os.access(tree.folder / path, os.X_OK)}
    return Snapshot(record, text, _pack(contents, executable), tree.patch(uncommitted))


def write_snapshot(run: RunDir, snapshot: Snapshot) -> list[Path]:
    """Put its files into the run directory; returns those that were not there. Raises OSError."""
    record, made = snapshot.record, []
    contents = {"sha256": snapshot.listing.encode("utf-8", "surrogateescape"), "tar.gz": snapshot.archive}
    for suffix, content in (contents | ({"patch": snapshot.patch} if snapshot.patch else {})).items():
        path = code_file(run, record, suffix)
        path.parent.mkdir(exist_ok=True)
        if not path.exists():
            draft = path.with_name(f".{path.name}.{os.getpid()}.tmp")
            draft.write_bytes(content)
            draft.replace(path)
            made.append(path)
    return made


class _Tree:
    """A folder of a git working tree. Raises UsageError for one that is not, or where there is no git."""

    def __init__(self, folder: Path, where: str) -> None:
        self.folder, self.where = folder, where
        if not folder.is_dir():
            raise _refusal(where, "is no folder here.", folder, "Give the folder of a git working tree.")
        if shutil.which("git") is None:
            raise _refusal(where, "needs git, which is not installed here.", folder, "Install it, or leave code.path.")
        self._git("rev-parse", "--show-toplevel")

    def commit(self) -> str:
        return self._git("rev-parse", "--verify", "HEAD").decode().strip()

    def changed(self) -> set[str]:
        """Paths below the folder that differ from HEAD, are new, or are gone."""
        tracked = self._paths("diff", "--name-only", "--relative", "--no-ext-diff", "HEAD", "--", ".")
        return tracked | self._paths("ls-files", "--others", "--exclude-standard")

    def kept(self, *, but: Path) -> set[str]:
        """Paths below the folder that belong to the snapshot. Raises UsageError for what no archive could hold."""
        known = self._paths("ls-files", "--cached") | self._paths("ls-files", "--others", "--exclude-standard")
        if (self.folder / IGNORE_FILE).is_file():
            for kind in ("--cached", "--others"):
                known -= self._paths("ls-files", kind, "--ignored", f"--exclude-from={IGNORE_FILE}")
        inside, out = self.folder.resolve(), but.resolve()
        there = {path for path in known if os.path.lexists(self.folder / path)}
        if out.is_relative_to(inside):
            there = {path for path in there if not (inside / path).is_relative_to(out)}
        problems = [why for path in sorted(there) if (why := self._obstacle(path, inside)) is not None]
        if problems:
            raise _refusal(
                self.where,
                f"holds what a snapshot cannot: {_some(problems)}.",
                self.folder,
                f"Name it in {IGNORE_FILE} if the run does not need it.",
            )
        return there

    def _obstacle(self, path: str, inside: Path) -> str | None:
        place = self.folder / path
        if "\n" in path or "\r" in path:
            return f"{path!r} (a line break in a name)"
        if place.is_symlink() and not (place.is_file() and place.resolve().is_relative_to(inside)):
            return f"{path} (a link to {os.readlink(place)}, which is no file of this folder)"
        if place.is_dir():
            return f"{path} (a repository within this one: install it in the nodes' environment)"
        return None if place.is_file() else f"{path} (neither a file nor a link to one)"

    def sizes(self, paths: set[str]) -> dict[str, int]:
        return {path: (self.folder / path).stat().st_size for path in paths}

    def patch(self, paths: Sequence[str]) -> bytes:
        """What makes of HEAD these files as they are, for ``git apply``; new ones too."""
        if not paths:
            return b""
        index = Path(os.fsdecode(self._git("rev-parse", "--path-format=absolute", "--git-path", "index")).strip())
        objects = os.fsdecode(self._git("rev-parse", "--path-format=absolute", "--git-path", "objects")).strip()
        with tempfile.TemporaryDirectory() as scratch:
            # New files must be in an index to be in a diff: in a copy of it, and with a place for objects of its own.
            if index.exists():
                shutil.copy(index, f"{scratch}/index")
            aside = {"GIT_INDEX_FILE": f"{scratch}/index", "GIT_OBJECT_DIRECTORY": scratch}
            aside |= {"GIT_ALTERNATE_OBJECT_DIRECTORIES": objects}
            literal = [f":(literal){path}" for path in paths]
            there = [named for path, named in zip(paths, literal, strict=True) if os.path.lexists(self.folder / path)]
            if there:
                add = ("add", "--intent-to-add", "--pathspec-from-file=-", "--pathspec-file-nul")
                self._git(*add, environment=aside, sent=b"\0".join(map(os.fsencode, there)))
            return self._git("diff", *_PLAIN, "--binary", "HEAD", "--", *literal, environment=aside)

    def _paths(self, *arguments: str) -> set[str]:
        command, *rest = arguments
        return {os.fsdecode(path) for path in self._git(command, "-z", *rest).split(b"\0") if path}

    def _git(self, *arguments: str, environment: Mapping[str, str] | None = None, sent: bytes = b"") -> bytes:
        done = subprocess.run(
            ["git", "-C", str(self.folder), *arguments],
            env={**os.environ, **(environment or {}), "LC_ALL": "C", "GIT_OPTIONAL_LOCKS": "0"},
            input=sent,
            capture_output=True,
        )
        if done.returncode:
            said = done.stderr.decode(errors="replace").strip().partition("\n")[0]
            hint = "Make it a git working tree with one commit (git init, git add, git commit)."
            raise _refusal(self.where, f"cannot be snapshotted: git says {said!r}.", self.folder, hint)
        return done.stdout


def _pack(contents: Mapping[str, bytes], executable: set[str]) -> bytes:
    packed = io.BytesIO()
    # No time and no owner in it: the same files are the same archive.
    with gzip.GzipFile(fileobj=packed, mode="wb", mtime=0) as outer, tarfile.open(fileobj=outer, mode="w") as archive:
        for path, content in contents.items():
            entry = tarfile.TarInfo(path)
            entry.size, entry.mode = len(content), 0o755 if path in executable else 0o644
            archive.addfile(entry, io.BytesIO(content))
    return packed.getvalue()


def _refusal(where: str, message: str, given: Path | None, hint: str, *, key: str = "code.path") -> UsageError:
    problem = Problem(where, key, message, None if given is None else str(given), hint)
    return UsageError("the code cannot be kept with the run", (problem,))


def _count(paths: Sequence[str] | set[str]) -> str:
    return "1 file" if len(paths) == 1 else f"{len(paths)} files"


def _some(names: Sequence[str]) -> str:
    more = len(names) - _NAMED
    return ", ".join(names[:_NAMED]) + (f" and {more} more" if more > 0 else "")
