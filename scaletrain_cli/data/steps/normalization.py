"""The step ``normalization``: one form for the same text."""

import functools
import re
import sys
import unicodedata

from scaletrain_cli.data.steps.base import Document, Kept, Step
from scaletrain_cli.spec.preparation import NormalizationSpec

# CR LF, CR, vertical tab, form feed, next line, line separator, paragraph separator.
_LINE_END = re.compile("\r\n?|[\x0b\x0c\x85\u2028\u2029]")
# Controls (Cc) except for tabs and line ends, lone surrogates, and noncharacters: those that end in FFFE and FFFF too.
_CONTROL = re.compile(
    "[\x00-\x08\x0e-\x1f\x7f-\x84\x86-\x9f\ud800-\udfff\ufdd0-\ufdef"
    + "".join(f"{chr(plane + 0xFFFE)}{chr(plane + 0xFFFF)}" for plane in range(0, 0x110000, 0x10000))
    + "]"
)
# Byte order mark, zero-width space, word joiner, soft hyphen, Mongolian vowel separator. The joiners U+200C and U+200D
# stay: Persian, the scripts of India and emoji are written with them.
_ZERO_WIDTH = re.compile("[\ufeff\u200b\u2060\u00ad\u180e]")
# Normalization takes quadratic time in the number of combining marks in a row: an hour for a megabyte of them. The
# stream-safe form (UAX #15, section 13) has a grapheme joiner, which is no mark, after each 30.
_MARKS_IN_A_ROW, _JOINER = 30, "\u034f"
_CHANGED = {"normalization.changed": 1}


@functools.cache
def _marks() -> re.Pattern[str]:
    marks = "".join(filter(unicodedata.combining, map(chr, range(0x300, sys.maxunicode + 1))))
    return re.compile(f"([{marks}]{{{_MARKS_IN_A_ROW}}})(?=[{marks}])")


def stream_safe(text: str) -> str:
    """Return the text with a grapheme joiner after each 30 combining marks in a row, so that normalizing it is fast."""
    return text if text.isascii() else _marks().sub(rf"\1{_JOINER}", text)


class Normalization(Step):
    """Line ends, invisible characters, then the Unicode form; a second time changes nothing."""

    changes_text = True

    def __init__(self, spec: NormalizationSpec) -> None:
        self.spec = spec
        # The same for ASCII, where translate is many times faster than expressions.
        ends = dict.fromkeys("\r\x0b\x0c", "\n") if spec.line_ends == "lf" else {}
        new = {"keep": None, "remove": "", "space": " "}[spec.control_characters]
        controls = {} if new is None else {chr(code): new for code in range(128) if _CONTROL.match(chr(code))}
        self.ascii = str.maketrans({**ends, **controls})
        self.depends_on = {"unicode": unicodedata.unidata_version}

    def __call__(self, document: Document) -> Kept:
        text = self._normalized(document.text)
        return Kept(document.text) if text == document.text else Kept(text, _CHANGED)

    def _normalized(self, text: str) -> str:
        spec = self.spec
        if text.isascii():
            text = text.replace("\r\n", "\n") if spec.line_ends == "lf" else text
            return text.translate(self.ascii) if self.ascii else text
        if spec.line_ends == "lf":
            text = _LINE_END.sub("\n", text)
        if spec.control_characters != "keep":
            text = _CONTROL.sub("" if spec.control_characters == "remove" else " ", text)
        if spec.zero_width == "remove":
            text = _ZERO_WIDTH.sub("", text)
        return text if spec.unicode == "none" else unicodedata.normalize(spec.unicode, stream_safe(text))
