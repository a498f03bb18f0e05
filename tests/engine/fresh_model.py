"""A whole model in one process, with its first weights."""

import torch

from scaletrain_cli.engine.model import outline
from scaletrain_cli.engine.model.attention import assign_dropout_keys
from scaletrain_cli.engine.model.causal_lm import CausalLM
from scaletrain_cli.engine.model.materialization import ScaledInitialization, materialize
from scaletrain_cli.spec import ModelSpec


def build_model(spec: ModelSpec, seed: int) -> CausalLM:
    model = outline(spec)
    assign_dropout_keys(model, seed)
    source = ScaledInitialization(
        seed,
        spec.initializer_range,
        spec.num_hidden_layers,
        model.residual_projections,
        torch.device("cpu"),
        norm_weight=0.0 if spec.zero_centered_norm else 1.0,
    )
    materialize(model, source, torch.device("cpu"))
    return model
