"""Losses and greedy continuations of a model on one device are those of transformers."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from scaletrain_cli.engine.evaluation.inference import generate, load_model, mean_loss
from scaletrain_cli.plan.memory.activations import LOSS_CHUNK_TOKENS
from scaletrain_cli.spec import ModelSpec
from scaletrain_cli.spec.hugging_face import from_config
from tests.model_sizes import model_sizes

SEQ_LEN = 16
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small Llama with large random weights, saved by transformers: its choices are clear."""
    torch.manual_seed(1)
    config = transformers.LlamaConfig(
        **model_sizes(vocab=61, hidden=32, layers=2, heads=4, kv_heads=2, intermediate=48, positions=64),
        initializer_range=0.3,
    )
    folder = tmp_path_factory.mktemp("llama")
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def spec_of(folder: Path) -> ModelSpec:
    import json

    return ModelSpec.model_validate(
        {**from_config(json.loads((folder / "config.json").read_text())), "seq_len": SEQ_LEN}
    )


def test_the_loss_of_documents_is_the_mean_over_all_predicted_tokens(weights: Path) -> None:
    model = load_model(weights, spec_of(weights), CPU, torch.float32)
    documents = [[1, 5, 9, 30, 2], list(range(40)), [7]]
    found = mean_loss(model, documents, SEQ_LEN, CPU)
    reference = transformers.AutoModelForCausalLM.from_pretrained(weights, dtype=torch.float32)
    total, count = 0.0, 0
    for document in documents:
        for start in range(0, len(document) - 1, SEQ_LEN):
            part = torch.tensor([document[start : start + SEQ_LEN + 1]])
            logits = reference(part[:, :-1]).logits[0].float()
            total += torch.nn.functional.cross_entropy(logits, part[0, 1:], reduction="sum").item()
            count += part.shape[1] - 1
    assert count == 4 + 39
    assert found == pytest.approx(total / count, rel=1e-6)
    with pytest.raises(ValueError, match="no document has two tokens"):
        mean_loss(model, [[3], []], SEQ_LEN, CPU)
    torch.nn.init.constant_(model.lm_head.weight, torch.nan)
    with pytest.raises(ValueError, match="the loss is nan"):
        mean_loss(model, documents, SEQ_LEN, CPU)


def test_the_logits_of_a_long_document_are_never_in_memory_at_once(weights: Path) -> None:
    model, tokens = load_model(weights, spec_of(weights), CPU, torch.float32), 2 * LOSS_CHUNK_TOKENS
    sizes: list[int] = []
    of_chunk = model.lm_head.token_loss

    def counted(*arguments: Any) -> Any:
        sizes.append(len(arguments[2]))
        return of_chunk(*arguments)

    model.lm_head.token_loss = counted
    document = [number % 61 for number in range(tokens + 1)]
    mean_loss(model, [document], tokens, CPU)
    assert sizes == [LOSS_CHUNK_TOKENS] * 2


def test_a_greedy_continuation_is_that_of_transformers_and_stops_at_the_end_token(weights: Path) -> None:
    model = load_model(weights, spec_of(weights), CPU, torch.float32)
    prompt = [4, 17, 33]
    reference = transformers.AutoModelForCausalLM.from_pretrained(weights, dtype=torch.float32)
    expected = reference.generate(
        torch.tensor([prompt]), attention_mask=torch.ones(1, 3), max_new_tokens=10, do_sample=False, eos_token_id=None
    )[0, 3:].tolist()

    def continued(
        end_tokens: list[int], temperature: float = 0.0, seed: int = 1, after: int | None = None
    ) -> list[int]:
        return generate(
            model,
            prompt if after is None else [*prompt, after],
            max_new_tokens=10,
            temperature=temperature,
            end_tokens=end_tokens,
            seq_len=SEQ_LEN,
            seed=seed,
            device=CPU,
        )

    assert continued([]) == expected
    assert continued([expected[4]]) == expected[: expected.index(expected[4])]
    assert continued([60], after=60) == continued([60])  # a tokenizer puts the end of a text behind each prompt
    assert continued([], temperature=1.0) == continued([], temperature=1.0)
    assert len({tuple(continued([], temperature=5.0, seed=seed)) for seed in range(5)}) > 1
