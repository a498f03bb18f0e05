"""Pods without a shared volume: what they write to and read from the run directory in pod 0, and what they may not."""

import errno
import os
import socket
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from scaletrain_cli.launch.backends.kubernetes.run_server import RunServer
from scaletrain_cli.launch.backends.kubernetes.run_sync import RunSync
from scaletrain_cli.launch.node.record import NodeRecord, announce, is_announced, read_node_records, write_node_record
from scaletrain_cli.rundir.checkpoints import Checkpoint, read_checkpoint, verify
from scaletrain_cli.rundir.journal import read_events, record_event
from scaletrain_cli.rundir.paths import RunDir
from scaletrain_cli.worker.checkpoint_commit import (
    HashingWriter,
    SupersededAttemptError,
    commit_checkpoint,
    open_attempt,
    stage_checkpoint,
    staging_path,
)
from scaletrain_cli.worker.failures import Failure, read_failures, write_failure
from scaletrain_cli.worker.remote_run import PodZeroLostError, RemoteRun
from tests.ports import reserved_port

KEY = b"of this gang"
LARGE = [memoryview(bytes(64 << 20))]  # more than the kernel takes while nobody reads


@dataclass(frozen=True)
class TwoPods:
    """The run directory of pod 0, which is served, and that of pod 1, which has another path."""

    first: RunDir
    second: RunDir
    server: RunServer
    remote: RemoteRun

    def sync(self) -> RunSync:
        return RunSync(self.remote, 1)


@pytest.fixture
def pods(tmp_path: Path) -> Iterator[TwoPods]:
    first, second = RunDir(tmp_path / "0/run"), RunDir(tmp_path / "1/run")
    for number in (1, 2):
        (first.attempt(number) / "nodes").mkdir(parents=True)
    (first.attempt(1) / "attempt.json").write_text("{}")
    second.path.mkdir(parents=True)
    open_attempt(first.checkpoints, 1)
    with RunServer(first, 0, KEY) as server:
        yield TwoPods(first, second, server, RemoteRun(second, "127.0.0.1", server.port, 1, KEY))


def test_rank_0_commits_what_a_rank_of_another_pod_has_sent_and_each_part_can_be_read(pods: TwoPods) -> None:
    content = os.urandom(3_000_000)
    here, there = staging_path(pods.second.checkpoints, 1, 5), stage_checkpoint(pods.first.checkpoints, 1, 5)
    own = HashingWriter(there / "rank-00000.safetensors")
    own.write(b"of rank 0")
    parts = [memoryview(content)[:1_000_001], memoryview(content)[1_000_001:]]
    sent = pods.remote.store(here / "rank-00001.safetensors", parts)
    files = {"rank-00000.safetensors": own.close(), "rank-00001.safetensors": sent}
    commit_checkpoint(pods.first.checkpoints, 5, files, world_size=2, clean=False, attempt=1)
    found = read_checkpoint(pods.first.checkpoints / "step-00000005")
    assert isinstance(found, Checkpoint)
    assert verify(found) == []
    with pods.remote.open(pods.second.checkpoints / "step-00000005/rank-00001.safetensors") as file:
        assert file.read(8) == content[:8]
        file.seek(-2_000_000, os.SEEK_END)
        buffer = bytearray(1_500_000)
        assert file.readinto(buffer) == len(buffer)
        assert buffer == content[-2_000_000:-500_000]
        assert file.read() == content[-500_000:]
    assert {path.name for path in found.path.iterdir()} == {"manifest.json", *files}
    assert not pods.second.checkpoints.exists()


def test_a_pod_of_an_attempt_that_is_over_writes_no_file_of_a_checkpoint(pods: TwoPods) -> None:
    open_attempt(pods.first.checkpoints, 2)
    with pytest.raises(SupersededAttemptError, match="attempt 1"):
        pods.remote.store(staging_path(pods.second.checkpoints, 1, 5) / "rank-00001.safetensors", LARGE)
    assert not (pods.first.checkpoints / "attempt-0001.tmp").exists()


