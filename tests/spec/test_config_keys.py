"""Keys of config.json that transformers does not read are ignored and named; the tables have all that it reads."""

import ast
import dataclasses
import inspect
import json
from pathlib import Path
from typing import Any

import pytest

from scaletrain_cli.errors import UsageError
from scaletrain_cli.plan.advice.warnings import about_config_keys
from scaletrain_cli.plan.planning import make_plan
from scaletrain_cli.spec import ModelSpec
from scaletrain_cli.spec.hugging_face import from_config, known_keys
from scaletrain_cli.spec.hugging_face_architectures import ARCHITECTURES, KnownKeys
from scaletrain_cli.spec.hugging_face_read_only import READ_ONLY
from scaletrain_cli.spec.hugging_face_vision import TOWER_KEYS, VISION_KEYS
from scaletrain_cli.spec.hugging_face_weights import to_hugging_face
from scaletrain_cli.spec.loading import complete
from scaletrain_cli.spec.presets import presets
from scaletrain_cli.spec.vision_model import VISION, ClipTextSpec, ClipVisionSpec
from tests.spec.samples import load

START = "schema: scaletrain/v1\nname: a\ndata: {source: x, tokenizer: {vocab_size: 512}}\n"
START += "training: {global_batch_size: 8, steps: 10}\n"
SIZES: dict[str, Any] = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2, "vocab_size": 512}
SIZES |= {"intermediate_size": 128, "max_position_embeddings": 64, "num_key_value_heads": 4}
GPT2 = {"n_embd": 64, "n_head": 4, "n_layer": 2, "n_positions": 64, "vocab_size": 512}
# Keys of published files that nothing in transformers reads.
PUBLISHED = {
    "SmolLM2": ({"model_type": "llama", "is_llama_config": True, "rope_interleaved": False}, 2),
    "LLaMA of 2023": ({"model_type": "llama", "max_sequence_length": 2048, "max_position_embeddings": None}, 1),
    "GPT-2 medium": ({"model_type": "gpt2", "n_special": 0, "predict_special_tokens": True, **GPT2}, 2),
    "Gemma 2": ({"model_type": "gemma2", "sliding_window_size": 4096, "cache_implementation": "hybrid"}, 2),
    "DeepSeek-R1-0528-Qwen3-8B": (
        {"model_type": "qwen3", "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "attn_factor": 0.88}},
        1,
    ),
    "Phi-4-mini": ({"model_type": "phi3", "full_attn_mod": 1, "interpolate_factor": 1, "lm_head_bias": False}, 3),
    "a dense model with keys of experts": ({"model_type": "llama", "num_experts": 8, "kv_lora_rank": 4}, 2),
    "text of Gemma 3": ({"model_type": "gemma3", "text_config": {**SIZES, "surprise": 1}, "other": 2}, 2),
}
# Read by the authors' own code, with which the weights were trained, or by transformers 4.
DEEPSEEK = ("deepseek_v2", "deepseek_v3", "deepseek_v32", "kimi_k2")
NOT_OF_TRANSFORMERS_5 = {kind: {"moe_layer_freq", "scoring_func", "topk_method"} for kind in DEEPSEEK}


@pytest.mark.parametrize("name", PUBLISHED)
def test_keys_that_transformers_does_not_read_are_ignored_and_named(name: str, tmp_path: Path) -> None:
    keys, ignored = PUBLISHED[name]
    sizes = {} if keys["model_type"] in ("gpt2", "gemma3") else SIZES
    (tmp_path / "config.json").write_text(json.dumps(sizes | keys))
    spec = load(f"{START}model: {{hf_config: .}}\n", base_dir=tmp_path)
    without: list[str] = []
    plain = {key: value for key, value in (sizes | keys).items() if key not in spec.ignored_config_keys}
    assert spec.model == ModelSpec.model_validate(complete(from_config(plain, without), Path(), {}))
    assert len(spec.ignored_config_keys) == ignored
    (note,) = about_config_keys(spec)
    assert all(key in str(note) for key in spec.ignored_config_keys)
    assert spec.transformer.max_position_embeddings == (2048 if "LLaMA" in name else spec.transformer.seq_len)


def test_keys_of_other_architectures_change_nothing() -> None:
    everything = set().union(*(known_keys(kind).used | known_keys(kind).all_only.keys() for kind in ARCHITECTURES))
    for kind in ARCHITECTURES:
        sizes = GPT2 if kind == "gpt2" else {**SIZES, "num_experts_per_tok": 2}
        others = sorted(key for key in everything if key not in known_keys(kind))
        ignored: list[str] = []
        config = {"model_type": kind, **{key: sizes[key] for key in sizes if key not in others}}
        assert from_config(config | {key: [True] for key in others}, ignored) == from_config(config), kind
        assert sorted(ignored) == others
        assert len(others) > 20


def test_a_config_without_unread_keys_has_no_note() -> None:
    assert list(about_config_keys(load(f"{START}model: {{hf_config: mixtral}}\n"))) == []


def keys_read(source: str, *, kwargs: bool = False) -> set[str]:
    """Return the names that a file of transformers reads from ``config``."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute):
            found |= {node.attr} if _name(node.value) == "config" else set()
        elif isinstance(node, ast.Call) and len(node.args) > 1 and _name(node.func) in ("getattr", "hasattr"):
            found |= {_text(node.args[1])} if _name(node.args[0]) == "config" else set()
        elif kwargs and isinstance(node, ast.Call) and _name(node.func) in ("get", "pop", "setdefault") and node.args:
            found |= {_text(node.args[0])} if _name(getattr(node.func, "value", node)) == "kwargs" else set()
    return {key for key in found if key and not key.startswith("_")}


def _name(node: ast.AST) -> str:
    return str(getattr(node, "id", getattr(node, "attr", "")))


def _text(node: ast.AST) -> str:
    return str(getattr(node, "value", ""))


def keys_of_transformers(kind: str) -> set[str]:
    """Return what transformers reads for a model_type: fields and aliases of its class, and what its modules read."""
    from transformers.configuration_utils import PretrainedConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    kind = "deepseek_v3" if kind == "kimi_k2" else kind
    own = CONFIG_MAPPING[kind]
    file = Path(inspect.getfile(own))
    modules = file.with_name(file.name.replace("configuration_", "modeling_"))
    classes = [value for value in vars(inspect.getmodule(own)).values() if inspect.isclass(value) and value is not own]
    others = set().union(*(fields_of(each) for each in classes if issubclass(each, PretrainedConfig)))
    read = keys_read(modules.read_text()) | keys_read(file.read_text(), kwargs=True)
    return {key for key in read if not hasattr(PretrainedConfig, key)} - (others - fields_of(own)) | fields_of(own)


def fields_of(config_class: Any) -> set[str]:
    names = {field.name for field in dataclasses.fields(config_class)}
    return names | set(config_class.attribute_map) | set(config_class.attribute_map.values())


@pytest.mark.parametrize("kind", [*ARCHITECTURES, *READ_ONLY])
def test_the_table_of_an_architecture_has_every_key_that_transformers_reads(kind: str) -> None:
    theirs, ours = keys_of_transformers(kind), known_keys(kind)
    assert len(theirs) > 20
    assert {key for key in theirs if key not in ours and not key.startswith("_")} == set()
    refused = set((ARCHITECTURES | READ_ONLY)[kind].only)
    assert refused - theirs <= NOT_OF_TRANSFORMERS_5.get(kind, set()), "these cannot change what transformers computes"


def test_the_tables_have_every_key_that_masks_caches_and_rotary_positions_read() -> None:
    import transformers
    from transformers.configuration_utils import PretrainedConfig

    folder = Path(transformers.__file__).parent
    shared = set().union(*(keys_read((folder / f"{name}.py").read_text()) for name in SHARED))
    shared = {key for key in shared if not callable(getattr(PretrainedConfig, key, None))} - NOT_IN_FILES
    assert {"is_causal", "sliding_window", "layer_types", "kv_sharing_modes", "rope_parameters"} <= shared
    for kind in ARCHITECTURES:
        rotates = "rope_theta" in known_keys(kind).used
        assert {key for key in shared if key not in known_keys(kind)} <= (set() if rotates else OF_ROTARY), kind


SHARED = ("masking_utils", "cache_utils", "modeling_rope_utils")
OF_ROTARY = {"rope_parameters", "head_dim", "original_max_position_embeddings"}
NOT_IN_FILES = {"is_heterogeneous", "sub_configs"}  # properties of the class


@pytest.mark.parametrize("kind", VISION_KEYS)
def test_the_table_of_a_model_of_images_has_every_key_that_transformers_reads(kind: str) -> None:
    known = VISION_KEYS[kind]
    used = known.used | set(VISION[kind].model_fields) | {"num_labels"}
    ours = KnownKeys(frozenset(used), known.irrelevant, known.only)
    assert {key for key in keys_of_transformers(kind) if key not in ours} == set()


def test_the_tables_of_the_towers_of_a_clip_have_every_key_that_transformers_reads() -> None:
    from transformers import CLIPTextConfig, CLIPVisionConfig

    for theirs, ours in ((CLIPTextConfig, ClipTextSpec), (CLIPVisionConfig, ClipVisionSpec)):
        keys = KnownKeys(frozenset(ours.model_fields), TOWER_KEYS.irrelevant, TOWER_KEYS.only)
        assert {key for key in fields_of(theirs) if key not in keys} == set()


# The class of each family of experts in transformers, or 0 if it has no balance loss.
FAMILIES = {
    **{"mixtral": {}, "qwen2_moe": {}, "qwen3_moe": {"head_dim": 16}, "gpt_oss": {"head_dim": 16}, "jamba": {}},
    **{"llama4_text": {}, "nemotron_h": {"hybrid_override_pattern": "ME*E"}},
    **{kind: {"first_k_dense_replace": 1} for kind in DEEPSEEK},
}


@pytest.mark.parametrize("kind", FAMILIES)
def test_the_balance_loss_of_routers_is_that_of_the_file_or_of_the_class_in_transformers(kind: str) -> None:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    def coefficient(**stated: object) -> float:
        config = {"model_type": kind, **SIZES, "num_experts_per_tok": 2, **FAMILIES[kind], **stated}
        model = ModelSpec.model_validate(complete(from_config(config), Path(), {}))
        assert model.moe_layers or model.num_experts
        return model.router_aux_loss_coef

    theirs = CONFIG_MAPPING["deepseek_v3" if kind == "kimi_k2" else kind]
    assert coefficient() == getattr(theirs, "router_aux_loss_coef", 0.0)
    assert [coefficient(router_aux_loss_coef=value) for value in (0.0, 0.9, 0.02)] == [0.0, 0.9, 0.02]
    if "kv_lora_rank" in known_keys(kind).used:
        assert [coefficient(aux_loss_alpha=value) for value in (0.0, 0.003)] == [0.0, 0.003]


def test_plan_and_validate_say_the_coefficient() -> None:
    from scaletrain_cli.ui.spec import model_text

    assert "router balance loss 0.02" in model_text(load(f"{START}model: {{hf_config: mixtral}}\n"))
    assert "router" not in model_text(load(f"{START}model: {{hf_config: llama}}\n"))
    sets = (
        "cluster={scheduler: slurm, gpu: h100-sxm-80gb, nodes: 16, gpus_per_node: 8}",
        "training.global_batch_size=128",
    )
    shown = {}
    for coefficient in (0.02, 0.9, 0.0):
        spec = load(f"{START}model: {{hf_config: mixtral}}\n", *sets, f"model.router_aux_loss_coef={coefficient}")
        (check,) = [check for check in make_plan(spec).sanity if check.topic == "router balance loss"]
        shown[check.value] = (check.verdict, check.message.code)
    assert shown == {
        "0.02": ("note", "plan.router-balance"),
        "0.9": ("warning", "plan.router-balance-large"),
        "0": ("note", "plan.router-balance-none"),
    }


def test_what_is_written_has_only_keys_that_are_read_and_gives_the_same_model() -> None:
    written = 0
    for name in presets():
        model = ModelSpec.model_validate(complete({"preset": name}, Path(), {}))
        try:
            config = to_hugging_face(model)
        except UsageError:  # an architecture that is planned only
            continue
        ignored: list[str] = []
        again = complete(from_config(config, ignored), Path(), {})
        assert ignored == [], name
        assert to_hugging_face(ModelSpec.model_validate(again)) == config, name
        written += 1
    assert written > 40
