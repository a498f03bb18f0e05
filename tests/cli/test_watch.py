"""`scaletrain watch`: its pages at two sizes, its keys, what it prints without a terminal, and a real terminal."""

import dataclasses
import itertools
import json
import os
import signal
import sys
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
from rich.text import Text

from scaletrain_cli.launch.view import Log, Reading, Shown, ViewReader, read_log, read_view
from scaletrain_cli.rundir.journal import append_line, append_lines, record_event
from scaletrain_cli.rundir.paths import RunDir
from scaletrain_cli.telemetry.run import node_file
from scaletrain_cli.telemetry.series import SeriesWriter
from scaletrain_cli.ui.watch.layout import PAGES, Choices, Page
from scaletrain_cli.ui.watch.pages import show_overview
from scaletrain_cli.ui.watch.screen import press, screen_lines
from tests.cli.command_line import scaletrain
from tests.cli.prepared_runs import prepare
from tests.cli.test_terminal import ATTACKS, obeyed
from tests.launch.conftest import no_preparation
from tests.terminals import Terminal, terminal
from tests.waiting import wait_until

__all__ = ["no_preparation"]
SIZES = ((80, 24), (120, 40), (40, 10))
GB = 10**9
EVERY: tuple[Page, ...] = (*PAGES, "help")


def texts(shown: Shown, choices: Choices, width: int, height: int) -> list[str]:
    """The lines of the screen, each as wide as the terminal at most, and as many as it has."""
    lines = screen_lines(shown, choices, width, height)
    assert len(lines) == height
    for line in lines:
        assert line.cell_len <= width, line.plain
        assert not obeyed(line.plain.replace("\n", "\\x0a")), line.plain
        assert "\n" not in line.plain
    return [line.plain for line in lines]


def page(shown: Shown, name: Page, width: int = 80, height: int = 24, **more: bool | int) -> str:
    return "\n".join(texts(shown, Choices(page=name, **more), width, height))  # type: ignore[arg-type]


@pytest.fixture
def trained() -> RunDir:
    """A finished run of 300 steps in two attempts with a rollback, two ranks and a GPU."""
    run = RunDir(prepare("finished", "r1", None, "training.steps=300", "cluster.price_per_gpu_hour=2"))
    same = {"grad_norm": 0.5, "learning_rate": 3e-4, "step_seconds": 0.5, "mfu": 0.4, "tokens_per_second": 1e4}
    losses = {step: 2 + 4 / step**0.5 + (9 if step == 120 else 0) for step in range(4, 301)}
    rows = [{"step": step, "loss": loss, "time": 1e9 + step, **same} for step, loss in losses.items()]
    rows = [row | {"attempt": 1 if row["step"] < 200 else 2} for row in rows]
    append_lines(run.metrics, rows[:196])
    record_event(run, "resumed", step=199, attempt=2)
    append_lines(run.metrics, rows[196:])
    append_line(run.metrics, {"step": 300, "validation_loss": 2.4, "validation_sequences": 8})
    record_event(run, "rolled-back", from_step=420, to_step=300, skip=[1, 2], lost_steps=120, cause="spike", retry=1)
    writer = SeriesWriter(node_file(run, 1, "node-0000-n"))
    for second in range(5):
        for rank, memory in ((0, 60 * GB), (1, 66 * GB)):
            writer.add(f"rank {rank}", 1e9 + second, 300, {"memory_bytes": memory, "own_seconds": 0.2 + 0.1 * rank})
        writer.add("gpu 0", 1e9 + second, 300, {"utilization": 0.97, "temperature_celsius": 71.0, "power_watts": 650.0})
    writer.close()
    return run


def shown_of(run: RunDir, log: Log | None = None) -> Shown:
    return Shown(read_view(run), (), log)


@pytest.mark.parametrize(("width", "height"), SIZES)
def test_every_page_fits_the_terminal(trained: RunDir, width: int, height: int) -> None:
    shown = shown_of(trained, read_log(trained, 0))
    for name, by_time, unicode in itertools.product(EVERY, (False, True), (False, True)):
        lines = texts(shown, Choices(page=name, by_time=by_time, unicode=unicode), width, height)
        assert lines[0].startswith("r1  finished")
        assert unicode or all(map(str.isascii, lines))
        if name != "help":
            assert f"[{PAGES.index(name) + 1} {name}]"[: width - 1] in lines[1] or width < 80


@pytest.mark.parametrize("state", ["queued", "running", "preempted", "finished", "failed", "cancelled", "unknown"])
def test_a_run_in_every_state_has_its_state_and_its_reason(prepared: dict[str, Path], state: str) -> None:
    run = RunDir(prepared[state] / "r1")
    shown = shown_of(run, read_log(run, 0))
    for name in EVERY:
        texts(shown, Choices(page=name), 80, 24)
    screen = page(shown, "overview")
    assert state in screen.splitlines()[0]
    if state in ("queued", "failed", "unknown"):
        assert shown.view.status.why[:40] in screen


