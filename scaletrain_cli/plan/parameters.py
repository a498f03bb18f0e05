"""The parameters of a model under their Hugging Face names, and which of them train at each step.

Names and shapes are those of the engine's modules and of Hugging Face's files, in the order of the modules.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import NamedTuple

from scaletrain_cli.errors import UsageError
from scaletrain_cli.plan.axes import Rule
from scaletrain_cli.plan.vision.parameters import VisionParameter, vision_buffers, vision_parameters, vision_tower
from scaletrain_cli.reasons import Reason
from scaletrain_cli.spec import LlavaSpec, ModelSpec, RunSpec
from scaletrain_cli.spec.adapter import Adapted, AdapterSpec, adapted_modules, factor_shapes, is_adapter_parameter
from scaletrain_cli.spec.extensions import BUILT_IN_FAMILIES
from scaletrain_cli.spec.run import FAMILIES, AnyModel
from scaletrain_cli.spec.training import OptimizerSpec, TrainableGroup
from scaletrain_cli.spec.vision_model import ClipVisionSpec

_MOST_NEAR = 3  # names that an error suggests
_NUMBERS = re.compile(r"(?<=\.)\d+(?=\.)")


class Parameter(NamedTuple):
    """One tensor of a Hugging Face file.

    ``place``: ``embedding``, ``opening`` (patches or stem of a vision network), ``block`` (with its number from 0 in
    ``block``) or ``closing`` (final norm and head). ``tensor_dim``: the dimension that tensor ranks shard, None if each
    has the whole. ``tensor``: the name of the engine's tensor that holds it: the same name, except that the experts of
    a layer are stacked. ``adapter``: a factor of a low-rank adapter. ``below``: layers between it and the head, None if
    its place decides. ``decays``: False for matrices without weight decay, such as positions of vision networks.
    ``trains``: False for what files have and the model does not compute.
    """

    name: str
    shape: tuple[int, ...]
    place: str
    block: int | None
    tensor_dim: int | None
    tensor: str
    adapter: bool = False
    below: int | None = None
    decays: bool = True
    trains: bool = True

    @property
    def numel(self) -> int:
        """Return the number of elements."""
        count = 1
        for size in self.shape:
            count *= size
        return count

    @property
    def is_matrix(self) -> bool:
        """Return True for at least two dimensions: not for norms and biases."""
        return len(self.shape) > 1

    @property
    def is_orthogonalized(self) -> bool:
        """Return True for what Muon updates: matrices of blocks, but not gates of one output. AdamW updates others."""
        return self.place == "block" and len(self.shape) == 2 and min(self.shape) > 1 and not self.adapter


class Settings(NamedTuple):
    """The factor of the scheduled learning rate, and the weight decay, of one parameter at one step.

    ``orthogonalized``: Muon updates it.
    """

    lr_factor: float
    weight_decay: float
    orthogonalized: bool = False


class Phase(NamedTuple):
    """Steps ``first_step`` to ``last_step``, which train the same parameters with the same settings, by name."""

    first_step: int
    last_step: int
    settings: Mapping[str, Settings]


class Stage(NamedTuple):
    """Phases one after another that train the same parameters. Between stages the engine is built again.

    ``since``: for each parameter the first step of the stages that train it without interruption, so that parameters
    with the same number have taken the same number of steps.
    """

    first_step: int
    last_step: int
    phases: tuple[Phase, ...]
    since: Mapping[str, int]

    def settings_at(self, step: int) -> Mapping[str, Settings]:
        """Return the settings of each trained parameter at a step of this stage."""
        return next(phase.settings for phase in self.phases if step <= phase.last_step)


class _Linear(NamedTuple):
    """A linear layer of a block: its name within the block, output and input size, and how tensor ranks shard it."""

    name: str
    outputs: int
    inputs: int
    sharded: str | None  # "outputs", "inputs" or None
    bias: bool


@lru_cache(maxsize=64)
def model_parameters(model: AnyModel) -> tuple[Parameter, ...]:
    """Return all parameters of a model, once each: a tied head is the token embedding. Factors of adapters included."""
    if isinstance(model, LlavaSpec):
        return tuple(_llava(model))
    if not isinstance(model, ModelSpec):
        return tuple(_of_vision(each) for each in vision_parameters(model))
    found = tuple(_parameters(model))
    return found if model.adapter is None else tuple(_with_factors(model, found))


def _llava(model: LlavaSpec) -> Iterator[Parameter]:
    """Yield the parameters of the image tower, the projector and the language model of LLaVA."""
    yield from map(_of_vision, vision_parameters(model))
    layers = model.text_config.num_hidden_layers
    for each in model_parameters(model.text_config):
        below = {"embedding": layers + 1, "block": layers - (each.block or 0), "closing": 0}[each.place]
        path = "language_model."
        yield each._replace(name=f"{path}{each.name}", tensor=f"{path}{each.tensor}", below=below)


def _of_vision(found: VisionParameter) -> Parameter:
    """Return the same parameter of a vision network, whole on every rank."""
    return Parameter(
        *(found.name, found.shape, found.place, found.block, None, found.name),
        below=found.below,
        decays=found.decays,
        trains=found.trains,
    )


def base_shapes(model: AnyModel) -> dict[str, tuple[int, ...]]:
    """Return the shapes of all parameters of a model without its adapters, by name."""
    if isinstance(model, ModelSpec):
        model = model.model_copy(update=_NO_ADAPTER)
    return {parameter.name: parameter.shape for parameter in model_parameters(model)}


def stored_shapes(model: AnyModel | ClipVisionSpec) -> dict[str, tuple[int, ...]]:
    """Return the shapes of all that a file of weights has, by name: parameters, then buffers. Without adapters.

    Of an image tower alone under the names of a CLIP.
    """
    if isinstance(model, ClipVisionSpec):
        return {each.name: each.shape for each in vision_tower(model, "vision_model", 0)}
    if not isinstance(model, ModelSpec):
        return base_shapes(model) | {buffer.name: buffer.shape for buffer in vision_buffers(model)}
    biased = model.topk_method == "noaux_tc" and not model.has_fused_qkv
    blocks = [block for block in range(model.num_hidden_layers) if biased and model.has_experts(block)]
    buffers = {f"model.layers.{block}.mlp.gate.e_score_correction_bias": (model.num_experts,) for block in blocks}
    return base_shapes(model) | buffers


_NO_ADAPTER: dict[str, None] = {"adapter": None}


def modules_with_adapter(model: ModelSpec) -> list[Adapted]:
    """Return the modules of a model that have an adapter, in order; empty without ``model.adapter``."""
    if model.adapter is None:
        return []
    tied, interleaved = model.tie_word_embeddings, model.has_interleaved_experts
    return adapted_modules(model.adapter, base_shapes(model), tied=tied, interleaved=interleaved)


def _with_factors(model: ModelSpec, base: tuple[Parameter, ...]) -> Iterator[Parameter]:
    """Yield the parameters of a model, and after those of each module the factors of its adapter."""
    assert model.adapter is not None
    adapted = {module.name: module for module in modules_with_adapter(model)}
    weights = {parameter.name: parameter for parameter in base}
    for parameter, following in zip(base, [*base[1:], None], strict=True):
        yield parameter
        module = _module_of(parameter)
        if following is None or _module_of(following) != module:
            stacks = (name for name in adapted if name.rpartition(".")[0] == module and adapted[name].kind == "experts")
            for name in (module, *stacks):
                if name in adapted:
                    yield from _factors(model.adapter, adapted[name], weights.get(adapted[name].parameter, parameter))
    if _HEAD in adapted and model.tie_word_embeddings:
        yield from _factors(model.adapter, adapted[_HEAD], base[-1])


_HEAD = "lm_head"


def _module_of(parameter: Parameter) -> str:
    """Return the name of the engine's module with a parameter; the experts of a layer are one module."""
    return parameter.tensor.rpartition(".")[0]


