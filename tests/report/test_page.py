"""`scaletrain report`: one page without outside references, with the figures of `status --json`, whatever the run."""

import base64
import hashlib
import json
import os
import re
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from scaletrain_cli.launch.node.processes import identify
from scaletrain_cli.launch.node.record import NodeRecord, RankRecord, write_node_record
from scaletrain_cli.report.chart import Chart, Line, Span, draw
from scaletrain_cli.report.comparison_sections import page, read_report
from scaletrain_cli.rundir.bad_nodes import BadNode, remember_bad_nodes
from scaletrain_cli.rundir.documents import write_document
from scaletrain_cli.rundir.journal import append_lines, record_event
from scaletrain_cli.rundir.paths import RunDir, runs_root
from scaletrain_cli.rundir.profiles import CAUSES, Profile, profile_folder, rank_file, write_profile
from scaletrain_cli.rundir.record import add_revision, read_record
from scaletrain_cli.telemetry.run import node_file
from scaletrain_cli.telemetry.series import SeriesWriter
from tests.cli.command_line import scaletrain
from tests.cli.prepared_runs import living_process, prepare
from tests.counting import bytes_read_by
from tests.report.made_runs import HOSTILE, Page, trained_run


def written(tmp_path: Path, *runs: str) -> tuple[str, Page]:
    scaletrain("report", *runs, "-o", tmp_path / "report.html", code=0)
    text = (tmp_path / "report.html").read_text(encoding="utf-8")
    return text, Page(text)


def test_the_figures_are_those_of_status(tmp_path: Path) -> None:
    run = trained_run()
    status = scaletrain("status", "r1", "--json").data
    report = scaletrain("report", "r1", "--json").data
    assert (report["schema"], report["ok"], report["sweep"]) == ("scaletrain.report/v1", True, None)
    (found,) = report["runs"]
    del status["ok"]
    assert found["status"] == status
    assert found["diagnosis"]["findings"] == status["findings"] != []
    assert found["curves"]["kept"]["step"] == list(range(1, 301))
    memory = {row["name"]: row for row in found["compared"] if row["topic"] == "step time"}
    assert memory["step"]["measured"] == status["step_seconds"]["measured"] == 0.5
    assert memory["compute"]["measured"] == pytest.approx(0.3)
    _, shown = written(tmp_path, "r1")
    for expected in ("step 300 of 300", "500 ms", "1 rollback", "7.00 GB", "MFU 40 %", status["findings"][0]["text"]):
        assert expected.replace("`", "") in shown.text.replace("`", "")
    assert str(run.path) in shown.text


def test_the_latest_figures_of_a_long_run_are_those_of_status_and_not_of_a_point_of_its_curve() -> None:
    run = trained_run()
    rows = [
        {"step": step, "loss": 2.0, "tokens_per_second": 2e4, "mfu": step / 4000, "step_seconds": 0.5, "attempt": 1}
        for step in range(301, 2001)
    ]
    append_lines(run.metrics, rows)
    status = scaletrain("status", "r1", "--json").data
    (found,) = scaletrain("report", "r1", "--json").data["runs"]
    latest = {row["name"]: row["measured"] for row in found["compared"] if row["topic"] == "throughput"}
    assert latest == {name: status[name] for name in ("tokens_per_second", "mfu")}
    assert latest["mfu"] == 0.5


def test_the_page_has_no_outside_reference_and_only_its_own_script(tmp_path: Path) -> None:
    trained_run()
    text, shown = written(tmp_path, "r1")
    assert re.findall(r"(?:https?:|ftp:|@import|url\()", text) == []
    links = [attributes.get("href") for tag, attributes in shown.tags if tag in ("a", "link")]
    assert {(link or "-")[0] for link in links} == {"#"}
    targets = {attributes.get("id") for _, attributes in shown.tags}
    assert {(link or "")[1:] for link in links} <= targets
    assert not [tag for tag, given in shown.tags if "src" in given or tag in ("iframe", "object", "link", "img")]
    scripts = re.findall(r"<script>(.*?)</script>", text, flags=re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(scripts[0].encode()).digest()).decode()
    policies = [attributes["content"] for _, attributes in shown.tags if attributes.get("http-equiv")]
    assert len(scripts) == len(policies) == 1
    assert f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'" in (policies[0] or "")


