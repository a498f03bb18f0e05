"""Shell completion: verbs, options, runs, recipes, presets, devices, clusters, keys of the spec."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.command_line import PROJECT, scaletrain


@pytest.fixture
def complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):  # type: ignore[no-untyped-def]
    """Return the completions of bash at the end of a command line; the last word may be empty."""
    monkeypatch.chdir(tmp_path)

    def at_the_end_of(line: str) -> list[str]:
        words = ["scaletrain", *line.split(" ")]
        monkeypatch.setenv("_SCALETRAIN_COMPLETE", "complete_bash")
        monkeypatch.setenv("COMP_WORDS", " ".join(words))
        monkeypatch.setenv("COMP_CWORD", str(len(words) - 1))
        ended = scaletrain()
        assert (ended.code, ended.err) == (0, "")
        return ended.out.split()

    return at_the_end_of


def test_verbs_options_and_sub_verbs_are_completed(complete) -> None:  # type: ignore[no-untyped-def]
    assert complete("s") == ["schema", "submit", "shell", "status"]
    assert complete("checkpoint ") == ["list", "mirror", "verify", "export", "average", "sample", "prune"]
    assert {"--deadline", "--vary"} <= set(complete("plan x.yaml --"))


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("init --recipe own", ["own-engine"]),
        ("init --preset llama-3-", ["llama-3-8b", "llama-3-70b"]),
        ("plan x --gpu a100-sxm-8", ["a100-sxm-80gb"]),
        ("plan x --set training.st", ["training.steps="]),
        ("plan x --set cluster.slurm.acc", ["cluster.slurm.account="]),
        ("plan x --set training.precision=fp1", ["training.precision=fp16"]),
        ("plan x --set training.compile=t", ["training.compile=true"]),
        ("plan x --set model.preset=gpt2-x", ["model.preset=gpt2-xl"]),
        ("plan x --vary layout.zero_st", ["layout.zero_stage="]),
        ("submit x --sweep training.optimizer.lr", ["training.optimizer.lr="]),
        ("plan x --set no.such", []),
    ],
)
def test_names_and_keys_are_completed(complete, line: str, offered: list[str]) -> None:  # type: ignore[no-untyped-def]
    assert complete(line) == offered


@pytest.mark.parametrize("verb", ["status", "resume", "logs", "explain", "cancel", "checkpoint list"])
def test_run_ids_are_completed(complete, verb: str, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    for name in ("one", "other"):
        (tmp_path / "runs" / name).mkdir(parents=True)
        (tmp_path / "runs" / name / "run.json").write_text("{}")
    assert complete(f"{verb} o") == ["one", "other"]


def test_clusters_are_completed_and_an_invalid_clusters_file_prints_nothing(  # type: ignore[no-untyped-def]
    complete, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "clusters.yaml"
    monkeypatch.setenv("SCALETRAIN_CLUSTERS", str(file))
    file.write_text("clusters: {lab: {scheduler: slurm}, cloud: {scheduler: kubernetes}}")
    assert complete("plan x --cluster ") == ["lab", "cloud"]
    file.write_text("clusters: [")
    assert complete("plan x --cluster ") == []


def test_completions_for_zsh_have_its_format(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("_SCALETRAIN_COMPLETE", "complete_zsh")
    monkeypatch.setenv("_TYPER_COMPLETE_ARGS", "scaletrain init --preset gpt2-")
    assert scaletrain().out.split("((")[1].split("))")[0].split() == ['"gpt2-medium"', '"gpt2-large"', '"gpt2-xl"']


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_the_script_that_bash_sources_completes_a_line(tmp_path: Path) -> None:
    command = tmp_path / "scaletrain"
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m scaletrain_cli "$@"\n')
    command.chmod(0o755)
    script = (
        "source <(_SCALETRAIN_COMPLETE=source_bash scaletrain); COMP_WORDS=(scaletrain init --recipe own); "
        'COMP_CWORD=3; _scaletrain_completion scaletrain; echo "${COMPREPLY[@]}"'
    )
    env = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHONPATH": str(PROJECT)}
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, env=env, cwd=tmp_path)
    assert done.stdout.strip() == "own-engine", done.stderr
