import json
import re
import typing
from collections.abc import Iterator
from pathlib import Path

import pytest
from pydantic import BaseModel

from scaletrain_cli.errors import ExitCode
from scaletrain_cli.spec import LlavaSpec, ModelSpec, RunSpec, override_spec
from scaletrain_cli.spec.section import UsedWhen
from scaletrain_cli.spec.vision_model import VISION
from tests.cli.command_line import SMALL, scaletrain
from tests.spec.samples import PROJECT, RECIPES, SPEC, error, load, problem

GPT = SPEC.replace("family: llama", "family: gpt")
SFT = ("training.objective=sft", "data.source=python-docstrings")
DPO = ("training.objective=dpo", "data.source=python-docstrings")
IMAGES = ("model={family: resnet, hidden_sizes: [64], depths: [1]}", "data.source=pictures")
GROUP_NORM = ("model={family: resnet, hidden_sizes: [128], depths: [1], norm: group}", "data.source=pictures")
VIT = ("model={preset: vit-base-patch16}", "data.source=pictures")
TOWER = "{hidden_size: 8, num_hidden_layers: 1, num_attention_heads: 1, intermediate_size: 8}"
CLIP = (f"model={{family: clip, vision_config: {TOWER}, text_config: {TOWER}}}", "data.source=pictures")
LLAVA = ("model={preset: llava-tiny}", "data.source=chats.jsonl")
VIEWS = (*IMAGES, "training.objective=contrastive", "training.loss.name=nt_xent", "evaluation.every=0")
LATENT = ("model.kv_lora_rank=8", "model.qk_rope_head_dim=4")
EXPERTS = ("model.num_experts=2", "model.num_experts_per_tok=1")
TWO_SOURCES = "[{name: web, path: /w, weight: 1}, {name: code, path: /c, weight: 1}]"
# For each key with a condition: a value, settings with which it has no effect, and settings with which it has one.
OWN_PATTERN = "data.tokenizer={kind: tiktoken, path: t, pattern: a, special_tokens: [</s>]}"
CASES: dict[str, tuple[str, tuple[str, ...], tuple[str, ...]]] = {
    "model.rope_theta": ("5e5", ("model.family=gpt",), ("model.family=llama",)),
    "model.qkv_bias": ("true", ("model.bias=true",), ("model.bias=false",)),
    "model.attention_bias": ("true", ("model.bias=true",), ("model.bias=false",)),
    "model.index_n_heads": ("4", (), (*LATENT, "model.index_topk=4", "model.index_head_dim=4")),
    "model.index_head_dim": ("4", (), (*LATENT, "model.index_topk=4", "model.index_n_heads=4")),
    "model.qk_norm_scope": ("projection", (), ("model.qk_norm=true",)),
    "model.rope_interleave": ("false", (), ("model.kv_lora_rank=8", "model.qk_rope_head_dim=4")),
    "model.partial_rotary_factor": ("0.5", ("model.family=gpt",), ("model.family=llama",)),
    "model.rope_local_base_freq": (
        "5",
        ("model.family=gpt", "model.sliding_window=8"),
        ("model.family=llama", "model.sliding_window=8"),
    ),
    "model.router_aux_loss_coef": ("0.5", (), EXPERTS),
    "model.decoder_sparse_step": ("2", (), EXPERTS),
    "model.mlp_only_layers": ("[0]", (), EXPERTS),
    "model.scoring_func": ("sigmoid", (), EXPERTS),
    "model.topk_method": ("noaux_tc", (), EXPERTS),
    "model.n_group": ("2", EXPERTS, (*EXPERTS, "model.topk_method=group_limited_greedy")),
    "model.topk_group": ("2", EXPERTS, (*EXPERTS, "model.topk_method=group_limited_greedy", "model.n_group=2")),
    "model.routed_scaling_factor": ("2.5", (), EXPERTS),
    "model.bias_update_speed": ("0.001", EXPERTS, (*EXPERTS, "model.topk_method=noaux_tc")),
    "model.router_bias": ("true", (), EXPERTS),
    "data.tokenizer.vocab_size": ("99", ("data.tokenizer={kind: file, path: t.json}",), ()),
    "data.tokenizer.tokenizer_class": ("PreTrainedTokenizerFast", (), ("data.tokenizer={kind: file, path: t.json}",)),
    "data.tokenizer.encoding": ("gpt2", (), ("data.tokenizer={kind: tiktoken, path: t, encoding: llama3}",)),
    "data.tokenizer.pattern": (r"\w", (), (OWN_PATTERN,)),
    "data.tokenizer.special_tokens": ("[</s>]", (), (OWN_PATTERN,)),
    "data.loss_mask": ("document_starts", SFT, ()),
    "data.stages": ("[{start: 9, weights: {web: 1}}]", (), ("data.source=null", f"data.sources={TWO_SOURCES}")),
    "data.prepare": ("[{step: normalization}]", SFT, ()),
    "model.new_classifier": ("true", VIT, (*VIT, "model.weights=w")),
    "data.images": ("{crop_ratio: 0.9}", (), IMAGES),
    "data.images.folder": ("pictures", IMAGES, LLAVA),
    "data.images.fields": ("{image: photo}", LLAVA, IMAGES),
    "data.images.crop_ratio": ("0.9", LLAVA, IMAGES),
    "data.images.aspect": ("pad", IMAGES, LLAVA),
    "data.images.augment": ("{horizontal_flip: 0}", LLAVA, IMAGES),
    "data.images.fields.label": ("target", CLIP, IMAGES),
    "data.images.fields.caption": ("text", IMAGES, CLIP),
    "data.images.classes": ("names.txt", CLIP, IMAGES),
    "data.tokenizer": ("{vocab_size: 99}", (*IMAGES, "data.tokenizer.vocab_size=32000"), ()),
    "data.images.augment.mix_probability": ("0.5", IMAGES, (*IMAGES, "data.images.augment.mixup=0.2")),
    "data.images.augment.switch_probability": ("0.3", IMAGES, (*IMAGES, "data.images.augment.cutmix=1")),
    "data.cache": ("{size: 1GB}", SFT, ()),
    "data.fields": ("{messages: chat}", (), SFT),
    "data.fields.images": ("photos", SFT, LLAVA),
    "data.chat_template": ("chat.jinja", (), DPO),
    "data.chat_template_kwargs": ("{thinking: false}", (), SFT),
    "data.validation_source": ("rows.jsonl", (), SFT),
    "data.chat_template_date": ("2025-01-01", (), SFT),
    "data.loss_on": ("all", DPO, SFT),
    "data.truncation": ("drop", (), DPO),
    "data.packing": ("best_fit", DPO, SFT),
    "training.loss": ("{name: mse}", (), (*IMAGES, "training.objective=regression")),
    "training.loss.pos_weight": ("2.0", IMAGES, (*IMAGES, "training.loss.name=bce")),
    "training.loss.target_threshold": ("0.2", IMAGES, (*IMAGES, "training.loss.name=bce")),
    "training.loss.delta": (
        "2.0",
        (*IMAGES, "training.objective=regression"),
        (*IMAGES, "training.objective=regression", "training.loss.name=huber"),
    ),
    "training.loss.temperature": ("0.2", IMAGES, VIEWS),
    "training.loss.chunk_size": ("64", IMAGES, VIEWS),
    "training.sync_batch_norm": ("true", GROUP_NORM, IMAGES),
    "training.dpo": ("{beta: 0.2}", SFT, DPO),
    "training.dpo.label_smoothing": ("0.2", (*DPO, "training.dpo.loss=sigmoid"), (*DPO, "training.dpo.loss=robust")),
    "training.dpo.length_normalized": ("true", (*DPO, "training.dpo.loss=ipo"), (*DPO, "training.dpo.loss=sigmoid")),
    "training.loss_scale": ("{initial: 8}", (), ("training.precision=fp16",)),
    "training.optimizer.betas": ("[0.8, 0.9]", ("training.optimizer.name=sgd",), ("training.optimizer.name=lion",)),
    "training.optimizer.eps": ("1e-7", ("training.optimizer.name=lion",), ("training.optimizer.name=adam",)),
    "training.optimizer.state_dtype": ("bf16", ("training.optimizer.name=sgd",), ()),
    "training.optimizer.master_weights": ("false", ("training.precision=fp32",), ("training.precision=bf16",)),
    "training.optimizer.momentum": ("0.5", (), ("training.optimizer.name=momentum",)),
    "training.optimizer.muon": ("{nesterov: false}", (), ("training.optimizer.name=muon",)),
    "training.local_sgd.inner_steps": ("5", (), ("training.local_sgd.groups=2",)),
    "training.local_sgd.outer_optimizer": ("sgd", (), ("training.local_sgd.groups=2",)),
    "training.local_sgd.outer_learning_rate": ("0.5", (), ("training.local_sgd.groups=2",)),
    "training.local_sgd.outer_momentum": (
        "0.5",
        ("training.local_sgd={groups: 2, outer_optimizer: sgd}",),
        ("training.local_sgd.groups=2",),
    ),
    "training.optimizer.decay_embeddings": ("false", ("training.optimizer.name=sgd",), ()),
    "training.schedule.min_lr": ("1e-5", ("training.schedule.name=constant",), ()),
    "training.schedule.step_size": ("3", (), ("training.schedule.name=step",)),
    "training.schedule.gamma": ("0.5", (), ("training.schedule={name: step, step_size: 3, gamma: 0.5}",)),
    "training.schedule.cooldown_steps": ("3", (), ("training.schedule.name=wsd",)),
    "training.gradient_clipping_by": ("value", ("training.gradient_clipping=0",), ()),
    "training.early_stopping.min_delta": ("0.1", (), ("training.early_stopping.patience=2",)),
    "training.early_stopping.metric": ("validation_top1", IMAGES, (*IMAGES, "training.early_stopping.patience=2")),
    "training.averaging.decay": ("0.9", ("training.averaging.name=checkpoints",), ("training.averaging.name=ema",)),
    "training.averaging.every": ("5", (), ("training.averaging.name=checkpoints",)),
    "evaluation.job": ("{every: 5}", (), ("evaluation.tasks=[{kind: generation, name: a, prompts: [b]}]",)),
    "evaluation.retrieval_pairs": ("100", IMAGES, CLIP),
    "evaluation.zero_shot": ("{source: pictures}", (*CLIP, "evaluation.every=0"), CLIP),
    "evaluation.sample_answers": ("3", CLIP, LLAVA),
    "evaluation.batches": ("3", ("evaluation.every=0",), ()),
    "layout.selective_scope": ("attention", ("layout.activation_checkpointing=full",), ()),
    "layout.selective_every": ("3", ("layout.activation_checkpointing=none",), ()),
    "layout.tensor_sequence_parallel": ("true", ("layout.tensor_parallel=1",), ("layout.tensor_parallel=2",)),
    "layout.expert_tensor_parallel": ("2", (), EXPERTS),
    "layout.zero_shard_size": ("2", ("layout.zero_stage=1",), ("layout.zero_stage=2",)),
    "layout.zero_secondary_shard_size": ("2", ("layout.zero_stage=2",), ("layout.zero_stage=3",)),
    "layout.offload_device": ("nvme", (), ("layout.offload=optimizer",)),
    "cluster.per_node_mtbf": ("9h", ("cluster.mean_time_between_interruptions=3h",), ("cluster.spot=true",)),
    "cluster.kubernetes.rdma_count": ("4", (), ("cluster.kubernetes.rdma_resource=rdma/a",)),
    "cluster.kubernetes.ipc_lock": ("false", (), ("cluster.kubernetes.rdma_resource=rdma/a",)),
    "checkpoint.mirror.bandwidth": ("1GB/s", (), ("checkpoint.mirror.to=/copies",)),
    "checkpoint.mirror.every": ("5", (), ("checkpoint.mirror.to=/copies",)),
    "checkpoint.mirror.keep": ("5", (), ("checkpoint.mirror.to=/copies",)),
    "checkpoint.mirror.keep_every": ("5", (), ("checkpoint.mirror.to=/copies",)),
    "guard.spike.retries": ("5", ("guard.spike.action=warn",), ("guard.spike.action=warn", "guard.nan=rollback")),
    "guard.replay": ("100", ("guard.checksum=0",), ()),
    "telemetry.interval": ("5s", ("telemetry.enabled=false",), ()),
    "telemetry.layers_every": ("100", ("telemetry.enabled=false",), ()),
    "telemetry.noise_scale": ("false", ("telemetry.enabled=false",), ()),
    "code.uncommitted": ("refuse", (), ("code.path=.",)),
    "code.max_size": ("1MB", (), ("code.path=.",)),
    "code.processes_per_node": ("1", (), ("code.command=[torchrun, train.py]",)),
}


