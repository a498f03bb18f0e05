"""Reports of several runs and of sweeps: which run is the best, what differs, and parallel coordinates."""

from pathlib import Path

import pytest

from scaletrain_cli.report.comparison_sections import page, ranked, read_report, short_names
from scaletrain_cli.rundir.paths import RunDir, SweepPlace, find_sweep, write_sweep_place
from tests.cli.command_line import scaletrain
from tests.report.made_runs import HOSTILE, Page, trained_run

RATES = {"s-1": 1e-3, "s-2": 1e-2, "s-3": 3e-2}
LOSSES = {"s-1": 3.0, "s-2": 1.5, "s-3": 2.5}


@pytest.fixture
def runs() -> list[RunDir]:
    made = []
    for number, (name, rate) in enumerate(RATES.items(), 1):
        setting = f"training.optimizer.lr={rate}"
        run = trained_run(name, setting, loss=LOSSES[name])
        write_sweep_place(run, SweepPlace("s", number, 4, (setting, f"cluster.env={HOSTILE}")))
        made.append(run)
    return made


def test_runs_are_compared_by_their_figures_and_the_keys_that_differ(runs: list[RunDir], tmp_path: Path) -> None:
    ended = scaletrain("report", *RATES, "-o", tmp_path / "three.html", "--json")
    report = ended.data
    assert report["sweep"] is None
    (difference,) = [row for row in report["differences"] if not row["key"].startswith("data.")]
    assert (difference["key"], difference["values"]) == ("training.optimizer.lr", list(RATES.values()))
    assert report["measure"] == "validation_loss"
    assert report["final"] == {name: pytest.approx(loss + 0.4) for name, loss in LOSSES.items()}
    shown = Page((tmp_path / "three.html").read_text(encoding="utf-8"))
    assert "3 finished. The best validation loss is 1.9, of s-2." in shown.text
    loss = next(drawing for drawing in shown.drawings if "Training loss over steps" in str(drawing.attrib))
    assert len([path for path in loss.iter("path") if "line" in path.attrib["class"].split()]) == 3
    assert (
        scaletrain("status", "s-1", "--json").data["cost_so_far_usd"] == report["runs"][0]["status"]["cost_so_far_usd"]
    )


def test_a_sweep_has_parallel_coordinates_and_its_best_and_unread_points(runs: list[RunDir], tmp_path: Path) -> None:
    runs[2].record.write_text("{")
    for arguments in (["s"], ["--sweep", "s"]):
        assert scaletrain("report", *arguments, "-o", tmp_path / "sweep.html").code == 0
    report = read_report(find_sweep("s").runs, find_sweep("s"))
    assert [parameter["key"] for parameter in report["sweep"]["parameters"]] == ["training.optimizer.lr", "cluster.env"]
    assert report["sweep"]["parameters"][0]["values"] == RATES
    assert ranked(report) == ["s-2", "s-1"]
    assert [each["run_id"] for each in report["damaged"]] == ["s-3"]
    shown = Page(page(report))
    drawing = next(each for each in shown.drawings if "parameters of 2 runs" in str(each.attrib))
    points = {one.attrib["class"]: one.attrib["d"] for one in drawing.iter("path") if "point" in one.attrib["class"]}
    assert points == {"point q0 best": "M0 0L1200 400L2400 800", "point q2": "M0 800L1200 400L2400 0"}
    assert "s-3: " in shown.text
    assert "2 of 4 not readable or deleted" in shown.text
    best = shown.text[shown.text.index("Best points") :]
    assert best.index("0.01") < best.index("0.001")


def test_a_sweep_is_reported_alone(runs: list[RunDir], tmp_path: Path) -> None:
    ended = scaletrain("report", "s", "s-1", "-o", tmp_path / "x.html")
    assert (ended.code, "reported alone" in ended.err) == (2, True)


def test_names_are_shown_without_the_words_that_all_begin_with() -> None:
    assert short_names(["sweep-1-lr-1e-3", "sweep-1-lr-2e-3"]) == ["1e-3", "2e-3"]
    assert short_names(["a", "b"]) == ["a", "b"]
    assert short_names(["alone-run"]) == ["alone-run"]
