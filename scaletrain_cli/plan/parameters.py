"""The parameters of a model under their Hugging Face names.

Names and shapes are those of the engine's modules and of Hugging Face's files, in the order of the modules.
"""

from collections.abc import Iterator
from functools import lru_cache

from scaletrain_cli.plan.parameter import EngineTensor, Parameter, engine_tensors
from scaletrain_cli.plan.vision.parameters import vision_buffers, vision_parameters, vision_tower
from scaletrain_cli.spec import LlavaSpec, ModelSpec
from scaletrain_cli.spec.adapter import Adapted, AdapterSpec, adapted_modules, factor_shapes
from scaletrain_cli.spec.extensions import BUILT_IN_FAMILIES
from scaletrain_cli.spec.hybrid import BlockParts
from scaletrain_cli.spec.run import AnyModel
from scaletrain_cli.spec.vision_model import ClipVisionSpec


@lru_cache(maxsize=64)
def model_parameters(model: AnyModel) -> tuple[Parameter, ...]:
    """Return all parameters of a model, once each: a tied head is the token embedding. Factors of adapters included."""
    if isinstance(model, LlavaSpec):
        return tuple(_llava(model))
    if not isinstance(model, ModelSpec):
        return vision_parameters(model)
    parameters = tuple(_parameters(model))
    return parameters if model.adapter is None else tuple(_with_factors(model, parameters))


def _llava(model: LlavaSpec) -> Iterator[Parameter]:
    """Yield the parameters of the image tower, the projector and the language model of LLaVA."""
    yield from vision_parameters(model)
    layers = model.text_config.num_hidden_layers
    for parameter in model_parameters(model.text_config):
        below = {"embedding": layers + 1, "block": layers - (parameter.block or 0), "closing": 0}[parameter.place]
        path = "language_model."
        yield parameter._replace(name=f"{path}{parameter.name}", tensor=f"{path}{parameter.tensor}", below=below)


def base_shapes(model: AnyModel) -> dict[str, tuple[int, ...]]:
    """Return the shapes of all parameters of a model without its adapters, by name."""
    if isinstance(model, ModelSpec):
        model = model.model_copy(update={"adapter": None})
    return {parameter.name: parameter.shape for parameter in model_parameters(model)}


def stored_shapes(model: AnyModel | ClipVisionSpec) -> dict[str, tuple[int, ...]]:
    """Return the shapes of all that a file of weights has, by name: parameters, then buffers. Without adapters.

    Of an image tower alone under the names of a CLIP.
    """
    if isinstance(model, ClipVisionSpec):
        return {parameter.name: parameter.shape for parameter in vision_tower(model, "vision_model", 0)}
    if not isinstance(model, ModelSpec):
        return base_shapes(model) | {buffer.name: buffer.shape for buffer in vision_buffers(model)}
    biased = model.topk_method == "noaux_tc" and not model.has_fused_qkv
    blocks = [block for block in range(model.num_hidden_layers) if biased and model.has_experts(block)]
    buffers = {f"model.layers.{block}.mlp.gate.e_score_correction_bias": (model.num_experts,) for block in blocks}
    return base_shapes(model) | buffers


def has_adapter(model: AnyModel) -> bool:
    """Return True if factors of a low-rank adapter train instead of the model's own parameters."""
    return getattr(model, "adapter", None) is not None and model.family in BUILT_IN_FAMILIES


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


@lru_cache(maxsize=256)
def block_tensors(model: ModelSpec, parts: BlockParts) -> tuple[EngineTensor, ...]:
    """Return the tensors of a block that consists of ``parts``, without adapters. Takes no longer for more experts."""
    count, block_of = model.num_experts, _gpt_block if model.has_fused_qkv else _llama_block
    return tuple(
        tensor._replace(elements=count * tensor.elements, experts=count) if tensor.experts else tensor
        for tensor, _ in engine_tensors(block_of(model, "blocks.0", 0, parts, 1))
    )