def test_a_full_disk_of_pod_0_is_one_of_the_rank_that_saves(pods: TwoPods, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(f"{RunServer.__module__}.HashingWriter.write", full)
    with pytest.raises(OSError, match="No space left") as raised:
        pods.remote.store(staging_path(pods.second.checkpoints, 1, 5) / "rank-00001.safetensors", LARGE)
    assert raised.value.errno == errno.ENOSPC
    assert [path.name for path in (pods.first.checkpoints / "attempt-0001.tmp").rglob("*")] == ["step-00000005"]


def test_requests_without_the_key_of_the_gang_are_refused(pods: TwoPods) -> None:
    stranger = replace(pods.remote, key=b"of another gang")
    for ask in (
        lambda: stranger.read(pods.second.attempt(1) / "attempt.json"),
        lambda: stranger.listing(1),
        lambda: stranger.replace(pods.second.attempt(1) / "failed", b""),
        lambda: stranger.store(staging_path(pods.second.checkpoints, 1, 5) / "rank-00001.safetensors", []),
    ):
        with pytest.raises(OSError, match="403"):
            ask()
    assert {path.name for path in pods.first.attempt(1).iterdir()} == {"nodes", "attempt.json"}


@pytest.mark.parametrize(
    "name",
    [
        *("secrets.json", "run.json", "../other/events.jsonl", "attempts/0001/../../run.json", "attempts/0001/.lock"),
        "metrics.jsonl",
        *("checkpoints/step-00000005/../../run.json", "checkpoints/attempt-0001.tmp/../x", "code/code.tar.gz"),
    ],
)
def test_other_files_of_the_run_are_neither_served_nor_written(pods: TwoPods, name: str) -> None:
    for path in (pods.first.secrets, pods.first.record, pods.first.attempt(1) / ".lock"):
        path.write_text("secret")
    place = Path(f"{pods.second.path}/{name}")
    with pytest.raises(OSError, match="not served"):
        pods.remote.read(place)
    with pytest.raises(OSError, match="not served"):
        pods.remote.replace(place, b"changed")
    assert pods.first.record.read_text() == "secret"


def test_pod_0_alone_writes_its_decisions_and_events_are_appended(pods: TwoPods) -> None:
    for path in (pods.second.attempt(1) / "attempt.json", pods.second.events):
        with pytest.raises(OSError, match="not served"):
            pods.remote.replace(path, b"{}")


def test_a_read_that_is_cut_is_repeated_and_one_that_nobody_answers_ends(pods: TwoPods) -> None:
    stored = pods.first.checkpoints / "step-00000005/rank-00000.safetensors"
    stored.parent.mkdir()
    stored.write_bytes(content := os.urandom(200_000))
    file = replace(pods.remote, pauses=(0.0,)).open(pods.second.checkpoints / "step-00000005/rank-00000.safetensors")
    assert file.read(1) == content[:1]
    file.raw._connection.sock.shutdown(socket.SHUT_RDWR)  # type: ignore[attr-defined]
    assert file.read() == content[1:]
    gone = replace(pods.remote, port=reserved_port(), pauses=(0.0, 0.0))
    with pytest.raises(PodZeroLostError, match="does not answer"):
        gone.listing(1)


def test_records_and_marks_are_the_same_in_both_pods(pods: TwoPods) -> None:
    record_event(pods.first, "started")
    write_node_record(pods.first, 1, NodeRecord("node-0000-a", "a", 0, 1, 1, 1.0))
    (pods.first.attempt(1) / "attempt.json").write_text('{"number": 1}')
    with pods.sync() as sync:
        assert read_events(pods.second)[0]["event"] == "started"
        assert [node.name for node in read_node_records(pods.second, 1)] == ["a"]
        assert (pods.second.checkpoints / "attempt-0001.tmp").is_dir(), "as in pod 0"
        write_node_record(pods.second, 1, NodeRecord("node-0001-b", "b", 1, 1, 1, 1.0))
        write_failure(pods.second, 1, "rank-00001", Failure(1, "crash", "it failed", 1, "b"))
        record_event(pods.second, "signal", node="b")
        announce(pods.second, 1, "failed")
        announce(pods.first, 1, "hung")
        pods.first.stop_file.touch()
        sync._exchange()
        assert is_announced(pods.first, 1, "failed")
        assert is_announced(pods.second, 1, "hung")
        assert pods.second.is_cancelled
    assert [node.name for node in read_node_records(pods.first, 1)] == ["a", "b"]
    assert [failure.message for failure in read_failures(pods.first, 1)] == ["it failed"]
    assert [event["event"] for event in read_events(pods.first)] == ["started", "signal"]


def test_a_record_that_did_not_fit_on_the_disk_of_pod_0_is_sent_again(
    pods: TwoPods, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with pods.sync() as sync:
        with monkeypatch.context() as patch:
            patch.setattr(f"{RunServer.__module__}.replace_file", full)
            write_node_record(pods.second, 1, NodeRecord("node-0001-b", "b", 1, 1, 1, 1.0))
            sync._exchange()
            assert read_node_records(pods.first, 1) == []
        sync._exchange()
        assert [node.name for node in read_node_records(pods.first, 1)] == ["b"]


def test_what_came_before_the_end_of_a_node_is_there_when_pod_0_sees_it(
    pods: TwoPods, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A failure that is written while the records are sent must not come after the end of its node."""
    seen = []

    def spy(remote: RemoteRun, path: Path, content: bytes) -> None:
        if path.parent.name == "nodes" and b'"ended": 2.0' in content:
            seen.append([failure.message for failure in read_failures(pods.first, 1)])
        original(remote, path, content)

    original = RemoteRun.replace
    monkeypatch.setattr(RemoteRun, "replace", spy)
    with pods.sync() as sync:
        before = sync._paths

        def written_meanwhile(*patterns: str) -> Iterator[Path]:
            if patterns[0] == "*":  # the records of nodes have been read
                write_failure(pods.second, 1, "rank-00001", Failure(1, "crash", "it failed", 1, "b"))
                write_node_record(pods.second, 1, NodeRecord("node-0001-b", "b", 1, 1, 1, 1.0, ended=2.0))
            return before(*patterns)

        sync._paths = written_meanwhile  # type: ignore[method-assign]
        sync._exchange()
    assert seen[0] == ["it failed"]


def test_lines_whose_answer_was_lost_are_appended_once(pods: TwoPods) -> None:
    event = b'{"time": 1, "event": "signal"}\n'
    for content in (event, event + event):  # the answer to the first request was lost, and another event followed
        pods.remote.append(pods.second.events, 0, content)
    assert [event["event"] for event in read_events(pods.first)] == ["signal", "signal"]
    series = pods.second.attempt(1) / "telemetry/node-0001-b.jsonl.gz"
    for offset, content in ((0, b"\x1f\x8b"), (2, b"\x00\n"), (2, b"\x00\n")):
        pods.remote.append(series, offset, content)
    assert (pods.first.attempt(1) / "telemetry/node-0001-b.jsonl.gz").read_bytes() == b"\x1f\x8b\x00\n"


def test_pod_0_stays_until_the_others_have_read_its_decision(pods: TwoPods) -> None:
    decision = pods.first.attempt(2) / "attempt.json"
    decision.write_text('{"decision": null}')
    assert not pods.server.wait_for_readers("attempt.json", [1], 0.0)
    pods.remote.read(pods.second.attempt(2) / "attempt.json")
    assert pods.server.wait_for_readers("attempt.json", [1], 60.0)
    decision.write_text('{"decision": "to stop"}')
    assert not pods.server.wait_for_readers("attempt.json", [1], 0.0)
    assert not pods.server.wait_for_readers("attempt.json", [1, 2], 0.0)
