"""The wheel has the files that messages refer to, requirements allow the tested versions, and the version is one."""

from __future__ import annotations

import importlib.metadata
import re
import tarfile
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from scaletrain_cli import __version__
from scaletrain_cli.cli import doctor
from scaletrain_cli.extras import EXTRAS, install_command
from scaletrain_cli.project_files import FOLDERS, project_file, recipes

PROJECT = Path(__file__).parent.parent
PINS = dict(re.findall(r"^([\w.-]+)==([^\s;]+)", (PROJECT / "constraints.txt").read_text(), flags=re.MULTILINE))


@pytest.fixture(scope="module")
def declared() -> dict[str, Any]:
    tomllib = pytest.importorskip("tomllib", reason="is in Python from 3.11 on")
    return dict(tomllib.loads((PROJECT / "pyproject.toml").read_text(encoding="utf-8"))["project"])


def requirements(declared: dict[str, Any]) -> dict[str, str]:
    """Return every requirement of the core and of the users' extras, by name."""
    extras = declared["optional-dependencies"]
    lines = [
        *declared["dependencies"],
        *(line for extra in extras if extra not in ("dev", "reference") for line in extras[extra]),
    ]
    return {re.split(r"[<>=~!]", line)[0]: line for line in lines}


def test_the_wheel_has_the_recipes_and_the_files_for_clusters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    builders = pytest.importorskip("hatchling.builders.wheel", reason="needs hatchling, of the extra dev")
    monkeypatch.chdir(PROJECT)
    (wheel,) = builders.WheelBuilder(str(PROJECT)).build(directory=str(tmp_path), versions=["standard"])
    with zipfile.ZipFile(wheel) as archive:
        inside = {name for name in archive.namelist() if name.startswith("scaletrain_cli/project/")}
        archive.extractall(tmp_path)
    kept = [*FOLDERS, "recipes"]
    tracked = {path for name in kept for path in (PROJECT / name).rglob("*") if path.is_file()}
    wanted = {str(path.relative_to(PROJECT)) for path in tracked if "__pycache__" not in path.parts}
    assert inside == {f"scaletrain_cli/project/{name}" for name in wanted | {"constraints.txt"}}
    monkeypatch.setattr("scaletrain_cli.project_files._PACKAGE", tmp_path / "scaletrain_cli")
    assert project_file("k8s/base/rbac.yaml").is_relative_to(tmp_path)
    assert recipes()["own-engine"].is_relative_to(tmp_path)


def test_the_sdist_has_what_make_setup_and_a_wheel_are_made_from(tmp_path: Path) -> None:
    builders = pytest.importorskip("hatchling.builders.sdist", reason="needs hatchling, of the extra dev")
    (sdist,) = builders.SdistBuilder(str(PROJECT)).build(directory=str(tmp_path), versions=["standard"])
    with tarfile.open(sdist) as archive:
        inside = {name.partition("/")[2] for name in archive.getnames()}
    makefile = (PROJECT / "Makefile").read_text(encoding="utf-8")
    named = set(re.findall(r"(?:\.ci|slurm|benchmarks|recipes)/[\w/]+\.(?:sh|py|txt)", makefile))
    assert len(named) > 5
    assert named | {"Makefile", "mkdocs.yml", "constraints.txt", ".github/workflows/ci.yml"} <= inside


def test_only_the_package_and_its_chart_state_the_version() -> None:
    folders = ("docs", "grafana", "k8s", "recipes", "slurm", "scaletrain_cli")
    files = [PROJECT / "README.md", *(path for name in folders for path in (PROJECT / name).rglob("*"))]
    texts = {path: path.read_text() for path in files if path.suffix in (".md", ".py", ".sh", ".txt", ".yaml")}
    named = {str(path): re.findall(r"scaletrain(?:\[.*?\])?[:=@-]=?v?\d+\.\d+.*", text) for path, text in texts.items()}
    assert len(texts) > 500
    assert {path: found for path, found in named.items() if found} == {}


