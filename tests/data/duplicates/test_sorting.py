from pathlib import Path

import numpy as np
import pytest

from scaletrain_cli.data.drafts import draft_of, remove_drafts
from scaletrain_cli.data.duplicates import candidates as sorting
from scaletrain_cli.data.duplicates.candidates import Sorter
from scaletrain_cli.data.duplicates.corpus import Sections, SectionWriter
from scaletrain_cli.errors import UsageError


@pytest.mark.parametrize("values", [1 << 60, 50, 1], ids=["distinct", "repeated", "all the same"])
def test_rows_above_a_limit_come_sorted_from_disk(tmp_path: Path, values: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sorting, "_LEAST_BLOCK", 16)  # several passes of merges
    monkeypatch.setattr(sorting, "_MOST_ROWS", 100)
    rows = np.random.default_rng(0).integers(0, values, size=(6_000, 3), dtype=np.uint64)
    sorter = Sorter(tmp_path, 3, 6000)
    for start in range(0, len(rows), 250):
        sorter.add(rows[start : start + 250])
    assert len(sorter._parts) < len(rows) // 250
    blocks = list(sorter.blocks())
    assert max(map(len, blocks)) <= 100
    assert np.concatenate(blocks).tolist() == sorted(rows.tolist())
    assert list(tmp_path.iterdir()) == []


def test_sections_are_read_back(tmp_path: Path) -> None:
    path = tmp_path / "file"
    rows = np.arange(30, dtype=np.int64).reshape(10, 3)
    with SectionWriter(path) as file:
        file.begin("rows", "<i8", 3)
        file.append(rows[:4])
        file.append(rows[4:])
        file.add("bytes", "u1", np.arange(7))
        file.add("none", "<f4", np.empty(0))
        file.facts = {"count": 3}
    found = Sections(path)
    assert found.facts == {"count": 3}
    assert found.rows("rows") == 10
    assert (found.read("rows", 2, 5) == rows[2:5]).all()
    assert (np.concatenate(list(found.chunks("rows", 3))) == rows).all()
    assert found.take("rows", np.array([7, 0, 7])).tolist() == rows[[7, 0, 7]].tolist()
    assert found.read("bytes").tolist() == list(range(7))
    assert len(found.read("none")) == len(found.take("none", np.array([], int))) == 0


def test_a_file_appears_only_when_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "file"

    def write(fail: bool) -> None:
        with SectionWriter(path) as file:
            file.begin("rows", "<i8")
            file.append(np.arange(5))
            assert not path.exists()
            if fail:
                raise ValueError

    with pytest.raises(ValueError):
        write(fail=True)
    assert list(tmp_path.iterdir()) == []
    write(fail=False)
    assert list(tmp_path.iterdir()) == [path]
    draft = draft_of(path)
    draft.touch()
    remove_drafts(tmp_path, lambda owner: False)
    assert draft.exists()
    remove_drafts(tmp_path, lambda owner: True)
    assert list(tmp_path.iterdir()) == [path]


def test_a_truncated_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "file"
    with SectionWriter(path) as file:
        file.add("rows", "<i8", np.arange(1000))
    whole = path.read_bytes()
    for length in (0, 5, 100, len(whole) - 1):
        path.write_bytes(whole[:length])
        with pytest.raises(UsageError, match="damaged"):
            Sections(path)
