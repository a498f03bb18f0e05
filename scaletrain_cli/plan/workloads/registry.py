"""The workload of a model."""

from functools import cache

from scaletrain_cli.plan.workloads.base import Workload
from scaletrain_cli.plan.workloads.text import TextWorkload
from scaletrain_cli.spec import LlavaSpec, ModelSpec
from scaletrain_cli.spec.run import AnyModel

_TEXT = TextWorkload()


def workload_of(model: AnyModel) -> Workload:
    """Return the workload object for this kind of model."""
    if isinstance(model, ModelSpec):
        return _TEXT
    return _llava() if isinstance(model, LlavaSpec) else _vision()


@cache
def _vision() -> Workload:
    """Return the workload of vision networks, whose modules are imported only for them."""
    from scaletrain_cli.plan.workloads.vision import VisionWorkload

    return VisionWorkload()


@cache
def _llava() -> Workload:
    """Return the workload of LLaVA, whose modules are imported only for it."""
    from scaletrain_cli.plan.workloads.vision import LlavaWorkload

    return LlavaWorkload()
