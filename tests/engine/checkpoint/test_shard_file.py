"""A rank's file: a plain safetensors file, hashed as it is written, read back in any part."""

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from scaletrain_cli.engine.checkpoint.shard_file import (
    CorruptShardError,
    Entry,
    ShardFile,
    ShardHeader,
    Slice,
    StateReader,
    shard_name,
    shard_parts,
    write_parts,
)
from scaletrain_cli.engine.parallel.mesh import ShardSpec

HEADER = ShardHeader(3, {"a.weight": Slice("a.weight", (4, 6), ShardSpec(1, 2, 1), 2, 9)}, {"step": 7.0})
ENTRIES = [
    Entry("weight/a.weight", torch.randn(7)),
    Entry("exp_avg/a.weight", torch.randn(7).to(torch.bfloat16)),
    Entry("random", torch.arange(5, dtype=torch.uint8)),
    Entry("empty", torch.zeros(0)),
]


def test_a_shard_file_returns_what_was_written(tmp_path: Path) -> None:
    write_parts(tmp_path / "shard", shard_parts(HEADER, ENTRIES))
    found = ShardFile(tmp_path / "shard")
    assert found.header == HEADER
    assert list(found.keys) == [entry.key for entry in ENTRIES]
    for key, values in ENTRIES:
        assert torch.equal(found.read(key), values)
        assert torch.equal(found.read(key, len(values) // 2), values[len(values) // 2 :])


def test_the_safetensors_library_reads_a_shard_file(tmp_path: Path) -> None:
    write_parts(tmp_path / "shard", shard_parts(HEADER, ENTRIES))
    opened = load_file(tmp_path / "shard")
    assert all(torch.equal(opened[key], values) for key, values in ENTRIES)


def test_the_returned_digest_is_that_of_the_file(tmp_path: Path) -> None:
    digest = write_parts(tmp_path / "shard", shard_parts(HEADER, ENTRIES))
    content = (tmp_path / "shard").read_bytes()
    assert (digest.size, digest.sha256) == (len(content), hashlib.sha256(content).hexdigest())


def test_a_fault_can_be_injected_before_every_write(tmp_path: Path) -> None:
    strikes = []
    write_parts(tmp_path / "shard", shard_parts(HEADER, ENTRIES), before_write=lambda: strikes.append(1))
    assert len(strikes) == len(ENTRIES) + 2


def test_a_file_that_is_no_shard_is_rejected(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    save_file({"a": torch.zeros(2)}, tmp_path / "model.safetensors", metadata={"schema": "other"})
    with pytest.raises(ValueError, match=r"reads scaletrain.shard/v1"):
        ShardFile(tmp_path / "model.safetensors")


def test_only_files_in_the_manifest_of_a_checkpoint_are_read(tmp_path: Path) -> None:
    halves = [Slice("a.weight", (8,), None, 0, 4), Slice("a.weight", (8,), None, 4, 8)]
    for rank, piece in enumerate(halves):
        header = ShardHeader(rank, {"a.weight": piece}, {})
        write_parts(
            tmp_path / shard_name(rank),
            shard_parts(header, [Entry("weight/a.weight", torch.full((4,), float(rank)))]),
        )
    whole = Slice("a.weight", (8,), None, 0, 8)
    for stray, name in ((2, "a.weight"), (3, "b.weight")):  # left there by a person, or by a run of more ranks
        header = ShardHeader(stray, {name: Slice(name, (8,), None, 0, 8)}, {})
        parts = shard_parts(header, [Entry(f"weight/{name}", torch.full((8,), 9.0))])
        write_parts(tmp_path / shard_name(stray), parts)
    (tmp_path / "rank-notes.safetensors").write_text("not a shard")
    named = [shard_name(0), shard_name(1), "state.json"]
    for rank in (0, 2, -1):
        reader = StateReader(tmp_path, rank, [whole] if rank == 2 else [], named)
        assert reader.read("weight", whole).tolist() == [0.0] * 4 + [1.0] * 4
        assert list(reader._index) == ["a.weight"]


@pytest.mark.parametrize(
    "forge",
    [
        lambda size, text: (1 << 62).to_bytes(8, "little") + text,
        lambda size, text: b"",
        lambda size, text: size.to_bytes(8, "little") + b"[" * size,
        lambda size, text: size.to_bytes(8, "little") + text[:size].replace(b'"F32"', b'"F99"') + text[size:],
        lambda size, text: (
            size.to_bytes(8, "little") + text[:size].replace(b'"data_offsets":[0,', b'"data_offsets":[9,')
        ),
        lambda size, text: size.to_bytes(8, "little") + text[:size],
    ],
)
def test_a_forged_header_is_an_error_and_allocates_nothing(tmp_path: Path, forge: Any) -> None:
    path = tmp_path / "rank-00000.safetensors"
    write_parts(path, shard_parts(ShardHeader(0, {}, {}), [Entry("weight/a", torch.ones(4))]))
    content = path.read_bytes()
    path.write_bytes(forge(int.from_bytes(content[:8], "little"), content[8:]))
    with pytest.raises(CorruptShardError, match="not a shard of a checkpoint"):
        ShardFile(path)


@pytest.mark.parametrize(
    "stated",
    [
        *({"cut": [7, 2, 0, 1]}, {"cut": [0, 0, 0, 1]}, {"cut": [0, 2, 2, 1]}, {"cut": [0, 2, 0, 1 << 40]}),
        *({"cut": [0, 2, 0, []]}, {"cut": {"dim": 0}}, {"shape": [-2, -2]}, {"shape": [1 << 62]}, {"shape": "44"}),
        *({"shape": [2.0, 2]}, {"start": -1}, {"stop": 1 << 40}, {"start": 3, "stop": 2}, {"start": None}),
    ],
    ids=str,
)
def test_a_header_with_a_slice_that_no_matrix_has_is_an_error(tmp_path: Path, stated: dict[str, Any]) -> None:
    path = tmp_path / "rank-00000.safetensors"
    slices = {"a": Slice("a", (2, 2), None, 0, 4)}
    write_parts(path, shard_parts(ShardHeader(0, slices, {"step": 1.0}), [Entry("weight/a", torch.ones(4))]))
    content = path.read_bytes()
    size = int.from_bytes(content[:8], "little")
    index = json.loads(content[8 : 8 + size])
    index["__metadata__"]["pieces"] = json.dumps({"a": slices["a"].to_json() | stated})
    text = json.dumps(index).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + size :])
    with pytest.raises(CorruptShardError, match="not a shard of a checkpoint"):
        ShardFile(path)


def test_counters_that_are_no_numbers_and_fewer_elements_than_stated_are_errors(tmp_path: Path) -> None:
    path = tmp_path / "rank-00000.safetensors"
    slices = {"a": Slice("a", (2, 2), None, 0, 4)}
    write_parts(path, shard_parts(ShardHeader(0, slices, {"step": "x"}), []))  # type: ignore[dict-item]
    with pytest.raises(CorruptShardError, match="is no number"):
        ShardFile(path)
    entries = [Entry("weight/a", torch.ones(2)), Entry("z", torch.ones(9))]
    write_parts(path, shard_parts(ShardHeader(0, slices, {"step": 1.0}), entries))
    with pytest.raises(CorruptShardError, match="has 2 elements, and 4 are stated"):
        StateReader(tmp_path, 0, [slices["a"]], [path.name]).read("weight", slices["a"])
