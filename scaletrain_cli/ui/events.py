"""Lines for events, in `scaletrain events` and `scaletrain train`."""

from __future__ import annotations

import time
from collections.abc import Iterable

from rich.text import Text

from scaletrain_cli.event_texts import Event, event_sentence
from scaletrain_cli.ui.console import line, plain, stdout_console


def event_line(event: Event, *, with_date: bool = False) -> Text:
    """Return ``12:30:05  checkpoint  step 40 committed, 1.2 GB in 3.1 s``."""
    moment = event.get("time", "")
    form = "%Y-%m-%d %H:%M:%S" if with_date else "%H:%M:%S"
    try:
        when = time.strftime(form, time.localtime(float(moment)))
    except (TypeError, ValueError, OverflowError, OSError):  # missing or invalid time
        when = "no time"
    name = plain(str(event.get("event", "")))
    return Text.assemble((when, "dim"), f"  {name:<14}", (f"  {plain(event_sentence(event))}", "dim"))


def show_events(events: Iterable[Event]) -> None:
    """Print events to stdout, one per line."""
    console = stdout_console()
    for event in events:
        line(console, event_line(event, with_date=True))