# A LLaVA has the keys of both its parts.
MODELS = [ModelSpec, *(kind for kind in VISION.values() if kind is not LlavaSpec)]


def conditional(section: type[BaseModel] = RunSpec, before: str = "") -> Iterator[str]:
    """Dotted keys of the schema that say when they are used."""
    for name, field in section.model_fields.items():
        key = f"{before}{field.alias or name}"
        if any(isinstance(one, UsedWhen) for one in field.metadata):
            yield key
        for kind in MODELS if key == "model" else [field.annotation, *typing.get_args(field.annotation)]:
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                yield from conditional(kind, f"{key}.")


def test_every_key_with_a_condition_is_tested() -> None:
    assert {*conditional()} == CASES.keys()


@pytest.mark.parametrize("key", CASES)
def test_a_key_without_effect_is_rejected_and_accepted_where_it_has_one(key: str) -> None:
    value, without, within = CASES[key]
    refused = [str(one) for one in error(SPEC, *without, f"{key}={value}").problems]
    expected = re.compile(rf"--set {re.escape(key)}[a-z_.]* = .*: has no effect with [a-z_.]+ = .*\. Remove it, or ")
    assert len([line for line in refused if expected.match(line)]) == 1, refused
    load(SPEC, *within, f"{key}={value}")


