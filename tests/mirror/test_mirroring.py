"""Copying checkpoints and history to a mirror: at a real S3 server, and in a folder."""

import errno
import hashlib
import json
import os
import shutil
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from scaletrain_cli.data.sources import places
from scaletrain_cli.launch.mirroring import mirror_now
from scaletrain_cli.mirror import object_store, stores
from scaletrain_cli.mirror.checkpoints import list_folders, read_mirrored
from scaletrain_cli.mirror.claims import make_claim, new_claim, own_claim, read_claims
from scaletrain_cli.mirror.history import HistoryWriter, newest_index, restore_history
from scaletrain_cli.mirror.stores import FolderStore, LocalFileError, Throttle, hashed_blocks
from scaletrain_cli.rundir.checkpoints import FileDigest
from scaletrain_cli.rundir.evaluations import steps_to_keep
from scaletrain_cli.rundir.journal import record_event
from scaletrain_cli.rundir.mirror_state import read_mirror_state
from scaletrain_cli.rundir.paths import RunDir
from scaletrain_cli.worker.checkpoint_commit import mark_clean
from tests.data.remote.faults import FaultyProxy
from tests.mirror.conftest import PLACE, MakeMirrored, MirroredRun, at_both_places

_PART = object_store._PART_BYTES


@pytest.fixture
def mirrored(make_mirrored: MakeMirrored, place: str) -> MirroredRun:
    return make_mirrored(place)


@at_both_places
def test_a_checkpoint_is_copied_with_its_manifest_last_and_the_history_before(mirrored: MirroredRun) -> None:
    saved = mirrored.commit(10)
    assert mirrored.mirror().look()
    (folder,) = mirrored.mirrored()
    found = read_mirrored(mirrored.store, folder)
    assert (found.step, found.files, found.world_size) == (10, saved.files, 2)
    for name, digest in saved.files.items():
        content = mirrored.store.read(f"{folder.name}/{name}") or b""
        assert FileDigest(len(content), hashlib.sha256(content).hexdigest()) == digest
    (event,) = mirrored.events("mirrored")
    assert (event["step"], event["bytes"]) == (10, 100_000)
    state = read_mirror_state(mirrored.run)
    assert (state.state, state.step, state.steps, state.lag_seconds(time.time())) == ("current", 10, [10], 0.0)


def test_the_manifest_is_the_last_object_of_a_checkpoint(s3: FaultyProxy, make_mirrored: MakeMirrored) -> None:
    made = make_mirrored()
    made.mirror_of(10)
    order = [request.path.rpartition("/")[2].partition("?")[0] for request in s3.seen if request.method == "PUT"]
    manifest = order.index("manifest.json")
    assert {"rank-00000.safetensors", "rank-00001.safetensors"} <= set(order[:manifest])
    assert any(path.startswith("0001-") for path in order[:manifest]), "the list of the history is before it"


