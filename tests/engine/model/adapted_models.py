"""A tiny model with an adapter, beside the same model and adapter of transformers and PEFT."""

import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from scaletrain_cli.engine.model import outline
from scaletrain_cli.engine.model.adapters import AdapterInitialization
from scaletrain_cli.engine.model.attention import assign_dropout_keys
from scaletrain_cli.engine.model.base import CausalLM
from scaletrain_cli.engine.model.materialization import Matrix, materialize, matrices_in
from scaletrain_cli.engine.model.peft_files import PeftFolder
from scaletrain_cli.engine.model.safetensors import HuggingFaceFolder
from scaletrain_cli.engine.parallel.mesh import Mesh
from scaletrain_cli.engine.parallel.tensor import attach_adapters
from scaletrain_cli.plan.parameters import modules_with_adapter
from scaletrain_cli.spec import ModelSpec
from scaletrain_cli.spec.adapter import AdapterSpec, is_adapter_parameter
from scaletrain_cli.spec.hugging_face_weights import to_hugging_face
from tests.model_sizes import model_sizes

SIZES: dict[str, Any] = {
    **model_sizes(
        hidden=32, layers=2, heads=4, kv_heads=2, head_dim=8, intermediate=48, vocab=64, seq_len=16, positions=16
    ),
    "initializer_range": 0.2,
}
LLAMA = ModelSpec(family="llama", **SIZES)
TIED = ModelSpec(family="llama", **SIZES, tie_word_embeddings=True)
GPT = ModelSpec(family="gpt", **SIZES | {"num_key_value_heads": 4, "tie_word_embeddings": True})
MIXTRAL = ModelSpec(
    family="llama", **SIZES, num_experts=4, num_experts_per_tok=2, norm_topk_prob=True, router_aux_loss_coef=0.0
)

QWEN2_MOE = ModelSpec(
    family="llama",
    **{**SIZES, "num_hidden_layers": 3, "qkv_bias": True, "mlp_only_layers": (1,)},
    **{"num_experts": 4, "num_experts_per_tok": 2, "router_aux_loss_coef": 0.0},
    **{"shared_expert_intermediate_size": 24, "shared_expert_gate": True},
)
GPT_OSS = ModelSpec(
    **MIXTRAL.model_dump(exclude={"bias", "router_bias", "attention_sinks", "swiglu_limit"}),
    bias=True,
    router_bias=True,
    attention_sinks=True,
    swiglu_limit=1.0,
)


def matrices(model: CausalLM) -> Iterator[tuple[torch.nn.Module, str, torch.nn.Parameter, list[Matrix]]]:
    """Yield the module, the name in it and the matrices of each parameter."""
    for prefix, module in model.named_modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            yield module, name, parameter, list(matrices_in(module, prefix, name, parameter))


def lora(**settings: Any) -> AdapterSpec:
    return AdapterSpec(name="lora", **{"rank": 8, "alpha": 16.0, **settings})


def save_hugging_face(spec: ModelSpec, folder: Path, seed: int = 0) -> Any:
    """Write random weights of the architecture; return the model of transformers."""
    import transformers

    config = to_hugging_face(spec)
    kind = getattr(transformers, config["architectures"][0])
    keys = {name: value for name, value in config.items() if name not in ("model_type", "architectures")}
    torch.manual_seed(seed)
    keys |= {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": None, "attn_implementation": "eager"}
    model = kind(kind.config_class(**keys)).eval()
    model.save_pretrained(folder)
    return model


def with_peft(model: Any, adapter: AdapterSpec, **targets: Any) -> Any:
    import peft

    settings = peft.LoraConfig(
        r=adapter.rank,
        lora_alpha=int(adapter.alpha),
        use_rslora=adapter.rslora,
        use_dora=adapter.dora,
        task_type="CAUSAL_LM",
        **targets,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return peft.get_peft_model(model, settings)


def ours(spec: ModelSpec, adapter: AdapterSpec, folder: Path, seed: int = 0) -> CausalLM:
    """Return our model with weights from a folder, its adapter and its first values; only the adapter trains."""
    model, whole = outline(spec), outline(spec)
    assign_dropout_keys(model, seed)
    modules = modules_with_adapter(spec.model_copy(update={"adapter": adapter}))
    attach_adapters(model, adapter, modules, Mesh(), seed)
    layers = {module.name: module for module in modules}
    before = None if adapter.weights is None else PeftFolder(Path(adapter.weights), adapter, modules)
    base = HuggingFaceFolder(folder, whole)
    source = AdapterInitialization(base, seed, torch.device("cpu"), layers, trained=before)
    materialize(model, source, torch.device("cpu"))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora_" in name)
    return model


def pairs(model: CausalLM, peft_model: Any) -> Iterator[tuple[str, torch.nn.Parameter, torch.nn.Parameter]]:
    """Yield the name and both parameters of each factor; those of experts differ in shape, see ``as_peft``."""
    known = {
        re.sub(r"\.default(?=\.|$)", "", name).removeprefix("base_model.model."): parameter
        for name, parameter in peft_model.named_parameters()
    }
    for name, parameter in model.named_parameters():
        if "_lora_" in name:
            parent, _, own = name.rpartition(".")
            stack, _, letter = own.partition("_lora_")
            inner = ".base_layer" if stack == "gate_up_proj" else ""
            yield name, parameter, known[f"{parent}{inner}.lora_{letter}.weight"]
        elif is_adapter_parameter(name):
            yield name, parameter, known[name + ".weight" if name.endswith("vector") else name]


def as_peft(name: str, values: Tensor) -> Tensor:
    """Return a factor in PEFT's shape: A of all experts by rows, B by columns, of which the expert is the fastest."""
    if values.ndim < 3:
        return values
    if name.endswith("A"):
        return values.flatten(0, 1)
    return values.permute(1, 2, 0).flatten(1)


@torch.no_grad()
def fill_alike(model: CausalLM, peft_model: Any) -> None:
    """Give the factors that are zero random values, and those of PEFT the same values as ours."""
    generator = torch.Generator().manual_seed(1)
    for name, parameter, theirs in pairs(model, peft_model):
        if not parameter.any():
            parameter.normal_(0, 0.1, generator=generator)
        theirs.copy_(as_peft(name, parameter))


class NoBase:
    """Weights of a base model that nothing may read."""

    def read(self, name: str, whole_shape: tuple[int, ...], spec: object = None) -> torch.Tensor:
        raise AssertionError(name)
