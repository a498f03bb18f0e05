"""`scaletrain nodes`: list and clear excluded nodes."""

import errno
import os
import time
from pathlib import Path

import pytest

from scaletrain_cli.rundir import bad_nodes
from scaletrain_cli.rundir.bad_nodes import BadNode, remember_bad_nodes
from scaletrain_cli.rundir.paths import runs_root
from tests.cli.command_line import scaletrain


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SCALETRAIN_RUNS", str(tmp_path))
    return tmp_path


@pytest.fixture
def known(root: Path) -> Path:
    now = time.time()
    hang = BadNode("gpu07", "hang", "rank 9 did not answer", "llama-1", 2, now - 3600, now + 5 * 3600)
    broken = BadNode("gpu03", "hardware", "uncorrectable ECC \x1b[31m", "llama-1", 3, now - 120, now + 7 * 86400)
    remember_bad_nodes(root, [hang, broken], now)
    return root


@pytest.mark.usefixtures("known")
def test_nodes_are_listed_newest_first_with_evidence_and_expiry() -> None:
    ended = scaletrain("nodes", "list", code=0)
    title, first, *_ = ended.out.splitlines()
    assert title.split() == ["node", "why", "since", "expires", "in", "run", "evidence"]
    assert first.startswith("gpu03  hardware  2 min ago  7 d")
    assert "gpu07  hang      1 h ago    5 h" in ended.out
    assert "\x1b" not in ended.out


def test_nodes_list_json_has_every_field(known: Path) -> None:
    data = scaletrain("nodes", "list", "--json").data
    assert data["file"] == str(known / "bad-nodes.json")
    assert [(node["node"], node["reason"], node["attempt"]) for node in data["nodes"]] == [
        ("gpu03", "hardware", 3),
        ("gpu07", "hang", 2),
    ]


@pytest.mark.usefixtures("root")
def test_no_excluded_nodes_is_reported_and_is_not_an_error() -> None:
    ended = scaletrain("nodes", "list")
    assert (ended.code, ended.out) == (0, "")
    assert "no nodes are excluded" in ended.err
    assert scaletrain("nodes", "clear").code == 0


@pytest.mark.usefixtures("known")
def test_nodes_are_cleared_by_name_and_an_unknown_node_is_an_error() -> None:
    assert "gpu99" in scaletrain("nodes", "clear", "gpu99", code=2).err
    assert scaletrain("nodes", "clear", "gpu07").code == 0
    assert [node["node"] for node in scaletrain("nodes", "list", "--json").data["nodes"]] == ["gpu03"]
    assert scaletrain("nodes", "clear").code == 0
    assert scaletrain("nodes", "list", "--json").data["nodes"] == []


def test_a_runs_root_that_cannot_be_written_is_an_error(known: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def read_only(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(known))

    monkeypatch.setattr(bad_nodes, "write_document", read_only)
    ended = scaletrain("nodes", "clear")
    assert (ended.code, "cannot be written" in ended.err, "Errno" in ended.err) == (2, True, False), ended.err


def test_clear_succeeds_before_the_first_run() -> None:
    ended = scaletrain("nodes", "clear")
    assert (ended.code, "no nodes were excluded" in ended.err) == (0, True)
    assert not runs_root().exists()
