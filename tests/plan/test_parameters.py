"""The parameters that the planner names are those of the engine and of transformers; what trains is decided by name."""

import re
from typing import Any, cast

import pytest

from scaletrain_cli.errors import UsageError
from scaletrain_cli.plan.architecture import architecture, parameter_count
from scaletrain_cli.plan.parameters import model_parameters, stored_shapes
from scaletrain_cli.plan.planning import make_plan
from scaletrain_cli.plan.trained_parameters import Settings, Stage, training_stages
from scaletrain_cli.spec import ModelSpec, RunSpec
from scaletrain_cli.spec.hugging_face_weights import to_hugging_face
from tests.model_sizes import model_sizes
from tests.plan.specs import model_of, spec_of
from tests.spec.samples import SPEC, load

DIMENSIONS = model_sizes(hidden=16, layers=3, heads=4, kv_heads=2, head_dim=6, intermediate=40, vocab=64)
GPT = DIMENSIONS | {"num_key_value_heads": 4, "head_dim": 4, "max_position_embeddings": 32, "seq_len": 32}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "shared_expert_intermediate_size": 8, "first_k_dense_replace": 1}
LLAMA = model_of("llama-7b", **DIMENSIONS)
LATENT = {"num_key_value_heads": 4, "kv_lora_rank": 12, "q_lora_rank": 20, "qk_rope_head_dim": 2, "v_head_dim": 5}
MODELS = {
    "llama": LLAMA,
    "tied": model_of("llama-7b", **DIMENSIONS, tie_word_embeddings=True),
    "qwen2": model_of("llama-7b", **DIMENSIONS, qkv_bias=True),
    "qwen3": model_of("llama-7b", **DIMENSIONS, qk_norm=True),
    "latent": model_of("llama-7b", **{**DIMENSIONS, **LATENT}),
    "gpt": model_of("gpt2", **GPT),
    "untied gpt": model_of("gpt2", **GPT, tie_word_embeddings=False),
}
MIXTURE = model_of("mixtral-8x7b", **DIMENSIONS, **EXPERTS)
GATED = {"shared_expert_gate": True, "decoder_sparse_step": 2, "first_k_dense_replace": 0, "router_bias": True}
MIXTURES = {"mixture": MIXTURE, "gated": model_of("mixtral-8x7b", **DIMENSIONS, **{**EXPERTS, **GATED})}
PLANNED_ONLY = {
    "deepseek-v2-lite": model_of("deepseek-v2-lite"),
    "gated gpt": model_of("gpt2", gated_mlp=True, embedding_norm=True, qk_norm=True),
    "layer norms": model_of("llama-7b", norm="layernorm", bias=True, gated_mlp=False, position_embedding="learned"),
}


def run_of(model: ModelSpec, *groups: dict[str, Any], steps: int = 10, **optimizer: Any) -> RunSpec:
    spec = spec_of("llama-7b", training__trainable=list(groups), training__steps=steps, training__optimizer=optimizer)
    return spec.model_copy(update={"model": model})


def settings(spec: RunSpec, step: int = 1) -> dict[str, Settings]:
    phases = (phase for stage in training_stages(spec) for phase in stage.phases)
    return dict(next(phase.settings for phase in phases if step <= phase.last_step))


@pytest.mark.parametrize("name", [*MODELS, *MIXTURES])
def test_names_and_shapes_are_those_of_the_modules_of_the_engine(name: str) -> None:
    pytest.importorskip("torch")
    from scaletrain_cli.engine.model import outline
    from scaletrain_cli.engine.model.materialization import named_matrices, named_weights

    model = {**MODELS, **MIXTURES}[name]
    assert stored_shapes(model) == named_weights(outline(model))
    ours = {parameter.name: parameter.shape for parameter in model_parameters(model)}
    assert list(ours.items()) == list(named_matrices(outline(model)))
    tensors = dict.fromkeys(parameter.tensor for parameter in model_parameters(model))
    assert list(tensors) == [name for name, _ in outline(model).named_parameters()]


