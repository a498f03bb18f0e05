"""`scaletrain plan` states tokens and epochs of each source, and what submit would reject about its files."""

import json
from pathlib import Path

import pytest

from scaletrain_cli.data.estimate import SourceSize
from scaletrain_cli.errors import ExitCode
from scaletrain_cli.launch.data_summary import planned_sources
from scaletrain_cli.spec import load_spec
from tests.cli.command_line import SMALL, scaletrain


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    line = json.dumps({"text": "several words in a row " * 20}) + "\n"
    (tmp_path / "web.jsonl").write_text(line * 8000)
    (tmp_path / "code.jsonl").write_text(line * 100)
    return tmp_path


def options(*sets: str) -> list[str]:
    return [word for one in sets for word in ("--set", one)]


SOURCES = "data.sources=[{name: web, path: web.jsonl, weight: 3}, {name: code, path: code.jsonl, weight: 1}]"
MIXED = ("data.source=null", SOURCES, "training.steps=1000")


def test_epochs_of_each_source_follow_its_weight_in_all_stages(folder: Path) -> None:
    sets = (*MIXED, "data.stages=[{start: 0.8, weights: {web: 1}}]")
    data = scaletrain("plan", SMALL, "--json", *options(*sets)).data["data"]
    web, code = data["sources"]
    assert (web["samples"], code["samples"]) == (12800, 3200)
    for source, documents in ((web, 8000), (code, 100)):
        assert source["sequences"] == pytest.approx(documents * 460 * 0.95 / 2.9 / 128, rel=0.05)
        assert source["epochs"] == pytest.approx(source["samples"] / source["sequences"])
    assert code["advice"]["code"] == "checks.source-repeated"
    assert web["advice"] is None
    shown = " ".join(scaletrain("plan", SMALL, *options(*sets)).out.split())
    assert f"web: about {web['epochs']:.2g} epochs of about " in shown
    assert f"code: about {code['epochs']:.2g} epochs of about " in shown
    assert "(arXiv 2305.16264)" in shown


def test_a_source_with_epochs_has_these_epochs_and_one_without_weight_is_never_read() -> None:
    sources = (
        "data.sources=[{name: a, path: a, epochs: 2}, {name: b, path: b, weight: 1}, {name: c, path: c, weight: 0}]"
    )
    spec = load_spec(SMALL, ["data.source=null", sources, "training.steps=1000"])
    sizes = {name: SourceSize(name, 128 * 1000 + 1, exact=True) for name in "abc"}
    a, b, c = planned_sources(spec, sizes)
    assert (a.epochs, a.samples, b.samples, c.samples) == (pytest.approx(2), 2000, 14000, 0)
    assert a.advice is None
    assert c.advice.code == "checks.source-unused"
    short = spec.model_copy(update={"training": spec.training.model_copy(update={"steps": 100})})
    a, *_ = planned_sources(short, sizes)
    assert a.advice.code == "data.epochs-exceed-run"
    assert planned_sources(spec, {})[0].epochs is None


def test_a_file_that_is_missing_is_a_warning_and_one_that_cannot_be_used_is_an_error(folder: Path) -> None:
    missing = scaletrain("plan", SMALL, *options("data.source=nowhere/*.jsonl", "model.weights=nowhere"), code=0)
    assert "submit would reject this: --set data.source = nowhere/*.jsonl: no file matches" in " ".join(
        missing.err.split()
    )
    (folder / "run.yaml").write_text(SMALL.read_text().replace("source: python-stdlib", "source: code.txt"))
    (folder / "code.txt").write_bytes(b"\xff\xfe" * 999)
    wrong = scaletrain("plan", "run.yaml", code=ExitCode.USAGE)
    assert "run.yaml:15 data.source = code.txt: " in wrong.err
    assert "is not UTF-8 text" in " ".join(wrong.err.split())
    assert wrong.out.startswith("llama-10m-cpu"), "the plan is shown first"
    found = scaletrain("plan", "run.yaml", "--json", code=ExitCode.USAGE)
    (problem,) = json.JSONDecoder().raw_decode(found.out)[0]["data"]["unusable"]
    assert (problem["file"], problem["line"], problem["key"]) == ("run.yaml", 15, "data.source")


def test_a_plan_without_files_looks_at_none() -> None:
    assert scaletrain("plan", SMALL, "--json").data["data"] is None
