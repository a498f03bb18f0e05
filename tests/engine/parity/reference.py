"""The run that every layout must equal: one process and one plain torch loop, with no DeepSpeed and no parallelism.

The model's parts and its first weights are the product's; the batch, loss, clipping, decay and update are written out.
"""

import fnmatch
import json
import re
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from scaletrain_cli.engine.data.dataset import open_source_dataset
from scaletrain_cli.engine.data.sample_order import sample_at
from scaletrain_cli.engine.model import outline
from scaletrain_cli.engine.model.attention import TokenContext, assign_dropout_keys
from scaletrain_cli.engine.model.base import CausalLM
from scaletrain_cli.engine.model.materialization import materialize
from scaletrain_cli.engine.model.moe import update_correction_biases
from scaletrain_cli.spec import RunSpec
from scaletrain_cli.spec.training import learning_rate
from tests.engine.ranks import on_ranks

_CPU = torch.device("cpu")


@dataclass(frozen=True)
class Trained:
    """The result of a run: loss and gradient norm before clipping by step, and the final weights by name."""

    losses: list[float]
    norms: list[float]
    weights: dict[str, Tensor]


def train_alone(spec: RunSpec) -> Trained:
    """Train all steps of a run in fp32, whatever the spec says, in a forked process with one thread, as ranks are.

    Of local SGD one process per group.
    """
    groups = spec.training.local_sgd.groups
    return on_ranks(groups, _train, spec, connected=groups > 1)[0]


def _train(spec: RunSpec) -> Trained:
    training, settings = spec.training, spec.training.optimizer
    _, sequences, _ = open_source_dataset(Path(spec.data.source), spec.transformer.seq_len)
    model = first_weights(spec)
    optimizer = torch.optim.AdamW(model.parameters(), betas=settings.betas, eps=settings.eps)
    optimizer.param_groups.clear()
    muon = MuonOfBlocks(model, spec) if settings.name == "muon" else None
    outer = OuterLoop(model, spec) if training.local_sgd.groups > 1 else None
    losses, norms = [], []
    for step in range(1, spec.total_steps + 1):
        set_groups(optimizer, dict(model.named_parameters()), spec, step)
        first = (step - 1) * training.global_batch_size
        positions = range(first, first + training.global_batch_size)
        if outer is not None:
            share = training.global_batch_size // training.local_sgd.groups
            positions = positions[dist.get_rank() * share :][:share]
        drawn = [sample_at(position, seed=training.seed, samples=len(sequences)) for position in positions]
        loss = batch_loss(model, spec, torch.from_numpy(sequences.rows(drawn)), torch.tensor(positions))
        optimizer.zero_grad()
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(_trained(model), training.gradient_clipping).item())
        if muon is not None:
            muon.step(optimizer)
        optimizer.step()
        update_correction_biases(model)
        losses.append(loss.item())
        if outer is not None:
            losses[-1], norms[-1] = mean(losses[-1]), mean(norms[-1] ** 2) ** 0.5
            if step % training.local_sgd.inner_steps == 0 or step == spec.total_steps:
                outer.step()
    return Trained(losses, norms, {name: value.detach().clone() for name, value in model.named_parameters()})


def mean(value: float) -> float:
    total = torch.tensor(value)
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


class OuterLoop:
    """The outer optimizer of DiLoCo in each of some plain processes: torch.optim.SGD on a copy of the weights."""

    def __init__(self, model: nn.Module, spec: RunSpec) -> None:
        settings = spec.training.local_sgd
        self._inner = list(model.parameters())
        self._outer = [nn.Parameter(parameter.detach().clone()) for parameter in self._inner]
        nesterov = settings.outer_optimizer == "nesterov"
        momentum = settings.outer_momentum if nesterov else 0.0
        self._optimizer = torch.optim.SGD(self._outer, settings.outer_learning_rate, momentum, nesterov=nesterov)

    @torch.no_grad()
    def step(self) -> None:
        """Take the mean difference of the groups from the outer weights as a gradient, and continue from the result."""
        for inner, outer in zip(self._inner, self._outer, strict=True):
            outer.grad = outer - inner
            dist.all_reduce(outer.grad)
            outer.grad /= dist.get_world_size()
        self._optimizer.step()
        for inner, outer in zip(self._inner, self._outer, strict=True):
            inner.copy_(outer)


