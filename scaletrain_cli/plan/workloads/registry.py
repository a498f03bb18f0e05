"""The workload of a model."""

from __future__ import annotations

from functools import cache

from scaletrain_cli.plan.workloads.base import Workload
from scaletrain_cli.plan.workloads.text import TextWorkload
from scaletrain_cli.spec import ModelSpec
from scaletrain_cli.spec.run import AnyModel

_TEXT = TextWorkload()


def workload_of(model: AnyModel) -> Workload:
    """Return the workload object for this kind of model."""
    return _TEXT if isinstance(model, ModelSpec) else _vision()


@cache
def _vision() -> Workload:
    """Return the workload of vision networks, whose modules are imported only for them."""
    from scaletrain_cli.plan.workloads.vision import VisionWorkload

    return VisionWorkload()
