"""Compute the bytes of hidden states and their gradients that a pipeline stage holds to exchange them with others.

These are beside the activations that autograd saves.

From DeepSpeed 0.19.8, ``pipe/engine.py``, and counts of live tensors before and after each of its instructions:

* One buffer receives activations and gradients (``_allocate_or_extend_buffers`` returns the same for both), for good.
* ``_exec_recv_activations`` copies what arrives, and ``_exec_forward_pass`` that copy, which is the input of the first
  block. Both exist until the gradient is sent (``_exec_send_grads``).
* ``_exec_forward_pass`` keeps the output until its backward pass has ended. On the last stage it stays until another
  micro-batch replaces it, with the graph behind it, which holds the received copy and its gradient; of its two buffers
  (``num_pipe_buffers``) one is that of another micro-batch.
* Tensor ranks send and keep a share each (PartitionedTensor). A stage joins what arrives, into the input of the first
  block itself, and for the backward pass its output and the gradient of that.
"""

from __future__ import annotations

from typing import NamedTuple

from scaletrain_cli.plan.result import Layout
from scaletrain_cli.plan.stages import Stage


class PipelineBuffers(NamedTuple):
    """Bytes while a micro-batch runs forward or through the loss, while blocks run backward, and in the update."""

    forward: int
    backward: int
    update: int


def pipeline_buffers(layout: Layout, stage: Stage, payload: int, in_flight: int) -> PipelineBuffers:
    """Return the bytes of a stage with ``in_flight`` micro-batches; ``payload``: hidden states of one, in bytes."""
    if layout.pipeline_parallel == 1:
        return PipelineBuffers(0, 0, 0)
    ranks = layout.tensor_parallel
    share = payload // ranks
    received = 0 if stage.first or ranks > 1 else in_flight * payload
    if stage.last:
        several = layout.gradient_accumulation_steps > 1
        left = 3 * payload  # output, input and its gradient of a micro-batch that has run backward
        forward = share + received + (left if several else 0)
        return PipelineBuffers(forward, forward + payload, share + left * (2 if several else 1))
    forward = share + received + in_flight * share
    return PipelineBuffers(forward, forward + (2 * payload if ranks > 1 else 0), share)