@lru_cache(maxsize=256)
def end_tensors(model: ModelSpec) -> tuple[tuple[EngineTensor, ...], tuple[EngineTensor, ...]]:
    """Return the tensors before and after the blocks, without adapters; the first is the token embedding."""
    opening, closing = (tuple(tensor for tensor, _ in engine_tensors(part(model))) for part in (_opening, _closing))
    return opening, closing


def _parameters(model: ModelSpec) -> Iterator[Parameter]:
    yield from _opening(model)
    block_of, path = (_gpt_block, "transformer.h") if model.has_fused_qkv else (_llama_block, "model.layers")
    for block in range(model.num_hidden_layers):
        yield from block_of(model, f"{path}.{block}", block, model.parts(block), model.num_experts)
    yield from _closing(model)


def _opening(model: ModelSpec) -> Iterator[Parameter]:
    outer, hidden = "transformer" if model.has_fused_qkv else "model", model.hidden_size
    table = f"{outer}.wte.weight" if model.has_fused_qkv else f"{outer}.embed_tokens.weight"
    yield Parameter(table, (model.vocab_size, hidden), "embedding", None, 0, table)
    if model.positions == "learned":
        name = f"{outer}.wpe.weight"
        yield Parameter(name, (model.max_position_embeddings, hidden), "embedding", None, None, name)
    if model.embedding_norm:
        yield from _norm(model, f"{outer}.embed_norm", hidden, "embedding", None)


def _closing(model: ModelSpec) -> Iterator[Parameter]:
    hidden = model.hidden_size
    yield from _norm(model, "transformer.ln_f" if model.has_fused_qkv else "model.norm", hidden, "closing", None)
    if not model.tie_word_embeddings:
        yield Parameter("lm_head.weight", (model.vocab_size, hidden), "closing", None, 0, "lm_head.weight")


def _llama_block(model: ModelSpec, path: str, block: int, parts: BlockParts, experts: int) -> Iterator[Parameter]:
    """Yield the parameters of a block, and of its routed experts the first ``experts``."""
    if parts.attention:
        yield from _llama_attention(model, path, block)
    if parts.mamba:
        yield from _mamba(model, f"{path}.mamba", block)
    if parts.experts:
        yield from _experts(model, f"{path}.mlp", block, experts)
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
    heads, of_keys = (model.num_attention_heads,), (model.num_key_value_heads,)
    separate = (("q_proj", queries, heads), ("k_proj", keys, of_keys), ("v_proj", keys, of_keys))
    joined = (("qkv_proj", queries + 2 * keys, (*heads, *of_keys, *of_keys)),)
    for name, outputs, shards in joined if model.fused_projections else separate:
        yield from _linear(path, block, f"self_attn.{name}", outputs, hidden, "outputs", model.has_qkv_bias, shards)
    yield from _linear(path, block, "self_attn.o_proj", hidden, queries, "inputs", model.has_output_bias, heads)
    over_heads = model.qk_norm_scope == "head"
    weighted = model.qk_norm and model.qk_norm_scope != "unweighted"
    for name, size, shards in (("q_norm", queries, heads), ("k_norm", keys, of_keys)) if weighted else ():
        path_of_norm = f"{path}.self_attn.{name}.weight"
        yield _vector(path_of_norm, model.head_dim if over_heads else size, block, None if over_heads else 0, shards)


