"""The section ``notify``: webhooks and commands that get findings and events of a run."""

from collections.abc import Collection, Iterator, Sequence
from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import Field

from scaletrain_cli.event_texts import EVENT_NAMES
from scaletrain_cli.spec.quantities import AnyText, EnvName, Matching, PositiveSeconds
from scaletrain_cli.spec.section import Section
from scaletrain_cli.text import did_you_mean

# Kinds that stand for one or more events of events.jsonl; any other kind is the name of an event.
KINDS = ("finding", "finished", "failed", "preempted-too-often", "idle")
CLEARED = "finding-cleared"  # sent to those who got the finding
DEFAULT_KINDS = (*KINDS, "hang", "corruption", "rolled-back", "nodes-excluded")

EventName = Annotated[
    str, Matching(r"[a-z0-9]+(-[a-z0-9]+)*", 64, "must be the name of an event, such as checkpoint or finding")
]


class NotifySpec(Section):
    """One receiver: a webhook or a command.

    The URL of a webhook is a secret, so the spec has the name of the environment variable that holds it. A command gets
    the notification as JSON on its standard input.
    """

    webhook: EnvName | None = Field(
        default=None, description="environment variable with the URL, see secret_env; the URL itself is not written"
    )
    command: tuple[AnyText, ...] | None = Field(
        default=None, description="words of a command line, run on the first node; no shell"
    )
    format: Literal["slack", "json"] = Field(
        default="slack", description="of a webhook: text and blocks as Slack reads them, or the notification as JSON"
    )
    events: tuple[EventName, ...] = Field(default=DEFAULT_KINDS, description="kinds to send, or names of events")
    severity: Literal["note", "warning", "error"] = Field(
        default="warning", description="of findings: the lowest severity to send"
    )
    repeat: PositiveSeconds = Field(
        default=4 * 3600.0, description="time after which a finding that lasts is sent again"
    )

    @property
    def name(self) -> str:
        """The name of the receiver in files and messages: it holds no secret, and is the same in all attempts."""
        if self.webhook is not None:
            return f"webhook {self.webhook}"
        return f"command {' '.join(self.command or ())}"


def notify_inconsistencies(
    receivers: Sequence[NotifySpec], env: Collection[str], *, own_program: bool
) -> Iterator[tuple[str, str]]:
    """Yield (dotted key, message) for each contradiction. ``env``: names of the visible variables of the run.

    ``own_program``: a program of the user's, which may record events under names of its own.
    """
    seen: set[str] = set()
    for number, one in enumerate(receivers):
        key = f"notify.{number}"
        if (one.webhook is None) == (one.command is None):
            yield key, "must have either webhook or command."
            continue
        if one.command is not None and (not one.command or not one.command[0]):
            yield f"{key}.command", "must begin with a program, such as [./tell.sh]."
        if one.command is not None and one.format != "slack":
            yield f"{key}.format", "is that of a webhook: a command gets JSON. Remove it."
        if one.webhook in env:
            message = f"{one.webhook} is also in env, where its value is visible; move it to secret_env."
            yield f"{key}.webhook", message
        if one.name in seen:
            yield key, f"has the same receiver as an earlier item: {one.name}."
        seen.add(one.name)
        known = [*KINDS, *(name for name in EVENT_NAMES if name != CLEARED)]
        for event in one.events:
            if event not in known and not own_program:
                hint = f" {did_you_mean(event, known)}".rstrip()
                yield f"{key}.events", f"{event} is not an event.{hint}"


def url_problem(url: str) -> str:
    """Return why a text is not the URL of a webhook; empty if it is one."""
    try:
        parts = urlsplit(url)
        host = parts.hostname if parts.username is None else None  # urllib does not support user names in URLs
        known = parts.scheme in ("http", "https") and bool(host) and parts.port != 0
    except ValueError:
        known = False
    known = known and url.isprintable() and " " not in url
    return "" if known else "not a URL that begins with https://HOST or http://HOST"
