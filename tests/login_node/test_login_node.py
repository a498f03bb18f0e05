"""Runs seen from a laptop: verbs that run on the login node of a cluster, over a real sshd."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from scaletrain_cli.errors import ExitCode
from scaletrain_cli.launch.login_node.sent_runs import SentRun, remember, sent_runs
from tests.launch.sessions import ECHO_SERVER, Sessions
from tests.launch.working_tree import WorkingTree
from tests.login_node.conftest import Site
from tests.login_node.server import PROJECT, REAL_COMMAND
from tests.ports import reserved_port
from tests.terminals import terminal
from tests.waiting import wait_until

SPEC = f"""
schema: scaletrain/v1
name: from a laptop
model: {{family: llama, hf_config: model/config.json, seq_len: 8}}
data: {{source: python-stdlib, tokenizer: {{kind: bpe, vocab_size: 64}}}}
training: {{global_batch_size: 4, micro_batch_size: 1, steps: 20, precision: fp32}}
cluster: {{scheduler: slurm, nodes: 1, gpus_per_node: 1, gpu: cpu}}
code: {{path: code, command: [{sys.executable}, train.py]}}
secret_env: [API_KEY]
"""
CONFIG = {"model_type": "llama", "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
CONFIG |= {"intermediate_size": 8, "vocab_size": 64, "hidden_act": "silu", "tie_word_embeddings": False}
PROGRAM = """
import os
print("the program says", {word!r}, os.environ["API_KEY"], "in", os.environ["SCALETRAIN_TEST_SITE"], flush=True)
raise SystemExit({code})
"""


@pytest.fixture
def tree(site: Site, monkeypatch: pytest.MonkeyPatch) -> WorkingTree:
    """The laptop's working folder: a spec, its config.json, and a git repository with the program."""
    monkeypatch.setenv("API_KEY", "k-'\"$(1)")
    (site.here / "run.yaml").write_text(SPEC)
    (site.here / "model").mkdir()
    (site.here / "model" / "config.json").write_text(json.dumps(CONFIG))
    (site.here / "code").mkdir()
    tree = WorkingTree(site.here / "code")
    tree.write("train.py", PROGRAM.format(word="first", code=0))
    tree.commit()
    return tree


def left_behind(site: Site) -> list[str]:
    """Return what is left there of the files that were sent, except the code."""
    sent = site.home / ".cache" / "scaletrain" / "sent"
    return [entry.name for entry in sent.iterdir() if entry.name != "code"]


def test_a_run_is_submitted_seen_and_resumed_from_a_laptop(site: Site, tree: WorkingTree, tmp_path: Path) -> None:
    tree.write("train.py", PROGRAM.format(word="first", code=7))
    done = site.scaletrain("submit", "run.yaml", "--cluster", "site", "--set", "restarts.crash=0")
    assert done.returncode == ExitCode.DONE, done.stderr
    run_id = done.stdout.strip()
    assert (site.runs / run_id / "run.json").is_file()
    assert not Path(os.environ["SCALETRAIN_RUNS"]).exists(), "a run directory on the laptop"
    assert [run.run_id for run in sent_runs()] == [run_id]

    code = site.home / ".cache" / "scaletrain" / "sent" / "code" / run_id
    before = code.stat().st_ino
    again = site.scaletrain(
        "submit", "run.yaml", "--cluster=site", "--run-id", run_id, "--set", "restarts.crash=0", "--json"
    )
    assert json.loads(again.stdout)["created"] is False, "a repeated submission is the same run"
    assert code.stat().st_ino == before, "the first one may still read it"

    waited = site.scaletrain("status", run_id[:-2], "--wait", "1h", "--json")
    assert waited.returncode == ExitCode.CRASHED
    assert json.loads(waited.stdout)["state"] == "failed"
    assert "the program says first k-'\"$(1) in 1" in site.scaletrain("logs").stdout, "the newest run, with its secret"
    assert "scaletrain list --cluster site" in site.scaletrain("list").stderr
    assert run_id in site.scaletrain("list", "--cluster", "site").stdout
    assert "failed" in site.scaletrain("explain", run_id).stdout

    tree.write("train.py", PROGRAM.format(word="second", code=0))
    resumed = site.scaletrain("resume", run_id, "--new-code", "--yes")
    assert resumed.returncode == ExitCode.DONE, resumed.stderr
    assert site.scaletrain("status", run_id, "--wait", "1h").returncode == ExitCode.DONE
    assert "the program says second" in site.scaletrain("logs", run_id).stdout

    page = tmp_path / "page.html"
    assert site.scaletrain("report", "-o", str(page)).returncode == ExitCode.DONE
    assert page.read_text().startswith("<!DOCTYPE html>")
    assert site.scaletrain("rm", run_id, "--yes").returncode == ExitCode.DONE
    assert not (site.runs / run_id).exists()
    assert sent_runs() == []
    assert left_behind(site) == []


