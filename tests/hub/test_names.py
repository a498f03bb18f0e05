"""`scaletrain plan hf://...` and `scaletrain init hf://...`: by config.json alone, as with a spec file."""

import json
from pathlib import Path

import pytest

from scaletrain_cli.spec import load_spec, parse_spec
from tests.cli.command_line import scaletrain
from tests.hub.server import Hub
from tests.model_sizes import model_sizes

# Published: https://huggingface.co/meta-llama/Llama-3.1-8B/blob/main/config.json
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "rms_norm_eps": 1e-05,
    "rope_theta": 500000.0,
    "rope_scaling": {
        "factor": 8.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    **model_sizes(hidden=4096, intermediate=14336, layers=32, heads=32, kv_heads=8, vocab=128256, positions=131072),
}
NAME = "hf://meta/Llama-3.1-8B"


@pytest.fixture
def llama(hub: Hub) -> Hub:
    files = {"config.json": json.dumps(LLAMA).encode(), "tokenizer.json": b"{}", "model.safetensors": b"never read"}
    hub.add("meta/Llama-3.1-8B", files)
    return hub


def test_a_model_is_planned_by_its_name_from_its_config_alone(llama: Hub) -> None:
    plan = json.loads(scaletrain("plan", NAME, "--gpus", "8", "--json", code=0).out)
    assert plan["model"]["parameters"] == 8_030_261_248  # the number that the hub shows for it
    assert plan["layout"]["world_size"] == 8
    assert {one.path.rpartition("/")[2] for one in llama.log if "/resolve/" in one.path} == {"config.json"}
    assert sum("/api/models/" in one.path for one in llama.log) == 1


def test_gpu_and_number_of_gpus_are_those_of_the_plan(llama: Hub) -> None:
    ended = scaletrain("plan", NAME, "--gpus", "16", "--gpu", "a100-sxm-80gb", "--json")
    plan = json.loads(ended.out)
    assert plan["layout"]["world_size"] == 16
    assert 80e9 < plan["memory"]["capacity"] < 90e9
    scaletrain("plan", NAME, "--gpus", "1", "--gpu", "rtx-4090", code=3)
    assert scaletrain("plan", NAME, "--gpus", "8", "--set", "layout.zero_stage=3", "--json").code == 0


def test_the_plan_by_name_is_that_of_the_spec_that_init_writes(llama: Hub, tmp_path: Path) -> None:
    spec = tmp_path / "run.yaml"
    scaletrain("init", NAME, str(spec), "--scheduler", "local", "--gpus-per-node", "8", code=0)
    found = load_spec(spec)
    assert (found.transformer.weights, found.data.tokenizer.path) == (NAME, NAME)
    assert found.transformer.rope_scaling is not None
    by_file, by_name = (json.loads(scaletrain("plan", what, "--json").out) for what in (str(spec), NAME))
    assert by_file == by_name


def test_init_names_the_token_of_a_gated_model_and_keeps_a_revision(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_accepted")
    hub.tokens |= {"hf_accepted"}
    commit = hub.add("meta/gated", {"config.json": json.dumps(LLAMA).encode()}, gated=True)
    text = scaletrain("init", f"hf://meta/gated@{commit}", "-", "--scheduler", "slurm").out
    assert f"weights: hf://meta/gated@{commit}" in text
    assert "# secret_env: [HF_TOKEN]" in text
    assert "no tokenizer.json" in text
    parse_spec(text, file="text", base_dir=Path())


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("plan", "hf://meta/none"), "no repository meta/none"),
        (("plan", "hf://datasets/meta/x"), "names a data set"),
        (("plan", "hf://meta"), "no repository meta"),
        (("plan", "hf://meta/name@@x"), "no valid revision"),
        (("plan", "hf://meta/strange"), "model_type 'strange'"),
        (("plan", NAME, "--gpus", "9"), "--gpus 9 is not a multiple of 8"),
        (("init", NAME, "--preset", "gpt2"), "Give only one"),
        (("init", NAME, "hf://meta/other"), "at most one hf://org/name"),
        (("init", "hf://meta/none"), "no repository meta/none"),
    ],
)
def test_what_cannot_be_planned_by_name_has_one_clear_error(llama: Hub, words: tuple[str, ...], expected: str) -> None:
    llama.add("meta/strange", {"config.json": b'{"model_type": "strange"}'})
    assert expected in " ".join(scaletrain(*words, code=2).err.split())


def test_gpus_without_a_model_of_the_hub_is_refused() -> None:
    ended = scaletrain("plan", "recipes/llama-10m-cpu.yaml", "--gpus", "8", code=2)
    assert "--gpus requires hf://org/name" in ended.err


def test_two_models_are_compared_by_name(llama: Hub) -> None:
    llama.add("meta/small", {"config.json": json.dumps({**LLAMA, "num_hidden_layers": 8}).encode()})
    ended = scaletrain("plan", NAME, "hf://meta/small", "--json")
    assert [run["name"] for run in json.loads(ended.out)["runs"]] == ["llama-3.1-8b", "small"]
