"""`scaletrain plan`: explanations, comparisons, figures, limits, and errors."""

import errno
import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from scaletrain_cli.errors import ExitCode
from tests.cli.command_line import PROJECT, SMALL, scaletrain
from tests.report.made_runs import Page

RECIPE = PROJECT / "recipes" / "llama-7b-h100.yaml"
TOO_LARGE = ["--set=model={preset: llama-70b}", "--set=data.tokenizer.vocab_size=4096"]
HAS_MATPLOTLIB = importlib.util.find_spec("matplotlib") is not None


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_explain_adds_the_reasons_to_the_plan() -> None:
    plain = scaletrain("plan", SMALL)
    ended = scaletrain("plan", SMALL, "--explain", code=0)
    assert ended.out.startswith(plain.out)
    assert "Why this layout" in ended.out[len(plain.out) :]
    data = scaletrain("plan", SMALL, "--explain", "--json").data
    assert {"question", "rows", "answer", "verdict", "follows"} <= data["explanation"][0].keys()
    assert {key: data[key] for key in data if key != "explanation"} == scaletrain("plan", SMALL, "--json").data


def test_explain_lists_the_layouts_considered_if_nothing_fits() -> None:
    ended = scaletrain("plan", SMALL, *TOO_LARGE, "--explain", "--json", code=ExitCode.INFEASIBLE)
    assert [question["answer"] for question in ended.data["explanation"]][1:3] == [False, False]


def test_plan_json_has_feasible_and_the_problems() -> None:
    fits = scaletrain("plan", SMALL, "--json").data
    assert (fits["feasible"], fits["problems"]) == (True, [])
    does_not_fit = scaletrain("plan", SMALL, *TOO_LARGE, "--json", code=ExitCode.INFEASIBLE)
    assert does_not_fit.data["feasible"] is False
    assert does_not_fit.data["memory"]["peak"] > does_not_fit.data["memory"]["capacity"]
    assert "needed" in {problem["where"] for problem in does_not_fit.data["problems"]}
    does_not_divide = scaletrain("plan", SMALL, "--set", "layout.data_parallel=3", "--json", code=ExitCode.INFEASIBLE)
    assert set(does_not_divide.data) == {"schema", "ok", "error", "feasible", "problems"}
    problem = does_not_divide.data["problems"][0]
    assert set(problem) == {"where", "file", "line", "key", "message", "given", "hint", "reason"}
    assert problem["key"] == "layout.data_parallel"
    too_soon = scaletrain("plan", SMALL, "--deadline", "1s", "--json", code=ExitCode.INFEASIBLE)
    assert set(too_soon.data) == {"schema", "ok", "error", "feasible", "problems", "sizing"}


def test_several_specs_are_compared_with_the_first() -> None:
    ended = scaletrain("plan", SMALL, RECIPE, code=0)
    assert "llama-10m-cpu" in ended.out.splitlines()[0]
    assert "llama-7b-h100" in ended.out.splitlines()[0]
    both = scaletrain("plan", SMALL, RECIPE, "--json").data["runs"]
    assert [column["name"] for column in both] == ["llama-10m-cpu", "llama-7b-h100"]
    alone = scaletrain("plan", RECIPE, "--json").data
    assert both[1]["plan"] == {key: value for key, value in alone.items() if key in both[1]["plan"]}
    assert alone.keys() - both[1]["plan"].keys() <= {"ok", "feasible", "problems", "data", "epochs"}


def test_vary_compares_the_values_of_a_key() -> None:
    ended = scaletrain("plan", SMALL, "--vary", "training.micro_batch_size=1,2,8", "--json")
    assert [column["plan"]["layout"]["micro_batch_size"] for column in ended.data["runs"]] == [1, 2, 8]
    assert ended.data["runs"][0]["name"] == "micro_batch_size=1"
    only = scaletrain("plan", SMALL, "--vary", "training.micro_batch_size=2", "--json")
    assert only.data["layout"]["micro_batch_size"] == 2


def test_warnings_of_each_compared_run_are_shown() -> None:
    ended = scaletrain("plan", RECIPE, "--vary", "layout.zero_stage=0,1")
    assert "zero_stage=0: layout.zero_stage = 0 with bf16 runs as ZeRO-1" in " ".join(ended.out.split())


