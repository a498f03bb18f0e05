"""Keep the mirror of one run up to date: claim, checkpoints, history, retention. Used by the process on the first node.

A failure of the mirror is recorded in mirror.json and as an event, and tried again later; training never waits for it.
"""

import contextlib
import logging
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace

from scaletrain_cli.errors import ScaletrainError
from scaletrain_cli.mirror.checkpoints import (
    MirroredFolder,
    delete_folder,
    folders_to_delete,
    identity_of,
    in_line,
    list_folders,
    read_mirrored,
    update_manifest,
    upload_checkpoint,
)
from scaletrain_cli.mirror.claims import Claim, is_made, make_claim, new_claim, own_claim, read_claims, report_activity
from scaletrain_cli.mirror.history import HistoryWriter
from scaletrain_cli.mirror.stores import LocalFileError, MirrorStore, Throttle
from scaletrain_cli.reasons import Reason, recorded
from scaletrain_cli.rundir.checkpoints import MANIFEST, Checkpoint, committed_folders, list_checkpoints
from scaletrain_cli.rundir.journal import invalidated_steps, read_events, record_event, size_here
from scaletrain_cli.rundir.mirror_state import MirrorState, mark_superseded, read_mirror_state, write_mirror_state
from scaletrain_cli.rundir.paths import RunDir
from scaletrain_cli.rundir.record import RunRecord, checkpoint_folder

_ACTIVITY_SECONDS = 60.0  # between two reports that the run is alive, and two looks at the claims
_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 5.0, 300.0  # after a failure
_STATE_SECONDS = 2.0  # between two writes of mirror.json during a copy
logger = logging.getLogger(__name__)


class SupersededError(ScaletrainError):
    """Another place owns the run."""

    code = "mirror-superseded"