def _factors(adapter: AdapterSpec, module: Adapted, weight: Parameter) -> Iterator[Parameter]:
    """Yield the factors of a module's adapter. ``weight``: that of the module, or a parameter beside it.

    Tensor ranks shard B where they shard the outputs of the module, A where they shard its inputs, and the A of a token
    embedding.
    """
    sharded = _sharded_features(module, weight)
    for name, shape in factor_shapes(adapter, module).items():
        is_a = name.endswith(("lora_A.weight", "lora_embedding_A"))
        dim = {"outputs": None if is_a else 0, "inputs": 1 if is_a else None, None: None}[sharded]
        tensor = f"{module.name}_lora_{'A' if is_a else 'B'}" if module.kind == "experts" else name
        yield Parameter(name, shape, weight.place, weight.block, dim, tensor, adapter=True)


def _sharded_features(module: Adapted, weight: Parameter) -> str | None:
    """Return whether tensor ranks shard the ``outputs`` or the ``inputs`` of a module; None if neither."""
    if module.kind == "head":
        return "outputs"
    if module.kind == "experts":
        return "outputs" if len(module.halves) > 1 else "inputs"
    if weight.tensor_dim is None:
        return None
    if module.kind == "embedding":
        return "inputs"
    return "inputs" if (weight.tensor_dim == 1) != module.transposed else "outputs"


