"""Layouts without a plan, in a module that reader processes import quickly."""

from typing import Any

from scaletrain_cli.plan.result import Layout


def plain_layout(batch: int, data: int = 1, accumulation: int = 1, **others: Any) -> Layout:
    """Return a layout of ``data`` replicas; ``others``: degrees above 1, the ZeRO stage, offload."""
    degrees = {f"{axis}_parallel": 1 for axis in ("tensor", "pipeline", "sequence", "context", "expert")}
    degrees |= {"virtual_pipeline": 1, "zero_stage": 0, "world_size": data}
    sizes = {"micro_batch_size": batch // data // accumulation, "gradient_accumulation_steps": accumulation}
    settings = {"activation_checkpointing": "none", "offload": "none", **degrees, **sizes, **others}
    return Layout(data_parallel=data, global_batch_size=batch, **settings)