def _mamba(model: ModelSpec, path: str, block: int) -> Iterator[Parameter]:
    """Yield the parameters of a state-space layer, under the names of Mamba's files."""
    mamba = model.mamba
    assert mamba is not None
    inner, state = mamba.inner_size, mamba.state_size
    yield from _linear(path, block, "in_proj", mamba.projected_size, model.hidden_size, "outputs", mamba.proj_bias)
    name = f"{path}.conv1d.weight"
    yield Parameter(name, (mamba.conv_size, 1, mamba.conv_kernel), "block", block, 0, name)
    if mamba.conv_bias:
        yield _vector(f"{path}.conv1d.bias", mamba.conv_size, block, 0)
    if mamba.dt_rank:
        yield from _linear(path, block, "x_proj", mamba.dt_rank + 2 * state, inner, "inputs", False)
        yield from _linear(path, block, "dt_proj", inner, mamba.dt_rank, "outputs", True)
        yield Parameter(f"{path}.A_log", (inner, state), "block", block, 0, f"{path}.A_log")
        yield _vector(f"{path}.D", inner, block, 0)
        norms = (("dt", mamba.dt_rank), ("b", state), ("c", state)) if mamba.inner_norms else ()
        yield from (_vector(f"{path}.{name}_layernorm.weight", size, block, None) for name, size in norms)
    else:
        yield from (_vector(f"{path}.{name}", mamba.num_heads, block, 0) for name in ("A_log", "D", "dt_bias"))
        if mamba.inner_norms:
            yield _vector(f"{path}.norm.weight", inner, block, 0)
    yield from _linear(path, block, "out_proj", model.hidden_size, inner, "inputs", mamba.proj_bias)


def _mlp(model: ModelSpec, path: str, name: str, block: int, inner: int) -> Iterator[Parameter]:
    hidden, bias = model.hidden_size, model.has_bias
    separate = ("gate_proj", "up_proj") if model.has_gated_mlp else ("up_proj",)
    for inputs in ("gate_up_proj",) if model.fused_projections else separate:
        outputs = inner * len(separate) if model.fused_projections else inner
        yield from _linear(path, block, f"{name}.{inputs}", outputs, hidden, "outputs", bias)
    yield from _linear(path, block, f"{name}.down_proj", hidden, inner, "inputs", bias)


def _experts(model: ModelSpec, path: str, block: int, count: int) -> Iterator[Parameter]:
    """Yield router, routed experts and shared experts; the engine stacks the routed ones."""
    hidden, inner = model.hidden_size, model.expert_size
    yield from _linear(path, block, "gate", model.num_experts, hidden, None, model.router_bias)
    stacks = (
        ("gate_up_proj", ("gate_proj", "up_proj") if model.has_gated_mlp else ("up_proj",), (inner, hidden), 0),
        ("down_proj", ("down_proj",), (hidden, inner), 1),
    )
    for stack, names, shape, dim in stacks:
        for expert in range(count):
            for name in names:
                full = f"{path}.experts.{expert}.{name}.weight"
                yield Parameter(full, shape, "block", block, dim, f"{path}.experts.{stack}")
    for stack, names, (outputs, _), _ in stacks if model.has_bias else ():
        for expert in range(count):
            for name in names:
                full = f"{path}.experts.{expert}.{name}.bias"
                yield Parameter(full, (outputs,), "block", block, 0, f"{path}.experts.{stack}_bias")
    if model.shared_expert_intermediate_size:
        yield from _mlp(model, path, model.shared_expert_name, block, model.shared_expert_intermediate_size)
    if model.shared_expert_gate:
        yield from _linear(path, block, "shared_expert_gate", 1, hidden, None, False)


def _latent_attention(model: ModelSpec, path: str, block: int) -> Iterator[Parameter]:
    """Yield the parameters of DeepSeek-V2's attention (arXiv:2405.04434, section 2.1) under the names of its files."""
    hidden, heads, latent, query = model.hidden_size, model.num_attention_heads, model.kv_lora_rank, model.q_lora_rank
    wide, value = model.qk_head_dim, model.value_head_dim
    if query:
        yield from _linear(path, block, "q_a_proj", query, hidden, None, False)
        yield _vector(f"{path}.q_a_layernorm.weight", query, block, None)
        yield from _linear(path, block, "q_b_proj", heads * wide, query, "outputs", False)
    else:
        yield from _linear(path, block, "q_proj", heads * wide, hidden, "outputs", False)
    compressed = latent + model.qk_rope_head_dim
    yield from _linear(path, block, "kv_a_proj_with_mqa", compressed, hidden, None, False)
    yield _vector(f"{path}.kv_a_layernorm.weight", latent, block, None)
    yield from _linear(path, block, "kv_b_proj", heads * (model.head_dim + value), latent, "outputs", False)
    if model.index_topk:
        indexer, size = f"{path}.indexer", model.index_head_dim
        yield from _linear(indexer, block, "wq_b", model.index_n_heads * size, query or hidden, None, False)
        yield from _linear(indexer, block, "wk", size, hidden, None, False)
        yield _vector(f"{indexer}.k_norm.weight", size, block, None)
        yield _vector(f"{indexer}.k_norm.bias", size, block, None)
        yield from _linear(indexer, block, "weights_proj", model.index_n_heads, hidden, None, False)
    yield from _linear(path, block, "o_proj", hidden, heads * value, "inputs", False)


