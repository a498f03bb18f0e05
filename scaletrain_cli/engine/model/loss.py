"""The language-model head and its loss."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class LanguageModelHead(nn.Module):
    """Logits and their cross-entropy in one module, so that logits need not outlive it."""

    def __init__(self, hidden_size: int, vocab_size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab_size, hidden_size))

    def forward(self, hidden: Tensor, labels: Tensor, divisor: Tensor | None = None) -> Tensor:
        """Cross-entropy in nats, in fp32; hidden [batch, length, size], labels [batch, length]."""
        total = token_loss(hidden.flatten(0, 1), self.weight, labels.flatten())
        return total / (divisor if divisor is not None else (labels != -100).sum())


def token_loss(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """Summed cross-entropy of tokens: hidden [tokens, size], weight [vocab, size], labels [tokens]."""
    return F.cross_entropy(F.linear(hidden, weight).float(), labels, reduction="sum")
