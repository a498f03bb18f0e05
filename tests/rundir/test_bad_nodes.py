"""Excluded nodes are recorded with evidence until it expires, by concurrent runs."""

import dataclasses
import multiprocessing
from pathlib import Path

from scaletrain_cli.rundir.bad_nodes import (
    BadNode,
    bad_nodes_file,
    read_bad_nodes,
    remember_bad_nodes,
)

BROKEN = BadNode("n3", "hardware", "rank 5: uncorrectable ECC", "llama-1", 2, time=100.0, expires=1000.0)


def remember_one(root: Path, number: int) -> None:
    remember_bad_nodes(root, [dataclasses.replace(BROKEN, node=f"n{number}")], now=100.0)


def test_evidence_is_kept_until_it_expires_and_listed_newest_first(tmp_path: Path) -> None:
    newer = dataclasses.replace(BROKEN, node="n1", time=200.0, expires=500.0)
    remember_bad_nodes(tmp_path, [BROKEN], now=100.0)
    remember_bad_nodes(tmp_path, [newer], now=200.0)
    assert read_bad_nodes(tmp_path, now=300.0) == [newer, BROKEN]
    assert read_bad_nodes(tmp_path, now=600.0) == [BROKEN]
    assert read_bad_nodes(tmp_path, now=1001.0) == []


def test_newer_evidence_replaces_older_and_never_shortens_it(tmp_path: Path) -> None:
    hang = dataclasses.replace(BROKEN, reason="hang", time=200.0, expires=300.0)
    remember_bad_nodes(tmp_path, [BROKEN], now=100.0)
    remember_bad_nodes(tmp_path, [hang], now=200.0)
    assert read_bad_nodes(tmp_path, now=250.0) == [dataclasses.replace(hang, expires=1000.0)]


def test_concurrent_writers_do_not_lose_evidence(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    writers = [context.Process(target=remember_one, args=(tmp_path, number)) for number in range(4)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert {node.node for node in read_bad_nodes(tmp_path, now=100.0)} == {"n0", "n1", "n2", "n3"}


def test_a_damaged_file_excludes_no_nodes(tmp_path: Path) -> None:
    bad_nodes_file(tmp_path).write_text("{torn")
    assert read_bad_nodes(tmp_path, now=0.0) == []
    remember_bad_nodes(tmp_path, [BROKEN], now=100.0)
    assert read_bad_nodes(tmp_path, now=100.0) == [BROKEN]


def test_evidence_from_a_clock_that_was_ahead_expires_like_other_evidence(tmp_path: Path) -> None:
    ahead = dataclasses.replace(BROKEN, time=50_000.0, expires=50_900.0)
    remember_bad_nodes(tmp_path, [ahead], now=50_000.0)
    assert read_bad_nodes(tmp_path, now=100.0) == [BROKEN]
    remember_bad_nodes(tmp_path, [dataclasses.replace(BROKEN, node="n1")], now=100.0)
    assert read_bad_nodes(tmp_path, now=1001.0) == []


def test_something_else_in_place_of_the_lock_keeps_no_node_from_being_excluded(tmp_path: Path) -> None:
    (tmp_path / ".bad-nodes.lock").mkdir()
    remember_bad_nodes(tmp_path, [BROKEN], now=100.0)
    assert read_bad_nodes(tmp_path, now=100.0) == [BROKEN]
