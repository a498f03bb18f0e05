"""The interfaces of models that the engine trains: of any model, of language models, and of networks for images.

That of language models is in parts, so that a pipeline stage may run some of them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from scaletrain_cli.engine.model.attention import TokenContext, needs_mask
from scaletrain_cli.engine.model.loss import LanguageModelHead
from scaletrain_cli.engine.model.materialization import DrawnWeights, Initial, WeightSource
from scaletrain_cli.spec import ModelSpec


class TrainedModel(nn.Module, ABC):
    """A model with Hugging Face parameter names and without parallel code; ``spec`` has its dimensions.

    ``forward`` takes what ``MicroBatch.inputs`` has, and an ``output``: a callable that gets the model and the result
    of the forward pass, and returns what to return instead, such as a loss.
    """

    spec: Any
    measured: ClassVar[str] = "forward"  # the method whose saved activations are compared with the plan

    @property
    def language(self) -> CausalLM | None:
        """The language model that is trained, alone or with an image tower; None of other models."""
        return None

    @property
    @abstractmethod
    def blocks(self) -> nn.ModuleDict:
        """The units of activation checkpointing and compilation, by a name of their own."""

    @abstractmethod
    def initial(self, name: str, shape: tuple[int, ...]) -> Initial:
        """Return the distribution of the first values of a parameter or stored buffer, by its Hugging Face name."""

    def first_weights(self, seed: int, device: torch.device) -> WeightSource:
        """Return the random weights that training begins with; ``device`` draws them."""
        return DrawnWeights(seed, device, self.initial)

    def limits(self) -> dict[str, tuple[float, float]]:
        """Return the least and largest value of parameters that each update is followed by a clamp of, by name."""
        return {}

    def never_decays(self, name: str) -> bool:
        """Return True for a parameter without weight decay although it has several dimensions, such as positions."""
        return False


def longest(positions: Tensor) -> Tensor:
    """Return the highest position plus 1 of each row: [rows], or a scalar for positions [length] of all rows."""
    return positions.amax(-1) + 1


class CausalLM(TrainedModel):
    """A decoder-only transformer with Hugging Face parameter names.

    tokens, labels: [batch, length] int64; label -100 is ignored. context: the places of these tokens. ``blocks``: by
    their number in the whole model. ``sequence_ranks``: over how many ranks each sequence is sharded. ``longest``:
    returns the highest position plus 1 of each row in all its parts, given the positions of a rank.
    """

    spec: ModelSpec
    measured: ClassVar[str] = "transform"
    residual_projections: tuple[str, ...]  # suffixes of the names of matrices that write into the residual stream
    opening: tuple[str, ...]  # modules before the blocks, the token embedding first
    closing: tuple[str, ...]  # modules after the blocks

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.spec = spec
        self.sequence_ranks = 1
        self.longest: Callable[[Tensor], Tensor] = longest

    def add_head(self) -> None:
        """Add the head last, so that a tied weight has the embedding's name, as in Hugging Face files."""
        self.lm_head = LanguageModelHead(self.spec.hidden_size, self.spec.vocab_size, self.spec.final_logit_softcapping)
        if self.spec.tie_word_embeddings:
            self.tie()

    def initial(self, name: str, shape: tuple[int, ...]) -> Initial:
        """Return Normal(0, initializer_range) for matrices, over sqrt(2 layers) for those into the residual stream.

        The variance of the residual stream is then independent of depth (GPT-2 report, section 2.3). Norms begin with
        1, or with 0 if they are centered there, biases and sinks with 0.
        """
        if name.endswith("bias") or len(shape) == 1:
            return Initial(0.0 if name.endswith(("bias", "sinks")) or self.spec.zero_centered_norm else 1.0)
        divisor = (2 * self.spec.num_hidden_layers) ** 0.5 if name.endswith(self.residual_projections) else 1.0
        return Initial(std=self.spec.initializer_range / divisor)

    @property
    def language(self) -> CausalLM:
        return self

    @property
    def token_embedding(self) -> nn.Module:
        """The embedding that a tied head shares its weight with."""
        return self.get_submodule(self.opening[0])

    @abstractmethod
    def embed(self, tokens: Tensor, context: TokenContext) -> Tensor:
        """Return the hidden states [batch, length, hidden] that enter the first block."""

    @abstractmethod
    def transform(self, hidden: Tensor, context: TokenContext) -> Tensor:
        """Return the hidden states after the blocks of this model or stage."""

    @abstractmethod
    def final_norm(self, hidden: Tensor) -> Tensor:
        """Return the normalized hidden states that the head reads."""

    def loss(
        self, hidden: Tensor, labels: Tensor, divisor: Tensor | None = None, weights: Tensor | None = None
    ) -> Tensor:
        """Return summed next-token cross-entropy in nats over ``divisor``, or its mean over the labels that count.

        ``weights``: [batch, length], factors of the losses of the labels.
        """
        return self.lm_head(self.final_norm(hidden), labels, divisor, weights)  # type: ignore[no-any-return]

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits [batch, length, vocabulary] in fp32 of hidden states after the blocks."""
        return self.lm_head(self.final_norm(hidden))  # type: ignore[no-any-return]

    def row_log_probabilities(self, hidden: Tensor, labels: Tensor) -> Tensor:
        """Return the summed log-probabilities of the labels of each row that count, [batch], in fp32."""
        return self.lm_head(self.final_norm(hidden), labels, by_row=True)  # type: ignore[no-any-return]

    def forward(
        self,
        tokens: Tensor,
        labels: Tensor,
        context: TokenContext | None = None,
        divisor: Tensor | None = None,
        output: Callable[[CausalLM, Tensor], Tensor] | None = None,
    ) -> Tensor:
        """Return the loss of a batch; ``context`` defaults to whole sequences of one document each.

        ``output``: computes what to return instead, from the model and the hidden states after the blocks.
        """
        context = context or TokenContext.of(tokens)
        hidden = self.embed(tokens, context)
        hidden = self.transform(hidden, self.with_masks(context, hidden))
        return self.loss(hidden, labels, divisor) if output is None else output(self, hidden)

    def with_masks(self, context: TokenContext, hidden: Tensor) -> TokenContext:
        """Return the context with what the blocks share: documents or masks. ``hidden`` enters the first block."""
        if not needs_mask(self.spec, hidden.device, hidden.dtype):
            return context.with_segments()
        return context.with_masks(hidden.dtype, hidden.shape[1] * self.sequence_ranks, self.spec.sliding_window)

    def tie(self) -> None:
        """Share the embedding's weight with the head, as one parameter."""
        weight = self.token_embedding.weight
        assert isinstance(weight, nn.Parameter)
        self.lm_head.weight = weight


