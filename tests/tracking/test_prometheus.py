import dataclasses
import json
import re
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from scaletrain_cli.project_files import project_file
from scaletrain_cli.tracking import prometheus
from scaletrain_cli.tracking.base import RunFigures, Spread, TrackedRun
from scaletrain_cli.tracking.prometheus import (
    OPENMETRICS,
    PrometheusOptions,
    PrometheusTracker,
    exposition,
    families,
    pause_seconds,
)
from tests.ports import reserved_port
from tests.waiting import wait_until

# Columns of telemetry with every kind of unit.
COLUMNS = {
    "rank": ("own_seconds", "communication_seconds", "memory_bytes", "allocation_retries"),
    "gpu": (
        *("utilization_ratio", "sm_clock_hertz", "temperature_celsius", "power_watts", "throttled_by_heat_ratio"),
        "nvlink_bytes_per_second",
    ),
    "node": ("cpu_utilization_ratio", "memory_available_bytes", "disk_read_bytes_per_second"),
}
FIGURES = RunFigures(
    total_steps=1000,
    ranks=4096,
    planned_step_seconds=1.5,
    goodput=0.96,
    remaining_seconds=3600.0,
    cost_usd=120.5,
    cost_to_come_usd=60.25,
    findings={"warning": 2},
    spreads={(subject, name): Spread(1.0, 2.0, 3.0, "17") for subject, names in COLUMNS.items() for name in names},
    measured_ranks=512,
)
VALUES = {
    **{"step": 12, "attempt": 2, "loss": float("nan"), "validation_loss": 5.5, "grad_norm": 1e-12},
    **{"learning_rate": 3e-4, "loss_scale": 65536.0, "step_seconds": 1.25, "data_wait": 0.0, "tokens_per_second": 1e6},
    **{"samples_per_second": 10.0, "mfu": 0.4, "memory_bytes": 1 << 33, "time": 1795440168.566},
    **{'loss/a "quoted"\nsource\\': 4.5, "loss/b": 4.0},
}
LABELS = {"run": 'run "1"', "name": "small", "tracking_id": "abcdefgh"}
FOUND = families(LABELS, VALUES, FIGURES, {"checkpoint": 3, "spike": 1}, training=True)


def parsed(text: str, *, openmetrics: bool) -> list[Any]:
    pytest.importorskip("prometheus_client", reason="needs prometheus-client, of the extra dev")
    if openmetrics:
        from prometheus_client.openmetrics.parser import text_string_to_metric_families
    else:
        from prometheus_client.parser import text_string_to_metric_families
    return list(text_string_to_metric_families(text))


@pytest.mark.parametrize("openmetrics", [False, True])
def test_the_parser_reads_every_value(openmetrics: bool) -> None:
    text = exposition(FOUND, openmetrics=openmetrics)
    read = parsed(text, openmetrics=openmetrics)
    samples = [sample for family in read for sample in family.samples]
    keys = [(sample.name, tuple(sorted(sample.labels.items()))) for sample in samples]
    assert len(set(keys)) == len(keys)  # the parsers accept duplicates
    assert all(sample.timestamp is None for sample in samples)  # milliseconds would pass for seconds
    expected = {
        (family.sample_name, tuple(sorted(labels.items()))): value
        for family in FOUND
        for labels, value in family.samples
    }
    assert dict(zip(keys, [repr(float(sample.value)) for sample in samples], strict=True)) == {
        key: repr(float(value)) for key, value in expected.items()
    }
    assert {family.name: family.type for family in read}["scaletrain_events"] == "counter"
    if openmetrics:
        units = {family.name: family.unit for family in read}
        assert units["scaletrain_gpu_sm_clock_hertz"] == "hertz"
        assert units["scaletrain_tokens_per_second"] == ""
        assert text.endswith("\n# EOF\n")
        assert "\n\n" not in text
    else:
        assert "EOF" not in text


def test_the_number_of_series_does_not_grow_with_the_ranks() -> None:
    per_measure = 4  # three statistics and the worst
    measures = sum(len(names) for names in COLUMNS.values())
    assert sum(len(family.samples) for family in FOUND) < 40 + per_measure * measures


def test_the_dashboard_shows_only_metrics_that_are_exported() -> None:
    dashboard = json.loads(project_file("grafana/scaletrain.json").read_text(encoding="utf-8"))
    assert dashboard["id"] is None
    assert {dashboard["title"], dashboard["uid"]} == {"ScaleTrain run", "scaletrain-run"}
    exported = {family.sample_name: set(family.samples[0][0]) for family in FOUND}
    variables = [each["query"]["query"] for each in dashboard["templating"]["list"] if each["type"] == "query"]
    queries = [target for panel in dashboard["panels"] for target in panel["targets"]]
    assert len(queries) > 30
    for expression in [*variables, *(target["expr"] for target in queries)]:
        names = re.findall(r"scaletrain_\w+", expression)
        assert names
        assert set(names) <= exported.keys(), expression
        for labels in re.findall(r"\{([^}]*)\}", expression):
            assert {label.partition("=")[0] for label in labels.split(",")} <= exported[names[0]]
    for target in queries:
        shown = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
        assert shown <= exported[re.findall(r"scaletrain_\w+", target["expr"])[0]]
    places = [panel["gridPos"] for panel in dashboard["panels"]]
    cells = [(x, y) for p in places for x in range(p["x"], p["x"] + p["w"]) for y in range(p["y"], p["y"] + p["h"])]
    assert len(cells) == len(set(cells))
    assert max(x for x, _ in cells) < 24