def test_an_infeasible_run_is_a_column_and_the_code_is_3_only_if_all_are() -> None:
    some = scaletrain("plan", SMALL, "--vary", "model.num_hidden_layers=100000,8", "--json", code=0)
    assert [column["feasible"] for column in some.data["runs"]] == [False, True]
    assert "does not fit" in some.data["runs"][0]["reason"]
    none = scaletrain("plan", SMALL, *TOO_LARGE, "--vary", "layout.data_parallel=3,5", code=ExitCode.INFEASIBLE)
    assert "does not divide" in none.out
    assert "none of the 2 runs fits" in none.err
    assert "  data_parallel=3: --set layout.data_parallel = 3: " in none.err
    assert none.err.count("Use ") == 2  # what would do, for each


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["nowhere.yaml", SMALL], "cannot read the run spec nowhere.yaml"),
        ([SMALL, "--vary", "layout.zero_stag=1,2"], "layout.zero_stag: unknown key"),
        ([SMALL, "--vary", "layout.zero_stage=1,9"], "--vary layout.zero_stage = 9: must be 0, 1, 2, 3 or auto."),
        ([SMALL, "--set", "model={preset: llama-7}"], "is not a known preset. Did you mean llama-7b? Known: "),
        ([SMALL, "--vary", "layout.zero_stage"], "must look like section.key=value,value"),
        ([SMALL, SMALL, "--explain"], "--explain requires a single run, but 2 are compared"),
        ([SMALL, SMALL, "--plot", "a.svg"], "--plot requires a single run"),
        ([SMALL, SMALL, "--deadline", "3d"], "requires a single run"),
        ([SMALL, "--deadline", "soon"], "--deadline = soon: must be a duration, such as"),
        ([SMALL, "--deadline", "0d"], "--deadline = 0d: must be above 0"),
        ([SMALL, "--budget", "much"], "--budget = much: must be dollars, such as 50000 or 50k."),
        ([SMALL, "--gpu", "nothing"], "--gpu = nothing: is not in the hardware catalogue. Known: "),
        ([SMALL, "--gpu", ""], "--gpu = : is not in the hardware catalogue. Known: "),
        ([SMALL, "--gpu", "h100-sxm-80g"], "Did you mean h100-sxm-80gb?"),
        ([SMALL, "--plot", ""], "--plot needs the name of a file"),
        ([RECIPE, "--max-gpus", "3"], "Use --max-gpus 8 or more"),
        ([SMALL, "--max-gpus", "0"], "'--max-gpus'"),
        ([SMALL, "--objective", "fun"], "'--objective'"),
        ([SMALL, "--trace", "nowhere.json"], "nowhere.json"),
        ([SMALL, "--plot", "a.pdf"], "must end in .html, .svg or .png"),
        ([SMALL, "--plot", "no/such/a.svg"], "there is no folder no/such"),
        ([SMALL, "--plot", "folder.png"], "is a folder"),
        ([SMALL, "--plto", "a.png"], "--plto"),
    ],
    ids=str,
)
def test_an_invalid_option_is_one_error_and_no_file(arguments: list[Any], expected: str, tmp_path: Path) -> None:
    (tmp_path / "folder.png").mkdir()
    ended = scaletrain("plan", *arguments, code=ExitCode.USAGE)
    assert expected in " ".join(ended.err.replace("│", " ").split())
    assert ended.out == ""
    assert [path.name for path in tmp_path.iterdir()] == ["folder.png"]


def test_an_unwritable_plot_file_is_reported_before_planning(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path, data: bytes) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr("scaletrain_cli.ui.plots.create_file", refuse)
    monkeypatch.setattr("scaletrain_cli.plan.advice.answer.answer", _must_not_run)
    ended = scaletrain("plan", SMALL, "--plot", "a.svg")
    assert (ended.code, ended.out) == (ExitCode.USAGE, "")
    assert "a.svg: cannot be written: Permission denied." in ended.err


@pytest.mark.skipif(not HAS_MATPLOTLIB, reason="needs the extra [plot]")
@pytest.mark.parametrize("kind", ["svg", *(pytest.param(kind, marks=pytest.mark.long) for kind in ("png", "html"))])
def test_a_figure_is_complete_and_reproducible(kind: str, tmp_path: Path) -> None:
    drawn = []
    for _ in range(2):
        ended = scaletrain("plan", SMALL, "--plot", f"a.{kind}")
        assert (ended.code, ended.err) == (0, f"wrote a.{kind}\n")
        drawn.append((tmp_path / f"a.{kind}").read_bytes())
    assert drawn[0] == drawn[1]
    starts = {"svg": b"<?xml", "png": b"\x89PNG", "html": b"<!DOCTYPE html>"}
    assert drawn[0].startswith(starts[kind])
    assert {path.name for path in tmp_path.iterdir()} - {"config"} == {f"a.{kind}"}