def test_what_is_wrong_with_a_spec_is_said_here_and_nothing_is_sent(site: Site, tree: WorkingTree) -> None:
    wrong = site.scaletrain("submit", "run.yaml", "--cluster", "site", "--set", "training.steps=none")
    assert wrong.returncode == ExitCode.USAGE
    assert "training.steps" in wrong.stderr
    assert not (site.home / ".cache").exists()
    outside = site.scaletrain(
        "submit", "run.yaml", "--cluster", "site", "--set", f"model.hf_config={site.here}/model/config.json"
    )
    assert outside.returncode == ExitCode.USAGE
    assert "hf_config" in outside.stderr
    assert sent_runs() == []


def test_a_submission_that_the_login_node_refuses_is_not_kept_as_a_run(site: Site, tree: WorkingTree) -> None:
    refused = site.scaletrain("submit", "run.yaml", "--cluster", "site", "--set", "code.command=[no-such]", "--json")
    assert refused.returncode == ExitCode.USAGE
    assert json.loads(refused.stdout)["error"]["problems"][0]["key"] == "code.command"
    assert "run.yaml:8 code.command" in refused.stderr.replace("--set", "run.yaml:8"), "named as on the laptop"
    assert sent_runs() == []


def test_a_dry_run_prints_the_job_of_the_login_node_and_keeps_nothing(site: Site, tree: WorkingTree) -> None:
    shown = site.scaletrain("submit", "run.yaml", "--cluster", "site", "--dry-run")
    assert shown.returncode == ExitCode.DONE, shown.stderr
    assert str(site.runs) in shown.stdout
    assert "k-'" not in shown.stdout + shown.stderr
    assert sent_runs() == []
    assert not list(site.runs.glob("*")) if site.runs.exists() else True


def test_a_spec_on_stdin_is_sent(site: Site, tree: WorkingTree) -> None:
    (site.home / "scaletrain").write_text(REAL_COMMAND)
    shown = site.scaletrain("validate", "-", "--cluster", "site", "--json", sent=SPEC)
    assert shown.returncode == ExitCode.DONE, shown.stdout + shown.stderr
    assert json.loads(shown.stdout)["spec"]["cluster"]["scheduler"] == "local"


def test_plan_and_runs_of_this_machine_stay_here(site: Site, tree: WorkingTree) -> None:
    site.server.terminate()
    site.server.wait()
    assert site.scaletrain("plan", "run.yaml", "--cluster", "site").returncode == ExitCode.DONE
    unreachable = site.scaletrain("list", "--cluster", "site", "--json")
    assert unreachable.returncode == ExitCode.SCHEDULER
    assert json.loads(unreachable.stdout)["error"]["code"] == "scheduler-silent"
    sent = site.scaletrain("submit", "run.yaml", "--cluster", "site")
    assert sent.returncode == ExitCode.SCHEDULER
    assert "Connection refused" in sent.stderr


def test_a_login_node_without_scaletrain_is_named(site: Site, tree: WorkingTree) -> None:
    (site.home / "scaletrain").unlink()
    missing = site.scaletrain("submit", "run.yaml", "--cluster", "site")
    assert missing.returncode == ExitCode.SCHEDULER
    assert "clusters.site.host.scaletrain" in missing.stderr
    assert left_behind(site) == []


def test_a_terminal_here_is_one_there(site: Site, tree: WorkingTree) -> None:
    command = [sys.executable, "-m", "scaletrain_cli", "submit", "run.yaml", "--cluster", "site"]
    with terminal(command, folder=site.here) as opened:
        opened.wait_for(r"Submit to local\?")
        opened.type("n\n")
        assert opened.to_the_end() == 130
    assert "Nothing was done" in opened.text
    assert sent_runs() == []


def test_ctrl_c_ends_a_verb_there_and_is_no_cut_connection(site: Site) -> None:
    remember(SentRun("away", "site", 1.0))
    (site.home / "scaletrain").write_text(
        "#!/bin/sh\ntrap 'exit 130' INT\necho it follows\nwhile :; do sleep 0.05; done\n"
    )
    with terminal([sys.executable, "-m", "scaletrain_cli", "logs", "away", "--follow"], folder=site.here) as opened:
        opened.wait_for("it follows")
        opened.type("\x03")
        assert opened.to_the_end() == 130
    assert "error" not in opened.text


FOLLOWING = f"""#!{sys.executable}
import os, sys
sys.path.insert(0, {str(PROJECT)!r})
from scaletrain_cli.cli.options import pause
print(os.getpid(), flush=True)
while True:
    pause(0.1)
"""


def test_a_verb_that_follows_ends_there_with_its_caller_here(site: Site) -> None:
    """Without a terminal sshd sends it no signal."""
    remember(SentRun("away", "site", 1.0))
    (site.home / "scaletrain").write_text(FOLLOWING)
    words = [sys.executable, "-m", "scaletrain_cli", "logs", "away", "--follow"]
    with subprocess.Popen(words, cwd=site.here, stdout=subprocess.PIPE, start_new_session=True) as caller:
        there = psutil.Process(int(caller.stdout.readline()))
        os.killpg(caller.pid, signal.SIGINT)
        assert caller.wait() == 130
        wait_until(lambda: not there.is_running(), "it has ended there")


