import json
from pathlib import Path
from typing import Any

import pytest
import torch

from scaletrain_cli.engine.checkpoint.export import export
from scaletrain_cli.engine.checkpoint.tokenizer_export import TextFiles, text_files
from scaletrain_cli.engine.data.prepared import prepare_rows
from scaletrain_cli.spec import DataSpec, RunSpec
from tests.engine.checkpoint.test_export import checkpoint_of, spec_of
from tests.engine.model.test_safetensors import LLAMA, contents
from tests.tokenizer_kinds import CHATML, LEGACY, LLAMA_3, WITH_TOOLS, added_token, tokenizer_json, write_tokenizer

TOOLS = [{"type": "function", "function": {"name": "rain", "description": "of a town", "parameters": {}}}]
CHAT = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello."}]
LLAMA_3_TOKENS = ("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
CHATML_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
SP_TOKENS = ("<s>", "</s>", "<|im_start|>", "<|im_end|>")
# The kind of tokenizer and its special tokens, tokenizer_config.json, config.json, generation_config.json.
SOURCES: dict[str, tuple[tuple[str, tuple[str, ...]], dict[str, Any], dict[str, Any], dict[str, Any] | None]] = {
    "llama 3": (
        ("split", LLAMA_3_TOKENS),
        {
            **{"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>", "chat_template": LLAMA_3},
            **{"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": "<|end_of_text|>"},
        },
        {"bos_token_id": 0, "eos_token_id": [1, 4], "pad_token_id": 1},
        {"bos_token_id": 0, "eos_token_id": [1, 4], "temperature": 0.6, "do_sample": True},
    ),
    "chatml without bos and pad": (
        ("bytes", CHATML_TOKENS),
        {"eos_token": "<|im_end|>", "chat_template": CHATML, "tokenizer_class": "PreTrainedTokenizerFast"},
        {"eos_token_id": 2},
        None,
    ),
    "sentencepiece": (
        ("metaspace", SP_TOKENS),
        {
            **{"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "chat_template": CHATML},
            **{
                "tokenizer_class": "PreTrainedTokenizerFast",
                "additional_special_tokens": ["<|im_start|>", "<|im_end|>"],
            },
        },
        {"bos_token_id": 1, "eos_token_id": [2, 4]},
        {"bos_token_id": 1, "eos_token_id": [2, 4]},
    ),
}


def source_folder(folder: Path, name: str, **files: Any) -> Path:
    tokenizer, config, of_model, generation = SOURCES[name]
    if generation is not None:
        files["generation_config"] = generation
    return write_tokenizer(
        folder, tokenizer_json(*tokenizer), config, config={"model_type": "llama", **of_model}, **files
    ).parent


def tuning_of(tmp_path: Path, source: Path, **data: Any) -> RunSpec:
    """Fine-tuning of the model in a folder on a few conversations, prepared."""
    rows = [{"messages": CHAT}] * 20
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    spec = spec_of({**LLAMA, "vocab_size": 800, "seq_len": 512, "weights": str(source)})
    section = {"source": str(tmp_path / "rows.jsonl"), **data}
    section["tokenizer"] = {"kind": "file", "path": str(source / "tokenizer.json"), **data.get("tokenizer", {})}
    training = spec.training.model_copy(update={"objective": "sft"})
    spec = spec.model_copy(update={"data": DataSpec.model_validate(section), "training": training})
    prepare_rows(spec, tmp_path / "runs")
    return spec


def exported(spec: RunSpec, tmp_path: Path) -> Path:
    """Write what an export writes for a tokenizer, and a config.json as it has it."""
    folder, text = tmp_path / "out", text_files(spec, tmp_path / "runs")
    for name, content in {**text.files, "config.json": of_model(text)}.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return folder


def of_model(text: TextFiles) -> bytes:
    return json.dumps({"model_type": "llama", **text.ids}).encode()


def rendered(folder: Path) -> list[Any]:
    """Return the special tokens by name, a chat with and without tools and a prompt, as transformers has them."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    chats = [
        tokenizer.apply_chat_template(CHAT, tools=tools, tokenize=False, add_generation_prompt=prompt)
        for tools in (None, TOOLS)
        for prompt in (False, True)
    ]
    return [tokenizer.special_tokens_map, *chats, tokenizer(chats[0])["input_ids"], tokenizer("a b")["input_ids"]]


def generation_of(folder: Path) -> dict[str, Any]:
    """Return the ids with which transformers would generate."""
    from transformers import AutoConfig, GenerationConfig

    if (folder / "generation_config.json").is_file():
        found = GenerationConfig.from_pretrained(folder)
    else:
        found = GenerationConfig.from_model_config(AutoConfig.from_pretrained(folder))
    return {name: getattr(found, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id", "temperature")}


@pytest.mark.parametrize("name", SOURCES)
def test_special_tokens_chats_and_stops_are_those_of_the_source(name: str, tmp_path: Path) -> None:
    source = source_folder(tmp_path / "source", name)
    out = exported(tuning_of(tmp_path, source), tmp_path)
    assert rendered(out) == rendered(source)
    assert generation_of(out) == generation_of(source)
    config, before = (json.loads((folder / "config.json").read_text()) for folder in (out, source))
    assert config == before
    assert not (out / "special_tokens_map.json").exists()


def test_a_tokenizer_that_transformers_5_has_saved_can_be_loaded_by_version_4(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    source = source_folder(tmp_path / "source", "sentencepiece")
    AutoTokenizer.from_pretrained(source).save_pretrained(source)
    config = json.loads((source / "tokenizer_config.json").read_text())
    assert (config["tokenizer_class"], len(config["extra_special_tokens"])) == ("TokenizersBackend", 2)
    out = exported(tuning_of(tmp_path, source), tmp_path)
    assert rendered(out) == rendered(source)
    found = json.loads((out / "tokenizer_config.json").read_text())
    assert found["tokenizer_class"] == "PreTrainedTokenizerFast"  # of both versions
    assert found["additional_special_tokens"] == config["extra_special_tokens"]
    assert "extra_special_tokens" not in found  # which version 4 reads as names and tokens


def test_an_export_states_the_class_of_the_spec_whose_tokens_the_run_had(tmp_path: Path) -> None:
    source, config = source_folder(tmp_path / "source", "sentencepiece"), SOURCES["sentencepiece"][1]
    document = json.loads((source / "tokenizer.json").read_text())
    (source / "tokenizer.json").write_text(json.dumps(document | LEGACY))
    expected = rendered(source)
    (source / "tokenizer_config.json").write_text(json.dumps(config | {"tokenizer_class": "LlamaTokenizer"}))
    assert rendered(source) != expected  # as transformers 5 has it
    out = exported(tuning_of(tmp_path, source, tokenizer={"tokenizer_class": config["tokenizer_class"]}), tmp_path)
    assert rendered(out) == expected


def test_a_map_of_special_tokens_that_transformers_prefers_is_kept(tmp_path: Path) -> None:
    special = {"bos_token": "<|begin_of_text|>", "eos_token": "<|end_of_text|>"}
    source = source_folder(tmp_path / "source", "llama 3", special_tokens_map=special)
    spec = tuning_of(tmp_path, source)
    assert rendered(exported(spec, tmp_path)) == rendered(source)
    assert rendered(source)[0]["eos_token"] == "<|end_of_text|>"


def test_every_file_of_the_tokenizer_is_exported(tmp_path: Path) -> None:
    source = source_folder(tmp_path / "source", "chatml without bos and pad", added_tokens={"<|im_end|>": 2})
    names = [
        *("tokenizer.model", "spiece.model", "vocab.json", "merges.txt", "vocab.txt", "tekken.json"),
        *("qwen.tiktoken", "tokenizer.model.v3", "additional_chat_templates/tool_use.jinja", "tokenization_own.py"),
    ]
    (source / "additional_chat_templates").mkdir()
    for name in names:
        (source / name).write_text(WITH_TOOLS)
    for name in ("model.safetensors", "README.md", "training_args.bin", "chat_template.txt"):
        (source / name).write_text("x")
    config = json.loads((source / "tokenizer_config.json").read_text())
    (source / "chat_template.jinja").write_text(config.pop("chat_template"))
    (source / "tokenizer_config.json").write_text(json.dumps(config))
    out = exported(tuning_of(tmp_path, source), tmp_path)
    files = {str(path.relative_to(out)) for path in out.rglob("*") if path.is_file()}
    kept = {*names, "tokenizer.json", "tokenizer_config.json", "added_tokens.json", "chat_template.jinja"}
    assert files == kept | {"config.json"}
    assert all((out / name).read_bytes() == (source / name).read_bytes() for name in kept)
    assert rendered(out) == rendered(source)
    assert "rain" in rendered(out)[3]


def test_an_export_writes_files_of_subfolders_with_the_mode_of_the_others(tmp_path: Path) -> None:
    weights = contents(LLAMA)
    folder = checkpoint_of(tmp_path / "step-00000001", weights)
    text = TextFiles({"additional_chat_templates/tool_use.jinja": b"x", "tokenizer.model": b"y"}, {})
    export([folder], spec_of(LLAMA), tmp_path / "out", torch.float32, text)
    assert (tmp_path / "out" / "additional_chat_templates" / "tool_use.jinja").read_bytes() == b"x"
    assert len({path.stat().st_mode for path in (tmp_path / "out").rglob("*") if path.is_file()}) == 1


def test_the_template_that_was_trained_with_is_the_only_one(tmp_path: Path) -> None:
    source = source_folder(tmp_path / "source", "chatml without bos and pad")
    (source / "chat_template.jinja").write_text("{{- 'new' }}" + CHATML)
    out = exported(tuning_of(tmp_path, source), tmp_path)
    assert rendered(out) == rendered(source)
    assert "chat_template" not in json.loads((out / "tokenizer_config.json").read_text())

    (source / "additional_chat_templates").mkdir()
    (source / "additional_chat_templates" / "tool_use.jinja").write_text(WITH_TOOLS)
    own = tmp_path / "own.jinja"
    own.write_text("{{- 'own' }}" + CHATML)
    (tmp_path / "2").mkdir()
    out = exported(tuning_of(tmp_path / "2", source, chat_template=str(own)), tmp_path / "2")
    assert [chat[:3] for chat in rendered(out)[1:5]] == ["own"] * 4
    assert "chat_template" not in json.loads((out / "tokenizer_config.json").read_text())
    assert not (out / "additional_chat_templates").exists()


def test_special_tokens_and_template_come_from_the_tokenizer_and_stops_from_the_weights(tmp_path: Path) -> None:
    base = source_folder(tmp_path / "base", "llama 3")
    instruct = source_folder(tmp_path / "instruct", "llama 3")
    config = {"bos_token": "<|begin_of_text|>", "eos_token": "<|end_of_text|>"}
    (base / "tokenizer_config.json").write_text(json.dumps(config))
    (base / "config.json").write_text(json.dumps({"bos_token_id": 0, "eos_token_id": 1}))
    (base / "generation_config.json").write_text(json.dumps({"bos_token_id": 0, "eos_token_id": 1}))
    spec = tuning_of(tmp_path, base, tokenizer={"path": str(instruct / "tokenizer.json")})
    out = exported(spec, tmp_path)
    assert rendered(out) == rendered(instruct)
    assert generation_of(out)["eos_token_id"] == [1, 4], "the end of the trained turns beside that of the weights"


@pytest.mark.parametrize("name", SOURCES)
def test_a_tokenizer_without_files_beside_it_has_the_tokens_of_the_model(name: str, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    source = source_folder(tmp_path / "source", name)
    own = tmp_path / "own.jinja"
    own.write_text(SOURCES[name][1]["chat_template"])
    (source / "tokenizer_config.json").unlink()
    out = exported(tuning_of(tmp_path, source, chat_template=str(own)), tmp_path)
    tokenizer, ids = AutoTokenizer.from_pretrained(out), json.loads((source / "config.json").read_text())
    ends = ids["eos_token_id"]
    assert tokenizer.eos_token_id == (ends[0] if isinstance(ends, list) else ends)
    assert (tokenizer.bos_token_id, tokenizer.pad_token_id) == (ids.get("bos_token_id"), ids.get("pad_token_id"))


def test_the_ids_at_which_trained_turns_end_are_added_to_those_of_the_source(tmp_path: Path) -> None:
    source = source_folder(tmp_path / "source", "llama 3")
    for name in ("config", "generation_config"):
        (source / f"{name}.json").write_text(json.dumps({"model_type": "llama", "bos_token_id": 0, "eos_token_id": 1}))
    spec = tuning_of(tmp_path, source)
    assert text_files(spec, tmp_path / "runs").ids["eos_token_id"] == [1, 4]
    dataset = next((tmp_path / "runs").rglob("dataset.json"))
    document = json.loads(dataset.read_text())
    for stated, ends in (("4", [1, 4]), ("4,1", [1, 4]), ("", 1), ("1", 1), ("2, 4", [1, 2, 4])):
        dataset.write_text(json.dumps(document | {"stop_tokens": stated}))
        text = text_files(spec, tmp_path / "runs")
        assert (text.ids["eos_token_id"], json.loads(text.files["generation_config.json"])["eos_token_id"]) == (
            ends,
            ends,
        )


def decoded_end(tokenizer: str) -> dict[str, Any]:
    """The eos_token that is declared in tokenizer_config.json alone, behind the tokens of the vocabulary."""
    number = str(len(json.loads(tokenizer)["model"]["vocab"]))
    return {"eos_token": "<|im_end|>", "added_tokens_decoder": {number: added_token("<|im_end|>")}}


def test_declared_tokens_are_tokens_of_the_export(tmp_path: Path) -> None:
    tokenizer = tokenizer_json("bytes", ("<|endoftext|>", "<|im_start|>"))
    config = {**decoded_end(tokenizer), "chat_template": CHATML, "tokenizer_class": "PreTrainedTokenizerFast"}
    (number,) = config["added_tokens_decoder"]
    path = write_tokenizer(tmp_path / "source", tokenizer, config, config={"model_type": "llama"})
    spec = tuning_of(tmp_path, path.parent)
    out = exported(spec, tmp_path)
    assert rendered(out) == rendered(path.parent)
    assert json.loads((out / "config.json").read_text())["eos_token_id"] == int(number)
    dataset = json.loads(next((tmp_path / "runs").rglob("dataset.json")).read_text())
    assert dataset["vocab_size"] == int(number) + 1


def test_a_tokenizer_whose_data_are_not_on_this_machine_is_exported_as_it_is(tmp_path: Path) -> None:
    tokenizer = tokenizer_json("bytes", ("<|endoftext|>", "<|im_start|>"))
    config = {**decoded_end(tokenizer), "chat_template": CHATML, "tokenizer_class": "PreTrainedTokenizerFast"}
    path = write_tokenizer(tmp_path / "source", tokenizer, config, config={"model_type": "llama"})
    spec = spec_of({**LLAMA, "vocab_size": 800, "weights": str(path.parent)})
    data = {"source": str(tmp_path / "absent"), "tokenizer": {"kind": "file", "path": str(path)}}
    out = exported(spec.model_copy(update={"data": DataSpec.model_validate(data)}), tmp_path)
    assert rendered(out) == rendered(path.parent)
    assert (out / "tokenizer.json").read_bytes() == path.read_bytes()
