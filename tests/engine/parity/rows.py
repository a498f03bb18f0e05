"""The rows of the parity table: specs that must train the same model as one process does."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

from scaletrain_cli.spec import RunSpec, parse_spec

STEPS = 20
VOCAB_SIZE = 289  # which no number of tensor ranks divides
MOST_RANKS = 8

# Clipping binds at some steps and not at others, matrices decay and norms do not, heads are grouped. eps is large
# enough that an element whose gradient is nothing but rounding does not move as far as any other.
_SPEC = f"""
schema: scaletrain/v1
name: parity
model: {{family: llama, hidden_size: 64, num_hidden_layers: 3, num_attention_heads: 4, num_key_value_heads: 2,
        intermediate_size: 96, vocab_size: {VOCAB_SIZE}, seq_len: 32}}
data: {{source: DATASET, tokenizer: {{vocab_size: {VOCAB_SIZE}}}}}
training:
  {{global_batch_size: 8, steps: NUMBER, precision: fp32, gradient_clipping: 2.14,
    optimizer: {{lr: 1.0e-3, eps: 1.0e-6}}, schedule: {{warmup_steps: WARM_UP}}}}
evaluation: {{every: 0}}
layout: {{virtual_pipeline: 1, expert_parallel: 1}}
cluster: {{gpu: cpu}}
checkpoint: {{every: 1000}}
guard: {{checksum: 1}}
"""
_GLOBAL_BATCH_SIZE = 8
# Overrides under these keys change how a run is trained, and not what should come of it.
_MANNER = ("layout.", "training.precision", "training.compile", "training.cross_entropy")


@dataclass(frozen=True)
class Row:
    """A layout, and other differences from the base spec: ``overrides`` have the form of ``--set``."""

    zero: int = 0
    data: int = 1
    tensor: int = 1
    pipeline: int = 1
    sequence: int = 1
    accumulation: int = 1
    checkpointing: str = "none"
    overrides: tuple[str, ...] = ()
    title: str = ""  # of the overrides
    context: int = 1

    @property
    def ranks(self) -> int:
        return self.data * self.tensor * self.pipeline * self.sequence * self.context

    @property
    def name(self) -> str:
        """Unique, and short enough for a table and for ``pytest -k``."""
        sizes = {"dp": self.data, "tp": self.tensor, "pp": self.pipeline, "sp": self.sequence, "cp": self.context}
        sizes |= {"ga": self.accumulation}
        cut = [f"{axis}{size}" for axis, size in sizes.items() if size > 1]
        recomputed = [] if self.checkpointing == "none" else [self.checkpointing]
        return " ".join([f"zero{self.zero}", *cut, *recomputed, *([self.title] if self.title else [])])

    @property
    def reference(self) -> Row:
        return Row(overrides=tuple(key for key in self.overrides if not key.startswith(_MANNER)))

    def spec(self, dataset: Path, steps: int = STEPS) -> RunSpec:
        sets = {
            "cluster.gpus_per_node": self.ranks,
            "layout.zero_stage": self.zero,
            "layout.data_parallel": self.data,
            "layout.tensor_parallel": self.tensor,
            "layout.pipeline_parallel": self.pipeline,
            "layout.sequence_parallel": self.sequence,
            "layout.context_parallel": self.context,
            "layout.activation_checkpointing": self.checkpointing,
            "training.micro_batch_size": _GLOBAL_BATCH_SIZE // (self.data * self.accumulation),
        }
        overrides = [*(f"{key}={value}" for key, value in sets.items()), *self.overrides]
        text = _SPEC.replace("DATASET", str(dataset)).replace("NUMBER", str(steps))
        text = text.replace("WARM_UP", str(min(5, steps // 2)))
        return parse_spec(text, file="parity.yaml", base_dir=dataset, overrides=overrides)


def with_features(row: Row, title: str, *overrides: str) -> Row:
    """Return the row with further overrides, and their name."""
    return replace(row, overrides=overrides, title=title)


def grid() -> list[Row]:
    """Every combination that is legal on up to MOST_RANKS ranks; data parallel over two of them where there is room.

    A pipeline runs with ZeRO-1 alone.
    """
    rows = []
    for zero, tensor, pipeline, sequence, accumulation, checkpointing in product(
        (0, 1, 2, 3), (1, 2), (1, 2), (1, 2), (1, 4), ("none", "selective", "full")
    ):
        if pipeline == 1 or zero == 1:
            data = 2 if 2 * tensor * pipeline * sequence <= MOST_RANKS else 1
            rows.append(Row(zero, data, tensor, pipeline, sequence, accumulation, checkpointing))
    return rows


def rings() -> list[Row]:
    """Return rows with context parallelism, alone and with every other kind."""
    cubed = Row(1, tensor=2, pipeline=2, context=2, accumulation=4, checkpointing="selective")
    both = Row(2, data=2, sequence=2, context=2)
    return [
        *(Row(zero, data=2, context=2, accumulation=4) for zero in (0, 1, 2, 3)),
        Row(3, context=4),
        Row(0, context=8),
        Row(0, tensor=2, context=2, checkpointing="full"),
        Row(1, sequence=2, context=4),
        Row(3, sequence=4, context=2),
        both,
        cubed,
        with_features(Row(1, context=2, checkpointing="selective"), "of attention", "layout.selective_scope=attention"),
        with_features(Row(2, data=2, context=2), "experts", *_MIXTURE),
        with_features(Row(2, data=2, context=2), "groups of experts", *_MIXTURE, *_GROUPS),
        with_features(both, "hidden dropout", "model.hidden_dropout=0.1"),
        with_features(Row(3, data=2, context=2), "document mask", *_MASK),
        with_features(cubed, "tied", "model.tie_word_embeddings=true"),
        with_features(Row(3, tensor=2, context=2), "gpt", *_GPT),
        with_features(both, "deepseek", *_DEEPSEEK),
        with_features(cubed, "deepseek", *_DEEPSEEK),
        with_features(Row(2, data=2, context=2), "activation offload", "layout.activation_offload=true"),
        with_features(Row(3, context=2), "compiled", "training.compile=true"),
        with_features(both, "muon", *MUON),
        with_features(Row(3, tensor=2, context=2), "muon", *MUON),
        with_features(Row(1, data=2, context=2), "local sgd", *LOCAL_SGD),
        with_features(Row(3, data=2, sequence=2, context=2), "local sgd muon", *LOCAL_SGD, *MUON),
    ]


_MIXTURE = (
    "model.num_experts=4",
    "model.num_experts_per_tok=2",
    "model.moe_intermediate_size=48",
    "model.router_aux_loss_coef=0.01",
    "layout.expert_parallel=2",
)
# DeepSeek-V3's router, with a loss that weighs much.
_GROUPS = (
    *("model.scoring_func=sigmoid", "model.topk_method=noaux_tc", "model.norm_topk_prob=true", "model.n_group=2"),
    *("model.topk_group=1", "model.routed_scaling_factor=2.5", "model.router_aux_loss_coef=0.1"),
    "model.bias_update_speed=0.01",
)
# Qwen2-MoE: a gated shared expert, and a dense block between two with experts.
_GATED = ("model.shared_expert_intermediate_size=24", "model.shared_expert_gate=true", "model.mlp_only_layers=[1]")
_DROPOUT = ("model.hidden_dropout=0.1", "model.attention_dropout=0.1")
_GPT = ("model.family=gpt", "model.num_key_value_heads=4", "model.tie_word_embeddings=true")
_MASK = ("data.loss_mask=document_starts",)
_DOCUMENTS = ("data.packing=documents",)
_NO_AUXILIARY_LOSS = (
    "model.router_aux_loss_coef=0"  # a mean over the tokens of a pass, which the reference has fewer of
)
# A copy of the weights over pairs of ranks; matrices of the MLP are so large that ZeRO-3 does not keep them whole.
_SECOND = ("layout.zero_secondary_shard_size=2", "model.intermediate_size=1602")
_GROUPED = ("layout.zero_shard_size=2", "model.intermediate_size=1602")
_SMOOTHING = ("training.label_smoothing=0.1",)

# In bf16 a difference in the last bit of a gradient may round a momentum to another number.
MUON = (
    "training.optimizer={name: muon, lr: 1.0e-3, eps: 1.0e-6, muon: {adamw_lr: 2.0e-3, newton_schulz_dtype: fp32}}",
)
LOCAL_SGD = ("training.local_sgd={groups: 2, inner_steps: 3}",)
_ORIGINAL = (
    "training.optimizer={name: muon, lr: 1.0e-3, eps: 1.0e-6, muon: {adjust_lr: original, nesterov: false, "
    "newton_schulz_steps: 3, newton_schulz_dtype: fp32}}",
)


# Windows of 8 of the 32 tokens, and an original context of 16 tokens.
_WINDOWS = ("model.sliding_window=8", "model.layer_types=[sliding_attention, full_attention]")
_GEMMA = (
    *("model.hidden_activation=gelu_pytorch_tanh", "model.norm_position=pre_and_post", "model.zero_centered_norm=true"),
    *("model.scale_embedding=true", "model.tie_word_embeddings=true", "model.query_pre_attn_scalar=24", *_WINDOWS),
)
_CAPS = ("model.attn_logit_softcapping=1", "model.final_logit_softcapping=2")
_LOCAL = ("model.qk_norm=true", "model.rope_local_base_freq=50")
_LONGROPE = (
    "model.rope_scaling={rope_type: longrope, short_factor: [1, 1, 1, 1, 1, 1], long_factor: [2, 2, 3, 3, 4, 4], "
    "original_max_position_embeddings: 16}"
)
_PHI3 = ("model.fused_projections=true", "model.partial_rotary_factor=0.75", "model.sliding_window=8", _LONGROPE)
_OLMO2 = ("model.norm_position=post", "model.qk_norm=true", "model.qk_norm_scope=projection")
_DEEPSEEK = (
    *("model.num_key_value_heads=4", "model.kv_lora_rank=24", "model.q_lora_rank=32", "model.qk_rope_head_dim=8"),
    *("model.v_head_dim=12", *_MIXTURE, "model.first_k_dense_replace=1", "model.shared_expert_intermediate_size=48"),
    *("model.scoring_func=sigmoid", "model.topk_method=noaux_tc", "model.n_group=2", "model.topk_group=1"),
    *("model.norm_topk_prob=true", "model.routed_scaling_factor=2.5"),
    "model.rope_scaling={rope_type: yarn, factor: 4, mscale: 1, mscale_all_dim: 1, "
    "original_max_position_embeddings: 16}",
)
_GPT_OSS = (
    *_MIXTURE,
    *_WINDOWS,
    *("model.bias=true", "model.router_bias=true", "model.norm_topk_prob=true", "model.attention_sinks=true"),
    "model.swiglu_limit=0.05",
    "model.rope_scaling={rope_type: yarn, factor: 4, truncate: false, original_max_position_embeddings: 16}",
)
FAMILIES = {
    "gpt-oss": _GPT_OSS,
    "gemma2": (*_GEMMA, *_CAPS),
    "gemma3": (*_GEMMA, *_LOCAL),
    "phi3": _PHI3,
    "olmo2": _OLMO2,
    "deepseek": _DEEPSEEK,
    "biases": ("model.bias=true",),
    "mistral": ("model.sliding_window=8",),
}


def families() -> list[Row]:
    """Return rows for each family whose layers differ from Llama's, in each kind of parallelism and in all together."""
    layouts = [
        Row(1, tensor=2, pipeline=2, sequence=2, accumulation=4),
        Row(3, data=2, tensor=2),
        Row(2, data=2, sequence=2, checkpointing="full"),
    ]
    with_muon = [(name, (*FAMILIES[name], *MUON)) for name in ("phi3", "deepseek")]
    return [
        *(with_features(row, name, *keys) for name, keys in FAMILIES.items() for row in layouts),
        *(with_features(row, f"{name} muon", *keys) for name, keys in with_muon for row in layouts[:2]),
    ]


