import errno
import json
import os
import re
import resource
import signal
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from scaletrain_cli.engine.checkpoint.export import export
from scaletrain_cli.engine.checkpoint.shard_file import (
    Entry,
    ShardHeader,
    Slice,
    shard_name,
    shard_parts,
    write_parts,
)
from scaletrain_cli.engine.checkpoint.tokenizer_export import TextFiles, text_files
from scaletrain_cli.engine.data.prepared import prepare_rows
from scaletrain_cli.engine.model import outline
from scaletrain_cli.engine.model.attention import TokenContext
from scaletrain_cli.engine.model.materialization import materialize
from scaletrain_cli.engine.model.safetensors import HuggingFaceFolder
from scaletrain_cli.engine.parallel.mesh import ShardSpec
from scaletrain_cli.errors import ScaletrainError, UsageError
from scaletrain_cli.rundir.checkpoints import MANIFEST, manifest_hash
from scaletrain_cli.spec import DataSpec, ModelSpec, RunSpec, parse_spec
from scaletrain_cli.spec.hugging_face_weights import config_mismatches, to_hugging_face
from tests.engine.model.test_safetensors import GPT, LLAMA, MIXTURE, MODELS, contents, loaded
from tests.prepared_text import prepared_text
from tests.spec.samples import SPEC

MIXTRAL = {**MIXTURE, "norm_topk_prob": True}
QWEN3_MOE = {**MIXTURE, "qk_norm": True}
NO_TEXT = TextFiles({}, dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")))
EXPORTED = {
    "llama": MODELS["llama"],
    "llama tied": MODELS["tied"],
    "qwen2": MODELS["qwen2"],
    "qwen3": MODELS["qwen3"],
    "gpt2": GPT,
    "mixtral": MIXTRAL,
    "qwen3_moe": QWEN3_MOE,
    "qwen3 without sparse blocks": {**QWEN3_MOE, "mlp_only_layers": [0, 1], "swiglu_limit": 1.0},
    "qwen2 without sparse blocks": {**MIXTURE, "qkv_bias": True, "decoder_sparse_step": 3},
}

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
STRETCHED = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "llama3": {**LLAMA3, "original_max_position_embeddings": 64},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
    "yarn of the whole context": {"rope_type": "yarn", "factor": 2.0},
    "yarn with all": {
        **{"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "beta_fast": 8.0},
        **{"beta_slow": 2.0, "mscale": 0.7, "mscale_all_dim": 1.2, "truncate": False},
    },
    "yarn with its attention": {"rope_type": "yarn", "factor": 4.0, "attention_factor": 1.3},
}
STRETCHED_MODELS = {
    name: {**LLAMA, "head_dim": 16, "max_position_embeddings": 64, "rope_scaling": scaling}
    for name, scaling in STRETCHED.items()
}


def spec_of(dims: dict[str, Any]) -> RunSpec:
    sample = parse_spec(SPEC, file="run.yaml", base_dir=Path())
    return sample.model_copy(update={"model": ModelSpec.model_validate(dims)})


def checkpoint_of(folder: Path, weights: dict[str, Tensor], kinds: tuple[str, ...] = ("weight",)) -> Path:
    """Save a checkpoint as three ranks would: two have shards of matrices by columns, the third has the rest."""
    folder.mkdir()
    files = {}
    for rank in range(3):
        slices, entries = {}, []
        for name, values in weights.items():
            spec = ShardSpec(1, 2, rank) if values.dim() == 2 and values.shape[1] % 2 == 0 else None
            if rank == 2 if spec is None else rank < 2:
                mine = values if spec is None else replace(spec).take(values)
                slices[name] = Slice(name, tuple(values.shape), spec, 0, mine.numel())
                entries += [Entry(f"{kind}/{name}", mine.flatten() + (kind != "weight")) for kind in kinds]
        digest = write_parts(folder / shard_name(rank), shard_parts(ShardHeader(rank, slices, {}), entries))
        files[shard_name(rank)] = asdict(digest)
    step = int(folder.name.removeprefix("step-"))
    manifest = {"step": step, "world_size": 3, "clean": True, "attempt": 1, "files": files}
    (folder / MANIFEST).write_text(json.dumps({**manifest, "sha256": manifest_hash(manifest)}))
    return folder


@pytest.mark.parametrize(("kind", "dims"), EXPORTED.items(), ids=EXPORTED.keys())
def test_exported_weights_equal_the_trained_ones(kind: str, dims: dict[str, Any], tmp_path: Path) -> None:
    weights = contents(dims)
    saved = [checkpoint_of(tmp_path / "step-00000001", weights)]
    reported = export(saved, spec_of(dims), tmp_path / "out", torch.float32, NO_TEXT)
    assert reported["model_type"] == kind.split()[0]
    assert reported["parameters"] == sum(values.numel() for values in weights.values())
    torch.testing.assert_close(loaded(tmp_path / "out", dims), weights, rtol=0, atol=0)
    assert list(config_mismatches(tmp_path / "out", ModelSpec.model_validate(dims))) == []
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["torch_dtype"], len(config["architectures"])) == ("float32", 1)
    assert len({path.stat().st_mode for path in (tmp_path / "out").iterdir()}) == 1


