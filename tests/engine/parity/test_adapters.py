"""LoRA in every layout trains what PEFT trains: the same model of transformers in one plain torch loop."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from scaletrain_cli.engine.data.dataset import open_source_dataset
from scaletrain_cli.engine.data.sample_order import sample_at
from scaletrain_cli.engine.model import outline
from scaletrain_cli.engine.model.materialization import named_matrices
from scaletrain_cli.engine.model.safetensors import HuggingFaceFolder
from scaletrain_cli.spec import RunSpec
from scaletrain_cli.spec.training import learning_rate
from tests.engine.model.adapted_models import as_peft, ours, pairs, save_hugging_face, with_peft
from tests.engine.parity.comparison import Difference, difference
from tests.engine.parity.layouts import stray_state_bytes, train_in_layout
from tests.engine.parity.reference import Trained
from tests.engine.parity.rows import Row

STEPS = 6
# An element that moves by rounding alone moves as far as any other in Adam; hence a larger eps than that of full runs.
FP32 = Difference(loss=1e-5, norm=1e-4, weight=1e-5)
LORA = ("model.adapter={name: lora, rank: 8, alpha: 16}", "training.optimizer.eps=1.0e-4")
RSLORA = ("model.adapter={name: lora, rank: 8, rslora: true, targets: [q_proj, down_proj]}", LORA[1])
DORA = ("model.adapter={name: lora, rank: 8, alpha: 16, dora: true}", LORA[1])
ENDS = ("model.adapter={name: lora, rank: 8, alpha: 16, targets: [v_proj, embed_tokens, lm_head]}", LORA[1])
TIED = (*ENDS, "model.tie_word_embeddings=true")
GPT = (*DORA, "model.family=gpt", "model.num_key_value_heads=4", "model.tie_word_embeddings=true")
FUSED = (*DORA, "model.fused_projections=true")
LATENT = (
    "model.adapter={name: lora, rank: 8, alpha: 16, dora: true, targets: "
    "[q_a_proj, q_b_proj, kv_a_proj_with_mqa, kv_b_proj, o_proj]}",
    *(LORA[1], "model.num_key_value_heads=4", "model.kv_lora_rank=24", "model.q_lora_rank=32"),
    *("model.qk_rope_head_dim=8", "model.v_head_dim=12"),
)
EXPERTS = (
    "model.adapter={name: lora, rank: 8, alpha: 16, targets: [all-linear, experts.*]}",
    LORA[1],
    *("model.num_experts=4", "model.num_experts_per_tok=2", "model.moe_intermediate_size=48"),
    *("model.norm_topk_prob=true", "model.router_aux_loss_coef=0.0"),
)
ON_TWO = (*EXPERTS, "layout.expert_parallel=2")
GATED = (
    *(*ON_TWO, "model.qkv_bias=true", "model.mlp_only_layers=[1]"),
    *("model.shared_expert_intermediate_size=24", "model.shared_expert_gate=true"),
)
ROWS = [
    Row(1, pipeline=2, accumulation=2, overrides=LORA, title="lora"),
    Row(0, tensor=2, overrides=DORA, title="dora"),
    Row(2, data=2, overrides=ON_TWO, title="experts"),
]
LONG = [
    Row(2, tensor=2, sequence=2, overrides=ON_TWO, title="experts"),
    Row(0, overrides=EXPERTS, title="experts"),
    Row(0, overrides=LORA, title="lora"),
    Row(1, tensor=2, pipeline=2, accumulation=2, overrides=LORA, title="lora"),
    Row(3, data=2, checkpointing="full", overrides=DORA, title="dora"),
    Row(2, data=2, overrides=LORA, title="lora"),
    Row(3, data=2, tensor=2, accumulation=2, overrides=LORA, title="lora"),
    Row(2, data=2, overrides=RSLORA, title="rslora"),
    Row(1, sequence=2, pipeline=2, overrides=RSLORA, title="rslora"),
    Row(1, tensor=2, pipeline=2, overrides=DORA, title="dora"),
    Row(0, overrides=GPT, title="gpt dora"),
    Row(3, data=2, tensor=2, overrides=GPT, title="gpt dora"),
    Row(2, tensor=2, overrides=FUSED, title="fused projections"),
    Row(2, tensor=2, sequence=2, overrides=LATENT, title="latent attention"),
    Row(1, data=2, tensor=2, pipeline=2, overrides=LATENT, title="latent attention"),
    Row(0, overrides=ENDS, title="embedding and head"),
    Row(2, data=2, tensor=2, overrides=ENDS, title="embedding and head"),
    Row(1, tensor=2, pipeline=2, overrides=TIED, title="tied embedding and head"),
    Row(3, data=2, overrides=TIED, title="tied embedding and head"),
    Row(0, tensor=2, overrides=(*ENDS, "training.cross_entropy=chunked"), title="chunked loss"),
    Row(3, data=2, overrides=ON_TWO, title="experts"),
    Row(1, data=2, tensor=2, pipeline=2, overrides=ON_TWO, title="experts"),
    Row(3, data=2, tensor=2, overrides=GATED, title="gated experts"),
    Row(1, data=2, pipeline=2, overrides=GATED, title="gated experts"),
    Row(1, data=2, overrides=(*LORA, "training.compile=true"), title="lora compiled"),
    Row(2, data=2, overrides=(*LORA, "layout.offload=optimizer"), title="lora offload"),
    Row(1, data=2, checkpointing="selective", overrides=LORA, title="lora"),
]


_BF16 = "training.precision=bf16"
IN_BF16 = [
    Row(0, overrides=(*LORA, _BF16), title="lora bf16"),
    Row(1, data=2, overrides=(*LORA, _BF16), title="lora bf16"),
    Row(2, tensor=2, overrides=(*DORA, _BF16), title="dora bf16"),
    Row(3, data=2, checkpointing="full", overrides=(*LORA, _BF16), title="lora bf16"),
    Row(1, pipeline=2, accumulation=2, overrides=(*LORA, _BF16), title="lora bf16"),
    Row(2, tensor=2, sequence=2, overrides=(*ON_TWO, _BF16), title="experts bf16"),
]


def with_weights(row: Row, folder: Path) -> Row:
    return replace(row, overrides=(*row.overrides, f"model.weights={folder}"))


def spec_of(row: Row, dataset: Path, folder: Path) -> RunSpec:
    spec = with_weights(row, folder).spec(dataset, STEPS)
    if not folder.exists():
        save_hugging_face(spec.transformer, folder)
    return spec


def targets_of(spec: RunSpec) -> dict[str, Any]:
    """Return the names of a spec's targets in PEFT's LoraConfig."""
    adapter, model = spec.transformer.adapter, spec.transformer
    if model.family == "gpt":
        return {"target_modules": ["c_attn", "c_proj", "c_fc"], "fan_in_fan_out": True}
    if model.num_experts:
        stacks = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
        modules = ["q_proj", "k_proj", "v_proj", "o_proj"]
        modules += ["gate_proj", "up_proj", "down_proj", "shared_expert_gate"] if model.shared_expert_gate else []
        return {"target_modules": modules, "target_parameters": stacks}
    given = list(adapter.targets)
    return {"target_modules": "all-linear" if given == ["all-linear"] else given}


def train_with_peft(spec: RunSpec, folder: Path) -> Trained:
    """Train all steps with PEFT; the weights have our names and shapes."""
    from transformers import AutoModelForCausalLM

    model, training, adapter = spec.transformer, spec.training, spec.transformer.adapter
    base: Any = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32)
    theirs = with_peft(base, adapter, **targets_of(spec)).train()
    mine = ours(model, adapter, folder, training.seed)
    found = list(pairs(mine, theirs))
    with torch.no_grad():
        for name, parameter, other in found:
            other.copy_(as_peft(name, parameter))
    factors = [other for _, _, other in found]
    decayed = [
        {"params": [each], "weight_decay": training.optimizer.weight_decay * (each.ndim > 1)} for each in factors
    ]
    optimizer = torch.optim.AdamW(decayed, betas=training.optimizer.betas, eps=training.optimizer.eps)
    _, sequences, _ = open_source_dataset(Path(spec.data.source), model.seq_len)
    losses, norms = [], []
    for step in range(1, spec.total_steps + 1):
        first = (step - 1) * training.global_batch_size
        drawn = [
            sample_at(first + place, seed=training.seed, samples=len(sequences))
            for place in range(training.global_batch_size)
        ]
        rows = torch.from_numpy(sequences.rows(drawn))
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, spec.total_steps, training)
        logits = theirs(input_ids=rows[:, :-1]).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(factors, training.gradient_clipping).item())
        optimizer.step()
        losses.append(loss.item())
    return Trained(losses, norms, {name: as_ours(name, mine, other) for name, mine, other in found})


def as_ours(name: str, ours_: torch.Tensor, theirs: torch.Tensor) -> torch.Tensor:
    """Return a factor of PEFT in our shape, see ``as_peft``."""
    values = theirs.detach()
    if ours_.ndim < 3:
        return values
    experts, rows, columns = ours_.shape
    return values.view(ours_.shape) if name.endswith("A") else values.view(rows, columns, experts).permute(2, 0, 1)


@pytest.mark.parametrize(
    "row", [*ROWS, *(pytest.param(row, marks=pytest.mark.long) for row in LONG)], ids=lambda row: row.name
)
def test_a_layout_trains_what_peft_trains(row: Row, dataset: Path, tmp_path: Path) -> None:
    folder = tmp_path / "base"
    spec = spec_of(row, dataset, folder)
    expected = train_with_peft(spec_of(row.reference, dataset, folder), folder)

    trained = train_in_layout(spec).trained

    factors = {name: values for name, values in trained.weights.items() if "lora_" in name}
    found = difference(replace(trained, weights=factors), expected)
    assert found.within(FP32), found
    trained_b = [values for name, values in expected.weights.items() if "lora_B" in name or "embedding_A" in name]
    assert all(values.abs().max() > 1e-4 for values in trained_b)  # zero at first
    whole = outline(spec.transformer)
    read = HuggingFaceFolder(folder, whole).read
    for name, shape in named_matrices(whole):
        if name in trained.weights:
            assert torch.equal(trained.weights[name], read(name, shape, None)), f"{name} is not frozen"


@pytest.mark.long
@pytest.mark.parametrize("row", IN_BF16, ids=lambda row: row.name)
def test_fp32_factors_over_a_bf16_base_train_closely_in_planned_bytes(row: Row, dataset: Path, tmp_path: Path) -> None:
    spec = spec_of(row, dataset, tmp_path / "base")
    run = train_in_layout(spec)
    expected = train_with_peft(spec, tmp_path / "base")

    assert max(abs(a - b) for a, b in zip(run.trained.losses, expected.losses, strict=True)) < 2e-3
    for name, values in expected.weights.items():
        assert (run.trained.weights[name] - values).abs().max() < 5e-3, name
    assert stray_state_bytes(run) == 0
