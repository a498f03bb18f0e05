import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from scaletrain_cli import plugins
from scaletrain_cli.launch.backends.registry import backend_for
from scaletrain_cli.spec import load_spec
from tests import forked

PROJECT = Path(__file__).parents[2]
SPEC = str(PROJECT / "recipes" / "llama-10m-cpu.yaml")


def back_end(name: str, section: str) -> str:
    """Return the source of a back end with these traits, whose class lacks three of the abstract methods."""
    return f"""
from pydantic import BaseModel
from scaletrain_cli.launch.backends.base import Backend
from scaletrain_cli.spec.backend_traits import BackendTraits
from scaletrain_cli.spec.section import BackendSection
class Plain(BaseModel): pass
class NoDefault(BackendSection):
    host: str
class Unfinished(Backend):
    name = {name!r}
    def render(self, run, record): return ""
X = BackendTraits({name!r}, "a queue", f"{{__name__}}:Unfinished", section={section})
"""


# Entry point, its group, the source of its module, and what the error says. Every module is called like its entry.
BROKEN = {
    "exits": ("backends", "raise SystemExit(0)", "SystemExit: 0"),
    "text": ("backends", "X = 'text'", "must be a BackendTraits, not a str"),
    "dict_section": ("backends", back_end("dict_section", "dict"), "section that is not a subclass of BackendSection"),
    "plain_section": ("backends", back_end("plain_section", "Plain"), "section that is not a subclass of Backend"),
    "no_default": ("backends", back_end("no_default", "NoDefault"), "has a section whose key host has no default"),
    "other_name": ("backends", back_end("x", "BackendSection"), "has the name x, not that of its entry point"),
    "tracker_of_nothing": ("trackers", "X = 3", "must be a type, not a int"),
    "tracker_exits": ("trackers", "import sys; sys.exit('no licence')", "SystemExit: no licence"),
    "tracker_unfinished": (
        "trackers",
        "from scaletrain_cli.tracking.base import Tracker, TrackerOptions\n"
        "class X(Tracker):\n    options_model = TrackerOptions\n    def start(self, run): pass\n",
        "does not define finish, log",
    ),
    "optimizer_prints": ("optimizers", "print('noise')\nraise RuntimeError('two\\nlines')", "RuntimeError: two lines"),
    "optimizer_negative": (
        "optimizers",
        "from scaletrain_cli.spec.extensions import OptimizerExtension\nX = OptimizerExtension(-4, 'a:b')",
        "has moment_bytes = -4",
    ),
    "family_missing": ("model_families", "import no_such_module_at_all", "ModuleNotFoundError"),
    "family_of_images": (
        "model_families",
        "from scaletrain_cli.spec.extensions import ModelFamilyExtension\nX = ModelFamilyExtension('resnet', 'a:b')",
        "has the base resnet, which must be llama or gpt",
    ),
    "verb_syntax": ("verbs", "def x(:", "SyntaxError"),
    "verb_without_codes": ("verbs", "def command(): pass", "must have a function command and EXIT_CODES"),
    "drill_ending": (
        "drills",
        "from scaletrain_cli.launch.drill import DrillKind\n"
        "X = DrillKind('drill_ending', 'a rank ends', 'sigkill rank={rank}', 'exploded')",
        "has the ending exploded, which must be restarted, ",
    ),
    "drill_fault": (
        "drills",
        "from scaletrain_cli.launch.drill import DrillKind\n"
        "X = DrillKind('drill_fault', 'a rank ends', 'sigkill rank={lank}', 'restarted')",
        "KeyError: 'lank'",
    ),
}
NAMED = {
    "backends": ("validate", SPEC, "--set", "cluster.scheduler={name}"),
    "trackers": ("validate", SPEC, "--set", "tracking=[{name}]"),
    "optimizers": ("validate", SPEC, "--set", "training.optimizer.name={name}"),
    "model_families": ("validate", SPEC, "--set", "model.family={name}"),
    "verbs": ("{name}",),
    "drills": ("drill", "{name}"),
}


def add_package(site: Path, package: str, name: str, group: str, source: str) -> None:
    module = package.replace("-", "_")
    attribute = "" if group == "verbs" else ":X"
    site.mkdir(exist_ok=True)
    (site / f"{module}.py").write_text(source)
    metadata = site / f"{module}-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(f"[scaletrain.{group}]\n{name} = {module}{attribute}\n")


