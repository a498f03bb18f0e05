"""Every verb that takes a run works for one on a login node, or says what to do there."""

import os
from pathlib import Path

import pytest

from scaletrain_cli.cli import login_node
from scaletrain_cli.cli.elsewhere import run_on_login_node
from scaletrain_cli.errors import ExitCode
from scaletrain_cli.launch.login_node import ssh
from scaletrain_cli.launch.login_node.sent_runs import SentRun, remember
from tests.cli.every_command import ALL, OF_A_RUN
from tests.login_node.conftest import Site

# Needs a target: a spec, or a run.
WITH_TARGET = [words for words, command in ALL.items() if any("|RUN" in (p.metavar or "") for p in command.params)]
RUN_ONLY = [words for words in OF_A_RUN if words != ("plan",)]
assert len(RUN_ONLY) > 20
MORE = {("checkpoint", "export"): ["out"], ("checkpoint", "average"): ["out"], ("checkpoint", "sample"): ["Hi"]}
MORE |= {("exec",): ["--", "hostname"]}


@pytest.fixture
def away(site: Site) -> Site:
    """The login node of a run, whose command prints its words."""
    remember(SentRun("away-1", "site", 1.0))
    (site.home / "scaletrain").write_text('#!/bin/sh\nprintf "%s|" "$@"\n')
    return site


EVERY = [*RUN_ONLY, *WITH_TARGET, ("exec",), ("shell",)]


def test_every_verb_is_sent_to_where_its_run_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a connection; the next test has one."""
    file = Path(os.environ["XDG_CONFIG_HOME"], "scaletrain", "clusters.yaml")
    file.parent.mkdir(parents=True)
    file.write_text("clusters: {site: {host: login.site, scheduler: local}}")
    remember(SentRun("away-1", "site", 1.0))
    scripts: list[str] = []
    for module in (ssh, login_node):  # the names that the verbs use were bound when it was imported
        monkeypatch.setattr(module, "run_interactively", lambda node, script, **_: scripts.append(script) or 7)
        monkeypatch.setattr(module, "output_of", lambda *_: "")
    codes = {words: run_on_login_node([*words, "away", *MORE.get(words, [])]) for words in EVERY}
    assert codes == dict.fromkeys(EVERY, 7)
    lost = [words for words, script in zip(EVERY, scripts, strict=True) if " ".join((*words, "away")) not in script]
    assert lost == []


@pytest.mark.long
def test_every_verb_runs_where_its_run_is(away: Site) -> None:
    answers = {}
    for words in EVERY:  # over one connection
        done = away.scaletrain(*words, "away", *MORE.get(words, []))
        answers[words] = (done.returncode, done.stdout[: len(" ".join(words)) + 5])
    assert answers == {words: (ExitCode.DONE, "|".join((*words, "away"))) for words in answers}


def test_a_calibration_from_a_run_there_is_refused_with_what_to_do(away: Site) -> None:
    refused = away.scaletrain("plan", "run.yaml", "--calibrate", "away")
    assert refused.returncode == ExitCode.USAGE
    assert "login.site" in refused.stderr
    assert refused.stdout == ""


def test_a_spec_is_not_taken_for_a_run_on_a_login_node(away: Site) -> None:
    (away.here / "away").write_text("name: x\n")
    for verb in (["data", "show"], ["data", "stats"], ["notify", "test"]):
        here = away.scaletrain(*verb, "away")
        assert (here.returncode, here.stdout) == (ExitCode.USAGE, "")
        assert "away: 4 problems in the run spec" in here.stderr
