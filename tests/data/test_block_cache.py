from contextlib import ExitStack
from pathlib import Path

import pytest

from scaletrain_cli.data import block_cache
from scaletrain_cli.data.block_cache import BlockCache
from scaletrain_cli.safe_files import locked


def test_a_block_is_read_while_a_stopped_process_holds_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_cache, "_LOCK_SECONDS", 0.0)
    cache = BlockCache(tmp_path / "cache", 1000)
    cache.require_usable(create=True)
    with ExitStack() as held:
        for name in (*map(str, range(256)), "total"):
            assert held.enter_context(locked(tmp_path / "cache" / "locks" / name, wait_seconds=0))
        assert cache.read("a", 1, 3, lambda: b"0123") == b"12"
        cache.require_usable(create=True)
    assert cache.read("a", 1, 3, lambda: b"4567") == b"56", "the block was not kept"
    assert cache.read("a", 1, 3, lambda: b"89ab") == b"56"
