"""`scaletrain resume --from-mirror`: bring a run here from its mirror, so that a resume can continue it.

The run keeps its id, its history and its W&B run. Its place before stops when it sees the new claim in the mirror.
"""

import contextlib
import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from scaletrain_cli.errors import ScaletrainError, UsageError
from scaletrain_cli.launch.attempts import close_unended
from scaletrain_cli.launch.mirroring import is_known_over
from scaletrain_cli.launch.submit import plan_run
from scaletrain_cli.mirror.claims import Claim, make_claim, new_claim, own_claim, read_claims
from scaletrain_cli.mirror.object_store import open_store, store_variables
from scaletrain_cli.mirror.restore import (
    FoundRun,
    Restored,
    complete_run,
    draft_folder,
    find_in_mirror,
    mark_complete,
    restore_run,
)
from scaletrain_cli.mirror.stores import MirrorError
from scaletrain_cli.reasons import Reason, recorded
from scaletrain_cli.rundir.documents import read_document
from scaletrain_cli.rundir.journal import read_events, record_event
from scaletrain_cli.rundir.mirror_state import mark_superseded, read_restored
from scaletrain_cli.rundir.paths import RunDir, runs_root
from scaletrain_cli.rundir.record import RunRecord, add_revision, is_elsewhere, read_record, read_size_plans
from scaletrain_cli.spec import override_spec
from scaletrain_cli.spec.clusters_file import choose_cluster
from scaletrain_cli.spec.mirror import is_in_store, place_problem


def find_to_move(place: str, run_id: str, *, take_over: bool = False, root: Path | None = None) -> FoundRun:
    """Return the run in a mirror that may be continued here; a folder may be given by a relative path. Writes nothing.

    Raises UsageError if ``place`` cannot be a mirror; if the run may still train in another place, unless
    ``take_over``; if it is already here; and errors of the mirror. A directory here whose pods write to a volume that
    this machine does not see is no obstacle: it shows whether their job is over.
    """
    root = root or runs_root()
    if not (is_in_store(place) or place.startswith("~")):
        place = os.path.abspath(place)  # the run's spec names it from now on
    if problem := place_problem(place):
        raise UsageError(Reason("mirror.no-place", {"place": place, "problem": problem.rstrip(".")}))
    mirrored = find_in_mirror(place, run_id)
    owner, here = mirrored.owner, RunDir(root / run_id)
    is_over = mirrored.activity.released
    if os.path.lexists(here.path):
        own = own_claim(here)
        if own is None or own.token == owner.token:
            if not _left_to_pods(here):
                raise UsageError(Reason("mirror.exists-here", {"folder": str(here.path), "run": run_id}))
            is_over = is_over or is_known_over(here)
    drafted = own_claim(RunDir(draft_folder(root, run_id)))
    is_mine = drafted is not None and drafted.token == owner.token
    if not (take_over or is_mine or is_over):
        seconds = max(0.0, time.time() - mirrored.activity.time)
        params = {"run": run_id, "run_dir": owner.run_dir, "host": owner.host, "seconds": seconds}
        raise UsageError(Reason("mirror.active-elsewhere", params))
    return mirrored


def _left_to_pods(run: RunDir) -> bool:
    """Return whether this directory only submitted the run, whose pods have another one that is not visible here."""
    try:
        return is_elsewhere(run, read_record(run))
    except UsageError:  # a damaged record
        return False


