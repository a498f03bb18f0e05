"""Every command line in README, docs, CONTRIBUTING, AGENTS, slurm/, k8s/ and comments of recipes runs as documented.

A line that needs a real cluster, a GPU, another program or many minutes is in a table with the reason, and is parsed.
A new line that is in neither table fails.
"""

from __future__ import annotations

import ast
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import typer

from scaletrain_cli.cli.app import app
from scaletrain_cli.launch.backends.local.backend import LocalBackend
from scaletrain_cli.launch.submit import create_run
from scaletrain_cli.plan import make_plan
from scaletrain_cli.spec import load_spec
from tests.cli.command_line import SMALL, Ended, scaletrain
from tests.source_trees import files_with, nodes_of

PROJECT = Path(__file__).parent.parent
PAGES = [
    PROJECT / "README.md",
    PROJECT / "CONTRIBUTING.md",
    PROJECT / "AGENTS.md",
    *sorted((PROJECT / "docs").rglob("*.md")),
    PROJECT / "slurm" / "README.md",
    PROJECT / "k8s" / "README.md",
]
COMMENTED = [
    path
    for folder in ("recipes", "slurm", "k8s")
    for path in sorted((PROJECT / folder).rglob("*"))
    if path.suffix in (".yaml", ".sh", ".example", ".conf") or path.name == "Containerfile"
]
PROGRAMS = ("scaletrain", "make", "pip", "python", "python3", "kubectl", "helm", "docker", "eval", "sinfo", "srun")
PROGRAMS += ("slurm/install_packages.sh", ".ci/run", ".venv/bin/ruff", ".venv/bin/pytest")
ENGINE = "tests.launch.fake_engine"


@dataclass(frozen=True)
class Runs:
    """The command ``line`` that is run for the documented one, its exit ``code``, and a text ``says`` in its output."""

    line: str
    says: str
    code: int = 0


