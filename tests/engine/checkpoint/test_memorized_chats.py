"""From rows and a model folder to answers: `init --from`, `train`, `checkpoint sample`, `checkpoint export`.

Each kind of chat template has ten rows, learned by heart. transformers, which does not know this project, must generate
the ten answers from the export, and stop after each.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from scaletrain_cli.engine.checkpoint.sample import run_command
from scaletrain_cli.spec import DataSpec
from tests.cli.command_line import scaletrain
from tests.engine.data.test_chat_masks import FAMILIES, fix_date
from tests.engine.data.test_row_parts import EVERY_TEMPLATE, STOPS, chat_of

QUESTIONS = ["north", "south", "east", "west", "red", "green", "blue", "one", "two", "three"]
ANSWERS = [
    *("Snow, and long nights.", "Sand.", "The sun rises there.", "Rain from the sea", "A ripe apple?", "Grass in May."),
    *("It is the sky.", "1", "2, twice as many.", "3 is odd."),
]
THINKING, LORA = "qwen-3, thinking", "llama-3.1, lora"


def model_folder(name: str, folder: Path) -> Path:
    """A tiny Llama with random weights, and the tokenizer and template of a family."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    plain, _ = chat_of(name)
    stops = [plain.token_to_id(stop) for stop in STOPS.get(name, ())]
    eos = FAMILIES[name].eos if name in FAMILIES else STOPS.get(name, ("<|im_end|>",))[-1]
    size = 8 * -(-plain.get_vocab_size() // 8)
    torch.manual_seed(1)
    config = LlamaConfig(
        **{"vocab_size": size, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2},
        **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256},
        **{"eos_token_id": stops or plain.token_to_id(eos), "bos_token_id": None, "tie_word_embeddings": False},
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    plain.save(str(folder / "tokenizer.json"))
    bos = FAMILIES[name].bos if name in FAMILIES else ""
    of_tokenizer = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "chat_template": EVERY_TEMPLATE[name],
        "eos_token": eos,
    }
    of_tokenizer |= {"bos_token": bos} if bos else {}
    of_tokenizer |= {"bos_token": "<|begin_of_text|>"} if name == "llama-4" else {}
    (folder / "tokenizer_config.json").write_text(json.dumps(of_tokenizer))
    return folder


def rows_of(name: str, answers: list[str]) -> list[dict[str, Any]]:
    thoughts = [
        {"reasoning_content": f"They ask for {question}."} if name == THINKING else {} for question in QUESTIONS
    ]
    return [
        {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer, **thought}]}
        for question, answer, thought in zip(QUESTIONS, answers, thoughts, strict=True)
    ]