def _parameters(model: ModelSpec) -> Iterator[Parameter]:
    gpt, hidden = model.has_fused_qkv, model.hidden_size
    outer, layers = ("transformer", "h") if gpt else ("model", "layers")
    table = f"{outer}.wte.weight" if gpt else f"{outer}.embed_tokens.weight"
    yield Parameter(table, (model.vocab_size, hidden), "embedding", None, 0, table)
    if model.positions == "learned":
        name = f"{outer}.wpe.weight"
        yield Parameter(name, (model.max_position_embeddings, hidden), "embedding", None, None, name)
    if model.embedding_norm:
        yield from _norm(model, f"{outer}.embed_norm", hidden, "embedding", None)
    for block in range(model.num_hidden_layers):
        yield from (_gpt_block if gpt else _llama_block)(model, f"{outer}.{layers}.{block}", block)
    yield from _norm(model, f"{outer}.ln_f" if gpt else f"{outer}.norm", hidden, "closing", None)
    if not model.tie_word_embeddings:
        yield Parameter("lm_head.weight", (model.vocab_size, hidden), "closing", None, 0, "lm_head.weight")


def _llama_block(model: ModelSpec, path: str, block: int) -> Iterator[Parameter]:
    parts = model.parts(block)
    if parts.attention:
        yield from _llama_attention(model, path, block)
    if parts.mamba:
        yield from _mamba(model, f"{path}.mamba", block)
    if parts.experts:
        yield from _experts(model, f"{path}.mlp", block)
    elif parts.mlp:
        yield from _mlp(model, path, "mlp", block, model.intermediate_size)
    for name in model.block_norms[: parts.sublayers] if model.block_types else model.block_norms:
        yield from _norm(model, f"{path}.{name}", model.hidden_size, "block", block)


def _llama_attention(model: ModelSpec, path: str, block: int) -> Iterator[Parameter]:
    hidden = model.hidden_size
    if model.attention_sinks:
        yield _vector(f"{path}.self_attn.sinks", model.num_attention_heads, block, 0)
    if model.kv_lora_rank:
        yield from _latent_attention(model, f"{path}.self_attn", block)
        return
    queries, keys = model.num_attention_heads * model.head_dim, model.num_key_value_heads * model.head_dim
    separate = (("q_proj", queries), ("k_proj", keys), ("v_proj", keys))
    for name, outputs in (("qkv_proj", queries + 2 * keys),) if model.fused_projections else separate:
        layer = _Linear(f"self_attn.{name}", outputs, hidden, "outputs", model.has_qkv_bias)
        yield from _linear(path, block, layer)
    yield from _linear(path, block, _Linear("self_attn.o_proj", hidden, queries, "inputs", model.has_output_bias))
    over_heads = model.qk_norm_scope == "head"
    weighted = model.qk_norm and model.qk_norm_scope != "unweighted"
    for name, size in (("q_norm", queries), ("k_norm", keys)) if weighted else ():
        path_of_norm = f"{path}.self_attn.{name}.weight"
        yield _vector(path_of_norm, model.head_dim if over_heads else size, block, None if over_heads else 0)


