"""Numbers as people read them: three figures and a unit. GB is 10^9 bytes, GiB is 2^30, and they are never mixed up."""

from __future__ import annotations


def bytes_text(count: float) -> str:
    """``61.2 GB`` (powers of 1000)."""
    return _scaled(count, 1000, ("B", "kB", "MB", "GB", "TB", "PB", "EB"))


def binary_bytes_text(count: float) -> str:
    """``57.0 GiB`` (powers of 1024)."""
    return _scaled(count, 1024, ("B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"))


def count_text(count: float) -> str:
    """``6.74 B`` for 6.74 thousand million; small whole numbers as they are."""
    return _scaled(count, 1000, ("", "k", "M", "B", "T", "Q")).rstrip()


def whole_text(count: int) -> str:
    """``245,760``."""
    return f"{count:,}"


def seconds_text(seconds: float) -> str:
    """``830 ms``, ``12.3 s``, ``4 min 10 s``, ``3 h 20 min``, ``12 d 4 h``."""
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


def dollars_text(amount: float) -> str:
    """``$12,300`` or ``$3.45``."""
    return f"${amount:,.0f}" if amount >= 100 else f"${amount:,.2f}"


def percent_text(share: float) -> str:
    """``42 %`` or ``0.3 %``."""
    return f"{share:.0%}".replace("%", " %") if share >= 0.0995 or share == 0 else f"{share:.1%}".replace("%", " %")


def ratio_text(ratio: float) -> str:
    """``x1.05``; of the far smaller two figures, ``x0.0043``."""
    return f"x{ratio:,.2f}" if ratio >= 0.095 else f"x{ratio:.2g}"


def _scaled(count: float, step: int, units: tuple[str, ...]) -> str:
    for unit in units[:-1]:
        if abs(count) < step * 0.9995:
            return f"{count:.0f} {unit}" if unit == units[0] and count == round(count) else f"{_figures(count)} {unit}"
        count /= step
    return f"{_figures(count)} {units[-1]}"


def _figures(value: float) -> str:
    """Three significant figures without an exponent."""
    if value == 0:
        return "0"
    if abs(value) >= 99.95:
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 9.995 else f"{value:.2f}"