SPEC = "recipes/llama-10m-cpu.yaml"
KUBERNETES = "recipes/llama-13b-kueue.yaml --set cluster.kubernetes.image=r.example/scaletrain:TAG"
INIT = {
    "scaletrain init": Runs("init", "wrote run.yaml"),
    "scaletrain init --recipe llama-8b-lora lora.yaml": Runs("init --recipe llama-8b-lora lora.yaml", "wrote lora"),
    "scaletrain init --recipe llama-7b-h100 7b.yaml": Runs("init --recipe llama-7b-h100 7b.yaml", "wrote 7b.yaml"),
    "scaletrain init --recipe llama-13b-kueue 13b.yaml": Runs("init --recipe llama-13b-kueue 13b.yaml", "wrote 13b"),
    "scaletrain init --recipe trl-sft run.yaml": Runs("init --recipe trl-sft trl.yaml", "wrote train.py"),
}
RUN: dict[str, Runs] = {
    **INIT,
    "scaletrain plan recipes/llama-7b-h100.yaml": Runs("plan recipes/llama-7b-h100.yaml", ": fits"),
    "scaletrain plan recipes/llama-70b-spot.yaml --set cluster.nodes=20": Runs(
        "plan recipes/llama-70b-spot.yaml --set cluster.nodes=20", ": fits"
    ),
    "scaletrain plan lora.yaml --vary cluster.gpu=rtx-4090-24gb,l40s-48gb,h100-sxm-80gb": Runs(
        "plan lora.yaml --vary cluster.gpu=rtx-4090-24gb,l40s-48gb,h100-sxm-80gb", "fits"
    ),
    "scaletrain plan lora.yaml": Runs("plan lora.yaml", "nearest evidence"),
    "scaletrain plan 7b.yaml": Runs("plan 7b.yaml", ": fits"),
    "scaletrain submit 7b.yaml --output script": Runs("submit 7b.yaml --output script", "#SBATCH"),
    "scaletrain submit 7b.yaml": Runs("submit recipes/llama-7b-h100.yaml --dry-run", "#SBATCH"),
    "scaletrain plan 13b.yaml --vary cluster.mean_time_between_interruptions=1h,6h": Runs(
        "plan 13b.yaml --vary cluster.mean_time_between_interruptions=1h,6h", "fits"
    ),
    "scaletrain submit 13b.yaml --output yaml": Runs(f"submit {KUBERNETES} --output yaml", "kind: JobSet"),
    "scaletrain submit 13b.yaml": Runs(f"submit {KUBERNETES} --dry-run", "kind: JobSet"),
    "scaletrain plan recipes/llama-70b-spot.yaml --deadline 120d": Runs(
        "plan recipes/llama-70b-spot.yaml --deadline 120d",
        "Cluster with the fewest GPUs: at most 160 GPUs, finished in 120 d",
    ),
    "scaletrain submit recipes/llama-7b-h100.yaml": Runs("submit recipes/llama-7b-h100.yaml --dry-run", "#SBATCH"),
    "scaletrain plan run.yaml": Runs("plan run.yaml", ": fits"),
    "scaletrain train run.yaml": Runs("train small.yaml --run-id trained --set \"env={FAKE: '{}'}\"", "trained"),
    "scaletrain plan SPEC": Runs(f"plan {SPEC}", ": fits"),
    "scaletrain plan SPEC --explain": Runs(f"plan {SPEC} --explain", "Why"),
    "scaletrain plan SPEC --all": Runs(f"plan {SPEC} --all", "PaLM"),
    "scaletrain plan SPEC --calibrate RUN": Runs(f"plan {SPEC} --calibrate small", "a calibration needs 20", 2),
    "scaletrain plan A B": Runs(f"plan {SPEC} recipes/gpt2-124m-a100.yaml", "gpt2-124m-a100"),
    "scaletrain plan SPEC --plot plan.html": Runs(f"plan {SPEC} --plot plan.html", "wrote plan.html"),
    "scaletrain plan SPEC --deadline 30d": Runs(f"plan {SPEC} --deadline 30d", "finished in 30 d"),
    "scaletrain plan SPEC --objective cost --max-gpus 512": Runs(
        "plan recipes/gpt2-124m-a100.yaml --objective cost --max-gpus 512", "Cluster with the lowest cost"
    ),
    "scaletrain plan SPEC --trace FILE": Runs(f"plan {SPEC} --trace trace.json", "trace"),
    "scaletrain submit run.yaml": Runs("submit small.yaml --dry-run", "local.supervisor"),
    "scaletrain submit run.yaml --dry-run": Runs(f"submit {KUBERNETES} --dry-run", "kind: JobSet"),
    "scaletrain submit run.yaml --output yaml": Runs(f"submit {KUBERNETES} --output yaml", "kind: JobSet"),
    "scaletrain submit k8s/smoke.yaml": Runs(
        "submit k8s/smoke.yaml --dry-run --set cluster.kubernetes.image=r.example/scaletrain:TAG", "kind: JobSet"
    ),
    "scaletrain submit run.yaml --sweep training.optimizer.lr=1e-4,3e-4,1e-3 --sweep training.seed=1,2 "
    "--max-concurrent 2": Runs(
        "submit small.yaml --set cluster.scheduler=slurm --sweep training.optimizer.lr=3e-4,1e-3 "
        "--sweep training.seed=1,2 --max-concurrent 2 --dry-run",
        "#SBATCH",
    ),
    "scaletrain init --scheduler kubernetes --preset llama-7b": Runs(
        "init --scheduler kubernetes --preset llama-7b new.yaml", "wrote new.yaml"
    ),
    "scaletrain init --scheduler kubernetes": Runs("init --scheduler kubernetes -", "kubernetes:"),
    "scaletrain init --scheduler slurm run.yaml": Runs("init --scheduler slurm slurm.yaml", "wrote slurm.yaml"),
    "scaletrain init --scheduler kubernetes run.yaml": Runs("init --scheduler kubernetes k8s.yaml", "wrote k8s.yaml"),
    "scaletrain submit run.yaml --output script": Runs("submit 7b.yaml --output script", "#SBATCH"),
    "scaletrain init --files slurm DIR": Runs("init --files slurm site", "wrote site/sites/cloud.yaml"),
    "scaletrain init --recipe llama-10m-cpu first.yaml": Runs("init --recipe llama-10m-cpu first.yaml", "wrote first"),
    "scaletrain watch": Runs("watch small", "finished"),
    "scaletrain logs": Runs("logs small", "[rank 0] up"),
    "scaletrain explain": Runs("explain small", ""),
    "scaletrain init --list": Runs("init --list", "own-engine"),
    "scaletrain validate run.yaml --json": Runs("validate run.yaml --json", '"valid": true'),
    "scaletrain plan run.yaml --json": Runs("plan run.yaml --json", "scaletrain.plan/v1"),
    "scaletrain submit run.yaml --run-id ID --yes --json": Runs(
        "submit small.yaml --run-id small --set \"env={FAKE: '{}'}\" --yes --json", '"created": false'
    ),
    "scaletrain status RUN --json": Runs("status small --json", '"state": "finished"'),
    "scaletrain status RUN --wait 30m --json": Runs("status small --wait 30m --json", '"state": "finished"'),
    "scaletrain explain RUN --json": Runs("explain small --json", "scaletrain.explain/v1"),
    "scaletrain diagnose RUN --json": Runs("diagnose small --json", "scaletrain.diagnose/v1"),
    "scaletrain logs RUN --tail 50 --json": Runs("logs small --tail 50 --json", '"text": "up"'),
    "scaletrain resume RUN --yes --json": Runs("resume small --yes --json", "small has finished", code=2),
    "scaletrain cancel RUN --yes --json": Runs("cancel small --yes --json", '"cancelled": false'),
    "scaletrain init --recipe NAME": Runs("init --recipe llama-7b-h100 recipe.yaml", "wrote recipe.yaml"),
    "scaletrain init --files k8s DIR": Runs("init --files k8s there", "wrote there/base/rbac.yaml"),
    "scaletrain --help": Runs("--help", "Usage: scaletrain"),
    "scaletrain VERB --help": Runs("plan --help", "Usage: scaletrain plan"),
    "scaletrain validate run.yaml": Runs("validate run.yaml", "OK"),
    "scaletrain schema": Runs("schema", '"$schema"'),
    "scaletrain doctor": Runs("doctor", "python"),
    "scaletrain status": Runs("status", "finished"),
    "scaletrain status RUN": Runs("status small", "finished"),
    "scaletrain logs RUN": Runs("logs small", "[rank 0] up"),
    "scaletrain logs RUN --follow": Runs("logs small --follow", "[rank 0] up"),
    "scaletrain explain RUN": Runs("explain small", ""),
    "scaletrain diagnose RUN": Runs("diagnose small", "not concluded"),
    "scaletrain watch RUN": Runs("watch small", "finished"),
    "scaletrain watch RUN --once": Runs("watch small --once", "finished"),
    "scaletrain watch RUN --json": Runs("watch small --json", "scaletrain.watch/v1"),
    "scaletrain watch RUN --once --json": Runs("watch small --once --json", "scaletrain.watch/v1"),
    "scaletrain exec RUN -- nvidia-smi": Runs("exec small -- nvidia-smi", "small does not run", 2),
    "scaletrain exec RUN --node 3 -- df -h /tmp": Runs("exec small --node 3 -- df -h /tmp", "small does not run", 2),
    "scaletrain exec RUN --rank 9 -- sh -c 'py-spy dump --pid $SCALETRAIN_RANK_PID'": Runs(
        "exec small --rank 9 -- sh -c 'py-spy dump --pid 1'", "small does not run", 2
    ),
    "scaletrain shell RUN": Runs("shell small", "needs a terminal", 2),
    """scaletrain exec RUN -- sh -c 'python -m tensorboard.main --logdir "$SCALETRAIN_RUN_DIR/tensorboard"'""": Runs(
        "exec small -- true", "small does not run", 2
    ),
    "scaletrain port-forward RUN 6006": Runs("port-forward small 6006", "small does not run", 2),
    "scaletrain port-forward RUN 8080:80 --node 1": Runs("port-forward small 8080:80 --node 1", "small does not", 2),
    "scaletrain profile RUN": Runs("profile small", "small does not train; its state is", 2),
    "scaletrain profile RUN --ranks 0,8-11 --steps 5": Runs("profile small --ranks 0,8-11 --steps 5", "small", 2),
    "scaletrain profile RUN --step 2000 --no-wait": Runs("profile small --step 2000 --no-wait", "small", 2),
    "scaletrain profile RUN --show": Runs("profile small --show", "small has no profile", 2),
    "scaletrain notify test run.yaml": Runs("notify test small.yaml", "has no receivers", code=2),
    "scaletrain notify list RUN": Runs("notify list small", "has no receivers"),
    "scaletrain notify send RUN": Runs("notify send small", "no notification is waiting"),
    "scaletrain report -o report.html": Runs("report -o report.html", "wrote report.html"),
    "scaletrain report RUN -o report.html": Runs("report small -o report.html", "wrote report.html"),
    "scaletrain report RUN [RUN...] -o report.html": Runs("report small small -o report.html", "wrote report.html"),
    "scaletrain report RUN --json": Runs("report small --json", "scaletrain.report/v1"),
    "scaletrain events RUN": Runs("events small", "submitted"),
    "scaletrain rm RUN...": Runs("rm small --dry-run", "small"),
    "scaletrain evaluation list RUN": Runs("evaluation list small", "no evaluations"),
    "scaletrain evaluation submit RUN": Runs("evaluation submit small", "has no evaluation.tasks", code=2),
    "scaletrain evaluation submit RUN --step N": Runs("evaluation submit small --step 1", "evaluation.tasks", code=2),
    "scaletrain checkpoint list": Runs("checkpoint list", ""),
    "scaletrain nodes list": Runs("nodes list", ""),
    "scaletrain cancel RUN": Runs("cancel small --yes", "has finished"),
    "scaletrain resume RUN": Runs("resume queued --dry-run", "#SBATCH"),
    "scaletrain resume RUN --nodes 2": Runs("resume queued --nodes 2 --dry-run", "#SBATCH --nodes=2"),
    "scaletrain resume RUN --new-code": Runs("resume small --new-code --dry-run", "", code=2),  # it kept no code
    "scaletrain recover": Runs("recover", ""),
    "scaletrain status RUN --wait 7d --resume": Runs("status small --wait 7d --resume", "finished"),
    "scaletrain drill --list": Runs("drill --list", "sigkill"),
    "scaletrain --install-completion": Runs("--show-completion bash", "complete"),
}
# Parsed alone: the verb, its options and their values are checked, and nothing is run.
CLUSTER, HURT = "needs a cluster that answers", "hurts real runs for minutes; tests/drills/test_drill_verb.py runs it"
SWEPT = "needs runs of a sweep; tests/launch/test_sweep_status.py makes them"
PARSED: dict[str, str] = {
    "scaletrain plan hf://meta-llama/Llama-3.1-8B --gpus 8 --gpu h100-sxm-80gb": "requires the Hugging Face Hub",
    "scaletrain init hf://meta-llama/Llama-3.1-8B tuned.yaml": "requires the Hugging Face Hub",
    **dict.fromkeys(
        (
            "scaletrain init --from /models/llama-3.1-8b-instruct --data chats.jsonl --lora run.yaml",
            "scaletrain data show run.yaml --count 2",
            "scaletrain train run.yaml --run-id chats",
            'scaletrain checkpoint sample chats "Who are you?"',
            "scaletrain checkpoint export chats -o out",
        ),
        "needs a model; tests/engine/checkpoint/test_memorized_chats.py runs them",
    ),
    **dict.fromkeys(
        (
            "scaletrain train run.yaml --run-id first",
            "scaletrain submit run.yaml --run-id second --yes",
            "scaletrain watch second --once",
            "scaletrain exec second --rank 1 -- sh -c 'kill -9 $SCALETRAIN_RANK_PID'",
            "scaletrain events second",
            "scaletrain cancel second --yes",
            "scaletrain status second --wait 1m",
            "scaletrain resume second --yes",
            "scaletrain status second --wait 10m",
            "scaletrain checkpoint export first -o first-model --dtype fp32",
            "scaletrain checkpoint export second -o second-model --dtype fp32",
            'scaletrain checkpoint sample second "import "',
            "scaletrain train run.yaml --set training.optimizer.lr=0.001",
            "scaletrain rm first second",
        ),
        "trains; tests/drills/test_first_run.py types the whole page",
    ),
    **dict.fromkeys(
        (
            "scaletrain data show lora.yaml --count 2",
            "scaletrain train lora.yaml --run-id lora",
            'scaletrain checkpoint sample lora "Who are you?"',
            "scaletrain checkpoint export lora -o merged",
            "scaletrain checkpoint export lora -o adapter --format peft",
        ),
        "needs weights of the hub; tests/engine/parity/test_adapter_runs.py trains and exports an adapter",
    ),
    "scaletrain data prepare 7b.yaml --submit --workers 64": "needs a cluster that answers",
    "scaletrain rehearse 7b.yaml": "trains; tests/drills/test_rehearsals.py runs its parts",
    "scaletrain train run.yaml --run-id sums": "trains; tests/drills/test_trainers.py runs the recipe",
    **dict.fromkeys(
        (
            "scaletrain train run.yaml --run-id bad --set training.optimizer.lr=0.5 --set model.num_hidden_layers=2 "
            "--set model.hidden_size=80 --set model.intermediate_size=224",
            "scaletrain diagnose bad",
            "scaletrain resume bad --set training.optimizer.lr=0.001 --set training.steps=150",
        ),
        "trains with a wrong learning rate; tests/diagnosis trains such runs",
    ),
    "scaletrain submit run.yaml --sweep KEY=A,B --array": "a sweep by name; tests/launch renders arrays",
    "scaletrain checkpoint average RUN --last 5 -o DIR": "needs checkpoints; tests/cli/test_checkpoint.py makes them",
    "scaletrain train recipes/vision-digits-cpu.yaml": "trains for a minute; tests/drills runs it",
    "scaletrain train recipes/clip-pairs-cpu.yaml": "needs drawn data, trains for a minute; tests/drills runs it",
    "scaletrain train sft-tiny-cpu.yaml": "trains for minutes; tests/drills/test_tiny_recipes.py runs it",
    "scaletrain train lora-tiny-cpu.yaml": "trains for minutes; tests/drills/test_tiny_recipes.py runs it",
    **dict.fromkeys(
        (
            "scaletrain checkpoint export RUN -o DIR",
            "scaletrain checkpoint export RUN -o merged",
            "scaletrain checkpoint export RUN -o adapter --format peft",
        ),
        "needs a run with an adapter; tests/engine/parity/test_adapter_runs.py exports one",
    ),
    **dict.fromkeys(
        (
            "scaletrain checkpoint mirror RUN",
            "scaletrain resume RUN --from-mirror s3://bucket/runs",
            "scaletrain resume RUN --from-mirror s3://bucket/runs --cluster other --set layout.data_parallel=auto",
            "scaletrain resume RUN --cluster other",
        ),
        "needs a mirror; tests/mirror and tests/drills/test_moved_run.py have some",
    ),
    **dict.fromkeys(
        (
            "scaletrain data show sft-tiny-cpu.yaml --row 1",
            "scaletrain data show run.yaml --row 1 --count 1",
            "scaletrain data show run.yaml --step 1",
            "scaletrain data show run.yaml --step 3 --count 1",
            "scaletrain data stats run.yaml --html data.html",
        ),
        "needs prepared data; tests/cli runs it",
    ),
    "scaletrain data prepare run.yaml": "prepares for seconds; tests/data/test_prepared.py runs it",
    "scaletrain data upload run.yaml s3://bucket/prepared": "needs a bucket; tests/data/remote has one",
    "scaletrain diagnose lr-high": "the name of a run",
    "scaletrain init --from": "an option by its name; tests/engine/checkpoint/test_memorized_chats.py runs it",
    "scaletrain data show run.yaml --row 1 --count 8": "needs prepared images; tests/engine/data/images prepares some",
    "scaletrain resume RUN --set 'data.skip=[[12, 12]]'": "needs a failed run; tests/drills/test_bad_image.py has one",
    "scaletrain report --sweep NAME -o report.html": "needs a sweep; tests/report/test_comparison.py makes one",
    "scaletrain data stats run.yaml --html report.html": "needs prepared data; tests/cli prepares some",
    **dict.fromkeys(
        (
            "scaletrain rehearse run.yaml",
            "scaletrain rehearse run.yaml --items labels,learning-rate",
            "scaletrain rehearse run.yaml --budget 10m --plot range.png",
            "scaletrain rehearse run.yaml --nodes 4 --json",
            "scaletrain submit run.yaml --rehearse",
        ),
        "trains; tests/drills/test_rehearsals.py and tests/cli/test_rehearse.py and test_calibration.py run its parts",
    ),
    "scaletrain recover RUN --every 5m": "ends by Ctrl-C",
    "scaletrain drill": HURT,
    "scaletrain drill sigkill truncate --spec run.yaml": HURT,
    "scaletrain drill --scheduler slurm --nodes 2 --gpus-per-node 8 --gpu h100-sxm-80gb --set "
    "cluster.slurm.partition=gpu": HURT,
    "scaletrain drill slow-storage": "tests/extending runs it",
    "scaletrain plan run.yaml --cluster lab": "tests/extending runs it",
    **dict.fromkeys(
        (
            "scaletrain cluster setup lab",
            "scaletrain status lab --cluster",
            "scaletrain plan first.yaml --cluster lab",
            "scaletrain submit first.yaml --cluster lab --dry-run",
            "scaletrain submit first.yaml --cluster lab",
        ),
        "needs a login node; tests/login_node/test_documented_page.py types the whole page",
    ),
    "scaletrain resume RUN --from-mirror URL --cluster other": "needs a mirror; tests/mirror has some",
    "scaletrain data prepare run.yaml --submit --workers 64": CLUSTER,
    "scaletrain data prepare run.yaml --workers 16": "tests/data/test_prepared.py runs it",
    "scaletrain preflight k8s/smoke.yaml": CLUSTER,
    "scaletrain logs smoke --follow": CLUSTER,
    "scaletrain status --cluster": CLUSTER,
    "scaletrain submit --probe": CLUSTER,
    "scaletrain status SWEEP": SWEPT,
    "scaletrain list --sweep SWEEP": SWEPT,
    "scaletrain cancel SWEEP": SWEPT,
    "scaletrain resume --from-scratch": "tests/drills runs it",
    "scaletrain submit --dry-run": "an option by its name",
    "scaletrain cancel --force": "an option by its name",
}
OPTION_BY_NAME = ("scaletrain init --from", "scaletrain submit --probe", "scaletrain submit --dry-run")
OPTION_BY_NAME += ("scaletrain resume --from-scratch", "scaletrain cancel --force")


