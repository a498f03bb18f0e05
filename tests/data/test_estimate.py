import gzip
import json
import random
from pathlib import Path

import pytest

from scaletrain_cli.data.estimate import characters_per_token, preparation_seconds, seconds_to_prepare, source_sizes
from scaletrain_cli.data.prepared import prepare_data
from scaletrain_cli.spec import RunSpec, load_spec
from tests.cli.command_line import SMALL

WORDS = "data model token loss batch step the of and gradient layer weight sample run shard".split()


def documents(count: int, seed: int) -> list[str]:
    draw = random.Random(seed)
    return [" ".join(draw.choices(WORDS, k=draw.randint(20, 80))) + "." for _ in range(count)]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two files of each of four formats, of which a part is read for an estimate, and a tokenizer.json."""
    tmp_path = tmp_path_factory.mktemp("corpus")
    parquet, pyarrow = pytest.importorskip("pyarrow.parquet"), pytest.importorskip("pyarrow")
    zstandard, tokenizers = pytest.importorskip("zstandard"), pytest.importorskip("tokenizers")
    for kind in ("plain", "gz", "zst", "parquet"):
        (tmp_path / kind).mkdir()
    for number in range(2):
        texts = documents(1100, number)
        lines = "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()
        (tmp_path / "plain" / f"{number}.jsonl").write_bytes(lines)
        (tmp_path / "gz" / f"{number}.jsonl.gz").write_bytes(gzip.compress(lines))
        (tmp_path / "zst" / f"{number}.jsonl.zst").write_bytes(zstandard.ZstdCompressor().compress(lines))
        parquet.write_table(pyarrow.table({"text": texts}), tmp_path / "parquet" / f"{number}.parquet")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=300, special_tokens=["<|endoftext|>"], show_progress=False)
    tokenizer.train_from_iterator(documents(50, 99), trainer)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


@pytest.fixture
def folder(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(corpus)
    return corpus


def spec(*sources: str) -> RunSpec:
    given = ", ".join(f"{{name: s{number}, path: {path}, weight: 1}}" for number, path in enumerate(sources))
    sets = ["data.source=null", f"data.sources=[{given}]", "data.tokenizer={kind: file, path: tokenizer.json}"]
    return load_spec(SMALL, sets)


def test_an_estimate_is_near_the_exact_count_which_replaces_it(folder: Path) -> None:
    run, root = spec("plain", "gz", "zst", "parquet"), folder / "runs"
    estimated = source_sizes(run.data, root, folder)
    assert [size.exact for size in estimated.values()] == [False] * 4
    assert all(size.files == 2 for size in estimated.values())
    assert preparation_seconds(run, root, folder, workers=2) == pytest.approx(
        sum(size.text_bytes / 1.6e6 + size.stored_bytes / 1e9 for size in estimated.values()) / 2
    )
    prepare_data(run.data, root, 1, lambda *_: None, folder)
    exact = source_sizes(run.data, root, folder)
    for name, size in exact.items():
        assert size.exact
        assert estimated[name].tokens == pytest.approx(size.tokens, rel=0.03), name
    assert preparation_seconds(run, root, folder) == 0


def test_steps_and_training_of_a_tokenizer_take_time(folder: Path) -> None:
    def seconds(*settings: str) -> float:
        run = load_spec(SMALL, ["data.source=plain", *settings])
        return seconds_to_prepare(run.data, source_sizes(run.data, folder, folder), 1)

    path = "data.tokenizer={kind: file, path: tokenizer.json}"
    assert seconds() > seconds(path)
    assert seconds(path, "data.prepare=[{step: language, keep: [en]}]") > seconds(path)


def test_sources_that_cannot_be_read_here_have_no_size(folder: Path) -> None:
    run = spec("plain", "nowhere", "hf://datasets/a/b")
    assert source_sizes(run.data, folder, folder).keys() == {"s0"}
    assert preparation_seconds(run, folder, folder) is None


def test_characters_per_token_grow_with_the_vocabulary() -> None:
    found = [characters_per_token(size) for size in (256, 1024, 5000, 32768, 100_000, 1_000_000)]
    assert found == sorted(found)
    assert found[3] == 3.8
