"""The run spec: its schema, loading with line numbers, overrides and JSON Schema. Imports only the base layer."""

from scaletrain_cli.spec.cluster import AcceleratorSpec, ClusterSpec
from scaletrain_cli.spec.data import DataSpec
from scaletrain_cli.spec.hugging_face_weights import to_hugging_face
from scaletrain_cli.spec.json_schema import json_schema
from scaletrain_cli.spec.loading import changed_keys, load_cluster, load_spec, override_spec, parse_spec, set_steps
from scaletrain_cli.spec.model import ModelSpec
from scaletrain_cli.spec.presets import presets, vision_presets
from scaletrain_cli.spec.run import SCHEMA, RunSpec
from scaletrain_cli.spec.starting_spec import starting_spec
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
    "json_schema",
    "load_cluster",
    "load_spec",
    "override_spec",
    "parse_spec",
    "presets",
    "set_steps",
    "starting_spec",
    "to_hugging_face",
    "vision_presets",
]
