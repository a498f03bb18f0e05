"""Documents with planted duplicates of known similarity, and similarity as plain Python computes it."""

import random
import unicodedata
from collections.abc import Iterator
from functools import lru_cache, partial
from pathlib import Path

from scaletrain_cli.data.drafts import remove_drafts
from scaletrain_cli.data.duplicates import PHASES, Corpus, Texts, remove_phases, run_job
from scaletrain_cli.data.pipeline.schedule import Workers
from scaletrain_cli.safe_files import make_folder
from tests.data.worker_jobs import run_jobs

NGRAM = 5
_VOCABULARY = 50_000
_WITHOUT_SPACES = ((0x3040, 0x30FF), (0x4E00, 0x9FFF), (0x0E00, 0x0EFF))


def plain_words(text: str) -> list[str]:
    """Return the words that shingles are made of, character by character."""
    words, word = [], ""
    for character in unicodedata.normalize("NFKD", text).lower():
        category = unicodedata.category(character)
        if category in ("Mn", "Me", "Cf"):
            continue
        own = any(first <= ord(character) <= last for first, last in _WITHOUT_SPACES) and category[0] in "LM"
        if category[0] in "PSZ" or category == "Cc" or own:
            words += [word, character if own else ""]
            word = ""
        elif category == "Nd":
            word += "" if word.endswith("0") else "0"
        else:
            word += character
    return [word for word in [*words, word] if word]


@lru_cache(maxsize=256)
def plain_shingles(text: str, ngram: int = NGRAM) -> set[tuple[str, ...]]:
    words = plain_words(text)
    return {tuple(words[start : start + ngram]) for start in range(len(words) - ngram + 1)}


def plain_similarity(first: str, second: str, ngram: int = NGRAM) -> float:
    left, right = plain_shingles(first, ngram), plain_shingles(second, ngram)
    return len(left & right) / len(left | right)


class PlantedTexts:
    """The texts of tasks of ``per_task`` documents; document i is a function of the seed and i alone.

    Document i of every 10 with i % 10 in 1, 2, 3 is a copy of the document before its group with its end replaced, to a
    Jaccard similarity near 0.7, 0.8 and 0.9; 4 is the same text, and 5 the same words in other case and punctuation.
    """

    def __init__(self, per_task: int, words: int = 150, seed: int = 0) -> None:
        self.per_task, self.words, self.seed = per_task, words, seed

    def __call__(self, task: int) -> Iterator[tuple[int, str]]:
        for index in range(self.per_task):
            yield index, self.text(task * self.per_task + index)

    def text(self, number: int) -> str:
        kind = number % 10
        if kind in SIMILARITIES:
            base = self._words_of(number - kind)
            shingles = len(base) - NGRAM + 1
            # A replaced end leaves c of s shingles in common: J = c / (2 s - c).
            common = -int(-2 * shingles * SIMILARITIES[kind] // (1 + SIMILARITIES[kind]))
            kept = common + NGRAM - 1
            return " ".join(base[:kept] + self._words_of(number)[kept:])
        if kind == 4:
            return "  ".join(self._words_of(number - 4)) + "\n"
        if kind == 5:
            return ", ".join(self._words_of(number - 5)).upper() + "."
        return " ".join(self._words_of(number))

    def _words_of(self, number: int) -> list[str]:
        return _random_words(number, self.words, self.seed)


@lru_cache(maxsize=1000)
def _random_words(number: int, words: int, seed: int) -> list[str]:
    generator = random.Random(seed * 1_000_003 + number)
    count = words + generator.randrange(words // 2) - words // 4 if number % 10 > 5 else words
    return [f"w{_letters(generator.randrange(_VOCABULARY))}" for _ in range(count)]


SIMILARITIES = {1: 0.7, 2: 0.8, 3: 0.9}


def _letters(number: int) -> str:
    """Return a number in letters, as digits would all become the same."""
    letters = ""
    while number:
        number, digit = divmod(number, 26)
        letters += chr(97 + digit)
    return letters


class ListedTexts:
    """The given texts, by task."""

    def __init__(self, *tasks: list[str]) -> None:
        self.tasks = tasks

    def __call__(self, task: int) -> Iterator[tuple[int, str]]:
        yield from enumerate(self.tasks[task])


def content(folder: Path) -> dict[str, bytes]:
    """Return the bytes of all files below a folder, by relative path."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def deduplicate(corpus: Corpus, texts: Texts, workers: int = 1, *, keep_phases: bool = False) -> None:
    """Run all phases, in ``workers`` processes, and go on where an earlier call was stopped."""
    if not corpus.report.exists():
        make_folder(corpus.folder)
        remove_drafts(corpus.folder, lambda _owner: True)
        with Workers(workers) as pool:
            for number, phase in enumerate(PHASES):
                for _ in run_jobs(pool, partial(_run_job, corpus, number, texts), range(phase.jobs(corpus))):
                    pass
    if not keep_phases:
        remove_phases(corpus)


def _run_job(corpus: Corpus, phase: int, texts: Texts, job: int) -> None:
    run_job(corpus, phase, job, texts)
