"""init, validate, plan, schema, doctor: output and exit codes; they start no run and leave no files."""

import io
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from scaletrain_cli.errors import ExitCode
from scaletrain_cli.spec import RunSpec, load_spec
from tests.cli.command_line import PROJECT, SMALL, scaletrain
from tests.tokenizer_kinds import CHATML, LEGACY, tokenizer_json, write_tokenizer

LARGE = [pytest.param(preset, marks=pytest.mark.long) for preset in ("mixtral-8x7b", "gpt3-175b")]
TOO_LARGE = ["--set=model={preset: llama-70b}", "--set=data.tokenizer.vocab_size=4096"]


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_a_spec_written_by_init_is_valid_and_can_be_planned(tmp_path: Path) -> None:
    assert scaletrain("init").code == 0
    assert scaletrain("validate", "run.yaml").out.startswith("OK run.yaml\n")
    assert scaletrain("plan", "run.yaml").code == 0
    assert [path.name for path in tmp_path.iterdir()] == ["run.yaml"]


@pytest.mark.parametrize("preset", ["gpt2", "llama-7b", "llama-3-70b", *LARGE])
def test_init_chooses_the_fewest_nodes_that_fit_the_preset(preset: str) -> None:
    assert scaletrain("init", "--preset", preset, "-o", "a.yaml").code == 0
    assert scaletrain("plan", "a.yaml", "--json", code=0).data["memory"]["fits"]


def test_init_follows_its_options_or_rejects_them() -> None:
    spec = scaletrain("init", "--preset=gpt2", "--gpu=a100-sxm-80gb", "--nodes=3", "--gpus-per-node=4", "-o", "-").out
    assert "nodes: 3\n  gpus_per_node: 4\n  gpu: a100-sxm-80gb\n" in spec
    scaletrain("init", "--preset", "llama-3-70b", "--nodes", "1", code=ExitCode.INFEASIBLE)
    assert not Path("run.yaml").exists()


def test_a_kubernetes_spec_of_init_lacks_only_queue_and_image() -> None:
    ended = scaletrain("init", "--scheduler", "kubernetes", "--preset", "llama-7b", code=0)
    assert "your queue and image" in ended.err
    assert scaletrain("plan", "run.yaml").code == 0
    refused = scaletrain("submit", "run.yaml", "--dry-run", code=ExitCode.USAGE)
    assert "cluster.kubernetes.image: is missing." in refused.err
    text = Path("run.yaml").read_text().replace("# namespace: ml", "namespace: ml").replace("# image:", "image:")
    Path("run.yaml").write_text(text)
    alone = scaletrain("submit", "run.yaml", "--dry-run", "--set", "cluster.nodes=2", code=0)
    assert "cluster.kubernetes.queue: without one nothing schedules 2 pods together." in alone.err
    Path("run.yaml").write_text(text.replace("# queue:", "queue:"))
    assert "kueue.x-k8s.io/queue-name: team-a" in scaletrain("submit", "run.yaml", "--dry-run", code=0).out


def test_init_rejects_several_nodes_for_the_local_scheduler() -> None:
    ended = scaletrain("init", "--scheduler", "local", "--nodes", "2", code=ExitCode.USAGE)
    assert "--nodes 2 requires slurm or kubernetes" in ended.err


def test_init_names_the_file_as_requested() -> None:
    assert scaletrain("init", "mine.yaml").code == 0
    assert Path("mine.yaml").read_text() == scaletrain("init", "-").out
    both = scaletrain("init", "a.yaml", "-o", "b.yaml", code=ExitCode.USAGE)
    assert "a.yaml and --output b.yaml are both given" in both.err
    folder = scaletrain("init", ".", code=ExitCode.USAGE)
    assert ". is a folder. Give the path of a file, e.g. run.yaml." in folder.err


def test_init_chooses_the_scheduler_found_on_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    neither = scaletrain("init", "--preset", "gpt2", "-")
    assert "found neither sbatch nor a kubeconfig" in neither.err
    assert "--scheduler local" in neither.err
    tuned = scaletrain("init", "--from", folder_of_a_model(tmp_path / "model"), "-")
    assert "scheduler: local" in tuned.out
    assert "The spec is for this machine" in tuned.err
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "kubeconfig"))
    (tmp_path / "kubeconfig").touch()
    kubernetes = scaletrain("init", "--preset", "gpt2", "-")
    assert "scheduler: kubernetes" in kubernetes.out
    assert kubernetes.err == ""
    (folder / "sbatch").touch(mode=0o755)
    assert "scheduler: slurm" in scaletrain("init", "--preset", "gpt2", "-").out
    assert "scheduler: local" in scaletrain("init", "-").out  # the small model is for this machine


