"""Any content of a spec or of --set gives a plan, or an error with exit code 2 or 3; never a traceback."""

import contextlib
import json
import string
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from ruamel.yaml import YAML

from scaletrain_cli.plan import accelerator_names
from scaletrain_cli.spec import RunSpec
from scaletrain_cli.spec.presets import presets
from tests.cli.command_line import RECIPES, Ended, scaletrain

TEXTS = [path.read_text(encoding="utf-8") for path in RECIPES]
TREES = [YAML(typ="safe", pure=True).load(text) for text in TEXTS]
FOLDER = Path(tempfile.mkdtemp(prefix="scaletrain-fuzz-"))
patient = settings(suppress_health_check=list(HealthCheck))

# Values that broke something once, here or elsewhere.
NASTY = [
    *"~ yes 1_000 0x10 1e400 -1 0 1 3 7 1000000000 99999999999999999999 .inf .nan 3e-4 1e-300 80GB 24:00:00".split(),
    *"auto [] {} '' *a &a %YAML --- 2020-99-99 $(id) # ' h100-sxm-80gb cpu llama-70b gpt2 fp8 slurm kubernetes".split(),
    *("[1, [2]]", "{a: {b: c}}", '"\\0"', '"\\ud800"', "!!int x", "!!binary x", "\t", "\u2028", "\x85", "a: b"),
    *("30m", "optimizer+params", "fsdp", "full", "../x"),
]


def keys_of(model: Any = RunSpec, before: str = "") -> list[str]:
    """Every dotted key of the spec."""
    found = []
    for name, field in model.model_fields.items():
        key = f"{before}{field.alias or name}"
        inner = field.annotation
        found += [key, *(keys_of(inner, f"{key}.") if hasattr(inner, "model_fields") else [])]
    return found


values = st.sampled_from(NASTY) | st.integers().map(str) | st.floats().map(str) | st.text(max_size=12)
data = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.sampled_from(NASTY),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=5,
)
# Mostly of the right kind, so that the planner is reached and has to say what does not divide or fit.
sizes = st.integers(1, 12) | st.sampled_from([16, 32, 64, 96, 128, 1024, 4096, 32768, 10**6, 10**9])
legal = st.one_of(
    st.builds(
        "{}={}".format,
        st.sampled_from(
            [
                *("cluster.nodes", "cluster.gpus_per_node", "training.global_batch_size", "training.micro_batch_size"),
                *("layout.data_parallel", "layout.tensor_parallel", "layout.pipeline_parallel", "training.steps"),
                *("layout.sequence_parallel", "layout.expert_parallel", "layout.zero_stage", "model.seq_len"),
                *("model.num_hidden_layers", "model.hidden_size", "model.intermediate_size", "model.vocab_size"),
                *("cluster.grace_seconds", "checkpoint.every", "cluster.mean_time_between_interruptions"),
            ]
        ),
        sizes | st.just("auto"),
    ),
    st.builds("model={{preset: {}}}".format, st.sampled_from(sorted(presets()))),
    st.builds("cluster.gpu={}".format, st.sampled_from(accelerator_names())),
    st.builds("training.precision={}".format, st.sampled_from(["fp32", "tf32", "bf16", "fp16", "fp8"])),
    st.sampled_from(
        ["cluster.scheduler=slurm", "cluster.spot=true", "layout.offload=optimizer", "layout.zero_stage=3"]
    ),
)
overrides = st.one_of(
    st.builds("{}={}".format, st.sampled_from(keys_of()), values),
    st.builds("{}={}".format, st.text(string.ascii_lowercase + "._", max_size=20), values),
    st.text(max_size=30),
)


@st.composite
def changed_texts(draw: st.DrawFn) -> str:
    """A recipe with some of its text cut, doubled, moved or replaced."""
    text = draw(st.sampled_from(TEXTS))
    for _ in range(draw(st.integers(1, 3))):
        start = draw(st.integers(0, len(text)))
        end = start + draw(st.integers(0, 40))
        piece = draw(st.sampled_from(["", text[start:end] * 2]) | values)
        text = text[:start] + piece + text[end:]
    return text


@st.composite
def changed_trees(draw: st.DrawFn) -> str:
    """A recipe with some of its values replaced, as JSON, which is YAML."""
    tree = json.loads(json.dumps(draw(st.sampled_from(TREES))))
    for _ in range(draw(st.integers(1, 3))):
        node = tree
        while True:
            key = draw(st.sampled_from(sorted(node)) | st.text(max_size=8)) if node else draw(st.text(max_size=8))
            if isinstance(node.get(key), dict) and draw(st.booleans()):
                node = node[key]
                continue
            node[key] = draw(data)
            break
    return json.dumps(tree)


def check(ended: Ended) -> None:
    said = ended.out + ended.err
    assert ended.code in (0, 2, 3), (ended.code, said)
    assert "Traceback" not in said
    lines = [line for line in ended.err.splitlines() if not line.startswith("warning: ")]
    assert ended.out if ended.code == 0 else lines[0].startswith(("error: ", "Usage: ")), said
    said.encode("utf-8", "backslashreplace")


def spec_file(text: str) -> Path:
    path = FOLDER / "run.yaml"
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    return path


@pytest.mark.long
@patient
@given(changed_texts())
def test_a_changed_spec_text_gives_a_plan_or_an_error(text: str) -> None:
    check(scaletrain("plan", spec_file(text)))


@patient
@given(changed_trees())
def test_changed_spec_values_give_a_plan_or_an_error(text: str) -> None:
    check(scaletrain("plan", spec_file(text), "--json"))


@patient
@given(st.sampled_from(RECIPES), st.lists(overrides, min_size=1, max_size=3))
def test_any_override_gives_a_plan_or_an_error(recipe: Path, settings: list[str]) -> None:
    check(scaletrain("plan", recipe, *(f"--set={setting}" for setting in settings)))


@settings(patient, max_examples=settings().max_examples // 3)  # each plans several times
@given(st.sampled_from(RECIPES), st.lists(legal, min_size=1, max_size=4))
def test_any_plan_can_be_explained(recipe: Path, settings: list[str]) -> None:
    check(scaletrain("plan", recipe, "--explain", *(f"--set={setting}" for setting in settings)))


@patient
@given(
    st.sampled_from(RECIPES),
    st.sampled_from(["--vary", "--deadline", "--budget", "--trace", "--plot", "--objective", "--max-gpus", "--gpu"]),
    values | legal,
)
def test_any_value_of_an_option_gives_a_result_or_an_error(recipe: Path, option: str, value: str) -> None:
    with contextlib.chdir(FOLDER) if hasattr(contextlib, "chdir") else contextlib.nullcontext():
        check(scaletrain("plan", recipe, f"{option}={value}"))


@patient
@given(st.binary(max_size=60))
def test_any_file_gives_a_valid_spec_or_an_error(content: bytes) -> None:
    path = FOLDER / "run.yaml"
    path.write_bytes(content)
    check(scaletrain("validate", path, "--json"))
