"""Which parameters decay. Knows no optimizer."""

from __future__ import annotations

from typing import Any

from torch import nn


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Matrices decay, norms and biases do not (GPT-3, arXiv:2005.14165, appendix B)."""
    decayed = [parameter for parameter in model.parameters() if _is_matrix(parameter)]
    others = [parameter for parameter in model.parameters() if not _is_matrix(parameter)]
    return [{"params": decayed, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]


def _is_matrix(parameter: nn.Parameter) -> bool:
    """By its whole shape: what ZeRO-3 has partitioned looks like an empty vector and remembers its shape aside."""
    return len(getattr(parameter, "ds_shape", parameter.shape)) > 1
