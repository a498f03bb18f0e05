"""Classification without training on the classes: by the text features of prompts (arXiv:2103.00020, section 3.1.4)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from scaletrain_cli.engine.evaluation.measures import in_sample_order, rows_of_all, slices_of
from scaletrain_cli.engine.parallel.mesh import Axis

_PROMPTS_AT_A_TIME = 64


def prompts_of(classes: Sequence[str], templates: Sequence[str]) -> list[str]:
    """Return the prompt of each template for each class, class by class; ``{}`` is the place of the name."""
    return [template.replace("{}", name) for name in classes for template in templates]


def class_features(
    classes: Sequence[str],
    templates: Sequence[str],
    encode: Callable[[Sequence[str]], Tensor],
    axis: Axis,
) -> Tensor:
    """Return the feature of each class, [classes, d] in fp32 on the CPU, the same on every rank. Collective.

    The features of the prompts of a class are normalized, their mean is normalized again. ``encode``: returns the text
    features of prompts, [prompts, d]; every rank calls it equally often, with chunks that do not depend on the number
    of ranks.
    """
    prompts = prompts_of(classes, templates)
    chunks = list(slices_of(len(prompts), _PROMPTS_AT_A_TIME))
    found, numbers = [], []
    for first in range(0, len(chunks), axis.size):
        number = min(first + axis.rank, len(chunks) - 1)  # the last chunk stands in, so that all ranks call alike
        part = chunks[number]
        found.append(F.normalize(encode(prompts[part]).detach().float(), dim=1))
        numbers.append(torch.arange(part.start, part.stop))
    order = in_sample_order(rows_of_all(torch.cat(numbers), axis))
    features = rows_of_all(torch.cat(found), axis)[order]
    return F.normalize(features.view(len(classes), len(templates), -1).mean(1), dim=1)
