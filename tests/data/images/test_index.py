import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from scaletrain_cli.data.images import index as index_module
from scaletrain_cli.data.images.index import find_indexed
from scaletrain_cli.data.images.index_units import PACKED, SAMPLE
from scaletrain_cli.data.images.reading import describe_index, open_images
from scaletrain_cli.data.images.samples import ImageSettings
from scaletrain_cli.errors import UsageError
from tests.counting import bytes_read_by
from tests.data.images.pictures import files_below, image_bytes, index, write_folder, write_shards, write_table

SETTINGS = ImageSettings(captions=True, validation_share=0.2)
PROGRAM = """
import itertools, os, signal, sys
from pathlib import Path
from scaletrain_cli.data.images.index import index_images
from scaletrain_cli.data.images.samples import ImageSettings
from scaletrain_cli.data.pipeline.claims import Timing

def progress(*_):
    if next(calls) == int(sys.argv[4]):
        os.killpg(0, signal.SIGKILL)  # with the workers

if __name__ == "__main__":
    calls = itertools.count(1)
    settings = ImageSettings(captions=True, validation_share=0.2)
    timing = Timing(heartbeat_seconds=0.05, stale_seconds=0.6, poll_seconds=0.02)
    path = index_images(sys.argv[1], settings, Path(sys.argv[2]), int(sys.argv[3]), progress, timing=timing)
    print(path)
"""


def process(source: Path, root: Path, workers: int, last: int = 0) -> subprocess.Popen[str]:
    """Build in another process, which kills itself when it reports progress for the ``last`` time; 0: it ends well."""
    program = root.parent / "build.py"
    if not program.exists():
        program.write_text(PROGRAM)
    command = [sys.executable, str(program), str(source), str(root), str(workers), str(last)]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True, cwd=Path.cwd()
    )


