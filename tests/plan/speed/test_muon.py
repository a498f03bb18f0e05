from dataclasses import replace

import pytest

from scaletrain_cli.plan import make_plan
from scaletrain_cli.plan.catalogue.hardware import find_accelerator
from scaletrain_cli.plan.catalogue.networks import cluster_link
from scaletrain_cli.plan.muon import (
    fused_widths,
    muon_seconds,
    muon_sent_bytes,
    muon_temporary_bytes,
    newton_schulz_flops,
    orthogonalized_shapes,
)
from scaletrain_cli.plan.parameters import model_parameters
from scaletrain_cli.plan.speed.kernels import rates
from scaletrain_cli.spec import ModelSpec
from scaletrain_cli.spec.training import MuonSpec
from tests.plan.specs import DATA_ALONE, spec_of

# Gradients take less memory in 16 bits, because DeepSpeed copies fp32 ones for their reduction.
MUON = {"training__optimizer": {"name": "muon"}, "training__grad_dtype": "bf16"}


def orthogonalized_elements(model: ModelSpec) -> int:
    shapes = orthogonalized_shapes(model, 0, model.num_hidden_layers)
    return sum(rows * columns * count for (rows, columns), count in shapes)


@pytest.mark.parametrize("preset", ["llama-7b", "gpt2", "mixtral-8x7b"])
def test_all_matrices_of_the_blocks_are_orthogonalized_and_nothing_else(preset: str) -> None:
    spec = spec_of(preset)
    names = {p.name for p in model_parameters(spec.transformer) if p.is_orthogonalized}
    assert not any("embed" in name or "wte" in name or "wpe" in name or "norm" in name for name in names)
    assert "lm_head.weight" not in names
    counted = sum(p.numel for p in model_parameters(spec.transformer) if p.name in names)
    assert orthogonalized_elements(spec.transformer) == counted


def test_a_fused_projection_is_three_matrices() -> None:
    model = spec_of("gpt2").transformer
    assert fused_widths(model, "transformer.h.0.attn.c_attn.weight") == (768, 768, 768)
    assert dict(orthogonalized_shapes(model, 0, 1)) == {(768, 768): 4, (3072, 768): 1, (768, 3072): 1}


def test_ranks_divide_the_work_until_one_matrix_is_left_for_each() -> None:
    spec = spec_of(**MUON, **DATA_ALONE, layout__zero_stage=1)
    device, layout = find_accelerator(spec.cluster), make_plan(spec).layout
    model, settings, rate = spec.transformer, MuonSpec(), rates(device, "bf16")
    link = cluster_link(spec.cluster, device)

    def seconds(ranks: int) -> float:
        return muon_seconds(model, settings, replace(layout, world_size=ranks, data_parallel=ranks), 0, 32, rate, link)

    flops = sum(newton_schulz_flops(*shape, 5) * count for shape, count in orthogonalized_shapes(model, 0, 32))
    assert flops / device.peak_flops("bf16") < seconds(1) < 2 * flops / device.peak_flops("bf16")
    assert seconds(8) == pytest.approx(seconds(1) / 8, rel=0.5)
    assert seconds(4096) >= 5 * newton_schulz_flops(11008, 4096, 1) / device.peak_flops("bf16")


def test_ranks_send_four_bytes_per_element_that_they_update() -> None:
    spec = spec_of(**MUON, **DATA_ALONE, layout__zero_stage=1)
    layout, model = make_plan(spec).layout, spec.transformer
    elements = orthogonalized_elements(model)
    assert muon_sent_bytes(model, MuonSpec(), layout, 0, 32) == 4 * elements // 8 * 7 // 8
    replicated = replace(layout, zero_stage=0)
    assert muon_sent_bytes(model, MuonSpec(), replicated, 0, 32) == 2 * elements * 7 // 8


def test_temporary_memory_does_not_grow_with_the_model() -> None:
    spec = spec_of(**MUON, **DATA_ALONE, layout__zero_stage=1)
    layout, model = make_plan(spec).layout, spec.transformer
    half, whole = (muon_temporary_bytes(model, MuonSpec(), layout, 0, blocks) for blocks in (16, 32))
    assert half == whole < 1e9


def test_a_plan_with_muon_needs_fewer_bytes_and_a_little_more_time() -> None:
    adamw, muon = (make_plan(spec_of(**optimizer, **DATA_ALONE, layout__zero_stage=1)) for optimizer in ({}, MUON))
    elements = orthogonalized_elements(spec_of().transformer)
    saved = adamw.memory.optimizer_states - muon.memory.optimizer_states
    assert saved == pytest.approx(4 * elements / 8, rel=1e-3)
    assert adamw.durability.checkpoint_bytes - muon.durability.checkpoint_bytes == 4 * elements
    assert 0 < muon.time.optimizer - adamw.time.optimizer < 0.5
    assert muon.time.step > adamw.time.step
