"""A whole model in one process, with its first weights."""

import torch

from scaletrain_cli.engine.model import outline
from scaletrain_cli.engine.model.attention import assign_dropout_keys
from scaletrain_cli.engine.model.base import CausalLM
from scaletrain_cli.engine.model.materialization import materialize
from scaletrain_cli.spec import ModelSpec


def build_model(spec: ModelSpec, seed: int) -> CausalLM:
    model = outline(spec)
    assign_dropout_keys(model, seed)
    materialize(model, model.first_weights(seed, torch.device("cpu")), torch.device("cpu"))
    return model
