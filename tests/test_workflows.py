"""The workflows of GitHub start what a person starts: targets of the Makefile and files of .ci/, with few rights."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

PROJECT = Path(__file__).parent.parent
WORKFLOWS = {path.name: YAML(typ="safe").load(path) for path in sorted((PROJECT / ".github/workflows").glob("*.yml"))}
TARGETS = set(re.findall(r"^([a-z0-9-]+):", (PROJECT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE))
JOBS = {f"{name}/{job}": content for name, flow in WORKFLOWS.items() for job, content in flow["jobs"].items()}
WRITES = {
    "release.yml/build": {"id-token", "attestations"},
    "release.yml/pypi": {"id-token"},
    "release.yml/github": {"contents"},
}


def steps(job: dict[str, Any]) -> list[dict[str, Any]]:
    return list(job.get("steps", []))


def test_the_workflows_are_those_of_changes_and_of_releases() -> None:
    assert WORKFLOWS.keys() == {"ci.yml", "release.yml"}


def test_every_make_target_and_every_file_of_a_workflow_exists() -> None:
    started = [step["run"] for job in JOBS.values() for step in steps(job) if "run" in step]
    targets = {
        target for run in started for target in re.findall(r"\bmake ([a-z][a-z0-9-]*)", run.partition("apt-get")[0])
    }
    matrix = JOBS["ci.yml/other-pythons"]["strategy"]["matrix"]["include"]
    assert targets == {"release"}
    assert targets | {row["target"] for row in matrix} <= TARGETS
    files = {file for run in started for file in re.findall(r"(?:\.ci|scaletrain_cli)/[\w./]+", run)}
    assert files == {".ci/run", "scaletrain_cli/__init__.py"}
    assert all((PROJECT / file).is_file() for file in files)


def test_the_pythons_of_ci_and_of_a_release_are_those_of_the_project() -> None:
    text = (PROJECT / "pyproject.toml").read_text(encoding="utf-8")
    stated = re.findall(r'"Programming Language :: Python :: (3\.\d+)"', text)
    of_release = [
        step["with"]["python-version"] for step in steps(JOBS["release.yml/build"]) if "setup-python" in str(step)
    ]
    assert of_release[0].split() == stated
    matrix = JOBS["ci.yml/other-pythons"]["strategy"]["matrix"]["include"]
    assert [row["python"] for row in matrix] == [stated[0], stated[-1]]
    assert f"for version in {' '.join(stated)}; do" in (PROJECT / ".ci/pythons.sh").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", JOBS)
def test_a_job_may_write_only_what_it_is_for_and_ends_in_time(name: str) -> None:
    job, flow = JOBS[name], WORKFLOWS[name.partition("/")[0]]
    assert flow["permissions"] in ({}, {"contents": "read"})
    rights = job.get("permissions", {})
    assert {right for right, level in rights.items() if level != "read"} == WRITES.get(name, set())
    assert "uses" in job or 0 < job["timeout-minutes"] <= 60


def test_an_action_is_named_by_its_major_version_and_a_checkout_keeps_no_token() -> None:
    used = [step for job in JOBS.values() for step in steps(job) if "uses" in step]
    assert used
    for step in used:
        assert re.fullmatch(r"(actions/[\w-]+@v\d+|pypa/gh-action-pypi-publish@release/v\d+)", step["uses"])
        if step["uses"].startswith("actions/checkout"):
            assert step["with"] == {"persist-credentials": False}


def test_a_release_is_tested_before_it_is_built_and_published_after_it() -> None:
    assert [JOBS[f"release.yml/{job}"].get("needs") for job in ("test", "build", "pypi", "github")] == [
        *(None, "test", "build", "pypi")
    ]
    assert JOBS["release.yml/test"]["uses"] == "./.github/workflows/ci.yml"
