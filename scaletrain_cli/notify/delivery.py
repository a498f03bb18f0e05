"""Send one notification: POST to a webhook, or run a command. Waits a bounded time; errors never contain the URL."""

import contextlib
import email.utils
import html
import http.client
import json
import os
import shutil
import signal
import string
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from typing import IO, Any
from urllib.parse import quote

from scaletrain_cli.notify.notices import Notice
from scaletrain_cli.secret_text import hide_values, hide_values_in, secret_values
from scaletrain_cli.spec.notify import NotifySpec, url_problem

SCHEMA = "scaletrain.notification/v1"
REQUEST_SECONDS, COMMAND_SECONDS = 10.0, 30.0
_POLL_SECONDS = 0.05
_LATER = (408, 425, 429)  # and 5xx; any other status refuses the notification for good
LONGEST_RETRY_AFTER = 3600.0
_SLACK_LONGEST = 2900  # characters of a block's text; Slack allows 3000
_MARKS = {"error": ":red_circle:", "warning": ":large_orange_circle:", "note": ":information_source:"}
_CHANGES = {"raised": "", "worse": "worse: ", "cleared": "cleared: ", "lasts": "lasts: "}


@dataclass(frozen=True)
class Delivery:
    """The result of sending a notification. ``problem``: why it failed, empty after success.

    ``is_final``: it will never be accepted. ``retry_after``: seconds that the receiver asks to wait; None if it does
    not.
    """

    problem: str = ""
    is_final: bool = False
    retry_after: float | None = None


@dataclass(frozen=True)
class Origin:
    """The run that notifies. ``secret_names``: variables whose values no message may contain."""

    run_id: str
    name: str
    folder: str
    secret_names: tuple[str, ...] = ()


def message_of(notice: Notice, origin: Origin) -> dict[str, Any]:
    """Return the notification as JSON values (docs/notifications.md)."""
    return {
        "schema": SCHEMA,
        "id": f"{origin.run_id}-{notice.id}",
        "run_id": origin.run_id,
        "name": origin.name,
        "run_dir": origin.folder,
        "kind": notice.kind,
        "change": notice.change,
        "severity": notice.severity,
        "text": notice.text,
        "time": notice.time,
        "event": dict(notice.event),
    }


def slack_message(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return the message as Slack's incoming webhooks read it: ``text`` for notifications, ``blocks`` for the page."""
    title = f"{message['kind']}: {_CHANGES.get(message['change'], '')}{message['text']}"
    mark = _MARKS.get(message["severity"], "")
    run, text = (html.escape(part, quote=False) for part in (str(message["run_id"]), title))  # as Slack requires
    when = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(message["time"]))
    below = f"`scaletrain diagnose {run}` · `scaletrain explain {run}` · {when}"
    return {
        "text": f"{run}: {text}"[:_SLACK_LONGEST],
        "blocks": [
            {"type": "section", "text": {"type": "mrkdwn", "text": f"{mark} *{run}*\n{text}"[:_SLACK_LONGEST]}},
            {"type": "context", "elements": [{"type": "mrkdwn", "text": below}]},
        ],
    }