def test_a_run_on_a_volume_that_is_not_visible_here(tmp_path: Path) -> None:
    """The output of the pods is shown as `status` does; one sentence tells what cannot be had."""
    from scaletrain_cli.launch.job import Job
    from scaletrain_cli.launch.status import run_status
    from scaletrain_cli.launch.submit import create_run
    from scaletrain_cli.spec import load_spec
    from tests.cli.command_line import SMALL
    from tests.launch.conftest import make_plan

    spec = load_spec(SMALL, ["cluster.scheduler=kubernetes", "cluster.kubernetes.image=i:1", "training.steps=100"])
    run = create_run(spec, make_plan(spec), "r1", root=tmp_path).run
    progress = {"step": 40, "loss": 3.25, "tokens_per_second": 1e4, "learning_rate": 1e-3}
    job = Job("r1-1", "running", "2 of 2 pods run", nodes=("k1", "k2"), progress=progress)
    shown = Shown(read_view(run, run_status(run, job=job)))
    screen = page(shown, "overview")
    for text in ("40 of 100 steps", "loss 3.2500", "r1-1 on k1, k2: 2 of 2 pods run", "volume of the cluster"):
        assert text in screen
    for name in ("curves", "ranks", "nodes"):
        assert "scaletrain watch r1" in page(shown, name, 120)  # type: ignore[arg-type]
    assert "scaletrain logs r1 --follow" in page(shown, "logs")


def test_the_overview_shows_the_figures_of_status(trained: RunDir) -> None:
    screen = page(shown_of(trained), "overview", 120, 40)
    status = scaletrain("status", "r1").out
    for figure in ("rank 1 66.0 GB, median 63.0 GB of 2 ranks", "97 % used", "up to 71 °C", "650 W"):
        assert figure in screen
        assert figure in status
    assert "500 ms per step, planned" in screen
    assert "MFU 40 %" in screen
    assert "learning rate 0.0003, gradient norm 0.5" in screen
    assert "300 of 300 steps  100.0 %" in screen


def test_charts_have_spikes_validations_attempts_and_rollbacks(trained: RunDir) -> None:
    screen = page(shown_of(trained), "curves", 120, 40)
    loss = screen.split("gradient norm")[0]
    assert "▲ up to 11.37" in loss  # the spike of a single step
    assert loss.count("▲") == 2
    assert "o" in loss.split("loss  o validation")[1]
    axis = next(line for line in loss.splitlines() if "└" in line)
    assert "2" in axis
    assert "R" in axis
    assert axis.index("2") < axis.index("R")
    halved = page(shown_of(trained), "curves", 120, 40, halvings=2)
    assert "last 75" in halved
    assert "▲" not in halved


def test_ranks_are_ordered_by_memory_and_by_their_own_time(trained: RunDir) -> None:
    shown = shown_of(trained)
    first = [page(shown, "ranks", order=order).splitlines()[4].split()[0] for order in range(3)]
    assert first == ["0", "1", "1"]
    assert "gpu" not in page(shown, "ranks")
    assert "n/0  97 %" in page(shown, "nodes")


def test_keys_choose_pages_scroll_and_quit(trained: RunDir) -> None:
    shown, choices = shown_of(trained, read_log(trained, 0)), Choices()

    def after(*keys: str) -> str:
        for key in keys:
            assert press(key, choices, shown, 24)
        return "\n".join(texts(shown, choices, 80, 24))

    assert "[5 events]" in after("5")
    assert "[6 findings]" in after("tab")
    assert "[1 overview]" in after("tab", "tab")
    assert "[7 logs]" in after("shift-tab")
    assert "quit; the run goes on" in after("?")
    assert "[1 overview]" in after("?")
    after("s", "+", "+", "-", "o")
    assert (choices.by_time, choices.halvings, choices.order) == (True, 1, 1)
    after(*["+"] * 50)
    assert choices.halvings < 50
    for count in range(40):
        record_event(trained, "checkpoint", step=count, attempt=1, bytes=1, seconds=0.1)
    shown = shown_of(trained)
    newest = after("5")
    assert "lines 1-21 of" in newest
    last = after("end")
    assert "submitted" in last
    assert last == after("down")  # not beyond the last line
    assert after("home") == newest
    assert not press("q", choices, shown, 24)


