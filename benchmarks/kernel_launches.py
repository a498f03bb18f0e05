"""Count the kernels that one Llama block launches without compilation: dispatched operations that are no views.

A GPU runs one kernel for most operations, and three for the backward pass of FlashAttention. With ``--compiled`` also
the kernels of the block compiled by inductor, here for a CPU, which fuses the same operations.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from scaletrain_cli.engine.model import outline
from scaletrain_cli.engine.model.attention import TokenContext
from scaletrain_cli.engine.model.base import CausalLM
from scaletrain_cli.engine.model.norm import RMSNorm
from scaletrain_cli.engine.model.rope import tables_of_layers
from scaletrain_cli.spec import parse_spec

_SPEC = """
schema: scaletrain/v1
name: launches
model: {family: llama, hidden_size: 64, num_hidden_layers: 1, num_attention_heads: 4, num_key_value_heads: 2,
        intermediate_size: 96, vocab_size: 64, seq_len: 32}
data: {source: python-stdlib, tokenizer: {vocab_size: 64}}
training: {global_batch_size: 1, micro_batch_size: 1, steps: 3}
cluster: {gpu: cpu, gpus_per_node: 1}
"""
_ALLOCATIONS = {"empty", "empty_like", "new_empty", "empty_strided", "detach", "_unsafe_view", "lift_fresh", "alias"}


class Launches(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts operations that launch a kernel, by name."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name = func._schema.name.removeprefix("aten::")
        if not func.is_view and name not in _ALLOCATIONS:
            self.found[name] += 1
        return func(*args, **(kwargs or {}))


def launches(overrides: list[str], dtype: torch.dtype = torch.bfloat16) -> tuple[Counter[str], Counter[str]]:
    """Return the operations of a block's forward and of its backward pass, without the gradients' accumulation."""
    forward, backward = Launches(), Launches()
    block, arguments = _block(overrides, dtype)
    with forward:
        found = block(*arguments)
    inputs = [arguments[0], *block.parameters()]
    with backward:
        torch.autograd.grad(found, inputs, torch.ones_like(found))
    backward.found["ones_like"] = 0
    return +forward.found, +backward.found


def saved_by_fused_norms(overrides: list[str], dtype: torch.dtype = torch.bfloat16) -> int:
    """Return how many fewer operations a block launches on a GPU, where a norm is one operation in each pass."""
    block, _ = _block(overrides, dtype)
    norms = [each for each in block.modules() if isinstance(each, RMSNorm) and not each.zero_centered]
    if not norms:
        return 0
    forward, backward = Launches(), Launches()
    x = torch.randn(1, 4, len(norms[0].weight), dtype=dtype, requires_grad=True)
    with forward:
        found = norms[0](x)
    with backward:
        torch.autograd.grad(found, [x, norms[0].weight], found)
    return len(norms) * (forward.found.total() + backward.found.total() - 2)


def compiled_kernels(overrides: list[str], dtype: torch.dtype = torch.bfloat16) -> int:
    """Return the number of kernels that inductor generates for both passes, beside products and attention."""
    from torch._inductor import metrics

    block, arguments = _block(overrides, dtype)
    metrics.reset()
    torch.compile(block)(*arguments).sum().backward()  # type: ignore[no-untyped-call]
    return int(metrics.generated_kernel_count)


def _block(overrides: list[str], dtype: torch.dtype) -> tuple[Any, tuple[Any, ...]]:
    spec = parse_spec(_SPEC, file="launches.yaml", base_dir=Path(), overrides=overrides)
    model = outline(spec.transformer).to_empty(device="cpu").to(dtype)
    assert isinstance(model, CausalLM)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    length = spec.transformer.seq_len
    hidden = torch.randn(1, length, spec.transformer.hidden_size, dtype=dtype, requires_grad=True)
    context = TokenContext(torch.arange(length), torch.arange(1))
    (block,) = model.blocks.values()
    return block, (hidden, tables_of_layers(spec.transformer, context.positions, None), context)


# By the name of the row: overrides of the model.
MODELS = {
    "Llama": [],
    "Qwen3 (norms of heads)": ["model.qk_norm=true"],
    "Gemma 2": ["model.norm_position=pre_and_post", "model.zero_centered_norm=true"],
    "partial rotary embedding": ["model.partial_rotary_factor=0.5"],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--compiled", action="store_true", help="also compile the blocks, which takes a minute each")
    parser.add_argument("--names", action="store_true", help="print the operations")
    arguments = parser.parse_args()
    print(f"torch {torch.__version__}\n\n| block, bf16 | forward | backward | both | on a GPU |\n|-|-:|-:|-:|-:|")
    for name, overrides in MODELS.items():
        forward, backward = launches(overrides)
        both = forward.total() + backward.total()
        on_gpu = both - saved_by_fused_norms(overrides)
        print(f"| {name} | {forward.total()} | {backward.total()} | {both} | {on_gpu} |")
        if arguments.names:
            print(forward.most_common(), backward.most_common(), sep="\n")
        if arguments.compiled:
            print(f"| {name}, compiled, beside products and attention | | | {compiled_kernels(overrides)} | |")


if __name__ == "__main__":
    main()
