"""No process of this project imports a module, or runs a program, from the folder that it starts in."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from scaletrain_cli.launch.backends.slurm.script import job_script
from scaletrain_cli.launch.cancel import wait_for_end
from scaletrain_cli.launch.submit import create_run, submit_run
from scaletrain_cli.own_processes import START, absolute_paths, leave_current_folder, python_command
from tests.launch.conftest import LOCAL, MadeRun, make_plan, make_spec
from tests.source_trees import files_with, nodes_of

PROJECT = Path(__file__).parent.parent
PACKAGE = PROJECT / "scaletrain_cli"
LIBRARIES = (
    "annotated_types click deepspeed hypothesis kubernetes numpy pydantic pydantic_core pydantic_settings rich ruamel "
    "safetensors scaletrain_cli sitecustomize submitit tests tokenizers torch typer typing_extensions usercustomize "
    "wandb yaml"
).split()
HOSTILE = "import posix\nposix.close(posix.open({marker!r}, posix.O_CREAT | posix.O_WRONLY))\n"
EXPORT_NEEDS = "torch"


@pytest.fixture
def hostile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[str]]:
    """Fill the current folder with modules and programs of common names; return a function listing those that ran."""
    folder, ran = tmp_path / "hostile", tmp_path / "ran"
    folder.mkdir()
    ran.mkdir()
    names = {name for name in sys.stdlib_module_names if name not in sys.builtin_module_names}
    for name in names | set(LIBRARIES):
        (folder / f"{name}.py").write_text(HOSTILE.format(marker=str(ran / name)))
    for name in ("git", "nvidia-smi", "srun", "sbatch", "squeue", "scontrol", "sleep", "env", "python", "python3"):
        program = folder / name
        program.write_text(f"#!/bin/sh\n: >'{ran}/program {name}'\n")
        program.chmod(0o755)
    monkeypatch.chdir(folder)
    monkeypatch.setenv("PYTHONPATH", f":{PROJECT}:.:")
    monkeypatch.setenv("PATH", f":.:{os.environ['PATH']}")
    return lambda: sorted(path.name for path in ran.iterdir())


def run(command: list[str], **variables: str) -> subprocess.CompletedProcess[str]:
    environment = absolute_paths(os.environ) | variables
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def test_supervisor_agent_and_ranks_import_nothing_from_the_submission_folder(hostile: Callable[[], list[str]]) -> None:
    spec = make_spec("cluster.gpus_per_node=1", "training.steps=2")
    created = create_run(spec, make_plan(spec))
    made = MadeRun(created.run, created.record)
    assert made.record.working_folder == os.getcwd()
    submit_run(made.run, made.record, LOCAL)
    assert wait_for_end(made.run, LOCAL, 1200.0, lambda status: None).state == "finished"
    assert "up" in made.log(1, 0)
    assert hostile() == []


@pytest.mark.parametrize(
    ("module", "arguments", "says"),
    [
        ("scaletrain_cli.engine", ["nowhere"], "SCALETRAIN_ATTEMPT"),
        pytest.param(
            "scaletrain_cli.engine.commands", ["prepare", "nowhere", "nowhere"], "nowhere", marks=pytest.mark.long
        ),
        pytest.param("scaletrain_cli.engine.commands", ["export", "--help"], "Hugging Face", marks=pytest.mark.long),
        ("scaletrain_cli.launch.backends.slurm.job", ["begin", "nowhere"], "nowhere"),
        ("scaletrain_cli.launch.backends.kubernetes.pod_agent", ["--help"], "--runs-root"),
    ],
)
def test_a_python_process_imports_nothing_from_the_current_folder(
    hostile: Callable[[], list[str]], module: str, arguments: list[str], says: str
) -> None:
    if module.startswith("scaletrain_cli.engine.") and find_spec(EXPORT_NEEDS) is None:
        pytest.skip("needs scaletrain[train]")
    done = run(python_command(module, *arguments))
    assert says in done.stdout + done.stderr
    assert hostile() == []


def test_the_command_and_data_prepare_import_nothing_from_the_current_folder(
    hostile: Callable[[], list[str]], tmp_path: Path
) -> None:
    Path("text.jsonl").write_text('{"text": "It was the best of times."}\n' * 400)
    spec = PROJECT / "tests" / "cli" / "small.yaml"
    small = ["--set", "data.tokenizer.vocab_size=300", "--set", "model.seq_len=8", "--set", "data.source=text.jsonl"]
    for words in (["validate", str(spec)], ["data", "prepare", str(spec), *small]):
        if words[0] == "data" and find_spec("tokenizers") is None:
            continue
        # As a shell starts it: with an absolute folder of its own first, and the user's PATH.
        script = tmp_path / "bin" / "scaletrain"
        script.parent.mkdir(exist_ok=True)
        script.write_text("from scaletrain_cli.__main__ import main\nmain()\n")
        done = run([sys.executable, str(script), *words], PATH=os.environ["PATH"])
        assert done.returncode == 0, done.stderr
    assert hostile() == []


def test_python_m_imports_nothing_from_the_current_folder_after_start_up(tmp_path: Path) -> None:
    for name in ("typer", "pydantic", "json", "rich", "subprocess"):
        (tmp_path / f"{name}.py").write_text(HOSTILE.format(marker=str(tmp_path / f"ran-{name}")))
    spec = PROJECT / "tests" / "cli" / "small.yaml"
    command = [sys.executable, "-m", "scaletrain_cli", "validate", str(spec)]
    done = subprocess.run(
        command, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(PROJECT)}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert list(tmp_path.glob("ran-*")) == []


def test_the_batch_script_runs_nothing_from_its_working_folder(
    hostile: Callable[[], list[str]], tmp_path: Path
) -> None:
    bin_folder = tmp_path / "bin"
    bin_folder.mkdir()
    (bin_folder / "srun").write_text('#!/bin/sh\nshift "$(($# - 6))"\nexec "$@"\n')
    (bin_folder / "srun").chmod(0o755)
    made = make_spec(env={"PYTHONPATH": f".:{PROJECT}", "A": "1"})
    script = tmp_path / "job.sh"
    script.write_text(job_script(made, "r", tmp_path / "nowhere", sys.executable))
    environment = {
        "PATH": f":.:{bin_folder}:/usr/bin:/bin",
        "PYTHONPATH": f".:{PROJECT}",
        "SLURM_JOB_ID": "1",
        "HOME": str(tmp_path),
    }
    bash = shutil.which("bash", path="/usr/bin:/bin")
    assert bash is not None
    done = subprocess.run([bash, script], env=environment, capture_output=True, text=True, check=False)
    assert "nowhere" in done.stderr  # the run directory, as `begin` says
    assert done.returncode == 2
    assert set(hostile()) <= {"program env"}  # which bash itself starts before it knows better


def test_a_custom_engine_keeps_the_path_from_the_spec(hostile: Callable[[], list[str]]) -> None:
    from scaletrain_cli.launch.node.options import AgentOptions
    from scaletrain_cli.launch.node.ranks import rank_environment

    def environment(*overrides: str) -> dict[str, str]:
        spec = make_spec(*overrides, env={"PYTHONPATH": "src:/opt/lib", "PATH": "bin:/bin"})
        agent = AgentOptions(Path("/runs/r"), 1, 0, "a", "a", 1, None, "engine")
        return rank_environment(spec, agent, 0, base={}, secrets={}, cores=1)

    own, ours = environment("code.engine=train"), environment()
    assert (own["PYTHONPATH"], own["PATH"]) == ("src:/opt/lib", "bin:/bin")
    assert "PYTHONSAFEPATH" not in own
    assert (ours["PYTHONPATH"], ours["PATH"], ours["PYTHONSAFEPATH"]) == ("/opt/lib", "/bin", "1")


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ({"PATH": "/bin::.:bin:/usr/bin"}, {"PATH": "/bin:/usr/bin"}),
        ({"PYTHONPATH": ".", "PYTHONUSERBASE": "x", "PYTHONPYCACHEPREFIX": "/p"}, {"PYTHONPYCACHEPREFIX": "/p"}),
        ({"PYTHONPATH": "", "HOME": "."}, {"HOME": "."}),
    ],
)
def test_a_search_path_keeps_only_absolute_folders(given: dict[str, str], kept: dict[str, str]) -> None:
    assert absolute_paths(given) == kept


def test_relative_entries_of_pythonpath_are_removed_and_absolute_ones_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for pythonpath, stays in ((".", False), (f".:{tmp_path}", True), (str(tmp_path), True)):
        monkeypatch.setenv("PYTHONPATH", pythonpath)
        monkeypatch.setattr(sys, "path", ["", str(tmp_path), "/lib"])
        leave_current_folder()
        assert sys.path == [*[str(tmp_path)] * stays, "/lib"]


def command_lines_made_elsewhere(path: Path) -> Iterator[str]:
    """Yield every place of a file that may build a Python command line."""
    for node in nodes_of(path):
        where = f"{path.relative_to(PROJECT)}:{getattr(node, 'lineno', 0)}"
        match node:
            case ast.Attribute(value=ast.Name(id="sys"), attr="executable" | "_base_executable"):
                yield f"{where} sys.executable"
            case ast.List() | ast.Tuple() if any(is_text(item, "-m") for item in node.elts):
                yield f"{where} -m"
            case ast.Constant(value=str(text)) if "-m scaletrain_cli" in text and "``python -m" not in text:
                yield f"{where} -m in a text"


def is_text(node: ast.expr, text: str) -> bool:
    return isinstance(node, ast.Constant) and node.value == text


def test_python_command_lines_are_built_in_one_place() -> None:
    found = [
        place
        for path in files_with(PACKAGE, "executable", '"-m', "-m scaletrain_cli")
        if path.name != "own_processes.py"
        for place in command_lines_made_elsewhere(path)
    ]
    script = "scaletrain_cli/launch/backends/slurm/script.py"
    allowed = (
        script,  # writes the interpreter into the script, and START after it
        "scaletrain_cli/launch/node/ranks.py",  # -I -S -c: imports nothing of the user's, and becomes the program
        "scaletrain_cli/launch/node/command.py",  # the path of the interpreter, for PATH; starts nothing
    )
    assert [place for place in found if not (place.startswith(allowed) and place.endswith("sys.executable"))] == []
    assert "$start" in (PROJECT / script).read_text(encoding="utf-8")
    assert not set("'\"$`\\") & set(START), "what is no quote needs none in bash, YAML and JSON"


@pytest.mark.long
def test_a_run_imports_nothing_from_the_submission_folder(hostile: Callable[[], list[str]], tmp_path: Path) -> None:
    spec = PROJECT / "tests" / "cli" / "small.yaml"
    script = tmp_path / "scaletrain"
    script.write_text("from scaletrain_cli.__main__ import main\nmain()\n")

    def scaletrain(*words: str) -> None:
        done = subprocess.run(
            [sys.executable, str(script), *words],
            env={**os.environ, "PYTHONPATH": str(PROJECT)},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, f"{words}: {done.stdout}{done.stderr}"

    short = ["training.steps=4", "training.schedule.warmup_steps=1", "checkpoint.every=2", "guard.hang=90s"]
    scaletrain("submit", str(spec), "--yes", "--run-id", "r", *[word for one in short for word in ("--set", one)])
    scaletrain("status", "r", "--wait", "280")
    scaletrain("checkpoint", "verify", "r")
    scaletrain("checkpoint", "export", "r", "--output", str(tmp_path / "exported"))
    assert hostile() == []
