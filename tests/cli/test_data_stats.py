"""data stats: of a spec and of a dataset; what it and data show refuse."""

import json
import os
from importlib.util import find_spec
from pathlib import Path

import pytest

from scaletrain_cli.errors import ExitCode
from tests.cli.command_line import PROJECT, SMALL, Ended, scaletrain
from tests.cli.forked_command_line import forked_scaletrain

pytestmark = pytest.mark.skipif(find_spec("tokenizers") is None, reason="tokenizing needs the extra train")

SPEC = """
data:
  sources: [{name: web, path: web.jsonl, weight: 0.75}, {name: code, path: code.jsonl, weight: 0.25}]
  on_bad: skip
  prepare: [{step: quality, rules: gopher_quality, min_words: 5, min_stop_words: 0}]
  tokenizer: {vocab_size: 300}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a spec and its prepared data."""
    from scaletrain_cli.data.prepared import prepare_data
    from scaletrain_cli.spec import load_spec

    found = tmp_path_factory.mktemp("stats")
    text = SMALL.read_text(encoding="utf-8")
    start, stop = text.index("data:"), text.index("training:")
    (found / "run.yaml").write_text(text[:start] + SPEC.lstrip() + text[stop:], encoding="utf-8")
    for name in ("web", "code"):
        rows = [{"text": f"The {name} of document {n} is here, by person{n}@example.org."} for n in range(900)]
        lines = [*map(json.dumps, rows), '{"text": "too short"}', "no JSON"]
        (found / f"{name}.jsonl").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(found)
        prepare_data(load_spec(found / "run.yaml").data, found / "runs", 1, lambda *_: None)
    return found


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.setenv("PYTHONPATH", str(PROJECT))
    monkeypatch.setenv("SCALETRAIN_RUNS", str(folder / "runs"))
    monkeypatch.chdir(folder)


def stats(*words: str) -> Ended:
    return scaletrain("data", "stats", *words)


def test_a_spec_has_the_report_of_its_mixture_without_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('torch is not installed')\n", encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{PROJECT}")
    answer = stats("run.yaml", "--json", "--html", "page.html").data
    assert answer["schema"] == "scaletrain.data-report/v1"
    assert [source["source"] for source in answer["sources"]] == ["web", "code"]
    assert answer["totals"]["documents_read"] == 2 * 902
    assert sum(answer["totals"]["documents"].values()) == 2 * 900
    mixture = answer["mixture"]
    assert mixture["samples"] == 100 * 16
    assert [(each["source"], each["samples"]) for each in mixture["sources"]] == [("web", 1200), ("code", 400)]
    sequences = (answer["sources"][0]["tokens"]["train"] - 1) // 128
    assert mixture["sources"][0]["epochs"] == 1200 / sequences
    page = Path("page.html").read_text(encoding="utf-8")
    assert "gopher_quality.min_words" in page
    assert "web.jsonl:902" in page


def test_a_dataset_is_reported_alone_without_another_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("subprocess.Popen", None)
    (dataset,) = (path.parent for path in Path("runs").glob("datasets/*/dataset.json") if '"code"' in path.read_text())
    shown = stats(str(dataset))
    assert shown.code == 0, shown.err
    assert shown.out.startswith(f"code  {dataset}\n  900 documents; ")
    assert "mixture" not in shown.out
    refused = stats(str(dataset), "--set", "training.steps=3")
    assert (refused.code, "--set" in refused.err) == (ExitCode.USAGE, True)


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["show", "run.yaml"], "--step"),
        (["show", "run.yaml", "--rank", "0"], "--step"),
        (["show", "run.yaml", "--row", "1", "--step", "1"], "--row and --step"),
        (["show", "nowhere", "--step", "1"], "no run 'nowhere'"),
        (["stats", "nowhere.yaml"], "nowhere.yaml"),
        (["stats", "runs"], "runs is not a prepared dataset"),
        (["stats", "run.yaml", "--html", "no/folder.html"], "--html no/folder.html"),
        (["stats", "run.yaml", "--html", "-"], "--html -"),
        (["stats", "run.yaml", "--set", "data.sources.0.path=code.jsonl"], "not prepared"),
    ],
    ids=lambda words: " ".join(words) if isinstance(words, list) else "",
)
def test_what_cannot_be_shown_ends_with_2_and_the_reason(words: list[str], named: str) -> None:
    ended = forked_scaletrain("data", *words)
    assert (ended.code, ended.out) == (ExitCode.USAGE, "")
    assert named in ended.err