@at_both_places
def test_history_is_restored_as_it_was(mirrored: MirroredRun, tmp_path: Path) -> None:
    (mirrored.run.path / "code").mkdir()
    (mirrored.run.path / "code" / "abc.patch").write_text("a patch")
    mirrored.run.reference.mkdir()
    (mirrored.run.reference / "train").write_bytes(b"log-probabilities of the first weights")
    (mirrored.run.path / "secrets.json").write_text('{"KEY": "hidden"}')
    (mirrored.run.path / "stop").touch()
    mirror = mirrored.mirror_of(10)
    mirrored.commit(20)
    mirror.look()
    index = newest_index(mirrored.store, read_claims(mirrored.store))
    restore_history(mirrored.store, index, tmp_path / "restored")
    restored = {path.relative_to(tmp_path / "restored").as_posix() for path in (tmp_path / "restored").rglob("*.*")}
    assert {"run.json", "events.jsonl", "metrics.jsonl", "code/abc.patch"} <= restored
    assert (tmp_path / "restored" / "reference" / "train").read_bytes().startswith(b"log-prob")
    assert not restored & {"secrets.json", "stop", "mirror.json", "mirror-claim.json"}
    assert (tmp_path / "restored" / "metrics.jsonl").read_bytes() == mirrored.run.metrics.read_bytes()
    events = (tmp_path / "restored" / "events.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in events if json.loads(line)["event"] == "checkpoint"] == [10, 20]


def test_the_mirror_has_a_retention_of_its_own(make_mirrored: MakeMirrored, tmp_path: Path) -> None:
    made = make_mirrored(str(tmp_path / "disk"), "checkpoint.mirror.keep=2", "checkpoint.mirror.keep_every=20")
    mirror = made.mirror()
    for step in (10, 20, 30, 40, 50):
        made.commit(step)
        mirror.look()
        if step > 10:
            made.remove(step - 10)  # local retention is tighter
    assert made.steps() == [20, 40, 50]
    assert all(folder.is_committed for folder in list_folders(made.store))
    lists = [name for name in made.store.list("history") if not name.rpartition("/")[2].startswith(".")]
    assert len(lists) <= 3 + 1


def test_the_only_mirrored_checkpoint_stays_when_none_is_left_here(mirrored: MirroredRun) -> None:
    mirror = mirrored.mirror_of(10)
    mirrored.remove(10)
    mirror.look(is_last=True)
    mirrored.mirror().look(is_last=True)
    assert mirrored.steps() == [10]


def test_fewest_steps_between_copies_and_the_last_one_at_the_end(make_mirrored: MakeMirrored, tmp_path: Path) -> None:
    made = make_mirrored(str(tmp_path / "disk"), "checkpoint.mirror.every=25", "checkpoint.mirror.keep=9")
    mirror = made.mirror_of(10, 20, 30, 40)
    assert made.steps() == [10, 40]
    made.commit(50)
    mirror.look()
    assert made.steps() == [10, 40]
    assert mirror.look(is_last=True)
    assert made.steps() == [10, 40, 50]


def test_a_new_process_stores_only_what_is_missing(s3: FaultyProxy, make_mirrored: MakeMirrored) -> None:
    made = make_mirrored()
    made.commit(10, (_PART + 1000, 5_000, 4_000))
    s3.fault = lambda request: "denied" if request.method == "PUT" and "rank-00002" in request.path else None
    assert not made.mirror().look()
    assert made.steps() == []
    before = len(s3.seen)
    s3.fault = lambda request: None
    assert made.mirror().look()
    sent = [r.path for r in s3.seen[before:] if r.method in ("PUT", "POST") and "rank-" in r.path]
    assert all("rank-00002" in path for path in sent), sent
    assert made.steps() == [10]


def test_another_save_of_the_same_step_replaces_the_first(mirrored: MirroredRun) -> None:
    mirrored.commit(10, seed=1)
    mirror = mirrored.mirror()
    mirror.look()
    for seed in (2, 3):  # their hashes sort in both ways
        saved = mirrored.commit(10, seed=seed)
        mirror.look()
        (folder,) = mirrored.mirrored()
        found = read_mirrored(mirrored.store, folder)
        assert found.files == saved.files


def test_a_checkpoint_that_training_marks_clean_is_clean_in_the_mirror(mirrored: MirroredRun) -> None:
    saved = mirrored.commit(10)
    mirror = mirrored.mirror()
    mirror.look()
    mark_clean(saved, 1)
    assert mirror.has_news()
    mirror.look()
    found = read_mirrored(mirrored.store, mirrored.mirrored()[0])
    assert found.clean


@at_both_places
@pytest.mark.parametrize(
    "event",
    [
        {"event": "rolled-back", "from_step": 25, "to_step": 10, "skip": [11, 12]},
        {"event": "corruption", "step": 25, "clean_step": 14},
    ],
    ids=lambda event: event["event"],
)
def test_checkpoints_that_were_rolled_back_or_corrupt_leave_the_mirror(
    mirrored: MirroredRun, event: dict[str, Any]
) -> None:
    mirror = mirrored.mirror_of(10, 20)
    details = dict(event)
    record_event(mirrored.run, details.pop("event"), **details)
    mirrored.remove(20)
    mirrored.commit(15)
    mirror.look()
    assert mirrored.steps() == [10, 15]


def start_from_scratch(mirrored: MirroredRun) -> None:
    """Lose all checkpoints here, and record what ``resume --from-scratch`` does."""
    for step in mirrored.here():
        mirrored.remove(step)
    record_event(mirrored.run, "from-scratch")


def test_after_a_start_from_scratch_the_mirror_has_new_checkpoints(make_mirrored: MakeMirrored, tmp_path: Path) -> None:
    made = make_mirrored(str(tmp_path / "disk"), "checkpoint.mirror.keep=2")
    mirror = made.mirror_of(4000, 5000)
    start_from_scratch(made)
    mirror = made.mirror()  # the process of the next attempt
    mirror.look()
    assert made.steps() == [4000, 5000], "they stay until a new one is there"
    seen = []
    for step in (100, 200, 300):
        made.commit(step, seed=1)
        mirror.look()
        seen.append(made.steps())
    assert seen == [[100], [100, 200], [200, 300]]
    assert mirror.state.step == 300


def test_a_step_saved_again_after_a_start_from_scratch_is_valid(make_mirrored: MakeMirrored, tmp_path: Path) -> None:
    made = make_mirrored(str(tmp_path / "disk"))
    made.mirror_of(10)
    start_from_scratch(made)
    made.commit(10)  # the same bytes
    mirror = made.mirror()
    mirror.look()
    assert len(made.events("mirrored")) == 2
    made.commit(20)
    mirror.look()
    assert made.steps() == [10, 20]


@pytest.mark.parametrize("setting", ["every=1000", "keep=1"])
def test_the_mirror_follows_a_rollback(make_mirrored: MakeMirrored, tmp_path: Path, setting: str) -> None:
    made = make_mirrored(str(tmp_path / "disk"), f"checkpoint.mirror.{setting}")
    mirror = made.mirror_of(4000, 5000)
    made.commit(3900)
    for step in (4000, 5000):
        made.remove(step)
    record_event(made.run, "rolled-back", from_step=5100, to_step=3900, skip=[1, 2])
    mirror.look()
    assert made.steps() == [3900]
    for step in (4400, 4800):
        made.commit(step, seed=1)
        mirror.look()
    assert made.steps() == ([4800] if setting == "keep=1" else [3900])
    if setting != "keep=1":
        made.commit(5000, seed=1)
        mirror.look()
        assert made.steps() == [3900, 5000]


def test_a_checkpoint_that_is_rolled_back_while_it_is_copied_is_not_valid(mirrored: MirroredRun) -> None:
    mirror = mirrored.mirror_of(10)
    mirrored.commit(20)
    before_commit = mirror._before_commit

    def roll_back() -> None:
        before_commit()
        record_event(mirrored.run, "rolled-back", from_step=25, to_step=10, skip=[11, 12])
        mirrored.remove(20)

    mirror._before_commit = roll_back  # type: ignore[method-assign]
    mirror.look()
    assert mirrored.steps() == [10]
    assert [event["step"] for event in mirrored.events("mirrored")] == [10]


def test_a_damaged_checkpoint_here_is_not_copied_and_the_next_one_is(mirrored: MirroredRun) -> None:
    saved = mirrored.commit(10)
    shard = saved.path / "rank-00000.safetensors"
    content = bytearray(shard.read_bytes())
    content[1000] ^= 1
    shard.write_bytes(content)
    mirror = mirrored.mirror()
    assert not mirror.look()
    assert mirrored.steps() == []
    (event,) = mirrored.events("mirror-failed")
    assert event["code"] == "mirror.local-file-damaged"
    mirrored.commit(20)
    assert mirror.look(is_last=True)
    assert mirrored.steps() == [20]


def test_retention_keeps_the_checkpoint_that_is_copied(mirrored: MirroredRun, monkeypatch: pytest.MonkeyPatch) -> None:
    mirrored.commit(10)
    seen: list[set[int]] = []

    def kept() -> set[int]:
        return steps_to_keep(mirrored.run, mirrored.run.checkpoints, keep_best=None, mirror_to=mirrored.to)

    monkeypatch.setattr("scaletrain_cli.mirror.sync.upload_checkpoint", lambda *_: seen.append(kept()) or 1 / 0)
    with pytest.raises(ZeroDivisionError):
        mirrored.mirror().look()
    assert seen == [{10}]
    assert kept() == set()


def test_no_more_bytes_per_second_than_allowed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = bytes(3 << 20)
    (tmp_path / "file").write_bytes(content)
    digest = FileDigest(len(content), hashlib.sha256(content).hexdigest())
    slept: list[float] = []
    monkeypatch.setattr(stores, "time", SimpleNamespace(monotonic=lambda: sum(slept), sleep=slept.append))
    throttle = Throttle(10 << 20)
    for _ in range(5):
        with (tmp_path / "file").open("rb") as file:
            assert sum(len(block) for block in hashed_blocks(file, tmp_path / "file", digest, throttle)) == 3 << 20
    assert 15 / 10 - stores._BURST_SECONDS <= sum(slept) < 1.51
    assert throttle.sent == 15 << 20
    with (tmp_path / "file").open("rb") as file, pytest.raises(LocalFileError):
        list(hashed_blocks(file, tmp_path / "file", FileDigest(3 << 20, "0" * 64), Throttle(1e12)))


@pytest.mark.long
def test_what_a_large_file_has_in_the_store_is_verified_unread(s3: FaultyProxy, make_mirrored: MakeMirrored) -> None:
    made = make_mirrored()
    made.commit(10, (2 * _PART + 77, 2 * _PART, 100))
    assert made.mirror().look()
    read = [request for request in s3.seen if request.method == "GET" and "rank-" in request.path]
    assert read == []
    assert made.steps() == [10]


@pytest.mark.parametrize("size", [20_000, _PART + 5])
def test_bytes_changed_on_the_way_are_found_and_sent(s3: FaultyProxy, make_mirrored: MakeMirrored, size: int) -> None:
    made, faults = make_mirrored(), iter(["changed-upload"])
    s3.fault = lambda request: next(faults, None) if request.method == "PUT" and "rank-" in request.path else None
    made.commit(10, (size,))
    assert made.mirror().look()
    assert s3.broken == ["changed-upload"]
    assert made.steps() == [10]
    saved, (folder,) = made.run.checkpoints / "step-00000010", made.mirrored()
    name = "rank-00000.safetensors"
    assert made.store.read(f"{folder.name}/{name}") == (saved / name).read_bytes()


def test_a_store_that_always_stores_other_bytes_has_no_checkpoint(s3: FaultyProxy, make_mirrored: MakeMirrored) -> None:
    made = make_mirrored()
    s3.fault = lambda request: "changed-upload" if request.method == "PUT" and "rank-" in request.path else None
    made.commit(10, (20_000,))
    assert not made.mirror().look()
    assert made.steps() == []
    state = read_mirror_state(made.run)
    assert (state.state, state.problem.code) == ("failing", "mirror.wrong-bytes")


def test_a_store_without_md5_is_verified_by_reading(
    s3: FaultyProxy, make_mirrored: MakeMirrored, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(object_store, "_etag", lambda md5s, in_parts: "of another kind")
    made = make_mirrored()
    made.commit(10, (20_000, _PART + 5))
    assert made.mirror().look()
    read = {
        request.path.rpartition("/")[2] for request in s3.seen if request.method == "GET" and "rank-" in request.path
    }
    assert read == {"rank-00000.safetensors", "rank-00001.safetensors"}
    assert made.steps() == [10]


@pytest.mark.parametrize(
    "fault", ["reset", *(pytest.param(each, marks=pytest.mark.long) for each in ("slow-down", "delay"))]
)
def test_faults_that_pass_are_repeated(s3: FaultyProxy, make_mirrored: MakeMirrored, fault: str) -> None:
    made = make_mirrored()
    s3.fault = lambda request: fault if request.number % 3 == 0 else None
    made.commit(10, (20_000, _PART + 5))
    assert made.mirror().look()
    assert fault in s3.broken
    assert made.steps() == [10]
    assert made.events("mirror-failed") == []


@pytest.mark.parametrize(
    ("fault", "code"), [("denied", "remote.denied"), pytest.param("full", "remote.unavailable", marks=pytest.mark.long)]
)
def test_without_rights_or_space_the_run_has_an_event_until_they_are_back(
    s3: FaultyProxy, make_mirrored: MakeMirrored, fault: str, code: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(MirroredRun, "store_seconds", 5.0)
    made = make_mirrored()
    made.commit(10)
    s3.fault = lambda request: fault if request.method == "PUT" else None
    mirror = made.mirror()
    assert not mirror.look()
    assert not mirror.look(is_last=True)
    (event,) = made.events("mirror-failed")
    assert event["code"] == code
    assert code == "remote.denied" or "507, XMinioStorageFull" in event["message"]
    assert "secret-of-the-test" not in (made.run.events.read_text() + (made.run.path / "mirror.json").read_text())
    s3.fault = lambda request: None
    assert mirror.look(is_last=True)
    assert made.steps() == [10]
    assert len(made.events("mirror-recovered")) == 1


def test_a_full_file_system_has_no_checkpoint_until_there_is_space(
    make_mirrored: MakeMirrored, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = make_mirrored(str(tmp_path / "other-disk"))
    mirror = made.mirror_of(10)
    made.commit(20)
    real, folder = os.fsync, str(tmp_path / "other-disk")

    def full(descriptor: int) -> None:  # as a network file system, which says it here
        name = os.readlink(f"/proc/self/fd/{descriptor}")
        if name.startswith(folder) and "safetensors" in name:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", full)
    assert not mirror.look()
    (event,) = made.events("mirror-failed")
    assert "No space left" in event["message"]
    assert made.steps() == [10]
    monkeypatch.setattr(os, "fsync", real)
    assert mirror.look(is_last=True)
    assert made.steps() == [10, 20]


def test_a_pause_follows_each_failure(make_mirrored: MakeMirrored, tmp_path: Path) -> None:
    (tmp_path / "a-file").write_text("in the way")
    made = make_mirrored(str(tmp_path / "a-file"))
    made.commit(10)
    mirror = made.mirror()
    assert mirror.has_news()
    assert not mirror.look()
    assert not mirror.has_news()


def test_the_verb_uses_the_store_that_the_env_of_the_spec_names(
    s3: FaultyProxy, make_mirrored: MakeMirrored, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setenv(places.TIMEOUT, "1")
    made = make_mirrored(PLACE)
    made.commit(10)
    spec = made.record.spec.model_copy(update={"env": {"AWS_ENDPOINT_URL": s3.url}})
    assert mirror_now(made.run, replace(made.record, spec=spec)).steps == [10]


def test_files_that_only_their_owner_may_read_are_private_in_the_mirror_and_back(tmp_path: Path) -> None:
    run, store = RunDir(tmp_path / "run"), FolderStore(tmp_path / "mirror")
    modes = {"run.json": 0o640, "code/0123.tar.gz": 0o600, "code/0123.sha256": 0o640}
    for name, mode in modes.items():
        path = run.path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
        path.chmod(mode)
    HistoryWriter(store, run, 1, Throttle(1e12)).write()
    blobs = {path.read_text(): path.stat().st_mode & 0o777 for path in (tmp_path / "mirror" / "blobs").iterdir()}
    index = newest_index(store, [])
    restore_history(store, index, tmp_path / "back")
    restored = {name: (tmp_path / "back" / name).stat().st_mode & 0o777 for name in modes}
    assert blobs == restored == modes


@pytest.mark.parametrize("missing", ["all", "the newest claim"])
def test_a_mirror_that_does_not_show_the_claim_of_its_owner_for_a_moment_does_not_end_the_run(
    missing: str, make_mirrored: MakeMirrored, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mirrored = make_mirrored(str(tmp_path / "disk"))
    mirrored.mirror_of(10)
    assert make_claim(mirrored.store, mirrored.run, own := new_claim(mirrored.run, 2, from_step=10))
    mirror = mirrored.mirror()
    mirror.look()
    if missing == "all":  # the disk is not mounted
        (tmp_path / "disk").rename(tmp_path / "elsewhere")
        mirror._require_claim()
        shutil.rmtree(tmp_path / "disk")
        (tmp_path / "elsewhere").rename(tmp_path / "disk")
    else:
        with monkeypatch.context() as earlier:
            earlier.setattr(FolderStore, "list", lambda self, folder: {"claims/0001.json": stores.Stored(1)})
            mirror._require_claim()
    mirror._require_claim()
    assert (mirror.is_superseded, mirrored.run.is_cancelled) == (False, False)
    assert read_claims(mirrored.store)[-1] == own_claim(mirrored.run) == own


def test_a_disk_that_is_mounted_again_gets_all_that_was_written_below_its_mount_point(
    make_mirrored: MakeMirrored, tmp_path: Path
) -> None:
    disk, away = tmp_path / "disk", tmp_path / "away"
    mirrored = make_mirrored(str(disk))
    mirror = mirrored.mirror_of(10)
    disk.rename(away)  # as by umount
    mirrored.commit(20)
    while not mirror.look(is_last=True):  # the first try finds another volume
        assert mirror.state.problem.code == "mirror.other-volume"
    assert mirrored.steps() == [20], "below the mount point"
    shutil.rmtree(disk)  # as by mount, which hides it
    away.rename(disk)
    while not mirror.look(is_last=True):  # the first try finds another volume
        assert mirror.state.problem.code == "mirror.other-volume"
    assert mirrored.steps() == [10, 20]
    index = newest_index(mirrored.store, read_claims(mirrored.store))
    restore_history(mirrored.store, index, tmp_path / "restored")
    assert (tmp_path / "restored" / "metrics.jsonl").read_bytes() == mirrored.run.metrics.read_bytes()
    assert len(mirrored.events("mirror-failed")) == len(mirrored.events("mirror-recovered")) == 2