def test_drawings_are_named_and_stretch_without_numbers_that_are_not_finite(tmp_path: Path) -> None:
    run = trained_run()
    append_lines(run.metrics, [{"step": 301, "loss": "nan", "grad_norm": 0.0, "attempt": 1, "time": 1e9 + 301}])
    text, shown = written(tmp_path, "r1")
    assert len(shown.drawings) > 16  # each chart over steps and over time
    for drawing in shown.drawings:
        assert drawing.attrib["role"] == "img"
        assert drawing.find("title") is not None
        for path in drawing.iter("path"):
            assert re.fullmatch(r"[-MLHVhvlz0-9. ]*", path.attrib["d"]), path.attrib["d"][:80]
    assert re.findall("NaN|Infinity", text.partition("<script>")[0]) == []
    data = re.search(r'<script type="application/json" id="data">(.*?)</script>', text)
    assert data is not None
    tables = json.loads(data[1])
    areas = [attributes for _, attributes in shown.tags if (attributes.get("class") or "") == "area"]
    assert areas
    for area in areas:
        for series in filter(None, (area["data-series"] or "").split(";")):
            number, _, column = series.split(":", 2)
            assert column in tables[int(number)]["columns"]


def test_texts_of_users_and_programs_are_only_text(tmp_path: Path) -> None:
    run = trained_run(text=HOSTILE)
    node = NodeRecord(f"node-0000-{HOSTILE[:20]}", "h", 0, 1, 1, 1e9, (RankRecord(0, 1, 1e9, 1e9, 1),), 1e9, 1, 0)
    (run.attempt(1) / "nodes" / "node-0000-x.json").write_text(json.dumps({**vars(node), "ranks": []}))
    now = time.time()
    remember_bad_nodes(runs_root(), [BadNode("n", "hardware", HOSTILE, "r1", 1, now, now + 999)], now)
    record = read_record(run)
    add_revision(run, record, record.spec, record.plan, [f"env.X={HOSTILE}", f"name={HOSTILE}"])
    text, shown = written(tmp_path, "r1")
    assert re.findall("<img|alert.1.</script>|onerror=alert.2.>", text) == []
    assert "alert(1)" in shown.text
    assert not [tag for tag, attributes in shown.tags if any(name.startswith("on") for name in attributes)]
    assert f"env.X={HOSTILE[:5]}" not in shown.text  # a value of the environment may be a secret


