import warnings
from typing import Any, NamedTuple

import pytest

from scaletrain_cli.plan.axes import resolve_axes
from scaletrain_cli.plan.catalogue.hardware import find_accelerator
from scaletrain_cli.plan.memory.engine_memory import kept_activation_bytes
from scaletrain_cli.plan.memory.engine_states import engine_states
from scaletrain_cli.plan.memory.states import ModelStates
from scaletrain_cli.plan.result import Layout
from scaletrain_cli.plan.search.layouts import build_layout
from scaletrain_cli.plan.stages import engine_stages
from scaletrain_cli.plan.trained_parameters import stage_at, trains_everything
from scaletrain_cli.plan.trained_stages import stage_of_step
from scaletrain_cli.spec import RunSpec
from tests.model_sizes import model_sizes
from tests.plan.specs import spec_of

RANKS = 4
# Odd sizes, so that every group is padded and every parameter rounded up.
SIZES: dict[str, Any] = model_sizes(
    hidden=36, layers=3, heads=4, kv_heads=2, head_dim=10, intermediate=50, vocab=290, seq_len=8, positions=8
)
EXPERTS = {
    **{"hidden_size": 40, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "router_bias": True},
    **{"shared_expert_intermediate_size": 24, "shared_expert_gate": True, "mlp_only_layers": [1]},
    **{"bias": True, "attention_sinks": True},
}
LATENT = {"num_key_value_heads": 4, "kv_lora_rank": 15, "q_lora_rank": 21, "qk_rope_head_dim": 6, "v_head_dim": 9}
TIED = {"num_key_value_heads": 4, "tie_word_embeddings": True}


Held = tuple[ModelStates, int]  # on the device, and bytes on the host


class Row(NamedTuple):
    """One layout of RANKS ranks: degrees, ZeRO stage and types; the others are replicas."""

    zero: int
    tensor: int = 1
    pipeline: int = 1
    sequence: int = 1
    expert: int = 1
    types: str = "fp32 fp32"
    preset: str = "llama-7b"
    optimizer: str = "adamw"
    averaging: str = "none"
    offload: str = "none"
    trainable: tuple[str, ...] = ()  # patterns, each a group with a learning rate of its own
    layer_decay: float = 1.0
    adapter: str = ""  # its targets
    step: int = 1
    latent: bool = False  # attention

    @property
    def spec(self) -> RunSpec:
        """Two micro-batches a step."""
        precision, grad_dtype = self.types.split()
        data = RANKS // (self.tensor * self.pipeline * self.sequence)
        sizes = SIZES | (EXPERTS if self.expert > 1 else {}) | (TIED if self.preset == "gpt2" else {})
        sizes |= LATENT if self.latent else {}
        return spec_of(
            self.preset,
            **{f"model__{key}": value for key, value in sizes.items()},
            training__precision=precision,
            training__grad_dtype=grad_dtype,
            training__global_batch_size=2 * data,
            training__micro_batch_size=1,
            training__optimizer={"name": self.optimizer, "layer_decay": self.layer_decay},
            training__trainable=[
                {"match": pattern.split("@")[0], "lr": 1e-4 * number, "start_step": int((pattern + "@1").split("@")[1])}
                for number, pattern in enumerate(self.trainable, start=1)
            ],
            model__adapter={"name": "lora", "rank": 8, "targets": self.adapter.split()} if self.adapter else None,
            training__averaging={"name": self.averaging},
            training__loss_scale={"initial": 16},
            layout__tensor_parallel=self.tensor,
            layout__pipeline_parallel=self.pipeline,
            layout__sequence_parallel=self.sequence,
            layout__expert_parallel=self.expert,
            layout__zero_stage=self.zero,
            layout__offload=self.offload,
            cluster__gpus_per_node=RANKS,
            cluster__gpu="cpu",
        )

    @property
    def layout(self) -> Layout:
        spec = self.spec
        return build_layout(spec, resolve_axes(spec), self.zero, "none", 1)


