"""Remote files against a real S3 server: listing, ranges, streams, faults, and one clear error for each cause."""

import gzip
import http.server
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from scaletrain_cli.data.sources import places, stores
from scaletrain_cli.data.sources.formats import reader_of
from scaletrain_cli.data.sources.places import RemoteFile, UnavailableError, list_files, read_range
from scaletrain_cli.data.sources.records import BadRecord, Part, SourceFile
from scaletrain_cli.data.sources.stores import PlaceError
from tests.data.remote.conftest import BUCKET, post, signed
from tests.data.remote.faults import FaultyProxy, Request

ROOT = f"s3://{BUCKET}"
CONTENT = bytes(range(256)) * 8192  # 2 MiB


def put(key: str, content: bytes = b"x") -> RemoteFile:
    places.write_file(f"{ROOT}/{key}", content)
    return places.find_file(f"{ROOT}/{key}")


def names(path: str) -> list[str]:
    return [file.path.removeprefix(f"{ROOT}/") for file in list_files(f"{ROOT}/{path}")]


def test_an_object_a_folder_and_globs_are_listed_in_the_order_of_their_keys(s3: FaultyProxy) -> None:
    for key in ("web/b.jsonl", "web/a.jsonl", "web/deep/c.jsonl", "web/deep/er/d e+ü.txt", "webby/z.jsonl", "top.txt"):
        put(key, key.encode())
    assert names("web/a.jsonl") == ["web/a.jsonl"]
    everything = ["web/a.jsonl", "web/b.jsonl", "web/deep/c.jsonl", "web/deep/er/d e+ü.txt"]
    assert names("web") == names("web/") == everything
    assert names("web/*.jsonl") == ["web/a.jsonl", "web/b.jsonl"]
    assert names("web/**/*.jsonl") == ["web/a.jsonl", "web/b.jsonl", "web/deep/c.jsonl"]
    assert names("we*/?.jsonl") == ["web/a.jsonl", "web/b.jsonl", "webby/z.jsonl"]
    assert names("web/[b-z].jsonl") == ["web/b.jsonl"]
    assert names("*.txt") == ["top.txt"]
    assert len(names("")) == 6
    (found,) = list_files(f"{ROOT}/web/deep/er/*")
    assert read_range(found, 0, found.size) == b"web/deep/er/d e+\xc3\xbc.txt"


def test_ranges_and_streams_return_the_bytes_of_the_object(s3: FaultyProxy) -> None:
    file = put("bytes", CONTENT)
    assert file.size == len(CONTENT)
    for start, stop in ((0, 1), (5, 5), (1_000_000, 1_000_777), (file.size - 3, file.size)):
        assert read_range(file, start, stop) == CONTENT[start:stop]
    stream = places.RemoteStream(file)
    assert stream.read(10) == CONTENT[:10]
    assert stream.seek(-4, 2) == file.size - 4
    assert stream.read() == CONTENT[-4:]
    assert stream.read() == b""
    before = len(s3.seen)
    stream.seek(0)
    assert b"".join(iter(lambda: stream.read(1 << 16), b"")) == CONTENT
    assert len(s3.seen) - before < 6, "a stream reads ahead"


@pytest.mark.parametrize("fault", ["slow-down", "reset", "short", "delay"])
def test_requests_are_repeated_after_a_fault_that_passes(s3: FaultyProxy, fault: str) -> None:
    file = put("bytes", CONTENT)
    first = len(s3.seen)
    s3.fault = lambda request: fault if request.number in (first + 1, first + 2, first + 4) else None
    assert read_range(file, 100, 900_000) == CONTENT[100:900_000]
    assert list_files(ROOT) == (file,)
    assert s3.broken.count(fault) >= 2


