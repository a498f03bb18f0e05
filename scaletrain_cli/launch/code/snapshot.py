"""A snapshot of the user's code: the files of a working tree as they are now, packed, and what is recorded of them.

The same files make the same bytes, whoever packs them. What only a run with code needs is imported where it is used:
every submission comes by here.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from scaletrain_cli.launch.code.working_tree import IGNORE_FILE, WorkingTree, count, refusal, some
from scaletrain_cli.rundir.code import CodeRecord, code_file, hash_of, listing
from scaletrain_cli.rundir.paths import RunDir, runs_root
from scaletrain_cli.safe_files import expand_home, make_folder, replace_file
from scaletrain_cli.spec import RunSpec

# Which version of this package runs, to the byte: a release's number says nothing of a checkout or of an image.


def code_hash() -> str:
    """SHA-256 over the source of this package: names and contents of its Python files."""
    package = Path(__file__).parents[2]
    digest = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        digest.update(f"{path.relative_to(package)}\0".encode())
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


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
    tree = WorkingTree(Path(working_folder, expand_home(code.path)).absolute(), spec.where("code.path"))
    commit = tree.commit()
    kept, changed = tree.kept(but=runs or runs_root()), tree.changed()
    uncommitted = sorted(path for path in changed if path in kept or not tree.holds(path))
    if uncommitted and code.uncommitted == "refuse":
        raise refusal(
            tree.where,
            f"has {count(uncommitted)} that are not committed: {some(uncommitted)}.",
            tree.folder,
            "Commit or stash them, or set code.uncommitted: patch.",
        )
    if not kept:
        raise refusal(tree.where, "holds no file that git would take.", tree.folder, "Give the folder of your code.")
    _require_size(spec, tree.sizes(kept))
    contents = {path: (tree.folder / path).read_bytes() for path in sorted(kept)}
    text = listing({path: hashlib.sha256(content).hexdigest() for path, content in contents.items()})
    record = CodeRecord(commit, len(uncommitted), hash_of(text), len(contents), sum(map(len, contents.values())))
    executable = {path for path in contents if os.access(tree.folder / path, os.X_OK)}
    return Snapshot(record, text, _pack(contents, executable), tree.patch(uncommitted))


def _require_size(spec: RunSpec, sizes: Mapping[str, int]) -> None:
    whole, most = sum(sizes.values()), spec.code.max_size
    if whole <= most:
        return
    largest = sorted(sizes, key=lambda path: -sizes[path])
    raise refusal(
        spec.where("code.max_size"),
        f"is {most:,} bytes, and {count(sizes)} of {spec.code.path} take {whole:,}; the largest are "
        f"{some([f'{path} ({sizes[path]:,})' for path in largest])}.",
        None,
        f"Name what a run does not need in {IGNORE_FILE}, or raise it.",
        key="code.max_size",
    )


def write_snapshot(run: RunDir, snapshot: Snapshot) -> list[Path]:
    """Put its files into the run directory; returns those that were not there. Raises OSError."""
    record, made = snapshot.record, []
    contents = {"sha256": snapshot.listing.encode("utf-8", "surrogateescape"), "tar.gz": snapshot.archive}
    for suffix, content in (contents | ({"patch": snapshot.patch} if snapshot.patch else {})).items():
        path = code_file(run, record, suffix)
        make_folder(path.parent)
        if not path.exists():
            replace_file(path, content)
            made.append(path)
    return made


def _pack(contents: Mapping[str, bytes], executable: set[str]) -> bytes:
    import gzip
    import io
    import tarfile

    packed = io.BytesIO()
    # No time and no owner in it: the same files are the same archive.
    with gzip.GzipFile(fileobj=packed, mode="wb", mtime=0) as outer, tarfile.open(fileobj=outer, mode="w") as archive:
        for path, content in contents.items():
            entry = tarfile.TarInfo(path)
            entry.size, entry.mode = len(content), 0o755 if path in executable else 0o644
            archive.addfile(entry, io.BytesIO(content))
    return packed.getvalue()
