import os
from pathlib import Path

import pytest

from scaletrain_cli.errors import SpecError
from scaletrain_cli.spec import load_spec, loading
from scaletrain_cli.spec.corpus_files import NoCorpusError, find_files, find_text
from tests.cli.command_line import SMALL


def test_a_fifo_to_which_nobody_writes_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "_PIPE_SECONDS", 0.01)
    os.mkfifo(tmp_path / "run.yaml")
    with pytest.raises(SpecError, match="nothing was written to it for"):
        load_spec(tmp_path / "run.yaml")


def test_a_spec_is_read_from_a_pipe_of_the_shell() -> None:
    reader, writer = os.pipe()
    os.write(writer, SMALL.read_bytes())
    os.close(writer)
    assert load_spec(Path(f"/dev/fd/{reader}"), ["model.seq_len=64"]).name == load_spec(SMALL).name
    os.close(reader)


def test_a_device_without_end_is_no_spec() -> None:
    with pytest.raises(SpecError, match="larger than 1 MB"):
        load_spec(Path("/dev/zero"))


@pytest.mark.parametrize("source", ["/", "/**", "/*/**", "/**/*.jsonl", "//**"])
def test_a_source_that_means_all_files_of_the_machine_is_refused_at_once(source: str) -> None:
    for find in (find_files, find_text):
        with pytest.raises(NoCorpusError, match="means all files of this machine"):
            find(source)


def test_a_missing_file_in_the_root_and_a_glob_below_a_folder_are_no_such_source(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("{}")
    assert find_text(str(tmp_path / "**")).files == (tmp_path / "a.jsonl",)
    with pytest.raises(NoCorpusError, match="no such file or folder"):
        find_text("/gone-with-the-test.jsonl")
