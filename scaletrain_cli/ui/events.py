"""Events of events.jsonl as text, for `scaletrain events` and `scaletrain train`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from rich.text import Text

from scaletrain_cli.text import bytes_text, counted, seconds_text
from scaletrain_cli.ui.console import line, plain, stdout_console

Event = Mapping[str, Any]
_NOT_SHOWN = ("time", "event", "metrics_bytes")


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


def event_sentence(event: Event) -> str:
    """Return the text of an event; for an unknown event or form, its fields."""
    sentence = _SENTENCES.get(str(event.get("event")))
    try:
        return sentence(event) if sentence is not None else _fields(event)
    except (KeyError, TypeError, ValueError, AttributeError, ArithmeticError):  # the event has another form
        return _fields(event)


def _fields(event: Event) -> str:
    given = {key: value for key, value in event.items() if key not in _NOT_SHOWN and value not in (None, "", [])}
    return ", ".join(f"{key.replace('_', ' ')} {_value(value)}" for key, value in given.items())


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return format(value, ".5g")
    if isinstance(value, list | tuple):
        return ", ".join(map(_value, value))
    return str(value)


def _submitted(event: Event) -> str:
    code = event.get("code")
    return f"job {event['job_id']} on {event['scheduler']}" + (f", with the code {code}" if code else "")


def _resumed(event: Event) -> str:
    lost, passed = event.get("lost_steps", 0), event.get("passed_over") or ()
    text = f"from step {event['step']}" + (f"; {counted(lost, 'step')} to repeat" if lost else "; no steps lost")
    return text + (f"; checkpoints skipped: {'; '.join(map(str, passed))}" if passed else "")


def _checkpoint(event: Event) -> str:
    blocked = f", training waited {seconds_text(event['blocked_seconds'])}" if event.get("blocked_seconds") else ""
    return f"step {event['step']} committed, {bytes_text(event['bytes'])} in {seconds_text(event['seconds'])}{blocked}"


def _first_loss(event: Event) -> str:
    fresh = "plausible for an untrained model" if event["plausible"] else "implausible for an untrained model"
    return f"{event['loss']:.4f}, {fresh} (ln of the vocabulary size is {event['ln_vocab_size']:.4f})"


def _measured(event: Event) -> str:
    return f"model states take {bytes_text(event['model_states'])}, planned {bytes_text(event['planned'])}"


def _left(event: Event) -> str:
    step = f"at step {event['step']}"
    if "saved_step" in event:
        return f"{step}; latest checkpoint at step {event['saved_step']}: {event.get('why', 'no time to save')}"
    return f"{step}, state saved"


def _finished(event: Event) -> str:
    return f"at step {event['step']}"


def _attempt_ended(event: Event) -> str:
    message = f": {event['message']}" if event.get("message") else ""
    then = "the run is requeued" if event.get("requeue") else "the run is not requeued"
    why = f" ({event['why']})" if event.get("why") else ""
    return (
        f"attempt {event['attempt']} ended with exit code {event['exit_code']}, {event['reason']}{message}; {then}{why}"
    )


def _rolled_back(event: Event) -> str:
    first, last = event["skip"]
    left_out = f"batches {first} to {last} are skipped"
    return f"from step {event['from_step']} to step {event['to_step']}; {left_out}"


def _spike(event: Event) -> str:
    return f"at step {event['step']}; the run {event['then']}"


def _stragglers(event: Event) -> str:
    if event.get("rank") is None:
        return "no rank is slower than the others"
    return f"rank {event['rank']} is slower than the others"


def _hang(event: Event) -> str:
    return f"{event.get('message') or 'no progress'} (attempt {event['attempt']}, node {event['node']})"


def _node_agent_stopped(event: Event) -> str:
    then = "stopped again; its ranks save and exit" if event["ends"] else "was continued by its ranks"
    return f"the agent of node {event['node']} was stopped by a signal for {event['seconds']} s and {then}"


def _signal(event: Event) -> str:
    return f"{event['signal']} on node {event['node']}, forwarded to its ranks"


def _nodes_excluded(event: Event) -> str:
    text = f"the job excludes {', '.join(event['nodes'])}" if event["nodes"] else "no nodes are excluded"
    spared = event.get("spared")
    return text + (f"; too few other nodes to exclude {', '.join(spared)}" if spared else "")


_SENTENCES: dict[str, Callable[[Event], str]] = {
    "submitted": _submitted,
    "started": lambda event: "training starts at step 0",
    "resumed": _resumed,
    "first-loss": _first_loss,
    "measured": _measured,
    "checkpoint": _checkpoint,
    "preempted": _left,
    "finished": _finished,
    "attempt-ended": _attempt_ended,
    "rolled-back": _rolled_back,
    "spike": _spike,
    "stragglers": _stragglers,
    "hang": _hang,
    "node-agent-stopped": _node_agent_stopped,
    "signal": _signal,
    "nodes-excluded": _nodes_excluded,
    "tracker-off": lambda event: str(event["message"]),
    "tracker-on": lambda event: str(event["message"]),
    "wandb-off": lambda event: f"Weights & Biases is off, the run continues without it: {event['message']}",
    "cancelled": lambda event: "canceled by the user",
    "stopped": lambda event: f"not requeued: {event['why']} (exit code {event['exit_code']})",
    "from-scratch": lambda event: "training restarts at step 0 without a checkpoint",
    "pods-force-deleted": lambda event: f"force-deleted the pods {', '.join(event['pods'])} of unreachable nodes",
}