@pytest.mark.parametrize("fault", ["slow-down", "reset"])
def test_a_store_that_does_not_recover_is_named_after_the_deadline(
    s3: FaultyProxy, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = put("bytes", CONTENT)
    monkeypatch.setenv(places.TIMEOUT, "2")  # at load a request takes half a second
    s3.fault = lambda request: fault
    with pytest.raises(UnavailableError) as caught:
        read_range(file, 0, 1000)
    assert f"{ROOT}/bytes could not be accessed within" in str(caught.value)
    assert ("SlowDown" in str(caught.value)) == (fault == "slow-down")
    assert caught.value.reason.params["tries"] >= 2
    _says_nothing_secret(caught.value)


def _says_nothing_secret(error: Exception) -> None:
    text = str(error)
    assert "of-the-test" not in text
    assert "\n" not in text
    assert "Debug" not in text


def _code(path: str) -> str:
    with pytest.raises(PlaceError) as caught:
        list_files(path)
    _says_nothing_secret(caught.value)
    assert caught.value.exit_code == 2
    return caught.value.reason.code


def test_every_cause_has_an_error_of_its_own(s3: FaultyProxy, s3_server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    put("web/a.jsonl")
    assert _code(f"{ROOT}/web/none.jsonl") == "remote.not-found"
    assert _code(f"{ROOT}/web/*.parquet") == "remote.nothing-found"
    assert _code("s3://no-such-bucket/web/") == "remote.no-bucket"
    assert _code("s3:///web") == "remote.no-bucket-named"
    assert _code("https://host.invalid/a/*.jsonl") == "remote.no-listing"
    assert _code("https://user:password@host.invalid/a.jsonl") == "remote.credentials-in-path"
    assert _code("https://host.invalid/a.jsonl?X-Amz-Signature=abc") == "remote.query-in-path"
    assert _code("http://host.invalid/a.jsonl") == "remote.plain-http"
    s3.fault = lambda request: "denied"
    assert _code(f"{ROOT}/web/a.jsonl") == _code(f"{ROOT}/web/*") == "remote.denied"
    s3.fault = lambda request: None
    post(f"{s3_server}/moto-api/reset-auth", b"0")  # from here on the server compares keys and signatures
    try:
        assert _code(f"{ROOT}/web/*") == "remote.denied"
    finally:
        post(f"{s3_server}/moto-api/reset-auth", b"inf")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    stores._store.cache_clear()
    assert _code(f"{ROOT}/web/a.jsonl") == "remote.no-credentials"
    monkeypatch.setenv("AWS_PROFILE", "team")
    assert _code(f"{ROOT}/web/a.jsonl") == "remote.profile-without-keys"
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://ada:password@192.0.2.1:9000")
    with pytest.raises(places.PlaceError, match=r"read from http://192\.0\.2\.1:9000 without encryption"):
        places.find_file(f"{ROOT}/web/a.jsonl")


def test_keys_of_a_profile_and_public_buckets_are_used(
    s3: FaultyProxy, s3_server: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = put("a.jsonl")
    signed(f"{s3_server}/{BUCKET}/a.jsonl?acl", {"x-amz-acl": "public-read"})
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    (tmp_path / "no-aws").write_text("[team]\naws_access_key_id=AKIA1\naws_secret_access_key=b\n")
    monkeypatch.setenv("AWS_PROFILE", "team")
    stores._store.cache_clear()
    assert list_files(file.path) == (file,)
    monkeypatch.delenv("AWS_PROFILE")
    monkeypatch.setenv("AWS_SKIP_SIGNATURE", "true")
    stores._store.cache_clear()
    assert list_files(file.path) == (file,)


def test_an_object_that_is_replaced_while_it_is_read_is_an_error(s3: FaultyProxy) -> None:
    file = put("web/a.jsonl", b"a" * 1000)
    assert read_range(file, 0, 4) == b"aaaa"
    put("web/a.jsonl", b"b" * 1000)
    with pytest.raises(PlaceError, match="was replaced since it was listed"):
        read_range(file, 4, 8)


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def web_server(tmp_path: Path) -> Iterator[str]:
    folder = tmp_path / "web"
    folder.mkdir()
    with http.server.ThreadingHTTPServer(
        ("127.0.0.1", 0), lambda *given: _Quiet(*given, directory=str(folder))
    ) as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_one_file_of_a_web_server_is_found_and_a_server_without_ranges_is_named(
    s3: FaultyProxy, s3_server: str, web_server: str, tmp_path: Path
) -> None:
    (tmp_path / "web" / "a.txt").write_bytes(CONTENT)
    (found,) = list_files(f"{web_server}/a.txt")
    assert found.size == len(CONTENT)
    assert found.etag, "the time of the last change stands for an ETag"
    with pytest.raises(PlaceError, match="cannot send a part"):
        read_range(found, 5, 10)
    assert _code(f"{web_server}/b.txt") == "remote.not-found"


TEXTS = [f"document {number} " + "word é " * (number % 30) for number in range(1000)]


@pytest.mark.parametrize("suffix", ["jsonl", "jsonl.gz", "jsonl.zst", "parquet", "arrow"])
def test_every_format_is_read_from_a_bucket_as_from_a_disk(s3: FaultyProxy, tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"a.{suffix}"
    rows = "".join(json.dumps({"text": text}) + "\n" for text in TEXTS).encode()
    table = pa.table({"text": TEXTS})
    if suffix == "parquet":
        pq.write_table(table, path, row_group_size=300)
    elif suffix == "arrow":
        with pa.ipc.new_stream(path, table.schema) as writer:
            writer.write_table(table, 300)
    else:
        packed = {"jsonl": bytes, "jsonl.gz": gzip.compress, "jsonl.zst": zstandard.ZstdCompressor().compress}
        path.write_bytes(packed[suffix](rows))
    kind, _, compression = suffix.partition(".")
    places.write_file(f"{ROOT}/data/a.{suffix}", path)
    (found,) = list_files(f"{ROOT}/data")
    file = SourceFile(found.path, found.size, kind, compression, etag=found.etag)
    reads = [0]

    def every_third(request: Request) -> str | None:
        reads[0] += bool(request.range)
        return "short" if request.range and reads[0] % 3 == 1 else None

    s3.fault = every_third
    reader = reader_of(file)
    records = [
        record for start, stop in reader.parts(file, 20_000) for record in reader.records(Part(file, start, stop))
    ]
    assert not [record for record in records if isinstance(record, BadRecord)]
    assert [record.text for record in records] == TEXTS  # type: ignore[union-attr]
    assert s3.broken
