from pathlib import Path

import pytest

from scaletrain_cli.data.sources.listing import source_files
from scaletrain_cli.errors import UsageError
from scaletrain_cli.hub.reference import HubError
from scaletrain_cli.launch.epochs import in_steps
from scaletrain_cli.launch.hub_fetch import fetched_spec
from scaletrain_cli.launch.resource_checks.checks import check_external
from scaletrain_cli.spec import RunSpec, parse_spec
from scaletrain_cli.spec.corpus_files import ROW_FORMATS, find_files
from tests.hub import tiny
from tests.hub.server import Hub
from tests.spec.samples import SPEC, load

pytestmark = pytest.mark.usefixtures("fetched_here")

FILES = {
    **{"web/a.jsonl.zst": b"1", "web/b.arrow": b"2", "web/c.idx": b"3", "web/c.bin": b"4", "web/other.bin": b"5"},
    **{"web/README.md": b"6", "web/picture.png": b"7", "tokens/d.npy": b"8", "tokens/e.data": b"9"},
}


def spec(*paths: str, form: str = "auto") -> RunSpec:
    sources = ", ".join(
        f"{{name: s{number}, path: '{path}', weight: 1, format: {form}}}" for number, path in enumerate(paths)
    )
    sets = ("data.source=null", f"data.sources=[{sources}]")
    return parse_spec(tiny.spec_text(), file="run.yaml", base_dir=Path(), overrides=sets)


def names(fetched: RunSpec) -> list[list[str]]:
    return [[Path(file.path).name for file in source_files(section)] for section in fetched.data.all_sources]


def test_each_source_of_a_mixture_gets_its_local_files(hub: Hub) -> None:
    tiny.publish(hub)
    hub.add("org/text", FILES, kind="dataset")
    wanted = spec("hf://datasets/org/text/web", "hf://datasets/org/text/web/*.arrow", "python-stdlib")
    fetched = fetched_spec(wanted, "data")
    assert [path.startswith("hf://") for _, path in fetched.data.paths()] == [False] * 3
    assert names(fetched)[:2] == [["a.jsonl.zst", "b.arrow", "c.idx"], ["b.arrow"]]
    sizes = [file.size for file in source_files(fetched.data.sources[0])]
    assert sizes == [1, 1, 2], "of the Megatron-LM set both files are here"
    named = fetched_spec(spec("hf://datasets/org/text/tokens/e.data", form="raw_uint16"), "data")
    assert names(named) == [["e.data"]]


def test_a_format_that_the_data_set_does_not_have_is_named(hub: Hub) -> None:
    tiny.publish(hub)
    hub.add("org/text", FILES, kind="dataset")
    with pytest.raises(HubError, match="parquet"):
        fetched_spec(spec("hf://datasets/org/text/web", form="parquet"), "data")


def test_the_train_split_alone_is_fetched_and_the_others_are_named(hub: Hub) -> None:
    tiny.publish(hub)
    hub.add("org/split", {f"data/{split}-00000-of-00001.txt": b"1" for split in ("train", "test")}, kind="dataset")
    wanted = spec("hf://datasets/org/split", "hf://datasets/org/split/data/test-*.txt")
    (note,) = [str(note) for note in check_external(wanted).warnings if note.code == "checks.files-not-read"]
    assert note == "data.sources.0.path = hf://datasets/org/split: these files are not read: 1 of the test split"
    fetched = fetched_spec(wanted, "data")
    assert names(fetched) == [["train-00000-of-00001.txt"], ["test-00000-of-00001.txt"]]


def test_one_data_set_gives_the_rows_for_training_and_those_for_validation(hub: Hub) -> None:
    row = b'{"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello."}]}\n'
    tiny.publish(hub)
    hub.add("org/rows", {f"data/{split}.jsonl": row for split in ("train", "validation", "test")}, kind="dataset")
    wanted = load(
        SPEC,
        *("training.objective=sft", "data.source=hf://datasets/org/rows"),
        "data.validation_source=hf://datasets/org/rows",
    )
    data = fetched_spec(wanted, "data").data
    assert [path.name for path in find_files(data.source, kinds=ROW_FORMATS).files] == ["train.jsonl"]
    of_validation = find_files(data.validation_source, kinds=ROW_FORMATS, evaluation=True)
    assert [path.name for path in of_validation.files] == ["validation.jsonl"]


def test_an_estimate_of_epochs_sends_no_request_and_counts_data_that_are_in_the_cache(hub: Hub) -> None:
    tiny.publish(hub)
    sets = ("training.steps=null", "training.epochs=2", "training.schedule.warmup_steps=0")
    wanted = parse_spec(tiny.spec_text(), file="run.yaml", base_dir=Path(), overrides=sets)
    asked = len(hub.log)
    with pytest.raises(UsageError) as refused:
        in_steps(wanted, "run.yaml")
    assert "their size cannot be estimated on this machine" in str(refused.value.problems[0])
    assert len(hub.log) == asked
    counted, how = in_steps(wanted, "run.yaml", "now")
    assert len(hub.log) > asked
    asked = len(hub.log)
    assert in_steps(wanted, "run.yaml") == (counted, how)
    assert how.code.startswith("preparation.epochs-counted")
    assert len(hub.log) == asked