def test_nothing_but_the_file_is_written_and_what_is_not_a_file_is_refused(tmp_path: Path) -> None:
    trained_run()

    def listing() -> list[tuple[str, int, int]]:
        return sorted((str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in runs_root().rglob("*"))

    before = listing()
    written(tmp_path, "r1")
    assert listing() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["report.html", "runs"]
    os.mkfifo(tmp_path / "pipe")
    for place in (tmp_path, tmp_path / "none" / "report.html", tmp_path / "pipe", "-"):
        ended = scaletrain("report", "r1", "-o", place)
        assert (ended.code, "cannot be written" in ended.err) == (2, True)
    assert (tmp_path / "pipe").is_fifo()
    (tmp_path / "pipe").unlink()
    assert scaletrain("report", "r1").code == scaletrain("report", "r1", "--sweep", "s", "-o", "x.html").code == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["report.html", "runs"]


def test_without_a_name_the_newest_run_is_reported(tmp_path: Path) -> None:
    prepare("finished", "r1")
    prepare("failed", "r2")
    os.utime(tmp_path / "runs" / "r1" / "run.json", (1, 1))
    assert [run["run_id"] for run in scaletrain("report", "--json").data["runs"]] == ["r2"]


@pytest.mark.parametrize("state", ["queued", "running", "preempted", "failed", "cancelled", "unknown"])
def test_a_run_in_every_state_has_a_page(tmp_path: Path, state: str) -> None:
    with living_process() as supervisor:
        prepare(state, "r1", supervisor)
        assert identify(supervisor.pid) is not None
        _, shown = written(tmp_path, "r1")
    assert f"r1 {state}" in shown.text
    assert "no attempt has telemetry" in shown.text[shown.text.index("Not in this report") :]


def test_damaged_files_are_named_in_the_page_and_a_damaged_record_is_an_error(tmp_path: Path) -> None:
    run = trained_run()
    run.metrics.write_bytes(b"\x00\xff{" * 100)
    (run.attempt(1) / "nodes").mkdir(exist_ok=True)
    (run.attempt(1) / "nodes" / "node-0000-n.json").write_text('{"node": 3}')
    _, shown = written(tmp_path, "r1")
    assert "no step was measured yet" in shown.text
    assert re.search("nodes: .* is damaged", shown.text)
    run.record.write_text("{")
    ended = scaletrain("report", "r1", "-o", tmp_path / "other.html")
    assert (ended.code, "run.json is damaged" in ended.err) == (2, True)
    assert not (tmp_path / "other.html").exists()


def test_attempts_nodes_and_exclusions_are_shown(tmp_path: Path) -> None:
    run = trained_run()
    rank = RankRecord(1, 11, 1e9, 1e9 + 5, -9, "SIGKILL")
    write_node_record(run, 1, NodeRecord("node-0000-n", "n", 0, 1, 1, 1e9, (rank,), 1e9 + 5, 1, 1))
    now = time.time()
    remember_bad_nodes(runs_root(), [BadNode("n", "hardware", "ECC errors of GPU 3", "r1", 1, now, now + 9999)], now)
    _, shown = written(tmp_path, "r1")
    assert "attempt 1: rank 1 ended by SIGKILL" in shown.text
    assert "ECC errors of GPU 3" in shown.text


def test_a_profile_is_shown_beside_the_plan(tmp_path: Path) -> None:
    run = trained_run()
    folder = profile_folder(run, 1, 100)
    planned = {"compute": 0.4, "step": 0.5}
    write_profile(folder, Profile("q", 1, "recorded", 100, 3, [0], "gpu", planned))
    causes = dict.fromkeys(CAUSES, 0.0) | {"compute": 0.3, "idle": 0.1}
    kernels = [{"name": "sm90_<gemm>", "seconds": 0.25, "count": 64.0}]
    write_document(rank_file(folder, 0), {"causes": causes, "step_seconds": 0.6, "top_kernels": kernels})
    _, shown = written(tmp_path, "r1")
    assert "Attempt 1, steps 100 to 102, ranks 0" in shown.text
    assert "compute 400 ms 300 ms 50 %" in shown.text
    assert "sm90_<gemm> 250 ms 64" in shown.text


def test_a_revision_is_a_diff_without_values_of_environment_variables(tmp_path: Path) -> None:
    run = trained_run()
    record = read_record(run)
    changed = record.spec.model_copy(update={"name": "other"})
    secret = "hf_0123456789"
    changed = changed.model_copy(update={"env": {"HF_TOKEN": secret}})
    overrides = ["name=other", f"env.HF_TOKEN={secret}", f"env={{HF_TOKEN: {secret}}}", f" env.HF_TOKEN={secret}"]
    add_revision(run, record, changed, record.plan, overrides)
    text, shown = written(tmp_path, "r1")
    assert secret not in text
    assert secret not in json.dumps(scaletrain("report", "r1", "--json").data)
    assert "name=other, env.HF_TOKEN=(set), env=(set), env.HF_TOKEN=(set)" in shown.text
    assert "Revision 1" in shown.text
    assert re.search(r"- name: \S+ \+ name: other", shown.text)


def huge_run(steps: int, nodes: int, ranks_of_node: int) -> RunDir:
    """A run whose journals and telemetry have the size of ``nodes`` nodes; its spec is small."""
    run = RunDir(prepare("finished", "huge", None, f"training.steps={steps}"))
    line = (
        '{"step":%d,"loss":3.%d,"grad_norm":0.9%d,"learning_rate":0.0003,"data_wait":0.0002,"tokens_per_second":14058.8'
    )
    line += ',"step_seconds":0.07%d,"memory_bytes":585383936,"mfu":0.41,"attempt":1,"time":%d.786}\n'
    with run.metrics.open("w") as file:
        rows = (line % (at, at % 97, at % 89, at % 7, 10**9 + at) for at in range(1, steps + 1))
        file.writelines(rows)
    for step in range(500, steps + 1, 500):
        if step % 20_000 == 0 or step < 50_000:
            record_event(run, "checkpoint", step=step, attempt=1, bytes=10**9, seconds=3.0, blocked_seconds=0.1)
    for node in range(nodes):
        name = f"node-{node:04d}-n{node:03d}"
        ranks = tuple(RankRecord(node * ranks_of_node + at, 1, 1e9) for at in range(ranks_of_node))
        write_node_record(run, 1, NodeRecord(name, f"n{node:03d}", node, 1, 1, 1e9, ranks))
        writer = SeriesWriter(node_file(run, 1, name))
        for second in range(5):
            for at in range(ranks_of_node):
                values = {"memory_bytes": 6e10, "own_seconds": 0.2}
                writer.add(f"rank {node * ranks_of_node + at}", 1e9 + second, second, values)
                writer.add(f"gpu {at}", 1e9 + second, second, {"utilization": 0.9, "temperature_celsius": 60.0})
        writer.close()
    return run


@pytest.mark.long
def test_the_files_of_a_million_steps_on_4096_ranks_are_read_once_for_a_page_of_megabytes() -> None:
    run = huge_run(1_000_000, 512, 8)
    text = ""

    def read() -> None:
        nonlocal text
        text = page(read_report([run]))

    assert bytes_read_by(read) < 1.1 * sum(path.stat().st_size for path in run.path.rglob("*") if path.is_file())
    assert len(text) < 5_000_000
    assert Page(text).drawings


CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome") or shutil.which("chromium-browser")


@pytest.mark.long
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")
def test_a_browser_runs_the_page_without_errors(tmp_path: Path) -> None:
    trained_run()
    written(tmp_path, "r1")
    assert CHROMIUM is not None
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}"]
    command += ["--enable-logging=stderr", "--v=0", "--virtual-time-budget=2000", "--dump-dom"]
    ended = subprocess.run([*command, f"file://{tmp_path}/report.html"], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    assert [line for line in ended.stderr.splitlines() if "CONSOLE" in line] == []
    assert 'id="loss"' in ended.stdout


def test_json_has_no_value_that_json_lacks() -> None:
    run = trained_run()
    append_lines(run.metrics, [{"step": 301, "loss": None}])
    report: dict[str, Any] = read_report([run])
    text = json.dumps(report, allow_nan=False)
    assert json.loads(text)["runs"][0]["status"]["run_id"] == run.run_id


def test_a_line_that_went_back_begins_again_and_a_value_that_is_not_known_is_a_gap() -> None:
    times = [float(at) for at in range(6)]
    line = Line("l", "c0", [0, 50, 25, 75, 80, 100], times, [0.0, 2.0, 1.0, 4.0, None, 4.0])
    (drawing,) = Page(draw(Chart("k", "Title", "", [line]), Span(0, 100, 0.0, 0.0))).drawings
    (path,) = [path.attrib["d"] for path in drawing.iter("path") if path.attrib["class"] == "line c0"]
    assert re.findall(r"M(\d+)", path) == ["0", "600", "2400"]
    heights = [int(number) for number in re.findall(r"M\d+ (\d+)", path)]
    assert heights[0] > heights[1] > heights[2]  # greater values are higher, and y counts from the top