def test_the_log_is_shown_from_its_end(trained: RunDir) -> None:
    lines = tuple(f"2026-03-01T12:00:03.512Z INFO rank 0: line {number}" for number in range(100))
    found = read_log(trained, 0)
    assert found.lines == ("step 1", "step 2")
    shown, choices = Shown(read_view(trained), (), Log(found.file, 0, 1, lines)), Choices(page="logs")
    screen = texts(shown, choices, 80, 24)
    assert screen[-2] == "12:00:03Z line 99"
    press("up", choices, shown, 24)
    assert texts(shown, choices, 80, 24)[-2] == "12:00:03Z line 98"
    press("home", choices, shown, 24)
    assert texts(shown, choices, 80, 24)[3] == "12:00:03Z line 0"


def test_text_of_users_and_machines_cannot_control_the_terminal(trained: RunDir) -> None:
    attack = "[red]x[/red]\n" + "".join(ATTACKS.values())
    record_event(trained, "spike", step=5, message=attack, **{attack.encode("ascii", "replace").decode(): 1})
    data = json.loads((trained.path / "attempts/0001/attempt.json").read_text())
    data |= {"nodes": [attack], "message": attack, "code": "", "params": {}, "exit_code": 1, "reason": "crash"}
    data["decision"] = None
    (trained.path / "attempts/0001/attempt.json").write_text(json.dumps(data))
    log = trained.attempt(1) / "logs" / "n-00000.log"
    log.write_bytes(attack.encode(errors="replace"))
    writer = SeriesWriter(node_file(trained, 1, "node-0001-a b"))
    writer.add(f"gpu {attack[:40]}", 1e9, 300, {"utilization": 0.5})
    writer.close()
    shown = shown_of(trained, read_log(trained, 0))
    for name in EVERY:
        texts(shown, Choices(page=name), 80, 24)
    assert "[red]x[/red]" in page(shown, "logs")
    out = scaletrain("watch", "r1", "--once").out
    assert not obeyed(out)
    assert "\x1b" not in out


def test_the_parts_of_a_step_stand_beside_the_mean_time_of_the_same_steps(trained: RunDir) -> None:
    """The median of 200 steps of ``metrics.jsonl`` is 0.5 s, which these parts do not come to."""
    writer = SeriesWriter(node_file(trained, 1, "node-0001-m"))
    for number, whole in enumerate((0.7, 0.9)):
        parts = {"step_seconds": whole, "forward_seconds": whole - 0.5, "backward_seconds": 0.5}
        writer.add("rank 0", 1e9 + number, 299 + number, parts)
    writer.close()
    screen = page(shown_of(trained), "overview", 100, 45)
    assert "measured 800 ms: forward 300 ms, backward 500 ms" in " ".join(screen.split())


def test_once_prints_the_overview_or_one_answer(trained: RunDir) -> None:
    ended = scaletrain("watch", "r1", "--once")
    assert (ended.code, ended.err) == (0, "")
    assert ended.out.startswith("r1  finished")
    answer = scaletrain("watch", "r1", "--once", "--json").data
    status = scaletrain("status", "r1", "--json").data
    assert (answer["schema"], answer["is_over"], answer["ok"]) == ("scaletrain.watch/v1", True, True)
    for key in ("step", "eta_seconds", "cost_so_far_usd", "step_seconds", "findings", "hardware", "guard_events"):
        assert answer[key] == status[key]
    assert status["hardware"]["memory_bytes"]["highest_name"] == "rank 1"
    assert [event["event"] for event in status["guard_events"]] == ["rolled-back"]
    assert "step 420 to step 300" in status["guard_events"][0]["text"]


