"""The extras in messages are those of pyproject.toml."""

from __future__ import annotations

import re
from pathlib import Path

from scaletrain_cli.extras import EXTRAS, extra_of

PROJECT = Path(__file__).parent.parent


def test_the_table_of_extras_matches_pyproject() -> None:
    text = (PROJECT / "pyproject.toml").read_text(encoding="utf-8")
    section = text.split("[project.optional-dependencies]")[1].split("\n[")[0]
    listed = {
        name: {re.split(r"[=<>~!\[ ]", package)[0].replace("-", "_") for package in re.findall(r'"([^"]+)"', packages)}
        for name, packages in re.findall(r"^(\w+) = \[(.*?)\]", section, flags=re.MULTILINE | re.DOTALL)
    }
    del listed["dev"], listed["docs"], listed["reference"]
    listed["train"] = {"pynvml" if name == "nvidia_ml_py" else name for name in listed["train"]}
    listed["vision"] = {"PIL" if name == "pillow" else name for name in listed["vision"]}
    listed["data"] = {"google.protobuf" if name == "protobuf" else name for name in listed["data"]}
    listed["mlflow"] = {"mlflow" if name == "mlflow_skinny" else name for name in listed["mlflow"]}
    assert {name: set(modules) for name, modules in EXTRAS.items()} == listed
    assert extra_of("torch") == "train"
    assert extra_of("scaletrain_cli") is None


def test_no_message_suggests_to_install_scaletrain_from_an_index() -> None:
    named = [
        f"{path.name}: {line.strip()}"
        for path in (PROJECT / "scaletrain_cli").rglob("*.py")
        for line in path.read_text(encoding="utf-8").splitlines()
        if re.search(r"(install '?|Install '?)scaletrain", line)
    ]
    assert named == []