def documented() -> Iterator[tuple[str, str]]:
    """Yield ``(place, command line)`` for each command, also within a pipe or an ``&&``, without its comment."""
    for path in PAGES:
        text = path.read_text(encoding="utf-8")
        for block in re.finditer(r"^```(\w*)\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL):
            if block[1] in ("", "sh", "console"):
                for line in block[2].replace("\\\n", " ").splitlines():
                    if block[1] != "console" or line.startswith("$ "):
                        yield from _commands(path, line.removeprefix("$ "))
        prose = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
        for code in re.findall(r"`([^`]+)`", prose):
            yield from _commands(path, " ".join(code.split()))
    for path in COMMENTED:
        for line in path.read_text(encoding="utf-8").splitlines():
            comment = line.partition("#")[2] if "#" in line else ""
            for code in [*re.findall(r"`([^`]+)`", comment), comment.strip()]:
                yield from _commands(path, code)


def shown_output() -> dict[str, list[str]]:
    """Return the lines that the pages show below ``$ COMMAND``, by the command."""
    found: dict[str, list[str]] = {}
    for path in PAGES:
        for block in re.findall(r"^```console\n(.*?)^```", path.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL):
            for part in block.removeprefix("$ ").split("\n$ "):
                command, _, output = part.partition("\n")
                found.setdefault(command, []).extend(line for line in output.splitlines() if line)
    return found


def _commands(path: Path, line: str) -> Iterator[tuple[str, str]]:
    line = re.split(r"\s+# ", line.strip())[0]
    if any(mark in line for mark in "►→"):  # a drawing
        return
    for part in re.split(r"&&|\s\|\s", line):
        words = part.split()
        if words and words[0] in PROGRAMS and not (len(words) == 1 and words[0] not in (".ci/run",)):
            yield str(path.relative_to(PROJECT)), re.sub(r"\s*(>|\[--json\]).*", "", " ".join(words))


COMMANDS = sorted({command for _, command in documented()})
OURS = [command for command in COMMANDS if command.startswith("scaletrain ")]
SHOWN = shown_output()
VERB_ALONE = re.compile(r"scaletrain( [a-z]+){1,2}")


def test_the_pages_contain_command_lines() -> None:
    assert len(OURS) > 30
    assert {"README.md", "docs/planner.md", "k8s/README.md"} <= {place for place, _ in documented()}


def test_every_documented_command_line_is_in_a_table_or_names_a_verb() -> None:
    unknown = [command for command in OURS if command not in RUN.keys() | PARSED.keys() and not _names_a_verb(command)]
    assert unknown == [], "add them to RUN or, with a reason, to PARSED"


def test_no_table_has_unused_entries() -> None:
    mentioned = {"scaletrain logs RUN", "scaletrain explain RUN"}  # README writes them with bars between
    assert (RUN.keys() | PARSED.keys()) - set(OURS) - mentioned == set()


def _names_a_verb(command: str) -> bool:
    """Return True for the name of an existing verb without arguments, such as ``scaletrain nodes clear``."""
    return VERB_ALONE.fullmatch(command) is not None and _parses(command.split()[1:], names_alone=True)


def _parses(words: list[str], names_alone: bool = False) -> bool:
    """Parse a command line as the command would, and run nothing. Raises UsageError of click."""
    group: Any = typer.main.get_command(app)
    context = group.make_context("scaletrain", list(words), resilient_parsing=True)
    while words and hasattr(group, "resolve_command"):
        name, group, words = group.resolve_command(context, words)
        context = group.make_context(name, list(words), parent=context, resilient_parsing=names_alone)
    return True


@pytest.mark.parametrize("command", [command for command in PARSED if command not in OPTION_BY_NAME])
def test_a_command_line_that_cannot_run_here_can_be_parsed(command: str) -> None:
    assert _parses(shlex.split(command)[1:])


@pytest.mark.parametrize("command", OPTION_BY_NAME)
def test_documented_options_exist(command: str) -> None:
    _, verb, option = command.split()
    assert option in scaletrain(verb, "--help").out


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with the recipes and the cluster files, a run that has ended and one for Slurm that has not begun."""
    folder = tmp_path_factory.mktemp("documented")
    for name in ("recipes", "k8s", "slurm"):
        (folder / name).symlink_to(PROJECT / name)
    (folder / "data").mkdir()
    (folder / "data" / "a.jsonl").write_text('{"text": "data of the user"}\n' * 500)
    shutil.copy(SMALL, folder / "small.yaml")
    (folder / "trace.json").write_text('{"metadata": {"gap_seconds": 3600}, "data": [1, 1, 0, 1]}')
    here = Path.cwd()
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("SCALETRAIN_RUNS", str(folder / "runs"))
        patch.setenv("PYTHONPATH", os.pathsep.join([str(PROJECT), os.environ.get("PYTHONPATH", "")]))
        patch.setattr(LocalBackend.__init__, "__defaults__", (ENGINE,))
        patch.setattr("scaletrain_cli.launch.preparation.reads_prepared_data", lambda *_: False)
        slurm = load_spec("small.yaml", ["cluster.scheduler=slurm"])
        create_run(slurm, make_plan(slurm), "queued")
        scaletrain("submit", "small.yaml", "--run-id", "small", "--set", "env={FAKE: '{}'}", code=0)
        assert scaletrain("status", "small", "--wait", "1h").code == 0
        yield folder
    os.chdir(here)


@pytest.fixture(scope="module")
def ended_lines(workplace: Path) -> dict[str, Ended]:
    """The commands that have run, by their line; those that write the specs of others come first."""
    return {wanted.line: scaletrain(*shlex.split(wanted.line), code=0) for wanted in INIT.values()}


@pytest.mark.parametrize("command", RUN)
def test_a_documented_command_line_runs_with_the_expected_result(
    command: str, workplace: Path, ended_lines: dict[str, Ended], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(workplace)
    monkeypatch.setenv("SCALETRAIN_RUNS", str(workplace / "runs"))
    wanted = RUN[command]
    if wanted.line not in ended_lines:  # several commands may stand for the same line
        ended_lines[wanted.line] = scaletrain(*shlex.split(wanted.line), code=wanted.code)
    ended = ended_lines[wanted.line]
    assert wanted.says in ended.out + ended.err
    if command == f"scaletrain {wanted.line}" and command.split()[1] in ("init", "validate", "plan"):
        # Run as it is written, so that its output is that of the page.
        assert [line for line in SHOWN.get(command, ()) if line not in (ended.out + ended.err).splitlines()] == []


def test_documented_make_targets_exist_and_ci_runs_those_in_contributing() -> None:
    named = {command.split()[1] for command in COMMANDS if command.startswith("make ")}
    makefile = (PROJECT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z0-9-]+):", makefile, flags=re.MULTILINE))
    assert named <= targets
    in_ci = re.findall(r"^make ([a-z-]+)$", (PROJECT / ".ci" / "run").read_text(encoding="utf-8"), flags=re.MULTILINE)
    page = (PROJECT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    reported = re.search(r"CI runs `\.ci/run`, which calls (.*?), and nothing else", page, flags=re.DOTALL)
    assert reported is not None
    assert set(re.findall(r"`make ([a-z-]+)`", reported[1])) == set(in_ci)
    assert {"demo", "check", "test", "docs"} == set(in_ci)


@pytest.mark.parametrize("command", [command for command in COMMANDS if command.startswith("pip install")])
def test_documented_extras_exist(command: str) -> None:
    wanted = {extra for group in re.findall(r"\.\[([a-z0-9,]+)\]", command) for extra in group.split(",")}
    text = (PROJECT / "pyproject.toml").read_text(encoding="utf-8").partition("[project.optional-dependencies]")[2]
    assert wanted <= set(re.findall(r"^([a-z0-9]+) = \[", text, flags=re.MULTILINE))
    assert "-c constraints.txt" in command or not (wanted & {"train", "k8s"}), (
        "the tested versions are in constraints.txt"
    )


def test_documented_files_exist() -> None:
    others = [command for command in COMMANDS if command.split()[0] not in ("scaletrain", "make", "pip")]
    files = {word for command in others for word in re.findall(r"\b(?:k8s|slurm|benchmarks|\.ci)/[\w./-]+", command)}
    assert {"k8s/overlays/kueue", "slurm/dev_cluster.py"} <= files
    assert [file for file in files if not (PROJECT / file).exists()] == []


def test_the_development_cluster_accepts_the_documented_verbs() -> None:
    """tests/slurm_cluster runs the script; this test compares its verbs and options with the page."""
    lines = [command for command in COMMANDS if "slurm/dev_cluster.py" in command]
    verbs = {re.search(r"dev_cluster\.py ([a-z-]+)", line)[1] for line in lines}  # type: ignore[index]
    done = subprocess.run(
        ["python3", "slurm/dev_cluster.py", "--help"], cwd=PROJECT, capture_output=True, text=True, check=True
    )
    assert verbs
    assert all(re.search(rf"\b{verb}\b", done.stdout) for verb in verbs)


def _commands_in_messages() -> Iterator[tuple[str, str]]:
    """Yield ``(file, scaletrain ...)`` for each command in the messages of the package."""
    for path in files_with(PROJECT / "scaletrain_cli", "scaletrain "):
        for node in nodes_of(path):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and "scaletrain " in node.value:
                for reported in re.findall(r"\bscaletrain (?:[a-z]+)(?: [a-z]+)?(?: --?[a-z-]+)*", node.value):
                    yield str(path.relative_to(PROJECT)), reported


def test_messages_name_only_verbs_and_options_that_exist() -> None:
    verbs = set(typer.main.get_command(app).list_commands(None))  # type: ignore[attr-defined]
    helps: dict[str, str] = {}
    named = sorted(set(_commands_in_messages()))
    assert len(named) > 50
    for file, reported in named:
        _, verb, *rest = reported.split()
        if verb not in verbs:
            assert not [word for word in rest if word.startswith("--")], (file, reported)
            continue
        second = [rest[0]] if rest and not rest[0].startswith("-") and verb in ("checkpoint", "nodes", "data") else []
        key = " ".join([verb, *second])
        helps[key] = helps.get(key) or scaletrain(verb, *second, "--help").out
        for option in (word for word in rest if word.startswith("--")):
            assert option in helps[key], (file, reported)
