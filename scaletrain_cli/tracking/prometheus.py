"""Prometheus: the newest figures of a run as a file for node_exporter's textfile collector, or at an HTTP port.

The file has the classic text format, which the collector needs: no timestamps, and it is replaced by a rename. The port
answers in OpenMetrics 1.0 if asked for it, as Prometheus does. Figures of all ranks, GPUs and nodes are exported as
minimum, median and maximum with the name of the worst, so that the number of series does not grow with the run.
"""

import contextlib
import math
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from scaletrain_cli.safe_files import expand_home, make_folder, replace_file
from scaletrain_cli.tracking.base import OptionText, Outcome, RunFigures, TrackedRun, Tracker, TrackerOptions

CLASSIC = "text/plain; version=0.0.4; charset=utf-8"
OPENMETRICS = "application/openmetrics-text; version=1.0.0; charset=utf-8"
_WRITE_SECONDS = 5.0  # between two writes of the file
# Between two readings of the run directory. Rank 0 reads it in a thread: that stays below this share of a core.
_FIGURES_SECONDS, _LONGEST_FIGURES_SECONDS, _FIGURES_SHARE = 60.0, 1800.0, 0.001
_ANSWER_SECONDS = 1.0  # for which requests get the same text
_PREFIX = "scaletrain_"

Kind = Literal["gauge", "counter", "info"]
_ENDINGS: Mapping[Kind, str] = {"gauge": "", "counter": "_total", "info": "_info"}


class PrometheusOptions(TrackerOptions):
    """Prometheus. ``textfile: auto`` is ``prometheus/`` in the run directory, ``none`` writes no file."""

    textfile: OptionText = Field(
        default="auto", description="folder for NAME.prom, as --collector.textfile.directory of node_exporter"
    )
    port: Annotated[int, Field(ge=1, le=65535)] | None = Field(
        default=None, description="port of /metrics on the node of rank 0; null: none"
    )
    address: OptionText = Field(default="127.0.0.1", description="address that the port is bound to; 0.0.0.0: all")


@dataclass(frozen=True)
class Family:
    """Samples of one metric: its name without the ending of a sample, its unit, and pairs of labels and value."""

    name: str
    help: str
    unit: str = ""
    kind: Kind = "gauge"
    samples: tuple[tuple[Mapping[str, str], float], ...] = ()

    @property
    def sample_name(self) -> str:
        return self.name + _ENDINGS[self.kind]


# name without prefix: (key of metrics.jsonl, unit, help)
_MEASURES: dict[str, tuple[str, str, str]] = {
    "step": ("step", "", "Optimizer steps trained."),
    "attempt": ("attempt", "", "Number of the attempt, from 1."),
    "loss": ("loss", "", "Training loss of the last step; of a language model in nats per token."),
    "validation_loss": ("validation_loss", "", "Loss of the last validation."),
    "gradient_norm": ("grad_norm", "", "Gradient norm before clipping."),
    "learning_rate": ("learning_rate", "", "Learning rate."),
    "loss_scale": ("loss_scale", "", "Loss scale of fp16."),
    "step_seconds": ("step_seconds", "seconds", "Time of the last step."),
    "data_wait_seconds": ("data_wait", "seconds", "Time that rank 0 waited for the batches of the last step."),
    "tokens_per_second": ("tokens_per_second", "", "Tokens trained per second, on all ranks."),
    "samples_per_second": ("samples_per_second", "", "Images or pairs trained per second, on all ranks."),
    "mfu_ratio": ("mfu", "ratio", "Model FLOPs utilization, 0 to 1."),
    "memory_bytes": ("memory_bytes", "bytes", "Peak memory of rank 0."),
    "last_update_timestamp_seconds": ("time", "seconds", "Unix time of the last line of metrics.jsonl."),
}
# name without prefix: (field of RunFigures, unit, help)
_FIGURES: dict[str, tuple[str, str, str]] = {
    "planned_steps": ("total_steps", "", "Optimizer steps of the whole run."),
    "planned_step_seconds": ("planned_step_seconds", "seconds", "Time of a step by the plan."),
    "ranks": ("ranks", "", "Ranks of the run."),
    "measured_ranks": ("measured_ranks", "", "Ranks whose telemetry is read, and of which the worst is named."),
    "goodput_ratio": ("goodput", "ratio", "Share of the time spent on steps that were kept, over all attempts."),
    "remaining_seconds": ("remaining_seconds", "seconds", "Time until the last step, with saves and evaluations."),
    "cost_usd": ("cost_usd", "usd", "US dollars of all attempts so far."),
    "cost_to_come_usd": ("cost_to_come_usd", "usd", "US dollars of the time until the last step."),
}
SEVERITIES = ("note", "warning", "error")
_STATISTICS = ("min", "median", "max")