def held(row: tuple[Any, ...]) -> tuple[Held, Held, tuple[int, int]]:
    """One rank's states and what it has on the host: counted from its tensors, and planned. Activations: both."""
    import torch

    from scaletrain_cli.engine.compose import compose
    from scaletrain_cli.engine.data.batches import MicroBatch
    from scaletrain_cli.engine.metrics.memory_measurement import watching_activations, watching_model_states
    from scaletrain_cli.engine.parallel.mesh import build_mesh
    from scaletrain_cli.engine.step import build_stepper

    warnings.simplefilter("ignore")
    spec, layout, cpu = Row(*row).spec, Row(*row).layout, torch.device("cpu")
    mesh = build_mesh(layout)
    composed = compose(
        spec, layout, mesh, cpu, trained=None if trains_everything(spec) else stage_at(spec, Row(*row).step)
    )
    steps = build_stepper(composed, mesh, cpu, spec.training)
    length = spec.transformer.seq_len // layout.sequence_parallel
    tokens = torch.zeros(1, length, dtype=torch.int64)
    batch = MicroBatch(tokens, tokens, torch.arange(length), torch.arange(1), None)
    for _ in range(2):  # the optimizer has its moments after the first step
        with watching_model_states(composed.engine) as watched, watching_activations(composed.model) as saved:
            steps.train([batch, batch])
    counted = ModelStates(watched.bytes.parameters, watched.bytes.gradients, watched.bytes.optimizer_states)
    stage = engine_stages(spec.transformer, layout.pipeline_parallel)[mesh.pipeline.rank]
    planned = engine_states(spec, layout, stage, mesh.replicas.rank, stage_of_step(spec, Row(*row).step))
    composed.engine.destroy()
    activations = kept_activation_bytes(spec, layout, find_accelerator(spec.cluster), stage.position, Row(*row).step)
    return (counted, watched.bytes.host), planned, (saved.bytes, activations)


def held_of_each(rows: list[tuple[Any, ...]]) -> list[tuple[Held, Held, tuple[int, int]]]:
    """The same for several rows, one after the other in the same processes."""
    return [held(row) for row in rows]


BLOCK, ATTENTION = "model.layers.1.*", "*.self_attn.*"
# Types and groups, offload, frozen weights, several learning rates, adapters: the parity tests hold the plain layouts
# in fp32 to their plans. By the axis that they have in common, because DeepSpeed keeps its process groups as long as
# a process lives.
ROWS = {
    "tensor": [Row(0, tensor=2, trainable=(BLOCK,)), Row(1, tensor=2, types="fp16 fp32")],
    "data": [
        Row(1, trainable=("model.embed_tokens*", "*norm*", "lm_head*"), types="bf16 fp32"),
        Row(1, optimizer="muon", types="bf16 fp32"),
        Row(1, types="bf16 fp32", offload="optimizer"),
        Row(3, types="bf16 bf16", offload="optimizer+params"),
    ],
    "adapters": [Row(0, adapter="all-linear"), Row(2, adapter="q_proj down_proj embed_tokens lm_head")],
    "adapters and tensor": [
        Row(1, tensor=2, adapter="all-linear", types="bf16 fp32"),
        Row(2, tensor=2, sequence=2, latent=True, trainable=(BLOCK, "*.kv_a_layernorm*")),
    ],
    "pipeline": [
        Row(1, pipeline=2, sequence=2, types="bf16 fp32", preset="gpt2"),
        Row(1, pipeline=2, sequence=2, trainable=("lm_head*",), types="bf16 fp32"),
    ],
    "experts": [
        Row(2, expert=2, types="bf16 fp32"),
        Row(2, expert=2, trainable=("*experts*", "*gate.weight@5"), step=5),
    ],
}
MORE_ROWS = {
    "tensor": [Row(2, tensor=2, types="bf16 bf16"), Row(2, tensor=2, trainable=(BLOCK, ATTENTION), types="bf16 bf16")],
    "data": [
        Row(3, trainable=(BLOCK, "*norm*", "lm_head*@7"), step=7, types="bf16 fp32"),
        Row(2, layer_decay=0.8),
        Row(0, optimizer="muon"),
        Row(2, optimizer="muon", types="bf16 bf16"),
        Row(3, optimizer="muon", offload="optimizer"),
        Row(2, offload="optimizer"),
        Row(2, types="bf16 fp32", offload="optimizer"),
    ],
    "sequence": [Row(2, sequence=2)],
    "adapters": [
        Row(1, adapter="all-linear", types="bf16 fp32"),
        Row(1, adapter="q_proj v_proj", types="bf16 bf16", trainable=("*norm*", "lm_head*@3"), step=3),
        Row(2, adapter="all-linear", types="bf16 bf16"),
        Row(3, adapter="all-linear", types="bf16 fp32"),
        Row(3, adapter="o_proj"),
    ],
    "adapters and tensor": [
        Row(2, tensor=2, sequence=2, adapter="all-linear"),
        Row(1, tensor=2, adapter="all-linear", types="bf16 fp32", latent=True),
    ],
    "adapters and pipeline": [Row(1, pipeline=2, adapter="all-linear", types="bf16 fp32")],
    "adapters and experts": [Row(2, expert=2, adapter="all-linear *.experts.*")],
    "experts": [Row(3, expert=2), Row(3, expert=2, trainable=(ATTENTION,)), Row(2, expert=2, optimizer="muon")],
}


