"""Prepared data at an S3 server: the same tokens as here, through a bounded cache, whatever the network does."""

import hashlib
import json
import os
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest

from scaletrain_cli.data import remote_datasets
from scaletrain_cli.data.block_cache import BLOCK_BYTES, BlockCache
from scaletrain_cli.data.chunk_hashes import CHUNK_BYTES, CorruptDataError, hashes_path
from scaletrain_cli.data.pipeline.shards import SCHEMA, Encoded, read_shard_info, seal_of, shard_folder, write_shard
from scaletrain_cli.data.prepared import find_prepared, prepare_data
from scaletrain_cli.data.remote_datasets import attach_dataset, find_description, is_attached, upload_dataset
from scaletrain_cli.data.sources import places
from scaletrain_cli.data.sources.places import UnavailableError
from scaletrain_cli.data.sources.stores import PlaceError
from scaletrain_cli.data.token_files import Split, open_source
from scaletrain_cli.errors import UsageError
from scaletrain_cli.spec import DataSpec
from tests.data.remote.conftest import BUCKET
from tests.data.remote.faults import FaultyProxy, Request
from tests.data.remote.measuring import measured_folder

ROOT = f"s3://{BUCKET}/runs"
_DOCUMENT_TOKENS = 30_000
_RANKS = 3


@pytest.fixture(scope="session")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a dataset of random tokens in three shards of about 1.5 MB."""
    folder = tmp_path_factory.mktemp("prepared") / "c0ffee"
    draw = np.random.default_rng(7)
    shards = []
    for number in range(3):
        documents = [
            Encoded(f"{number} {each}".encode(), draw.integers(0, 60_000, _DOCUMENT_TOKENS).astype("uint16"), None)
            for each in range(25)
        ]
        write_shard(shard_folder(folder, number), documents, 0.1)
        info = read_shard_info(shard_folder(folder, number))
        shards.append(asdict(info))
    (folder / "tokenizer.json").write_text("{}")
    tokenizer = {"dtype": "uint16", "digest": hashlib.sha256(b"{}").hexdigest()}
    document: dict[str, object] = {"schema": SCHEMA, "tokenizer": tokenizer, "shards": shards}
    (folder / "dataset.json").write_text(json.dumps(document | {"seal": seal_of(document)}))
    return folder


@pytest.fixture
def attached(s3: FaultyProxy, prepared: Path, tmp_path: Path) -> Path:
    return attach(upload_dataset(prepared, ROOT), tmp_path / "datasets")


def attach(path: str, datasets: Path) -> Path:
    description = find_description(path)
    assert not is_attached(description, datasets / "elsewhere")
    found = attach_dataset(description, datasets)
    assert is_attached(description, datasets)
    return found


def opened(dataset: Path, cache: BlockCache | None = None) -> dict[str, Split]:
    return open_source(dataset, cache=cache)[1]


def test_remote_data_have_the_tokens_of_local_data_in_any_range(
    s3: FaultyProxy, prepared: Path, attached: Path, tmp_path: Path
) -> None:
    assert attached != prepared
    assert (attached / "tokenizer.json").read_text() == "{}"
    assert not list(attached.rglob("*.bin")), "the tokens stay remote"
    assert attach(f"{ROOT}/c0ffee/", tmp_path / "datasets") == attached
    here, there = opened(prepared), opened(attached, BlockCache(tmp_path / "cache", 1 << 30))
    faults = random.Random(3)
    kinds = ["slow-down", "reset", "short", "changed", None, None, None, None]
    s3.fault = lambda request: faults.choice(kinds) if request.range else None
    draw = random.Random(5)
    for split in ("train", "validation"):
        expected, found = here[split].tokens, there[split].tokens
        assert len(expected) == len(found) > 0
        for _ in range(40):
            start = draw.randrange(len(expected))
            stop = min(len(expected), start + draw.choice([1, 4097, 700_000]))
            assert (expected.read(start, stop) == found.read(start, stop)).all()
        ends = here[split].ends_between(0, len(expected))
        assert (ends == there[split].ends_between(0, len(expected))).all()
    assert {"slow-down", "reset", "short", "changed"} <= set(s3.broken)


def test_what_is_attached_is_what_was_uploaded(s3: FaultyProxy, prepared: Path, tmp_path: Path) -> None:
    path = upload_dataset(prepared, ROOT)
    seen = Counter[str]()

    def change_first_reads(request: Request) -> str | None:
        if not request.range:
            return None
        seen[request.path] += 1
        return "changed" if seen[request.path] < 3 else None

    s3.fault = change_first_reads
    found = attach(path, tmp_path / "datasets")
    names = ["tokenizer.json", "dataset.json", *(f"{n:06d}/{hashes_path(Path('train.bin'))}" for n in range(3))]
    assert all((found / name).read_bytes() == (prepared / name).read_bytes() for name in names)
    assert s3.broken
    s3.fault = lambda request: "changed" if request.path.endswith("tokenizer.json") else None
    with pytest.raises(PlaceError, match=r"tokenizer\.json is not what was uploaded, in each of 4 reads"):
        attach(path, tmp_path / "others")
    assert not list((tmp_path / "others").glob("*"))


_READER = """
import random, sys
from pathlib import Path
from scaletrain_cli.data.block_cache import BlockCache
from scaletrain_cli.data.token_files import open_source
prepared, attached, cache, size, reads, seed = sys.argv[1:]
here = open_source(Path(prepared))[1]["train"].tokens
there = open_source(Path(attached), cache=BlockCache(Path(cache), int(size)))[1]["train"].tokens
draw = random.Random(int(seed))
for _ in range(int(reads)):
    start = draw.randrange(len(here) - 4097)
    assert (here.read(start, start + 4097) == there.read(start, start + 4097)).all()
