"""The batch script: golden texts, options of one word, and a real bash that must pass every value on unchanged."""

import itertools
import json
import os
import re
import shlex
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from scaletrain_cli.errors import SchedulerError, SpecError
from scaletrain_cli.launch.backends.slurm.script import job_script, sbatch_options
from scaletrain_cli.launch.submit import new_run_id
from scaletrain_cli.own_processes import absolute_paths, python_words
from scaletrain_cli.rundir.paths import RunDir, copies_folder
from scaletrain_cli.spec import load_spec
from scaletrain_cli.spec.slurm import ContainerSpec, SlurmSpec
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
    "cluster.slurm.licenses=matlab:1,sim@db:2",
    "cluster.slurm.switches=1",
    "cluster.slurm.switches_wait=30m",
    "cluster.slurm.modules=[cuda/12.4, nccl/2.21]",
    "cluster.slurm.activate=/opt/it's venv/bin/activate",
    "cluster.slurm.extra={exclusive: true, wckey: scaletrain, spread-job: false}",
    "cluster.cpus_per_gpu=12",
    'env={NCCL_DEBUG: WARN, NOTE: "it\'s $(not) run", MASTER_ADDR: ignored}',
)
SECRET = "hf_0123456789"
PREEMPTION = "Preemption: by partition tier. gpu: PreemptMode=REQUEUE, GraceTime 120 s."
PYXIS = ["--container-image={image}", "--container-mounts={root}:{root},/data:/d:ro"]
PYXIS += ["--container-env=MASTER_ADDR,MASTER_PORT", "/opt/my python"]
BINDS = ["--bind", "{root}:{root}", "--bind", "/data:/d:ro", "{image}", "/opt/my python"]
# Variables that a site's plugins, or sbatch by hand, may have added to the environment of a job.
STRAY = {
    **dict.fromkeys(
        ("HF_TOKEN", "SCALETRAIN_TOKEN", "name", "AWS_SECRET_ACCESS_KEY", "two\nlines", "dotted.name"), SECRET
    ),
    "BASH_FUNC_ls%%": "() { echo hidden; }",
    "OMP_NUM_THREADS": "64",
}
WANTED = {"NCCL_SOCKET_IFNAME": "ib0", "CUDA_VISIBLE_DEVICES": "0,1", "SLURM_NODEID": "3", "TMPDIR": "/scratch/a b"}

# Any text that an environment value or a path may contain: no NUL, and nothing that UTF-8 cannot encode.
characters = st.characters(blacklist_characters="\0", blacklist_categories=("Cs",))
pieces = [
    *(" ", "'", '"', "\n", "$(touch canary)", "`touch canary`", "\\", "$HOME", "-n", ";touch canary;", "é", "*"),
    "~",
]
texts = st.text(characters, max_size=30) | st.lists(st.sampled_from(pieces), max_size=6).map("".join)
folders = texts.map(lambda text: "-" + text.replace("/", "_"))
variables = st.from_regex(r"\A[A-Za-z_][A-Za-z0-9_]{0,12}\Z").filter(lambda name: not name.startswith("LD_"))
variables |= st.sampled_from(["PATH", "IFS", "UID", "RANDOM", "python", "run", "code", "PS4", "BASH_ENV", "PYTHONHOME"])

# Takes the place of python, srun, scontrol, sbatch and squeue. Records its name, its words after their number, and the
# environment with which it was started, which ends with an empty entry.
RECORDER = r"""#!/bin/sh
{{ printf '%s\0' "${{0##*/}}" "$#" "$@"; /bin/cat "/proc/$$/environ"; printf '\0'; }} >>{record}
code=0
for word do case "$word" in
    begin) echo 7 node-a 23456;;
    end) echo requeue; code=75;;
esac; done
case "$0" in
    */sbatch) echo 4711;;
    */srun) code=75;;
esac
exit $code
"""


AGENT = python_words("scaletrain_cli.launch.node.agent")


