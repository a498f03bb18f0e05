"""An adapter on each family of models is exported so that PEFT computes the same with transformers' model."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from scaletrain_cli.spec import ModelSpec
from scaletrain_cli.spec.hugging_face import from_config
from tests.engine.model.adapted_models import lora
from tests.engine.model.test_peft_files import trained, write

GROUPED = {"num_key_value_heads": 2}
WINDOW = {"head_dim": 8, "sliding_window": 8}
FAMILIES: dict[str, dict[str, Any]] = {
    "phi3": {**GROUPED, "pad_token_id": 0},  # fused projections: one A for queries, keys and values
    "gemma2": {**WINDOW, "query_pre_attn_scalar": 8},
    "gemma3_text": WINDOW,
    "olmo2": GROUPED,
    "qwen2": GROUPED,
    "qwen3": {**GROUPED, "head_dim": 8},
    "mistral": GROUPED,
    "deepseek_v3": {  # in PEFT without DoRA, because dense and shared MLPs are parameters there
        **{"kv_lora_rank": 16, "q_lora_rank": 24, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 12},
        **{"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_group": 2, "topk_group": 1},
        **{"first_k_dense_replace": 1, "num_key_value_heads": 4, "router_aux_loss_coef": 0.0},
    },
}


CASES = [
    pytest.param(family, dora, marks=() if family in ("phi3", "gemma2") else pytest.mark.long)
    for family in FAMILIES
    for dora in (False, True)
    if family != "deepseek_v3" or not dora
]


@pytest.mark.parametrize(("family", "dora"), CASES)
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")  # PEFT: a renamed property
def test_peft_computes_the_same_with_an_exported_adapter(family: str, dora: bool, tmp_path: Path) -> None:
    import transformers
    from peft import PeftModel

    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes |= {"vocab_size": 64, "max_position_embeddings": 16, "bos_token_id": 0, "eos_token_id": 0}
    config: Any = transformers.CONFIG_MAPPING[family](**sizes, **FAMILIES[family], initializer_range=0.2)
    torch.manual_seed(0)
    base: Any = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    base.save_pretrained(tmp_path / "base")
    found = from_config(json.loads((tmp_path / "base" / "config.json").read_text()))
    adapter = lora(dora=dora, targets=("all-linear", "*.experts.*" if "num_experts" in found else "all-linear"))
    spec = ModelSpec(**{"head_dim": 8, "num_key_value_heads": 4, **found, "seq_len": 16, "adapter": adapter})
    tokens = torch.arange(32).view(2, 16)
    labels = torch.cat((tokens[:, 1:], torch.full((2, 1), -100)), dim=1)
    with torch.no_grad():
        untrained = base(input_ids=tokens, labels=tokens).loss.item()

    model = trained(spec, adapter, tmp_path / "base")
    write(spec, adapter, model, tmp_path / "adapter", tmp_path / "base")
    theirs: Any = PeftModel.from_pretrained(base, tmp_path / "adapter").eval()

    with torch.no_grad():
        expected = theirs(input_ids=tokens, labels=tokens).loss.item()
        assert model(tokens, labels).item() == pytest.approx(expected, rel=1e-6)
    assert abs(expected - untrained) > 1e-3