def _gpt_block(model: ModelSpec, path: str, block: int, parts: BlockParts, experts: int) -> Iterator[Parameter]:
    """Yield the parameters of a GPT-2 block, whose matrices are [inputs, outputs], and of its first ``experts``.

    Routed experts in place of the MLP are planned only, as Megatron-LM has them.
    """
    hidden, bias = model.hidden_size, model.has_bias
    queries, keys = model.num_attention_heads * model.head_dim, model.num_key_value_heads * model.head_dim
    yield from _norm(model, f"{path}.ln_1", hidden, "block", block)
    heads = (model.num_attention_heads, model.num_key_value_heads, model.num_key_value_heads)
    fused, biased = queries + 2 * keys, bias or model.qkv_bias
    yield from _linear(path, block, "attn.c_attn", fused, hidden, "outputs", biased, heads, transposed=True)
    yield from _linear(path, block, "attn.c_proj", hidden, queries, "inputs", bias, heads[:1], transposed=True)
    for name in ("q_norm", "k_norm") if model.qk_norm else ():
        yield _vector(f"{path}.attn.{name}.weight", model.head_dim, block, None)
    yield from _norm(model, f"{path}.ln_2", hidden, "block", block)
    if parts.experts:
        yield from _experts(model, f"{path}.mlp", block, experts)
        return
    inner = model.intermediate_size
    for name in ("c_gate", "c_fc") if model.has_gated_mlp else ("c_fc",):
        yield from _linear(path, block, f"mlp.{name}", inner, hidden, "outputs", bias, transposed=True)
    yield from _linear(path, block, "mlp.c_proj", hidden, inner, "inputs", bias, transposed=True)


def _linear(
    path: str,
    block: int,
    name: str,
    outputs: int,
    inputs: int,
    sharded: str | None,
    bias: bool,
    heads: tuple[int, ...] = (),
    *,
    transposed: bool = False,
) -> Iterator[Parameter]:
    """Yield weight and bias of a layer of a block; a weight is [outputs, inputs], or the reverse if ``transposed``.

    ``sharded``: what tensor ranks shard, ``outputs`` or ``inputs``. ``heads``: see Parameter.
    """
    shape, full = (inputs, outputs) if transposed else (outputs, inputs), f"{path}.{name}"
    dim = None if sharded is None else int((sharded == "inputs") != transposed)
    yield Parameter(f"{full}.weight", shape, "block", block, dim, f"{full}.weight", heads=heads)
    if bias:  # the bias of a layer with sharded inputs is added after the sum
        yield _vector(f"{full}.bias", outputs, block, 0 if sharded == "outputs" else None, heads)


def _norm(model: ModelSpec, path: str, size: int, place: str, block: int | None) -> Iterator[Parameter]:
    for name in ("weight", "bias") if model.has_norm_bias else ("weight",):
        yield Parameter(f"{path}.{name}", (size,), place, block, None, f"{path}.{name}")


def _vector(name: str, size: int, block: int, dim: int | None, heads: tuple[int, ...] = ()) -> Parameter:
    return Parameter(name, (size,), "block", block, dim, name, heads=heads)
