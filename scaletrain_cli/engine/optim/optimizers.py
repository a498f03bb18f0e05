"""Build the optimizer of a spec from torch or a kept library. Knows no schedule, and no DeepSpeed but its flat weights.

ZeRO hands every optimizer flat pieces of the parameter groups, cut anywhere. All of these work element by element and
do not care. Muon does: it orthogonalises whole matrices. DeepSpeed's own handling of it clips before orthogonalising in
one ZeRO wrapper and after it in the others, and knows nothing of matrices that tensor parallelism has cut, so that the
same spec would train differently in different layouts; it is left out.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import nn

from scaletrain_cli.engine.parallel.tensor import VocabularyParallelEmbedding
from scaletrain_cli.errors import UsageError
from scaletrain_cli.extras import install_command
from scaletrain_cli.plan.result import Layout
from scaletrain_cli.spec import RunSpec
from scaletrain_cli.spec.training import OptimizerSpec

# Split the parameters of a model into those with weight decay and those without.


def parameter_groups(model: nn.Module, settings: OptimizerSpec) -> list[dict[str, Any]]:
    """Return two groups for an optimizer: parameters with ``settings.weight_decay``, and parameters with none.

    Matrices decay, norms and biases do not (GPT-3, arXiv:2005.14165, appendix B). ``settings.decay_embeddings`` decides
    on token and position embeddings; a tied head is the token embedding.
    """
    kept = set() if settings.decay_embeddings else _embeddings(model)
    decayed: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    for parameter in model.parameters():
        (decayed if _is_matrix(parameter) and id(parameter) not in kept else others).append(parameter)
    return [{"params": decayed, "weight_decay": settings.weight_decay}, {"params": others, "weight_decay": 0.0}]


def _embeddings(model: nn.Module) -> set[int]:
    modules = (each for each in model.modules() if isinstance(each, nn.Embedding | VocabularyParallelEmbedding))
    return {id(parameter) for module in modules for parameter in module.parameters(recurse=False)}


def _is_matrix(parameter: nn.Parameter) -> bool:
    """By its whole shape: what ZeRO-3 has partitioned looks like an empty vector and remembers its shape aside."""
    return len(getattr(parameter, "ds_shape", parameter.shape)) > 1


def build_optimizer(
    spec: RunSpec, model_or_groups: nn.Module | list[dict[str, Any]], layout: Layout, device: torch.device
) -> torch.optim.Optimizer:
    """The optimizer that ``training.optimizer`` names, over a model's parameters or ready groups of them.

    Raises UsageError when the library that has it is not installed.
    """
    settings = spec.training.optimizer
    groups = parameter_groups(model_or_groups, settings) if isinstance(model_or_groups, nn.Module) else model_or_groups
    adam: dict[str, Any] = {
        "lr": settings.lr,
        "betas": settings.betas,
        "eps": settings.eps,
        "weight_decay": settings.weight_decay,
    }
    # One kernel for all. On a GPU it is the fastest; for an offloaded optimizer it is several times as fast as torch's
    # default, as fast as DeepSpeedCPUAdam, and there is nothing to compile.
    fused: dict[str, Any] = {"fused": True} if device.type == "cuda" or layout.offload != "none" else {}
    if settings.name == "adamw":
        return torch.optim.AdamW(groups, **adam, **fused)
    if settings.name == "adam":
        return torch.optim.Adam(groups, **adam, **fused)
    if settings.name in ("sgd", "momentum"):
        momentum = settings.momentum if settings.name == "momentum" else 0.0
        return torch.optim.SGD(groups, lr=settings.lr, momentum=momentum, weight_decay=settings.weight_decay, **fused)
    if settings.name == "adamw_8bit":
        return _bitsandbytes(settings.name).AdamW8bit(groups, **adam)  # type: ignore[no-any-return]
    if settings.name == "lion":
        lion = _bitsandbytes(settings.name).Lion
        return lion(  # type: ignore[no-any-return]
            groups, lr=settings.lr, betas=settings.betas, weight_decay=settings.weight_decay
        )
    raise UsageError(f"training.optimizer.name = {settings.name}: not in this engine, because it needs whole matrices.")


def _bitsandbytes(name: str) -> Any:
    """Its optimizers take flat pieces of any length; torchao's 8-bit states fall back to fp32 on most of them."""
    try:
        return importlib.import_module("bitsandbytes.optim")
    except ImportError as error:
        raise UsageError(
            f"training.optimizer.name = {name} needs bitsandbytes, which cannot be imported ({error}). "
            f"Run {install_command('optimizers')}, or use adamw."
        ) from error
