"""Healthy runs of many kinds, in which nothing is found that is worth more than a note. No tests here."""

from dataclasses import dataclass

from tests.diagnosis.injected_bugs.runs import Trial
from tests.diagnosis.injected_bugs.specs import SOURCES


@dataclass(frozen=True)
class Healthy:
    """A trial without a bug."""

    trial: Trial


def _text(*overrides: str, fault: str = "", attempts: int = 1) -> Healthy:
    return Healthy(Trial("text", overrides, fault, attempts=attempts))


def _images(*overrides: str) -> Healthy:
    return Healthy(Trial("images", overrides))


_TWO = "cluster.gpus_per_node=2"
_SHORT = ("training.steps=100", "checkpoint.every=50")
_SIXTY = ("training.steps=60", "training.schedule.warmup_steps=6", "evaluation.every=15", "checkpoint.every=60")
_RATE = "training.optimizer.lr"
_GPT = (
    "model={family: gpt, hidden_size: 48, num_hidden_layers: 2, num_attention_heads: 4, vocab_size: 384, seq_len: 32}"
)
_EXPERTS = ("model.num_experts=4", "model.num_experts_per_tok=2", "model.moe_intermediate_size=48")
_VIT = (
    "model={family: vit, hidden_size: 16, num_hidden_layers: 2, num_attention_heads: 2, intermediate_size: 32,"
    " num_channels: 1, num_labels: 10, image_size: 16, patch_size: 4}"
)
_SFT = ("data.source=questions.jsonl", "training.objective=sft", "model.weights=weights", f"{_RATE}=1.0e-3")
_DPO = ("data.source=pairs.jsonl", "training.objective=dpo", "model.weights=weights", f"{_RATE}=2.0e-4")
_LORA = "model.adapter={name: lora, rank: 4, targets: all-linear}"
HEALTHY: dict[str, Healthy] = {
    "language model": _text(),
    "60 steps, validated four times": _text(*_SIXTY),
    "60 steps at a sixteenth of the rate": _text(*_SIXTY, f"{_RATE}=3.0e-4"),
    "60 steps at six times the rate": _text(*_SIXTY, f"{_RATE}=3.0e-2"),
    "ZeRO-1, two ranks": _text(_TWO, "layout.zero_stage=1", *_SHORT),
    "ZeRO-2, two ranks, accumulation": _text(_TWO, "layout.zero_stage=2", "training.micro_batch_size=2", *_SHORT),
    "ZeRO-3, two ranks": _text(_TWO, "layout.zero_stage=3", *_SHORT),
    "tensor parallel": _text(_TWO, "layout.tensor_parallel=2", *_SHORT),
    "pipeline parallel": _text(_TWO, "layout.pipeline_parallel=2", "layout.zero_stage=1", *_SHORT),
    "sequence parallel": _text(_TWO, "layout.sequence_parallel=2", *_SHORT),
    "GPT with momentum SGD": _text(_GPT, "training.optimizer={name: momentum, lr: 0.1}"),
    "mixture of experts": _text(*_EXPERTS, *_SHORT),
    "fp16": _text("training.precision=fp16", *_SHORT),
    "bf16": _text("training.precision=bf16", *_SHORT),
    "two sources": _text("data.source=null", SOURCES),
    "accumulation": _text("training.micro_batch_size=2"),
    "killed and resumed": _text("checkpoint.every=30", fault="sigkill step=80 attempt=1", attempts=2),
    "Lion": _text("training.optimizer={name: lion, lr: 1.5e-3, betas: [0.9, 0.99], weight_decay: 0.3}"),
    "wider, constant rate, recomputation": _text(
        "model.hidden_size=96", "training.schedule.name=constant", "layout.activation_checkpointing=full",
        f"{_RATE}=2.0e-3", *_SHORT,
    ),
    "ResNet": _images(),
    "ViT with AdamW": _images(_VIT, "training.optimizer={name: adamw, lr: 2.0e-3}"),
    "CLIP": Healthy(Trial("pairs")),
    "SFT from weights": _text(*_SFT, *_SHORT),
    "DPO from weights": _text(*_DPO, *_SHORT),
    "LoRA from weights": _text(*_SFT, _LORA, f"{_RATE}=5.0e-3", *_SHORT),
}  # fmt: skip
