"""The telemetry of an attempt is read from the files of its nodes."""

import random
from pathlib import Path
from typing import BinaryIO

import pytest

from scaletrain_cli.rundir.paths import RunDir
from scaletrain_cli.telemetry import series
from scaletrain_cli.telemetry.run import Telemetry, layers_file, node_file, read_telemetry
from scaletrain_cli.telemetry.series import SeriesWriter
from tests.counting import bytes_read_by


def write(path: Path, *subjects: str, rows: int = 3) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    writer = SeriesWriter(path)
    for row in range(rows):
        for subject in subjects:
            writer.add(subject, 1e9 + row, row, {"value": row})
    writer.close()


def test_subjects_are_found_by_rank_and_node(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    write(node_file(run, 2, "node-0000-gpu07"), "rank 0", "rank 1", "gpu 0", "gpu 1", "node")
    write(node_file(run, 2, "node-0001-gpu08"), "rank 2", "rank 3", "gpu 0", "node", "fan 3", "rank x")
    write(layers_file(run, 2), "layer layers.0", "rank 9")
    (run.attempt(3) / "telemetry").mkdir(parents=True)
    found = read_telemetry(run)
    assert (found.attempt, list(found.ranks), list(found.nodes)) == (2, [0, 1, 2, 3], ["gpu07", "gpu08"])
    assert list(found.gpus) == ["gpu07/0", "gpu07/1", "gpu08/0"]
    assert list(found.layers) == ["layers.0"]
    assert found.is_whole
    newest = read_telemetry(run, attempt=2, newest=1)
    assert list(newest.ranks[3].mean["value"]) == [2.0]
    assert read_telemetry(run, attempt=3) == Telemetry(3)
    assert read_telemetry(RunDir(tmp_path / "none")) == Telemetry()


def test_nodes_of_one_machine_are_told_apart(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    for node in range(3):
        write(node_file(run, 1, f"node-{node:04d}-box"), f"rank {node}", "gpu 0", "node")
    found = read_telemetry(run)
    assert list(found.nodes) == ["box", "box#1", "box#2"]
    assert list(found.gpus) == ["box/0", "box#1/0", "box#2/0"]


def test_of_very_many_nodes_some_are_read(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    for node in range(10):
        write(node_file(run, 1, f"node-{node:04d}-n{node}"), f"rank {node}")
    node_file(run, 1, "node-0006-n6").write_bytes(b"damaged")
    found = read_telemetry(run, most_nodes=4)
    assert (list(found.ranks), found.is_whole) == ([0, 2, 5, 7], False)
    assert len(read_telemetry(run, most_nodes=10).ranks) == 9
    assert read_telemetry(run, most_nodes=10).is_whole


def test_of_a_large_run_the_ends_of_some_files_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, draw = RunDir(tmp_path), random.Random(0)
    first = node_file(run, 1, "node-0000-n0")
    first.parent.mkdir(parents=True)
    writer = SeriesWriter(first)
    for row in range(200):
        for kind in ("rank", "gpu"):
            for number in range(8):
                writer.add(f"{kind} {number}", 1e9 + row, row, {f"c{column}": draw.random() for column in range(12)})
        if row % 10 == 9:
            writer.flush()
    for node in range(1, 512):
        node_file(run, 1, f"node-{node:04d}-n{node}").hardlink_to(first)
    opened: list[str] = []
    open_to_read = series.open_to_read

    def counted(path: Path) -> BinaryIO:
        opened.append(path.name)
        return open_to_read(path)

    monkeypatch.setattr(series, "open_to_read", counted)
    read = bytes_read_by(lambda: read_telemetry(run, newest=1))
    assert len(opened) == 65  # of 64 nodes, and that of the layers
    assert 0 < read < 64 * first.stat().st_size / 3
    found = read_telemetry(run, newest=1)
    assert (len(found.gpus), found.is_whole) == (64 * 8, False)
    assert list(found.gpus["n504/7"].steps) == [199]
