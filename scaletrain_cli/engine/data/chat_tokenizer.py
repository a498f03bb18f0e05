"""The tokenizer of rows for fine-tuning: its special tokens, its chat template, and the weight of each token."""

import contextlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from scaletrain_cli.data.tokenizers.chat_templates import TemplateFiles
from scaletrain_cli.data.tokenizers.files import tokens_before, with_start
from scaletrain_cli.engine.data.chat_template import (
    ChatTemplate,
    Span,
    SpecialTokens,
    compile_template,
    with_image_parts,
    with_image_token,
)
from scaletrain_cli.engine.data.missing_parts import COUNTED
from scaletrain_cli.errors import UsageError
from scaletrain_cli.reasons import Reason
from scaletrain_cli.spec import DataSpec, LlavaSpec
from scaletrain_cli.spec.corpus_files import ENDS_OF_TEXT
from scaletrain_cli.spec.row_examples import (
    ASSISTANT,
    IMAGE_MARK,
    Answer,
    Conversation,
    Example,
    Message,
    Pair,
    PlainText,
    RowError,
    image_marks,
)

_CHARACTERS_SHOWN = 20


class Encoded(NamedTuple):
    """The tokens of one document, and the weight of each in the loss.

    ``lacks``: what it does not have of its row. ``stops``: ids of the tokens at which its turns end.
    """

    ids: npt.NDArray[np.int64]
    weights: npt.NDArray[np.float32]
    lacks: tuple[str, ...] = ()
    stops: frozenset[int] = frozenset()


class ImageTokens(NamedTuple):
    """The token that stands for an image, its text and its id, and how many ``copies`` of it an image has."""

    text: str
    id: int
    copies: int

    def before_a_cut(self, ids: npt.NDArray[np.int64], length: int) -> int:
        """Return to how many tokens a document of more than ``length`` is cut, so that no image is."""
        places = np.flatnonzero(ids == self.id)
        whole, rest = divmod(int(np.searchsorted(places, length)), self.copies)
        return int(places[whole * self.copies]) if rest else length

    def without_copies(self, document: Encoded) -> Encoded:
        """Return a document with one token for each image."""
        kept = first_copies(document.ids, self.id, self.copies)
        return document._replace(ids=document.ids[kept], weights=document.weights[kept])


def first_copies(ids: npt.NDArray[np.int64], image: int, copies: int) -> npt.NDArray[np.bool_]:
    """Return True for each token but the 2nd and later ones of an image, which has ``copies`` tokens ``image``."""
    places = ids == image
    mask: npt.NDArray[np.bool_] = ~places | ((np.cumsum(places) - 1) % copies == 0)
    return mask


def image_tokens(tokenizer: Any, spec: LlavaSpec) -> ImageTokens:
    """Return the image token of a model. Raises UsageError if the tokenizer does not have it as one token."""
    number = spec.image_token_index
    text = tokenizer.id_to_token(number)
    if text is None or tokenizer.encode(text, add_special_tokens=False).ids != [number]:
        usual = tokenizer.token_to_id(IMAGE_MARK)
        raise UsageError(Reason("data.no-image-token", {"id": number, "mark": IMAGE_MARK, "usual": usual}))
    return ImageTokens(text, number, spec.tokens_per_image)


class _Text(NamedTuple):
    """A text to encode. In the loss are the characters of ``spans``, or those after ``prompt``, or all (None)."""

    text: str
    special: bool  # the tokens that the tokenizer puts before a text come first; a chat template has written them
    prompt: str | None = None
    spans: list[Span] | None = None
    images: int = 0
    lacks: tuple[str, ...] = ()  # what the template does not write of the messages
    stops: frozenset[str] = frozenset()  # the tokens at which its turns end


