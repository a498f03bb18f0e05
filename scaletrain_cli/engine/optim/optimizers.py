"""Build the optimizer of a run spec: from torch, bitsandbytes, or another package.

ZeRO hands an optimizer flat parts of the parameter groups, split anywhere, so it must update each element by itself.
Muon, which needs whole matrices, is in ``muon.py``. DeepSpeed's own Muon clips before
orthogonalizing in one ZeRO stage and after it in the others, and does not gather matrices that tensor parallelism has
sharded, so that a spec would train differently in different layouts.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from scaletrain_cli.engine.model.base import TrainedModel
from scaletrain_cli.engine.model.materialization import names_of_parameters
from scaletrain_cli.engine.optim.muon import ORTHOGONALIZED, Muon
from scaletrain_cli.engine.parallel.tensor import VocabularyParallelEmbedding
from scaletrain_cli.extras import require
from scaletrain_cli.plan.result import Layout
from scaletrain_cli.plan.trained_parameters import Settings, Stage
from scaletrain_cli.plugins import load_reference
from scaletrain_cli.spec import RunSpec
from scaletrain_cli.spec.extensions import optimizer_extension
from scaletrain_cli.spec.training import OptimizerSpec

Groups = list[dict[str, Any]]


def parameter_groups(model: nn.Module, settings: OptimizerSpec, stage: Stage | None = None) -> Groups:
    """Return the groups for an optimizer over the parameters that train.

    Without a ``stage`` all train, in two groups: those with ``settings.weight_decay``, and those with none. Matrices
    decay, norms and biases do not (GPT-3, arXiv:2005.14165, appendix B). ``settings.decay_embeddings`` decides on token
    and position embeddings; a tied head is the token embedding. ``TrainedModel.never_decays`` names
    further parameters, such as positions of images, and a parameter with ``limits`` has a group of its own. The
    parameters of a stage are grouped by learning rate, weight decay, limits and the steps that they have trained,
    because ZeRO has one step counter per group, and by whether Muon orthogonalizes them.
    """
    limits = model.limits() if isinstance(model, TrainedModel) else {}
    if stage is None:
        embeddings = (part for part in model.modules() if isinstance(part, nn.Embedding | VocabularyParallelEmbedding))
        kept = set() if settings.decay_embeddings else {id(w) for table in embeddings for w in table.parameters(False)}
        never = model.never_decays if isinstance(model, TrainedModel) else (lambda _: False)
        decayed: list[nn.Parameter] = []
        others: list[nn.Parameter] = []
        limited: Groups = []
        for name, parameter in model.named_parameters():
            if not parameter.requires_grad:  # of a LLaVA, what it does not compute
                continue
            if name in limits:
                limited.append({"params": [parameter], "weight_decay": 0.0, LIMITS: limits[name]})
                continue
            # ZeRO-3 keeps the shape of a partitioned parameter in ``ds_shape``.
            is_matrix = len(getattr(parameter, "ds_shape", parameter.shape)) > 1
            decays = is_matrix and id(parameter) not in kept and not (name.endswith("bias") or never(name))
            (decayed if decays else others).append(parameter)  # biases of experts are stacked
        groups: Groups = [{"params": decayed, "weight_decay": settings.weight_decay}]
        return [*groups, {"params": others, "weight_decay": 0.0}, *limited]
    members: dict[tuple[int, tuple[Settings, ...], tuple[float, float] | None], list[nn.Parameter]] = {}
    for parameter, (name, *_) in names_of_parameters(model).items():
        if parameter.requires_grad:
            key = stage.since[name], tuple(phase.settings[name] for phase in stage.phases), limits.get(name)
            members.setdefault(key, []).append(parameter)
    return [
        {
            "params": parameters,
            "weight_decay": by_phase[0].weight_decay,
            SCHEDULE: [
                (phase.last_step, one.lr_factor, one.weight_decay)
                for phase, one in zip(stage.phases, by_phase, strict=True)
            ],
            **({ORTHOGONALIZED: True} if by_phase[0].orthogonalized else {}),
            **({} if limit is None else {LIMITS: limit}),
        }
        for (_, by_phase, limit), parameters in members.items()
    ]


# The key of a parameter group with the least and the largest value of its parameters.
LIMITS = "limits"


def keep_within_limits(optimizer: torch.optim.Optimizer) -> None:
    """Clamp the parameters of groups with LIMITS after each update.

    ``optimizer`` is the one inside DeepSpeed's: there, in every ZeRO stage, the parameters of a group are fp32 weights,
    or a flat part of them with zeros as padding, which DeepSpeed copies into the model afterwards.
    """

    @torch.no_grad()
    def clamp(inner: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        for group in inner.param_groups:
            if LIMITS in group:
                least, largest = group[LIMITS]
                for parameter in group["params"]:
                    parameter.clamp_(least, largest)

    if any(LIMITS in group for group in optimizer.param_groups):
        optimizer.register_step_post_hook(clamp)


# The key of a parameter group with its phases: last step, factor of the learning rate, weight decay.
SCHEDULE = "schedule"


def set_rates(optimizer: torch.optim.Optimizer, step: int, rate: float) -> None:
    """Set each group's learning rate, a multiple of the scheduled ``rate``, and weight decay for a step (1-based)."""
    for group in optimizer.param_groups:
        group["lr"] = rate
        if SCHEDULE in group:
            factor, decay = next((factor, decay) for last, factor, decay in group[SCHEDULE] if step <= last)
            group["lr"], group["weight_decay"] = factor * rate, decay


