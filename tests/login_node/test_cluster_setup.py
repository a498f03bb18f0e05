"""`scaletrain cluster setup`: this package on a login node, over a real sshd."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from scaletrain_cli import __version__
from scaletrain_cli.errors import ExitCode
from scaletrain_cli.launch.login_node.sent_runs import SentRun, remember
from scaletrain_cli.launch.login_node.ssh import make_wheel
from tests.login_node.conftest import Site
from tests.login_node.server import REAL_COMMAND
from tests.waiting import wait_until

PRINTS = '#!/bin/sh\nprintf "%s|" "$@"\n'
# A Python whose venv has itself, and whose pip installs a command.
PYTHON = """#!/bin/sh
case "$*" in
*version_info*) ;;
*"-m venv "*) mkdir -p "$3/bin" && cp "$0" "$3/bin/python" ;;
*"-m pip "*)
    echo x >> ~/pip-calls
    {pip}
    cp ~/installed "${{0%/python}}/scaletrain" && chmod 755 "${{0%/python}}/scaletrain" ;;
esac
"""


def python_of(site: Site, pip: str = ":", installed: str = PRINTS) -> None:
    (site.home / "installed").write_text(installed)
    (site.home / "python").write_text(PYTHON.format(pip=pip))
    (site.home / "python").chmod(0o755)


def name_no_command(site: Site) -> Path:
    """Leave the key ``scaletrain`` out of the entry of the cluster."""
    file = Path(os.environ["XDG_CONFIG_HOME"], "scaletrain", "clusters.yaml")
    file.write_text(f"clusters: {{site: {{host: {{ssh: login.site, runs: {site.runs}}}, scheduler: local}}}}")
    return file


def set_up(site: Site, *words: str) -> subprocess.CompletedProcess[str]:
    return site.scaletrain("cluster", "setup", "site", *words)


def places(site: Site) -> list[str]:
    return sorted(path.name for path in (site.home / ".local/share/scaletrain").glob(f"{__version__}-*"))


def test_a_wheel_is_the_same_for_the_same_files() -> None:
    assert make_wheel()[2] == make_wheel()[2]


def test_the_same_package_is_installed_once_and_used_by_the_verbs(site: Site) -> None:
    name_no_command(site)
    python_of(site)
    first = set_up(site, "--python", "~/python", "--json")
    assert first.returncode == ExitCode.DONE, first.stderr
    assert json.loads(first.stdout)["installed"] is json.loads(first.stdout)["used"] is True
    again = set_up(site, "--python", "~/python", "--json")
    assert json.loads(again.stdout)["installed"] is False
    assert "was there already" in again.stderr
    assert (site.home / "pip-calls").read_text() == "x\n"
    remember(SentRun("away", "site", 1.0))
    assert site.scaletrain("events", "away").stdout == "events|away|"

    other = set_up(site, "--python", "~/python", "--extras", "slurm")
    assert other.returncode == ExitCode.DONE, other.stderr
    assert len(places(site)) == 2, "jobs of the first may be in the queue"


def test_an_entry_that_names_another_command_is_pointed_out(site: Site) -> None:
    python_of(site)
    done = set_up(site, "--python", "~/python")
    assert done.returncode == ExitCode.DONE, done.stderr
    assert "Take clusters.site.host.scaletrain out" in done.stderr


@pytest.mark.parametrize(
    ("pip", "said"),
    [
        ("ERROR: No matching distribution found for numpy", r"pip failed .*numpy.*find-links"),
        ("OSError: [Errno 28] No space left on device", r"cannot be written: .*No space left.*quota"),
    ],
)
def test_what_pip_fails_for_is_said_and_a_repeated_command_begins_again(site: Site, pip: str, said: str) -> None:
    name_no_command(site)
    python_of(site, f"echo '{pip}' >&2; exit 1")
    failed = set_up(site, "--python", "~/python")
    assert failed.returncode == ExitCode.SCHEDULER
    assert re.search(said, " ".join(failed.stderr.split())), failed.stderr
    python_of(site)
    assert set_up(site, "--python", "~/python").returncode == ExitCode.DONE


def test_a_login_node_without_a_python_or_without_rights_is_an_error(site: Site) -> None:
    missing = set_up(site, "--python", "no-such-python")
    assert missing.returncode == ExitCode.SCHEDULER
    assert "no-such-python" in missing.stderr
    assert "--python PATH" in missing.stderr
    (site.home / ".local").write_text("in the way")
    python_of(site)
    refused = set_up(site, "--python", "~/python")
    assert refused.returncode == ExitCode.SCHEDULER
    assert "cannot be written" in refused.stderr


def test_a_cluster_without_a_host_and_an_unknown_one_are_refused(site: Site) -> None:
    file = Path(os.environ["XDG_CONFIG_HOME"], "scaletrain", "clusters.yaml")
    file.write_text("clusters: {site: {scheduler: local}}")
    refused = set_up(site)
    assert refused.returncode == ExitCode.USAGE
    assert "clusters.site.host" in refused.stderr
    assert site.scaletrain("cluster", "setup", "sites").returncode == ExitCode.USAGE


def test_after_a_cut_connection_a_repeated_command_waits_for_the_first_and_finds_its_work(site: Site) -> None:
    name_no_command(site)
    os.mkfifo(site.home / "go")
    python_of(site, "read word < ~/go")
    command = [sys.executable, "-m", "scaletrain_cli", "cluster", "setup", "site", "--python", "~/python"]
    first = subprocess.Popen(command, cwd=site.here, stderr=subprocess.PIPE)
    wait_until((site.home / "pip-calls").exists, "pip has begun")
    site.cut()
    assert "Repeat the command" in " ".join(first.stderr.read().decode().split())
    assert first.wait() == ExitCode.SCHEDULER
    first.stderr.close()
    second = subprocess.Popen(command, cwd=site.here)
    (site.home / "go").write_text("go\n")
    assert second.wait() == ExitCode.DONE
    assert (site.home / "pip-calls").read_text() == "x\n"


def test_another_version_on_the_login_node_is_a_note_that_names_the_command(site: Site) -> None:
    remember(SentRun("away", "site", 1.0))
    (site.home / "scaletrain").write_text(
        REAL_COMMAND.replace("exec", "export SCALETRAIN_ON_LOGIN_NODE='9.8.7 site'; exec")
    )
    listed = site.scaletrain("list", "--cluster", "site")
    assert listed.returncode == ExitCode.DONE
    assert f"has ScaleTrain {__version__}" in listed.stderr
    assert "scaletrain cluster setup site" in " ".join(listed.stderr.split())


@pytest.mark.long
def test_a_real_installation_plans_and_submits(site: Site) -> None:
    name_no_command(site)
    done = set_up(site, "--extras", "")
    assert done.returncode == ExitCode.DONE, done.stderr
    (place,) = places(site)
    shown = site.scaletrain("list", "--cluster", "site")
    assert shown.returncode == ExitCode.DONE, shown.stderr
    assert "no runs under" in shown.stderr
    assert "warning" not in shown.stderr
    python = site.home / ".local/share/scaletrain" / place / "bin/python"
    recipe = "import scaletrain_cli.project_files as files; print(files.recipes()['llama-10m-cpu'])"
    found = subprocess.run([python, "-I", "-c", recipe], capture_output=True, text=True, check=True).stdout
    assert found.startswith(str(site.home)), "the recipes are in the wheel"