def test_findings_that_are_not_shown_are_counted(trained: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    view = read_view(trained)
    many = dataclasses.replace(view.diagnosis, findings=view.diagnosis.findings[:1] * 9)
    view = dataclasses.replace(view, diagnosis=many)
    assert "and 7 more findings: page 6" in page(Shown(view), "overview")
    show_overview(view)
    assert "and 4 more findings: scaletrain diagnose r1" in capsys.readouterr().out


def test_steps_that_a_rollback_undid_are_counted_in_the_first_attempt_too(trained: RunDir) -> None:
    for verb in (("status",), ("watch", "--once")):
        shown = scaletrain(verb[0], "r1", *verb[1:]).out
        assert "120 steps lost so far" in shown, verb
        assert "500 ms per step, planned 1 s (x0.50)" in shown, verb


def test_without_a_terminal_it_prints_lines_until_the_run_has_ended(trained: RunDir) -> None:
    assert "finished  step 300 of 300 (100 %); loss 2.2" in scaletrain("watch", "r1", code=0).out.splitlines()[-1]
    streamed = scaletrain("watch", "r1", "--json")
    first, last = map(json.loads, streamed.out.splitlines())
    assert (first["state"], first["step"]) == ("finished", 300)
    assert (last["schema"], last["ok"], last["run_id"]) == ("scaletrain.watch/v1", True, "r1")


def test_a_damaged_record_is_an_error(prepared: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SCALETRAIN_RUNS", str(prepared["damaged"]))
    for options in ((), ("--once",), ("--json",)):
        assert scaletrain("watch", "r1", *options).code == 2


def test_a_scheduler_is_asked_every_ten_seconds(trained: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    """An attempt that ended for good needs no question; an open one is asked about, and its answer stands."""
    from scaletrain_cli.launch.backends.local.backend import LocalBackend
    from scaletrain_cli.launch.job import Job
    from scaletrain_cli.spec.backend_traits import BUILT_IN

    attempt = trained.attempt(1) / "attempt.json"
    attempt.write_text(json.dumps(json.loads(attempt.read_text()) | {"ended": None, "reason": None, "decision": None}))
    monkeypatch.setitem(BUILT_IN, "local", dataclasses.replace(BUILT_IN["local"], runs_here=False))
    now, asked = [0.0], []

    def job(self: LocalBackend, *of: object) -> Job:
        asked.append(now[0])
        return Job("7", "running", f"answer {len(asked)}")

    monkeypatch.setattr(LocalBackend, "job", job)
    reader = ViewReader(trained, clock=lambda: now[0], cpu_clock=lambda: 0.0)
    found = []
    for now[0] in (0.0, 1.0, 9.0, 10.0, 15.0, 50.0):
        view = reader.read()
        found.append((view.status.state, view.status.job.detail))
    assert asked == [0.0, 10.0, 50.0]
    assert found == [("running", f"answer {number}") for number in (1, 1, 1, 2, 2, 3)]


def test_a_run_that_is_removed_leaves_the_last_screen_with_the_reason(trained: RunDir) -> None:
    with Reading(trained, 0.01) as reading:
        wait_until(lambda: reading.shown, "the first reading")
        trained.record.unlink()
        wait_until(lambda: reading.shown is not None and reading.shown.problem, "the problem")
    assert reading.shown is not None
    assert "run.json" in texts(reading.shown, Choices(), 400, 24)[0]


def watching(run: RunDir, **environment: str) -> AbstractContextManager[Terminal]:
    known = {name: value for name, value in os.environ.items() if name != "NO_COLOR"}
    known |= {"TERM": "xterm-256color", "PYTHONIOENCODING": "utf-8"} | environment
    return terminal([sys.executable, "-m", "scaletrain_cli", "watch", str(run.path)], known)


@pytest.mark.process
def test_in_a_terminal_keys_are_answered_and_the_terminal_is_restored(trained: RunDir) -> None:
    with watching(trained) as opened:
        first = opened.wait_for("q quit")
        assert "\x1b[?1049h" in first
        assert "\x1b[1;32m" in first  # green, of the state
        opened.type("\x1b[Z")  # Shift-Tab
        assert "7 logs]" in opened.wait_for(r"7 logs\]")
        opened.type("3")
        opened.wait_for("66.0 GB")
        opened.resize(40, 120)
        opened.wait_for(r"\x1b\[40;1H")
        opened.process.send_signal(signal.SIGTSTP)
        opened.wait_for(r"\x1b\[\?1049l")
        stat = Path(f"/proc/{opened.process.pid}/stat")
        wait_until(lambda: stat.read_text().rpartition(")")[2].split()[0] == "T", "the process is stopped")
        assert opened.modes == opened.before
        opened.process.send_signal(signal.SIGCONT)
        opened.wait_for("q quit")
        opened.type("q")
        opened.wait_for(r"\x1b\[\?25h\x1b\[\?1049l")
        assert opened.process.wait() == 0
        assert opened.modes == opened.before


@pytest.mark.process
def test_a_terminal_without_a_cursor_gets_lines(trained: RunDir) -> None:
    with watching(trained, TERM="dumb") as opened:
        assert "\x1b" not in opened.wait_for("finished  step 300 of 300")
        assert opened.process.wait() == 0


def test_no_color(trained: RunDir, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from scaletrain_cli.ui.watch.terminal import Terminal as Screen

    lines = screen_lines(shown_of(trained), Choices(), 80, 24)
    monkeypatch.setattr(Screen, "size", (80, 24))
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setattr("sys.stdin.fileno", lambda: 0)
    for no_color in ("", "1"):
        monkeypatch.setenv("NO_COLOR", no_color)
        Screen().draw(lines)
        has_color = "\x1b[1;32m" in capsys.readouterr().out
        assert has_color is (no_color == "")


def test_only_changed_lines_are_drawn(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from scaletrain_cli.ui.watch.terminal import Terminal as Screen

    monkeypatch.setattr(Screen, "size", (80, 24))
    monkeypatch.setattr("sys.stdin.fileno", lambda: 0)
    screen = Screen()
    screen.draw([Text("one"), Text("two")])
    assert capsys.readouterr().out.count("\x1b[K") == 24
    screen.draw([Text("one"), Text("three")])
    assert capsys.readouterr().out == "\x1b[2;1Hthree\x1b[K"