def test_large_exports_are_split_with_an_index(tmp_path: Path) -> None:
    weights = contents(LLAMA)
    folder = checkpoint_of(tmp_path / "step-00000001", weights)
    export([folder], spec_of(LLAMA), tmp_path / "out", torch.bfloat16, NO_TEXT, largest_file_bytes=2_000)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    files = sorted(path.name for path in (tmp_path / "out").glob("*.safetensors"))
    assert len(files) > 2
    assert files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    assert sorted(set(index["weight_map"].values())) == files
    assert index["metadata"]["total_size"] == 2 * sum(values.numel() for values in weights.values())
    expected = {name: values.bfloat16().float() for name, values in weights.items()}
    torch.testing.assert_close(loaded(tmp_path / "out", LLAMA), expected, rtol=0, atol=0)


def test_averaged_weights_are_exported_if_the_checkpoint_has_them(tmp_path: Path) -> None:
    weights = contents(LLAMA)
    both = checkpoint_of(tmp_path / "step-00000001", weights, ("weight", "average"))
    export([both], spec_of(LLAMA), tmp_path / "out", torch.float32, NO_TEXT, averaged=True)
    expected = {name: values + 1 for name, values in weights.items()}
    torch.testing.assert_close(loaded(tmp_path / "out", LLAMA), expected, rtol=0, atol=0)
    without = [checkpoint_of(tmp_path / "step-00000002", weights)]
    with pytest.raises(UsageError, match=r"has no averaged weights\. A run has them with"):
        export(without, spec_of(LLAMA), tmp_path / "x", torch.float32, NO_TEXT, averaged=True)


def test_the_mean_of_checkpoints_is_computed_in_fp32_and_rounded_once(tmp_path: Path) -> None:
    drawn = [{name: values + torch.randn_like(values) for name, values in contents(LLAMA).items()} for _ in range(3)]
    folders = [checkpoint_of(tmp_path / f"step-{step:08d}", weights) for step, weights in enumerate(drawn, start=1)]
    export(folders, spec_of(LLAMA), tmp_path / "out", torch.bfloat16, NO_TEXT)
    mean = {name: torch.stack([weights[name] for weights in drawn]).mean(0).bfloat16().float() for name in drawn[0]}
    torch.testing.assert_close(loaded(tmp_path / "out", LLAMA), mean, rtol=0, atol=0)


def test_the_weights_of_an_export_are_on_the_disk_before_it_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine that loses power after an export must not have an empty file under the name of the weights."""
    synced: list[str] = []

    def note(descriptor: int) -> None:
        synced.append(Path(f"/proc/self/fd/{descriptor}").readlink().name)

    monkeypatch.setattr(os, "fsync", note)
    folder = checkpoint_of(tmp_path / "step-00000001", contents(LLAMA))
    export([folder], spec_of(LLAMA), tmp_path / "out", torch.float32, NO_TEXT, largest_file_bytes=5000)
    files = {path.name for path in (tmp_path / "out").iterdir()}
    assert len([name for name in files if name.endswith(".safetensors")]) > 1
    assert files <= {*synced}


def test_an_export_to_a_full_disk_ends_with_the_error_of_the_system(tmp_path: Path) -> None:
    """A limit on the size of files stands for the disk."""
    folder, limits = (
        checkpoint_of(tmp_path / "step-00000001", contents(LLAMA)),
        resource.getrlimit(resource.RLIMIT_FSIZE),
    )
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large") as raised:
            export([folder], spec_of(LLAMA), tmp_path / "out", torch.float32, NO_TEXT)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert (raised.value.errno, Path(raised.value.filename).name) == (errno.EFBIG, "model.safetensors")
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]


KILLED = """
import os, signal, sys
from scaletrain_cli.engine.checkpoint.export import run_command

