"""Text formatting: numbers with units, lists, suggestions of names, and escaping for terminals."""

import functools
import math
import re
import signal
from collections.abc import Callable, Iterable, Mapping


def bytes_text(count: float) -> str:
    """Return a size in powers of 1000, as in ``61.2 GB``."""
    return _scaled(count, 1000, ("B", "kB", "MB", "GB", "TB", "PB", "EB"))


def binary_bytes_text(count: float) -> str:
    """Return a size in powers of 1024, as in ``57.0 GiB``."""
    return _scaled(count, 1024, ("B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"))


def count_text(count: float) -> str:
    """Return a count with a unit, as in ``6.74 B`` for 6.74e9; small integers without one."""
    return _scaled(count, 1000, ("", "k", "M", "B", "T", "Q")).rstrip()


def source_text(name: str) -> str:
    """Return ``the source web``; ``the source`` for the only one, data.source, which has the name ``source``."""
    return "the source" if name == "source" else f"the source {name}"


def signal_text(number: int) -> str:
    """Return the name of a signal, as in ``SIGKILL``; of a real-time signal, most of which have none, ``signal 40``."""
    return next((member.name for member in signal.Signals if member == number), f"signal {number}")


def whole_text(count: int) -> str:
    """``245,760``."""
    return f"{count:,}"


def seconds_text(seconds: float) -> str:
    """Return a duration, as in ``830 ms``, ``12.3 s``, ``4 min 10 s``, ``3 h 20 min``, ``12 d 4 h``."""
    if seconds < 0.9995:
        return f"{_figures(seconds * 1e3)} ms" if seconds >= 1e-3 or seconds == 0 else f"{_figures(seconds * 1e6)} µs"
    if seconds < 99.95:
        return f"{seconds:.0f} s" if seconds == round(seconds) else f"{_figures(seconds)} s"
    for unit, size, smaller, part, most in (
        ("min", 60, "s", 1, 60),
        ("h", 3600, "min", 60, 48),
        ("d", 86400, "h", 3600, 0),
    ):
        if seconds < size * most or unit == "d":
            whole, rest = divmod(round(seconds / part), size // part)
            return f"{whole:,} {unit} {rest} {smaller}" if rest and whole < 1000 else f"{whole:,} {unit}"
    raise AssertionError("unreachable")


def counted(count: int, noun: str, plural: str = "") -> str:
    """Return ``1 step`` or ``3 steps``; ``plural`` if it is not the noun with an s."""
    return f"{count:,} {noun if count == 1 else plural or noun + 's'}"


def lost_text(lost: Mapping[str, int]) -> str:
    """Return what the tokens of rows lack, with the number of rows: ``reasoning of 12 rows``."""
    return ", ".join(f"{name} of {counted(rows, 'row')}" for name, rows in lost.items())


def listed(names: Iterable[object], limit: int = 5) -> str:
    """Return ``a, b, c and 4 more``: the first ``limit`` names, and how many more there are."""
    every = [str(name) for name in names]
    more = f" and {len(every) - limit} more" if len(every) > limit else ""
    return ", ".join(every[:limit]) + more


def either(names: Iterable[object], word: str = "or") -> str:
    """Return ``a, b or c``."""
    every = [str(name) for name in names]
    return f"{', '.join(every[:-1])} {word} {every[-1]}" if len(every) > 1 else "".join(every)


def dollars_text(amount: float) -> str:
    """Return an amount of US dollars, as in ``$12,300`` or ``$3.45``."""
    return f"${amount:,.0f}" if amount >= 100 else f"${amount:,.2f}"


def percent_text(share: float) -> str:
    """Return a share as a percentage, as in ``42 %`` or ``0.3 %``."""
    return f"{share:.0%}".replace("%", " %") if share >= 0.0995 or share == 0 else f"{share:.1%}".replace("%", " %")


_MEASURES = {
    "top1": "top-1",
    "mean_average_precision": "mAP",
    "mae": "MAE",
    "zero_shot_top1": "zero-shot top-1",
    "recall_at_1/image_to_text": "recall@1 image to text",
    "recall_at_1/text_to_image": "text to image",
}
_NO_SHARE = ("mae",)


def measures_text(measures: Mapping[str, float]) -> str:
    """Return the main figures of a validation beside its loss, as in ``top-1 71.2 %``; empty if there are none."""
    parts = []
    for name, label in _MEASURES.items():
        value = measures.get(name)
        if isinstance(value, int | float) and math.isfinite(value):
            parts.append(f"{label} {value:.4g}" if name in _NO_SHARE else f"{label} {100 * value:.1f} %")
    return ", ".join(parts)


def number_text(value: float | None) -> str:
    """Return a number with four significant figures; None, as NaN and infinity are recorded, as ``NaN or infinite``."""
    return "NaN or infinite" if value is None else f"{value:.4g}"


def ratio_text(ratio: float) -> str:
    """Return a ratio, as in ``x1.05``; two significant figures below 0.1, as in ``x0.0043``."""
    return f"x{ratio:,.2f}" if ratio >= 0.095 else f"x{ratio:.2g}"


def _scaled(count: float, step: int, units: tuple[str, ...]) -> str:
    for unit in units[:-1]:
        if abs(count) < step * 0.9995:
            return f"{count:.0f} {unit}" if unit == units[0] and count == round(count) else f"{_figures(count)} {unit}"
        count /= step
    return f"{_figures(count)} {units[-1]}"


def _figures(value: float) -> str:
    """Return three significant figures, without an exponent."""
    if value == 0:
        return "0"
    if abs(value) >= 99.95:
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 9.995 else f"{value:.2f}"


# Control characters except line end and tab, C1 controls, bidirectional controls, invisible format characters and
# separators, lone surrogates. Joiners of letters and emoji (U+200C, U+200D) are kept.
_CONTROLS = (
    r"\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u061c\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb"
    r"\ud800-\udfff\U00013430-\U0001343f\U0001bca0-\U0001bca3\U0001d173-\U0001d17a\U000e0000-\U000e007f"
)


def nearest_name(given: str, known: Iterable[str], cutoff: float = 0.5) -> str | None:
    """Return the known name closest to ``given``, ignoring case; None if no name is close."""
    import difflib

    by_lower = {name.lower(): name for name in known}
    near = difflib.get_close_matches(given.strip().lower(), by_lower, n=1, cutoff=cutoff)
    return by_lower[near[0]] if near else None


def did_you_mean(given: str, known: Iterable[str], cutoff: float = 0.5) -> str:
    """Return ``Did you mean X? `` with the closest known name and a trailing space, or an empty string."""
    near = nearest_name(given, known, cutoff)
    return f"Did you mean {near}? " if near else ""


def visible(text: str) -> str:
    """Return untrusted text with control characters escaped, except line ends and tabs."""
    return _obeyed().sub(lambda match: match[0].encode("unicode_escape").decode(), text)


@functools.cache
def _obeyed() -> re.Pattern[str]:
    return re.compile(f"[{_CONTROLS}]")


def span_text(low: float, high: float, text: Callable[[float], str]) -> str:
    """Return ``14 s to 18 s``, rounded to the two or three figures that a range is worth."""
    return f"{text(two_figures(low))} to {text(two_figures(high))}"


def two_figures(value: float) -> float:
    """Return a value rounded to two significant figures, or to three that begin with 1."""
    if value <= 0:
        return value
    size = math.floor(math.log10(value))
    return round(value, (2 if value < 2 * 10.0**size else 1) - size)
