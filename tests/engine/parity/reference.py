"""The run that every layout must equal: one process and one plain torch loop, with no DeepSpeed and no parallelism.

The model's parts and its first weights are the product's; the batch, loss, clipping, decay and update are written out.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from scaletrain_cli.engine.data.batches import sample_at
from scaletrain_cli.engine.data.dataset import open_dataset
from scaletrain_cli.engine.model import outline
from scaletrain_cli.engine.model.attention import TokenContext, assign_dropout_keys
from scaletrain_cli.engine.model.causal_lm import CausalLM
from scaletrain_cli.engine.model.materialization import ScaledInitialization, materialize
from scaletrain_cli.engine.optim.schedules import learning_rate
from scaletrain_cli.spec import RunSpec
from tests.engine.ranks import on_ranks

_CPU = torch.device("cpu")


@dataclass(frozen=True)
class Trained:
    """The result of a run: loss and gradient norm before clipping by step, and the final weights by name."""

    losses: list[float]
    norms: list[float]
    weights: dict[str, Tensor]


def train_alone(spec: RunSpec) -> Trained:
    """Train all steps of a run in fp32, whatever the spec says, in a forked process with one thread, as ranks are."""
    return on_ranks(1, _train, spec, connected=False)[0]


def _train(spec: RunSpec) -> Trained:
    training, settings = spec.training, spec.training.optimizer
    _, sequences, _ = open_dataset(Path(spec.data.source), spec.transformer.seq_len)
    model = first_weights(spec)
    decayed = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    others = [parameter for parameter in model.parameters() if parameter.ndim <= 1]
    groups = [{"params": decayed, "weight_decay": settings.weight_decay}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, betas=settings.betas, eps=settings.eps)
    losses, norms = [], []
    for step in range(1, spec.total_steps + 1):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, spec.total_steps, training)
        first = (step - 1) * training.global_batch_size
        positions = range(first, first + training.global_batch_size)
        drawn = [sample_at(position, seed=training.seed, samples=len(sequences)) for position in positions]
        loss = batch_loss(model, spec, torch.from_numpy(sequences.rows(drawn)), torch.tensor(positions))
        optimizer.zero_grad()
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), training.gradient_clipping).item())
        optimizer.step()
        losses.append(loss.item())
    return Trained(losses, norms, {name: value.detach().clone() for name, value in model.named_parameters()})


def first_weights(spec: RunSpec) -> CausalLM:
    """Return the whole model with the weights of the seed."""
    model, own = outline(spec.transformer), spec.transformer
    assign_dropout_keys(model, spec.training.seed)
    source = ScaledInitialization(
        spec.training.seed, own.initializer_range, own.num_hidden_layers, model.residual_projections, _CPU
    )
    materialize(model, source, _CPU)
    return model


def batch_loss(model: CausalLM, spec: RunSpec, rows: Tensor, samples: Tensor) -> Tensor:
    """Mean cross-entropy in nats over the tokens that count.

    rows [batch, length + 1] int64; samples [batch]: their places in the run, which decide what is dropped.
    """
    tokens, labels = rows[:, :-1], rows[:, 1:].clone()
    if spec.data.loss_mask == "document_starts":
        labels[tokens == end_of_text(Path(spec.data.source))] = -100
    context = TokenContext(torch.arange(tokens.shape[1]), samples)
    hidden = model.transform(model.embed(tokens, context), context)
    logits = F.linear(model.final_norm(hidden), model.lm_head.weight)
    smoothing = spec.training.label_smoothing
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100, label_smoothing=smoothing)


def end_of_text(dataset: Path) -> int:
    """Return the end-of-text token."""
    tokenizer = json.loads((dataset / "tokenizer.json").read_text(encoding="utf-8"))
    [token] = [token["id"] for token in tokenizer["added_tokens"]]
    return int(token)