def families(
    run: Mapping[str, str],
    values: Mapping[str, float],
    figures: RunFigures | None,
    events: Mapping[str, int],
    *,
    training: bool,
) -> list[Family]:
    """Return all metrics. ``run``: labels of the info metric, with ``run``; ``values``: by key of metrics.jsonl."""
    here = {"run": run["run"]}
    metrics = [
        Family(f"{_PREFIX}run", "The run.", kind="info", samples=((run, 1.0),)),
        Family(f"{_PREFIX}training", "1 while an attempt trains.", samples=((here, float(training)),)),
    ]

    def one(name: str, unit: str, text: str, samples: Iterable[tuple[Mapping[str, str], float]]) -> None:
        labelled = tuple(({**here, **labels}, value) for labels, value in samples)
        if labelled:
            metrics.append(Family(f"{_PREFIX}{name}", text, unit, samples=labelled))

    for name, (key, unit, text) in _MEASURES.items():
        one(name, unit, text, [({}, values[key])] if key in values else [])
    for group in ("loss/", "validation_loss/"):
        sources = [
            ({"source": key.removeprefix(group)}, value) for key, value in values.items() if key.startswith(group)
        ]
        one(f"source_{group.rstrip('/')}", "", f"As {_PREFIX}{group.rstrip('/')}, of one source.", sources)
    if figures is not None:
        for name, (field, unit, text) in _FIGURES.items():
            value = getattr(figures, field)
            one(name, unit, text, [] if value is None else [({}, float(value))])
        counts = [({"severity": severity}, float(figures.findings.get(severity, 0))) for severity in SEVERITIES]
        one("findings", "", "Findings of the diagnosis that are raised.", counts)
        for (subject, column), spread in figures.spreads.items():
            name = f"{subject}_{column}"
            sizes = zip(_STATISTICS, (spread.lowest, spread.median, spread.highest), strict=True)
            text = f"{column.replace('_', ' ').capitalize()} over each {subject}."
            one(name, unit_of(column), text, [({"statistic": kind}, size) for kind, size in sizes])
            worst = [({"subject": spread.worst}, 1.0)]
            one(f"{subject}_{column}_worst", "", f"The {subject} with the worst {column.replace('_', ' ')}.", worst)
    counted = tuple(({**here, "event": name}, float(count)) for name, count in sorted(events.items()))
    if counted:
        text = "Events since this process began to count."
        metrics.append(Family(f"{_PREFIX}events", text, kind="counter", samples=counted))
    return metrics


def unit_of(column: str) -> str:
    """Return the unit that a name ends in; rates have none."""
    last = column.rpartition("_")[2]
    is_rate = column.endswith("_per_second")
    return last if last in ("seconds", "bytes", "hertz", "watts", "celsius", "ratio") and not is_rate else ""


def exposition(families: Sequence[Family], *, openmetrics: bool) -> str:
    """Return the classic text format or OpenMetrics 1.0, without timestamps."""
    lines = []
    for family in families:
        name = family.name if openmetrics else family.sample_name
        kind = "gauge" if family.kind == "info" and not openmetrics else family.kind
        unit = [f"# UNIT {name} {family.unit}"] if family.unit and openmetrics else []
        about = [f"# TYPE {name} {kind}", *unit, f"# HELP {name} {_escaped(family.help, quotes=openmetrics)}"]
        lines += about if openmetrics else about[::-1]
        lines += [f"{family.sample_name}{_labels(labels)} {_number(value)}" for labels, value in family.samples]
    return "\n".join([*lines, *(["# EOF"] if openmetrics else []), ""])


def _labels(labels: Mapping[str, str]) -> str:
    return "{" + ",".join(f'{name}="{_escaped(value, quotes=True)}"' for name, value in labels.items()) + "}"


def _escaped(text: str, *, quotes: bool = False) -> str:
    escaped = text.replace("\\", "\\\\").replace("\n", "\\n")
    return escaped.replace('"', '\\"') if quotes else escaped


def _number(value: float) -> str:
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return repr(float(value))


