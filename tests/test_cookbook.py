"""The keys that docs/cookbook names are keys of the spec, and the words of other launchers are in their source."""

import importlib.util
import re
from pathlib import Path

import pytest

from scaletrain_cli.spec.problems import spec_keys

FOLDER = Path(__file__).parent.parent / "docs" / "cookbook"
LAUNCHERS = (FOLDER / "from-other-launchers.md").read_text(encoding="utf-8")


def test_the_named_keys_are_keys_of_the_spec() -> None:
    keys = {key for key, _ in spec_keys()}
    sections = {part for key in keys for part in (key, key.rpartition(".")[0])}
    tops = "|".join(sorted({key.partition(".")[0] for key in keys}))
    for page in FOLDER.glob("*.md"):
        named = set(
            re.findall(rf"(?<![\w./-])(?:{tops})\.[a-z_]+(?:\.[a-z_]+)*(?![\w/])", page.read_text(encoding="utf-8"))
        )
        files = {name for name in named if name.rpartition(".")[2] in ("json", "md", "py", "yaml", "jsonl", "html")}
        assert named - files - sections == set(), page.name
    assert "cluster.slurm.activate" in LAUNCHERS


@pytest.mark.parametrize(
    ("section", "package", "source"),
    [
        ("torchrun", "torch", "distributed/run.py"),
        ("accelerate", "accelerate", "commands/launch.py"),
    ],
)
def test_options_of_other_launchers_are_in_their_source(section: str, package: str, source: str) -> None:
    text = LAUNCHERS.partition(f"\n## {section}\n")[2].partition("\n## ")[0]
    rows = [row.split(" | ")[0] for row in text.splitlines() if row.startswith("| `--")]
    options = {option for row in rows for option in re.findall(r"`(--[a-z_-]+)", row)}
    assert len(options) > 5
    assert [option for option in options if f'"{option}"' not in _installed(package, source)] == []


def test_parameters_of_submitit_are_in_its_source() -> None:
    text = LAUNCHERS.partition("\n## submitit\n")[2].partition("\n## ")[0]
    rows = [row.split(" | ")[0] for row in text.splitlines() if row.startswith("| `")]
    named = {word for row in rows for word in re.findall(r"`([a-z_]+)`", row)}
    known = _installed("submitit", "slurm/slurm.py") + _installed("submitit", "auto/auto.py")
    assert len(named) > 10
    assert [name for name in named if not re.search(rf"\b{name.removeprefix('slurm_')}\b", known)] == []


def _installed(package: str, source: str) -> str:
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        pytest.skip(f"{package} is not installed")
    return (Path(spec.origin).parent / source).read_text(encoding="utf-8")