def test_init_copies_recipes_and_lists_them() -> None:
    ended = scaletrain("init", "--list", code=0)
    assert ended.out.startswith("recipes: clip-b32-kubernetes-spot, clip-b32-slurm, ")
    assert "gpt2-124m-a100, llama-10m-cpu, " in ended.out
    assert {line.partition(":")[0] for line in ended.out.splitlines()} == {"recipes", "presets", "accelerators"}
    assert scaletrain("init", "--recipe", "llama-7b-h100", "a.yaml").code == 0
    assert Path("a.yaml").read_text() == (PROJECT / "recipes" / "llama-7b-h100.yaml").read_text()
    Path("own").mkdir()
    assert scaletrain("init", "--recipe", "own-engine", "own/run.yaml").code == 0
    assert sorted(path.name for path in Path("own").iterdir()) == ["run.yaml", "train.py"]
    Path("pairs").mkdir()
    assert scaletrain("init", "--recipe", "clip-pairs-cpu", "pairs/run.yaml").code == 0
    assert sorted(path.name for path in Path("pairs").iterdir()) == ["clip_pairs_cpu.py", "run.yaml"]
    wrong = scaletrain("init", "--recipe", "LLaMA-7b", code=ExitCode.USAGE)
    assert "Did you mean llama-7b-h100? Known: clip-b32-kubernetes-spot," in wrong.err
    beside = scaletrain("init", "--recipe", "llama-7b-h100", "--nodes", "3", "b.yaml")
    assert "--recipe copies a complete spec" in beside.err


@pytest.mark.parametrize("folder", ["slurm", "k8s"])
def test_init_copies_the_files_for_clusters(folder: str) -> None:
    assert scaletrain("init", "--files", folder, "there").code == 0
    here = {path.relative_to("there") for path in Path("there").rglob("*") if path.is_file()}
    source = PROJECT / folder
    assert here == {
        path.relative_to(source) for path in source.rglob("*") if path.is_file() and "__pycache__" not in path.parts
    }
    assert "there already exists." in scaletrain("init", "--files", folder, "there", code=ExitCode.USAGE).err
    assert "Use slurm, k8s or grafana." in scaletrain("init", "--files", "docs", "x").err


def test_init_overwrites_nothing() -> None:
    Path("run.yaml").write_text("precious")
    assert "run.yaml already exists" in scaletrain("init", code=ExitCode.USAGE).err
    assert Path("run.yaml").read_text() == "precious"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--preset", "llama7b"], "Did you mean llama-7b? Known: gpt2,"),
        (["--gpu", "h1000"], "h100"),
        (["-o", "no/such/folder/a.yaml"], "cannot write no/such/folder/a.yaml: No such file or directory."),
    ],
)
def test_init_rejects_unknown_names_with_a_suggestion(arguments: list[str], expected: str) -> None:
    assert expected in scaletrain("init", *arguments, code=ExitCode.USAGE).err


def test_validate_shows_the_resolved_settings() -> None:
    ended = scaletrain("validate", SMALL, "--set", "training.steps=70", code=0)
    assert "training 70 steps of 16 sequences, " in " ".join(ended.out.split())
    assert ended.err == ""


def test_a_spec_is_read_from_standard_input(monkeypatch: pytest.MonkeyPatch) -> None:
    def given(text: str) -> None:
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(text.encode())))

    text = SMALL.read_text()
    given(text)
    assert scaletrain("validate", "-").out.startswith("OK <stdin>\n")
    given(text)
    assert scaletrain("plan", "-", "--vary", "layout.zero_stage=1,2").code == 0  # read once, used twice
    given(text)
    assert scaletrain("plan", "-", "--json").data["layout"]["world_size"] == 2
    given(text)
    assert "SBATCH" in scaletrain("submit", "-", "--dry-run", "--set", "cluster.scheduler=slurm").out
    given(text.replace("precision: fp32", "precision: BF16"))
    line = next(number for number, line in enumerate(text.splitlines(), 1) if "precision" in line)
    wrong = scaletrain("validate", "-", code=ExitCode.USAGE)
    assert f"  <stdin>:{line} training.precision = BF16: " in wrong.err


def test_validate_prints_the_resolved_spec() -> None:
    data = scaletrain("validate", SMALL, "--json").data
    assert (data["valid"], data["problems"]) == (True, [])
    assert RunSpec.model_validate(data["spec"]).model.head_dim == 32


@pytest.mark.parametrize("verb", ["validate", "plan", "submit", "train"])
def test_an_unknown_accelerator_is_rejected(verb: str) -> None:
    ended = scaletrain(verb, SMALL, "--set", "cluster.gpu=h100-sxm-80bg", code=ExitCode.USAGE)
    assert "Did you mean h100-sxm-80gb?" in ended.err