@pytest.mark.parametrize("name", MODELS)
def test_names_and_shapes_are_those_of_transformers(name: str) -> None:
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    config = transformers.AutoConfig.for_model(**to_hugging_face(MODELS[name]))
    with torch.device("meta"):
        theirs = transformers.AutoModelForCausalLM.from_config(config)
    theirs.tie_weights()
    ours = {parameter.name: parameter.shape for parameter in model_parameters(MODELS[name])}
    assert ours == {name: tuple(parameter.shape) for name, parameter in theirs.named_parameters()}


def test_experts_without_a_gate_have_the_biases_of_two_matrices() -> None:
    model = model_of("mixtral-8x7b", **DIMENSIONS, **EXPERTS, gated_mlp=False, bias=True)
    biases = [parameter for parameter in model_parameters(model) if parameter.name.endswith("bias")]
    of_experts = sum(parameter.numel for parameter in biases if ".experts." in parameter.name)
    assert of_experts == 2 * 4 * (40 + 16), "in two of three layers, four experts"


@pytest.mark.parametrize("model", [*MODELS.values(), MIXTURE, *PLANNED_ONLY.values()])
def test_the_parameters_add_up_to_the_architecture(model: ModelSpec) -> None:
    assert sum(parameter.numel for parameter in model_parameters(model)) == parameter_count(model)


