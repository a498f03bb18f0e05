"""The batch script: golden texts, options of one word, and a real bash that must hand every value on unchanged."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from scaletrain_cli.launch.slurm_script import job_script, sbatch_options
from scaletrain_cli.launch.submission import new_run_id
from scaletrain_cli.spec import load_spec
from scaletrain_cli.spec.cluster import SlurmSpec
from tests.cli.command_line import scaletrain
from tests.launch.conftest import PROJECT, make_spec

GPU_RECIPE = PROJECT / "recipes" / "llama-7b-h100.yaml"
CPU_RECIPE = PROJECT / "recipes" / "llama-10m-cpu.yaml"
EVERY_OPTION = (
    "cluster.slurm.account=lab",
    "cluster.slurm.qos=high",
    "cluster.slurm.reservation=week-7",
    "cluster.slurm.constraint=h100&nvlink",
    "cluster.slurm.exclude=gpu[13-14]",
    "cluster.slurm.nodelist=gpu[01-40]",
    "cluster.slurm.memory_per_node=512GB",
    "cluster.slurm.gres_type=h100",
    "cluster.slurm.extra={switches: 1, exclusive: true, comment: scaletrain, spread-job: false}",
    "cluster.cpus_per_gpu=12",
    'env={NCCL_DEBUG: WARN, NOTE: "it\'s $(not) run", MASTER_ADDR: ignored}',
)
SECRET = "hf_0123456789"

# Any text that an environment value or a path may hold: no NUL, and nothing that UTF-8 cannot encode.
characters = st.characters(blacklist_characters="\0", blacklist_categories=("Cs",))
pieces = [
    " ",
    "'",
    '"',
    "\n",
    "$(touch canary)",
    "`touch canary`",
    "\\",
    "$HOME",
    "-n",
    ";touch canary;",
    "é",
    "*",
    "~",
]
texts = st.text(characters, max_size=30) | st.lists(st.sampled_from(pieces), max_size=6).map("".join)
folders = texts.map(lambda text: "-" + text.replace("/", "_"))
variables = st.from_regex(r"\A[A-Za-z_][A-Za-z0-9_]{0,12}\Z").filter(lambda name: not name.startswith("LD_"))
variables |= st.sampled_from(["PATH", "IFS", "UID", "RANDOM", "python", "run", "code", "PS4", "BASH_ENV", "PYTHONHOME"])

# Stands in for python, srun, scontrol, sbatch and squeue. -I: no variable under test can change it.
RECORDER = """#!{python} -IS
import json, os, sys
program = os.path.basename(sys.argv[0])
environment = {{os.fsdecode(name): value.decode() for name, value in os.environb.items()}}
with open({record!r}, "a") as file:
    print(json.dumps([program, sys.argv[1:], environment]), file=file)
if "begin" in sys.argv:
    print("7 node-a 23456")
if "end" in sys.argv:
    print("requeue")
if program == "sbatch":
    print("4711")
