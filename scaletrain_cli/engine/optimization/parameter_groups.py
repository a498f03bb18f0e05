"""Split the parameters of a model into those with weight decay and those without."""

from __future__ import annotations

from typing import Any

from torch import nn

from scaletrain_cli.engine.parallel.tensor import VocabularyParallelEmbedding
from scaletrain_cli.spec.training import OptimizerSpec


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