class PrometheusTracker(Tracker[PrometheusOptions]):
    """Holds the newest values; a thread writes them to the file, and another answers requests."""

    options_model = PrometheusOptions
    rewinds = True  # a step that is trained again replaces the values of later steps

    def start(self, run: TrackedRun) -> Mapping[str, int] | None:
        """Write the file and open the port. Raises OSError if the port is in use."""
        self._run = run
        self._labels = {"run": run.run_id, "name": str(run.config.get("name", "")), "tracking_id": run.tracking_id}
        self._values: dict[str, float] = {}
        self._events: dict[str, int] = {}
        self._figures: RunFigures | None = None
        self._lock, self._ended = threading.Lock(), threading.Event()
        self._error: Exception | None = None
        self._training = True
        self._file: Path | None = None
        given = self.options.textfile
        if given != "none":
            folder = run.folder / "prometheus" if given == "auto" else expand_home(given)
            make_folder(folder)
            self._file = folder / f"{run.run_id}.prom"
        self._server: ThreadingHTTPServer | None = None
        if self.options.port is not None:
            self._server = _server(self.options.address, self.options.port, self)
            threading.Thread(target=self._server.serve_forever, name="prometheus-port", daemon=True).start()
        self._answers: dict[bool, tuple[float, bytes]] = {}
        self._thread = threading.Thread(target=self._refresh, name="prometheus-file", daemon=True)
        self._thread.start()
        return None

    def rewind(self, step: int) -> None:
        """Nothing: later values replace those of the undone steps."""

    def log(self, step: int, values: Mapping[str, float], seconds: float) -> None:
        if self._error is not None:
            raise self._error
        with self._lock:
            self._values |= {**values, "step": step, "time": seconds}

    def event(self, name: str, details: Mapping[str, Any], seconds: float) -> None:
        with self._lock:
            self._events[name] = self._events.get(name, 0) + 1

    def finish(self, outcome: Outcome) -> None:
        """Close the port. A file in the run directory remains with the last values; in another folder it is removed.

        A collector would export what remains there for ever. The figures in the file are read once more: those of the
        last minute would have time left and costs to come.
        """
        self._training = False
        self._ended.set()
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
        self._thread.join(_WRITE_SECONDS)
        if self._file is None:
            return
        if self.options.textfile == "auto":
            self._figures = self._run.figures()
            self._write()
        else:
            self._file.unlink(missing_ok=True)

    def text(self, *, openmetrics: bool) -> str:
        """Return the newest values in one of the two formats."""
        with self._lock:
            values, events = dict(self._values), dict(self._events)
        metrics = families(self._labels, values, self._figures, events, training=self._training)
        return exposition(metrics, openmetrics=openmetrics)

    def answer(self, *, openmetrics: bool) -> bytes:
        """Return the text for a request, at most a second old: many requests cost as much as one a second."""
        made, answer = self._answers.get(openmetrics, (-math.inf, b""))
        if time.monotonic() - made >= _ANSWER_SECONDS:
            answer = self.text(openmetrics=openmetrics).encode()
            self._answers[openmetrics] = time.monotonic(), answer
        return answer

    def _write(self) -> None:
        if self._file is not None:
            replace_file(self._file, self.text(openmetrics=False), public=True)

    def _refresh(self) -> None:
        due = -math.inf
        while True:
            try:
                if time.monotonic() >= due:
                    before = time.thread_time()
                    self._figures = self._run.figures()
                    due = time.monotonic() + pause_seconds(time.thread_time() - before)
                self._write()
            except Exception as error:  # raised by the next log(), which reports it
                self._error = error
                with contextlib.suppress(Exception):
                    if self._server is not None:  # a new object opens the port again
                        self._server.shutdown()
                        self._server.server_close()
                return
            if self._ended.wait(_WRITE_SECONDS):
                return


def pause_seconds(cost: float) -> float:
    """Return the time until the run directory is read again, for the CPU seconds of the last reading."""
    return min(_LONGEST_FIGURES_SECONDS, max(_FIGURES_SECONDS, cost / _FIGURES_SHARE))


def _server(address: str, port: int, tracker: PrometheusTracker) -> ThreadingHTTPServer:
    """Return a server of ``/metrics``. Raises OSError if the address cannot be bound."""

    class Handler(BaseHTTPRequestHandler):
        timeout = 10.0

        def do_GET(self) -> None:
            if self.path.partition("?")[0] not in ("/", "/metrics"):
                self.send_error(404)
                return
            openmetrics = "application/openmetrics-text" in self.headers.get("Accept", "")
            body = tracker.answer(openmetrics=openmetrics)
            self.send_response(200)
            self.send_header("Content-Type", OPENMETRICS if openmetrics else CLASSIC)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *arguments: object) -> None:
            """Log no requests."""

    server = ThreadingHTTPServer((address, port), Handler)
    server.daemon_threads = True
    return server