def test_the_experts_of_a_gpt_block_are_planned_with_all_their_matrices() -> None:
    """As in Megatron-LM, whose GPT blocks may have experts: the engine has none."""
    dense = model_of("gpt2", **GPT, bias=False)
    sparse = dense.model_copy(update={"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 40})
    mlp, expert = 2 * dense.hidden_size * dense.intermediate_size, 2 * dense.hidden_size * 40
    more = dense.num_hidden_layers * (8 * expert + 8 * dense.hidden_size - mlp)
    for count in (parameter_count, lambda model: sum(each.numel for each in model_parameters(model))):
        assert count(sparse) - count(dense) == more
    assert architecture(sparse, 2, 4).block.expert == expert // 2


def test_shards_of_tensor_ranks_are_those_of_the_engine() -> None:
    pytest.importorskip("torch")
    from scaletrain_cli.engine.model import outline
    from scaletrain_cli.engine.model.materialization import matrices_in
    from scaletrain_cli.engine.parallel.expert import shard_experts
    from scaletrain_cli.engine.parallel.mesh import Axis, Mesh
    from scaletrain_cli.engine.parallel.tensor import shard_over_tensor_ranks

    for model in (*MODELS.values(), MIXTURE):
        built = outline(model)
        axis = Axis(2, 0, cast(Any, object()))  # a group that no collective uses
        shard_over_tensor_ranks(built, axis)
        shard_experts(built, Mesh(tensor=axis))
        found = {
            matrix.name: None if matrix.shard_spec is None else matrix.shard_spec.dim
            for prefix, module in built.named_modules()
            for name, parameter in module.named_parameters(recurse=False)
            for matrix in matrices_in(module, prefix, name, parameter)
        }
        for parameter in model_parameters(model):
            assert found[parameter.name] == parameter.tensor_dim, parameter.name


def test_the_first_active_group_that_matches_decides() -> None:
    head = {"match": "lm_head.*", "lr": 1e-3, "weight_decay": 0.0}
    spec = run_of(LLAMA, head, {"match": ["*.2.*", "lm_*"], "lr": 1e-4}, lr=1e-3, weight_decay=0.1)
    found = settings(spec)
    assert found["lm_head.weight"] == Settings(1.0, 0.0)
    assert found["model.layers.2.self_attn.q_proj.weight"] == Settings(0.1, 0.1)
    assert found["model.layers.2.input_layernorm.weight"] == Settings(0.1, 0.0), "norms do not decay"
    assert {name.split(".")[2] for name in found if name != "lm_head.weight"} == {"2"}, "the others are frozen"


def test_the_learning_rate_decays_from_the_head_to_the_embeddings_as_in_beit() -> None:
    found = settings(run_of(LLAMA, layer_decay=0.5))
    factors = {
        name: found[name].lr_factor for name in ("lm_head.weight", "model.norm.weight", "model.embed_tokens.weight")
    }
    assert factors == {"lm_head.weight": 1.0, "model.norm.weight": 1.0, "model.embed_tokens.weight": 0.5**4}
    blocks = [found[f"model.layers.{block}.mlp.up_proj.weight"].lr_factor for block in range(3)]
    assert blocks == [0.125, 0.25, 0.5]


def test_embeddings_decay_by_their_key() -> None:
    for decays, decay in ((True, 0.1), (False, 0.0)):
        found = settings(run_of(MODELS["tied"], {"match": "*"}, decay_embeddings=decays, weight_decay=0.1))
        assert found["model.embed_tokens.weight"].weight_decay == decay
        assert found["model.layers.0.mlp.up_proj.weight"].weight_decay == 0.1


def spans(stages: tuple[Stage, ...]) -> list[tuple[int, int, int]]:
    return [(stage.first_step, stage.last_step, len(stage.phases)) for stage in stages]


def test_stages_begin_where_the_trained_set_changes_and_phases_where_a_setting_does() -> None:
    head, first = {"match": "lm_head.*"}, {"match": "*.0.*"}
    stages = training_stages(
        run_of(LLAMA, head | {"end_step": 4}, head | {"lr": 1e-5}, first | {"start_step": 3, "end_step": 7})
    )
    assert spans(stages) == [(1, 2, 1), (3, 7, 2), (8, 10, 1)]
    assert stages[1].since["lm_head.weight"] == 1, "it goes on"
    assert stages[1].since["model.layers.0.self_attn.q_proj.weight"] == 3
    again = training_stages(run_of(LLAMA, head, first | {"end_step": 2}, first | {"start_step": 5}))
    assert again[2].since["model.layers.0.mlp.up_proj.weight"] == 5, "a parameter that comes back starts anew"


@pytest.mark.parametrize(
    ("model", "groups", "message"),
    [
        (LLAMA, [{"match": "layers.0.*"}], "matches no parameter of the model. Did you mean *.layers.0.*?"),
        (LLAMA, [{"match": "model.layers.0.mlp.upproj.weight"}], "Did you mean model.layers.*.mlp.up_proj.weight"),
        (LLAMA, [{"match": "vision"}], "Names are those of Hugging Face, such as lm_head.weight."),
        (LLAMA, [{"match": "*.0.*", "start_step": 4}], "no parameter trains in steps 1 to 3."),
        (LLAMA, [{"match": "*.0.*", "end_step": 4}], "no parameter trains in steps 5 to 10."),
        (LLAMA, [{"match": "*"}, {"match": "lm_head.*"}], "has no effect: an earlier group matches the same"),
        (LLAMA, [{"match": "*norm*", "weight_decay": 0.1}], "has no matrix that weight decay applies to"),
        (MIXTURE, [{"match": "*.experts.0.*"}], "do not train alike at model.layers.1.mlp.experts.1.gate_proj.weight"),
    ],
)
def test_what_does_not_fit_the_model_is_an_error(model: ModelSpec, groups: list[dict[str, Any]], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        make_plan(run_of(model, *groups))
    assert message in str(caught.value)
    assert "training.trainable" in str(caught.value)


@pytest.mark.parametrize(
    ("group", "message"),
    [
        ("{match: '*', start_step: 3, end_step: 2}", "trainable.0.end_step = 2: must not be below start_step = 3."),
        ("{match: '*', start_step: 5000}", "trainable.0.start_step = 5000: must not exceed the"),
        ("{match: '*', end_step: 5000}", "trainable.0.end_step = 5000: must not exceed the"),
        ("{match: []}", "trainable.0.match"),
        ("{match: '*', lr: 0}", "trainable.0.lr = 0: must be above 0."),
    ],
)
def test_steps_outside_of_the_run_are_errors_at_their_line(group: str, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        load(SPEC.replace("training:\n", f"training:\n  trainable:\n    - {group}\n"))
    assert message in str(caught.value)
    assert re.search(r":\d+ training\.trainable", str(caught.value))