def move_here(
    mirrored: FoundRun,
    *,
    root: Path | None = None,
    check: Callable[[RunDir], None] = lambda run: None,
    on_bytes: Callable[[int, int], None] = lambda done, total: None,
) -> Restored:
    """Create the run directory from the mirror and claim the run; see restore_run() for ``check`` and ``on_bytes``.

    A directory of the run that another place has superseded, or whose pods have another one, is kept under a hidden
    name. Attempts without an end get the one that their records show. Checkpoints are in the run directory from now on.
    """
    root = root or runs_root()
    here = RunDir(root / mirrored.run_id)
    own = own_claim(here)
    generation = mirrored.owner.generation if own is None else own.generation  # None: of pods that were submitted here
    aside = root / f".{mirrored.run_id}.generation-{generation}"
    notes: list[Reason] = []

    def prepare(draft: RunDir) -> None:
        notes.clear()  # of an earlier state of the mirror
        if own is None and here.path.exists() and read_document(here.record) != read_document(draft.record):
            raise UsageError(Reason("mirror.exists-here", {"folder": str(here.path), "run": mirrored.run_id}))
        record = read_record(draft)  # a revision has the settings that differ here
        changes = ["checkpoint.dir=auto"] if record.spec.checkpoint.dir != "auto" else []
        if mirrored.place != record.spec.checkpoint.mirror.to:  # a copy of the mirror
            changes.append(f"checkpoint.mirror.to={mirrored.place}")
        if changes:
            spec = override_spec(record.spec, changes, file=str(draft.record))
            add_revision(draft, record, spec, record.plan, changes)
        if (note := _complete_sizes(draft)) is not None:
            notes.append(note)
        check(draft)

    restored = replace(restore_run(mirrored, root, check=prepare, aside=aside, on_bytes=on_bytes), notes=tuple(notes))
    run, before = restored.run, restored.owner_before
    close_unended(run, read_record(run).spec)
    known = {"from_host": before.host, "from_run_dir": before.run_dir, "generation": mirrored.owner.generation + 1}
    record_event(run, "moved", step=restored.checkpoint.step, to=mirrored.place, **known)
    return restored


def _complete_sizes(draft: RunDir) -> Reason | None:
    """Plan the sizes of a range of nodes again that an older mirror lacks; return what was done, None if nothing.

    Where they cannot be planned, the run keeps its present number of nodes.
    """
    record = read_record(draft)
    with contextlib.suppress(UsageError):
        read_size_plans(draft, record)
        return None
    params = {"run": record.run_id, "sizes": list(record.sizes)}
    try:
        planned = plan_run(record.spec, record.run_id)
    except ScaletrainError as error:
        nodes = record.spec.cluster.nodes
        change = f"cluster.nodes={nodes}"
        spec = override_spec(record.spec, [change], file=str(draft.record))
        add_revision(draft, record, spec, record.plan, [change], size_plans={})
        return Reason("mirror.sizes-lost", params | {"why": error.reason or recorded(str(error)), "nodes": nodes})
    add_revision(draft, record, planned.spec, planned.plan, (), size_plans=planned.size_plans)
    sizes = list(planned.size_plans) or [planned.spec.cluster.nodes]
    return Reason("mirror.sizes-planned-again", params | {"nodes": sizes})


def cluster_overrides(run: RunDir, cluster: str) -> list[str]:
    """Return the settings of a cluster of clusters.yaml as overrides of the spec of a run. Raises UsageError."""
    chosen = choose_cluster(cluster)
    assert chosen is not None, cluster
    return chosen.overrides(read_record(run).spec.cluster.scheduler)


def complete_from_mirror(run: RunDir, record: RunRecord) -> bool:
    """Bring history and checkpoint to a run directory on a volume that the submitter cannot access; for pod 0.

    The directory has the claim that the submitter has made; once all is here, this does nothing. What an interrupted
    call received is kept. Return whether it did something. Raises MirrorError if the checkpoint of the claim is not
    valid any more, and errors of the store.
    """
    own, to = own_claim(run), record.spec.checkpoint.mirror.to
    if to is None or own is None or own.from_step is None or read_restored(run)[0] == own.token:
        return False
    with store_variables(record.spec.env):
        mirrored = find_in_mirror(to, run.run_id)
        if mirrored.owner.token != own.token:
            return False  # the mirroring process finds the new owner, and stops the run
        checkpoint = complete_run(mirrored, run, own.from_step)
    _record_move(run, record, mirrored.claims[-2] if len(mirrored.claims) > 1 else own, own.generation, checkpoint.step)
    return True