def _mamba(model: ModelSpec, path: str, block: int) -> Iterator[Parameter]:
    """Yield the parameters of a state-space layer, under the names of Mamba's files."""
    mamba = model.mamba
    assert mamba is not None
    inner, state = mamba.inner_size, mamba.state_size
    yield from _linear(
        path, block, _Linear("in_proj", mamba.projected_size, model.hidden_size, "outputs", mamba.proj_bias)
    )
    name = f"{path}.conv1d.weight"
    yield Parameter(name, (mamba.conv_size, 1, mamba.conv_kernel), "block", block, 0, name)
    if mamba.conv_bias:
        yield _vector(f"{path}.conv1d.bias", mamba.conv_size, block, 0)
    if mamba.dt_rank:
        yield from _linear(path, block, _Linear("x_proj", mamba.dt_rank + 2 * state, inner, "inputs", False))
        yield from _linear(path, block, _Linear("dt_proj", inner, mamba.dt_rank, "outputs", True))
        yield Parameter(f"{path}.A_log", (inner, state), "block", block, 0, f"{path}.A_log")
        yield _vector(f"{path}.D", inner, block, 0)
        norms = (("dt", mamba.dt_rank), ("b", state), ("c", state)) if mamba.inner_norms else ()
        yield from (_vector(f"{path}.{name}_layernorm.weight", size, block, None) for name, size in norms)
    else:
        yield from (_vector(f"{path}.{name}", mamba.num_heads, block, 0) for name in ("A_log", "D", "dt_bias"))
        if mamba.inner_norms:
            yield _vector(f"{path}.norm.weight", inner, block, 0)
    yield from _linear(path, block, _Linear("out_proj", model.hidden_size, inner, "inputs", mamba.proj_bias))


def _mlp(model: ModelSpec, path: str, name: str, block: int, inner: int) -> Iterator[Parameter]:
    hidden, bias = model.hidden_size, model.has_bias
    separate = ("gate_proj", "up_proj") if model.has_gated_mlp else ("up_proj",)
    for inputs in ("gate_up_proj",) if model.fused_projections else separate:
        outputs = inner * len(separate) if model.fused_projections else inner
        yield from _linear(path, block, _Linear(f"{name}.{inputs}", outputs, hidden, "outputs", bias))
    yield from _linear(path, block, _Linear(f"{name}.down_proj", hidden, inner, "inputs", bias))


def _experts(model: ModelSpec, path: str, block: int) -> Iterator[Parameter]:
    """Yield router, routed experts and shared experts; the engine stacks the routed ones."""
    hidden, inner = model.hidden_size, model.expert_size
    yield from _linear(path, block, _Linear("gate", model.num_experts, hidden, None, model.router_bias))
    stacks = (
        ("gate_up_proj", ("gate_proj", "up_proj") if model.has_gated_mlp else ("up_proj",), (inner, hidden), 0),
        ("down_proj", ("down_proj",), (hidden, inner), 1),
    )
    for stack, names, shape, dim in stacks:
        for expert in range(model.num_experts):
            for name in names:
                full = f"{path}.experts.{expert}.{name}.weight"
                yield Parameter(full, shape, "block", block, dim, f"{path}.experts.{stack}")
    for stack, names, (outputs, _), _ in stacks if model.has_bias else ():
        for expert in range(model.num_experts):
            for name in names:
                full = f"{path}.experts.{expert}.{name}.bias"
                yield Parameter(full, (outputs,), "block", block, 0, f"{path}.experts.{stack}_bias")
    if model.shared_expert_intermediate_size:
        yield from _mlp(model, path, model.shared_expert_name, block, model.shared_expert_intermediate_size)
    if model.shared_expert_gate:
        yield from _linear(path, block, _Linear("shared_expert_gate", 1, hidden, None, False))


