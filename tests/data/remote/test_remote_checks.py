import json
import os
from pathlib import Path

import pytest

from scaletrain_cli.data.block_cache import BlockCache, block_cache
from scaletrain_cli.data.estimate import preparation_seconds
from scaletrain_cli.data.prepared import prepare_data
from scaletrain_cli.data.sources import places
from scaletrain_cli.engine.data import upload
from scaletrain_cli.errors import ExitCode, UsageError
from scaletrain_cli.launch.preparation import prepare_data as prepare_before_a_run
from scaletrain_cli.launch.resource_checks.sources import cache_problems, check_text
from scaletrain_cli.launch.resource_checks.view import View
from scaletrain_cli.rundir.paths import runs_root
from scaletrain_cli.spec import load_spec
from scaletrain_cli.spec.sources import CacheSpec
from tests.cli.command_line import SMALL, Ended, scaletrain
from tests.data.remote.conftest import BUCKET
from tests.data.remote.faults import FaultyProxy

WEB = f"s3://{BUCKET}/web"
DOCUMENTS = "".join(json.dumps({"text": f"Document {number} has some words."}) + "\n" for number in range(99))


def submit(source: str, *words: str) -> Ended:
    path = Path("run.yaml")
    path.write_text(SMALL.read_text().replace("  source: python-stdlib", f"  source: {source}"))
    return scaletrain("submit", path, "--dry-run", *words)


@pytest.mark.parametrize(
    ("source", "fault", "said"),
    [
        (f"{WEB}/*.parquet", None, f"no object matches {WEB}/*.parquet"),
        (f"{WEB}/none.jsonl", None, "does not exist"),
        ("s3://no-such-bucket/web", None, "the bucket no-such-bucket"),
        (WEB, "denied", "cannot be accessed (HTTP 403"),
        (f"s3://{BUCKET}/cut", None, "a.jsonl:1: is not JSON"),
        (f"s3://{BUCKET}/other", None, "has no prepared data of this version"),
    ],
)
def test_a_remote_source_that_cannot_be_read_is_refused_with_its_line(
    s3: FaultyProxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, fault: str | None, said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    places.write_file(f"{WEB}/a.jsonl", DOCUMENTS.encode())
    places.write_file(f"s3://{BUCKET}/cut/a.jsonl", b'{"text": ')
    places.write_file(f"s3://{BUCKET}/other/dataset.json", b"{}")
    s3.fault = lambda request: fault
    refused = submit(source)
    assert refused.code == ExitCode.USAGE, refused
    shown = " ".join(refused.err.split())
    assert "run.yaml:" in shown
    assert f" data.source = {source}: " in shown
    assert said in shown
    assert "of-the-test" not in shown
    assert not runs_root().exists()


@pytest.mark.parametrize("missing", ["network", "credentials"])
def test_a_store_that_only_the_nodes_may_reach_is_a_note_unless_the_run_is_on_this_machine(
    s3: FaultyProxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SCALETRAIN_REMOTE_TIMEOUT", "0.2")
    source = f"s3://{BUCKET}-of-nodes/web/*.jsonl"  # a bucket without a store in this process
    if missing == "network":
        monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
        said = "could not be accessed within"
    else:
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            monkeypatch.delenv(name)
        said = "there are no credentials"
    refused = submit(source)
    assert refused.code == ExitCode.USAGE, refused
    assert f" data.source = {source}: " in " ".join(refused.err.split())
    assert said in " ".join(refused.err.split())
    on_node = View(load_spec("run.yaml"), tmp_path, os.environ, on_node=True)
    assert bool(check_text(on_node).problems) is (missing == "credentials"), "an outage may pass"
    noted = submit(source, "--set", "cluster.scheduler=slurm")
    assert noted.code == 0, noted.err
    shown = " ".join(noted.err.split())
    assert f"not checked here: data.source = {source}: " in shown
    assert said in shown


def test_remote_text_and_prepared_data_that_a_run_can_use_are_accepted(
    s3: FaultyProxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    places.write_file(f"{WEB}/a.jsonl", DOCUMENTS.encode())
    assert submit(WEB).code == 0
    (tmp_path / "corpus.txt").write_text("Some words in a text that is long enough.\n\n" * 3000)
    prepare_data(load_spec(_spec("corpus.txt")).data, runs_root(), 1, lambda phase, done, total: None)
    head, line = scaletrain("data", "upload", "run.yaml", f"s3://{BUCKET}/prepared", code=0).out.splitlines()
    assert head == "data:"
    key, path = line.split(": ", 1)
    assert key == "  source"
    tokenizer = "  tokenizer: {kind: bpe, vocab_size: 4096}\n"
    assert tokenizer in SMALL.read_text()
    Path("run.yaml").write_text(SMALL.read_text().replace("  source: python-stdlib", line).replace(tokenizer, ""))
    scaletrain("submit", "run.yaml", "--dry-run", code=0)
    written = _spec(path)
    (source,) = scaletrain("plan", written, "--json", code=0).data["data"]["sources"]
    assert (source["exact"], source["files"]) == (True, 0)
    assert source["tokens"] > 20_000
    assert preparation_seconds(load_spec(written), runs_root()) == 0
    _requires_a_cache_that_can_be_used(path, tmp_path)
    own = tmp_path / "other-machine"
    assert prepare_before_a_run(load_spec(written), root=own).tasks == 0
    assert (next((own / "datasets").glob("remote-*")) / "tokenizer.json").is_file()
    small = submit(path, "--set", "model.vocab_size=256", "--set", "data.tokenizer.vocab_size=256")
    assert small.code == ExitCode.USAGE
    assert "data.source" in small.err


def _requires_a_cache_that_can_be_used(path: str, folder: Path) -> None:
    (folder / "file").touch()
    for place, error in ((folder / "file" / "cache", "Not a directory"), (folder / "shared", "not private")):
        if place.name == "shared":
            BlockCache(place / "x", 1).make_folders()
            block_cache(CacheSpec(path=str(place))).folder.mkdir(mode=0o777)
            block_cache(CacheSpec(path=str(place))).folder.chmod(0o777)
        refused = submit(path, "--set", f"data.cache.path={place}")
        assert refused.code == ExitCode.USAGE
        assert f"data.cache.path = {place}" in refused.err
        assert error in " ".join(refused.err.split())
        spec = load_spec("run.yaml", overrides=[f"data.cache.path={place}"])
        (problem,) = cache_problems(View(spec, folder, os.environ, on_node=True))
        assert problem.key == "data.cache.path"
    assert submit(path, "--set", f"data.cache.path={folder / 'new'}").code == 0
    assert not (folder / "new").exists()


def _spec(source: str) -> Path:
    path = Path("run.yaml")
    path.write_text(SMALL.read_text().replace("  source: python-stdlib", f"  source: {source}"))
    return path


def test_an_upload_names_what_is_missing(s3: FaultyProxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "corpus.txt").write_text("Some words.\n\n" * 3000)
    _spec("corpus.txt")
    Path("spec.json").write_text(load_spec("run.yaml").model_dump_json(by_alias=True))
    for destination, said in (
        (f"s3://{BUCKET}/x", "Run scaletrain data prepare SPEC"),
        ("/data", "/data is no remote folder"),
    ):
        with pytest.raises(UsageError, match=said):
            upload.run_command(["spec.json", str(runs_root()), destination])