def _record_move(run: RunDir, record: RunRecord, before: Claim, generation: int, step: int) -> None:
    """End the attempts of the owner ``before``, record the event ``moved`` once, and that all is here."""
    close_unended(run, record.spec)
    known = {"from_host": before.host, "from_run_dir": before.run_dir, "generation": generation}
    moved = [event.get("generation") for event in read_events(run) if event["event"] == "moved"]
    if generation not in moved:  # by an interrupted call
        record_event(run, "moved", step=step, to=record.spec.checkpoint.mirror.to, **known)
    mark_complete(run)


def return_from_mirror(run: RunDir, record: RunRecord, documents: Path) -> bool:
    """Bring a run back whose directory was lost with the volume of its pod; for pod 0, whose volume begins empty.

    The claim of each pod follows that of the pod before, which stops if it still runs somewhere. The pods of one place
    know their claims by the host, which names the claim that their ``documents`` have. If another place owns the run,
    it is marked superseded here. Return whether a checkpoint was received. Raises MirrorError if the mirror has some
    and none is valid, or if another pod was faster, and errors of the store.
    """
    own, to = own_claim(run), str(record.spec.checkpoint.mirror.to)
    if own is not None and read_restored(run)[0] == own.token:
        return False  # this container was started again, and its volume is still there
    token = (read_document(documents / run.mirror_claim_file.name) or {}).get("token", "")
    host, checkpoint, mirrored = _host_of_pods(token), None, None
    with store_variables(record.spec.env):
        store = open_store(to, run.run_id)
        claims = read_claims(store)
        before = claims[-1] if claims else None
        if before is not None and before.host != host and before.token != token:
            mark_superseded(run, {"host": before.host, "run_dir": before.run_dir, "generation": before.generation})
            return False
        with contextlib.suppress(UsageError):  # before its first history
            mirrored = find_in_mirror(to, run.run_id)
        steps = [] if mirrored is None else [folder.step for folder in mirrored.folders]
        while mirrored is not None and steps and checkpoint is None:
            try:
                checkpoint = complete_run(mirrored, run, steps.pop(0))
            except MirrorError:  # the one before may be valid
                if not steps:
                    raise
        step = checkpoint.step if checkpoint is not None else None if before is None else 0
        history = None if mirrored is None else mirrored.index.name
        generation = 1 if before is None else before.generation + 1
        claim = replace(new_claim(run, generation, from_step=step, from_history=history), host=host)
        if not make_claim(store, run, claim):
            raise MirrorError(Reason("mirror.claimed-meanwhile", {"run": run.run_id, "place": to}))
    if checkpoint is None or before is None:
        mark_complete(run)
        return False
    _record_move(run, record, before, claim.generation, checkpoint.step)
    return True


def _host_of_pods(token: str) -> str:
    return f"pods-of-{token or 'submission'}"


def set_older_aside(documents: Path, root: Path) -> Path | None:
    """Rename the run directory on a volume that belongs to an earlier owner than the claim among the documents.

    Return its new path; None if there is none. Raises UsageError if the volume has a later owner.
    """
    claim = read_document(documents / RunDir(root).mirror_claim_file.name)
    first = read_document(documents / RunDir(root).record.name)
    if claim is None or first is None:
        return None
    run = RunDir(root / str(first["run_id"]))
    if read_document(run.record) != first:  # another run, which remains
        return None
    own, generation = own_claim(run), int(claim["generation"])
    if own is not None and own.host == _host_of_pods(claim["token"]):
        return None  # of an earlier start of this container
    if own is not None and own.generation > generation:
        later = {"run": run.run_id, "run_dir": own.run_dir, "host": own.host, "place": str(run.path)}
        raise UsageError(Reason("mirror.later-on-volume", later))
    if (own is None and not run.attempts()) or (own is not None and own.token == claim["token"]):
        return None
    before = own.generation if own is not None else generation - 1
    return run.path.rename(root / f".{run.run_id}.generation-{before}")
