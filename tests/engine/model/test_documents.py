import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor

from scaletrain_cli.engine.compose import wrap_blocks
from scaletrain_cli.engine.data.batches import BatchReader
from scaletrain_cli.engine.model.attention import AttentionWithDropout, TokenContext, causal_attention
from scaletrain_cli.engine.model.rope import rotary_tables
from scaletrain_cli.engine.parallel.mesh import Mesh
from scaletrain_cli.spec import ModelSpec
from scaletrain_cli.spec.hugging_face_weights import to_hugging_face
from scaletrain_cli.spec.training import LayoutSpec
from tests.engine.data.test_batches import WHOLE
from tests.engine.data.token_sequences import TokenSequences
from tests.engine.fresh_model import build_model
from tests.engine.model.families import logits
from tests.engine.model.test_models import GPT, LLAMA, spec

LENGTHS = (7, 3, 12, 10)  # of the documents of one row of 32 tokens
models = pytest.mark.parametrize("dims", [LLAMA, GPT, {**LLAMA, "qk_norm": True}], ids=["llama", "gpt", "qwen3"])


def documents() -> list[Tensor]:
    """Return the tokens of the documents of one row."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(512, (length,), generator=generator) for length in LENGTHS]


def packed() -> tuple[Tensor, Tensor, TokenContext]:
    """Return tokens, labels and context of one row with all documents."""
    parts = documents()
    labels = torch.cat([torch.cat([part[1:], torch.tensor([-100])]) for part in parts])
    positions = torch.cat([torch.arange(length) for length in LENGTHS])
    numbers = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))
    return torch.cat(parts)[None], labels[None], TokenContext(positions[None], torch.arange(1), numbers[None])


@models
@pytest.mark.parametrize("scope", ["block", "attention"])
def test_recomputed_blocks_with_documents_have_the_same_gradients(dims: dict[str, Any], scope: str) -> None:
    plain, recomputed = build_model(spec(dims), seed=0), build_model(spec(dims), seed=0)
    wrap_blocks(recomputed, LayoutSpec(selective_scope=scope), "selective")
    tokens, labels, context = packed()
    for model in (plain, recomputed):
        model(tokens, labels, context).backward()
    pairs = zip(plain.parameters(), recomputed.parameters(), strict=True)
    assert all(torch.equal(a.grad, b.grad) for a, b in pairs)


@models
def test_transformers_computes_the_same_loss_of_packed_documents(dims: dict[str, Any], tmp_path: Path) -> None:
    ours = build_model(spec({**dims, "max_position_embeddings": 32}), seed=0)
    config = to_hugging_face(ModelSpec.model_validate({**dims, "max_position_embeddings": 32}))
    (tmp_path / "config.json").write_text(json.dumps(config))
    theirs = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.from_pretrained(tmp_path), attn_implementation="sdpa"
    ).eval()
    theirs.load_state_dict(ours.state_dict(), strict=False)
    tokens, labels, context = packed()
    shifted = torch.cat([torch.tensor([[-100]]), labels[:, :-1]], dim=1)
    with torch.no_grad():
        found = theirs(input_ids=tokens, labels=shifted, position_ids=context.positions, use_cache=False).loss
        torch.testing.assert_close(ours(tokens, labels, context), found, rtol=1e-6, atol=1e-6)


# Each kind of attention that a model can have, and attention with a mask, as on a GPU without a kernel by document.
ATTENTION: dict[str, dict[str, Any]] = {
    "by document": {},
    "with a mask": {},
    "windows": {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]},
    "windows with a mask": {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]},
    "unfused": {"attn_logit_softcapping": 0.5},
    "sinks": {"attention_sinks": True, "sliding_window": 5},
    "latent": {"num_key_value_heads": 4, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "v_head_dim": 12},
}


@pytest.mark.parametrize("kind", ATTENTION)
def test_documents_of_a_batch_are_computed_as_if_alone(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build_model(spec({**LLAMA, **ATTENTION[kind], "initializer_range": 0.1}), seed=0)
    if kind == "sinks":
        torch.nn.init.normal_(model.model.layers["0"].self_attn.sinks)
    random = np.random.default_rng(0)
    tokens = random.integers(0, 512, 8 * 32 + 1).astype(np.uint16)
    text = TokenSequences(tokens, 32, np.flatnonzero(random.random(len(tokens)) < 0.1).astype(np.int64))
    layout = replace(WHOLE, micro_batch_size=2, gradient_accumulation_steps=3, global_batch_size=6)
    reader = BatchReader(text, layout, Mesh(), seed=0, mask_document_starts=False, within_documents=True)
    losses, weights, cut = [], [], False
    for batch in reader.batch(1).micro_batches():
        expected, parts = [], []
        for row, documents in zip(batch.tokens, batch.documents, strict=True):
            lengths = torch.unique_consecutive(documents, return_counts=True)[1].tolist()
            parts += row.split(lengths)
            cut |= len(lengths) > 1
            expected.append(torch.cat([logits(model, part[None])[0] for part in row.split(lengths)]))
        if "mask" in kind:
            monkeypatch.setattr("scaletrain_cli.engine.model.attention.is_supported", lambda *_: False)
        torch.testing.assert_close(logits(model, batch.tokens, batch.context), torch.stack(expected), rtol=0, atol=1e-5)
        counted = int((batch.labels != -100).sum())
        losses.append(model(batch.tokens, batch.labels, batch.context).item() * counted)
        weights.append(counted)
        monkeypatch.undo()
        ends = F.cross_entropy(torch.cat(expected), batch.labels.flatten(), reduction="sum").item()
        assert losses[-1] == pytest.approx(ends, rel=1e-5)
    assert cut
    assert sum(weights) == pytest.approx(float(batch.divisor) * 3)


def test_dropout_in_attention_stays_within_documents() -> None:
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(1, heads, 32, 8, generator=generator) for heads in (4, 2, 2))
    *_, context = packed()
    nearly_none = AttentionWithDropout(1e-9)  # rounds to no dropped weight, and computes as with dropout
    mixed, plain = nearly_none(query, key, value, context), causal_attention(query, key, value, context)
    torch.testing.assert_close(mixed, plain)
    changed = value.clone()
    changed[:, :, :7] += 1  # the first document
    dropped = AttentionWithDropout(0.5)
    assert torch.equal(dropped(query, key, value, context)[:, :, 7:], dropped(query, key, changed, context)[:, :, 7:])


def test_dropout_of_channels_is_keyed_by_the_place_in_the_row_where_positions_restart() -> None:
    model = build_model(spec({**LLAMA, "hidden_dropout": 0.5}), seed=0)
    tokens, _, context = packed()
    restarted = model.embed(tokens, context)
    whole = model.embed(tokens, context._replace(positions=torch.arange(32)))
    assert torch.equal(restarted, whole)


def test_rotary_tables_of_rows_are_those_of_each_row() -> None:
    positions = torch.stack([torch.arange(8), torch.arange(8) * 3])
    cos, sin = rotary_tables(positions, 16, 10000.0)
    assert cos.shape == sin.shape == (2, 1, 8, 16)
    for row, alone in zip(cos, positions, strict=True):
        assert torch.equal(row[0], rotary_tables(alone, 16, 10000.0)[0])