class ChatTokenizer:
    """Turns examples into tokens with weights. The results depend on nothing but the arguments."""

    def __init__(self, tokenizer: Any, files: TemplateFiles, data: DataSpec, images: ImageTokens | None = None) -> None:
        """``tokenizer``: of the package tokenizers. ``images``: None: rows have none.

        Raises UsageError for a template that is not valid.
        """
        self._tokenizer, self._files, self._loss_on, self.images = tokenizer, files, data.loss_on, images
        self._name = data.tokenizer.path or "bpe"
        self._before = tokens_before(tokenizer)
        self.end = next((name for name in (files.tokens.get("eos_token"), *ENDS_OF_TEXT) if self._is_token(name)), None)
        stops = {files.tokens.get("eos_token"), *map(tokenizer.id_to_token, files.stop_ids)}
        added = tokenizer.get_added_tokens_decoder().values()
        names = [token.content for token in sorted(added, key=lambda token: (not token.special, token.content))]
        single = [name for name in dict.fromkeys([*sorted(filter(None, stops)), *names]) if self._is_token(name)]
        tokens = SpecialTokens(
            files.tokens,
            tuple(name for name in single if name in stops),
            tuple(name for name in single if name not in stops),
        )
        self._templates = {
            name: compile_template(source, tokens, data.chat_template_date, data.chat_template_kwargs)
            for name, source in files.templates.items()
        }
        known = frozenset[str]().union(*(template.read for template in self._templates.values()))
        if self._templates and (unknown := data.chat_template_kwargs.keys() - known):
            raise UsageError(Reason("data.template-has-no-variable", {"name": min(unknown), "known": sorted(known)}))
        self._takes_parts = {
            name: images is not None and template.takes_parts(images.text) for name, template in self._templates.items()
        }

    def encode(self, examples: Sequence[tuple[Example, float]]) -> list[list[Encoded] | RowError]:
        """Return the documents of each example with its weight: one, or the chosen and the rejected answer.

        In place of an example that cannot be used stands its error.
        """
        texts: list[list[_Text | RowError]] = []
        for example, _ in examples:
            try:
                images = 0 if self.images is None else image_marks(example)
                texts.append([text._replace(images=images) for text in self._texts(example)])
            except RowError as error:
                texts.append([error])
        usable = [text for of_example in texts for text in of_example if isinstance(text, _Text)]
        encodings = self._tokenizer.encode_batch([text.text for text in usable], add_special_tokens=False)
        of_prompts = self._tokenizer.encode_batch([text.prompt or "" for text in usable], add_special_tokens=False)
        encoded = map(self._weighted, usable, encodings, of_prompts)
        by_example: list[list[Encoded] | RowError] = []
        for of_example, (_, weight) in zip(texts, examples, strict=True):
            documents = [next(encoded) if isinstance(one, _Text) else one for one in of_example]
            failed = next((one for one in documents if isinstance(one, RowError)), None)
            whole = [one for one in documents if isinstance(one, Encoded)]
            by_example.append(failed or [one._replace(weights=one.weights * np.float32(weight)) for one in whole])
        return by_example

    def _texts(self, example: Example) -> list[_Text]:
        if isinstance(example, Pair):
            return [self._answer(example.chosen), self._answer(example.rejected)]
        if isinstance(example, Conversation):
            return [self._conversation(example)]
        if isinstance(example, Answer):
            return [self._answer(example)]
        assert isinstance(example, PlainText)
        text, end = self._ended(example.text)
        return [_Text(text, special=True, stops=end)]

    def _is_token(self, text: str | None) -> bool:
        """Return whether a text is encoded as one token, and not in pieces."""
        number = None if not text else self._tokenizer.token_to_id(text)
        return number is not None and self._tokenizer.encode(text, add_special_tokens=False).ids == [number]

    def _conversation(self, conversation: Conversation) -> _Text:
        template = self._templates[self._files.template_for(conversation.tools, self._name)]
        conversation = conversation._replace(messages=self._with_images(conversation.messages, conversation.tools))
        weights = [weight for weight in conversation.weights if weight is not None]
        if self._loss_on == "all" and all(weight == 1 for weight in weights):
            return self._checked(self._whole(template, conversation), template, conversation)
        text, spans, stops = template.assistant_spans(conversation, last_only=self._loss_on == "last_assistant")
        if self._loss_on == "all":  # what is between the spans has weight 1
            all_spans, place = [], 0
            for span in [*sorted(spans), None]:
                start = len(text) if span is None else span.start
                all_spans += [Span(place, start, 1.0)] if place < start else []
                if span is not None:
                    all_spans.append(span)
                    place = span.stop
            spans = all_spans
        return self._checked(_Text(text, special=False, spans=spans, stops=stops), template, conversation)

    def _whole(self, template: ChatTemplate, conversation: Conversation) -> _Text:
        messages, _, tools, variables = conversation
        with contextlib.suppress(RowError):  # of templates that do not tell turns from prompts
            text, _, stops = template.assistant_spans(conversation, last_only=False)
            return _Text(text, special=False, stops=stops)
        text = template.render(messages, tools, variables).text
        if messages[-1]["role"] != ASSISTANT:
            return _Text(text, special=False)
        text, _, token = template.ended(conversation, text, [Span(0, len(text), 1.0)], conversation_ends=True)
        return _Text(text, special=False, stops=frozenset({token}))

    def _answer(self, answer: Answer) -> _Text:
        prompt, completion, tools, variables = answer
        if isinstance(prompt, str) and isinstance(completion, str):
            if self.images is not None:
                prompt, completion = (part.replace(IMAGE_MARK, self.images.text) for part in (prompt, completion))
            text, end = self._ended(prompt + completion)
            return _Text(text, special=True, prompt=None if self._loss_on == "all" else prompt, stops=end)
        assert isinstance(prompt, list)
        assert isinstance(completion, list)
        template = self._templates[self._files.template_for(tools, self._name)]
        messages: list[Message] = self._with_images([*prompt, *completion], tools)
        prompt = messages[: len(prompt)]
        conversation = Conversation(messages, [], tools, variables)
        text = template.render(messages, tools, variables).text
        # A prompt that ends with the assistant's turn is continued; any other one gets the start of a turn.
        begins = template.render(prompt, tools, variables, prompt=prompt[-1]["role"] != ASSISTANT).text
        if self._loss_on == "all":
            begins = ""
        if not text.startswith(begins):
            plain = template.render(prompt, tools, variables).text
            if not text.startswith(plain):
                raise RowError("template-rewrites-history", number=len(prompt) - 1)
            raise RowError("template-prompt-differs", number=len(prompt), prompt=begins[len(plain) :])
        spans = [Span(len(begins), len(text), 1.0)]
        text, _, token = template.ended(conversation, text, spans, conversation_ends=True)
        whole = _Text(text, special=False, prompt=begins or None, stops=frozenset({token}))
        return self._checked(whole, template, conversation)

    def _checked(self, text: _Text, template: ChatTemplate, conversation: Conversation) -> _Text:
        """Return a text with the names of what it lacks. Raises RowError if it lacks more than templates may drop."""
        messages, _, tools, variables = conversation
        missing = template.missing(messages, tools, variables)
        if part := next((part for part in missing if part.kind not in COUNTED), None):
            raise RowError(f"template-lacks-{part.kind}", number=part.number, text=part.text[:80])
        unread = sorted(f"variable {name}" for name in variables.keys() - template.read)
        return text._replace(lacks=(*dict.fromkeys(part.kind for part in missing), *unread))

    def _with_images(self, messages: list[Message], tools: list[Any] | None) -> list[Message]:
        """Return the messages with the places of their images as the template takes them."""
        if self.images is None:
            return messages
        if self._takes_parts[self._files.template_for(tools, self._name)]:
            return with_image_parts(messages)
        return with_image_token(messages, self.images.text)

    def _ended(self, text: str) -> tuple[str, frozenset[str]]:
        """Return a text with the token that ends it, and that token."""
        if self.end is None:
            raise RowError("tokenizer-without-end", tokenizer=self._name)
        return (text if text.endswith(self.end) else text + self.end), frozenset({self.end})

    def _weighted(self, text: _Text, encoding: Any, of_prompt: Any) -> Encoded | RowError:
        # Special tokens that the tokenizer puts behind a text are left out: texts have their end, and prompts none.
        ids = np.array(with_start(encoding.ids, self._before) if text.special else encoding.ids, np.int64)
        weights = np.zeros(len(ids), np.float32)
        if text.spans is not None:
            offsets = np.array(encoding.offsets, np.int64).reshape(-1, 2)
            for start, stop, weight in text.spans:
                # A character of several tokens gives its offsets to each of them.
                inside = (offsets[:, 0] < stop) & (np.maximum(offsets[:, 1], offsets[:, 0] + 1) > start)
                weights[inside] = weight
        elif encoding.ids[: len(of_prompt.ids)] != of_prompt.ids:
            border = len(text.prompt or "")
            around = text.text[max(0, border - _CHARACTERS_SHOWN) : border + _CHARACTERS_SHOWN]
            return RowError("prompt-not-a-prefix", around=around)
        else:
            weights[0 if text.prompt is None else len(ids) - len(encoding.ids) + len(of_prompt.ids) :] = 1
        encoded = Encoded(ids, weights, text.lacks, frozenset(map(self._tokenizer.token_to_id, text.stops)))
        return encoded if self.images is None else self._with_copies(encoded, text.images)

    def _with_copies(self, document: Encoded, images: int) -> Encoded | RowError:
        """Return the tokens with as many copies of each image token as an image has, which are not in the loss."""
        assert self.images is not None
        ids, weights = document.ids, document.weights
        places = ids == self.images.id
        if (count := int(places.sum())) != images:
            return RowError("image-tokens", found=count, images=images)
        weights[places] = 0
        copies = np.where(places, self.images.copies, 1)
        return document._replace(ids=np.repeat(ids, copies), weights=np.repeat(weights, copies))
