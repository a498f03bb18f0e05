"""The same trainings by TRL, in this process: one plain Llama of transformers, the same rows in the same order."""

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from datasets import Dataset
from torch.utils.data import SequentialSampler
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

from scaletrain_cli.spec import RunSpec
from scaletrain_cli.spec.hugging_face_weights import to_hugging_face
from tests.engine.fresh_model import build_model
from tests.engine.objectives.rows import LENGTH, VOCAB, Example


class _Losses:
    """A mixin that keeps rows in order and the loss of each step."""

    def _get_train_sampler(self, dataset: Any = None) -> Any:
        return SequentialSampler(dataset if dataset is not None else self.train_dataset)  # type: ignore[attr-defined]


class _SFT(_Losses, SFTTrainer):  # type: ignore[misc]
    pass


class _DPO(_Losses, DPOTrainer):  # type: ignore[misc]
    def _prepare_dataset(self, dataset: Any, *_: Any, **__: Any) -> Any:
        return dataset  # has token numbers already


def sft_losses(spec: RunSpec, rows: list[list[Example]], folder: Path) -> list[float]:
    """Return the loss of each step; a row of several examples is one padding-free micro-batch."""
    packed = any(len(row) > 1 for row in rows)
    columns = {
        "input_ids": [[token for example in row for token in example.tokens] for row in rows],
        "labels": [[label for example in row for label in _labels(example)] for row in rows],
    }
    if packed:
        columns["seq_lengths"] = [[len(example.tokens) for example in row] for row in rows]
    arguments = SFTConfig(
        **_arguments(spec, folder, 1 if packed else spec.training.micro_batch_size),
        padding_free=packed,
        max_length=None,
        packing=False,
        loss_type="nll",
    )
    trainer = _SFT(
        _model(spec, folder), args=arguments, train_dataset=Dataset.from_dict(columns), processing_class=_tokenizer()
    )
    return _train(trainer)


def dpo_run(
    spec: RunSpec, pairs: list[tuple[Example, Example]], folder: Path, **settings: Any
) -> list[dict[str, float]]:
    columns = {
        "prompt_ids": [chosen.prompt for chosen, _ in pairs],
        "chosen_ids": [chosen.answer for chosen, _ in pairs],
        "rejected_ids": [rejected.answer for _, rejected in pairs],
    }
    arguments = DPOConfig(
        **_arguments(spec, folder, spec.training.micro_batch_size),
        max_length=LENGTH,
        beta=spec.training.dpo.beta,
        **settings,
    )
    trainer = _DPO(
        _model(spec, folder),
        ref_model=_model(spec, folder),
        args=arguments,
        train_dataset=Dataset.from_dict(columns),
        processing_class=_tokenizer(),
    )
    trainer.train()
    return [line for line in trainer.state.log_history if "loss" in line]


def _train(trainer: Any) -> list[float]:
    trainer.train()
    return [line["loss"] for line in trainer.state.log_history if "loss" in line]


def _labels(example: Example) -> list[int]:
    return [-100] * len(example.prompt) + example.answer


def _arguments(spec: RunSpec, folder: Path, size: Any) -> dict[str, Any]:
    training = spec.training
    return {
        "output_dir": str(folder),
        "per_device_train_batch_size": size,
        "gradient_accumulation_steps": training.global_batch_size // size,
        "max_steps": spec.total_steps,
        **{"optim": "adamw_torch", "learning_rate": training.optimizer.lr, "lr_scheduler_type": "constant"},
        **{"adam_beta1": training.optimizer.betas[0], "adam_beta2": training.optimizer.betas[1]},
        **{"adam_epsilon": training.optimizer.eps, "weight_decay": 0.0, "max_grad_norm": training.gradient_clipping},
        **{"logging_steps": 1, "save_strategy": "no", "report_to": [], "use_cpu": True, "disable_tqdm": True},
        **dict.fromkeys(("logging_nan_inf_filter", "remove_unused_columns", "dataloader_pin_memory"), False),
        **dict.fromkeys(("bf16", "activation_checkpointing"), False),
    }


def _model(spec: RunSpec, folder: Path) -> Any:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(to_hugging_face(spec.transformer)))
    theirs = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.from_pretrained(folder), attn_implementation="sdpa"
    )
    ours = build_model(spec.transformer, spec.training.seed)
    theirs.load_state_dict(ours.state_dict())
    return theirs.to(torch.float32)


def _tokenizer() -> transformers.PreTrainedTokenizerFast:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    words = {f"w{number}": number for number in range(VOCAB)}
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(words, unk_token="w0")), pad_token="w0", eos_token="w1", unk_token="w0"
    )
