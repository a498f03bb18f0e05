"""The snapshot writer: what was true at save() is what lands on disk, hashed, and a failed write is not silent."""

import hashlib
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from scaletrain_cli.engine.checkpointing import SnapshotWriter


def test_later_changes_do_not_reach_the_file(tmp_path: Path) -> None:
    writer = SnapshotWriter(delay_seconds=0.2)
    state = {"weights": torch.ones(3), "nested": [{"moments": torch.zeros(2)}], "scaler": SimpleNamespace(scale=1)}
    writer.save(state, tmp_path / "shard.pt")
    state["scaler"].scale = 9
    state["weights"].fill_(9)
    state["nested"][0]["moments"].fill_(9)
    writer.take_digests(tmp_path)
    loaded = torch.load(tmp_path / "shard.pt", weights_only=False)
    assert torch.equal(loaded["weights"], torch.ones(3))
    assert torch.equal(loaded["nested"][0]["moments"], torch.zeros(2))
    assert loaded["scaler"].scale == 1


def test_saving_does_not_wait_for_the_disk(tmp_path: Path) -> None:
    writer = SnapshotWriter(delay_seconds=0.5)
    writer.save({"weights": torch.ones(3)}, tmp_path / "shard.pt")
    assert writer.writing
    assert not (tmp_path / "shard.pt").exists()
    writer.take_digests(tmp_path)
    assert not writer.writing


def test_the_digest_is_that_of_the_file(tmp_path: Path) -> None:
    writer = SnapshotWriter()
    writer.save({"weights": torch.randn(100_000)}, tmp_path / "shard.pt")
    digest = writer.take_digests(tmp_path)["shard.pt"]
    content = (tmp_path / "shard.pt").read_bytes()
    assert (digest.size, digest.sha256) == (len(content), hashlib.sha256(content).hexdigest())


def test_a_failed_write_surfaces(tmp_path: Path) -> None:
    writer = SnapshotWriter()
    writer.save({"weights": torch.ones(3)}, tmp_path / "no-such-folder" / "shard.pt")
    with pytest.raises(FileNotFoundError):
        writer.take_digests(tmp_path)