sys.exit(75 if program == "srun" or "end" in sys.argv else 0)
"""


class Recorded:
    """Programs that write down what they are started with, in a folder for $PATH."""

    def __init__(self, folder: Path) -> None:
        self.bin = folder / "bin"
        self._record = folder / "record"
        self._text = RECORDER.format(python=sys.executable, record=str(self._record))
        for name in ("srun", "scontrol", "sbatch", "squeue"):
            self.program(self.bin / name)

    def program(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(self._text)
        path.chmod(0o755)

    @property
    def calls(self) -> list[tuple[str, list[str], dict[str, str]]]:
        lines = self._record.read_text().splitlines()
        return [(program, arguments, environment) for program, arguments, environment in map(json.loads, lines)]


def test_the_script_of_a_gpu_run_with_every_option_is_as_accepted(golden: Callable[[str, str], None]) -> None:
    spec = load_spec(GPU_RECIPE, EVERY_OPTION)
    golden(
        "slurm_job.sh", job_script(spec, "llama-7b-h100-1", Path("/data/runs/llama-7b-h100-1"), "/opt/st/bin/python")
    )


def test_the_script_of_a_cpu_run_is_as_accepted(golden: Callable[[str, str], None]) -> None:
    spec = load_spec(CPU_RECIPE, ("cluster.scheduler=slurm", "cluster.nodes=2", "cluster.gpus_per_node=1"))
    golden("slurm_job_cpu.sh", job_script(spec, "a-1", Path("/home/ada/my runs/a-1"), "/opt/st/bin/python"))


@settings(max_examples=40)
@given(st.dictionaries(variables, texts, max_size=4), folders, folders)
@example(
    {"A": "", "B": "'\"\\\n$(touch canary)`touch canary`", "C": "-n"}, "- '\n$(touch canary)\\", '-"`touch canary`'
)
def test_bash_hands_every_value_on_unchanged_and_runs_nothing_else(
    env: dict[str, str], run_folder: str, python_folder: str
) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        recorded, run, python = Recorded(folder), folder / run_folder, folder / python_folder / "python"
        recorded.program(python)
        script = folder / "job.sh"
        script.write_text(job_script(make_spec(env=env), "run-1", run, str(python)), encoding="utf-8")
        files = set(folder.rglob("*"))
        base = {"PATH": f"{recorded.bin}:/usr/bin:/bin", "SLURM_JOB_ID": "42", "HOME": str(folder)}
        done = subprocess.run(["bash", script], env=base, cwd=folder, capture_output=True, text=True, check=False)

        assert (done.returncode, done.stdout, done.stderr) == (75, "", "")
        assert set(folder.rglob("*")) - files == {folder / "record"}
        begin, step, end, requeue = recorded.calls
        job = ["-m", "scaletrain_cli.launch.slurm_job"]
        assert begin[:2] == ("python", [*job, "begin", str(run)])
        agent = [str(python), "-m", "scaletrain_cli.launch.node_agent", str(run), "--attempt", "7"]
        assert (step[0], step[1][-len(agent) :]) == ("srun", agent)
        assert all(option.startswith("--") for option in step[1][: -len(agent)])
        assert end[:2] == ("python", [*job, "end", str(run), "--attempt", "7", "--srun-exit-code", "75"])
        assert requeue[:2] == ("scontrol", ["requeue", "42"])
        wanted = {"FAKE": "{}"} | env | {"MASTER_ADDR": "node-a", "MASTER_PORT": "23456"}
        assert {name: step[2].get(name) for name in wanted} == wanted
        assert all(environment["PATH"] == base["PATH"] for _, _, environment in (begin, end, requeue))


@given(
    texts.filter(str.strip), st.lists(texts | st.from_regex(r"\A[A-Za-z0-9_.,:=/@%+*\[\]\-&|!()]{1,20}\Z"), max_size=9)
)
def test_options_are_one_word_whatever_the_spec_says(name: str, values: list[str]) -> None:
    keys = ("partition", "account", "qos", "reservation", "constraint", "exclude", "nodelist", "gres_type")
    try:
        slurm = SlurmSpec(
            **dict(zip(keys, values[:8], strict=False)),
            extra=dict.fromkeys(["comment"], values[8]) if values[8:] else {},
        )
    except ValidationError:
        assume(False)
    spec = make_spec()
    spec = spec.model_copy(update={"cluster": spec.cluster.model_copy(update={"slurm": slurm, "gpu": "b200"})})
    for option in sbatch_options(spec, new_run_id(name, 0.0)):
        assert re.fullmatch(r"[a-z][a-z-]*(=[^\s'\"\\$`;<>#]+)?", option), option


def test_secrets_reach_neither_the_script_nor_slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorded = Recorded(tmp_path)
    monkeypatch.setenv("PATH", f"{recorded.bin}:{os.environ['PATH']}")
    for name in ("HF_TOKEN", "SCALETRAIN_TOKEN", "UNRELATED"):  # the second has a name that is passed on otherwise
        monkeypatch.setenv(name, SECRET)
    sets = ["--set", "cluster.scheduler=slurm", "--set", "secret_env=[HF_TOKEN, SCALETRAIN_TOKEN]"]
    shown = scaletrain("submit", CPU_RECIPE, "--dry-run", *sets)
    assert shown.code == 0
    assert SECRET not in shown.out + shown.err

    submitted = scaletrain("submit", CPU_RECIPE, "--yes", "--json", *sets)
    assert submitted.code == 0, submitted.err
    run = Path(submitted.data["run_dir"])
    holders = [path for path in run.rglob("*") if path.is_file() and SECRET in path.read_text()]
    assert holders == [run / "secrets.json"]
    assert holders[0].stat().st_mode & 0o777 == 0o600
    assert "sbatch" in [program for program, _, _ in recorded.calls]
    assert SECRET not in json.dumps(recorded.calls)
