"""How the client of this machine reaches a login node. No connection is made."""

import shutil
import subprocess
from pathlib import Path

import pytest

from scaletrain_cli.errors import UsageError
from scaletrain_cli.launch.login_node.ssh import command_of
from scaletrain_cli.spec.clusters_file import LoginNode

pytestmark = pytest.mark.skipif(shutil.which("ssh") is None, reason="no ssh client; on Debian: openssh-client")


def node(host: str) -> LoginNode:
    return LoginNode("site", host)


def test_a_shared_connection_has_its_socket_below_a_folder_with_a_blank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("scaletrain_cli.launch.login_node.ssh._LONGEST_SOCKET", 4096)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "with a blank"))
    words = command_of(node("blank.site"), "true", "-T")
    shown = subprocess.run([*words[:1], "-G", *words[1:-1]], capture_output=True, text=True, check=True).stdout
    assert f"controlpath {tmp_path}/with a blank/scaletrain-ssh/" in shown


def test_without_an_ssh_client_a_verb_for_a_login_node_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nothing")
    with pytest.raises(UsageError, match=r"no ssh client to reach absent\.site with") as missing:
        command_of(node("absent.site"), "true", "-T")
    assert "openssh-client" in str(missing.value.remedy)


def test_a_script_is_one_line_that_any_login_shell_passes_to_sh(monkeypatch: pytest.MonkeyPatch) -> None:
    """The C shell takes no line end within quotes, and replaces ! there, too."""
    script = 'for word in \'a  b\' "it\'s !x"; do\n    echo "$word" é\ndone; cat; exit 7'
    *_, there = command_of(node("shell.site"), script, "-T")
    assert there.isascii()
    assert there.isprintable()
    assert "!" not in there
    done = subprocess.run(["sh", "-c", there], input="typed", capture_output=True, text=True)
    assert (done.stdout, done.stderr, done.returncode) == ("a  b é\nit's !x é\ntyped", "", 7)


def test_a_script_that_cannot_be_decoded_there_fails(tmp_path: Path) -> None:
    (tmp_path / "sh").symlink_to("/bin/sh")  # and no base64
    *_, there = command_of(node("bare.site"), "exit 0", "-T")
    done = subprocess.run(["/bin/sh", "-c", there], env={"PATH": str(tmp_path)}, capture_output=True)
    assert done.returncode == 126
