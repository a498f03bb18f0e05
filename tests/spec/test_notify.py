"""The section ``notify``: receivers, their events, and what is rejected."""

import pytest

from scaletrain_cli.spec.notify import DEFAULT_KINDS, url_problem
from tests.spec.samples import SPEC, load, problem, problems


def test_receivers_have_names_without_secrets_and_defaults() -> None:
    spec = load(SPEC, *("notify=[{webhook: URL}, {command: [tell, --now], events: [checkpoint], repeat: 90m}]",))
    webhook, command = spec.notify
    assert (webhook.name, webhook.events, webhook.severity, webhook.format) == (
        "webhook URL",
        DEFAULT_KINDS,
        "warning",
        "slack",
    )
    assert (command.name, command.events, command.repeat) == ("command tell --now", ("checkpoint",), 5400.0)


@pytest.mark.parametrize(
    ("given", "key", "said"),
    [
        ("{}", "notify.0", "must have either webhook or command"),
        ("{webhook: URL, command: [a]}", "notify.0", "must have either webhook or command"),
        ("{webhook: URL, events: [checkpont]}", "notify.0.events", "Did you mean checkpoint?"),
        ("{webhook: URL, events: [finding-cleared]}", "notify.0.events", "is not an event"),
        ("{command: ['']}", "notify.0.command", "must begin with a program"),
        ("{command: [a], format: json}", "notify.0.format", "is that of a webhook"),
        ("{webhook: URL}, {webhook: URL}", "notify.1", "has the same receiver"),
        ("{webhook: 'http://x/y'}", "notify.0.webhook", "must be the name of an environment variable"),
    ],
)
def test_a_receiver_that_cannot_work_is_rejected(given: str, key: str, said: str) -> None:
    found = problem(SPEC, f"notify=[{given}]")
    assert f" {key}" in found
    assert said in found


def test_a_url_in_env_or_in_the_spec_is_rejected_and_not_shown() -> None:
    assert "move it to secret_env" in problem(SPEC, "notify=[{webhook: URL}]", "env={URL: x}")
    found = problems(SPEC, "notify=[{webhook: 'https://hooks.slack.com/services/T0/B0/opaque-part'}]")
    assert found
    assert "opaque" not in " ".join(map(str, found))


def test_a_program_of_the_user_may_record_events_of_its_own() -> None:
    spec = load(SPEC, *("notify=[{webhook: URL, events: [my-event]}]", "code.command=[python, train.py]"))
    assert spec.notify[0].events == ("my-event",)


@pytest.mark.parametrize(
    ("url", "is_one"),
    [
        *(("https://hooks.example/x", True), ("http://127.0.0.1:8000/", True), ("file:///etc/passwd", False)),
        *(("https://", False), ("https://a b/", False), ("https://a:99999/", False), ("https://a/\n", False)),
        ("https://ada:horse@hooks.example/x", False),  # the HTTP library takes what follows the colon for a port
    ],
)
def test_only_web_addresses_are_urls(url: str, is_one: bool) -> None:
    assert (url_problem(url) == "") is is_one
