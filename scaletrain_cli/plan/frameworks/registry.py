"""The frameworks that the planner models, by the value of ``planner.framework``."""

from scaletrain_cli.plan.frameworks.base import Framework
from scaletrain_cli.plan.frameworks.deepspeed import DeepSpeed
from scaletrain_cli.plan.frameworks.fsdp import Fsdp
from scaletrain_cli.plan.frameworks.megatron import Megatron
from scaletrain_cli.plan.frameworks.nanotron import Nanotron
from scaletrain_cli.spec import RunSpec

FRAMEWORKS: dict[str, Framework] = {
    framework.name: framework for framework in (DeepSpeed(), Fsdp(), Megatron(), Nanotron())
}


def framework_of(spec: RunSpec) -> Framework:
    """Return the framework that ``planner.framework`` names."""
    return FRAMEWORKS[spec.planner.framework]
