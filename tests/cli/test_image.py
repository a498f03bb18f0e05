"""`scaletrain image`: a Containerfile for a lock file, and the commands that build it.

No image is built here. The files are parsed by dockerfile-parse if that package is installed, and always by the grammar
of the instructions that they use.
"""

import io
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from scaletrain_cli import __version__
from scaletrain_cli.cli import image as verb
from scaletrain_cli.errors import ExitCode
from scaletrain_cli.launch.image_file import CUDA_IMAGES, Image, ScaletrainSource, Source, render
from tests.cli.command_line import scaletrain

PROJECT = Path(__file__).parent.parent.parent
UV_LOCK = """\
version = 1

[[package]]
name = "torch"
version = "2.11.0"

[[package]]
name = "nvidia-cuda-runtime-cu12"
version = "12.8.90"
"""
PYPROJECT = '[project]\nname = "mine"\nversion = "0.1"\ndependencies = ["torch"]\n'
INSTRUCTIONS = {"FROM", "ENV", "RUN", "WORKDIR", "COPY", "USER", "ENTRYPOINT", "CMD"}


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "my project"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


def put(**files: str) -> None:
    """Write files into the current folder; `__` in a name is a dot."""
    for name, text in files.items():
        Path(name.replace("__", ".")).write_text(text)


def instructions(text: str) -> list[tuple[str, str]]:
    """Return each instruction with its arguments, continued lines joined."""
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    joined = re.sub(r"\s*\\\n\s*", " ", "\n".join(lines))
    return [(line.partition(" ")[0], line.partition(" ")[2]) for line in joined.splitlines()]


@pytest.mark.parametrize(
    ("name", "files", "options"),
    [
        ("uv", {"uv__lock": UV_LOCK, "pyproject__toml": PYPROJECT}, ()),
        ("uv-cuda", {"uv__lock": UV_LOCK, "pyproject__toml": PYPROJECT}, ("--cuda", "auto")),
        ("requirements", {"requirements__txt": "torch==2.11.0\n-c pins.txt\n", "pins__txt": "numpy==2.1.0\n"}, ()),
        ("pyproject", {"pyproject__toml": PYPROJECT}, ()),
        ("constraints", {}, ()),
        ("constraints-cuda", {}, ("--cuda", "12.8", "--uid", "4711")),
    ],
)
def test_the_containerfile_of_each_source(
    name: str, files: dict[str, str], options: tuple[str, ...], golden: Callable[[str, str], None]
) -> None:
    put(**files)
    assert scaletrain("image", "--tag", "registry.example/mine:1", *options).code == 0
    text = Path("Containerfile").read_text()
    golden(f"image/{name}", text)
    found = instructions(text)
    assert {instruction for instruction, _ in found} <= INSTRUCTIONS
    assert found[0][0] == "FROM"
    assert [given for instruction, given in found if instruction == "USER"] not in ([], ["0"], ["root"])
    assert ("ENTRYPOINT", '["tini", "--", "scaletrain"]') in found


def test_a_parser_of_dockerfiles_finds_the_same_instructions() -> None:
    parser = pytest.importorskip("dockerfile_parse", reason="needs the Python package dockerfile-parse")
    put(uv__lock=UV_LOCK, pyproject__toml=PYPROJECT)
    scaletrain("image")
    text = Path("Containerfile").read_text()
    parsed = parser.DockerfileParser(fileobj=io.BytesIO(text.encode())).structure
    known = [(each["instruction"], each["value"]) for each in parsed if each["instruction"] != "COMMENT"]
    assert [(name, " ".join(given.split())) for name, given in known] == [
        (name, " ".join(given.split())) for name, given in instructions(text)
    ]


def test_the_projects_own_containerfile_is_the_one_that_is_rendered_for_it() -> None:
    image = Image(Source("constraints", Path()), ScaletrainSource.CONTEXT)
    assert (PROJECT / "k8s" / "Containerfile").read_text() == render(image)


def test_in_the_checkout_the_context_is_the_checkout(tmp_path: Path) -> None:
    data = scaletrain("image", str(PROJECT), "-o", str(tmp_path / "File"), "--json").data
    assert "--from=" not in data["text"]
    assert not any("--build-context" in command["build"] for command in data["commands"])


def test_an_existing_file_is_not_replaced() -> None:
    put(Containerfile="mine")
    assert "Containerfile already exists" in scaletrain("image", code=ExitCode.USAGE).err
    assert Path("Containerfile").read_text() == "mine"


@pytest.mark.parametrize(
    ("installed", "shown"),
    [(["podman"], ["podman"]), (["buildah", "docker"], ["docker", "buildah"]), ([], ["docker", "podman", "buildah"])],
)
def test_the_commands_are_of_the_installed_tools_or_of_all(
    monkeypatch: pytest.MonkeyPatch, installed: list[str], shown: list[str]
) -> None:
    monkeypatch.setattr(verb.shutil, "which", lambda name: f"/usr/bin/{name}" if name in installed else None)
    commands = scaletrain("image", "-t", "r.example/a:1", "-o", "-", "--json").data["commands"]
    assert [command["tool"] for command in commands] == shown
    for command in commands:
        checkout = f"--build-context scaletrain={PROJECT}"
        assert command["build"] == f"{command['tool']} build -f Containerfile {checkout} -t r.example/a:1 ."
        assert command["push"] == f"{command['tool']} push r.example/a:1"


def test_a_lock_that_names_scaletrain_needs_no_checkout() -> None:
    put(requirements__txt="torch==2.11.0\nscaletrain[train]==0.1.0\n")
    data = scaletrain("image", "-o", "-", "--json").data
    assert "--from=scaletrain" not in data["text"]
    assert not any("--build-context" in command["build"] for command in data["commands"])


