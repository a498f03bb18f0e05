"""A chat template is a stranger's code: it can neither run for ever nor fill the memory."""

from __future__ import annotations

import itertools

import pytest

from scaletrain_cli.data.tokenizers import template_environment
from scaletrain_cli.engine.data.chat_template import SpecialTokens, compile_template
from scaletrain_cli.spec.row_examples import RowError

DOUBLED = "{% set ns = namespace(x='a' * 99) %}{% for i in range(99) %}{% set ns.x = ns.x SIGN ns.x %}{% endfor %}"
ENDLESS = {
    "loops that write": "{% for i in range(99999) %}{% for j in range(99999) %}x{% endfor %}{% endfor %}",
    "loops that write nothing": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "macros": "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}",
}
LARGE = {
    "a text repeated": "{{ 'a' * 10000000000 }}",
    "repeated by a number before it": "{{ 10000000000 * 'a' }}",
    "a list repeated": "{{ [1] * 10000000000 }}",
    "a power": "{{ 10 ** 10000000000 }}",
    "sums": DOUBLED.replace("SIGN", "+"),
    "concatenations": DOUBLED.replace("SIGN", "~"),
    "a width": "{{ 'a'.ljust(10000000000) }}",
    "a width in a format": "{{ '%10000000000d' % 1 }}",
    "a width in another format": "{{ '{:10000000000}'.format(1) }}",
    "a width of a filter": "{{ 'a' | center(10000000000) }}",
    "an indentation": "{{ 'a\\nb' | indent(10000000000) }}",
    "an output of many parts": "{% for i in range(99999) %}{{ 'a' * 1000000 }}{% endfor %}",
}
MESSAGES = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]


@pytest.mark.parametrize("kind", ENDLESS)
def test_a_template_without_end_is_an_error_of_the_row(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = itertools.count()
    monkeypatch.setattr(template_environment.time, "monotonic", lambda: float(next(ticks)))
    with pytest.raises(RowError) as raised:
        compile_template(ENDLESS[kind], SpecialTokens({}), "2026-01-01").render(MESSAGES, None)
    assert "takes more than 30 s" in str(raised.value.reason)


@pytest.mark.parametrize("kind", LARGE)
def test_a_template_that_would_fill_the_memory_is_an_error_of_the_row(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(template_environment, "_MOST_CHARACTERS", 1 << 22)
    with pytest.raises(RowError) as raised:
        compile_template(LARGE[kind], SpecialTokens({}), "2026-01-01").render(MESSAGES, None)
    assert "makes more than 4,194,304 characters or elements" in str(raised.value.reason)


def test_large_numbers_in_the_words_of_a_conversation_are_no_widths() -> None:
    source = "{% for each in messages %}{{ '%s' % each.content.replace('1234567890123', each.content) }}{% endfor %}"
    messages = [{"role": "user", "content": "call 1234567890123"}, {"role": "assistant", "content": "no"}]
    rendered = compile_template(source, SpecialTokens({}), "2026-01-01").render(messages, None)
    assert rendered.text == "call call 1234567890123no"
