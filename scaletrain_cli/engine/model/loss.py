"""The language-model head and its loss."""

import torch.nn.functional as F
from torch import Tensor


def next_token_loss(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """Mean cross-entropy in nats, in fp32.

    hidden [batch, length, size], weight [vocab, size], labels [batch, length].
    """
    logits = F.linear(hidden, weight)
    return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten())
