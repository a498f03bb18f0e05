"""Run directories with curves, attempts, a rollback and telemetry, made without a scheduler or ranks. No tests here."""

from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from scaletrain_cli.launch.attempts import read_attempts
from scaletrain_cli.rundir.journal import append_line, append_lines, record_event
from scaletrain_cli.rundir.paths import RunDir
from scaletrain_cli.telemetry.run import node_file
from scaletrain_cli.telemetry.series import SeriesWriter
from tests.cli.prepared_runs import prepare

HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)>\"'&\n]]>`"


def trained_run(run_id: str = "r1", *overrides: str, loss: float = 2.0, text: str = "web") -> RunDir:
    """Return a finished run of 300 steps with a rollback, two sources and telemetry; ``text`` is in its records."""
    run = RunDir(
        Path(prepare("finished", run_id, None, "training.steps=300", "cluster.price_per_gpu_hour=2", *overrides))
    )
    start = read_attempts(run)[0].started
    rows: list[dict[str, Any]] = [
        {
            "step": step,
            "loss": loss + 4 / step**0.5 + (9 if step == 220 else 0),
            f"loss/{text}": loss + 0.1,
            "grad_norm": 0.5,
            "learning_rate": 3e-4,
            "step_seconds": 0.5,
            "data_wait": 0.001,
            "memory_bytes": 5e9,
            "attempt": 1,
            "time": start + step,
            "mfu": 0.4,
            "tokens_per_second": 1e4,
        }
        for step in range(4, 301)
    ]
    append_lines(run.metrics, rows[:220])
    record_event(run, "rolled-back", from_step=223, to_step=200, skip=[1, 2], lost_steps=23, cause="spike", retry=1)
    append_lines(run.metrics, rows[197:])
    append_line(run.metrics, {"step": 300, "validation_loss": loss + 0.4, f"validation_loss/{text}": loss + 0.5})
    record_event(run, "hang", attempt=1, message=text, rank=1)
    writer = SeriesWriter(node_file(run, 1, "node-0000-n"))
    for second in range(5):
        for rank, memory in ((0, 6e9), (1, 7e9)):
            values = {"memory_bytes": memory, "own_seconds": 0.2, "forward_seconds": 0.1, "backward_seconds": 0.2}
            writer.add(f"rank {rank}", start + 60 * second, 60 * second, values)
        writer.add("gpu 0", start + 60 * second, 60 * second, {"utilization": 0.97, "temperature_celsius": 71.0})
    writer.close()
    return run


class Page(HTMLParser):
    """The elements of an HTML page; an end tag that does not close the open element is an assertion error."""

    VOID = ("meta", "br", "input", "img", "link")

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert self._open == []
        self.drawings = [ElementTree.fromstring(part) for part in _svgs(text)]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self._open[-1:] == [tag], (tag, self._open[-3:], self.getpos())
        self._open.pop()

    def handle_data(self, data: str) -> None:
        if self._open and self._open[-1] not in ("script", "style"):
            self.words.append(data)

    @property
    def text(self) -> str:
        """The text of the page, without scripts and styles."""
        return " ".join(" ".join(self.words).split())


def _svgs(text: str) -> list[str]:
    return [f"<svg{part.partition('</svg>')[0]}</svg>" for part in text.split("<svg")[1:]]
