"""The workload of a model."""

from functools import cache

from scaletrain_cli.plan.workloads.base import Workload
from scaletrain_cli.plan.workloads.text import TextWorkload
from scaletrain_cli.spec import LlavaSpec, ModelSpec
from scaletrain_cli.spec.run import AnyModel

_TEXT = TextWorkload()


def workload_of(model: AnyModel) -> Workload:
    """Return the workload object for this kind of model."""
    return _TEXT if isinstance(model, ModelSpec) else _vision(isinstance(model, LlavaSpec))


@cache
def _vision(is_llava: bool) -> Workload:
    """Return the workload of LLaVA, or of vision networks, whose modules are imported only for them."""
    from scaletrain_cli.plan.workloads.vision import LlavaWorkload, VisionWorkload

    return LlavaWorkload() if is_llava else VisionWorkload()
