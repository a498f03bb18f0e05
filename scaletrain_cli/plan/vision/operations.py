"""What a vision network is to the planner: blocks of operations, each with what it computes, moves and keeps.

Everything counts one sample; ``elements`` are values of the training precision. Knows no network and no device.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Operation:
    """One forward operation and its two backward ones.

    A product is ``batches`` times ``rows`` x ``depth`` by ``depth`` x ``columns``; a convolution is one as implicit
    GEMM, with the pixels of its output as rows (cuDNN, arXiv:1410.0759).
    """

    parameters: int = 0
    rows: int = 0
    columns: int = 0
    depth: int = 0
    batches: int = 1
    convolution: bool = False
    taps: int = 1  # of a convolution's filter, among its depth
    has_input_gradient: bool = True  # images have none
    fused_attention: bool = False  # two products and their softmax in one kernel
    depthwise: bool = False  # no matrix units: each channel by itself
    pointwise: bool = False  # each element of the output needs the same element of the input alone
    kept: int = 0  # elements
    kept_bytes: int = 0  # of fixed types: statistics and indices
    kept_once_bytes: int = 0  # the same, per micro-batch and not per sample
    inputs: int = 0  # elements read once, and
    outputs: int = 0  # written once, forward
    moved_back: int = 0  # elements read and written by the backward operations
    copied: int = 0  # elements moved forward to turn images around for matrix units, and twice that backward
    kernels: int = 2  # launched forward and backward

    @property
    def macs(self) -> int:
        """Multiplications with addition, forward."""
        return self.batches * self.rows * self.columns * self.depth

    @property
    def moved(self) -> int:
        """Elements read and written forward."""
        return self.inputs + self.outputs

    @property
    def gradients(self) -> int:
        """Elements of the gradients that exist while its backward runs: of its output and its input."""
        return self.inputs + self.outputs


@dataclass(frozen=True)
class Block:
    """Operations that activation checkpointing repeats as one; ``count`` such blocks follow one another."""

    operations: tuple[Operation, ...]
    count: int = 1
    input: int = 0  # elements that a checkpointed block keeps; 0: it is never checkpointed

    @property
    def parameters(self) -> int:
        """Of one block."""
        return sum(operation.parameters for operation in self.operations)

    @property
    def macs(self) -> int:
        """Of one block and sample, forward."""
        return sum(operation.macs for operation in self.operations)


@dataclass(frozen=True, eq=False)  # compared by identity, which makes it a cheap key of a cache
class Network:
    """Blocks in the order of the forward pass, and what the loss needs."""

    blocks: tuple[Block, ...]
    features: int = 0  # elements per sample that contrastive learning gathers from all ranks; 0: a classifier
    classes: int = 0

    @property
    def parameters(self) -> int:
        """Every trainable parameter."""
        scale = 1 if self.features else 0  # CLIP learns the temperature of its logits
        return scale + sum(block.parameters * block.count for block in self.blocks)

    @property
    def macs(self) -> int:
        """Multiplications with addition of one forward pass and sample, attention unmasked, loss left out."""
        return sum(block.macs * block.count for block in self.blocks)
