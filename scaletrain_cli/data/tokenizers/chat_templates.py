"""The chat templates of a run: its own file, those of its tokenizer's folder, or ChatML; and the tokens beside them."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scaletrain_cli.data.tokenizers.files import json_object, special_tokens
from scaletrain_cli.errors import UsageError
from scaletrain_cli.reasons import Reason
from scaletrain_cli.safe_files import expand_home, open_to_read
from scaletrain_cli.spec import LlavaSpec, RunSpec
from scaletrain_cli.spec.row_examples import Example, Pair, PlainText, RowError

_MOST_TOKENS = 1 << 31
_HERE = Path()

# ChatML (github.com/openai/openai-python, chatml.md) with tools in the form of Qwen2.5 and Hermes.
CHATML_TOKENS = ("<|im_start|>", "<|im_end|>")
CHATML = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}
        {{- messages[0].content + '\\n\\n' }}
    {%- endif %}
    {{- 'Tools, as JSON schemas:\\n<tools>' }}
    {%- for tool in tools %}
        {{- '\\n' + (tool | tojson) }}
    {%- endfor %}
    {{- '\\n</tools>\\nCall a tool with <tool_call>\\n{"name": ..., "arguments": ...}\\n</tool_call>.<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n' }}
        {%- generation %}
            {{- '<think>\\n' + message.reasoning_content + '\\n</think>\\n\\n' if message.reasoning_content }}
            {{- message.content or '' }}
            {%- for call in message.tool_calls or [] %}
                {%- set function = call.function or call %}
                {{- '\\n' if message.content or not loop.first }}
                {{- '<tool_call>\\n{"name": ' + (function.name | tojson) + ', "arguments": ' }}
                {{- function.arguments if function.arguments is string else function.arguments | tojson }}
                {{- '}\\n</tool_call>' }}
            {%- endfor %}
            {{- '<|im_end|>\\n' }}
        {%- endgeneration %}
    {%- elif message.role == 'tool' %}
        {{- '<|im_start|>user' if loop.first or loop.previtem.role != 'tool' }}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {{- '<|im_end|>\\n' if loop.last or loop.nextitem.role != 'tool' }}
    {%- elif message.role != 'system' or not (tools and loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""


@dataclass(frozen=True)
class TemplateFiles:
    """Special tokens and chat templates beside a tokenizer. ``templates``: by name, ``default`` and ``tool_use``.

    ``stop_ids``: token ids at which the model stops, of config.json and generation_config.json.
    """

    tokens: dict[str, str]
    templates: dict[str, str]
    stop_ids: tuple[int, ...] = ()

    def template_for(self, tools: list[Any] | None, tokenizer: str) -> str:
        """Return the name of the template of a conversation. Raises RowError if there is none.

        ``tokenizer``: what the error calls it.
        """
        name = "tool_use" if tools and "tool_use" in self.templates else "default"
        if name not in self.templates:
            code = "template-no-default" if self.templates else "template-missing"
            raise RowError(code, tokenizer=tokenizer, names=sorted(self.templates))
        return name

    def require_template(self, example: Example, tokenizer: str) -> None:
        """Raise RowError for an example with messages that no template is for, as template_for() does."""
        for part in [example.chosen, example.rejected] if isinstance(example, Pair) else [example]:
            if not isinstance(part, PlainText) and not isinstance(part[0], str):
                self.template_for(part.tools, tokenizer)


def template_files(spec: RunSpec, base: Path = _HERE) -> TemplateFiles:
    """Return special tokens and chat templates of a spec's tokenizer. Raises UsageError.

    A trained tokenizer has the tokens and the template of ChatML. Of LLaVA chat_template.json, which processors of
    images have, is preferred to the tokenizer's own. ``base``: the folder of relative paths.
    """
    data, given = spec.data, dict[str, str]()
    if data.chat_template is not None:
        given = {"default": _template(base / expand_home(data.chat_template))}
    if data.tokenizer.path is None:
        tokens = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
        return TemplateFiles(tokens, given or {"default": CHATML})
    folder = (base / expand_home(data.tokenizer.path)).parent
    folders = [folder] if spec.language_weights is None else [folder, base / expand_home(spec.language_weights)]
    templates = given or _templates(folder, of_processor=isinstance(spec.model, LlavaSpec))
    configs = [folder / name for folder in folders for name in ("config.json", "generation_config.json")]
    values = [json_object(path).get("eos_token_id") for path in configs]
    ids = {i for value in values for i in (value if isinstance(value, list) else [value]) if type(i) is int}
    return TemplateFiles(special_tokens(folder), templates, tuple(sorted(i for i in ids if 0 <= i < _MOST_TOKENS)))


def _template(path: Path) -> str:
    try:
        with open_to_read(path) as file:
            return file.read().decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise UsageError(Reason("data.template-unreadable", {"path": str(path), "error": why})) from error


def _templates(folder: Path, *, of_processor: bool) -> dict[str, str]:
    """Return the templates by name; files replace those of tokenizer_config.json, as in transformers."""
    if of_processor and isinstance(template := json_object(folder / "chat_template.json").get("chat_template"), str):
        of_config: Any = template
    else:
        of_config = json_object(folder / "tokenizer_config.json").get("chat_template")
    files = {path.stem: path for path in sorted(folder.glob("additional_chat_templates/*.jinja"))}
    if (path := folder / "chat_template.jinja").exists():
        files["default"] = path
    if files:
        return {name: _template(path) for name, path in files.items()}
    try:
        if isinstance(of_config, list):
            of_config = {template["name"]: template["template"] for template in of_config}
        named = {"default": of_config} if isinstance(of_config, str) else dict(of_config or {})
        if not all(isinstance(text, str) for pair in named.items() for text in pair):
            raise TypeError("a template, or its name, is no text")
    except (KeyError, TypeError, ValueError) as error:
        params = {"path": str(folder / "tokenizer_config.json"), "error": f"{type(error).__name__}: {error}"}
        raise UsageError(Reason("data.template-unreadable", params)) from error
    return named