@pytest.mark.parametrize("key", CASES)
def test_a_default_without_effect_is_accepted(key: str) -> None:
    _, without, _ = CASES[key]
    written_out = load(SPEC, *without).model_dump(mode="json", by_alias=True)
    for part in key.split("."):
        written_out = written_out[part]
    given = f"{key}={written_out}".replace("'", "").replace("None", "null").replace("False", "false")
    assert load(SPEC, *without, given) == load(SPEC, *without)


def test_the_line_in_the_file_is_named_and_the_command_ends_with_2() -> None:
    text = SPEC + "guard:\n  spike: {action: warn,\n          retries: 7}\n"
    line = len(text.splitlines())
    assert problem(text) == (
        f"run.yaml:{line} guard.spike.retries = 7: has no effect with guard.spike.action = warn and guard.nan = stop. "
        "Remove it, or set guard.spike.action to rollback or set guard.nan to rollback."
    )
    ended = scaletrain("validate", SMALL, "--set", "training.optimizer={name: sgd, momentum: 0.8}", code=ExitCode.USAGE)
    assert "momentum = 0.8: has no effect with training.optimizer.name = sgd. Remove it, or set" in ended.err


def test_synchronized_batch_norm_needs_a_resnet() -> None:
    for given, now in (((), "llama"), (VIT, "vit")):
        refused = str(error(SPEC, *given, "training.sync_batch_norm=true"))
        assert f"has no effect with model.family = {now}. Remove it, or set model.family to resnet." in refused


