"""Memory of attention with masks, and of attention without a fused kernel: the plan against the engine's tensors."""

import weakref
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from scaletrain_cli.engine.compose import wrap_blocks
from scaletrain_cli.engine.metrics.memory_measurement import watching_activations
from scaletrain_cli.engine.model.attention import TokenContext
from scaletrain_cli.plan.catalogue.hardware import find_accelerator
from scaletrain_cli.plan.memory.activations import token_activations
from scaletrain_cli.plan.memory.block_activations import BlockKernels
from scaletrain_cli.plan.memory.engine_memory import kept_activation_bytes
from scaletrain_cli.plan.planning import make_plan
from scaletrain_cli.spec.training import LayoutSpec
from tests.engine.fresh_model import build_model
from tests.model_sizes import model_sizes
from tests.plan.specs import model_of, spec_of

BATCH, LENGTH, LAYERS = 2, 256, 2
SIZES: dict[str, Any] = model_sizes(
    hidden=128, layers=1, heads=8, kv_heads=2, head_dim=16, intermediate=384, vocab=256, seq_len=512, positions=512
)
WINDOW = {"sliding_window": 64}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "none": ("llama-7b", {"layer_types": ["sliding_attention", "full_attention"], **WINDOW}),
    "sinks": ("llama-7b", {"attention_sinks": True}),
    "sinks and windows": ("llama-7b", {"attention_sinks": True, **WINDOW}),
    "both": ("llama-7b", {**WINDOW, "attention_sinks": True, "layer_types": ["sliding_attention", "full_attention"]}),
    "capped": ("gemma-2-2b", WINDOW),
    "two bases": (
        "llama-7b",
        {**WINDOW, "layer_types": ["sliding_attention", "full_attention"], "rope_local_base_freq": 50.0},
    ),
}


@pytest.mark.parametrize(
    ("kind", "packed", "mode"),
    [
        ("none", True, "none"),
        ("sinks", True, "none"),
        pytest.param("sinks", True, "full", marks=pytest.mark.long),
        ("sinks and windows", False, "selective"),
        pytest.param("both", True, "none", marks=pytest.mark.long),
        ("both", True, "selective"),
        ("capped", True, "none"),
        pytest.param("capped", False, "selective", marks=pytest.mark.long),
        ("two bases", False, "none"),
        pytest.param("two bases", True, "none", marks=pytest.mark.long),
        pytest.param("two bases", True, "selective", marks=pytest.mark.long),
        ("two bases", True, "full"),
    ],
)
def test_the_plan_counts_the_masks_and_rotary_tables_that_attention_saves(kind: str, packed: bool, mode: str) -> None:
    preset, changes = MODELS[kind]
    dims = {**SIZES, **changes, "seq_len": LENGTH, "num_hidden_layers": LAYERS, "max_position_embeddings": LENGTH}
    spec = spec_of(
        preset,
        **{f"model__{key}": value for key, value in dims.items()},
        data__packing="best_fit" if packed else "none",
        training__objective="sft",
        training__micro_batch_size=BATCH,
        training__global_batch_size=BATCH,
        layout__activation_checkpointing=mode,
        cluster__gpus_per_node=1,
        cluster__gpu="cpu",
    )
    model = build_model(spec.transformer, seed=0).to(torch.bfloat16)
    wrap_blocks(model, LayoutSpec(), mode, compiled=False)
    tokens = torch.zeros(BATCH, LENGTH, dtype=torch.int64)
    places = torch.arange(LENGTH)
    documents = (places // 100).expand(BATCH, LENGTH) if packed else None
    positions = (places % 100).repeat(BATCH, 1) if packed else places
    with watching_activations(model) as saved:
        model(tokens, tokens, TokenContext(positions, torch.arange(BATCH), documents)).backward()
    planned = kept_activation_bytes(spec, make_plan(spec).layout, find_accelerator(spec.cluster), 0)
    assert saved.bytes == pytest.approx(planned, abs=256)  # bounds of documents, and sinks, are not planned


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of the tensors that operations return, as long as they exist: their peak, and the largest."""

    def __init__(self, known: list[torch.Tensor]) -> None:
        super().__init__()
        self.now = self.peak = self.largest = 0
        self._sizes = {tensor.untyped_storage()._cdata: 0 for tensor in known}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage()._cdata not in self._sizes:
                storage = tensor.untyped_storage()
                self._sizes[storage._cdata] = storage.nbytes()
                self.now += storage.nbytes()
                self.peak, self.largest = max(self.peak, self.now), max(self.largest, storage.nbytes())
                weakref.finalize(storage, self._freed, storage._cdata)
        return result

    def _freed(self, key: int) -> None:
        self.now -= self._sizes.pop(key)


@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "changes",
    [{"preset": "gemma-2-2b"}, {"attention_dropout": 0.1}, {"preset": "gemma-2-2b", "attention_dropout": 0.1}],
)
def test_unfused_attention_needs_the_gradients_of_scores(changes: dict[str, Any], precision: torch.dtype) -> None:
    model = model_of(**{"preset": "llama-7b", **SIZES, **changes})
    block = build_model(model, seed=0).to(precision)
    hidden = torch.randn(1, 512, 128, dtype=precision).requires_grad_()
    context = block.with_masks(TokenContext(torch.arange(512), torch.arange(1)), hidden)
    with LiveBytes([*block.parameters(), hidden]) as live:
        out = block.transform(hidden, context)
        gradient, saved = torch.ones_like(out), live.now
        live.peak = 0
        out.backward(gradient)
    measured, planned = (live.peak - saved) / 512, token_activations(model, BlockKernels(precision.itemsize)).working
    assert measured <= planned <= 1.15 * measured
