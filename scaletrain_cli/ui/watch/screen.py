"""The screen of `watch`: a headline, the names of the pages, the page, and a line of keys; and what each key does."""

import re
import time
from collections.abc import Callable, Mapping

from rich.text import Text

from scaletrain_cli.launch.view import Reading, RunView, Shown
from scaletrain_cli.ui.console import escaped_text, event_line, plain
from scaletrain_cli.ui.diagnosis import finding_in_full, no_findings_text
from scaletrain_cli.ui.watch.layout import PAGES, Choices, Content, Page, cut, rendered, wrapped
from scaletrain_cli.ui.watch.pages import MOST_HALVINGS, ORDERS, curves, headline, nodes_page, overview, ranks_page
from scaletrain_cli.ui.watch.terminal import Terminal

DRAW_SECONDS = 0.5
_FIRST_SECONDS = 0.1  # until the first reading
_MOST_EVENTS = 2000  # the newest, on the page of events
_FRAME_ROWS = 3  # headline, names of the pages, keys
_KEYS = "q quit  1-7 Tab page  ↑↓ scroll  s steps/time  +- part  ? help"


def watch_screen(reading: Reading, on_view: Callable[[RunView], None] = lambda view: None) -> None:
    """Show what is read until the user quits. Raises what the first reading and ``on_view`` raise."""
    choices = Choices()
    with Terminal() as terminal:
        choices.unicode = terminal.unicode
        size, quits = (0, 0), False
        while not quits:
            reading.follow_log(choices.log if choices.page == "logs" else None)
            is_new = reading.changed.is_set() or terminal.size != size
            reading.changed.clear()
            if reading.shown is None and reading.failure is not None:
                raise reading.failure
            if reading.shown is not None:
                on_view(reading.shown.view)
            if terminal.size != size:
                terminal.forget()
            size = terminal.size
            if is_new:
                terminal.draw(_lines(reading, choices, *size))
            key = terminal.key(DRAW_SECONDS if reading.shown is not None else _FIRST_SECONDS)
            if key is not None:
                quits = key == "q" or (reading.shown is not None and not press(key, choices, reading.shown, size[1]))
                if key == "r":
                    terminal.forget()
                terminal.draw(_lines(reading, choices, *size))


def _lines(reading: Reading, choices: Choices, width: int, height: int) -> list[Text]:
    if reading.shown is None:
        return [cut(Text.assemble((plain(reading.run.run_id), "bold"), "  reading the run directory"), width)]
    return screen_lines(reading.shown, choices, width, height)


def screen_lines(shown: Shown, choices: Choices, width: int, height: int) -> list[Text]:
    """Return ``height`` lines of at most ``width`` columns; ``choices.scroll`` is limited to what there is."""
    content = _PAGES[choices.page](shown, choices, width, height - _FRAME_ROWS)
    room = max(1, height - _FRAME_ROWS - len(content.head))
    choices.scroll = max(0, min(choices.scroll, len(content.body) - room))
    first = max(0, len(content.body) - room - choices.scroll) if content.from_end else choices.scroll
    body = [*content.head, *content.body[first : first + room]]
    body += [Text("")] * (height - _FRAME_ROWS - len(body))
    # The name of the shown page is in brackets, so that it is seen without colors.
    text = Text()
    for number, page in enumerate(PAGES, 1):
        name = f"{number} {page}"
        text.append(f"[{name}]" if page == choices.page else f" {name} ", "bold" if page == choices.page else "dim")
    total = len(content.body)
    where = "" if total <= room else f"lines {first + 1}-{min(total, first + room)} of {total}"
    keys = cut(Text(_KEYS, "dim"), width - len(where) - 1)
    keys.pad_right(width - len(where) - keys.cell_len)
    lines = [_headline(shown, width), cut(text, width), *body, keys.append(where, "dim")]
    lines = [cut(line, width) for line in lines]
    return lines if choices.unicode else [_ascii(line) for line in lines]


def press(key: str, choices: Choices, shown: Shown, height: int) -> bool:
    """Change the choices by a key; return False if it quits."""
    rows = max(1, height - _FRAME_ROWS - 1)
    moves = {"up": -1, "down": 1, "page-up": -rows, "page-down": rows, "home": -(10**9), "end": 10**9}
    if key == "q":
        return False
    if key in moves:
        choices.scroll += -moves[key] if choices.page == "logs" else moves[key]
    elif key.isdigit() and 1 <= int(key) <= len(PAGES):
        choices.page, choices.scroll = PAGES[int(key) - 1], 0
    elif key in ("tab", "shift-tab"):
        place = PAGES.index(choices.page) if choices.page in PAGES else -1
        choices.page, choices.scroll = PAGES[(place + (1 if key == "tab" else -1)) % len(PAGES)], 0
    elif key in ("?", "escape"):
        is_help = key == "?" and choices.page != "help"
        choices.page, choices.scroll = ("help" if is_help else "overview"), 0
    elif key == "s":
        choices.by_time = not choices.by_time
    elif key in ("+", "-"):
        choices.halvings = max(0, min(MOST_HALVINGS, choices.halvings + (1 if key == "+" else -1)))
    elif key == "o":
        choices.order, choices.scroll = (choices.order + 1) % len(ORDERS), 0
    elif key in ("left", "right") and choices.page == "logs":
        count = 1 if shown.log is None else shown.log.count
        choices.log, choices.scroll = (choices.log + (1 if key == "right" else -1)) % count, 0
    return True