def deliver(notice: Notice, receiver: NotifySpec, origin: Origin, environment: Mapping[str, str]) -> Delivery:
    """Send a notification to one receiver. Never raises."""
    secrets = secret_values(environment, (*origin.secret_names, receiver.webhook or ""))
    message = hide_values_in(message_of(notice, origin), secrets)
    try:
        if receiver.webhook is not None:
            delivery = _post(message, receiver, environment)
        else:
            delivery = _run(message, receiver, environment)
    except Exception as error:  # a receiver of the user's must not end what sends to it
        delivery = Delivery(f"{type(error).__name__}: {error}")
    return Delivery(hide_values(delivery.problem, secrets), delivery.is_final, delivery.retry_after)


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Follows no redirect: a POST would become a GET, to an address that the user has not chosen."""

    def redirect_request(self, *_: Any) -> None:
        return None


def _post(message: dict[str, Any], receiver: NotifySpec, environment: Mapping[str, str]) -> Delivery:
    if not (url := environment.get(receiver.webhook or "", "").strip()):
        return Delivery(f"the variable {receiver.webhook} is not set")
    if problem := url_problem(url):
        return Delivery(f"the variable {receiver.webhook} is {problem}")
    body = slack_message(message) if receiver.format == "slack" else message
    headers = {
        "Content-Type": "application/json",
        "User-Agent": "scaletrain",
        "Idempotency-Key": quote(
            str(message["id"]), safe=string.punctuation.replace("%", "") + " "
        ),  # a header is ASCII on one line
    }
    request = urllib.request.Request(url, json.dumps(body).encode(), headers, method="POST")
    opener = urllib.request.build_opener(_NoRedirect, _proxies(request.host, environment))
    try:
        with opener.open(request, timeout=REQUEST_SECONDS):
            return Delivery()
    except urllib.error.HTTPError as error:
        error.close()
        is_final = error.code < 500 and error.code not in _LATER
        return Delivery(f"HTTP status {error.code}", is_final, _retry_after(error.headers.get("Retry-After")))
    except urllib.error.URLError as error:
        return Delivery(f"no connection: {error.reason}")
    except TimeoutError:
        return Delivery(f"no answer within {REQUEST_SECONDS:.0f} s")
    except http.client.HTTPException as error:
        return Delivery(f"the answer is not HTTP: {type(error).__name__}")


def _proxies(host: str, environment: Mapping[str, str]) -> urllib.request.ProxyHandler:
    """Return the proxies for a host by the variables of the run, of which one with a password may be in secret_env."""
    named = sorted((name, url) for name, url in environment.items() if url and name.lower().endswith("_proxy"))
    proxies = {name.lower().removesuffix("_proxy"): url for name, url in named}  # small letters are last, and count
    is_excepted = urllib.request.proxy_bypass_environment(host, proxies)  # type: ignore[attr-defined]  # by no_proxy
    return urllib.request.ProxyHandler({} if is_excepted else proxies)


def _retry_after(value: str | None) -> float | None:
    """Return the seconds in a header Retry-After, a number or a date (RFC 9110, 10.2.3); None for another value."""
    if value is None:
        return None
    try:
        seconds = float(value)
    except ValueError:
        try:
            seconds = email.utils.parsedate_to_datetime(value).timestamp() - time.time()
        except (TypeError, ValueError):
            return None
    return min(max(0.0, seconds), LONGEST_RETRY_AFTER) if seconds == seconds else None


def _run(message: dict[str, Any], receiver: NotifySpec, environment: Mapping[str, str]) -> Delivery:
    """Run the command in a session of its own, with the message as its input; kill the session after the time limit."""
    words = list(receiver.command or ())
    variables = {name: str(message[name]) for name in ("run_id", "run_dir", "kind", "change", "severity", "text")}
    given = {f"SCALETRAIN_NOTIFY_{name.upper()}": value for name, value in variables.items()}
    if (program := shutil.which(words[0], path=environment.get("PATH"))) is None:
        return Delivery(f"{words[0]} is not found")
    with tempfile.TemporaryFile() as text, tempfile.TemporaryFile() as output:
        text.write(json.dumps(message).encode())
        text.seek(0)
        files = [
            (os.POSIX_SPAWN_DUP2, text.fileno(), 0),
            (os.POSIX_SPAWN_DUP2, output.fileno(), 1),
            (os.POSIX_SPAWN_DUP2, output.fileno(), 2),
        ]
        pid = os.posix_spawn(
            program,
            words,
            {**environment, **given},
            file_actions=files,
            setsid=True,
            setsigmask=(),
            setsigdef=(signal.SIGPIPE, signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP, signal.SIGCHLD),
        )
        if (code := _exit_code(pid, time.monotonic() + COMMAND_SECONDS)) is None:
            return Delivery(f"{words[0]} did not end within {COMMAND_SECONDS:.0f} s", is_final=True)
        return Delivery(f"{words[0]} ended with code {code}{_said(output)}") if code else Delivery()


def _exit_code(pid: int, deadline: float) -> int | None:
    """Return the exit code of a child process; None, after it was killed with its session, at the deadline."""
    while True:
        try:
            reaped, status = os.waitpid(pid, os.WNOHANG)
        except ChildProcessError:  # this process reaps all children elsewhere
            return 0
        if reaped:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() >= deadline:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)
            return None
        time.sleep(_POLL_SECONDS)


def _said(output: IO[bytes]) -> str:
    """Return the last line that a command has written, after a colon; empty if there is none."""
    end = output.seek(0, os.SEEK_END)
    output.seek(max(0, end - 500))
    lines = output.read().decode(errors="replace").strip().splitlines()
    return f": {lines[-1][:200]}" if lines else ""