LOCKED = (
    UV_LOCK
    + """
[[package]]
name = "mine"
version = "0.1"
source = {{ virtual = "." }}
dependencies = [
    {{ name = "torch" }},
    {{ name = "{dependency}" }},
]

[package.dev-dependencies]
dev = [
    {{ name = "{dev}" }},
]

[[package]]
name = "tools"
version = "1.0"
source = {{ registry = "https://pypi.org/simple" }}
dependencies = [
    {{ name = "{needed_by_tools}" }},
]

[[package]]
name = "scaletrain"
version = "0.1.0"
"""
)
GROUPS = '[dependency-groups]\ndev = ["scaletrain"]\n[project.optional-dependencies]\na = ["scaletrain"]\n'


@pytest.mark.parametrize(
    ("installs", "files"),
    [
        (False, {"requirements__txt": "torch\n-c pins.txt\n", "pins__txt": "scaletrain==0.1.0\n"}),
        (False, {"requirements__txt": "torch\n-c a.txt\n", "a__txt": "-r b.txt\n", "b__txt": "scaletrain\n"}),
        (True, {"requirements__txt": "torch\n-c a.txt\n-r a.txt\n", "a__txt": "ScaleTrain[train]==0.1.0\n"}),
        (False, {"requirements__txt": "scaletrain-plugin-of-mine\n# scaletrain\n"}),
        (False, {"pyproject__toml": PYPROJECT + GROUPS}),
        (False, {"pyproject__toml": GROUPS + '[project]\nname = "x"\ndependencies = [\n"torch", # "scaletrain"\n]\n'}),
        (True, {"pyproject__toml": GROUPS + '[project]\ndependencies = [\n  "a[b]",  # c\n  "scaletrain>=0.1",\n]\n'}),
        (False, {"uv__lock": LOCKED.format(dependency="a", dev="scaletrain", needed_by_tools="a")}),
        (False, {"uv__lock": LOCKED.format(dependency="a", dev="tools", needed_by_tools="scaletrain")}),
        (True, {"uv__lock": LOCKED.format(dependency="scaletrain", dev="a", needed_by_tools="a")}),
        (True, {"uv__lock": LOCKED.format(dependency="tools", dev="a", needed_by_tools="scaletrain")}),
    ],
)
def test_scaletrain_is_added_unless_the_build_installs_it_from_the_files(installs: bool, files: dict[str, str]) -> None:
    put(**{"pyproject__toml": PYPROJECT, **files} if "uv__lock" in files else files)
    text = scaletrain("image", "-o", "-", "--json").data["text"]
    assert ("# ScaleTrain, with the installed versions." not in text) == installs


def test_without_a_checkout_the_package_comes_from_its_index(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("scaletrain_cli.cli.image.checkout", lambda: None)
    put(requirements__txt="torch==2.11.0\n")
    data = scaletrain("image", "-o", "-", "--json").data
    assert f"'scaletrain[train,wandb]=={__version__}'" in data["text"]
    assert "container.note-index" in [note["code"] for note in data["notes"]]


def test_the_cuda_version_is_that_of_the_locked_torch() -> None:
    put(uv__lock=UV_LOCK, pyproject__toml=PYPROJECT)
    data = scaletrain("image", "--cuda", "auto", "-o", "-", "--json").data
    assert (data["cuda"], data["base"]) == ("12.8", CUDA_IMAGES["12.8"])
    put(requirements__txt="nvidia-cuda-runtime==13.0.48\n")
    assert scaletrain("image", "requirements.txt", "-o", "-", "--json").data["cuda"] == "13.0"


@pytest.mark.parametrize(
    ("files", "options", "said"),
    [
        ({}, ("--uid", "0"), "--uid 0 is root"),
        ({}, ("--cuda", "9.2"), "no base image is known"),
        ({}, ("--cuda", "auto"), "does not pin the CUDA packages"),
        ({}, ("--cuda", "12.8", "--base", "debian:12"), "are both given"),
        ({}, ("nowhere",), "nowhere does not exist"),
        ({"notes__md": ""}, ("notes.md",), "no lock file or list of requirements"),
        ({"uv__lock": UV_LOCK}, (), "has no pyproject.toml beside it"),
        ({"requirements__txt": "torch\n-e .\n"}, (), "requirements.txt:2: -e . is a local project"),
        ({"requirements__txt": "./lib\n"}, (), "requirements.txt:1: ./lib is a local project"),
        ({"requirements__txt": "-r missing.txt\n"}, (), "missing.txt cannot be read"),
        (
            {"requirements__txt": "--index-url https://kim:hush-hush@pypi.example/simple\n"},
            (),
            "requirements.txt:1: has the form of a secret",
        ),
    ],
)
def test_what_cannot_be_an_image_is_refused(files: dict[str, str], options: tuple[str, ...], said: str) -> None:
    put(**files)
    refused = scaletrain("image", *options, code=ExitCode.USAGE)
    assert said in refused.err
    assert "hush-hush" not in refused.err
    assert not Path("Containerfile").exists()


def test_only_the_named_files_are_copied(own_folder: Path) -> None:
    (own_folder / "pins").mkdir()
    put(requirements__txt="-r pins/torch.txt\n", secret__key="x")
    (own_folder / "pins" / "torch.txt").write_text("torch==2.11.0\n")
    text = scaletrain("image", "-o", "-").out
    copied = [given for instruction, given in instructions(text) if instruction == "COPY" and "--from" not in given]
    assert copied == ["requirements.txt ./", "pins/torch.txt pins/"]