def test_a_plan_that_does_not_fit_is_shown_with_what_would_fit() -> None:
    ended = scaletrain("plan", SMALL, *TOO_LARGE, code=ExitCode.INFEASIBLE)
    assert "does not fit" in ended.out.splitlines()[0]
    assert "over capacity" in ended.out
    assert "does not fit on 1 x 2 cpu: the smallest layout needs" in ended.err


def test_a_plan_that_the_engine_does_not_support_is_not_submitted(tmp_path: Path) -> None:
    recipe = PROJECT / "recipes" / "llama-7b-h100.yaml"
    chunks = [*("--set", "layout.virtual_pipeline=2"), *("--set", "layout.pipeline_parallel=2")]
    chunks += ["--set", "cluster.nodes=1"]
    assert scaletrain("plan", recipe, *chunks).code == 0
    for verb in ("submit", "train"):
        assert "layout.virtual_pipeline = 2" in scaletrain(verb, recipe, *chunks, code=ExitCode.INFEASIBLE).err
    assert list(tmp_path.iterdir()) == []


def test_doctor_checks_every_part_of_the_machine() -> None:
    ended = scaletrain("doctor", code=0)
    checks = {check["name"]: check for check in scaletrain("doctor", "--json").data["checks"]}
    assert checks.keys() >= {"python", "scaletrain", "[train]", "cores", "memory", "compiler", "slurm", "runs"}
    assert {check["state"] for check in checks.values()} <= {"ok", "warn", "none"}
    assert all(check["advice"] for check in checks.values() if check["state"] != "ok")
    assert all(name in ended.out for name in checks)