def scaletrain(site: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    path = f"{site}{os.pathsep}{PROJECT}"
    environment = {**os.environ, "PYTHONPATH": path, "SCALETRAIN_RUNS": str(site.parent / "runs")}
    return forked.scaletrain(*arguments, environment=environment)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All packages of BROKEN, installed beside each other."""
    folder = tmp_path_factory.mktemp("broken") / "site"
    for name, (group, source, _) in BROKEN.items():
        add_package(folder, name, name, group, source)
    return folder


@pytest.mark.parametrize("name", BROKEN)
def test_a_plug_in_that_cannot_be_loaded_is_one_error_with_its_package_and_the_cause(site: Path, name: str) -> None:
    group, _, said = BROKEN[name]
    done = scaletrain(site, *(word.format(name=name) for word in NAMED[group]), "--json")
    error = json.loads(done.stdout)["error"]
    text = " ".join(done.stderr.split())
    assert (done.returncode, error["code"] in ("spec", "usage")) == (2, True), text
    assert f"{name} of the package {name} cannot be " in text
    assert said in text
    assert f"Update or uninstall {name}." in text


@pytest.mark.parametrize("arguments", [("validate", SPEC), ("schema",), ("list",), ("drill", "--list")])
def test_a_plug_in_that_cannot_be_loaded_does_not_affect_other_commands(site: Path, arguments: tuple[str, ...]) -> None:
    done = scaletrain(site, *arguments, *(() if arguments == ("schema",) else ("--json",)))
    assert done.returncode == 0, done.stderr
    json.loads(done.stdout)
    assert scaletrain(site, "--help").returncode == 0


def test_doctor_reports_each_plug_in_that_cannot_be_loaded_with_the_cause(site: Path) -> None:
    done = scaletrain(site, "doctor", "--json")
    found = {check["name"]: check for check in json.loads(done.stdout)["checks"]}
    for name, (_, _, said) in BROKEN.items():
        assert (name, found[name]["state"]) == (name, "warn")
        assert said in found[name]["advice"]


@pytest.mark.parametrize("text", [b"[scaletrain.verbs]\nno equals sign\n", b"[scaletrain.verbs]\n\xff = a:b\n"])
def test_metadata_that_cannot_be_read_disturbs_no_other_package(tmp_path: Path, text: bytes) -> None:
    site = tmp_path / "site"
    add_package(site, "damaged", "damaged", "verbs", "")
    (site / "damaged-1.0.dist-info" / "entry_points.txt").write_bytes(text)
    add_package(site, "other", "other", "verbs", "EXIT_CODES = ()\ndef command() -> None:\n    print('hello')\n")
    assert scaletrain(site, "validate", SPEC).returncode == 0
    assert scaletrain(site, "other").stdout == "hello\n"


def test_an_exception_in_the_code_of_a_plug_in_is_reported_as_a_bug_of_its_package(tmp_path: Path) -> None:
    source = "import json\nEXIT_CODES = ()\ndef command() -> None:\n    json.loads('no json')\n"
    add_package(tmp_path / "site", "my-verb", "broken", "verbs", source)
    done = scaletrain(tmp_path / "site", "broken")
    assert done.returncode == 1
    assert "JSONDecodeError" in done.stderr
    assert "This is a bug in the package my-verb. Report it with the traceback in " in " ".join(done.stderr.split())


def test_a_name_that_two_packages_register_is_refused(tmp_path: Path) -> None:
    source = "from scaletrain_cli.spec.extensions import OptimizerExtension\nX = OptimizerExtension(4, 'a:b')"
    for package in ("one-lamb", "two-lamb"):
        add_package(tmp_path / "site", package, "lamb", "optimizers", source)
    done = scaletrain(tmp_path / "site", *(word.format(name="lamb") for word in NAMED["optimizers"]))
    assert done.returncode == 2
    assert "registered by several packages: one-lamb, two-lamb. Uninstall all but one." in " ".join(done.stderr.split())


def test_the_name_of_a_built_in_one_cannot_be_taken_and_doctor_says_so(tmp_path: Path) -> None:
    for group, name in (("backends", "slurm"), ("trackers", "wandb"), ("verbs", "list"), ("drills", "sigkill")):
        add_package(tmp_path / "site", f"my-{name}", name, group, "raise RuntimeError('imported')")
    assert scaletrain(tmp_path / "site", "list").returncode == 0
    done = scaletrain(tmp_path / "site", "doctor", "--json")
    taken = [check for check in json.loads(done.stdout)["checks"] if "of the package my-" in check["found"]]
    assert {check["name"] for check in taken} == {"slurm", "wandb", "list", "sigkill"}
    assert all("rename the entry point" in check["advice"] for check in taken)


def test_the_schema_has_the_optimizers_and_families_of_other_packages(tmp_path: Path) -> None:
    imported = "from scaletrain_cli.spec.extensions import ModelFamilyExtension, OptimizerExtension\n"
    optimizer, family = "X = OptimizerExtension(4, 'a:b')", "X = ModelFamilyExtension('gpt', 'a:b')"
    add_package(tmp_path / "site", "lamb", "lamb", "optimizers", imported + optimizer)
    add_package(tmp_path / "site", "mine", "mine", "model_families", imported + family)
    schema = json.loads(scaletrain(tmp_path / "site", "schema").stdout)["$defs"]
    assert schema["OptimizerSpec"]["properties"]["name"]["enum"][-1] == "lamb"
    assert schema["ModelSpec"]["properties"]["family"]["enum"] == ["llama", "gpt", "mine"]
    needed = {one["properties"]["family"]["const"]: one["required"] for one in schema["ModelSpec"]["anyOf"][2:]}
    assert needed["mine"] == needed["gpt"]
    wrong = scaletrain(tmp_path / "site", "validate", SPEC, "--set", "training.optimizer.name=lamp").stderr
    assert "'muon' or 'lamb'. Did you mean lamb?" in " ".join(wrong.split())


def test_a_back_end_that_fails_on_this_machine_is_not_the_usual_one(tmp_path: Path) -> None:
    source = f"""
{back_end("odd", "BackendSection")}
Unfinished.__abstractmethods__ = frozenset()
Unfinished.has_this_machine = lambda self: raise_exit()
def raise_exit(): raise SystemExit("no licence")
"""
    add_package(tmp_path / "site", "odd", "odd", "backends", source)
    program = (
        "from scaletrain_cli.launch.backends import registry\n"
        "odd = registry.backend_for('odd')\n"
        "registry.all_backends = lambda: [odd]\n"
        "print(registry.usual_backend().name)\n"
    )
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path / 'site'}{os.pathsep}{PROJECT}"}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert done.stdout == "local\n"
    assert "odd of the package odd" in done.stderr
    assert "SystemExit: no licence" in done.stderr


def test_a_spec_with_built_in_names_reads_no_metadata_of_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    def unexpected() -> None:
        pytest.fail("the metadata of all installed packages was read")

    monkeypatch.setattr(plugins, "_all_plugins", unexpected)
    spec = load_spec(Path(SPEC), ["tracking=[tensorboard]"])
    assert backend_for(spec.cluster.scheduler).name == "local"