class Recorded:
    """A folder for $PATH with programs that record their arguments and environment."""

    def __init__(self, folder: Path) -> None:
        self.bin = folder / "bin"
        self._record = folder / "record"
        self._text = RECORDER.format(record=shlex.quote(str(self._record)))
        for name in ("srun", "scontrol", "sbatch", "squeue"):
            self.program(self.bin / name)

    def program(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(self._text)
        path.chmod(0o755)

    @property
    def calls(self) -> list[tuple[str, list[str], dict[str, str]]]:
        found, entries = [], iter(self._record.read_bytes().decode().split("\0")[:-1])
        for program in entries:
            arguments = [next(entries) for _ in range(int(next(entries)))]
            variables = itertools.takewhile(bool, entries)
            found.append(
                (program, arguments, {name: value for name, _, value in (v.partition("=") for v in variables)})
            )
        return found

    def run(self, script: str, folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
        """Run a batch script as Slurm does, with these programs."""
        (folder / "job.sh").write_text(script, encoding="utf-8")
        base = {"PATH": f"{self.bin}:/usr/bin:/bin", "SLURM_JOB_ID": "42"}
        return subprocess.run(
            ["bash", folder / "job.sh"], env=base | environment, cwd=folder, capture_output=True, text=True, check=False
        )


def test_the_script_of_a_gpu_run_with_every_option_is_as_accepted(golden: Callable[[str, str], None]) -> None:
    spec = load_spec(GPU_RECIPE, EVERY_OPTION)
    script = job_script(
        spec, "llama-7b-h100-1", Path("/data/runs/llama-7b-h100-1"), "/opt/st/bin/python", preemption=PREEMPTION
    )
    golden("slurm_job.sh", script)


def test_the_script_of_a_run_with_a_range_of_nodes_is_as_accepted(golden: Callable[[str, str], None]) -> None:
    nodes = "cluster.nodes={min: 2, max: 8}"
    spec = load_spec(CPU_RECIPE, ("cluster.scheduler=slurm", nodes, "cluster.gpus_per_node=1"))
    script = job_script(spec, "a-1", Path("/home/ada/my runs/a-1"), "/opt/st/bin/python", sizes=(2, 4, 8))
    golden("slurm_job_elastic.sh", script)


def test_a_job_that_does_not_grow_or_has_one_usable_size_looks_for_no_nodes() -> None:
    nodes = "cluster.nodes={min: 2, max: 8, grow: false}"
    sets = ("cluster.scheduler=slurm", nodes, "cluster.gpus_per_node=1", "cluster.slurm.time=unlimited")
    spec = load_spec(CPU_RECIPE, sets)
    fixed = job_script(spec, "a-1", Path("/runs/a-1"), "/opt/st/bin/python", sizes=(2, 4))
    assert "slurm.growth" not in fixed
    assert "#SBATCH --nodes=2-4\n" in fixed
    assert "#SBATCH --time=UNLIMITED\n" in fixed
    single = job_script(spec, "a-1", Path("/runs/a-1"), "/opt/st/bin/python")
    assert "#SBATCH --nodes=8\n#SBATCH --ntasks-per-node=1\n" in single
    assert '--nodelist="$names"' not in single


@pytest.mark.parametrize("launcher", [False, True], ids=["program", "launcher"])
def test_the_script_of_a_users_program_is_as_accepted(golden: Callable[[str, str], None], *, launcher: bool) -> None:
    """The program is in the record of the run, so that its words never pass a shell of the job."""
    words = "[torchrun, train.py]" if launcher else "[bash, -c, 'echo \"$RANK\"; exit 0']"
    code = f"code={{command: {words}, processes_per_node: {1 if launcher else 'auto'}}}"
    spec = load_spec(CPU_RECIPE, ("cluster.scheduler=slurm", "cluster.nodes=2", "cluster.gpus_per_node=2", code))
    script = job_script(spec, "a-1", Path("/home/ada/my runs/a-1"), "/opt/st/bin/python")
    assert "train.py" not in script
    golden("slurm_job_command.sh", script)


@settings(max_examples=40)
@given(st.dictionaries(variables, texts, max_size=4), folders, folders)
@example(
    {"A": "", "B": "'\"\\\n$(touch canary)`touch canary`", "C": "-n"}, "- '\n$(touch canary)\\", '-"`touch canary`'
)
def test_bash_passes_every_value_on_unchanged(env: dict[str, str], run_folder: str, python_folder: str) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        recorded, run, python = Recorded(folder), folder / run_folder, folder / python_folder / "python"
        recorded.program(python)
        files = set(folder.rglob("*"))
        script = job_script(make_spec(env=env), "run-1", run, str(python))
        done = recorded.run(script, folder, HOME=str(folder))

        assert (done.returncode, done.stdout, done.stderr) == (75, "", "")
        assert set(folder.rglob("*")) - files == {folder / "record", folder / "job.sh"}
        begin, step, end, requeue = recorded.calls
        job = python_words("scaletrain_cli.launch.backends.slurm.job")
        assert begin[:2] == ("python", [*job, "begin", str(run)])
        agent = [str(python), *AGENT, str(run), "--attempt", "7", "--end-together"]
        assert (step[0], step[1][-len(agent) :]) == ("srun", agent)
        assert all(option.startswith("--") for option in step[1][: -len(agent)])
        options = ["--attempt", "7", "--srun-exit-code", "75", "--may-restart"]
        assert end[:2] == ("python", [*job, "end", str(run), *options])
        assert requeue[:2] == ("scontrol", ["requeue", "42"])
        wanted = {"FAKE": "{}"} | absolute_paths(env) | {"MASTER_ADDR": "node-a", "MASTER_PORT": "23456"}
        assert {name: step[2].get(name) for name in wanted} == wanted
        path = f"{recorded.bin}:/usr/bin:/bin"
        assert all(environment["PATH"] == path for _, _, environment in (begin, end, requeue))


@pytest.mark.parametrize(
    ("program", "calls"),
    [
        ("srun", ["not-requeued"]),
        ("scontrol", ["scontrol requeue 42", "scancel 42", "sleep 5", "not-requeued"]),
    ],
    ids=["before", "meanwhile"],
)
def test_the_job_of_a_run_that_is_cancelled_before_its_requeue_does_not_wait_for_nodes_again(
    tmp_path: Path, program: str, calls: list[str]
) -> None:
    recorded, python, run = Recorded(tmp_path), tmp_path / "opt" / "python", RunDir(tmp_path / "r")
    for name in (python, recorded.bin / "sleep", recorded.bin / "scancel"):
        recorded.program(name)
    run.path.mkdir()
    cancels = recorded.bin / program
    cancels.write_text(cancels.read_text().replace("code=0\n", f"code=0\n/usr/bin/touch '{run.stop_file}'\n"))
    done = recorded.run(job_script(make_spec(), "r", run.path, str(python)), tmp_path, HOME=str(tmp_path))
    assert (done.returncode, done.stderr) == (75, "")
    after_end = [" ".join([name, *words]) for name, words, _ in recorded.calls[3:]]
    assert ["not-requeued" if "not-requeued" in call else call for call in after_end] == calls


@pytest.mark.parametrize("more", [(), ("secret_env=[HF_TOKEN, SCALETRAIN_TOKEN]",)], ids=["no secrets", "secrets"])
def test_only_allowed_variables_of_the_jobs_environment_reach_the_ranks(tmp_path: Path, more: tuple[str, ...]) -> None:
    recorded, python = Recorded(tmp_path), tmp_path / "opt" / "python"
    recorded.program(python)
    script = job_script(make_spec(*more, env={"NOTE": "named in the spec"}), "r", tmp_path / "r", str(python))
    stray = STRAY if more else {name: value for name, value in STRAY.items() if name != "SCALETRAIN_TOKEN"}
    recorded.run(script, tmp_path, HOME=str(tmp_path), **WANTED, **stray)
    (environment,) = [environment for program, _, environment in recorded.calls if program == "srun"]
    given = {"NOTE", "FAKE", "MASTER_ADDR", "MASTER_PORT", "PATH", "SLURM_JOB_ID", "HOME"}
    assert environment.keys() - {"_", "SHLVL", "PWD", "OLDPWD"} == WANTED.keys() | given
    assert {name: environment[name] for name in WANTED} == WANTED
    assert SECRET not in "".join(environment.values())


def test_modules_and_the_activation_script_run_before_the_attempt_begins(tmp_path: Path) -> None:
    recorded = Recorded(tmp_path)
    recorded.program(tmp_path / "it's venv" / "python3")
    activate = tmp_path / "it's venv" / "activate"
    activate.write_text(f'export PATH={str(activate.parent)!r}:"$PATH" MKLROOT="$MKLROOT:activated $1"\n')
    init = tmp_path / "modules" / "init" / "bash"
    init.parent.mkdir(parents=True)
    init.write_text('module() { [ "$1 $2" = "load mkl/1" ] && export MKLROOT="$2"; }\n')
    spec = make_spec(
        "cluster.slurm.modules=[mkl/1]",
        f"cluster.slurm.activate={json.dumps(str(activate))}",
        "cluster.slurm.activate_arguments=['my env']",
    )
    script = job_script(spec, "r", tmp_path / "r", "/nowhere/python")
    recorded.run(script, tmp_path, MODULESHOME=str(init.parent.parent), MKLROOT="of the submitter")
    begin, step, *_ = recorded.calls
    assert begin[0] == "python3"
    assert step[1][-8] == str(activate.parent / "python3")
    assert step[2]["MKLROOT"] == "mkl/1:activated my env"


def test_a_module_that_cannot_be_loaded_ends_the_job_before_an_attempt(tmp_path: Path) -> None:
    script = job_script(make_spec("cluster.slurm.modules=[none/0]"), "r", tmp_path / "r", "/nowhere/python")
    done = Recorded(tmp_path).run(script, tmp_path)
    assert done.returncode == 4
    assert "cluster.slurm.modules" in done.stderr
    assert not (tmp_path / "record").exists()


@pytest.mark.parametrize(
    ("runtime", "gpu", "wanted"),
    [
        ("pyxis", "h100-sxm-80gb", PYXIS),
        ("apptainer", "h100-sxm-80gb", ["apptainer", "exec", "--nv", *BINDS]),
        ("apptainer", "cpu", ["apptainer", "exec", *BINDS]),
    ],
)
def test_the_agent_runs_in_the_container_image(tmp_path: Path, runtime: str, gpu: str, wanted: list[str]) -> None:
    recorded, root, image = Recorded(tmp_path), tmp_path / "the 'runs'", "docker://nvcr.io#nvidia/it's:24"
    recorded.program(tmp_path / "python")
    spec = make_spec(f"cluster.gpu={gpu}")
    container = ContainerSpec(image=image, mounts=["/data:/d:ro"], runtime=runtime, python="/opt/my python")
    slurm = spec.cluster.slurm.model_copy(update={"container": container})
    spec = spec.model_copy(update={"cluster": spec.cluster.model_copy(update={"slurm": slurm})})
    script = job_script(spec, "r", root / "r", str(tmp_path / "python"))
    recorded.run(script, tmp_path, PYTHONPATH="/of/this/machine")
    begin, step, *_ = recorded.calls
    assert begin[0] == "python"
    agent = ["-s", *AGENT, str(root / "r"), "--attempt", "7", "--end-together"]
    words = [word.format(image=image, root=root) for word in wanted]
    assert step[1][-len(agent) - len(words) :] == [*words, *agent]
    assert "PYTHONPATH" not in step[2]


@pytest.mark.parametrize("in_memory", ["off", "auto"])
def test_the_end_of_the_job_frees_the_copies_in_host_memory_on_every_node(tmp_path: Path, in_memory: str) -> None:
    recorded, folder = Recorded(tmp_path), tmp_path / "the 'runs'" / "r"
    recorded.program(tmp_path / "python")
    script = job_script(make_spec(f"checkpoint.in_memory={in_memory}"), "r", folder, str(tmp_path / "python"))
    recorded.run(script, tmp_path, SLURM_JOB_NUM_NODES="3")
    freed = [words for program, words, _ in recorded.calls if program == "srun" and "rm" in words]
    expected = ["--nodes=3", "--ntasks=3", "rm", "-rf", "--", str(copies_folder(RunDir(folder)))]
    assert [words[-6:] for words in freed] == ([] if in_memory == "off" else [expected])


@settings(max_examples=20)
@given(
    st.sampled_from(["pyxis", "apptainer"]),
    texts.filter(lambda text: text[:1] not in ("", "-") and "\n" not in text),
    texts.filter(lambda text: not set(text) & set(",\n")),
    texts.filter(lambda text: "\n" not in text),
)
@example("apptainer", "it's $(touch canary)", "a 'b' `touch canary`", "$HOME \\")
def test_any_image_mount_and_activation_reaches_srun(runtime: str, image: str, mount: str, activate: str) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        recorded, ran = Recorded(folder), folder / "ran"
        recorded.program(recorded.bin / "python3")
        container = {"image": image, "mounts": [f"/{mount}"], "runtime": runtime, "python": f"/{activate}"}
        slurm = SlurmSpec.model_validate({"container": container, "activate": f"/{activate}"})
        spec = make_spec()
        spec = spec.model_copy(update={"cluster": spec.cluster.model_copy(update={"slurm": slurm})})
        text = job_script(spec, "r", folder / "runs" / "r", "/nowhere/python")
        # Record the word that bash sources in place of sourcing it.
        script = f'sourced() {{ printf %s "$1" >{ran}; }}\n' + text.replace("\n. ", "\nsourced ", 1)
        done = recorded.run(script, folder)
        assert (done.returncode, done.stderr) == (75, "")
        assert ran.read_bytes().decode() == f"/{activate}"
        assert not (folder / "canary").exists()
        step = next(arguments for program, arguments, _ in recorded.calls if program == "srun")
        assert f"/{activate}" in step
        if runtime == "pyxis":
            assert f"--container-image={image}" in step
            assert f"--container-mounts={folder / 'runs'}:{folder / 'runs'},/{mount}" in step
        else:
            assert step[step.index("apptainer") :][5:7] == [f"/{mount}", image]


def test_a_runs_root_with_a_comma_cannot_be_mounted_and_is_refused() -> None:
    spec = make_spec("cluster.slurm.container={image: /a.sqsh}")
    with pytest.raises(SchedulerError, match="SCALETRAIN_RUNS"):
        job_script(spec, "r", Path("/data/a,b/r"))


def test_waiting_for_switches_without_switches_is_an_error() -> None:
    with pytest.raises(SpecError, match=r"has no effect without slurm\.switches"):
        make_spec("cluster.slurm.switches_wait=30m")


@given(
    texts.filter(str.strip), st.lists(texts | st.from_regex(r"\A[A-Za-z0-9_.,:=/@%+*\[\]\-&|!()]{1,20}\Z"), max_size=9)
)
def test_options_are_one_word_for_any_valid_spec(name: str, values: list[str]) -> None:
    keys = ("partition", "account", "qos", "reservation", "constraint", "exclude", "nodelist", "gres_type")
    try:
        slurm = SlurmSpec(
            **dict(zip(keys, values[:8], strict=False)), extra=dict.fromkeys(["wckey"], values[8]) if values[8:] else {}
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
    for name in ("HF_TOKEN", "SCALETRAIN_TOKEN", "UNRELATED"):  # the second is passed on unless secret
        monkeypatch.setenv(name, SECRET)
    monkeypatch.setenv("https_proxy", f"http://user:{SECRET}@proxy:3128")
    monkeypatch.setenv("http_proxy", "http://proxy:3128")
    sets = ["--set", "cluster.scheduler=slurm", "--set", "secret_env=[HF_TOKEN, SCALETRAIN_TOKEN]"]
    shown = scaletrain("submit", CPU_RECIPE, "--dry-run", *sets, code=0)
    assert SECRET not in shown.out + shown.err

    run = Path(scaletrain("submit", CPU_RECIPE, "--yes", "--json", *sets, code=0).data["run_dir"])
    holders = [path for path in run.rglob("*") if path.is_file() and SECRET in path.read_text()]
    assert holders == [run / "secrets.json"]
    assert holders[0].stat().st_mode & 0o777 == 0o600
    assert "sbatch" in [program for program, _, _ in recorded.calls]
    assert SECRET not in json.dumps(recorded.calls)
    assert "http://proxy:3128" in json.dumps(recorded.calls)