class VisionModel(TrainedModel):
    """A network for images, or for pairs of image and text.

    pixels: [images, channels, height, width], normalized, in the dtype of the weights. A network for images is called
    with ``forward(pixels, samples=None, *, output=None)`` and returns [images, num_labels]: logits, predicted numbers,
    or the features that nt_xent compares. ``samples``: [images] int64, unique numbers of the images in the run, which
    key stochastic depth; None in evaluation. One for pairs is called with ``forward(pixels, tokens, *, output=None)``.
    """


class ImageClassifier(VisionModel):
    """A network for images with a linear classifier; without classes its features are returned.

    ``samples`` is needed in training with ``drop_path_rate`` above 0, and has no effect in a network without it.
    """

    classifier: nn.Module

    def initial(self, name: str, shape: tuple[int, ...]) -> Initial:
        """Return Normal(0, initializer_range) for all with several dimensions; norms begin with 1, biases with 0."""
        if len(shape) == 1:
            return Initial(0.0 if name.endswith("bias") else 1.0)
        return Initial(std=self.spec.initializer_range)

    def features(self, pixels: Tensor, samples: Tensor | None) -> Tensor:
        """Return the features of each image, [images, features]."""
        raise NotImplementedError

    def forward(
        self, pixels: Tensor, samples: Tensor | None = None, output: Callable[[Any, Tensor], Any] | None = None
    ) -> Any:
        result = self.classifier(self.features(pixels, samples))
        return result if output is None else output(self, result)
