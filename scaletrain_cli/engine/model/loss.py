"""The language-model head, its loss and log-probabilities: over all logits at once, in chunks, or by Liger Kernel.

``token_loss`` turns tokens into a summed loss, ``token_losses`` into the loss of each token. Both can be replaced;
``parallel.tensor`` has them for a sharded vocabulary.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function

from scaletrain_cli.engine.data.rows import NOT_COUNTED
from scaletrain_cli.errors import InfeasibleError
from scaletrain_cli.extras import install_command
from scaletrain_cli.plan.memory.activations import HEAD_MULTIPLE, LOSS_CHUNK_TOKENS
from scaletrain_cli.reasons import Reason

# hidden [tokens, size], weight [vocab, size], which may have more rows that do not count, labels [tokens], label
# smoothing -> summed loss in nats, fp32
TokenLoss = Callable[[Tensor, Tensor, Tensor, float], Tensor]
# the same, to the loss of each token [tokens], 0 where the label does not count
TokenLosses = Callable[[Tensor, Tensor, Tensor, float], Tensor]


class LanguageModelHead(nn.Module):
    """Logits and their loss in one module, so that ZeRO-3 gathers the weight here and logits are freed early."""

    def __init__(self, hidden_size: int, vocab_size: int, softcap: float | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab_size, hidden_size))
        self.softcap = softcap  # logits x become softcap * tanh(x / softcap)
        loss = partial(cross_entropy, softcap=softcap, vocabulary=vocab_size)
        self.token_loss: TokenLoss = loss
        self.token_losses: TokenLosses | None = partial(loss, reduction="none")  # None: the kernel has sums only
        self.multiple = 1  # of the rows in matrix products; see HEAD_MULTIPLE
        self.label_smoothing = 0.0
        self.tokens_at_once: int | None = None  # None: all of them
        self.kept_losses: list[Tensor] | None = None  # of the tokens, [tokens] each, in order; None: not kept
        self.extended: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] | None = None  # of an adapter

    def forward(
        self,
        hidden: Tensor,
        labels: Tensor | None = None,
        divisor: Tensor | None = None,
        weights: Tensor | None = None,
        *,
        by_row: bool = False,
    ) -> Tensor:
        """Return summed cross-entropy in nats over ``divisor``, or its mean over the labels that count.

        hidden [batch, length, size]; labels and ``weights``, factors of their losses, [batch, length]. ``by_row``:
        return instead the summed log-probabilities of the labels of each row, [batch], in fp32. Without labels: the
        logits of a whole vocabulary, [batch, length, vocabulary], in fp32.
        """
        weight: Tensor = self.weight
        if self.extended is not None:
            hidden, weight = self.extended(hidden, weight)
        if labels is None:
            return logits_of(hidden, weight, self.softcap)
        if added := -len(weight) % self.multiple:  # once, not in each chunk
            weight = F.pad(weight, (0, 0, 0, added))
        if by_row:
            assert self.token_losses is not None, "refused before the first step"
            tokens = (hidden.flatten(0, 1), weight, labels.flatten())
            if self.tokens_at_once is None:
                losses = self.token_losses(*tokens, 0.0)
            else:
                losses = _ChunkedTokens.apply(*tokens, self.token_losses, self.tokens_at_once)  # type: ignore[no-untyped-call]
            return -losses.view(labels.shape).sum(1)
        hidden, labels = hidden.flatten(0, 1), labels.flatten()
        weights = None if weights is None else weights.flatten()
        if self.tokens_at_once is None:
            total = self._summed(hidden, weight, labels, weights)
        else:
            total = _Chunked.apply(  # type: ignore[no-untyped-call]
                hidden, weight, labels, weights, self._summed, self.tokens_at_once, torch.is_grad_enabled()
            )
        if divisor is None:
            divisor = (labels != NOT_COUNTED).sum().clamp(min=1) if weights is None else weights.sum()
        return total / divisor

    def _summed(self, hidden: Tensor, weight: Tensor, labels: Tensor, weights: Tensor | None) -> Tensor:
        if weights is None and self.kept_losses is None:
            return self.token_loss(hidden, weight, labels, self.label_smoothing)
        assert self.token_losses is not None, "refused before the first step"
        losses = self.token_losses(hidden, weight, labels, self.label_smoothing)
        if weights is not None:
            losses = losses * weights
        if self.kept_losses is not None:
            self.kept_losses.append(losses.detach())
        return losses.sum()


def choose_cross_entropy(head: LanguageModelHead, kind: str, label_smoothing: float, device: torch.device) -> None:
    """Set the loss of a head: ``kind`` is whole, chunked or liger. Call it after the head is sharded.

    Raises InfeasibleError if Liger's kernel cannot run.
    """
    head.label_smoothing = label_smoothing
    # Liger's kernel would count the rows that are added.
    head.multiple = HEAD_MULTIPLE if device.type == "cuda" and kind != "liger" else 1
    if kind == "chunked":
        head.tokens_at_once = LOSS_CHUNK_TOKENS
    if kind == "liger":
        if getattr(head.token_loss, "func", None) is not cross_entropy:
            raise InfeasibleError(Reason("engine.liger-needs-whole-vocabulary"))
        head.token_loss, head.token_losses = liger_token_loss(device, head.softcap), None


def logits_of(hidden: Tensor, weight: Tensor, softcap: float | None = None, vocabulary: int | None = None) -> Tensor:
    """Return the logits [..., vocab] in fp32 of hidden states [..., size], within a cap if there is one.

    ``vocabulary``: the number of rows that count; None: all.
    """
    logits = F.linear(hidden, weight)[..., :vocabulary].float()
    return logits if softcap is None else torch.tanh(logits / softcap) * softcap


def cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    label_smoothing: float = 0.0,
    *,
    softcap: float | None = None,
    vocabulary: int | None = None,
    reduction: str = "sum",
) -> Tensor:
    """Return the summed cross-entropy of tokens: hidden [tokens, size], weight [vocab, size], labels [tokens].

    ``softcap`` and ``vocabulary`` as in ``logits_of``. ``reduction``: "none" for that of each token, [tokens].
    """
    logits = logits_of(hidden, weight, softcap, vocabulary)
    settings: Any = {"reduction": reduction, "label_smoothing": label_smoothing}
    return F.cross_entropy(logits, labels, ignore_index=NOT_COUNTED, **settings)


def liger_token_loss(device: torch.device, softcap: float | None = None) -> TokenLoss:
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
            ignore_index=NOT_COUNTED,
            label_smoothing=label_smoothing,
            reduction="sum",
            accum_dtype=torch.float32,
            softcap=softcap,
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
        weights: Tensor | None,
        loss: Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor],
        tokens_at_once: int,
        training: bool,
    ) -> Tensor:
        total = torch.zeros((), device=hidden.device)
        trains_head = training and ctx.needs_input_grad[1]
        weight = weight.detach().requires_grad_(trains_head)
        if training:
            of_hidden = torch.empty_like(hidden)
        of_weight: Tensor | None = None
        for start in range(0, len(labels), tokens_at_once):
            chunk = slice(start, start + tokens_at_once)
            with torch.set_grad_enabled(training):
                some = hidden[chunk].detach().requires_grad_(training)
                summed = loss(some, weight, labels[chunk], None if weights is None else weights[chunk])
            if training:
                of_hidden[chunk], *of_chunk = torch.autograd.grad(summed, (some, weight) if trains_head else (some,))
                if of_chunk:
                    # The first chunk becomes the sum: at 128,000 x 4,096 elements each pass over it moves 2 GB.
                    of_weight = of_chunk[0].float() if of_weight is None else of_weight.add_(of_chunk[0])
                del of_chunk
            total += summed.detach()
        if training:
            if of_weight is None and trains_head:
                of_weight = torch.zeros_like(weight, dtype=torch.float32)
            ctx.gradients, ctx.dtype = (of_hidden, of_weight), weight.dtype  # not saved tensors, which may be offloaded
        return total

    @staticmethod
    def backward(ctx: Any, factor: Tensor) -> tuple[Tensor | None, ...]:
        of_hidden, of_weight = ctx.gradients
        del ctx.gradients  # scaled in place, so a second backward pass is not possible
        of_weight = None if of_weight is None else of_weight.mul_(factor).to(ctx.dtype)
        return of_hidden.mul_(factor), of_weight, None, None, None, None, None


class _ChunkedTokens(Function):
    """Computes the loss of each token chunk by chunk, and again in the backward pass, where its gradient is known.

    The gradient of the weight is summed in fp32.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, losses: TokenLosses, tokens_at_once: int
    ) -> Tensor:
        ctx.save_for_backward(hidden, labels)
        ctx.weight = weight  # not a saved tensor: ZeRO-3 gathers the parameter again before the backward pass
        ctx.losses, ctx.tokens_at_once = losses, tokens_at_once
        chunks = (slice(start, start + tokens_at_once) for start in range(0, len(labels), tokens_at_once))
        return torch.cat([losses(hidden[chunk], weight, labels[chunk], 0.0) for chunk in chunks])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        hidden, labels = ctx.saved_tensors
        trains_head = ctx.needs_input_grad[1]
        weight = ctx.weight.detach().requires_grad_(trains_head)
        of_hidden = torch.empty_like(hidden)
        of_weight = torch.zeros_like(weight, dtype=torch.float32) if trains_head else None
        for start in range(0, len(labels), ctx.tokens_at_once):
            chunk = slice(start, start + ctx.tokens_at_once)
            with torch.enable_grad():
                some = hidden[chunk].detach().requires_grad_()
                losses = ctx.losses(some, weight, labels[chunk], 0.0)
            inputs = (some, weight) if trains_head else (some,)
            of_hidden[chunk], *of_chunk = torch.autograd.grad(losses, inputs, gradient[chunk])
            if of_weight is not None:
                of_weight.add_(of_chunk[0])
        return of_hidden, None if of_weight is None else of_weight.to(weight.dtype), None, None, None