@pytest.mark.parametrize(
    "rows",
    [pytest.param(rows, id=axis) for axis, rows in ROWS.items()]
    + [pytest.param(rows, id=f"more {axis}", marks=pytest.mark.long) for axis, rows in MORE_ROWS.items()],
)
def test_every_rank_holds_what_is_planned(rows: list[Row]) -> None:
    for library in ("torch", "deepspeed"):
        pytest.importorskip(library)
    from tests.engine.ranks import on_ranks

    for ranks in on_ranks(RANKS, held_of_each, [tuple(row) for row in rows]):
        for row, (counted, planned, (saved, activations)) in zip(rows, ranks, strict=True):
            assert counted == planned, row
            if row.expert == 1 and row.preset == "llama-7b":  # the plan has every expert equally busy
                assert saved == activations, row


def states(row: Row, replica: int | None = None) -> ModelStates:
    return engine_states(row.spec, row.layout, engine_stages(row.spec.transformer, 1)[0], replica)[0]


def test_a_plan_states_the_fullest_of_the_replicas() -> None:
    """In stage 2 gradients of the weights' own type are kept whole where a partition begins or ends within them."""
    each = [states(Row(2), replica).gradients for replica in range(RANKS)]
    assert len(set(each)) > 1
    assert states(Row(2)).gradients == max(each)


def test_an_average_of_the_weights_is_one_more_fp32_copy_of_what_a_rank_updates() -> None:
    for zero in range(4):
        plain, averaged = states(Row(zero)), states(Row(zero, averaging="ema"))
        assert averaged.optimizer_states - plain.optimizer_states == plain.optimizer_states // (2 if zero == 0 else 3)
        assert averaged[:2] == plain[:2]


def test_muon_has_half_the_moments_of_adamw_for_the_matrices_of_blocks() -> None:
    matrices = 3 * (36 * 40 + 2 * 36 * 20 + 40 * 36 + 3 * 36 * 50)
    for zero in (0, 1):
        saved = states(Row(zero)).optimizer_states - states(Row(zero, optimizer="muon")).optimizer_states
        assert saved == pytest.approx(4 * matrices / (RANKS if zero else 1), abs=4 * 12 * RANKS)  # padding


@pytest.mark.parametrize("zero", range(4))
def test_a_billion_blocks_are_counted_without_visiting_each(zero: int) -> None:
    model = {"model__num_hidden_layers": 10**9, "training__precision": "fp32", "training__grad_dtype": "fp32"}
    spec = spec_of("llama-7b", layout__zero_stage=zero, cluster__gpus_per_node=2, **model)
    layout = build_layout(spec, resolve_axes(spec), zero, "none", 1)
    held = engine_states(spec, layout, engine_stages(spec.transformer, 1)[0])[0]
    assert held.parameters > 10**9


@pytest.mark.parametrize(("optimizer", "moments"), [("sgd", 0), ("momentum", 4), ("lion", 4), ("adamw", 8)])
def test_other_optimizers_keep_their_own_moments_of_the_partition(optimizer: str, moments: int) -> None:
    partition = states(Row(1, optimizer="sgd")).optimizer_states // 4
    assert states(Row(1, optimizer=optimizer)).optimizer_states == partition * (4 + moments)


def test_moments_of_8_bits_have_scales_and_two_tables_and_small_tensors_have_none() -> None:
    spec = spec_of("gpt2", layout__zero_stage=0, training__precision="fp32", training__optimizer={"name": "adamw_8bit"})
    layout = build_layout(spec, resolve_axes(spec), 0, "none", 1)
    tensors = [50257 * 768, 1024 * 768, *12 * [768 * 2304, 768 * 768, 768 * 3072, 3072 * 768]]
    vectors = 12 * (4 * 768 + 2304 + 768 + 3072 + 768) + 2 * 768
    scaled = sum(2 * size + 8 * -(-size // 256) for size in tensors)
    states = engine_states(spec, layout, engine_stages(spec.transformer, 1)[0])[0]
    assert states.optimizer_states == scaled + 8 * vectors + 2048
