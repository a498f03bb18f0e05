"""In transformers, an exported model behaves as the one that was loaded: each architecture, each form of an export."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from scaletrain_cli.engine.checkpoint.export import export, export_adapter
from scaletrain_cli.engine.checkpoint.tokenizer_export import text_files
from scaletrain_cli.engine.model.materialization import stored_buffers
from scaletrain_cli.spec.adapter import AdapterSpec
from scaletrain_cli.spec.hugging_face_architectures import ARCHITECTURES
from tests.engine.checkpoint.test_export import checkpoint_of
from tests.engine.checkpoint.test_exported_tokenizer import CHAT, SOURCES, generation_of, rendered, tuning_of
from tests.engine.model.adapted_models import lora, matrices, ours
from tests.engine.model.families import FAMILIES, loaded, reference, spec_of
from tests.tokenizer_kinds import WITH_TOOLS, tokenizer_json, write_tokenizer

FORMS = ("full", "merged", "peft", "another end of turn")
SHORT = {("llama3.1", "full"), ("qwen2", "merged"), ("phi3", "peft"), ("mistral", "another end of turn")}
# Of the tokenizer beside the weights; the kinds of tokenizers take turns.
KINDS = {name: list(SOURCES)[number % len(SOURCES)] for number, name in enumerate(FAMILIES)}
KINDS["qwen2"] = "chatml without bos and pad"
# transformers 5 loads the tokenizer of a qwen2 by this class, whatever the folder states.
QWEN_2 = {"tokenizer_class": "Qwen2Tokenizer", "pad_token": "<|endoftext|>"}
NO_DROPOUT = {"hidden_dropout": 0.0, "attention_dropout": 0.0}
# Keys of config.json that an export states in another way, or that change nothing in these models.
RESTATED = {
    "qwen2": {"max_window_layers"},  # in layer_types
    "qwen2_moe windows": {"max_window_layers"},
    "gemma3": {"sliding_window_pattern", "_sliding_window_pattern"},
    "deepseek v2": {"router_aux_loss_coef"},  # DeepSeek's own name is aux_loss_alpha
    "deepseek v3": {"router_aux_loss_coef", "num_nextn_predict_layers"},  # these layers are not trained
    "deepseek dense": {  # which has no experts
        *("router_aux_loss_coef", "num_nextn_predict_layers", "moe_intermediate_size", "n_routed_experts"),
        *("num_experts_per_tok", "n_group", "topk_group"),
    },
}


def source_of(name: str, form: str, folder: Path) -> Path:
    """A model of transformers with random weights, as it is published: with the tokenizer of a kind, and templates."""
    tokenizer, config, ids, _ = SOURCES[KINDS[name]]
    config = config | (QWEN_2 if name == "qwen2" else {})
    ends = ids["eos_token_id"]
    stops = {"eos_token_id": ends[0] if isinstance(ends, list) else ends} if form == "another end of turn" else ids
    if form == "another end of turn" and not isinstance(ends, list):
        stops = {"eos_token_id": 0}  # of a base model: the end of text
    longer = {"n_positions": 512} if name == "gpt2" else {}
    reference(name, folder, **{"vocab_size": 800, **longer, "bos_token_id": None, "pad_token_id": None, **stops})
    kept = json.loads((folder / "generation_config.json").read_text())
    document = json.loads(tokenizer_json(*tokenizer))
    if name == "qwen2":
        from transformers import Qwen2Tokenizer

        of_class = json.loads(Qwen2Tokenizer().backend_tokenizer.to_str())
        document |= {key: of_class[key] for key in ("normalizer", "pre_tokenizer")}
    write_tokenizer(folder, json.dumps(document), config, generation_config={**kept, "temperature": 0.6})
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text(WITH_TOOLS)
    (folder / "chat_template.jinja").write_text(config["chat_template"])
    stated = {key: value for key, value in config.items() if key != "chat_template"}
    (folder / "tokenizer_config.json").write_text(json.dumps(stated))
    (folder / "tokenizer.model").write_bytes(b"of SentencePiece")
    return folder


def tensors_of(model: Any) -> dict[str, Tensor]:
    found = {
        matrix.name: parameter.detach().flatten()[matrix.start : matrix.stop].reshape(matrix.whole_shape)
        for _, _, parameter, each in matrices(model)
        for matrix in each
    }
    # of tied weights the first one is stored
    return found | {matrix.name: buffer for buffer, matrix in stored_buffers(model)}


def exported(name: str, form: str, tmp_path: Path) -> tuple[Path, Path]:
    source = source_of(name, form, tmp_path / "source")
    spec = tuning_of(tmp_path, source)
    adapter: AdapterSpec | None = lora() if form in ("merged", "peft") else None
    model = spec_of(source, seq_len=512, weights=str(source), **NO_DROPOUT)
    spec = spec.model_copy(update={"model": model.model_copy(update={"adapter": adapter})})
    trained = loaded(model, source) if adapter is None else ours(model, adapter, source)
    checkpoint = checkpoint_of(tmp_path / "step-00000001", tensors_of(trained))
    text = text_files(spec, tmp_path / "runs")
    if form == "peft":
        export_adapter(checkpoint, spec, tmp_path / "out", text)
    else:
        export([checkpoint], spec, tmp_path / "out", torch.float32, text)
    return source, tmp_path / "out"


def keys_read(folder: Path, name: str) -> dict[str, Any]:
    """Return the settings that transformers reads from config.json, with its defaults for those that are absent."""
    from transformers import AutoConfig

    found = AutoConfig.from_pretrained(folder).to_dict()
    unread = RESTATED.get(name, set()) | {"_name_or_path"}
    return {key: value for key, value in found.items() if key not in unread and value is not None}


def read_dataset(tmp_path: Path) -> dict[str, Any]:
    (path,) = (tmp_path / "runs").glob("datasets/*/dataset.json")
    return dict(json.loads(path.read_text()))


def generated(source: Path, folder: Path, form: str) -> list[int]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model: Any = AutoModelForCausalLM.from_pretrained(source if form == "peft" else folder, dtype=torch.float32)
    if form == "peft" and folder != source:
        from peft import PeftModel

        model = PeftModel.from_pretrained(model, folder)
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    prompt = tokenizer.apply_chat_template(CHAT[:1], add_generation_prompt=True, return_tensors="pt", return_dict=True)
    with torch.no_grad():
        return model.generate(**prompt, max_new_tokens=8, do_sample=False)[0].tolist()  # type: ignore[no-any-return]


def test_every_architecture_that_is_written_has_a_row() -> None:
    assert {kind for kind, _ in FAMILIES.values()} == {name for name, each in ARCHITECTURES.items() if each.model_class}


@pytest.mark.filterwarnings("ignore")  # those of PEFT, and of options that a greedy generation does not use
@pytest.mark.parametrize(
    ("name", "form"),
    [
        pytest.param(name, form, marks=() if (name, form) in SHORT else pytest.mark.long)
        for name in FAMILIES
        for form in FORMS
    ],
)
def test_an_export_behaves_as_the_weights_that_it_began_with(name: str, form: str, tmp_path: Path) -> None:
    source, out = exported(name, form, tmp_path)
    assert rendered(out) == rendered(source)
    beside = {"tokenizer.json", "tokenizer_config.json", "tokenizer.model", "chat_template.jinja"}
    for file in (*beside, "additional_chat_templates/tool_use.jinja"):
        assert (out / file).read_bytes() == (source / file).read_bytes(), file
    if form != "peft":
        found, expected = (keys_read(folder, name) for folder in (out, source))
        stops, before = (generation_of(folder) for folder in (out, source))
        if form == "another end of turn":
            end_of_turn = int(read_dataset(tmp_path)["stop_tokens"])
            assert end_of_turn != before["eos_token_id"]
            for each in (expected, before):
                each["eos_token_id"] = [each["eos_token_id"], end_of_turn]
        assert {key: found[key] for key in expected} == expected
        assert stops == before
    assert generated(source, out, form) == generated(source, source, form)