class Mirror:
    """The mirror of a run whose spec has one. Every method is called by one thread."""

    def __init__(self, run: RunDir, record: RunRecord, store: MirrorStore) -> None:
        self._run, self._record, self._store = run, record, store
        self._settings = record.spec.checkpoint.mirror
        self._folder = checkpoint_folder(run, record.spec)
        self._throttle = Throttle(self._settings.bandwidth)
        self._claims: list[Claim] = []
        self._folders: list[MirroredFolder] | None = None  # None before the first look at the mirror
        self._history: HistoryWriter | None = None
        self._clean: set[str] = set()  # names of folders whose manifest is marked clean
        self._damaged: set[tuple[int, str]] = set()
        self._events_size = -1
        self._seen: tuple[tuple[str, int], ...] | None = None  # the checkpoints here at the last look that succeeded
        self._looked = self._not_before = 0.0  # monotonic
        self._lock = threading.Lock()  # of the state, which a thread updates during a copy
        self._pause = _FIRST_PAUSE_SECONDS
        before = read_mirror_state(run)
        to = str(self._settings.to)
        self.state = before if before is not None and before.to == to else MirrorState(to, 0, 0.0)
        self.state = replace(self.state, uploading_step=None, sent_bytes=0, upload_bytes=0, owner="")

    @property
    def is_superseded(self) -> bool:
        """True once another place owns the run; nothing is written any more."""
        return bool(self.state.owner)

    def look(self, *, is_last: bool = False) -> bool:
        """Bring the mirror up to date; return whether nothing is left to do. Never raises but for a damaged run.

        ``is_last``: at the end of an attempt, when the newest checkpoint is copied whatever ``every`` says, and a
        failed try is repeated at once.
        """
        if self.is_superseded:
            return True
        if time.monotonic() < self._not_before and not is_last:
            return False
        try:
            done = self._bring_up_to_date(is_last)
        except SupersededError:
            return True
        except (ScaletrainError, OSError) as error:
            self._failed(error)
            if not isinstance(error, LocalFileError):  # retention was faster, or a disk is at fault
                self._claims, self._folders, self._history = [], None, None  # what the store has may be other files
            return False
        self._pause, self._not_before = _FIRST_PAUSE_SECONDS, 0.0
        if self.state.problem is not None:
            lasted = round(max(0.0, time.time() - (self.state.failing_since or time.time())), 3)
            self._update(problem=None, failing_since=None)
            with contextlib.suppress(OSError):
                record_event(self._run, "mirror-recovered", to=self.state.to, seconds=lasted)
        return done

    def release(self) -> None:
        """Write the last events, and record that the run has ended here. Raises errors of the store."""
        self._require_claim()
        self._write_history()
        report_activity(self._store, self._generation, self.state.step, released=True)

    def _bring_up_to_date(self, is_last: bool) -> bool:
        is_due = self._is_due()
        if is_due:
            self._require_claim()
            newest = max((save.step for save in list_checkpoints(self._folder)), default=None)
            report_activity(self._store, self._generation, newest)
            self._looked = time.monotonic()
        if self._folders is None:
            self._folders = list_folders(self._store)
            read = {folder.name: read_mirrored(self._store, folder) for folder in self._line()}
            self._clean = {name for name, stored in read.items() if isinstance(stored, Checkpoint) and stored.clean}
            self._describe()
        seen = self._names_here()
        self._drop_invalidated()
        self._mark_clean()
        changed = False
        while (checkpoint := self._next(is_last)) is not None:
            self._copy(checkpoint)
            self._drop_invalidated()
            changed = True
        if changed:
            self._retain()
        self._seen = seen
        if is_last or (is_due and size_here(self._run.events) != self._events_size):
            self._write_history()
        return True

    def has_news(self) -> bool:
        """Return whether a look may change anything: a checkpoint, a failed try to repeat, or the time is due.

        Reads names and times of the checkpoint folder only.
        """
        if self.state.problem is not None or self._is_due():
            return time.monotonic() >= self._not_before
        return self._names_here() != self._seen

    def _is_due(self) -> bool:
        return not self._claims or time.monotonic() - self._looked >= _ACTIVITY_SECONDS

    def _names_here(self) -> tuple[tuple[str, int], ...]:
        names = []
        for path in committed_folders(self._folder):
            with contextlib.suppress(OSError):
                names.append((path.name, (path / MANIFEST).stat().st_mtime_ns))
        return tuple(names)

    @property
    def _generation(self) -> int:
        return self._claims[-1].generation

    def _require_claim(self) -> None:
        """Read who owns the run, and claim a mirror that nobody owns. Raises SupersededError."""
        claims = read_claims(self._store, self._claims)
        own = own_claim(self._run) or new_claim(self._run, 1)
        # A folder that is not mounted has no claim, and a network file system may list those of an earlier time.
        if not claims or claims[-1].generation < own.generation:
            made = is_made(self._store, own) if claims else make_claim(self._store, self._run, own)
            claims = [*claims, own] if made else claims or read_claims(self._store)
        if own.token != claims[-1].token:
            self._supersede(claims[-1])
        self._claims = claims
        if self._history is None:
            self._history = HistoryWriter(self._store, self._run, self._generation, self._throttle)
        self._update(generation=self._generation)

    def _supersede(self, owner: Claim) -> None:
        place = f"{owner.run_dir} on {owner.host}"
        known = {"host": owner.host, "run_dir": owner.run_dir, "generation": owner.generation}
        mark_superseded(self._run, {**known, "to": self.state.to, "from_step": owner.from_step})
        self._update(owner=place, waiting_step=None, waiting_since=None, uploading_step=None)
        reason = Reason("mirror.superseded", {**known, "place": self.state.to})
        record_event(self._run, "mirror-superseded", **reason.to_document(), message=str(reason), **known)
        logger.warning("%s", reason)
        raise SupersededError(reason)

    def _line(self) -> list[MirroredFolder]:
        return in_line(self._folders or [], self._claims)

    def _valid(self) -> list[MirroredFolder]:
        line = self._line()
        invalid = invalidated_steps(read_events(self._run), {folder.step for folder in line})
        return [folder for folder in line if folder.step not in invalid]

    def _next(self, is_last: bool) -> Checkpoint | None:
        """Return the checkpoint to copy: the newest one, then those that ``keep_every`` keeps; None if none is left."""
        there = {(folder.step, folder.identity) for folder in self._valid()}
        here = list_checkpoints(self._folder)
        absent = [local for local in here if (local.step, identity_of(dict(local.files))) not in there | self._damaged]
        every, last = self._settings.every, max((step for step, _ in there), default=None)
        is_due = is_last or every is None or last is None or not here or here[-1].step - last >= every
        if here and here[-1] in absent and is_due:
            since = self.state.waiting_since or round(time.time(), 3)
            self._update(waiting_step=here[-1].step, waiting_since=since)
            return here[-1]
        self._update(waiting_step=None, waiting_since=None)
        keep_every = self._settings.keep_every
        return next((missing for missing in reversed(absent) if keep_every and missing.step % keep_every == 0), None)

    def _copy(self, checkpoint: Checkpoint) -> None:
        events, began, before = len(read_events(self._run)), time.monotonic(), self._throttle.sent
        with self._reporting_progress(checkpoint, before):
            try:
                folder = upload_checkpoint(
                    self._store, checkpoint, self._generation, self._throttle, self._before_commit
                )
            except LocalFileError as error:
                if error.reason is not None and error.reason.code == "mirror.local-file-damaged":
                    self._damaged.add((checkpoint.step, identity_of(dict(checkpoint.files))))
                raise
        saves = [save for save in self._folders or () if save.generation == folder.generation]
        self._delete([save for save in saves if save.step == folder.step and save.name != folder.name])  # earlier ones
        self._folders = [kept for kept in self._folders or () if kept.name != folder.name] + [folder]
        (self._clean.add if checkpoint.clean else self._clean.discard)(folder.name)
        self._describe(committed=round(time.time(), 3))
        if invalidated_steps(read_events(self._run)[events:], {checkpoint.step}):
            return  # rolled back during the copy; without the event below it is not valid
        record_event(
            self._run,
            "mirrored",
            step=checkpoint.step,
            bytes=checkpoint.size_bytes,
            sent_bytes=self._throttle.sent - before,
            seconds=round(time.monotonic() - began, 3),
        )

    def _before_commit(self) -> None:
        """Store the history up to the checkpoint, and make sure that this place still owns the run."""
        self._write_history()
        self._require_claim()

    @contextlib.contextmanager
    def _reporting_progress(self, checkpoint: Checkpoint, before: int) -> Iterator[None]:
        """Write the progress of a copy to mirror.json; retention keeps the checkpoint from the first write on."""
        over = threading.Event()

        def report() -> None:
            while not over.wait(_STATE_SECONDS):
                self._update(sent_bytes=self._throttle.sent - before, updated=round(time.time(), 3))

        self._update(uploading_step=checkpoint.step, upload_bytes=checkpoint.size_bytes, sent_bytes=0)
        thread = threading.Thread(target=report, name="mirror-progress", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()
            self._update(uploading_step=None, upload_bytes=0, sent_bytes=0)

    def _retain(self) -> None:
        settings = self._settings
        self._require_claim()  # before anything is deleted: a later owner may need it
        self._folders = list_folders(self._store)
        invalid = invalidated_steps(read_events(self._run), {folder.step for folder in self._line()})
        self._delete(folders_to_delete(self._folders, self._claims, settings.keep, settings.keep_every, invalid))
        if self._history is not None:
            self._history.clean()
        self._describe()

    def _drop_invalidated(self) -> None:
        """Delete checkpoints of steps that were discarded since they were copied, once a valid one is there."""
        valid = {folder.name for folder in self._valid()}
        discarded = [folder for folder in self._line() if folder.name not in valid]
        if not valid or not discarded:
            return
        self._require_claim()
        self._delete(discarded)
        self._describe()

    def _delete(self, folders: Sequence[MirroredFolder]) -> None:
        for folder in folders:
            delete_folder(self._store, folder)
        self._folders = [kept for kept in self._folders or () if kept not in folders]

    def _mark_clean(self) -> None:
        """Write the manifests again of checkpoints that training has marked clean since they were copied."""
        waiting = {(save.step, save.identity): save for save in self._line() if save.name not in self._clean}
        for checkpoint in list_checkpoints(self._folder) if waiting else ():
            folder = waiting.get((checkpoint.step, identity_of(dict(checkpoint.files))))
            if checkpoint.clean and folder is not None:
                update_manifest(self._store, folder, checkpoint)
                self._clean.add(folder.name)

    def _write_history(self) -> None:
        assert self._history is not None
        size = size_here(self._run.events)
        self._history.write()
        self._events_size = size

    def _describe(self, committed: float | None = None) -> None:
        steps = sorted({folder.step for folder in self._line()})
        newest = max(steps, default=None)
        self._update(steps=steps, step=newest, committed=committed or self.state.committed)

    def _failed(self, error: ScaletrainError | OSError) -> None:
        reason = (error.reason if isinstance(error, ScaletrainError) else None) or recorded(str(error))
        self._not_before = time.monotonic() + self._pause
        self._pause = min(2 * self._pause, _LONGEST_PAUSE_SECONDS)
        before = self.state.problem
        since = self.state.failing_since if before is not None else round(time.time(), 3)
        self._update(problem=reason, failing_since=since)
        if before is None or before.code != reason.code:
            logger.warning("the mirror %s failed: %s", self.state.to, reason)
            with contextlib.suppress(OSError):
                record_event(self._run, "mirror-failed", to=self.state.to, **reason.to_document(), message=str(reason))

    def _update(self, **changes: object) -> None:
        """Change the state, and write it if it differs. A full disk must not end the mirror."""
        with self._lock:
            changed = replace(self.state, **changes)  # type: ignore[arg-type]
            if changed != self.state or self.state.updated == 0.0:
                self.state = replace(changed, updated=round(time.time(), 3))
                with contextlib.suppress(OSError):
                    write_mirror_state(self._run, self.state)