def features() -> list[Row]:
    """Return rows for further options, each in layouts that could make a difference."""
    cubed = Row(1, tensor=2, pipeline=2, sequence=2, accumulation=4)
    return [
        with_features(Row(2, data=2), "offload optimizer", "layout.offload=optimizer"),
        with_features(Row(3, data=2, accumulation=4), "offload both", "layout.offload=optimizer+params"),
        with_features(Row(0, data=2), "experts", *_MIXTURE),
        with_features(Row(1, data=2, accumulation=4, checkpointing="full"), "experts", *_MIXTURE),
        with_features(Row(2, data=2, sequence=2), "experts", *_MIXTURE),
        with_features(Row(3, data=2, tensor=2), "experts", *_MIXTURE),
        with_features(cubed, "experts", *_MIXTURE),
        with_features(Row(1, data=2, sequence=2), "experts of some capacity", *_MIXTURE, "model.capacity_factor=1.25"),
        with_features(Row(2, data=2, sequence=2, accumulation=4), "gated experts", *_MIXTURE, *_GATED),
        with_features(Row(3, data=2, tensor=2, checkpointing="selective"), "gated experts", *_MIXTURE, *_GATED),
        with_features(cubed, "gated experts", *_MIXTURE, *_GATED),
        with_features(Row(2, data=2, sequence=2), "groups of experts", *_MIXTURE, *_GROUPS),
        with_features(cubed, "groups of experts", *_MIXTURE, *_GROUPS, "model.router_bias=true"),
        with_features(Row(0, data=2, tensor=2, sequence=2), "dropout", *_DROPOUT),
        with_features(Row(3, data=2, accumulation=4, checkpointing="full"), "dropout", *_DROPOUT),
        with_features(cubed, "dropout", *_DROPOUT),
        with_features(Row(2, tensor=2, accumulation=4), "label smoothing", *_SMOOTHING),
        with_features(cubed, "label smoothing", *_SMOOTHING),
        with_features(Row(3, data=2, sequence=2), "document mask", *_MASK),
        with_features(cubed, "document mask", *_MASK),
        with_features(Row(3, data=2, sequence=2), "documents", *_DOCUMENTS),
        with_features(cubed, "documents", *_DOCUMENTS),
        with_features(cubed, "documents in windows", *_DOCUMENTS, *_WINDOWS),
        with_features(Row(3, data=2, tensor=2, sequence=2), "documents with caps", *_DOCUMENTS, *_CAPS),
        with_features(Row(2, data=2, sequence=2), "documents with sinks", *_DOCUMENTS, *_GPT_OSS, _NO_AUXILIARY_LOSS),
        with_features(cubed, "documents in latent attention", *_DOCUMENTS, *_DEEPSEEK, _NO_AUXILIARY_LOSS),
        with_features(Row(0, data=2, tensor=2), "tied", "model.tie_word_embeddings=true"),
        with_features(Row(3, data=2, accumulation=4), "tied", "model.tie_word_embeddings=true"),
        with_features(cubed, "tied", "model.tie_word_embeddings=true"),
        with_features(Row(3, data=2, tensor=2, sequence=2), "gpt", *_GPT),
        with_features(cubed, "gpt", *_GPT),
        with_features(Row(1, data=2, checkpointing="selective"), "of attention", "layout.selective_scope=attention"),
        with_features(replace(cubed, checkpointing="selective"), "of attention", "layout.selective_scope=attention"),
        with_features(Row(1, data=2, pipeline=2, accumulation=4), "split", "layout.pipeline_split=[1, 2]"),
        with_features(Row(2, data=2, tensor=2), "activation offload", "layout.activation_offload=true"),
        with_features(Row(3, data=2, tensor=2), "chunked loss", "training.cross_entropy=chunked"),
        with_features(Row(0, data=2, tensor=2), "muon", *MUON),
        with_features(Row(1, data=2, accumulation=4), "muon", *MUON),
        with_features(Row(2, data=4, tensor=2), "muon", *MUON),
        with_features(Row(3, data=2, tensor=2), "muon", *MUON),
        with_features(Row(3, data=2, sequence=2), "muon original", *_ORIGINAL),
        with_features(cubed, "muon", *MUON),
        with_features(Row(1, tensor=2, pipeline=4), "muon", *MUON, "model.num_hidden_layers=4"),
        with_features(Row(2, data=2), "muon offload", *MUON, "layout.offload=optimizer"),
        with_features(Row(0, data=2), "muon experts", *MUON, *_MIXTURE),
        with_features(Row(1, data=2, tensor=2), "muon experts", *MUON, *_MIXTURE),
        with_features(Row(3, data=2, tensor=2, sequence=2), "muon gated experts", *MUON, *_MIXTURE, *_GATED),
        with_features(Row(1, data=2, tensor=2), "muon gpt", *MUON, *_GPT),
        with_features(Row(0, data=2), "local sgd", *LOCAL_SGD),
        with_features(Row(1, data=4), "local sgd", *LOCAL_SGD),
        with_features(Row(2, data=4, sequence=2), "local sgd", *LOCAL_SGD),
        with_features(Row(3, data=4, tensor=2), "local sgd", *LOCAL_SGD),
        with_features(Row(2, data=2, tensor=2), "local sgd muon", *LOCAL_SGD, *MUON),
        with_features(
            Row(1, data=4), "local sgd of means", "training.local_sgd={groups: 4, inner_steps: 2, outer_optimizer: sgd}"
        ),
        with_features(Row(3, data=2), "compiled", "training.compile=true"),
        with_features(Row(2, data=4, accumulation=2), "groups of shards", *_GROUPED),
        with_features(Row(3, data=4), "groups of shards", *_GROUPED),
        with_features(Row(3, data=2, tensor=2, sequence=2, checkpointing="full"), "groups of shards", *_GROUPED),
        with_features(Row(2, data=2, context=2), "groups of shards", *_GROUPED),
        with_features(Row(3, data=4), "second weights", *_SECOND),
        with_features(Row(3, data=4, accumulation=2, checkpointing="full"), "second weights", *_SECOND),
        with_features(Row(3, data=2, sequence=2), "second weights", *_SECOND),
        with_features(Row(3, data=4), "second weights, offload optimizer", *_SECOND, "layout.offload=optimizer"),
        with_features(Row(3, data=2), "second weights of all ranks", *_SECOND),
        with_features(Row(1, tensor=2, pipeline=2), "compiled", "training.compile=true"),
    ]


def in_bf16() -> list[Row]:
    """Return rows whose loss may differ by rounding. Plans avoid bf16 without ZeRO, which is less exact."""
    rows = [
        Row(1, data=2),
        Row(2, data=2, tensor=2),
        Row(3, data=2, sequence=2, checkpointing="selective"),
        Row(1, tensor=2, pipeline=2, sequence=2, accumulation=4),
        Row(2, data=2, sequence=2, context=2),
    ]
    return [with_features(row, "bf16", "training.precision=bf16") for row in rows]