def test_the_newest_release_in_the_changelog_is_this_version() -> None:
    headings = re.findall(r"^## \[(.+?)\](.*)$", (PROJECT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert headings[0] == ("Unreleased", "")
    assert headings[1][0] == __version__
    assert all(re.fullmatch(r" - \d{4}-\d\d-\d\d", date) for _, date in headings[1:])


def test_the_image_copies_all_sources_of_the_wheel() -> None:
    text = (PROJECT / "pyproject.toml").read_text(encoding="utf-8")
    included = re.findall(r'^"([^"]+)" = "scaletrain_cli/project/', text, flags=re.MULTILINE)
    copied = " ".join(
        re.findall(r"^COPY (.+) \S+$", (PROJECT / "k8s" / "Containerfile").read_text(), re.MULTILINE)
    ).split()
    assert included
    assert set(included) <= set(copied)


def test_every_requirement_allows_the_tested_version(declared: dict[str, Any]) -> None:
    specifiers = pytest.importorskip("packaging.requirements")
    pinned = {name: line for name, line in requirements(declared).items() if name in PINS}
    assert len(pinned) > 10
    for name, line in pinned.items():
        assert specifiers.Requirement(line).specifier.contains(PINS[name]), line


def test_torch_is_limited_to_tested_minor_versions(declared: dict[str, Any]) -> None:
    major, minor, _ = PINS["torch"].split(".")
    assert requirements(declared)["torch"].endswith(f",<{major}.{int(minor) + 1}")
    assert f"version={PINS['torch']}\n" in (PROJECT / ".ci" / "install_torch.sh").read_text()


def test_the_page_of_stability_has_the_supported_versions_of_the_project(declared: dict[str, Any]) -> None:
    page = (PROJECT / "docs" / "stability.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| (\w+) \| ([\d.]+(?: to [\d.]+)?)", page, flags=re.MULTILINE))
    pythons = [line.rpartition(" ")[2] for line in declared["classifiers"] if re.search(r":: 3\.\d+$", line)]
    assert rows["Python"] == f"{pythons[0]} to {pythons[-1]}"
    oldest_torch = re.findall(r">=([\d.]+)", requirements(declared)["torch"])[0]
    assert rows["torch"] == f"{oldest_torch} to {PINS['torch'].rpartition('.')[0]}"
    assert requirements(declared)["deepspeed"] == f"deepspeed=={rows['DeepSpeed']}.*"


def test_the_extras_are_those_of_the_project(declared: dict[str, Any]) -> None:
    extras = {
        name: lines
        for name, lines in declared["optional-dependencies"].items()
        if name not in ("dev", "docs", "reference")
    }
    assert {name: len(lines) for name, lines in extras.items()} == {name: len(found) for name, found in EXTRAS.items()}


def test_an_install_command_names_this_checkout_and_the_tested_versions() -> None:
    assert install_command("train") == f"pip install -c constraints.txt '.[train]' in the checkout {PROJECT}"


@pytest.mark.process
def test_doctor_warns_about_an_untested_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    installed = {"torch": "2.99.1", "deepspeed": PINS["deepspeed"], "numpy": PINS["numpy"], "tokenizers": "0.99"}

    def distribution(name: str) -> SimpleNamespace:
        if name in ("submitit", "kubernetes", "wandb"):
            raise importlib.metadata.PackageNotFoundError(name)
        return SimpleNamespace(version=installed.get(name, "1"), locate_file=lambda name: "/")

    monkeypatch.setattr(doctor, "distribution", distribution)
    found = {check.name: check for check in doctor._packages()}
    assert found["[train]"].state == "warn"
    assert found["[train]"].advice.startswith(f"tested with torch {PINS['torch']}: pip install -c constraints.txt")
    installed["torch"] = f"{PINS['torch']}+cpu"
    assert {check.name: check.state for check in doctor._packages()}["[train]"] == "ok"
