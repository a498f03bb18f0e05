"""Bring a run back from its mirror: find its newest valid checkpoint, download it with the history, claim the run.

Everything is received in a hidden folder beside the new run directory, which appears by one rename after the claim. A
process that is killed leaves the folder, and the next one continues there.
"""

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from scaletrain_cli.errors import UsageError
from scaletrain_cli.mirror.checkpoints import MirroredFolder, download_checkpoint, in_line, list_folders, read_mirrored
from scaletrain_cli.mirror.claims import Activity, Claim, make_claim, new_claim, own_claim, read_activity, read_claims
from scaletrain_cli.mirror.history import Index, newest_index, restore_history
from scaletrain_cli.mirror.object_store import open_store
from scaletrain_cli.mirror.stores import MirrorError, MirrorStore
from scaletrain_cli.reasons import Reason
from scaletrain_cli.rundir.checkpoints import Checkpoint, checkpoint_path
from scaletrain_cli.rundir.mirror_state import mark_restored
from scaletrain_cli.rundir.paths import RunDir
from scaletrain_cli.safe_files import make_folder, replace_file

_MOST_PROBLEMS_SHOWN = 3
_MOST_STARTS = 20  # because the mirror changed meanwhile


@dataclass(frozen=True)
class FoundRun:
    """A run in a mirror. ``folders``: its checkpoints, the newest one first; ``claims``: the first one first."""

    place: str
    run_id: str
    store: MirrorStore
    claims: list[Claim]
    activity: Activity
    folders: list[MirroredFolder]
    index: Index

    @property
    def owner(self) -> Claim:
        """The claim that holds."""
        return self.claims[-1]


@dataclass(frozen=True)
class Restored:
    """The new run directory, the checkpoint, and a line for each newer one that is not valid.

    ``notes``: what differs from the run that was mirrored.
    """

    run: RunDir
    checkpoint: Checkpoint
    passed_over: list[str]
    owner_before: Claim
    notes: tuple[Reason, ...] = ()


def find_in_mirror(place: str, run_id: str) -> FoundRun:
    """Return a run in the mirror at ``place``, the value of its checkpoint.mirror; reads no checkpoint.

    Raises UsageError if there is none, MirrorError for a damaged mirror, and errors of the store.
    """
    place = place.rstrip("/").removesuffix(f"/{run_id}")
    store = open_store(place, run_id)
    claims = read_claims(store)
    index = newest_index(store, claims) if claims else None
    if not claims or index is None:
        raise UsageError(Reason("mirror.no-run", {"place": place, "run": run_id}))
    folders = in_line(list_folders(store), claims)[::-1]
    return FoundRun(place, run_id, store, claims, read_activity(store, claims[-1]), folders, index)


def restore_run(
    mirrored: FoundRun,
    root: Path,
    *,
    check: Callable[[RunDir], None] = lambda run: None,
    aside: Path | None = None,
    on_bytes: Callable[[int, int], None] = lambda done, total: None,
) -> Restored:
    """Create the run directory below ``root`` with the newest valid checkpoint, and claim the run.

    ``check`` gets the hidden folder before the claim; what it raises leaves the owner as it is. ``aside``: the new path
    of a run directory that is there. ``on_bytes`` gets the bytes of the checkpoint that are received, and all of them.
    With a live owner the mirror changes meanwhile: if the checkpoint is deleted or a newer one committed before the
    claim, this starts over. Raises MirrorError if no checkpoint is valid, if another place was faster, or if the mirror
    changes each time; what was received stays for another try.
    """
    final, draft = RunDir(root / mirrored.run_id), RunDir(draft_folder(root, mirrored.run_id))
    make_folder(root)
    make_folder(draft.path)
    damaged: dict[str, str] = {}  # what is wrong with a folder
    for _ in range(_MOST_STARTS + len(mirrored.folders)):  # each may be damaged
        received = _receive(mirrored, draft, damaged, on_bytes)
        before, mirrored = mirrored, _read_again(mirrored)
        if received is None or not _is_newest(received[0], mirrored, damaged):
            continue
        folder, checkpoint = received
        try:
            shutil.rmtree(draft.path / "revisions", ignore_errors=True)  # of an earlier try
            restore_history(mirrored.store, mirrored.index, draft.path)
        except MirrorError:
            before, mirrored = mirrored, _read_again(mirrored)
            if before.index.name == mirrored.index.name:
                raise
            continue
        check(draft)
        before, mirrored = mirrored, _read_again(mirrored)
        if _is_newest(folder, mirrored, damaged):
            break
    else:
        raise MirrorError(Reason("mirror.changes-meanwhile", {"run": mirrored.run_id, "place": mirrored.place}))
    (draft.path / _RECEIVED).unlink(missing_ok=True)
    mine = own_claim(draft)
    if mine is None or mine.token != mirrored.owner.token:  # else a process was killed after it had claimed the run
        generation = mirrored.owner.generation + 1
        claim = new_claim(final, generation, from_step=checkpoint.step, from_history=before.index.name)
        if not make_claim(mirrored.store, draft, claim):
            raise MirrorError(Reason("mirror.claimed-meanwhile", {"run": mirrored.run_id, "place": mirrored.place}))
    mark_complete(draft)
    if aside is not None and final.path.exists():
        final.path.rename(aside)
    draft.path.rename(final.path)
    restored = replace(checkpoint, path=checkpoint_path(final.checkpoints, checkpoint.step))
    owner = mirrored.claims[-2] if mine is not None and mine.token == mirrored.owner.token else mirrored.owner
    return Restored(final, restored, list(damaged.values()), owner)