def train(run: str, model: str, rows: list[dict[str, Any]], *options: str) -> None:
    """`init --from` and `train` with a learning rate and a length that are enough for random weights."""
    Path(f"{run}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    here = ("--gpu=cpu", "--scheduler=local", "--gpus-per-node=1")
    scaletrain("init", "--from", model, "--data", f"{run}.jsonl", *here, *options, f"{run}.yaml", code=0)
    changes = {
        **{"training.steps": 200, "training.epochs": "null", "training.global_batch_size": 10},
        **{"training.optimizer.lr": 3e-3, "training.precision": "fp32", "model.seq_len": 256},
        **{"training.schedule.warmup_steps": 10, "data.validation_split": 0.0, "evaluation.every": 0},
    }
    settings = [word for key, value in changes.items() for word in ("--set", f"{key}={value}")]
    scaletrain("train", f"{run}.yaml", "--run-id", run, *settings, code=0)


def exported(run: str, folder: str, *options: str) -> str:
    scaletrain("checkpoint", "export", run, "-o", folder, *options, code=0)
    return folder


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")  # by PEFT
@pytest.mark.long  # 20 CPU seconds each
@pytest.mark.parametrize(
    "name", ["chatml", "llama-3.1", "llama-4", "glm-4.5", "gemma", "qwen-2.5", "qwen-3", THINKING, "mistral-v3", LORA]
)
def test_ten_learned_answers_are_generated_and_end(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import AutoModelForCausalLM

    monkeypatch.chdir(tmp_path)
    fix_date(monkeypatch, DataSpec.model_fields["chat_template_date"].default)  # Llama 3.1 writes it into the prompt
    model = str(model_folder(name.partition(",")[0], tmp_path / "model"))
    if name == LORA:  # which needs weights that know the words
        train("base", model, rows_of(name, ANSWERS[::-1]))
        model = exported("base", "tuned", "--dtype", "fp32")
    train("chats", model, rows_of(name, ANSWERS), *["--lora"] * (name == LORA))

    sampled = scaletrain("checkpoint", "sample", "chats", *QUESTIONS, "--max-tokens", "64", "--json", code=0)
    found = sampled.data["answers"]
    assert [line for line in sampled.err.splitlines() if not line.startswith("generating up to ")] == []
    assert [answer["stopped"] for answer in found] == [True] * 10
    assert [answer["text"].rpartition("</think>")[2].strip() for answer in found] == ANSWERS
    thoughts = [
        f"They ask for {question}." in answer["text"] for question, answer in zip(QUESTIONS, found, strict=True)
    ]
    assert thoughts == [name == THINKING] * 10

    answers = [answer["text"] for answer in found]
    folder = exported("chats", "out", "--dtype", "fp32")
    assert generated(AutoModelForCausalLM.from_pretrained(folder), folder) == answers
    if name == LORA:
        from peft import PeftModel

        folder = exported("chats", "adapter", "--format", "peft")
        assert (
            generated(PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model), folder), folder) == answers
        )


def generated(model: Any, folder: str) -> list[str]:
    import torch
    from transformers import AutoTokenizer

    tokenizer, answers = AutoTokenizer.from_pretrained(folder), []
    for question in QUESTIONS:
        chat = [{"role": "user", "content": question}]
        options: dict[str, Any] = {"return_tensors": "pt", "return_dict": True}
        prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, **options)
        with torch.no_grad():
            whole = model.generate(**prompt, max_new_tokens=64, do_sample=False)[0].tolist()
        assert len(whole) < prompt["input_ids"].shape[1] + 64, "it stops"
        answers.append(tokenizer.decode(whole[prompt["input_ids"].shape[1] : -1]))
    return answers


def test_a_sample_has_the_prompt_of_the_template_and_says_whether_it_ended(tmp_path: Path) -> None:
    folder = model_folder("chatml", tmp_path / "model")
    request = {"prompts": ["red", "blue"], "system": "Be brief.", "raw": False, "variables": {}, "date": "2024-07-26"}
    request |= {"max_tokens": 3, "temperature": 0.0, "seed": 0}
    (tmp_path / "request.json").write_text(json.dumps(request))
    found = run_command([str(folder), str(tmp_path / "request.json")])
    plain, _ = chat_of("chatml")
    prompt = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nred<|im_end|>\n<|im_start|>assistant\n"
    first, second = found["answers"]
    assert first["prompt_tokens"] == len(plain.encode(prompt, add_special_tokens=False).ids)
    assert [(answer["tokens"], answer["stopped"]) for answer in (first, second)] == [(3, False)] * 2

    (tmp_path / "request.json").write_text(json.dumps(request | {"raw": True, "temperature": 2.0, "max_tokens": 20}))
    together = run_command([str(folder), str(tmp_path / "request.json")])["answers"]
    assert together[0]["prompt_tokens"] == len(plain.encode("red").ids)
    alone = request | {"raw": True, "temperature": 2.0, "max_tokens": 20, "prompts": ["blue"]}
    (tmp_path / "request.json").write_text(json.dumps(alone))
    assert run_command([str(folder), str(tmp_path / "request.json")])["answers"] == together[1:]