def _headline(shown: Shown, width: int) -> Text:
    """Return run id, state, attempt, and the time of the reading at the right."""
    view = shown.view
    left = headline(view)
    if view.is_over and view.status.state != "finished":
        left.append("  ended", "dim")
    clock = time.strftime("%H:%M:%S", time.localtime(view.now))
    if shown.problem:
        left.append(f"  {plain(shown.problem)}", "bold red")
    left = cut(left, width - len(clock) - 1)
    left.pad_right(width - len(clock) - left.cell_len)
    return left.append(clock, "dim")


_ASCII = str.maketrans("×→·•–≤°↑↓…", "x>-*-<\u0020^v.")


def _ascii(line: Text) -> Text:
    line = line.copy()
    line.plain = line.plain.translate(_ASCII).encode("ascii", "replace").decode()
    return line


def _events(shown: Shown, choices: Choices, width: int, height: int) -> Content:
    """Return all events, the newest first."""
    lines = [event_line(event, with_date=width >= 100) for event in reversed(shown.view.events[-_MOST_EVENTS:])]
    return Content([part for line in lines for part in wrapped(line, width, indent=2)] or [Text("none yet", "dim")])


def _findings(shown: Shown, choices: Choices, width: int, height: int) -> Content:
    """Return the findings with causes and changes of the spec, and what is not concluded."""
    diagnosis = shown.view.diagnosis
    lines: list[Text] = []
    for finding in diagnosis.findings:
        for renderable in finding_in_full(finding):
            lines += rendered(renderable, width)
        lines.append(Text(""))
    if not diagnosis.findings:
        lines += [Text(no_findings_text(diagnosis)), Text("")]
    if diagnosis.not_concluded:
        lines.append(Text("not concluded", "dim"))
        for reason in diagnosis.not_concluded:
            lines += wrapped(escaped_text(f"  {reason}", "dim"), width, indent=2)
    return Content(lines)


def _logs(shown: Shown, choices: Choices, width: int, height: int) -> Content:
    log = shown.log
    if log is None:
        command = f"scaletrain logs {shown.view.status.run_id} --follow"
        waits = escaped_text(f"No output in the run directory yet. `{command}` fetches it from a cluster.", "dim")
        return Content(wrapped(waits, width))
    of = f"rank {log.file.rank} on {log.file.node}, attempt {log.file.attempt}"
    head = escaped_text(f"{of}: log {log.number + 1} of {log.count}, left and right choose another", "dim")
    lines = [_ORIGIN.sub(r"\1Z ", line) for line in log.lines]
    rows = [part for line in lines for part in wrapped(escaped_text(line), width, indent=2)]
    return Content(rows or [Text("empty", "dim")], [cut(head, width)], from_end=True)


# The date and the source of a rank's own lines, which the first line of the page names.
_ORIGIN = re.compile(r"^\d{4}-\d\d-\d\dT(\d\d:\d\d:\d\d)\.\d+Z INFO rank \d+: ")


def _help(shown: Shown, choices: Choices, width: int, height: int) -> Content:
    keys = {
        "1 to 7, Tab, Shift-Tab": "choose a page",
        "Up, Down, Page Up, Page Down": "scroll; Home, End: first and last line",
        "s": "curves over steps or over time",
        "+ and -": "curves of a shorter or longer part, up to now",
        "o": "order of the ranks: rank, own time, memory",
        "Left, Right": "log of another rank",
        "r": "draw the screen again",
        "q, Ctrl-C": "quit; the run goes on",
    }
    lines = [Text("Keys", "bold"), Text("")]
    for key, meaning in keys.items():
        lines.append(Text.assemble("  ", (key.ljust(28), "cyan"), meaning))
    asks = "The run directory is read about once a second, and the scheduler is asked at most every 10 seconds."
    marks = "On the x axis of a curve: 2, 3 ... the start of that attempt, R a rollback, o a validation, dots the plan."
    return Content([*lines, Text(""), *wrapped(Text(marks), width), Text(""), *wrapped(Text(asks), width)])


_PAGES: Mapping[Page, Callable[[Shown, Choices, int, int], Content]] = {
    "overview": lambda shown, choices, width, height: overview(shown.view, choices, width, height),
    "curves": lambda shown, choices, width, height: Content(curves(shown.view, choices, width, height)),
    "ranks": ranks_page,
    "nodes": nodes_page,
    "events": _events,
    "findings": _findings,
    "logs": _logs,
    "help": _help,
}