def _latent_attention(model: ModelSpec, path: str, block: int) -> Iterator[Parameter]:
    """Yield the parameters of DeepSeek-V2's attention (arXiv:2405.04434, section 2.1) under the names of its files."""
    hidden, heads, latent, query = model.hidden_size, model.num_attention_heads, model.kv_lora_rank, model.q_lora_rank
    wide, value = model.qk_head_dim, model.value_head_dim
    if query:
        yield from _linear(path, block, _Linear("q_a_proj", query, hidden, None, False))
        yield _vector(f"{path}.q_a_layernorm.weight", query, block, None)
        yield from _linear(path, block, _Linear("q_b_proj", heads * wide, query, "outputs", False))
    else:
        yield from _linear(path, block, _Linear("q_proj", heads * wide, hidden, "outputs", False))
    compressed = latent + model.qk_rope_head_dim
    yield from _linear(path, block, _Linear("kv_a_proj_with_mqa", compressed, hidden, None, False))
    yield _vector(f"{path}.kv_a_layernorm.weight", latent, block, None)
    up = heads * (model.head_dim + value)
    yield from _linear(path, block, _Linear("kv_b_proj", up, latent, "outputs", False))
    yield from _linear(path, block, _Linear("o_proj", hidden, heads * value, "inputs", False))
    if model.index_topk:
        indexer, size = f"{path}.indexer", model.index_head_dim
        yield from _linear(indexer, block, _Linear("wq_b", model.index_n_heads * size, query or hidden, None, False))
        yield from _linear(indexer, block, _Linear("wk", size, hidden, None, False))
        yield _vector(f"{indexer}.k_norm.weight", size, block, None)
        yield _vector(f"{indexer}.k_norm.bias", size, block, None)
        yield from _linear(indexer, block, _Linear("weights_proj", model.index_n_heads, hidden, None, False))


def _gpt_block(model: ModelSpec, path: str, block: int) -> Iterator[Parameter]:
    """Yield the parameters of a GPT-2 block, whose matrices are [inputs, outputs]."""
    hidden, bias = model.hidden_size, model.has_bias
    queries, keys = model.num_attention_heads * model.head_dim, model.num_key_value_heads * model.head_dim
    yield from _norm(model, f"{path}.ln_1", hidden, "block", block)
    fused = _Linear("attn.c_attn", queries + 2 * keys, hidden, "outputs", bias or model.qkv_bias)
    yield from _linear(path, block, fused, transposed=True)
    yield from _linear(path, block, _Linear("attn.c_proj", hidden, queries, "inputs", bias), transposed=True)
    for name in ("q_norm", "k_norm") if model.qk_norm else ():
        yield _vector(f"{path}.attn.{name}.weight", model.head_dim, block, None)
    yield from _norm(model, f"{path}.ln_2", hidden, "block", block)
    inner = model.intermediate_size
    for name in ("c_gate", "c_fc") if model.has_gated_mlp else ("c_fc",):
        yield from _linear(path, block, _Linear(f"mlp.{name}", inner, hidden, "outputs", bias), transposed=True)
    yield from _linear(path, block, _Linear("mlp.c_proj", hidden, inner, "inputs", bias), transposed=True)


def _linear(path: str, block: int, layer: _Linear, *, transposed: bool = False) -> Iterator[Parameter]:
    """Yield weight and bias; a weight is [outputs, inputs], or [inputs, outputs] if ``transposed``."""
    shape = (layer.inputs, layer.outputs) if transposed else (layer.outputs, layer.inputs)
    dim = None if layer.sharded is None else int((layer.sharded == "inputs") != transposed)
    name = f"{path}.{layer.name}"
    yield Parameter(f"{name}.weight", shape, "block", block, dim, f"{name}.weight")
    if layer.bias:  # the bias of a layer with sharded inputs is added after the sum
        yield _vector(f"{name}.bias", layer.outputs, block, 0 if layer.sharded == "outputs" else None)


