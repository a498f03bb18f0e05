"""recipes/clip_pairs_cpu.py: what it writes is the same each time, in a folder that may have other files."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
from tokenizers import Tokenizer

FILE = Path(__file__).parents[3] / "recipes" / "clip_pairs_cpu.py"
CAPTIONS = ["a small red circle on the left, on white", "at the top edge there is a large blue ring", "Tiny cross"] * 20


@pytest.fixture(scope="module")
def drawn() -> ModuleType:
    """Return the program of the recipe as a module, with 20 pairs to train on."""
    found = importlib.util.spec_from_file_location("drawn_pairs", FILE)
    module = importlib.util.module_from_spec(found)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "drawn_pairs", module)
        found.loader.exec_module(module)
    for name, value in (("TRAIN", 20), ("IN_SHARD", 10), ("VALIDATION", 4), ("PER_CLASS", 1)):
        setattr(module, name, value)
    return module


def test_a_second_call_writes_the_same_bytes_and_removes_nothing(drawn: ModuleType, tmp_path: Path) -> None:
    other = tmp_path / "other.txt"
    other.write_text("kept")
    drawn.main(tmp_path)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    drawn.main(tmp_path)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
    assert other in before


def test_the_tokenizer_has_special_tokens_of_clip_and_reads_captions_back(drawn: ModuleType, tmp_path: Path) -> None:
    drawn.write_tokenizer(tmp_path, CAPTIONS)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert [tokenizer.id_to_token(number) for number in (0, 1)] == [drawn.START, drawn.END]
    assert {token.content for token in tokenizer.get_added_tokens_decoder().values()} == {drawn.START, drawn.END}
    encoded = tokenizer.encode("A large red ring at the top")
    assert (encoded.ids[0], encoded.ids[-1]) == (0, 1)
    assert tokenizer.decode(encoded.ids) == "a large red ring at the top"
