"""Every verb that takes a run works for one on a login node, or says what to do there."""

import os
from pathlib import Path

import pytest

from scaletrain_cli.cli import login_node
from scaletrain_cli.cli.elsewhere import run_on_login_node
from scaletrain_cli.errors import ExitCode, UsageError
from scaletrain_cli.launch.login_node import ssh
from scaletrain_cli.launch.login_node.sent_runs import SentRun, remember, sent_runs
from tests.cli.command_line import SMALL, scaletrain
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


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The scripts that are sent to a login node without a connection; each of them ends with 7."""
    file = Path(os.environ["XDG_CONFIG_HOME"], "scaletrain", "clusters.yaml")
    file.parent.mkdir(parents=True)
    file.write_text("clusters: {site: {host: login.site, scheduler: local}, here: {scheduler: local}}")
    remember(SentRun("away-1", "site", 1.0))
    scripts: list[str] = []
    for module in (ssh, login_node):  # the names that the verbs use were bound when it was imported
        monkeypatch.setattr(module, "run_interactively", lambda node, script, **_: scripts.append(script) or 7)
        monkeypatch.setattr(module, "output_of", lambda *_: "")
    return scripts


def test_every_verb_is_sent_to_where_its_run_is(scripts: list[str]) -> None:
    """Without a connection; the next test has one."""
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


OF_CLUSTERS = (["list", "--mine"], ["nodes", "list"], ["nodes", "clear", "gpu07"], ["recover", "--every", "5m"])


@pytest.mark.parametrize("words", OF_CLUSTERS, ids=" ".join)
def test_a_verb_that_needs_no_run_is_sent_to_the_cluster_that_it_names(words: list[str], scripts: list[str]) -> None:
    assert run_on_login_node([*words, "--cluster", "site"]) == 7
    assert scripts.pop().endswith(f" {' '.join(words)}")
    assert run_on_login_node(words) is None
    for cluster, error in (("here", "has no login node"), ("nowhere", "no such cluster")):
        with pytest.raises(UsageError, match=error):
            run_on_login_node([*words, f"--cluster={cluster}"])
    assert scripts == []


@pytest.mark.parametrize("spec", [[], ["--spec", str(SMALL)], [f"--spec={SMALL}"]], ids=str)
def test_a_drill_injects_its_faults_on_the_cluster_that_it_names(spec: list[str], scripts: list[str]) -> None:
    assert run_on_login_node(["drill", "sigterm", "--cluster", "site", "--yes", *spec]) == 7
    words = scripts.pop().splitlines()[-1].partition(" drill ")[2].split()
    assert words[:4] == ["sigterm", "--cluster", "site", "--yes"]
    assert all(str(SMALL) not in word for word in words), "it reads the file that was sent"
    assert ("--spec" in " ".join(words)) == bool(spec)
    for elsewhere in (["--cluster", "here"], ["--cluster", "site", "--scheduler", "slurm"] if spec else []):
        assert run_on_login_node(["drill", "sigterm", *spec, *elsewhere]) is None
    assert scripts == []


@pytest.mark.usefixtures("scripts")
def test_a_list_of_this_machine_says_how_to_see_that_of_a_cluster() -> None:
    for words in (["list"], ["nodes", "list"]):
        assert f"scaletrain {' '.join(words)} --cluster site" in scaletrain(*words, code=0).err


def test_a_run_id_is_sent_to_one_cluster(scripts: list[str]) -> None:
    """The list has one cluster of an id: verbs for the run on the second one would go to the first."""
    words = ["submit", str(SMALL), "--run-id", "away-1"]
    remember(SentRun("away-1", "other", 2.0))
    with pytest.raises(UsageError, match="away-1 was sent to the cluster other"):
        run_on_login_node([*words, "--cluster", "site"])
    assert run_on_login_node([*words, "--cluster", "site", "--dry-run"]) == 7
    remember(SentRun("away-1", "site", 3.0))
    assert run_on_login_node([*words, "--cluster", "site"]) == 7, "a repeated submission is the same run"
    assert [run.submitted for run in sent_runs()] == [3.0]


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
