"""The router of a mixture of experts: scores of tokens, the choice of experts, and the losses of the router itself.

All decisions are made token by token, and losses per sequence, so that they are the same in every layout.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from scaletrain_cli.engine.model.materialization import ExactBuffers
from scaletrain_cli.spec import ModelSpec

_SMALLEST_SUM = 1e-20  # of a token's sigmoid scores, which may all be 0


class Choice(NamedTuple):
    """The experts of tokens [..., n]: ``chosen`` [..., n, k] with weights [..., n, k].

    ``probabilities`` [..., n, experts] sum to 1. ``balanced`` [..., n, k]: the choice whose load is to be even.
    """

    chosen: Tensor
    weights: Tensor
    probabilities: Tensor
    balanced: Tensor


class Router(ExactBuffers):
    """Logits [..., experts] of tokens [..., hidden], in fp32, because rounding would change close choices.

    ``e_score_correction_bias``: added to the scores for the choice only (DeepSeek-V3, arXiv:2412.19437, equation 16).
    A buffer, because no gradient trains it; it keeps fp32 when a model is cast.
    """

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(spec.num_experts, spec.hidden_size))
        self.bias = nn.Parameter(torch.empty(spec.num_experts)) if spec.router_bias else None
        self.e_score_correction_bias: Tensor | None
        empty = torch.zeros(spec.num_experts, dtype=torch.float32) if spec.topk_method == "noaux_tc" else None
        self.register_buffer("e_score_correction_bias", empty)
        self.top_k, self.scoring, self.method = spec.num_experts_per_tok, spec.scoring_func, spec.topk_method
        self.groups, self.chosen_groups = spec.n_group, spec.topk_group
        self.renormalize, self.scaling = spec.norm_topk_prob, spec.routed_scaling_factor

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x.float(), self.weight.float(), None if self.bias is None else self.bias.float())

    def choose(self, logits: Tensor) -> Choice:
        """Return the ``top_k`` experts with the highest scores; of the best groups, if experts are in groups."""
        if self.scoring == "softmax":
            scores = probabilities = logits.softmax(dim=-1)
        else:
            scores = logits.sigmoid()
            probabilities = scores / (scores.sum(dim=-1, keepdim=True) + _SMALLEST_SUM)
        if self.method == "greedy":
            weights, chosen = scores.topk(self.top_k, dim=-1)
        else:
            chosen = self._ranking(scores.detach()).topk(self.top_k, dim=-1).indices
            weights = scores.gather(-1, chosen)
        # Without the bias and the groups: arXiv:2412.19437, equation 18.
        balanced = scores.detach().topk(self.top_k, dim=-1).indices if self.method == "noaux_tc" else chosen
        if self.renormalize:
            total = weights.sum(dim=-1, keepdim=True)
            weights = weights / (total if self.scoring == "softmax" else total + _SMALLEST_SUM)
        return Choice(chosen, weights if self.scaling == 1 else weights * self.scaling, probabilities, balanced)

    def _ranking(self, scores: Tensor) -> Tensor:
        """Return what decides the choice: scores with the bias, -inf outside the best groups of a token.

        The score of a group is the sum of its two highest ones (DeepSeek-V3), or its highest one (DeepSeek-V2,
        arXiv:2405.04434, section 2.2.2).
        """
        if self.e_score_correction_bias is not None:
            scores = scores + self.e_score_correction_bias
        if self.chosen_groups == self.groups:
            return scores
        grouped = scores.view(*scores.shape[:-1], self.groups, -1)
        best = grouped.topk(2, dim=-1).values.sum(dim=-1) if self.method == "noaux_tc" else grouped.amax(dim=-1)
        among = torch.zeros_like(best, dtype=torch.bool)
        among = among.scatter(-1, best.topk(self.chosen_groups, dim=-1).indices, value=True)
        return grouped.masked_fill(~among.unsqueeze(-1), -torch.inf).flatten(-2)


def token_weights(real: Tensor, tokens: Tensor, ranks: int) -> Tensor:
    """Return the weights [batch, length] of tokens in a mean over their sequence without its padding.

    ``real``: False for padding; ``tokens`` [batch]: the other tokens of the whole sequences. Each of ``ranks`` ranks
    has a part of the sequences; the mean over the ranks is the mean over the whole.
    """
    return real * (ranks / tokens.clamp(min=1)).unsqueeze(1)


def balance_loss(probabilities: Tensor, total: Tensor, weights: Tensor | None = None) -> Tensor:
    """Return the mean over sequences of sum over experts of (share of load x experts) x mean probability.

    At least 1 if the load is that of the most probable experts. The sequence-wise form (DeepSeek-V2, arXiv:2405.04434,
    equations 23 to 25; with normalized sigmoid scores DeepSeek-V3, arXiv:2412.19437, equations 17 to 20). Hugging
    Face's, over a whole micro-batch, is larger by a factor of the experts per token. ``probabilities``
    [batch, length, experts] may be a part of each sequence, while ``total`` [batch, experts] is the load of the whole:
    as the loss is linear in the probabilities, the loss of the whole is the mean over its parts, and so is its
    gradient. ``weights``: see ``token_weights``; None: no padding.
    """
    shares = total * total.shape[-1] / total.sum(dim=-1, keepdim=True).clamp(min=1)
    if weights is None:
        mean = probabilities.mean(dim=1)
    else:
        mean = (probabilities * weights.unsqueeze(-1)).sum(dim=1)
    return (shares * mean).sum(dim=-1).mean()


def z_loss(logits: Tensor, weights: Tensor | None = None) -> Tensor:
    """Return the mean squared log of the sum of the exponentials of the logits, which keeps them small.

    ST-MoE, arXiv:2202.08906, equation 5; with sigmoid scores, too, as in Megatron-LM. ``weights``: see
    ``token_weights``; None: no padding.
    """
    squares = logits.logsumexp(dim=-1).square()
    return squares.mean() if weights is None else (squares * weights).sum(dim=1).mean()