def freeze(model: nn.Module, stage: Stage) -> None:
    """Let only the parameters train that train in a stage. Call it before DeepSpeed starts."""
    for parameter, (name, *_) in names_of_parameters(model).items():
        parameter.requires_grad_(name in stage.since)


def build_optimizer(
    spec: RunSpec, model_or_groups: nn.Module | Groups, layout: Layout, device: torch.device
) -> torch.optim.Optimizer:
    """Return the optimizer that ``training.optimizer`` names, over a model's parameters or over parameter groups.

    ``BUILDERS`` has the built-in optimizers; others come from the entry points ``scaletrain.optimizers``. Raises
    UsageError if the library of the optimizer is not installed.
    """
    settings = spec.training.optimizer
    groups = parameter_groups(model_or_groups, settings) if isinstance(model_or_groups, nn.Module) else model_or_groups
    if (build := BUILDERS.get(settings.name)) is not None:
        # torch's fused kernel: the fastest on a GPU; for an offloaded optimizer several times as fast as torch's
        # default, as fast as DeepSpeedCPUAdam, and without a compilation.
        return build(groups, settings, device.type == "cuda" or layout.offload != "none")
    if (extension := optimizer_extension(settings.name)) is not None:
        return load_reference(extension.build)(groups, settings)  # type: ignore[no-any-return]
    raise LookupError(f"unknown optimizer: {settings.name}")


def _sgd(groups: Groups, settings: OptimizerSpec, fused: bool) -> torch.optim.Optimizer:
    momentum = settings.momentum if settings.name == "momentum" else 0.0
    return torch.optim.SGD(groups, settings.lr, momentum, weight_decay=settings.weight_decay, fused=fused or None)


# By ``training.optimizer.name``: parameter groups, settings, and whether to use torch's fused kernel.
BUILDERS: dict[str, Callable[[Groups, OptimizerSpec, bool], torch.optim.Optimizer]] = {
    "adamw": lambda groups, settings, fused: torch.optim.AdamW(groups, **_adam_settings(settings), fused=fused or None),
    "adam": lambda groups, settings, fused: torch.optim.Adam(groups, **_adam_settings(settings), fused=fused or None),
    "sgd": _sgd,
    "momentum": _sgd,
    "adamw_8bit": lambda groups, settings, _: _bitsandbytes(settings.name).AdamW8bit(
        groups, **_adam_settings(settings)
    ),
    "lion": lambda groups, settings, _: _bitsandbytes(settings.name).Lion(
        groups, lr=settings.lr, betas=settings.betas, weight_decay=settings.weight_decay
    ),
    "muon": Muon,
}


def _adam_settings(settings: OptimizerSpec) -> dict[str, Any]:
    return {"lr": settings.lr, "betas": settings.betas, "eps": settings.eps, "weight_decay": settings.weight_decay}


def _bitsandbytes(name: str) -> Any:
    """Return bitsandbytes' optimizers, which take flat parts of any length; torchao's 8-bit states mostly do not."""
    return require("bitsandbytes.optim", "optimizers", "engine.bitsandbytes-missing", name=name)