@pytest.mark.skipif(not HAS_MATPLOTLIB, reason="needs the extra [plot]")
def test_an_html_figure_has_the_numbers_and_escapes_markup() -> None:
    ended = scaletrain(
        "plan", SMALL, "--set=name=<script>alert(1)</script> $\\frac 漢", "--plot", "a.html", "--explain"
    )
    assert ended.code == 0
    text = Path("a.html").read_text(encoding="utf-8")
    assert "<script" not in text
    assert "Why this layout" in text
    assert "Scaling, same global batch" in text
    assert "default-src 'none'; style-src 'unsafe-inline'\"" in text
    assert "Ruled out" in Page(text).text


@pytest.mark.skipif(not HAS_MATPLOTLIB, reason="needs the extra [plot]")
def test_a_plan_that_does_not_fit_is_drawn_against_the_device() -> None:
    scaletrain("plan", SMALL, *TOO_LARGE, "--plot", "a.svg", code=ExitCode.INFEASIBLE)
    assert Path("a.svg").exists()


@pytest.mark.skipif(not HAS_MATPLOTLIB, reason="needs the extra [plot]")
def test_a_failed_figure_keeps_the_previous_file(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("a.svg").write_text("precious")
    monkeypatch.setattr("scaletrain_cli.ui.plan_figure.image", _must_not_run)
    with pytest.raises(AssertionError):
        scaletrain("plan", SMALL, "--plot", "a.svg")
    assert Path("a.svg").read_text() == "precious"


def test_plan_json_is_valid_with_plot() -> None:
    if not HAS_MATPLOTLIB:
        pytest.skip("needs the extra [plot]")
    ended = scaletrain("plan", SMALL, "--json", "--plot", "a.png")
    assert json.loads(ended.out)["memory"]["fits"]
    assert Path("a.png").read_bytes().startswith(b"\x89PNG")


def _must_not_run(*_: Any, **__: Any) -> Any:
    raise AssertionError("this must not run")


def test_a_deadline_chooses_the_cluster_and_shows_the_alternatives() -> None:
    ended = scaletrain("plan", RECIPE, "--deadline", "60d", "--max-gpus", "64", code=0)
    assert ended.out.startswith("Cluster with the fewest GPUs: at most 64 GPUs, finished in 60 d\n")
    data = scaletrain("plan", RECIPE, "--deadline", "60d", "--max-gpus", "64", "--json").data
    (chosen,) = [row for row in data["sizing"]["considered"] if row["chosen"]]
    assert chosen["gpus"] == data["layout"]["world_size"] < 64
    assert chosen["seconds"] <= 60 * 86400
    assert data["sizing"]["probability"] > 0.99, "a third of the deadline is planned"
    assert "probability of meeting the limits, from the errors of plans: 99 %\n" in ended.out


def test_a_deadline_that_no_cluster_meets_ends_with_3_and_the_table() -> None:
    ended = scaletrain("plan", RECIPE, "--deadline", "1h", code=ExitCode.INFEASIBLE)
    assert ended.out.splitlines()[0].split()[:2] == ["GPUs", "time"]
    assert "at most 512 GPUs" in ended.err  # sixteen times those of the spec
    within = scaletrain("plan", RECIPE, "--deadline", "1h", "--max-gpus", "64")
    assert "at most 64 GPUs" in within.err
    as_json = scaletrain("plan", RECIPE, "--deadline", "1h", "--json", code=ExitCode.INFEASIBLE)
    assert not any(row["chosen"] for row in as_json.data["sizing"]["considered"])


def test_other_gpus_are_considered_if_requested() -> None:
    names = ["h100-sxm-80gb", "a100-sxm-80gb"]
    data = scaletrain("plan", RECIPE, "--objective=time", *(f"--gpu={name}" for name in names), "--json").data
    assert {row["gpu"] for row in data["sizing"]["considered"]} == set(names)


def test_a_run_is_simulated_on_a_trace(tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    trace.write_text(json.dumps({"metadata": {"gap_seconds": 3600}, "data": [4] * 40 + [0] * 8}))
    spot = ["--set=cluster.spot=true", "--trace", trace]
    ended = scaletrain("plan", RECIPE, *spot, code=0)
    assert "On the spot trace trace.json of 2 d: the run finishes from 16 of 16 starting points" in ended.out
    data = scaletrain("plan", RECIPE, *spot, "--json").data
    assert data["trace"]["nodes_needed"] == 4
    assert data["trace"]["days"]["median"] > data["trace"]["on_demand_days"]
