"""The run spec: its schema, loading with line numbers, overrides and JSON Schema. Imports only the base layer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from scaletrain_cli.spec.cluster import AcceleratorSpec, ClusterSpec
from scaletrain_cli.spec.data import DataSpec
from scaletrain_cli.spec.model import ModelSpec
from scaletrain_cli.spec.run import SCHEMA, RunSpec
from scaletrain_cli.spec.training import TrainingSpec
from scaletrain_cli.spec.vision_model import ClipSpec, ConvNextSpec, LlavaSpec, ResNetSpec, VitSpec

if TYPE_CHECKING:
    from scaletrain_cli.spec.loading import changed_keys, load_cluster, load_spec, override_spec, parse_spec, set_steps

__all__ = [
    "SCHEMA",
    "AcceleratorSpec",
    "ClipSpec",
    "ClusterSpec",
    "ConvNextSpec",
    "DataSpec",
    "LlavaSpec",
    "ModelSpec",
    "ResNetSpec",
    "RunSpec",
    "TrainingSpec",
    "VitSpec",
    "changed_keys",
    "load_cluster",
    "load_spec",
    "override_spec",
    "parse_spec",
    "set_steps",
]


def __getattr__(name: str) -> Any:
    """Import a function of loading.py at its first use: commands that only read runs use none."""
    if name not in __all__:
        raise AttributeError(name)
    from scaletrain_cli.spec import loading

    return getattr(loading, name)