def in_fp32(matrix: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float) -> Tensor:
    """Return what torch's iteration, which is always in bf16, would in fp32; the longer side is that of the columns."""
    a, b, c = coefficients
    x = matrix if matrix.shape[0] <= matrix.shape[1] else matrix.T
    x = x / max(float(x.norm()), eps)
    for _ in range(steps):
        square = x @ x.T
        x = a * x + (b * square + c * square @ square) @ x
    return x if matrix.shape[0] <= matrix.shape[1] else x.T


def is_of_muon(name: str, parameter: nn.Parameter) -> bool:
    """Return whether a parameter is a matrix of a block, or several of them."""
    in_block = re.search(r"\.(layers|h)\.", name) is not None and "bias" not in name
    return in_block and parameter.ndim > 1 and min(parameter.shape) > 1


class MuonOfBlocks:
    """torch.optim.Muon over views of the matrices of the blocks, each expert's and each fused projection's alone."""

    def __init__(self, model: nn.Module, spec: RunSpec) -> None:
        own, settings = spec.transformer, spec.training.optimizer
        queries, keys = own.num_attention_heads * own.head_dim, own.num_key_value_heads * own.head_dim
        fused = {"c_attn": (queries, keys, keys), "qkv_proj": (queries, keys, keys)}
        self._whole = {name: parameter for name, parameter in model.named_parameters() if is_of_muon(name, parameter)}

        def parts(name: str, values: Tensor) -> list[Tensor]:
            if values.ndim == 3:
                return [part for one in values.unbind() for part in (one.chunk(2) if "gate_up" in name else (one,))]
            values = values.T if own.family == "gpt" else values
            if "gate_up" in name:
                return list(values.chunk(2))
            return list(values.split(fused.get(name.split(".")[-2], values.shape[0])))

        if settings.muon.newton_schulz_dtype == "fp32":
            torch.optim._muon._zeropower_via_newtonschulz = in_fp32  # type: ignore[assignment]
        self._parts = parts
        self._views = {
            name: [nn.Parameter(view) for view in parts(name, parameter.data)]
            for name, parameter in self._whole.items()
        }
        self._optimizer = torch.optim.Muon(
            [view for views in self._views.values() for view in views],
            weight_decay=settings.weight_decay,
            momentum=settings.momentum,
            nesterov=settings.muon.nesterov,
            ns_steps=settings.muon.newton_schulz_steps,
            adjust_lr_fn=settings.muon.adjust_lr,
        )
        options = {key: value for key, value in self._optimizer.param_groups[0].items() if key != "params"}
        self._optimizer.param_groups = [
            {**options, "params": views, "name": name} for name, views in self._views.items()
        ]

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """Update the matrices that train, with the rate and decay of their groups in ``optimizer``.

        Their parameters are left without gradients; what stops training loses its state.
        """
        groups = {group["name"]: group for group in optimizer.param_groups}
        for group in self._optimizer.param_groups:
            name = group["name"]
            parameter, own = self._whole[name], groups.get(name)
            if own is None:
                for view in self._views[name]:
                    view.grad = None
                    self._optimizer.state.pop(view, None)
                continue
            group["lr"], group["weight_decay"] = own["lr"], own["weight_decay"]
            for view, gradient in zip(self._views[name], self._parts(name, parameter.grad), strict=True):
                view.grad = gradient
            parameter.grad = None
        self._optimizer.step()