@pytest.mark.parametrize(
    ("kind", "counts"),
    [
        ("shards", (1, 2)),
        pytest.param("shards", (2, 4), marks=pytest.mark.long),
        pytest.param("folder", (1, 2, 4), marks=pytest.mark.long),
        pytest.param("table", (1, 2, 4), marks=pytest.mark.long),
    ],
)
def test_the_bytes_do_not_depend_on_the_number_of_processes(
    kind: str, counts: tuple[int, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "source"
    settings = ImageSettings(validation_share=0.2)
    if kind == "folder":
        monkeypatch.setattr("scaletrain_cli.data.images.listing._FILES_OF_A_UNIT", 5)
        write_folder(source, [f"{kind}/{number}.jpg" for kind in "ab" for number in range(10)])
    elif kind == "shards":
        write_shards(source, 5, 4)
    else:
        monkeypatch.setattr("scaletrain_cli.data.images.tables.UNIT_BYTES", 3000)
        write_table(source / "a.parquet", {"image": [image_bytes(n) for n in range(20)], "label": [0] * 20})
    built = [index(source, tmp_path / f"runs-{workers}", settings, workers) for workers in counts]
    assert len({each.name for each in built}) == 1
    assert all(files_below(each) == files_below(built[0]) for each in built[1:])
    assert json.loads((built[0] / "dataset.json").read_text())["train_samples"] > 5
    assert not list(tmp_path.glob("runs-*/datasets/.steps/*/units"))


@pytest.mark.long
def test_kills_and_processes_at_the_same_time_change_nothing(tmp_path: Path) -> None:
    source = write_shards(tmp_path / "source", 24, 60)
    expected = files_below(index(source, tmp_path / "alone", SETTINGS))
    root = tmp_path / "runs"
    ends: list[int] = []
    for last in (1, 2, 3, 1, 2, 3, 2, 3):
        running = [process(source, root, workers, last) for workers in (1, 2)]
        for each in running:
            each.communicate()
            ends.append(each.returncode)
    assert set(ends) <= {0, -signal.SIGKILL}
    assert ends.count(-signal.SIGKILL) >= 4  # none of them gets to more than five of the 24 units
    running = [process(source, root, workers) for workers in (1, 2, 1)]
    answers = [each.communicate() for each in running]
    assert [each.returncode for each in running] == [0, 0, 0], answers
    (path,) = {answer[0].strip() for answer in answers}
    assert files_below(Path(path)) == expected
    assert sorted(each.name for each in (root / "datasets").iterdir()) == [".steps", Path(path).name]
    left = {str(each.relative_to(root)) for each in (root / "datasets/.steps").rglob("*") if each.is_file()}
    assert all(name.endswith("indexed.json") for name in left), left


def test_a_killed_build_is_continued_with_the_same_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write_shards(tmp_path / "source", 4, 3)
    expected = files_below(index(source, tmp_path / "alone", SETTINGS))
    read = index_module.index_unit
    done: list[int] = []

    def fails_at_the_third(folder: Path, settings: ImageSettings, names: object, given: tuple[int, object]) -> None:
        if len(done) == 2 and "continued" not in os.environ:
            raise UsageError("killed")
        done.append(given[0])
        read(folder, settings, names, given)  # type: ignore[arg-type]

    monkeypatch.setattr(index_module, "index_unit", fails_at_the_third)
    with pytest.raises(UsageError, match="killed"):
        index(source, tmp_path / "runs", SETTINGS)
    assert find_indexed(str(source), SETTINGS, tmp_path / "runs") is None
    assert [each.name for each in (tmp_path / "runs/datasets").iterdir()] == [".steps"]
    monkeypatch.setenv("continued", "1")
    assert files_below(index(source, tmp_path / "runs", SETTINGS)) == expected
    assert sorted(done) == [0, 1, 2, 3]  # each unit once


def test_an_index_is_found_until_its_source_or_its_settings_change(tmp_path: Path) -> None:
    source = write_folder(tmp_path / "a", ["cat/1.jpg", "cat/2.jpg", "dog/3.jpg"]) and tmp_path / "a"
    runs, settings = tmp_path / "runs", ImageSettings(validation_share=0.0)
    assert find_indexed(str(source), settings, runs) is None
    first = index(source, runs, settings)
    assert find_indexed(str(source), settings, runs) == first == index(source, runs, settings)
    assert find_indexed("a", settings, runs, tmp_path) == first
    assert find_indexed(str(source), ImageSettings(validation_share=0.5), runs) is None
    (source / "cat/1.jpg").write_bytes((source / "cat/1.jpg").read_bytes())  # written again, with the same content
    assert find_indexed(str(source), settings, runs) is None
    assert index(source, runs, settings) == first
    (source / "cat/1.jpg").write_bytes(image_bytes(7))
    assert (second := index(source, runs, settings)) != first
    (source / "cat/4.jpg").write_bytes(image_bytes(8))
    assert index(source, runs, settings) not in (first, second)
    assert len(open_images(second)["train"]) == 3


def test_a_removed_index_is_built_again(tmp_path: Path) -> None:
    source = write_shards(tmp_path / "a", 2, 2)
    dataset = index(source, tmp_path / "runs", SETTINGS)
    expected = files_below(dataset)
    (dataset / "dataset.json").unlink()
    assert find_indexed(str(source), SETTINGS, tmp_path / "runs") is None
    assert files_below(index(source, tmp_path / "runs", SETTINGS)) == expected


def test_a_source_elsewhere_has_an_index_of_its_own(tmp_path: Path) -> None:
    datasets = [index(write_shards(tmp_path / name, 1, 3), tmp_path / "runs") for name in ("a", "b")]
    assert datasets[0] != datasets[1]
    assert describe_index(datasets[0])["fingerprint"] == describe_index(datasets[1])["fingerprint"]


def test_a_sample_takes_43_bytes_beside_its_text(tmp_path: Path) -> None:
    assert SAMPLE.itemsize == PACKED.size == 43
    dataset = index(write_shards(tmp_path / "a", 1, 9), tmp_path / "runs")
    assert (dataset / "train.samples.bin").stat().st_size == 9 * 43
    assert (dataset / "train.text.bin").stat().st_size == 9 * len("000000000.jpg")


@pytest.mark.long
def test_opening_an_index_of_a_million_samples_reads_little_of_it(tmp_path: Path) -> None:
    dataset = index(write_shards(tmp_path / "a", 1, 2), tmp_path / "runs")
    _grow(dataset, 1_000_000)

    samples = open_images(dataset)["train"]
    assert len(samples) == 1_000_000
    assert bytes_read_by(lambda: open_images(dataset)) < 10_000  # of an index of 43 MB
    assert bytes_read_by(lambda: samples.read(500_000)) < 200_000  # with the block of the file that is verified
    assert bytes_read_by(lambda: samples.read(500_001)) < 2_000


def _grow(dataset: Path, count: int) -> None:
    """Repeat the first sample of an index until it has ``count``."""
    from scaletrain_cli.data.chunk_hashes import HashedFile
    from scaletrain_cli.data.pipeline.shards import seal_of

    record = (dataset / "train.samples.bin").read_bytes()[: SAMPLE.itemsize]
    with HashedFile(dataset / "train.samples.bin") as file:
        for _ in range(100):
            file.write(record * (count // 100))
        file.finish()
    document = json.loads((dataset / "dataset.json").read_text()) | {"train_samples": count}
    (dataset / "dataset.json").write_text(json.dumps(document | {"seal": seal_of(document)}))


@pytest.mark.parametrize(("labels", "one"), [([[1], [0], [2]], True), ([[1], [0, 2], [1]], False), ([[1], []], False)])
def test_an_index_of_several_classes_knows_if_each_image_has_exactly_one(
    labels: list[list[int]], one: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("scaletrain_cli.data.images.reading._ENDS", 2)
    images = [image_bytes(number) for number in range(len(labels))]
    write_table(tmp_path / "source" / "a.parquet", {"image": images, "label": labels})
    built = index(tmp_path / "source", tmp_path / "runs", ImageSettings(targets="classes", validation_share=0.0))
    assert open_images(built)["train"].has_one_class is one
