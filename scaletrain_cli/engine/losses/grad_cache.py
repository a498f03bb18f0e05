"""Gradient accumulation of contrastive losses by GradCache (arXiv:2101.06983, section 3.2).

A contrastive loss compares all samples of a step, so its gradient is not a mean over micro-batches. GradCache finds it
exactly with the activations of one micro-batch in memory: (1) run all micro-batches forward without gradient, and keep
their features and the state of the random generators before each; (2) compute the loss over all features and its
gradient for each of them; (3) run each micro-batch forward again from the same random state, and backward from the
scalar product of features and their gradients. It costs a second forward pass.

It is not exact for layers that mix the samples of a batch, as batch normalization does.
"""

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from scaletrain_cli.engine.losses.classification import full_precision

Batch = TypeVar("Batch")
# What a forward pass returns: features with a first dimension of samples, and scalars such as the logit scale.
Outputs = tuple[Tensor | None, ...]


def cached_backward(
    forward: Callable[[Batch], Outputs],
    batches: Sequence[Batch],
    loss: Callable[[Sequence[Outputs]], Tensor],
    backward: Callable[[Tensor], None],
    device: torch.device | None = None,
) -> Tensor:
    """Compute the gradients of ``loss`` over all micro-batches of a step; return the loss without gradient, a scalar.

    ``forward``: the model, in training mode. It must return as many outputs for each micro-batch, and the same ones for
    the same random state. ``loss``: from the outputs of all micro-batches in order, see ``joined``; may be collective.
    ``backward``: called once per micro-batch with a scalar whose gradients, summed over the micro-batches, are those
    of the loss. It must not divide by the number of micro-batches: DeepSpeed's engine needs
    ``backward(scalar, scale_wrt_gas=False)``, followed by ``step()``, which reduces or updates after the last one.
    ``device``: a CUDA device whose generator the forward pass uses beside that of the CPU.

    The generators end in the state that one forward pass over all micro-batches leaves. One micro-batch needs no cache.
    """
    if len(batches) == 1:
        value = loss([forward(batches[0])])
        backward(value)
        return value.detach()
    states: list[tuple[Tensor, Tensor | None]] = []
    leaves: list[Outputs] = []
    for batch in batches:
        states.append(_random_state(device))
        with torch.no_grad():
            outputs = forward(batch)
        # In fp32 at least: in 16 bits, small gradients would be lost before any scaling.
        copies = [None if tensor is None else full_precision(tensor.detach()).clone() for tensor in outputs]
        leaves.append(_like(outputs, [None if copied is None else copied.requires_grad_() for copied in copies]))
    with torch.enable_grad():
        value = loss(leaves)
    value.backward()  # type: ignore[no-untyped-call]
    after = _random_state(device)
    for batch, state, cached in zip(batches, states, leaves, strict=True):
        _set_random_state(state, device)
        # The scalar product of outputs and gradients, in fp32 or more. An output that the loss did not use is
        # multiplied by 0, so that each backward pass reaches the same parameters: ZeRO counts their gradients.
        total: Tensor | None = None
        for output, leaf in zip(forward(batch), cached, strict=True):
            if output is None or leaf is None or not output.requires_grad:
                continue
            gradient = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
            product = (full_precision(output) * gradient).sum()
            total = product if total is None else total + product
        if total is None:
            raise ValueError("no output of the forward pass has a gradient")
        backward(total)
    _set_random_state(after, device)
    return value.detach()


def joined(outputs: Sequence[Outputs], views: int = 1) -> Outputs:
    """Return the outputs of several micro-batches as those of one: features joined in order, and the first scalars.

    ``views``: each micro-batch has the features of this many views of its samples, one view after the other; and so has
    the result.
    """
    fields: list[Tensor | None] = []
    for tensors in zip(*outputs, strict=True):
        first = tensors[0]
        if first is None or first.dim() == 0:
            fields.append(first)
        else:
            parts = [tensor.unflatten(0, (views, -1)) for tensor in tensors if tensor is not None]
            fields.append(torch.cat(parts, 1).flatten(0, 1))
    return _like(outputs[0], fields)


def _like(outputs: Outputs, fields: list[Tensor | None]) -> Outputs:
    """Return a tuple of the same type, which may be a NamedTuple."""
    made: Outputs = outputs._make(fields) if hasattr(outputs, "_make") else tuple(fields)
    return made


def _random_state(device: torch.device | None) -> tuple[Tensor, Tensor | None]:
    on_gpu = torch.cuda.get_rng_state(device) if device is not None and device.type == "cuda" else None
    return torch.get_rng_state(), on_gpu


def _set_random_state(state: tuple[Tensor, Tensor | None], device: torch.device | None) -> None:
    host, on_gpu = state
    torch.set_rng_state(host)
    if on_gpu is not None and device is not None:
        torch.cuda.set_rng_state(on_gpu, device)