"""


def _read_by_threads(prepared: Path, attached: Path, cache: Path, size: int, reads: int) -> None:
    def read(seed: int) -> None:
        words = ["reader", str(prepared), str(attached), str(cache), str(size), str(reads), str(seed)]
        exec(_READER.replace("sys.argv", repr(words)), {})

    with ThreadPoolExecutor(_RANKS) as pool:
        list(pool.map(read, range(_RANKS)))


def _read_by_processes(prepared: Path, attached: Path, cache: Path, size: int, reads: int) -> None:
    words = [sys.executable, "-c", _READER, str(prepared), str(attached), str(cache), str(size), str(reads)]
    environment = os.environ | {"PYTHONPATH": os.getcwd(), "OMP_NUM_THREADS": "1"}
    readers = [subprocess.Popen([*words, str(seed)], env=environment) for seed in range(_RANKS)]
    assert [reader.wait() for reader in readers] == [0] * _RANKS


def _bytes_in(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


@pytest.mark.parametrize(
    ("read", "reads"), [(_read_by_threads, 40), pytest.param(_read_by_processes, 200, marks=pytest.mark.long)]
)
def test_ranks_of_a_node_never_exceed_the_limit_of_their_cache(
    s3: FaultyProxy, prepared: Path, attached: Path, tmp_path: Path, read: Callable[..., None], reads: int
) -> None:
    cache, limit = tmp_path / "cache", 4 * BLOCK_BYTES
    with measured_folder(cache / "blocks") as inside:
        read(prepared, attached, cache, limit, reads)
    assert limit // 2 < inside.most <= limit
    assert inside.times > 10
    before = len(s3.seen)
    read(prepared, attached, tmp_path / "larger", 100 * BLOCK_BYTES, reads)
    fetched = [(request.path, request.range) for request in s3.seen[before:] if request.range]
    assert len(fetched) == len(set(fetched)) <= 10, "each block is fetched once, by one of the ranks"


def test_the_blocks_that_were_not_used_for_longest_are_removed(tmp_path: Path) -> None:
    cache = BlockCache(tmp_path / "cache", 1000)
    fetched: list[str] = []

    def get(name: str) -> None:
        def fetch() -> bytes:
            fetched.append(name)
            return name.encode() * 200

        assert cache.read(name, 1, 4, fetch) == (name * 4)[1:4].encode()

    def age(name: str, seconds: float) -> None:
        then = time.time() - seconds
        os.utime(cache._path(name), (then, then))

    for number, name in enumerate("abcd"):
        get(name)
        age(name, 1000 - number)
    get("a")  # is now the one that was used last
    get("e")
    get("f")
    assert fetched == list("abcdef")
    assert [name for name in "abcdef" if cache._path(name).exists()] == ["a", "d", "e", "f"], "90 % are kept"
    assert _bytes_in(cache.folder / "blocks") <= 1000


def test_what_a_killed_process_was_writing_is_counted_and_removed(tmp_path: Path) -> None:
    cache = BlockCache(tmp_path / "cache", 1000)
    cache.read("a", 0, 1, lambda: b"a" * 600)
    (cache._path("a").parent / ".x.tmp").write_bytes(b"x" * 300)
    (cache.folder / "total").unlink()
    cache.read("b", 0, 1, lambda: b"b" * 400)
    assert _bytes_in(cache.folder / "blocks") == 1000
    assert cache.read("large", 5, 9, lambda: b"0123456789" * 200) == b"5678"
    assert not cache._path("large").exists(), "a block larger than the cache is not kept"


def test_a_cache_that_cannot_be_written_costs_requests_and_no_run(
    s3: FaultyProxy, prepared: Path, attached: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, content: bytes) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("scaletrain_cli.data.block_cache._write", full)
    there = opened(attached, BlockCache(tmp_path / "cache", 1 << 30))["train"].tokens
    assert (there.read(0, 5000) == opened(prepared)["train"].tokens.read(0, 5000)).all()


def _block_of_first_shard(request: Request) -> bool:
    return bool(request.range) and request.path.endswith("000000/train.bin")


def test_changed_bytes_are_read_again_and_then_named(
    s3: FaultyProxy, prepared: Path, attached: Path, tmp_path: Path
) -> None:
    s3.fault = lambda request: "changed" if _block_of_first_shard(request) and len(s3.broken) < 3 else None
    there = opened(attached, BlockCache(tmp_path / "cache", 1 << 30))["train"].tokens
    assert (there.read(0, 100) == opened(prepared)["train"].tokens.read(0, 100)).all()
    s3.fault = lambda request: "changed" if _block_of_first_shard(request) else None
    there = opened(attached, BlockCache(tmp_path / "empty", 1 << 30))["train"].tokens
    with pytest.raises(CorruptDataError) as caught:
        there.read(0, 100)
    assert caught.value.evidence["file"] == f"{ROOT}/c0ffee/000000/train.bin"
    chunk = BLOCK_BYTES // 2 // CHUNK_BYTES
    first, last = chunk * CHUNK_BYTES, (chunk + 1) * CHUNK_BYTES
    assert f"chunk {chunk} (bytes {first} to {last})" in str(caught.value)
    assert "in each of 4 reads" in str(caught.value)
    assert caught.value.evidence["first_byte"] == first


def test_a_damaged_block_in_the_cache_is_fetched_again(
    s3: FaultyProxy, prepared: Path, attached: Path, tmp_path: Path
) -> None:
    cache = BlockCache(tmp_path / "cache", 1 << 30)
    expected = opened(prepared)["train"].tokens.read(0, 100)
    assert (opened(attached, cache)["train"].tokens.read(0, 100) == expected).all()
    (block,) = [path for path in (cache.folder / "blocks").rglob("*") if path.is_file()]
    for damaged in (b"\0" * BLOCK_BYTES, b"", block.read_bytes()[:100]):
        block.write_bytes(damaged)
        assert (opened(attached, cache)["train"].tokens.read(0, 100) == expected).all()
    assert block.stat().st_size == BLOCK_BYTES


def test_data_replaced_or_removed_are_named(s3: FaultyProxy, prepared: Path, attached: Path, tmp_path: Path) -> None:
    tokens = opened(attached, BlockCache(tmp_path / "cache", 1 << 30))["train"].tokens
    content = (prepared / "000000" / "train.bin").read_bytes()
    places.write_file(f"{ROOT}/c0ffee/000000/train.bin", content[::-1])
    with pytest.raises(CorruptDataError, match="was replaced since it was listed"):
        tokens.read(0, 10)
    s3.fault = lambda request: "denied"
    with pytest.raises(PlaceError, match="cannot be accessed"):
        tokens.read(0, 10)


def test_an_outage_ends_a_read_after_the_deadline(
    s3: FaultyProxy, attached: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = opened(attached, BlockCache(tmp_path / "cache", 1 << 30))["train"].tokens
    monkeypatch.setenv(places.TIMEOUT, "0.5")
    s3.fault = lambda request: "slow-down"
    with pytest.raises(UnavailableError, match=r"train\.bin could not be accessed within"):
        tokens.read(0, 10)


def test_an_upload_that_was_stopped_is_continued_and_other_data_are_not_overwritten(
    s3: FaultyProxy, prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(places.TIMEOUT, "0.3")
    s3.fault = lambda request: "slow-down" if request.method == "PUT" and request.number > 12 else None
    with pytest.raises(UnavailableError):
        upload_dataset(prepared, ROOT)
    s3.fault = lambda request: None
    assert find_description(f"{ROOT}/c0ffee") is None, "dataset.json is written last"
    monkeypatch.setenv(places.TIMEOUT, "20")
    written = sum(request.method == "PUT" for request in s3.seen)
    seen: list[tuple[int, int]] = []
    assert upload_dataset(prepared, ROOT, lambda done, total: seen.append((done, total))) == f"{ROOT}/c0ffee"
    assert find_description(f"{ROOT}/c0ffee") is not None
    assert seen[-1][0] == seen[-1][1] > len(seen)
    assert sum(request.method == "PUT" for request in s3.seen) > written
    (tmp_path / "c0ffee").mkdir()
    (tmp_path / "c0ffee" / "dataset.json").write_text(json.dumps({"schema": SCHEMA, "shards": []}))
    with pytest.raises(PlaceError, match="already has other prepared data"):
        upload_dataset(tmp_path / "c0ffee", ROOT)


def test_remote_data_of_another_version_or_with_missing_files_are_refused(
    s3: FaultyProxy, prepared: Path, tmp_path: Path
) -> None:
    path = upload_dataset(prepared, ROOT)
    more = json.loads((prepared / "dataset.json").read_text())
    more = {name: value for name, value in more.items() if name != "seal"} | {"shards": more["shards"] * 2}
    for content, message in (
        (b'{"schema": "scaletrain.dataset/v9", "shards": []}', "has no prepared data of this version"),
        (b"[", "has no prepared data of this version"),
        (json.dumps(more | {"seal": seal_of(more)}).encode(), "lacks 24 files, such as 000003/"),
    ):
        places.write_file(f"{path}/dataset.json", content)
        with pytest.raises(PlaceError, match=message):
            attach(path, tmp_path / "datasets")
        assert not list((tmp_path / "datasets").glob("*"))


def test_only_prepared_data_are_uploaded(s3: FaultyProxy, attached: Path, tmp_path: Path) -> None:
    for folder in (tmp_path, attached):
        with pytest.raises(UsageError, match="has no prepared data of this version"):
            upload_dataset(folder, ROOT)
    assert remote_datasets.OBJECTS in os.listdir(attached)


def _nothing(phase: str, done: int, total: int) -> None:
    pass


def test_a_source_at_a_remote_path_is_a_dataset_or_text(s3: FaultyProxy, prepared: Path, tmp_path: Path) -> None:
    upload_dataset(prepared, ROOT)
    ready = DataSpec.model_validate({"source": f"{ROOT}/c0ffee"})
    assert find_prepared(ready, tmp_path) is None
    found = prepare_data(ready, tmp_path, 1, _nothing)
    assert find_prepared(ready, tmp_path) == found
    assert len(opened(found["source"])["train"].tokens) == len(opened(prepared)["train"].tokens)

    text = "".join(json.dumps({"text": f"document {number} of some words"}) + "\n" for number in range(300))
    (tmp_path / "a.jsonl").write_text(text)
    places.write_file(f"s3://{BUCKET}/web/a.jsonl", tmp_path / "a.jsonl")
    tokenizer = {"kind": "bpe", "vocab_size": 300}
    results = []
    for path in (str(tmp_path / "a.jsonl"), f"s3://{BUCKET}/web", f"s3://{BUCKET}/web/*.jsonl"):
        data = DataSpec.model_validate({"source": path, "tokenizer": tokenizer})
        made = prepare_data(data, tmp_path, 1, _nothing)["source"]
        tokens = opened(made)["train"].tokens
        results.append(tokens.read(0, len(tokens)).tolist())
    assert results[0] == results[1] == results[2]
    assert results[0]


def test_errors_of_a_remote_source_name_its_key(s3: FaultyProxy, tmp_path: Path) -> None:
    sources = [{"name": "web", "path": f"s3://{BUCKET}/web/*.jsonl", "weight": 1}]
    data = DataSpec.model_validate({"sources": sources})
    with pytest.raises(PlaceError, match=r"^data\.sources\.0\.path: no object matches s3://"):
        prepare_data(data, tmp_path, 1, _nothing)
    s3.fault = lambda request: "denied"
    for path in (f"s3://{BUCKET}/web", f"s3://{BUCKET}/web/a.jsonl"):
        data = DataSpec.model_validate({"source": path})
        with pytest.raises(PlaceError, match=r"^data\.source: s3://.* cannot be accessed") as caught:
            find_prepared(data, tmp_path)
        assert caught.value.exit_code == 2