def test_doctor_names_a_package_that_another_one_hides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not by importing it: torch takes seconds."""
    (tmp_path / "submitit.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "submitit", raising=False)
    checks = {check["name"]: check for check in scaletrain("doctor", "--json").data["checks"]}
    assert (checks["[slurm]"]["state"], str(tmp_path) in checks["[slurm]"]["advice"]) == ("warn", True)
    assert checks["[mlflow]"]["state"] == "ok"  # installed as mlflow-skinny


def test_doctor_reports_tools_that_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "bin"
    folder.mkdir()
    for name, body in {"scontrol": "echo down >&2; exit 1", "sbatch": ""}.items():
        (folder / name).write_text(f"#!/bin/sh\n{body}\n")
        (folder / name).chmod(0o755)
    for name in ("srun", "squeue", "sacct"):
        (folder / name).symlink_to(folder / "sbatch")
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    checks = {check["name"]: check for check in scaletrain("doctor", "--json").data["checks"]}
    assert checks["slurm"]["advice"] == "scontrol ping failed: down"


FAKE_NVML = PROJECT / "tests" / "launch" / "node" / "fake_nvml"


def gpu_checks(monkeypatch: pytest.MonkeyPatch, **state: object) -> list[dict[str, str]]:
    """Return the GPU checks of doctor with a driver that reports ``state``."""
    monkeypatch.setenv("PYTHONPATH", str(FAKE_NVML))
    monkeypatch.setenv("FAKE_NVML", json.dumps(state))
    installed = SimpleNamespace(util=SimpleNamespace(find_spec=lambda name: object()))
    monkeypatch.setattr("scaletrain_cli.launch.node.gpu_health.importlib", installed)
    checks = scaletrain("doctor", "--json").data["checks"]
    return [check for check in checks if check["name"].startswith("gpu")]


def test_doctor_reports_each_gpu_of_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    healthy, broken = gpu_checks(monkeypatch, gpus=[{}, {"rows": [0, 0, 0, 1]}])
    found = "NVIDIA H100 80GB HBM3, 79.6 GiB, driver 550.127.05"
    assert healthy == {"name": "gpu 0", "state": "ok", "found": found, "advice": ""}
    assert (broken["name"], broken["state"], broken["found"]) == ("gpu 1", "warn", found)
    assert "remapped row failure" in broken["advice"]


def test_doctor_reports_no_gpu_where_there_is_no_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    (check,) = gpu_checks(monkeypatch, init_error=12, gpus=[])
    assert (check["state"], check["found"]) == ("none", "no NVIDIA driver")


def test_doctor_warns_about_a_driver_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("scaletrain_cli.launch.node.gpu_health._DRIVER_SECONDS", 0.5)
    (check,) = gpu_checks(monkeypatch, hang=30, gpus=[])
    assert check["state"] == "warn"
    assert "did not respond" in check["advice"]


def test_piped_output_has_no_colors_and_no_trailing_spaces() -> None:
    for arguments in (["plan", SMALL], ["validate", SMALL], ["doctor"], ["plan", SMALL, *TOO_LARGE]):
        ended = scaletrain(*arguments)
        lines = (ended.out + ended.err).splitlines()
        assert lines
        for line in lines:
            assert "\x1b" not in line
            assert line == line.rstrip()


def folder_of_a_model(folder: Path) -> Path:
    """Write what a spec reads of a small Llama: its config.json and a tokenizer of its size."""
    folder.mkdir()
    config = {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config |= {"intermediate_size": 128, "vocab_size": 512, "max_position_embeddings": 256, "unread": 1}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {"a": 0}}, "added_tokens": []}))
    return folder


TURNS = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello there. " * 30}]
FINE_TUNINGS = {
    "chats": ("a.jsonl", json.dumps({"messages": TURNS}), "sft", "best_fit", 2e-5),
    "pairs": ("a.jsonl", json.dumps({"prompt": "Hi", "chosen": "yes", "rejected": "no"}), "dpo", "none", 5e-7),
    "text": ("a.txt", "Once upon a time", "causal_lm", "none", 2e-5),
}


@pytest.mark.parametrize(("name", "row", "objective", "packing", "rate"), FINE_TUNINGS.values(), ids=FINE_TUNINGS)
@pytest.mark.parametrize("lora", [False, True], ids=["whole", "lora"])
def test_init_writes_a_fine_tuning(name: str, row: str, objective: str, packing: str, rate: float, lora: bool) -> None:
    model = folder_of_a_model(Path("tiny-chat"))
    Path(name).write_text(f"{row}\n" * 60)
    options = ("--from", str(model), "--data", name, "--gpu=cpu", "--scheduler=local", "--gpus-per-node=1")
    assert scaletrain("init", *options, *(["--lora"] if lora else [])).code == 0
    spec = load_spec(Path("run.yaml"))
    assert (spec.name, spec.training.objective, spec.data.packing) == ("tiny-chat", objective, packing)
    assert (spec.transformer.hidden_size, spec.transformer.weights) == (64, "tiny-chat")
    assert spec.data.tokenizer.path == "tiny-chat/tokenizer.json"
    assert (spec.transformer.adapter is not None) == lora
    assert spec.training.optimizer.lr == pytest.approx(rate * (10 if lora else 1))
    size_is_known = objective != "causal_lm"  # that of text is not, before it is tokenized
    assert (spec.training.epochs, spec.training.steps) == ((3, None) if size_is_known else (None, 1000))
    if objective == "dpo":
        planned = scaletrain("plan", "run.yaml")
        steps = -(-3 * round(60 * 0.95) // spec.training.global_batch_size)
        assert f"3 epochs of about 57 pairs = about {steps} steps of 2;" in planned.err
        assert f"for all {steps} steps" in planned.out


def test_init_states_a_class_for_a_tokenizer_whose_own_class_has_other_tokens() -> None:
    model = folder_of_a_model(Path("tiny-chat"))
    document = json.loads(tokenizer_json("metaspace", ("<s>", "</s>", "<|im_start|>", "<|im_end|>"))) | LEGACY
    settings = {"tokenizer_class": "LlamaTokenizer", "eos_token": "</s>", "chat_template": CHATML}
    config = json.loads((model / "config.json").read_text()) | {"vocab_size": 768}
    write_tokenizer(model, json.dumps(document), settings, config=config)
    Path("a.jsonl").write_text(f"{json.dumps({'messages': TURNS})}\n" * 60)
    options = ("--from", str(model), "--data", "a.jsonl", "--gpu=cpu", "--scheduler=local", "--gpus-per-node=1")
    assert scaletrain("init", *options).code == 0
    assert load_spec(Path("run.yaml")).data.tokenizer.tokenizer_class == "PreTrainedTokenizerFast"
    for options, is_refused in (((), False), (("--set", "data.tokenizer.tokenizer_class=null"), True)):
        said = " ".join(scaletrain("validate", "run.yaml", *options).err.split())
        assert ("data.tokenizer.tokenizer_class: PreTrainedTokenizerFast" in said) == is_refused


def test_init_refuses_what_it_cannot_fine_tune() -> None:
    Path("a.jsonl").write_text('{"question": "a"}\n')
    folder_of_a_model(Path("m"))
    for options, said in (
        (("--data", "a.jsonl"), "--data needs a model to fine-tune. Give --from."),
        (("--lora",), "--lora needs a model to fine-tune"),
        (("--from", "nowhere"), "nowhere config.json: cannot be read: No such file"),
        (("--from", "m", "--data", "none.jsonl"), "--data = none.jsonl: no such file or folder"),
        (("--from", "m", "--data", "a.jsonl"), "a.jsonl:1: the columns question fit no format of rows"),
        (("--from", "m", "--preset", "gpt2"), "m and --preset gpt2 are both given"),
    ):
        assert said in " ".join(scaletrain("init", *options, code=ExitCode.USAGE).err.split())
    assert not Path("run.yaml").exists()