os.fsync = lambda descriptor: os.kill(os.getpid(), signal.SIGKILL)
run_command(sys.argv[1:])
"""


def test_what_killed_exports_to_a_folder_have_left_is_removed_by_the_next_one(tmp_path: Path) -> None:
    folder, spec = checkpoint_of(tmp_path / "step-00000001", contents(LLAMA)), tmp_path / "spec.json"
    spec.write_text(spec_of(LLAMA).model_dump_json(by_alias=True))
    words = [spec, tmp_path / "[out]", tmp_path / "runs", folder]
    assert subprocess.run([sys.executable, "-c", KILLED, *map(str, words)]).returncode == -signal.SIGKILL
    (left,) = tmp_path.glob(".*.tmp")
    of_the_user, of_others = tmp_path / ".[out].old.tmp", tmp_path / ".other.0123456789abcdef.tmp"
    of_the_user.mkdir()
    of_others.mkdir()
    export([folder], spec_of(LLAMA), tmp_path / "[out]", torch.float32, NO_TEXT)
    assert not left.exists()
    assert {*tmp_path.iterdir()} == {folder, spec, tmp_path / "[out]", of_the_user, of_others}


def test_what_a_living_export_writes_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = checkpoint_of(tmp_path / "step-00000001", contents(LLAMA))
    drafts: list[Path] = []

    def export_beside(descriptor: int) -> None:
        monkeypatch.undo()
        export([folder], spec_of(LLAMA), tmp_path / "out", torch.float32, NO_TEXT)
        drafts.extend(tmp_path.glob(".out.*.tmp"))

    monkeypatch.setattr(os, "fsync", export_beside)
    with pytest.raises(OSError, match="not empty"):
        export([folder], spec_of(LLAMA), tmp_path / "out", torch.float32, NO_TEXT)
    assert len(drafts) == 1
    torch.testing.assert_close(loaded(tmp_path / "out", LLAMA), contents(LLAMA), rtol=0, atol=0)
    assert {path.name for path in tmp_path.iterdir()} == {"step-00000001", "out"}


def test_a_failed_export_leaves_no_files_and_an_existing_folder_is_not_changed(tmp_path: Path) -> None:
    weights = contents(LLAMA)
    del weights["model.norm.weight"]
    folder = checkpoint_of(tmp_path / "step-00000001", weights)
    with pytest.raises(ScaletrainError, match=r"0 of 16 values of weight/model\.norm\.weight"):
        export([folder], spec_of(LLAMA), tmp_path / "out", torch.float32, NO_TEXT)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]
    (tmp_path / "out").mkdir()
    with pytest.raises(UsageError, match="exists and is not overwritten"):
        export([folder], spec_of(LLAMA), tmp_path / "out", torch.float32, NO_TEXT)


@pytest.mark.parametrize(("dtype", "value"), [(torch.float16, 65_520.0), (torch.bfloat16, 3.4e38)])
def test_a_weight_that_is_too_large_for_the_type_of_an_export_is_refused(
    dtype: torch.dtype, value: float, tmp_path: Path
) -> None:
    weights, name = contents(LLAMA), "model.layers.1.mlp.down_proj.weight"
    weights[name][3, 2] = -value
    folder = checkpoint_of(tmp_path / "step-00000001", weights)
    with pytest.raises(UsageError, match=re.escape(f"{name} has values up to {value:g}, too large for ")) as refused:
        export([folder], spec_of(LLAMA), tmp_path / "out", dtype, NO_TEXT, largest_file_bytes=2_000)
    assert "--dtype fp32" in str(refused.value)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]
    export([folder], spec_of(LLAMA), tmp_path / "out", torch.float32, NO_TEXT)
    assert loaded(tmp_path / "out", LLAMA)[name][3, 2] == -torch.tensor(value)


def test_the_largest_weight_of_fp16_and_infinite_ones_of_the_checkpoint_are_exported(tmp_path: Path) -> None:
    weights, name = contents(LLAMA), "model.norm.weight"
    weights[name][:2] = torch.tensor([65_504.0, torch.inf])
    folder = checkpoint_of(tmp_path / "step-00000001", weights)
    export([folder], spec_of(LLAMA), tmp_path / "out", torch.float16, NO_TEXT)
    assert loaded(tmp_path / "out", LLAMA)[name][:2].tolist() == [65_504.0, torch.inf]


@pytest.mark.parametrize(
    ("dims", "key"),
    [
        ({**MODELS["qwen3"], "qkv_bias": True}, "model.qk_norm"),
        ({**MIXTURE}, "model.norm_topk_prob"),
        ({**QWEN3_MOE, "shared_expert_intermediate_size": 8}, "model.shared_expert_intermediate_size"),
        ({**LLAMA, "position_embedding": "alibi"}, "model.position_embedding"),
        ({**MIXTRAL, "bias": True, "router_bias": True, "attention_sinks": True}, "model.swiglu_limit"),
    ],
)
def test_a_model_without_hugging_face_architecture_is_rejected(dims: dict[str, Any], key: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no Hugging Face architecture") as caught:
        export([tmp_path], spec_of(dims), tmp_path / "out", torch.float32, NO_TEXT)
    assert [problem.key for problem in caught.value.problems] == [key]


@pytest.mark.parametrize("name", STRETCHED)
def test_rope_scaling_is_unchanged_after_export_and_import(name: str, tmp_path: Path) -> None:
    model = ModelSpec.model_validate(STRETCHED_MODELS[name])
    (tmp_path / "config.json").write_text(json.dumps(to_hugging_face(model)))
    assert list(config_mismatches(tmp_path, model)) == []
    (problem,) = config_mismatches(tmp_path, model.model_copy(update={"rope_scaling": None}))
    assert problem.key == "rope_scaling"


COMPUTED = {**EXPORTED, **STRETCHED_MODELS}


@pytest.mark.parametrize("dims", COMPUTED.values(), ids=COMPUTED.keys())
def test_transformers_computes_the_same_logits(dims: dict[str, Any], tmp_path: Path) -> None:
    spec = spec_of(dims)
    weights = {name: values * 0.1 for name, values in contents(dims).items()}
    export([checkpoint_of(tmp_path / "step-00000001", weights)], spec, tmp_path / "out", torch.float32, NO_TEXT)
    ours = outline(spec.transformer)
    materialize(ours, HuggingFaceFolder(tmp_path / "out", outline(spec.transformer)), torch.device("cpu"))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    length = spec.transformer.max_position_embeddings
    tokens = torch.randint(0, 32, (2, length), generator=torch.Generator().manual_seed(1))
    context = TokenContext(torch.arange(length), torch.arange(2))
    with torch.no_grad():
        hidden = ours.final_norm(ours.transform(ours.embed(tokens, context), context))
        found = torch.nn.functional.linear(hidden, ours.lm_head.weight)
        torch.testing.assert_close(found, theirs(tokens).logits, rtol=1e-5, atol=1e-6)


def text_spec(tmp_path: Path, **model: Any) -> RunSpec:
    if not (tmp_path / "corpus.txt").exists():
        (tmp_path / "corpus.txt").write_text("a document of words\n\nanother document of words\n" * 20)
    dims = {**LLAMA, "vocab_size": 300, **model}
    data = {"source": str(tmp_path / "corpus.txt"), "tokenizer": {"kind": "bpe", "vocab_size": 280}}
    return spec_of(dims).model_copy(update={"data": DataSpec.model_validate(data)})


def ends_at_once(dims: dict[str, Any], end: int) -> dict[str, Tensor]:
    """Weights of a model that always predicts the token ``end``."""
    weights = {name: torch.zeros_like(values) for name, values in contents(dims).items()}
    weights["model.norm.weight"] += 1
    weights["model.embed_tokens.weight"] += 1
    weights["lm_head.weight"][end] = 1
    return weights


def test_transformers_loads_an_exported_folder_and_generates_up_to_the_end_of_text(tmp_path: Path) -> None:
    spec = text_spec(tmp_path)
    prepared_text(spec.data, tmp_path / "runs")
    text = text_files(spec, tmp_path / "runs")
    end = text.ids["eos_token_id"]
    weights = ends_at_once(spec.transformer.model_dump(), end)
    export([checkpoint_of(tmp_path / "step-00000001", weights)], spec, tmp_path / "out", torch.float32, text)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert (tokenizer.eos_token, tokenizer.eos_token_id, tokenizer.pad_token_id) == ("<|endoftext|>", end, end)
    assert tokenizer.decode(tokenizer("a document of words").input_ids) == "a document of words"
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert (model.config.bos_token_id, model.config.eos_token_id) == (end, end)
    given = tokenizer("a document", return_tensors="pt")
    made = model.generate(**given, max_new_tokens=6, do_sample=False)
    assert made[0].tolist() == [*given.input_ids[0].tolist(), end]
    files = {path.name for path in (tmp_path / "out").iterdir()}
    assert files >= {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"}


def test_tokenizer_files_of_loaded_weights_are_exported(tmp_path: Path) -> None:
    spec = text_spec(tmp_path)
    prepared_text(spec.data, tmp_path / "runs")
    base = tmp_path / "base"
    base.mkdir()
    made = (prepared_text(spec.data, tmp_path / "runs") / "tokenizer.json").read_bytes()
    (base / "tokenizer.json").write_bytes(made)
    kept = {
        "config.json": {"model_type": "llama", "eos_token_id": [0, 7], "bos_token_id": 5},
        "generation_config.json": {"eos_token_id": [0, 7], "temperature": 0.6, "do_sample": True},
        "tokenizer_config.json": {"eos_token": "<|endoftext|>", "chat_template": "{{ messages }}"},
    }
    for name, content in kept.items():
        (base / name).write_text(json.dumps(content))
    (base / "chat_template.jinja").write_text("{{ messages }}")
    tuned = text_spec(tmp_path, weights=str(base))
    text = text_files(tuned, tmp_path / "runs")
    assert text.ids == {"bos_token_id": 5, "eos_token_id": [0, 7]}
    assert json.loads(text.files["generation_config.json"]) == kept["generation_config.json"]
    assert json.loads(text.files["tokenizer_config.json"]) == kept["tokenizer_config.json"]
    assert text.files["chat_template.jinja"] == b"{{ messages }}"
    (base / "tokenizer.json").write_bytes(made.replace(b"<|endoftext|>", b"<eos>"))
    other = text_files(tuned, tmp_path / "runs")  # the data were made with another tokenizer: nothing of theirs fits
    assert other.ids == dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), 0)
    assert "chat_template.jinja" not in other.files


def test_without_a_tokenizer_no_token_id_is_exported(tmp_path: Path) -> None:
    spec = text_spec(tmp_path)
    text = text_files(spec, tmp_path / "runs")
    assert "tokenizer.json" not in text.files
    weights = contents(spec.transformer.model_dump())
    export([checkpoint_of(tmp_path / "step-00000001", weights)], spec, tmp_path / "out", torch.float32, text)
    config = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").config
    assert (config.bos_token_id, config.eos_token_id) == (None, None)


def test_a_fine_tuned_model_is_exported_with_its_chat_template_and_end_of_turn(tmp_path: Path) -> None:
    rows = [{"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello."}]}] * 20
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    spec = text_spec(tmp_path, seq_len=64)
    data = {"source": str(tmp_path / "rows.jsonl"), "tokenizer": {"kind": "bpe", "vocab_size": 280}}
    training = spec.training.model_copy(update={"objective": "sft"})
    spec = spec.model_copy(update={"data": DataSpec.model_validate(data), "training": training})
    prepare_rows(spec, tmp_path / "runs")
    text = text_files(spec, tmp_path / "runs")
    weights = ends_at_once(spec.transformer.model_dump(), text.ids["eos_token_id"])
    export([checkpoint_of(tmp_path / "step-00000001", weights)], spec, tmp_path / "out", torch.float32, text)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    config = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").generation_config
    assert (tokenizer.eos_token, tokenizer.eos_token_id) == ("<|im_end|>", config.eos_token_id)
    rendered = tokenizer.apply_chat_template(rows[0]["messages"], tokenize=False)
    assert rendered == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello.<|im_end|>\n"
    template = tmp_path / "own.jinja"
    template.write_text("{% for message in messages %}{{ message.content }}<|im_end|>{% endfor %}")
    own = spec.model_copy(update={"data": spec.data.model_copy(update={"chat_template": str(template)})})
    prepare_rows(own, tmp_path / "runs")
    assert text_files(own, tmp_path / "runs").files["chat_template.jinja"] == template.read_bytes()
