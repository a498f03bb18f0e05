"""The run spec: its schema, loading with line numbers, overrides and JSON Schema. Imports only the base layer."""

from scaletrain_cli.spec.cluster import AcceleratorSpec, ClusterSpec
from scaletrain_cli.spec.data import DataSpec
from scaletrain_cli.spec.loading import changed_keys, load_cluster, load_spec, override_spec, parse_spec, set_steps
from scaletrain_cli.spec.model import ModelSpec
from scaletrain_cli.spec.run import SCHEMA, RunSpec
from scaletrain_cli.spec.training import TrainingSpec
from scaletrain_cli.spec.vision_model import ClipSpec, ConvNextSpec, LlavaSpec, ResNetSpec, VitSpec

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
