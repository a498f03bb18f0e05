import itertools

import pytest

from scaletrain_cli.plan.architecture import architecture
from scaletrain_cli.plan.memory.parameter_groups import Group, stage_groups
from scaletrain_cli.plan.stages import engine_stages
from scaletrain_cli.plan.trained_stages import TrainedStage
from scaletrain_cli.spec import ModelSpec
from tests.model_sizes import model_sizes
from tests.plan.specs import model_of, spec_of

DIMENSIONS = model_sizes(hidden=16, layers=5, heads=4, kv_heads=2, head_dim=6, intermediate=40, vocab=64)
GPT = DIMENSIONS | {"num_key_value_heads": 4, "head_dim": 4, "max_position_embeddings": 32, "seq_len": 32}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "shared_expert_intermediate_size": 8, "first_k_dense_replace": 2}
GATED = {"shared_expert_gate": True, "decoder_sparse_step": 2, "mlp_only_layers": (3,), "router_bias": True}
LATENT = {"num_key_value_heads": 4, "kv_lora_rank": 12, "q_lora_rank": 20, "qk_rope_head_dim": 2, "v_head_dim": 5}
MODELS = {
    "llama": model_of("llama-7b", **DIMENSIONS),
    "tied qwen": model_of("llama-7b", **DIMENSIONS, tie_word_embeddings=True, qkv_bias=True, qk_norm=True),
    "gpt": model_of("gpt2", **GPT),
    "untied gpt": model_of("gpt2", **GPT, tie_word_embeddings=False),
    "mixture": model_of("mixtral-8x7b", **DIMENSIONS, **EXPERTS),
    "gpt-oss": model_of("gpt-oss-20b", **DIMENSIONS, num_experts=4, num_experts_per_tok=2),
    "gated": model_of("mixtral-8x7b", **DIMENSIONS, **EXPERTS, **GATED),
    "latent": model_of("mixtral-8x7b", **{**DIMENSIONS, **EXPERTS, **LATENT}),
    "latent, plain queries": model_of("llama-7b", **{**DIMENSIONS, **LATENT, "q_lora_rank": 0}),
}


def sizes(group: Group) -> list[int]:
    """Return the number of elements of each tensor, in order."""
    return [size for part, times in group.runs for _ in range(times) for size in part]


@pytest.mark.parametrize("name", MODELS)
def test_every_tensor_of_the_engine_is_counted_in_its_place(name: str) -> None:
    for library in ("torch", "deepspeed"):
        pytest.importorskip(library)
    from scaletrain_cli.engine.model import outline
    from scaletrain_cli.engine.parallel.expert import shard_experts
    from scaletrain_cli.engine.parallel.mesh import Axis, Mesh
    from scaletrain_cli.engine.parallel.pipeline import keep_stage
    from scaletrain_cli.engine.parallel.tensor import shard_over_tensor_ranks

    model = MODELS[name]
    for tensor, stages in itertools.product((1, 2), (1, 2, 3)):
        spec = spec_of("llama-7b").model_copy(update={"model": model})
        assert len(engine_stages(spec.transformer, stages)) == stages
        for stage in engine_stages(spec.transformer, stages):
            built = outline(model)
            keep_stage(built, Axis(stages, stage.position))
            shard_over_tensor_ranks(built, Axis(tensor))
            shard_experts(built, Mesh(tensor=Axis(tensor)))
            kinds = model.block_runs(stage.start, stage.blocks)
            assert sum(blocks for experts, blocks in kinds if not experts) == stage.dense
            matrices, vectors = stage_groups(model, tensor, 1, stage, TrainedStage(1, 1)).trained
            found = [(p.numel(), p.ndim > 1 and not name.endswith("bias")) for name, p in built.named_parameters()]
            assert sizes(matrices.group) == [elements for elements, decays in found if decays]
            assert sizes(vectors.group) == [elements for elements, decays in found if not decays]


@pytest.mark.parametrize(
    "model", [*MODELS.values(), model_of("deepseek-v2-lite"), model_of("gpt2", gated_mlp=True, embedding_norm=True)]
)
@pytest.mark.parametrize(("tensor", "expert"), [(1, 1), (2, 1), (2, 2)])
def test_the_tensors_add_up_to_the_architecture(model: ModelSpec, tensor: int, expert: int) -> None:
    expert = expert if model.num_experts else 1
    whole = architecture(model, tensor, expert)
    (stage,) = engine_stages(model, 1)
    groups = stage_groups(model, tensor, expert, stage, TrainedStage(1, 1)).trained
    assert sum(each.group.elements for each in groups) == whole.parameters
    of_experts = sum(each.group.elements for each in groups if each.experts)
    assert of_experts == (model.moe_layers * whole.block.routed if expert > 1 else 0)


def test_a_group_finds_the_tensor_of_an_element_and_the_pieces_of_a_rank() -> None:
    group = Group((((7,), 1), ((2, 3), 2), ((4,), 1)))
    assert [group.tensor_at(element) for element in (0, 6, 7, 8, 9, 12, 16, 17)] == [
        (0, 7), (0, 7), (7, 9), (7, 9), (9, 12), (12, 14), (14, 17), (17, 21),
    ]  # fmt: skip
    assert group.pieces(2) == 4 + 2 * (1 + 2) + 2