def run_in(folder: Path) -> TrackedRun:
    return TrackedRun("run-1", "abcdefgh", folder, {"name": "small"}, 1, lambda: FIGURES)


def test_a_run_in_a_collectors_folder_and_at_a_port(tmp_path: Path) -> None:
    collected, port = tmp_path / "collected", reserved_port()
    tracker = PrometheusTracker(PrometheusOptions(textfile=str(collected), port=port))
    tracker.start(run_in(tmp_path))
    tracker.log(3, {"loss": 5.0, "attempt": 1}, 100.5)
    tracker.log(4, {"loss": 4.5}, 101.5)
    tracker.event("checkpoint", {}, 101.0)
    for accept, kind, openmetrics in (("*/*", "text/plain", False), (OPENMETRICS, "application/openmetrics", True)):
        request = urllib.request.Request(f"http://127.0.0.1:{port}/metrics", headers={"Accept": accept})
        with urllib.request.urlopen(request) as answer:
            assert answer.headers["Content-Type"].startswith(kind)
            values = {
                sample.name: sample.value
                for family in parsed(answer.read().decode(), openmetrics=openmetrics)
                for sample in family.samples
            }
        assert (values["scaletrain_step"], values["scaletrain_loss"], values["scaletrain_training"]) == (4, 4.5, 1)
        assert values["scaletrain_events_total"] == 1
    with pytest.raises(OSError, match="in use"):
        PrometheusTracker(PrometheusOptions(textfile="none", port=port)).start(run_in(tmp_path))
    file = collected / "run-1.prom"
    wait_until(file.exists, "the file is written")
    assert file.stat().st_mode & 0o004  # for the user of node_exporter
    tracker.finish("preempted")
    assert list(collected.iterdir()) == []  # the next attempt may run on another node


def test_a_file_in_the_run_directory_keeps_the_last_values(tmp_path: Path) -> None:
    tracker = PrometheusTracker(PrometheusOptions())
    tracker.start(run_in(tmp_path))
    tracker.log(7, {"loss": 4.0}, 100.0)
    tracker.finish("finished")
    text = (tmp_path / "prometheus" / "run-1.prom").read_text()
    assert 'scaletrain_step{run="run-1"} 7.0' in text
    assert 'scaletrain_training{run="run-1"} 0.0' in text


def test_the_file_of_a_run_that_has_ended_has_the_figures_of_its_end(tmp_path: Path) -> None:
    now = [dataclasses.replace(FIGURES, remaining_seconds=40.0)]
    tracker = PrometheusTracker(PrometheusOptions())
    tracker.start(TrackedRun("run-1", "abcdefgh", tmp_path, {}, 1, lambda: now[0]))
    file = tmp_path / "prometheus" / "run-1.prom"
    wait_until(lambda: file.exists() and 'remaining_seconds{run="run-1"} 40.0' in file.read_text(), "the first file")
    now[0] = dataclasses.replace(FIGURES, remaining_seconds=0.0)
    tracker.finish("finished")
    assert 'scaletrain_remaining_seconds{run="run-1"} 0.0' in file.read_text()


def test_figures_that_cannot_be_read_are_reported_by_the_next_step(tmp_path: Path) -> None:
    def failing() -> RunFigures:
        raise OSError("stale file handle")

    tracker = PrometheusTracker(PrometheusOptions())
    tracker.start(TrackedRun("run-1", "abcdefgh", tmp_path, {}, 1, failing))
    tracker._thread.join()
    with pytest.raises(OSError, match="stale"):
        tracker.log(1, {"loss": 4.0}, 100.0)


def test_reading_the_run_directory_and_requests_cost_little_of_rank_0(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert [pause_seconds(cost) for cost in (0.0, 0.01, 0.3, 60.0)] == [60.0, 60.0, 300.0, 1800.0]
    tracker = PrometheusTracker(PrometheusOptions(textfile="none"))
    tracker.start(run_in(tmp_path))
    monkeypatch.setattr(prometheus, "_ANSWER_SECONDS", 1e6)
    made: list[bool] = []
    text = tracker.text
    tracker.text = lambda *, openmetrics: made.append(openmetrics) or text(openmetrics=openmetrics)  # type: ignore[method-assign]
    answers = {tracker.answer(openmetrics=openmetrics) for _ in range(50) for openmetrics in (True, False)}
    assert (len(answers), sorted(made)) == (2, [False, True])
    tracker.log(7, {"loss": 3.0}, 2.0)
    tracker._answers = {kind: (made_at - 1e6, answer) for kind, (made_at, answer) in tracker._answers.items()}
    assert b'scaletrain_step{run="run-1"} 7.0' in tracker.answer(openmetrics=True)
    tracker.finish("finished")
