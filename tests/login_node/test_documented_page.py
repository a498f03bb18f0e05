"""docs/clusters.md: from a laptop to the first run, with the commands of the page."""

import os
import re
import shlex
import sys
from pathlib import Path

import pytest

from scaletrain_cli.errors import ExitCode
from tests.login_node.conftest import Site
from tests.login_node.server import PROJECT
from tests.login_node.test_cluster_setup import python_of

PAGE = PROJECT / "docs" / "clusters.md"
# In place of Slurm and of torch: the local back end, and a Python whose pip installs a command with a stand-in engine.
ENTRY = ("scheduler: slurm\n    slurm: {partition: gpu, account: team-a}", "scheduler: local")
COMMAND = """#!{python}
import sys
sys.path.insert(0, {project!r})
from scaletrain_cli.__main__ import main
from scaletrain_cli.launch import preparation
from scaletrain_cli.launch.backends.local.backend import LocalBackend
LocalBackend.__init__.__defaults__ = ("tests.launch.fake_engine",)
preparation.reads_prepared_data = lambda *_: False
main(sys.argv[1:])
"""


@pytest.mark.long
def test_the_commands_of_the_page_lead_to_a_run_that_has_ended(site: Site) -> None:
    text = PAGE.read_text(encoding="utf-8")
    entry = re.search(r"```yaml\n(.*?)```", text, re.DOTALL)
    commands = re.search(r"```sh\n(.*?)```", text, re.DOTALL)
    assert commands is not None
    assert ENTRY[0] in entry[1]
    clusters = Path(os.environ["XDG_CONFIG_HOME"], "scaletrain", "clusters.yaml")
    clusters.write_text(entry[1].replace(*ENTRY).replace("me@login.lab.example", "login.site"))
    python_of(site, installed=COMMAND.format(python=sys.executable, project=str(PROJECT)))
    answers = {}
    for line in commands[1].splitlines():
        words = shlex.split(line.partition(" # ")[0])[1:]
        if words[0] == "cluster":
            words += ["--python", "~/python"]
        done = site.scaletrain(*words)
        assert done.returncode == ExitCode.DONE, (line, done.stderr)
        answers[" ".join(words[:2])] = done.stdout + done.stderr
    assert len(answers) == 8  # a dry run and a submission have the same first words
    assert "finished" in answers["watch"]
    assert "up" in answers["logs"]
    assert (site.home / "runs").is_dir(), "the default runs root"
