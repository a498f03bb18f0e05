import dataclasses
import json
import shutil
from pathlib import Path

import pytest

from scaletrain_cli.data.prepared import find_run_datasets, prepare_run_datasets
from scaletrain_cli.engine.data import splits
from scaletrain_cli.engine.data.preparation import run_command
from scaletrain_cli.engine.data.prepared import tokenizer_path
from scaletrain_cli.engine.data.stats import datasets_of
from scaletrain_cli.errors import UsageError
from scaletrain_cli.launch.resource_checks.checks import check_on_node, require_external_to_resume
from scaletrain_cli.launch.submit import create_run
from scaletrain_cli.rundir.paths import RunDir
from scaletrain_cli.rundir.record import RunRecord
from scaletrain_cli.rundir.shared_datasets import (
    datasets_file,
    entries_of,
    read_entries,
    record_datasets,
    recorded_folders,
)
from scaletrain_cli.spec import RunSpec
from tests.data.texts import ignore
from tests.launch.conftest import make_plan, make_spec

TRAINED = ("data.tokenizer.vocab_size=300", "model.vocab_size=300")


def sources(*paths: Path) -> str:
    each = [f"{{name: {path.stem}, path: {path}, weight: {weight}}}" for weight, path in enumerate(paths, start=1)]
    return f"data.sources=[{', '.join(each)}]"


def spec_of(*paths: Path, more: tuple[str, ...] = ()) -> RunSpec:
    return make_spec("data.source=null", sources(*paths), *TRAINED, *more)


@pytest.fixture
def files(tmp_path: Path) -> dict[str, Path]:
    folder = tmp_path / "texts"
    folder.mkdir()
    found = {name: folder / f"{name}.txt" for name in ("web", "code", "books")}
    for name, path in found.items():
        path.write_text("".join(f"line {line} of {name} has some words\n\n" for line in range(400)))
    return found


def begun(spec: RunSpec) -> tuple[RunDir, RunRecord, dict[str, Path]]:
    made = create_run(spec, make_plan(spec), "r1")
    prepare_run_datasets(spec, made.run.path.parent, {}, 1, ignore)
    return made.run, made.record, splits._folders(spec, made.run)


def test_attempts_resumes_and_reports_use_the_recorded_data_and_never_the_sources(files: dict[str, Path]) -> None:
    spec = spec_of(files["web"], files["code"])
    run, record, found = begun(spec)
    files["web"].chmod(0o600)
    assert splits._folders(spec, run) == found
    shutil.rmtree(files["web"].parent)
    shutil.rmtree(run.path.parent / "datasets" / ".steps")
    assert splits._folders(spec, run) == found
    assert datasets_of(spec, run.path.parent, run) == found
    assert tokenizer_path(spec, run.path.parent, run) == found["web"] / "tokenizer.json"
    changed = spec_of(
        files["web"],
        files["code"],
        more=(
            "data.loader.workers=2",
            "data.stages=[{start: 0.5, weights: {web: 1}}]",
            "data.cache.size=1GB",
            "data.packing=documents",
        ),
    )
    assert splits._folders(changed, run) == found
    require_external_to_resume(run, dataclasses.replace(record, spec=changed))
    check_on_node(run, record, 0, None)
    with pytest.raises(UsageError, match="no such file or folder"):
        splits._folders(spec_of(files["web"], files["code"], more=("data.validation_split=0.2",)), run)


def test_a_resume_that_adds_a_source_looks_at_that_one_alone_and_keeps_the_tokenizer(files: dict[str, Path]) -> None:
    run, record, found = begun(spec_of(files["web"], files["code"]))
    root = run.path.parent
    files["web"].unlink()
    added = spec_of(files["web"], files["code"], files["books"])
    require_external_to_resume(run, dataclasses.replace(record, spec=added))
    known = recorded_folders(added, root, read_entries(datasets_file(run)))[0]
    assert known == found
    assert find_run_datasets(added, root, known) is None
    every = prepare_run_datasets(added, root, known, 1, ignore)
    assert list(every) == ["web", "code", "books"]
    assert {name: every[name] for name in found} == found
    assert len({(folder / "tokenizer.json").read_bytes() for folder in every.values()}) == 1
    splits._require_one_tokenizer(every)
    assert splits._folders(added, run) == every
    files["books"].unlink()
    assert splits._folders(added, run) == every


def test_duplicates_of_an_added_source_are_looked_for_in_the_others_too(files: dict[str, Path]) -> None:
    steps = ("data.prepare=[{step: duplicates, near: false}]",)
    web, code = (files[name].with_suffix(".jsonl") for name in ("web", "code"))
    lines = [json.dumps({"text": f"document {number} of some words"}) + "\n" for number in range(500)]
    web.write_text("".join(lines[:300]))
    code.write_text("".join(lines[200:]))
    run, _, found = begun(spec_of(web, more=steps))
    added = spec_of(web, code, more=steps)
    every = prepare_run_datasets(added, run.path.parent, found, 1, ignore)
    assert every["web"] == found["web"]
    document = json.loads((every["code"] / "dataset.json").read_text())
    assert document["train_documents"] + document["validation_documents"] == 200


def test_a_dataset_that_is_gone_or_replaced_is_named_and_prepared_again(files: dict[str, Path]) -> None:
    spec = spec_of(files["web"])
    run, _, found = begun(spec)
    root, (dataset,) = run.path.parent, found.values()
    (entry,) = read_entries(datasets_file(run))
    (dataset / "dataset.json").write_text(json.dumps({"fingerprint": "another", "seal": entry["seal"]}))
    assert recorded_folders(spec, root, [entry]) == ({}, [dataset])
    shutil.rmtree(dataset)
    with pytest.raises(UsageError, match=rf"{dataset.name} of the run are gone.*scaletrain resume r1"):
        splits._folders(spec, run)
    known, _ = recorded_folders(spec, root, read_entries(datasets_file(run)))
    assert prepare_run_datasets(spec, root, known, 1, ignore) == found
    assert splits._folders(spec, run) == found


def test_the_processes_of_a_job_record_the_datasets_for_the_gang(files: dict[str, Path]) -> None:
    spec = spec_of(files["web"])
    run = create_run(spec, make_plan(spec), "r1").run
    folder, root = run.path / "preparation", run.path.parent
    folder.mkdir()
    (folder / "spec.json").write_text(json.dumps(spec.model_dump(mode="json", by_alias=True)))
    words = [str(folder / "spec.json"), str(root)]
    run_command([*words, "--failure", str(folder / "failure.json")])
    files["web"].unlink()
    assert list(splits._folders(spec, run)) == ["web"]
    answer = run_command([*words, "--check", "--run", str(run.path)])
    assert answer["prepared"]
    assert answer["datasets"] == read_entries(datasets_file(run))


def test_entries_of_other_sources_stay_and_a_damaged_file_counts_as_none(files: dict[str, Path]) -> None:
    spec = spec_of(files["web"])
    run, _, found = begun(spec)
    file = datasets_file(run)
    record_datasets(file, [{"source": "other", "settings": "x", "folder": "y", "fingerprint": None, "seal": None}])
    assert [each["source"] for each in read_entries(file)] == ["web", "other"]
    assert recorded_folders(spec, run.path.parent, read_entries(file)) == (found, [])
    file.write_text('{"datasets": [3, {"settings": 4}, ')
    assert read_entries(file) == []
    assert splits._folders(spec, run) == found
    assert read_entries(file) == entries_of(spec, run.path.parent, found)
