"""Accuracy and speed of the step ``language``, on the translations that are installed on this machine.

The labeled set is what the message catalogs of programs (``/usr/share/locale/*/LC_MESSAGES/*.mo``) say in each
language: translated messages of at least 30 characters, joined to texts of four lengths. Every text is classified by
the step, from its beginning, and by py3langid itself, as a whole. English is the messages' own text. ``kept`` and
``wrong`` are shares at a min_probability of 0.3, 0.5, 0.65 and 0.8.

    python benchmarks/language_identification.py [--locale /usr/share/locale] [--texts 40]
"""

from __future__ import annotations

import argparse
import gettext
import random
import re
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from scaletrain_cli.data.steps.language import Language
from scaletrain_cli.spec.preparation import LANGUAGES, LanguageSpec

LENGTHS = (50, 150, 550, 2000)
# Names of locales for languages that py3langid names otherwise; nb and nn are both written, no is either.
SAME = {"nb": "no", "iw": "he", "in": "id", "fil": "tl", "zh_HK": "zh", "sh": "sr"}
_MARKUP = re.compile(r"%[-+ #0-9.*]*[hlqjzt]*[a-zA-Z]|<[^<>]{1,80}>|&\w+;|\\.|\{[^{}]{0,40}\}|[_&](?=\w)|\s+")


def language_of(locale: str) -> str | None:
    """Return the language of a locale by its name in py3langid; None if that does not know it."""
    if "@" in locale:  # the same language in another script
        return None
    name = SAME.get(locale) or SAME.get(locale.partition("_")[0]) or locale.partition("_")[0]
    return name if name in LANGUAGES else None


def messages(folder: Path) -> Iterator[tuple[str, str]]:
    """Yield (language, message) for each translated message of catalogs, and ("en", message) for each original."""
    originals: set[str] = set()
    for path in sorted(folder.glob("*/LC_MESSAGES/*.mo")):
        language = language_of(path.parent.parent.name)
        if language is None or path.name.startswith("iso_"):  # lists of names
            continue
        try:
            with path.open("rb") as file:
                catalog = gettext.GNUTranslations(file)._catalog  # type: ignore[attr-defined]
        except (OSError, UnicodeDecodeError, ValueError, LookupError):
            continue
        for original, message in catalog.items():
            original = original[0] if isinstance(original, tuple) else original
            if original and message != original and len(message) >= 30:
                yield language, message
                originals.add(original)
    yield from (("en", original) for original in sorted(originals) if len(original) >= 30)


def labeled_texts(folder: Path, length: int, texts: int) -> dict[str, list[str]]:
    """Return up to ``texts`` texts of about ``length`` characters for each language."""
    found: dict[str, set[str]] = defaultdict(set)
    for language, message in messages(folder):
        found[language].add(_MARKUP.sub(" ", message).strip())
    joined: dict[str, list[str]] = {}
    for language, parts in sorted(found.items()):
        ordered, made, text = sorted(parts), [], ""
        random.Random(0).shuffle(ordered)
        for part in ordered:
            text = f"{text} {part}".strip()
            if len(text) >= length:
                made.append(text[:length])
                text = ""
            if len(made) == texts:
                break
        if len(made) >= min(texts, 10):
            joined[language] = made
    return joined


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--locale", type=Path, default=Path("/usr/share/locale"))
    parser.add_argument("--texts", type=int, default=40, help="texts per language and length")
    options = parser.parse_args()
    step = Language(LanguageSpec(step="language", keep=("en",)))
    print(
        "length  languages  texts   step  py3langid  by language  kept                 wrong                    texts/s"
    )
    worst: dict[str, tuple[float, str]] = {}
    for length in LENGTHS:
        labeled = labeled_texts(options.locale, length, options.texts)
        pairs = [(language, text) for language, texts in labeled.items() for text in texts]
        before = time.process_time()
        answers = [step.classify(text) for _, text in pairs]
        seconds = time.process_time() - before
        right = [answer == language for (language, _), (answer, _) in zip(pairs, answers, strict=True)]
        library = [step.identifier.classify(text)[0] == language for language, text in pairs]
        by_language: dict[str, list[bool]] = defaultdict(list)
        wrong: dict[str, list[str]] = defaultdict(list)
        for (language, _), (answer, _), ok in zip(pairs, answers, right, strict=True):
            by_language[language].append(ok)
            wrong[language] += [] if ok else [answer]
        mean = sum(sum(one) / len(one) for one in by_language.values()) / len(by_language)
        kept = [
            [ok for ok, (_, p) in zip(right, answers, strict=True) if p >= least] for least in (0.3, 0.5, 0.65, 0.8)
        ]
        stays = "/".join(f"{len(one) / len(right):.2f}" for one in kept)
        errs = "/".join(f"{1 - share(one):.3f}" for one in kept)
        print(
            f"{length:6} {len(labeled):10} {len(pairs):6}  {share(right):.3f}  {share(library):9.3f}  {mean:11.3f}  "
            f"{stays}  {errs}  {len(pairs) / seconds:.0f}"
        )
        if length == 550:
            worst = {
                language: (share(oks), max(set(wrong[language]), key=wrong[language].count) if wrong[language] else "")
                for language, oks in by_language.items()
            }
    low = sorted((accuracy, language, other) for language, (accuracy, other) in worst.items())[:12]
    print("least at 550 characters:", ", ".join(f"{name} {accuracy:.2f} ({other})" for accuracy, name, other in low))


def share(values: list[bool]) -> float:
    """Return the share of true values; 0 of none."""
    return sum(values) / len(values) if values else 0.0


if __name__ == "__main__":
    main()