def set_groups(optimizer: torch.optim.Optimizer, parameters: dict[str, nn.Parameter], spec: RunSpec, step: int) -> None:
    """Give each parameter that trains at a step a group of its own; what stops training loses its state."""
    settings = spec.training.optimizer
    rate, peak = learning_rate(step, spec.total_steps, spec.training), settings.lr
    optimizer.param_groups = [group for group in optimizer.param_groups if wanted(spec, group["name"], step)]
    for name, parameter in parameters.items():
        found = wanted(spec, name, step)
        parameter.requires_grad_(found is not None)
        if found is None:
            optimizer.state.pop(parameter, None)
            continue
        group = next((group for group in optimizer.param_groups if group["name"] == name), None)
        if group is None:
            optimizer.add_param_group({"params": [parameter], "name": name})
            group = optimizer.param_groups[-1]
        group["lr"] = rate * found[0] / peak
        if settings.name == "muon" and settings.muon.adamw_lr is not None and not is_of_muon(name, parameter):
            group["lr"] *= settings.muon.adamw_lr / peak
        group["weight_decay"] = found[1] if parameter.ndim > 1 and not name.endswith("bias") else 0.0  # stacked biases


def wanted(spec: RunSpec, name: str, step: int) -> tuple[float, float] | None:
    """Return the peak learning rate and the weight decay of a parameter at a step; None if it is frozen."""
    settings, groups = spec.training.optimizer, spec.training.trainable
    layers = spec.transformer.num_hidden_layers
    numbers = re.search(r"\.(\d+)\.", name)
    below = layers - int(numbers[1]) if numbers else layers + 1 if "embed" in name else 0
    factor = settings.layer_decay**below
    if not groups:
        return settings.lr * factor, settings.weight_decay
    for group in groups:
        active = group.start_step <= step <= (group.end_step or spec.total_steps)
        if active and any(fnmatch.fnmatchcase(name, pattern) for pattern in group.match):
            decay = settings.weight_decay if group.weight_decay is None else group.weight_decay
            return (group.lr or settings.lr) * factor, decay
    return None


def _trained(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def first_weights(spec: RunSpec) -> nn.Module:
    """Return the whole model with the weights of the seed, or transformers' model with those of ``model.weights``."""
    if spec.transformer.weights is not None:
        from transformers import AutoModelForCausalLM

        loaded: nn.Module = AutoModelForCausalLM.from_pretrained(spec.transformer.weights)
        return loaded
    model = outline(spec.transformer)
    assign_dropout_keys(model, spec.training.seed)
    materialize(model, model.first_weights(spec.training.seed, _CPU), _CPU)
    return model


def batch_loss(model: nn.Module, spec: RunSpec, rows: Tensor, samples: Tensor) -> Tensor:
    """Mean cross-entropy in nats over the tokens that count.

    rows [batch, length + 1] int64; samples [batch]: their places in the run, which decide what is dropped.
    """
    tokens, labels = rows[:, :-1], rows[:, 1:].clone()
    if spec.data.packing == "documents" or spec.data.loss_mask == "document_starts":
        labels[tokens == end_of_text(Path(spec.data.source))] = -100
    if isinstance(model, CausalLM):
        if spec.data.packing == "documents":
            hidden = torch.stack([_of_documents(model, row, end_of_text(Path(spec.data.source))) for row in tokens])
        else:
            context = TokenContext(torch.arange(tokens.shape[1]), samples)
            hidden = model.transform(model.embed(tokens, context), context)
        logits = F.linear(model.final_norm(hidden), model.lm_head.weight)
        if (cap := spec.transformer.final_logit_softcapping) is not None:
            logits = cap * torch.tanh(logits / cap)
    else:
        logits = model(tokens).logits
    smoothing = spec.training.label_smoothing
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100, label_smoothing=smoothing)


def _of_documents(model: CausalLM, tokens: Tensor, end: int) -> Tensor:
    """Return the last hidden states of the tokens of a row, [length, hidden]: each document in a pass of its own."""
    ends = (tokens[:-1] == end).nonzero().flatten() + 1
    parts = torch.tensor_split(tokens, ends)
    contexts = [TokenContext(torch.arange(len(part)), torch.zeros(1, dtype=torch.int64)) for part in parts]
    found = [
        model.transform(model.embed(part[None], context), context)
        for part, context in zip(parts, contexts, strict=True)
    ]
    return torch.cat(found, dim=1)[0]


def end_of_text(dataset: Path) -> int:
    tokenizer = json.loads((dataset / "tokenizer.json").read_text(encoding="utf-8"))
    [token] = [token["id"] for token in tokenizer["added_tokens"]]
    return int(token)
