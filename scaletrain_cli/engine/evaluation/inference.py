"""A model on one device for inference: losses of documents, continuations of prompts, and answers about images."""

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from scaletrain_cli.engine.model import outline
from scaletrain_cli.engine.model.attention import TokenContext
from scaletrain_cli.engine.model.base import CausalLM
from scaletrain_cli.engine.model.loss import logits_of
from scaletrain_cli.engine.model.materialization import materialize
from scaletrain_cli.engine.model.safetensors import HuggingFaceFolder
from scaletrain_cli.engine.model.vision.llava import Llava
from scaletrain_cli.spec import ModelSpec


class TokenLoss(NamedTuple):
    """Mean loss per predicted token in nats, and the number of predicted tokens."""

    mean: float
    tokens: int


def load_model(folder: Path, spec: ModelSpec, device: torch.device, dtype: torch.dtype) -> CausalLM:
    """Return the model with the weights of a Hugging Face folder, in evaluation mode."""
    model = outline(spec)
    materialize(model, HuggingFaceFolder(folder, outline(spec)), device, dtype)
    return model.eval()


@torch.no_grad()
def mean_loss(model: CausalLM, documents: Iterable[Sequence[int]], seq_len: int, device: torch.device) -> TokenLoss:
    """Return the mean over all predicted tokens of all documents; long ones are cut into parts of ``seq_len`` tokens.

    The last token of a part is the first input of the next one, so that every token but the first is predicted once.
    Raises ValueError if no token can be predicted.
    """
    total, count = 0.0, 0
    one = torch.ones((), device=device)
    for document in documents:
        for start in range(0, len(document) - 1, seq_len):
            part = torch.tensor(document[start : start + seq_len + 1], device=device).unsqueeze(0)
            total += model(part[:, :-1], part[:, 1:], divisor=one).item()
            count += part.shape[1] - 1
    if count == 0:
        raise ValueError("no document has two tokens")
    return TokenLoss(total / count, count)


@torch.no_grad()
def generate(
    model: CausalLM,
    prompt: Sequence[int],
    *,
    max_new_tokens: int,
    temperature: float,
    end_tokens: Iterable[int],
    seq_len: int,
    seed: int,
    device: torch.device,
) -> list[int]:
    """Return up to ``max_new_tokens`` tokens after the prompt, without the end token.

    ``temperature``: 0 takes the likeliest token. The model sees the last ``seq_len`` tokens at most, and computes them
    again for each token. The same seed gives the same tokens on the same device.
    """
    generator, ends = torch.Generator(device).manual_seed(seed), frozenset(end_tokens)
    tokens = list(prompt)
    for _ in range(max_new_tokens):
        latest = torch.tensor([tokens[-seq_len:]], device=device)
        context = TokenContext.of(latest)
        logits = _logits_after(model, model.embed(latest, context), context)[0]
        if temperature == 0:
            token = int(logits.argmax())
        else:
            token = int(torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator))
        if token in ends:
            break
        tokens.append(token)
    return tokens[len(prompt) :]


def _logits_after(model: CausalLM, hidden: Tensor, context: TokenContext) -> Tensor:
    """Return the logits after the last position of hidden states that enter the first block."""
    hidden = model.transform(hidden, model.with_masks(context, hidden))
    head: Any = model.lm_head
    return logits_of(model.final_norm(hidden[:, -1:]), head.weight, head.softcap)[:, 0]


@torch.no_grad()
def answer(
    model: Llava, prompt: Sequence[int], pixels: Tensor | None, *, max_new_tokens: int, end_tokens: Iterable[int]
) -> list[int]:
    """Return the likeliest tokens after a prompt about images, up to ``max_new_tokens``, without the end token.

    An answer has no image token, and ends where the language model has no more positions (``seq_len``). The features of
    the images are computed again for each token. ``prompt``: with the image tokens of all images. ``pixels``: [images,
    channels, image_size, image_size], normalized; None: the prompt has no image. Raises ValueError if the image tokens
    do not fit.
    """
    device, ends = next(model.parameters()).device, frozenset(end_tokens)
    tokens, longest = list(prompt), len(prompt) + max_new_tokens
    while len(tokens) < min(longest, model.spec.text_config.seq_len + 1):
        rows = torch.tensor([tokens], device=device)
        context = TokenContext.of(rows)
        logits = _logits_after(model.language_model, model.embed(rows, context, pixels), context)[0]
        token = int(without_images(logits, model.spec.image_token_index).argmax())
        if token in ends:
            break
        tokens.append(token)
    return tokens[len(prompt) :]


def without_images(logits: Tensor, image_token: int) -> Tensor:
    """Set the logit of the image token to -inf in logits [..., vocabulary], and return them: an answer has no image."""
    if image_token < logits.shape[-1]:
        logits[..., image_token] = -math.inf
    return logits