def _receive(
    mirrored: FoundRun, draft: RunDir, damaged: dict[str, str], on_bytes: Callable[[int, int], None]
) -> tuple[MirroredFolder, Checkpoint] | None:
    """Download the newest checkpoint that is not ``damaged``; return it with its folder.

    Return None if it is not valid: it is then in ``damaged``, unless its owner has deleted it. Raises MirrorError if
    none is left.
    """
    folder = next((candidate for candidate in mirrored.folders if candidate.name not in damaged), None)
    if folder is None:
        problems = "; ".join([*damaged.values()][:_MOST_PROBLEMS_SHOWN]) or "none was completed"
        params = {"place": mirrored.place, "run": mirrored.run_id, "problems": problems}
        raise MirrorError(Reason("mirror.no-checkpoint", params))
    read = read_mirrored(mirrored.store, folder)
    problem = f"{folder.name}/{read}"
    if isinstance(read, Checkpoint):
        # What an earlier process received of another checkpoint goes.
        note, content = draft.path / _RECEIVED, json.dumps({"folder": folder.name})
        if draft.checkpoints.exists() and not (note.is_file() and note.read_text(encoding="utf-8") == content):
            shutil.rmtree(draft.checkpoints)
        replace_file(note, content)
        received, total = 0, read.size_bytes

        def advance(count: int) -> None:
            nonlocal received
            received += count
            on_bytes(received, total)

        target = checkpoint_path(draft.checkpoints, read.step)
        try:
            download_checkpoint(mirrored.store, folder, read, target, advance)
            return folder, replace(read, path=target)
        except MirrorError as error:
            problem = str(error)
            shutil.rmtree(target, ignore_errors=True)
    if any(stored.name == folder.name and stored.is_committed for stored in list_folders(mirrored.store)):
        damaged[folder.name] = problem
    return None


def _read_again(mirrored: FoundRun) -> FoundRun:
    """Return the run as it is in the mirror now. Raises MirrorError if another place has claimed it."""
    fresh = find_in_mirror(mirrored.place, mirrored.run_id)
    if fresh.owner.token != mirrored.owner.token:
        raise MirrorError(Reason("mirror.claimed-meanwhile", {"run": mirrored.run_id, "place": mirrored.place}))
    return fresh


def _is_newest(folder: MirroredFolder, mirrored: FoundRun, damaged: Mapping[str, str]) -> bool:
    """Return whether no other checkpoint has to be tried first, and this one is still there."""
    left = (candidate.name for candidate in mirrored.folders if candidate.name not in damaged)
    return next(left, None) == folder.name


def complete_run(mirrored: FoundRun, run: RunDir, step: int) -> Checkpoint:
    """Download the checkpoint of ``step`` and the history into a run directory that owns the run already.

    Files that are there remain. Raises MirrorError if the checkpoint is not valid.
    """
    for folder in mirrored.folders:
        if folder.step != step:
            continue
        read = read_mirrored(mirrored.store, folder)
        if not isinstance(read, Checkpoint):
            break
        target = checkpoint_path(run.checkpoints, step)
        download_checkpoint(mirrored.store, folder, read, target)  # before the history, which has attempts
        restore_history(mirrored.store, mirrored.index, run.path, keep_existing=True)
        return replace(read, path=target)
    params = {"place": mirrored.place, "run": mirrored.run_id, "problems": f"that of step {step} is not valid"}
    raise MirrorError(Reason("mirror.no-checkpoint", params))


def mark_complete(run: RunDir) -> None:
    """Record that the checkpoint and the history of the directory's claim are here."""
    own = own_claim(run)
    assert own is not None
    mark_restored(run, own.token)


def draft_folder(root: Path, run_id: str) -> Path:
    """Return the folder in which a run is received."""
    return root / f".{run_id}.from-mirror"


_RECEIVED = "received.json"