@pytest.mark.parametrize("host", ["-oProxyCommand=touch x", {"scaletrain": "x"}, {"ssh": "a", "port": "1"}, "a\nb"])
def test_a_wrong_host_is_refused_with_its_key(host: object, site: Site) -> None:
    file = Path(os.environ["XDG_CONFIG_HOME"], "scaletrain", "clusters.yaml")
    file.write_text(json.dumps({"clusters": {"site": {"host": host, "scheduler": "local"}}}))
    wrong = site.scaletrain("list", "--cluster", "site")
    assert wrong.returncode == ExitCode.USAGE
    assert "clusters.site.host" in wrong.stderr


def test_the_command_of_exec_is_passed_on_word_by_word(site: Site) -> None:
    remember(SentRun("away", "site", 1.0))
    (site.home / "scaletrain").write_text('#!/bin/sh\nprintf "%s|" "$@"\nexit 7\n')
    ended = site.scaletrain("exec", "away", "--", "sh", "-c", "echo 'a b' $HOME --help", "-h")
    assert ended.stdout == "exec|away|--|sh|-c|echo 'a b' $HOME --help|-h|"
    assert ended.returncode == 7


def test_a_port_of_a_run_there_is_at_a_port_of_the_laptop(site: Site, tree: WorkingTree) -> None:
    tree.write("train.py", ECHO_SERVER)
    run_id = site.scaletrain("submit", "run.yaml", "--cluster", "site").stdout.strip()
    said = re.compile(r"^(?:\[rank 0\] )?(\d+)$", re.MULTILINE)
    wait_until(lambda: said.search(site.scaletrain("logs", run_id).stdout), "the program prints its port")
    port = said.findall(site.scaletrain("logs", run_id).stdout)[0]
    Sessions(run_id, os.environ).forwards_a_port(int(port), reserved_port())
    refused = site.scaletrain("port-forward", run_id, "6006", "--node", "7")
    assert refused.returncode == ExitCode.USAGE
    assert "has no node 7" in refused.stderr
    assert site.scaletrain("cancel", run_id, "--yes").returncode == ExitCode.DONE


def test_a_run_id_that_is_a_path_or_a_command_is_refused_here(site: Site, tree: WorkingTree) -> None:
    (site.home / "precious").mkdir()
    for run_id in ("../../../precious", "x;touch injected;:", "x y"):
        refused = site.scaletrain("submit", "run.yaml", "--cluster", "site", "--run-id", run_id)
        assert refused.returncode == ExitCode.USAGE
    assert (site.home / "precious").is_dir()
    assert not (site.home / ".cache").exists()


def test_an_id_of_a_run_there_is_no_prefix_of_one_here(site: Site) -> None:
    here = Path(os.environ["SCALETRAIN_RUNS"], "base-2")
    here.mkdir(parents=True)
    (here / "run.json").write_text("{}")
    remember(SentRun("base", "site", 1.0))
    remember(SentRun("base-2-there", "site", 1.0))
    (site.home / "scaletrain").write_text('#!/bin/sh\nprintf "%s|" "$@"\n')
    assert site.scaletrain("rm", "base", "--yes").stdout == "rm|base|--yes|"
    assert here.is_dir()
    several = site.scaletrain("events", "base-")
    assert several.returncode == ExitCode.USAGE
    assert "base-2-there" in several.stderr
    assert site.scaletrain("exec", "base-2-there", "--", "false").stdout == "exec|base-2-there|--|false|"


def test_exit_codes_of_a_command_there_are_those_of_the_command(site: Site) -> None:
    remember(SentRun("away", "site", 1.0))
    for code in (127, 255, 130):
        (site.home / "scaletrain").write_text(f"#!/bin/sh\nexit {code}\n")
        assert site.scaletrain("exec", "away", "--", "anything").returncode == code


def test_the_runs_root_of_the_login_node_is_that_of_its_own_clusters_file(site: Site, tree: WorkingTree) -> None:
    file = Path(os.environ["XDG_CONFIG_HOME"], "scaletrain", "clusters.yaml")
    file.write_text("clusters: {site: {host: {ssh: login.site, scaletrain: ~/scaletrain}, scheduler: local}}")
    own = site.home / "config" / "scaletrain" / "clusters.yaml"
    own.parent.mkdir(parents=True)
    own.write_text(f"runs: {site.home}/their-runs")
    shown = site.scaletrain("submit", "run.yaml", "--cluster", "site", "--dry-run")
    assert f"{site.home}/their-runs" in shown.stdout, shown.stderr
    assert "SENT_CLUSTERS" not in shown.stdout


def test_a_run_is_not_moved_to_another_cluster_without_its_mirror(site: Site) -> None:
    remember(SentRun("away", "site", 1.0))
    refused = site.scaletrain("resume", "away", "--cluster", "other")
    assert refused.returncode == ExitCode.USAGE
    assert "--from-mirror" in refused.stderr
