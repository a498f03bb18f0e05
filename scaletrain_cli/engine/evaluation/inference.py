"""A model on one device for inference: losses of documents, continuations of prompts, and answers about images.

Answers of a model in training to the first rows of the validation split are for people to read.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from scaletrain_cli.data.tokenizers.files import load_tokenizer, without_end
from scaletrain_cli.engine.data.batches import BatchReader
from scaletrain_cli.engine.data.rows import NOT_COUNTED, RowSequences
from scaletrain_cli.engine.model import outline
from scaletrain_cli.engine.model.attention import TokenContext
from scaletrain_cli.engine.model.base import CausalLM
from scaletrain_cli.engine.model.loss import choose_cross_entropy
from scaletrain_cli.engine.model.materialization import materialize
from scaletrain_cli.engine.model.safetensors import HuggingFaceFolder
from scaletrain_cli.engine.objectives.base import Objective
from scaletrain_cli.spec import LlavaSpec, ModelSpec


def load_model(folder: Path, spec: ModelSpec, device: torch.device, dtype: torch.dtype) -> CausalLM:
    """Return the model of a Hugging Face folder, in evaluation mode; its losses never need all logits in memory."""
    model = outline(spec)
    materialize(model, HuggingFaceFolder(folder, outline(spec)), device, dtype)
    choose_cross_entropy(model.lm_head, "chunked", 0.0, device)
    return model.eval()


@torch.no_grad()
def mean_loss(model: CausalLM, documents: Iterable[Sequence[int]], seq_len: int, device: torch.device) -> float:
    """Return the mean over all predicted tokens of all documents, in nats; long ones are cut into parts of ``seq_len``.

    The last token of a part is the first input of the next one, so that every token but the first is predicted once.
    Raises ValueError if no token can be predicted, and for a loss that is not finite.
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
    if not math.isfinite(total):
        raise ValueError(f"the loss is {total}")
    return total / count


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
    """Return up to ``max_new_tokens`` tokens after the prompt, without the end token; see ``without_end`` of a prompt.

    ``temperature``: 0 takes the likeliest token. The model sees the last ``seq_len`` tokens at most, and computes them
    again for each token. The same seed gives the same tokens on the same device.
    """
    generator, ends = torch.Generator(device).manual_seed(seed), frozenset(end_tokens)
    tokens = without_end(list(prompt), ends)
    given = len(tokens)
    for _ in range(max_new_tokens):
        latest = torch.tensor([tokens[-seq_len:]], device=device)
        logits = model(latest, latest, output=lambda model, hidden: model.logits(hidden[:, -1:]))[0, 0]
        if temperature == 0:
            token = int(logits.argmax())
        else:
            token = int(torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator))
        if token in ends:
            break
        tokens.append(token)
    return tokens[given:]


_MOST_TOKENS = 64  # of an answer
_MULTIPLE = 64  # of the positions computed at once, so that there are few shapes


@dataclass(frozen=True)
class SampleAnswers:
    """Answers the prompts of rows with the engine, in every ZeRO stage.

    ``tokenizer``: the path of its tokenizer.json. ``compiled``: all shapes must be equal.
    """

    spec: LlavaSpec
    reader: BatchReader
    tokenizer: Path
    device: torch.device
    compiled: bool

    def __len__(self) -> int:
        return len(self.reader)

    @torch.no_grad()
    def answer(self, engine: Any, objective: Objective, row: int) -> dict[str, str] | None:
        """Return the likeliest answer to the prompt of a row (from 0 on), for the file of a validation.

        ``expected`` is the first answer of the row, and ``sample`` the places of its images in the source. None if the
        row has no answer. All ranks call it alike, and get the same.
        """
        (batch,) = self.reader.read([[row]])
        places = (batch.labels[0] != NOT_COUNTED).nonzero().flatten().tolist()
        if not places:
            return None
        first = places[0]
        stop = next(place for place in range(first, len(batch.labels[0]) + 1) if place not in places)
        tokens, expected = batch.tokens[0, : first + 1].tolist(), batch.labels[0, first:stop].tolist()
        images = tokens.count(self.spec.image_token_index) // self.spec.tokens_per_image
        assert batch.images is not None
        of_prompt = batch._replace(images=batch.images[:images]).to(self.device)
        _, _, pixels, _ = objective.prepared(of_prompt).inputs
        answer = self.greedy(engine, tokens, pixels, expected[-1])
        assert isinstance(self.reader.sequences, RowSequences)
        names = [image.place for image in self.reader.sequences.images_of(row)[:images]]
        prompt = [token for token in tokens if token != self.spec.image_token_index]
        texts = {"prompt": prompt, "answer": answer, "expected": expected[:-1]}
        tokenizer = load_tokenizer(str(self.tokenizer))
        decoded = {name: tokenizer.decode(ids).strip() for name, ids in texts.items()}
        return {"sample": ", ".join(names) or f"row {row + 1}", **decoded}

    @torch.no_grad()
    def greedy(self, engine: Any, prompt: Sequence[int], pixels: Tensor | None, end: int) -> list[int]:
        """Return the likeliest tokens until ``end``, of which the first rank decides; never an image token.

        They end where the language model has no more positions (``seq_len``). ``prompt``: with the image tokens of all
        images. ``pixels``: [images, channels, image_size, image_size], normalized; None: the prompt has no image.
        Raises ValueError if the image tokens do not fit.
        """
        longest, image = self.spec.text_config.seq_len, self.spec.image_token_index
        most = min(_MOST_TOKENS, longest - len(prompt) + 1)
        length = min(longest, -(-(len(prompt) + most) // _MULTIPLE) * _MULTIPLE)
        # padding: any token that is not an image
        row = torch.full((1, longest if self.compiled else length), prompt[-1], device=self.device)
        row[0, : len(prompt)] = torch.tensor(prompt)
        answer: list[int] = []
        positions, samples = torch.arange(row.shape[1], device=self.device), torch.zeros(1, dtype=torch.int64)
        while len(answer) < most:
            count = len(prompt) + len(answer)
            context = TokenContext(positions, samples.to(self.device), real=(positions < count).unsqueeze(0))
            token = engine(row, row, pixels, context, output=_likeliest_after(count - 1, image))
            if dist.is_initialized():
                dist.broadcast(token, 0)  # ranks of ZeRO-3 must not differ in the number of passes
            number = int(token)
            if number == end:
                break
            answer.append(number)
            if count < row.shape[1]:
                row[0, count] = number
        return answer


def _likeliest_after(place: int, image: int) -> Callable[[CausalLM, Tensor], Tensor]:
    def likeliest(language: CausalLM, hidden: Tensor) -> Tensor:
        logits = language.logits(hidden[:, place : place + 1])
        logits[..., image : image + 1] = -math.inf  # an answer has no image; its token may be none of the vocabulary
        return logits.argmax(-1).flatten()

    return likeliest