def _norm(model: ModelSpec, path: str, size: int, place: str, block: int | None) -> Iterator[Parameter]:
    for name in ("weight", "bias") if model.has_norm_bias else ("weight",):
        yield Parameter(f"{path}.{name}", (size,), place, block, None, f"{path}.{name}")


def _vector(name: str, size: int, block: int, dim: int | None) -> Parameter:
    return Parameter(name, (size,), "block", block, dim, name)


# What trains: the groups of ``training.trainable``, resolved by name for each step.


class _Recipe(NamedTuple):
    """The settings that decide what trains; hashable, as a cache key."""

    model: AnyModel
    trainable: tuple[TrainableGroup, ...]
    optimizer: OptimizerSpec
    steps: int


def training_stages(spec: RunSpec) -> tuple[Stage, ...]:
    """Return the stages of a run, in order, from step 1 to the last one.

    Raises UsageError with all problems of ``training.trainable``.
    """
    check_what_trains(spec)
    return _stages(_recipe(spec))


def stage_at(spec: RunSpec, step: int) -> Stage:
    """Return the stage that trains a step (1-based), or the state after it. Step 0 is in the first stage."""
    return next(stage for stage in training_stages(spec) if step <= stage.last_step)


def trained_ever(spec: RunSpec) -> frozenset[str]:
    """Return the names of the parameters that train at some step of the run."""
    check_what_trains(spec)
    return _trained_ever(_recipe(spec))


def trains_only_adapters(spec: RunSpec) -> bool:
    """Return True if no parameter of the model itself trains at any step of the run."""
    check_what_trains(spec)
    return _trains_only_adapters(_recipe(spec))


@lru_cache(maxsize=64)
def _trained_ever(recipe: _Recipe) -> frozenset[str]:
    return frozenset(name for stage in _stages(recipe) for name in stage.since)


@lru_cache(maxsize=64)
def _trains_only_adapters(recipe: _Recipe) -> bool:
    return all(map(is_adapter_parameter, _trained_ever(recipe)))


def base_names(spec: RunSpec) -> frozenset[str]:
    """Return the parameters that keep the values of ``model.weights`` in the whole run; no checkpoint stores them."""
    if spec.weights is None or trains_everything(spec):
        return frozenset()
    return frozenset(parameter.name for parameter in model_parameters(spec.model)) - trained_ever(spec)


def trains_everything(spec: RunSpec) -> bool:
    """Return True if all parameters train in all steps with the same optimizer and rate, whatever their names are."""
    return not names_what_trains(spec) and not has_muon(spec)


def names_what_trains(spec: RunSpec) -> bool:
    """Return True if parameters are frozen at some step, or have learning rates of their own."""
    training = spec.training
    return bool(training.trainable) or training.optimizer.layer_decay != 1 or has_adapter(spec.model)


def has_muon(spec: RunSpec) -> bool:
    """Return True if Muon updates some parameters and AdamW the others, for a model that Muon can train."""
    return spec.training.optimizer.name == "muon" and spec.model.family in BUILT_IN_FAMILIES


def has_adapter(model: AnyModel) -> bool:
    """Return True if factors of a low-rank adapter train instead of the model's own parameters."""
    return getattr(model, "adapter", None) is not None and model.family in BUILT_IN_FAMILIES


def _recipe(spec: RunSpec) -> _Recipe:
    return _Recipe(spec.model, spec.training.trainable, spec.training.optimizer, spec.total_steps)


@lru_cache(maxsize=16)
def _stages(recipe: _Recipe) -> tuple[Stage, ...]:
    stages: list[Stage] = []
    for phase in _phases(recipe):
        last = stages[-1] if stages else None
        if last is not None and last.since.keys() == phase.settings.keys():
            stages[-1] = last._replace(last_step=phase.last_step, phases=(*last.phases, phase))
        else:
            before = {} if last is None else last.since
            since = {name: before.get(name, phase.first_step) for name in phase.settings}
            stages.append(Stage(phase.first_step, phase.last_step, (phase,), since))
    return tuple(stages)