def test_keys_of_a_preset_without_effect_are_not_reported() -> None:
    load(SPEC, "model={preset: gpt2, seq_len: 32}")
    assert "has no effect with model.position_embedding = learned" in problem(GPT, "model.rope_theta=5e5")


def test_keys_of_the_clusters_file_without_effect_are_accepted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, mtbf = tmp_path / "clusters.yaml", "mean_time_between_interruptions=3h"
    monkeypatch.setenv("SCALETRAIN_CLUSTERS", str(file))
    file.write_text("default: lab\nclusters: {lab: {per_node_mtbf: 9h}}\n")
    assert scaletrain("validate", SMALL, "--set", f"cluster.{mtbf}").code == 0
    assert scaletrain("validate", SMALL, "--set", f"cluster.{mtbf}", "--set", "cluster.per_node_mtbf=8h").code == 2


def test_an_override_may_make_keys_of_the_file_ineffective() -> None:
    text = SPEC.replace("steps: 10", "steps: 10\n  optimizer: {name: momentum, momentum: 0.5}")
    text += "evaluation: {every: 5, batches: 3}\n"
    assert load(text, "evaluation.every=0").evaluation.batches == 3
    assert load(text, "training.optimizer.name=adamw").training.optimizer.momentum == 0.5
    assert "evaluation.batches = 3: has no effect" in problem(text.replace("every: 5", "every: 0"))


def test_overrides_without_effect_are_rejected_and_recorded_keys_are_not() -> None:
    run = load(SPEC, "training.optimizer={name: momentum, momentum: 0.5}")
    assert override_spec(run, ["training.optimizer.name=adamw"], file="run.json").training.optimizer.momentum == 0.5
    with pytest.raises(Exception, match=r"--set training\.early_stopping\.min_delta = 0\.1: has no effect"):
        override_spec(run, ["training.early_stopping.min_delta=0.1"], file="run.json")


def test_no_recipe_has_a_key_without_effect() -> None:
    for path in [*RECIPES, PROJECT / "recipes" / "own-engine" / "run.yaml"]:
        found = json.JSONDecoder().raw_decode(scaletrain("validate", path, "--json").out)[0]
        assert found["problems"] == [], path
        # What readers have of their own, or only with a network.
        own = {"data.source", "data.tokenizer.path", "model.weights", "model.hf_config", "evaluation.zero_shot.source"}
        assert {problem["key"] for problem in found["missing"]} <= own, path


@pytest.mark.parametrize(
    ("name", "expected"), [("adamw", 0.1), ("lion", 0.1), ("adam", 0.0), ("sgd", 0.0), ("momentum", 0.0)]
)
def test_weight_decay_is_a_default_only_where_it_is_decoupled(name: str, expected: float) -> None:
    assert load(SPEC, f"training.optimizer.name={name}").training.optimizer.weight_decay == expected
    assert load(SPEC, f"training.optimizer={{name: {name}, weight_decay: 0.2}}").training.optimizer.weight_decay == 0.2
    assert f"{name} at 0.0003 with weight decay {expected:g}" in " ".join(
        scaletrain("validate", SMALL, "--set", f"training.optimizer={{name: {name}}}").out.split()
    )
