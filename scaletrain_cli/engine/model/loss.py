"""The language-model head and its loss: over all logits at once, in chunks, or by Liger Kernel.

``token_loss`` turns tokens into a summed loss and can be replaced; ``parallel.tensor`` has one for a sharded
vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function

from scaletrain_cli.errors import InfeasibleError
from scaletrain_cli.extras import install_command
from scaletrain_cli.plan.memory.activations import LOSS_CHUNK_TOKENS
from scaletrain_cli.reasons import Reason

NOT_COUNTED = -100  # torch's ignore_index

# hidden [tokens, size], weight [vocab, size], labels [tokens], label smoothing -> summed loss in nats, fp32
TokenLoss = Callable[[Tensor, Tensor, Tensor, float], Tensor]


class LanguageModelHead(nn.Module):
    """Logits and their loss in one module, so that ZeRO-3 gathers the weight here and logits are freed early."""

    def __init__(self, hidden_size: int, vocab_size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab_size, hidden_size))
        self.token_loss: TokenLoss = token_loss
        self.label_smoothing = 0.0
        self.tokens_at_once: int | None = None  # None: all of them
        self.extended: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] | None = None  # of an adapter

    def forward(self, hidden: Tensor, labels: Tensor, divisor: Tensor | None = None) -> Tensor:
        """Return summed cross-entropy in nats over ``divisor``, or its mean over the labels that count.

        hidden [batch, length, size], labels [batch, length].
        """
        weight: Tensor = self.weight
        if self.extended is not None:
            hidden, weight = self.extended(hidden, weight)
        hidden, labels = hidden.flatten(0, 1), labels.flatten()
        if self.tokens_at_once is None:
            total = self.token_loss(hidden, weight, labels, self.label_smoothing)
        else:
            total = _Chunked.apply(  # type: ignore[no-untyped-call]
                hidden,
                weight,
                labels,
                self.label_smoothing,
                self.token_loss,
                self.tokens_at_once,
                torch.is_grad_enabled(),
            )
        return total / (divisor if divisor is not None else (labels != NOT_COUNTED).sum().clamp(min=1))


def choose_cross_entropy(head: LanguageModelHead, kind: str, label_smoothing: float, device: torch.device) -> None:
    """Set the loss of a head: ``kind`` is whole, chunked or liger. Call it after the head is sharded.

    Raises InfeasibleError if Liger's kernel cannot run.
    """
    head.label_smoothing = label_smoothing
    if kind == "chunked":
        head.tokens_at_once = LOSS_CHUNK_TOKENS
    if kind == "liger":
        if head.token_loss is not token_loss:
            raise InfeasibleError(Reason("engine.liger-needs-whole-vocabulary"))
        head.token_loss = liger_token_loss(device)


def token_loss(hidden: Tensor, weight: Tensor, labels: Tensor, label_smoothing: float = 0.0) -> Tensor:
    """Return the summed cross-entropy of tokens: hidden [tokens, size], weight [vocab, size], labels [tokens]."""
    logits = F.linear(hidden, weight).float()
    return F.cross_entropy(logits, labels, ignore_index=NOT_COUNTED, reduction="sum", label_smoothing=label_smoothing)


def liger_token_loss(device: torch.device) -> TokenLoss:
    """Return Liger Kernel's fused head and loss (arXiv:2410.10989), which also works in chunks, in Triton.

    It synchronizes with the device once per call. Raises InfeasibleError without CUDA or without the library.
    """
    if device.type != "cuda":
        raise InfeasibleError(Reason("engine.liger-needs-cuda", {"device": device.type}))
    try:
        from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss
    except ImportError as error:
        params = {"error": str(error), "command": install_command("liger")}
        raise InfeasibleError(Reason("engine.liger-missing", params)) from error

    def loss(hidden: Tensor, weight: Tensor, labels: Tensor, label_smoothing: float) -> Tensor:
        fused = LigerFusedLinearCrossEntropyLoss(
            ignore_index=NOT_COUNTED, label_smoothing=label_smoothing, reduction="sum", accum_dtype=torch.float32
        )
        return fused(weight, hidden, labels)  # type: ignore[no-any-return]

    return loss


class _Chunked(Function):
    """Computes gradients with the loss, chunk by chunk, and scales them in the backward pass: no logits are recomputed.

    The gradient of the weight is summed in fp32. Gradients of fp16 logits lose values below 6e-8, as with a loss scale
    of 1.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        label_smoothing: float,
        loss: TokenLoss,
        tokens_at_once: int,
        training: bool,
    ) -> Tensor:
        total = torch.zeros((), device=hidden.device)
        weight = weight.detach().requires_grad_(training)
        if training:
            of_hidden = torch.empty_like(hidden)
        of_weight: Tensor | None = None
        for start in range(0, len(labels), tokens_at_once):
            chunk = slice(start, start + tokens_at_once)
            with torch.set_grad_enabled(training):
                some = hidden[chunk].detach().requires_grad_(training)
                summed = loss(some, weight, labels[chunk], label_smoothing)
            if training:
                of_hidden[chunk], of_chunk = torch.autograd.grad(summed, (some, weight))
                # The first chunk becomes the sum: at 128,000 x 4,096 elements each pass over it moves 2 GB.
                of_weight = of_chunk.float() if of_weight is None else of_weight.add_(of_chunk)
                del of_chunk
            total += summed.detach()
        if training:
            of_weight = torch.zeros_like(weight, dtype=torch.float32) if of_weight is None else of_weight
            ctx.gradients, ctx.dtype = (of_hidden, of_weight), weight.dtype  # not saved tensors, which may be offloaded
        return total

    @staticmethod
    def backward(ctx: Any, factor: Tensor) -> tuple[Tensor | None, ...]:
        of_hidden, of_weight = ctx.gradients
        del ctx.gradients  # scaled in place, so a second backward pass is not possible
        return of_hidden.mul_(factor), of_weight.mul_(factor).to(ctx.dtype), None, None, None, None, None
