"""The layout section: how the job is cut over the devices. ``auto`` leaves the choice to the planner."""

from typing import Annotated, Any, Literal

from pydantic import Field, PlainValidator, WithJsonSchema
from pydantic_core import PydanticCustomError

from scaletrain_cli.spec.quantities import AutoWhole, Whole
from scaletrain_cli.spec.section import Section, used_when, where, where_not


def _stage_or_auto(value: Any) -> Any:
    if value == "auto" or (isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= 3):
        return value
    raise PydanticCustomError("zero_stage", "must be 0, 1, 2, 3 or auto")


ZeroStage = Annotated[
    int | Literal["auto"], PlainValidator(_stage_or_auto), WithJsonSchema({"enum": [0, 1, 2, 3, "auto"]})
]


def _switch_or_auto(value: Any) -> Any:
    if value == "auto" or isinstance(value, bool):
        return value
    raise PydanticCustomError("switch", "must be true, false or auto")


SwitchOrAuto = Annotated[
    bool | Literal["auto"], PlainValidator(_switch_or_auto), WithJsonSchema({"enum": [True, False, "auto"]})
]


_SELECTIVE = used_when(where("layout.activation_checkpointing", "selective", "auto"))


class LayoutSpec(Section):
    """Degrees of parallelism; world_size = data x tensor x pipeline x sequence x context."""

    data_parallel: AutoWhole = "auto"
    tensor_parallel: AutoWhole = "auto"
    pipeline_parallel: AutoWhole = "auto"
    virtual_pipeline: AutoWhole = 1
    sequence_parallel: AutoWhole = "auto"
    context_parallel: AutoWhole = 1
    expert_parallel: AutoWhole = "auto"
    zero_stage: ZeroStage = "auto"
    activation_checkpointing: Literal["auto", "none", "selective", "full"] = "auto"
    selective_scope: Annotated[Literal["block", "attention"], _SELECTIVE] = Field(
        default="block", description="what selective checkpointing computes again: whole blocks or their attention"
    )
    selective_every: Annotated[Whole, _SELECTIVE] = Field(
        default=2, description="selective: every n-th block, the first included"
    )
    activation_offload: bool = Field(
        default=False, description="what the blocks keep for the backward pass waits in the node's memory"
    )
    tensor_sequence_parallel: Annotated[SwitchOrAuto, used_when(where_not("layout.tensor_parallel", 1))] = Field(
        default="auto", description="norms and dropout cut over the tensor ranks too (Megatron-LM, arXiv:2205.05198)"
    )
    expert_tensor_parallel: Annotated[AutoWhole, used_when(where_not("model.num_experts", 0, None))] = "auto"
    offload: Literal["auto", "none", "optimizer", "optimizer+params"] = "none"
    offload_device: Annotated[Literal["cpu", "nvme"], used_when(where_not("layout.offload", "none"))] = "cpu"
