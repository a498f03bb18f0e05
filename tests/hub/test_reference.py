from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scaletrain_cli.hub.cache import HubFile, HubSettings, Listing
from scaletrain_cli.hub.reference import HubError, HubReference, parse_reference
from scaletrain_cli.spec.corpus_files import NoCorpusError, find_files
from scaletrain_cli.spec.hub_files import HubUse, Purpose, selected_files

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("hf://org/name", HubReference("model", "org/name", "main")),
        ("hf://gpt2", HubReference("model", "gpt2", "main")),
        ("hf://org/name@v1.0", HubReference("model", "org/name", "v1.0")),
        (f"hf://org/name@{COMMIT}", HubReference("model", "org/name", COMMIT)),
        ("hf://org/name@main/a/b.json", HubReference("model", "org/name", "main", "a/b.json")),
        ("hf://org/name/a", HubReference("model", "org/name", "main", "a")),
        ("hf://org/name@refs/pr/7", HubReference("model", "org/name", "refs/pr/7")),
        ("hf://org/name@refs/pr/7/a", HubReference("model", "org/name", "refs/pr/7", "a")),
        ("hf://org/name@feature%2Fx/a", HubReference("model", "org/name", "feature/x", "a")),
        ("hf://datasets/org/name@main/**/*.jsonl", HubReference("dataset", "org/name", "main", "**/*.jsonl")),
        ("hf://models/org/name", HubReference("model", "org/name", "main")),
    ],
)
def test_a_reference_is_read(text: str, expected: HubReference) -> None:
    assert parse_reference(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        *("hf://", "hf:///name", "hf://org/", "hf://org/name@", "hf://org/na me", "hf://-org/name"),
        *("hf://org/name.git", "hf://org/name@main/../x", "hf://org/name@../x", "hf://org/name@main//x"),
        *("hf://a/b/c@main", "hf://o..g/name", "hf://spaces/org/name", "hf://datasets/", "hf://org/name@main/./x"),
        *("hf://org/name@a..b", "hf://org/na--me"),
    ],
)
def test_a_wrong_reference_is_refused_with_what_is_allowed(text: str) -> None:
    with pytest.raises(ValueError, match="give hf://"):
        parse_reference(text)


@given(st.text(alphabet="abc./@*-%", max_size=30))
def test_no_reference_leaves_the_cache(tail: str) -> None:
    try:
        reference = parse_reference(f"hf://{tail}")
    except ValueError:
        return
    root = Path("/cache")
    place = HubSettings(root).snapshot(reference, COMMIT) / reference.path
    assert place.is_relative_to(root)
    assert ".." not in place.parts


def listing(*paths: str) -> Listing:
    reference = parse_reference("hf://org/name")
    return Listing(reference, COMMIT, tuple(HubFile(path, 10) for path in paths))


def selected(purpose: Purpose, text: str, found: Listing, read: Path | None = None) -> list[str]:
    def reader(file: HubFile) -> Path:
        assert read is not None, "no file may be read"
        return read

    return [file.path for file in selected_files(HubUse("key", text, purpose), found, reader)]


def test_neither_pickled_weights_nor_code_are_ever_selected(tmp_path: Path) -> None:
    index = tmp_path / "index.json"
    index.write_text('{"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}')
    found = listing(
        *("config.json", "model.safetensors.index.json", "model-1.safetensors", "model-2.safetensors"),
        *("model.safetensors", "consolidated.safetensors", "pytorch_model.bin", "modeling.py", "tokenizer.json"),
        *(
            "tokenizer_config.json",
            "model.gguf",
            "original/x.pth",
            "onnx/model.onnx",
            "additional_chat_templates/a.jinja",
        ),
    )
    assert set(selected("weights", "hf://org/name", found, index)) == {
        *("config.json", "model.safetensors.index.json", "model-1.safetensors", "model-2.safetensors"),
        *("tokenizer.json", "tokenizer_config.json", "additional_chat_templates/a.jinja"),
    }


def test_every_file_of_a_tokenizer_is_selected() -> None:
    names = ["tokenizer.model", "vocab.json", "merges.txt", "tekken.json", "a.tiktoken", "chat_template.jinja"]
    files = ["tokenizer.json", *names, "additional_chat_templates/tool_use.jinja"]
    found = listing(*files, "original/tokenizer.model", "README.md", "vocab.py")
    assert sorted(selected("tokenizer", "hf://org/name", found)) == sorted(files)


@pytest.mark.parametrize("name", ["../x.safetensors", "a.bin", "sub/x.safetensors", "model-9.safetensors"])
def test_an_index_that_names_other_files_is_refused(tmp_path: Path, name: str) -> None:
    index = tmp_path / "index.json"
    index.write_text(f'{{"weight_map": {{"a": "{name}"}}}}')
    found = listing("model.safetensors.index.json", "a.bin", "sub/x.safetensors")
    with pytest.raises(HubError, match="lacks"):
        selected("weights", "hf://org/name", found, index)


@pytest.mark.parametrize("path", ["../x.txt", "/home/a/x.py", "a/../../x", "", "a//b", "a/\0"])
def test_a_file_outside_of_its_repository_is_refused(path: str) -> None:
    with pytest.raises(ValueError, match="is not the path of a file in a repository"):
        HubFile(path, 1)


def test_a_repository_with_pickled_weights_only_is_refused() -> None:
    with pytest.raises(HubError, match=r"no \*\.safetensors files, only pytorch_model\.bin"):
        selected("weights", "hf://org/name", listing("pytorch_model.bin", "config.json"))


TREE = (
    *("README.md", "a.txt", "b.jsonl", "c.json", "d.parquet", "e.bin", ".hidden/f.txt", "g/.h.txt", "g/h.txt"),
    *("g/i/j.txt.gz", "g/i/LICENSE.txt", "k[1].txt", "g/i/deep/l.md"),
)


@pytest.mark.parametrize(
    "path", ["", "g", "g/i", "*.txt", "**/*.txt", "g/**", "*", "**", "g/*/*.gz", "k[1].txt", "[ab].*", "g/*", "none"]
)
def test_data_of_the_hub_are_those_of_the_same_local_folder(tmp_path: Path, path: str) -> None:
    """The local rules are those of glob, and of find_files for folders."""
    for name in TREE:
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("x")
    try:
        local = {str(file.relative_to(tmp_path)) for file in find_files(f"{tmp_path}/{path}").files}
    except NoCorpusError:
        local = set()
    try:
        ours = set(selected("source", f"hf://datasets/org/name@main/{path}", listing(*TREE)))
    except HubError:
        ours = set()
    assert ours == local
    assert bool(local) == (path != "none")