@lru_cache(maxsize=16)
def _phases(recipe: _Recipe) -> tuple[Phase, ...]:
    found: list[Phase] = []
    starts = _first_steps(recipe)
    for first, following in zip(starts, [*starts[1:], recipe.steps + 1], strict=True):
        settings = _settings(recipe, first)
        if found and found[-1].settings == settings:
            found[-1] = found[-1]._replace(last_step=following - 1)
        else:
            found.append(Phase(first, following - 1, settings))
    return tuple(found)


def _first_steps(recipe: _Recipe) -> list[int]:
    """Return step 1 and the steps at which a group starts or has ended, in order."""
    ends = {group.end_step + 1 for group in recipe.trainable if group.end_step is not None}
    steps = {1} | {group.start_step for group in recipe.trainable} | ends
    return sorted(step for step in steps if step <= recipe.steps)


def _settings(recipe: _Recipe, step: int) -> dict[str, Settings]:
    """Return the settings of the parameters that train at a step, in the order of the model."""
    found: dict[str, Settings] = {}
    everything = not recipe.trainable and not has_adapter(recipe.model)
    deciding = _deciding(recipe.model, tuple(_patterns(recipe, step)))
    for parameter in model_parameters(recipe.model):
        number = deciding.get(parameter.name)
        if number is not None:
            found[parameter.name] = _settings_of(recipe, recipe.trainable[number], parameter)
        elif (everything or parameter.adapter) and parameter.trains:
            found[parameter.name] = _settings_of(recipe, None, parameter)
    return found


def _patterns(recipe: _Recipe, step: int) -> Iterator[tuple[int, tuple[str, ...]]]:
    """Yield the number and the patterns of each group that is active at a step."""
    for number, group in enumerate(recipe.trainable):
        if group.start_step <= step and (group.end_step is None or step <= group.end_step):
            yield number, group.match


@lru_cache(maxsize=64)
def _deciding(model: AnyModel, groups: tuple[tuple[int, tuple[str, ...]], ...]) -> dict[str, int]:
    """Return the number of the first group that matches each parameter; parameters without one are left out."""
    found: dict[str, int] = {}
    for parameter in filter(_trains, model_parameters(model)):
        for number, patterns in groups:
            if any(fnmatchcase(parameter.name, pattern) for pattern in patterns):
                found[parameter.name] = number
                break
    return found


def _trains(parameter: Parameter) -> bool:
    return parameter.trains


def _settings_of(recipe: _Recipe, group: TrainableGroup | None, parameter: Parameter) -> Settings:
    """Return the settings of a parameter. Norms and biases have no weight decay (GPT-3, arXiv:2005.14165, appendix B).

    ``layer_decay`` multiplies the learning rate once per layer below the head: the last block is one layer below it,
    and the embeddings are below the first block (BEiT, arXiv:2106.08254).
    """
    optimizer, below = recipe.optimizer, parameter.below
    if below is None:
        assert isinstance(recipe.model, ModelSpec)
        layers = recipe.model.num_hidden_layers
        below = {"embedding": layers + 1, "block": layers - (parameter.block or 0), "closing": 0}[parameter.place]
    lr, decay = optimizer.lr, optimizer.weight_decay
    if group is not None:
        lr = optimizer.lr if group.lr is None else group.lr
        decay = decay if group.weight_decay is None else group.weight_decay
    if not decays(parameter, optimizer):
        decay = 0.0
    factor = lr / optimizer.lr * optimizer.layer_decay**below
    if optimizer.name != "muon" or recipe.model.family not in BUILT_IN_FAMILIES:
        return Settings(factor, decay)
    if not parameter.is_orthogonalized and optimizer.muon.adamw_lr is not None:
        factor *= optimizer.muon.adamw_lr / optimizer.lr
    return Settings(factor, decay, parameter.is_orthogonalized)


