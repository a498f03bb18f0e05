"""The command line with a package of docs/extending.md installed, as its reader has it."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

from scaletrain_cli.rundir.journal import read_metrics
from scaletrain_cli.rundir.paths import RunDir
from tests.drills.training_runs import spec_text
from tests.extending.pages import install
from tests.forked import FORKS_PYTHON, scaletrain

PROJECT = Path(__file__).parents[2]


class Cli:
    """The commands, run in processes that find the package of one section in ``site`` and keep runs in ``runs``."""

    def __init__(self, folder: Path, heading: str) -> None:
        self.site, self.runs = folder / "site", folder / "runs"
        install("extending.md", heading, self.site)
        path = f"{self.site}{os.pathsep}{PROJECT}"
        self.environment = {**os.environ, "PYTHONPATH": path, "SCALETRAIN_RUNS": str(self.runs), FORKS_PYTHON: ""}

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return scaletrain(*arguments, environment=self.environment, folder=self.site)

    def __call__(self, *arguments: str, code: int = 0) -> str:
        """Return what the command prints on stdout and stderr; its exit code must be ``code``."""
        done = self.run(*arguments)
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout + done.stderr

    def json(self, *arguments: str, code: int = 0) -> Any:
        """Return the JSON object that the command prints with --json."""
        text = self(*arguments, "--json", code=code)
        return json.loads(text[text.index("{") : text.rindex("}") + 1])

    def train(self, spec: Path, *arguments: str) -> tuple[list[float], Path]:
        """Train six steps; return the loss of each step, and the run's folder."""
        before = set(self.runs.glob("*/run.json"))
        self("train", str(spec), "--set", "training.steps=6", *arguments)
        (record,) = set(self.runs.glob("*/run.json")) - before
        run = RunDir(record.parent)
        return [line["loss"] for line in read_metrics(run) if "loss" in line], run.path


def write_spec(folder: Path, more: str = "") -> Path:
    """Write a small run on data of its own, and ``more`` sections; return the path of the spec."""
    corpus = folder / "corpus.jsonl"
    lines = [{"text": f"the {n} quick brown foxes jump over {n * n} lazy dogs " * 30} for n in range(120)]
    corpus.write_text("\n".join(map(json.dumps, lines)))
    path = folder / "run.yaml"
    path.write_text(spec_text(corpus).replace("tokenizer: {vocab_size: 512}", "tokenizer: {vocab_size: 300}") + more)
    return path
