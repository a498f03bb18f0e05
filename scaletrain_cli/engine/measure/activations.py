"""Bytes that the blocks of a model keep for their backward pass, seen through autograd's hooks. Knows no plan."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from scaletrain_cli.engine.model.causal_lm import CausalLM


class SavedActivations:
    """What one forward pass through the blocks has saved; ``bytes`` is None until there was one.

    Of each storage once, weights left out. A block that is to be computed again hands autograd its inputs before it
    hides the rest from the hooks out here (torch.utils.checkpoint, ``_NoopSaveInputs``), so those are what it counts
    for. Tensors that went to the host count as nothing on a GPU, and on a CPU as nothing else does: the hooks that take
    them there are nearer to the operations than these.
    """

    def __init__(self, model: CausalLM) -> None:
        self.bytes: int | None = None
        self._parameters = list(model.parameters())
        self._storages: dict[int, int] = {}

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Around the forward pass."""
        with saved_tensors_hooks(self._note, lambda kept: kept):
            yield
        self.bytes = sum(self._storages.values())

    def _note(self, tensor: Tensor) -> Tensor:
        address = tensor.untyped_storage().data_ptr()
        # ZeRO-3 gathers each weight for its own operations only, so where they are must be asked each time.
        if address not in self._storages and all(
            parameter.untyped_storage().data_ptr() != address for parameter in self._parameters
        ):
            self._storages[address] = tensor.untyped_storage().nbytes()
        return tensor


@contextmanager
def watching_activations(model: CausalLM) -> Iterator[SavedActivations]:
    """Within it the first forward pass through the model's blocks is counted."""
    saved, transform = SavedActivations(model), model.transform

    def watched(*arguments: Any) -> Tensor:
        del model.transform  # back to the method of its class
        with saved.counting():
            return transform(*arguments)

    model.transform = watched  # type: ignore[method-assign,assignment]
    try:
        yield saved
    finally:
        model.__dict__.pop("transform", None)