def decays(parameter: Parameter, optimizer: OptimizerSpec) -> bool:
    """Return True if weight decay applies to a parameter: a matrix, without those that are left out."""
    tables = parameter.place == "embedding" and not optimizer.decay_embeddings
    return parameter.is_matrix and parameter.decays and not tables


# Problems that only the names show.


def check_what_trains(spec: RunSpec) -> None:
    """Raise UsageError with all problems if ``training.trainable`` or ``layer_decay`` does not fit the model."""
    if trains_everything(spec):
        return
    if spec.model.family not in FAMILIES:
        key = "training.trainable" if spec.training.trainable else "training.optimizer.layer_decay"
        rules: tuple[Rule, ...] = (Rule(key, None, "trainable-built-in-families", {"family": spec.model.family}),)
    else:
        rules = _problems(_recipe(spec))
    if rules:
        count = {"problems": len(rules)}
        raise UsageError(Reason("plan.trainable-invalid", count), tuple(r.problem(spec.where(r.key)) for r in rules))


@lru_cache(maxsize=16)
def _problems(recipe: _Recipe) -> tuple[Rule, ...]:
    found = [rule for number, group in enumerate(recipe.trainable) for rule in _about_group(recipe, number, group)]
    return tuple(found or _about_stages(recipe))


def _about_group(recipe: _Recipe, number: int, group: TrainableGroup) -> Iterator[Rule]:
    """Yield the patterns that match nothing, and a weight decay without a matrix that it applies to."""
    parameters, key = model_parameters(recipe.model), f"training.trainable.{number}"
    for pattern in group.match:
        if not any(fnmatchcase(parameter.name, pattern) for parameter in parameters):
            near = near_patterns(pattern, recipe.model)
            if near:
                yield Rule(f"{key}.match", pattern, "trainable-matches-nothing", fix={"near": near})
            else:
                example = {"example": parameters[-1].name}
                yield Rule(f"{key}.match", pattern, "trainable-no-such-name", fix=example)
            return
    matched = [p for p in parameters if any(fnmatchcase(p.name, pattern) for pattern in group.match)]
    if group.weight_decay and not any(_settings_of(recipe, group, parameter).weight_decay for parameter in matched):
        yield Rule(f"{key}.weight_decay", group.weight_decay, "trainable-decays-nothing")


def _about_stages(recipe: _Recipe) -> Iterator[Rule]:
    """Yield steps at which nothing trains, groups that never decide, and experts that are not trained alike."""
    key, deciding = "training.trainable", set()
    tensors = {parameter.name: parameter.tensor for parameter in model_parameters(recipe.model)}
    starts = _first_steps(recipe)
    for first, following in zip(starts, [*starts[1:], recipe.steps + 1], strict=True):
        settings = _settings(recipe, first)
        deciding |= set(_deciding(recipe.model, tuple(_patterns(recipe, first))).values())
        if not settings:
            yield Rule(key, None, "trains-nothing", {"first": first, "last": following - 1})
        of_tensor: dict[str, Settings | None] = {}
        for name, tensor in tensors.items():
            if of_tensor.setdefault(tensor, settings.get(name)) != settings.get(name):
                yield Rule(key, None, "trainable-splits-experts", {"step": first, "tensor": tensor, "name": name})
                return
    for number in sorted(set(range(len(recipe.trainable))) - deciding):
        yield Rule(f"{key}.{number}.match", ", ".join(recipe.trainable[number].match), "trainable-never-first")


def near_patterns(pattern: str, model: AnyModel) -> list[str]:
    """Return patterns near ``pattern`` that match parameters of the model; empty if none is near."""
    names = dict.fromkeys(_NUMBERS.sub("*", parameter.name) for parameter in model_parameters(model))
    for wider in (f"*.{pattern}", f"{pattern}.*", f"*.{pattern}.*"):
        if any(fnmatchcase(parameter.name, wider) for parameter in model_parameters(model)):
            return [wider]
    return difflib.get_close_matches(_NUMBERS.sub("*", pattern), names, n=_MOST_NEAR, cutoff=0.5)
