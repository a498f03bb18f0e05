"""Words, shingles and hashes of a text, against plain Python."""

import random

import numpy as np
import pytest

from scaletrain_cli.data.duplicates import signatures
from scaletrain_cli.data.duplicates.signatures import (
    band_keys,
    exact_hash,
    minhash,
    shingles_of,
    similarity_of,
    sketch_similarity,
    words_hash,
    words_of,
)
from scaletrain_cli.spec.preparation import DuplicatesSpec
from tests.data.duplicates.planted import plain_shingles, plain_similarity, plain_words
from tests.data.marks import normalized_runs

TEXTS = [
    "",
    " \n\t",
    "?!",
    "The Café in Zürich: 12,345.67 and x1y22z, isn't it? foo_bar (a+b)=c",
    "\ufb01ne so\u00adft zero\u200bwidth \u0130stanbul STRASSE \u00e9 e\u0301 \u2460\u00bd\u00b2",
    "日本語のテスト。中文 mixed 文字ABC12日3",
    "ภาษาไทย and नमस्ते दुनिया 한국어 문장 ٣٤٥ العربية",
    "12 34x56 7.8.9 00",
    "a" * 100 + " " + "b" * 5000,
    "\x00control\x1f\x7f\x85next",
]


@pytest.mark.parametrize("text", TEXTS)
def test_words_are_those_of_plain_python(text: str) -> None:
    expected = plain_words(text)
    found = words_of(text).tolist()
    assert [expected.index(word) for word in expected] == [found.index(word) for word in found]
    assert found == [words_of(word).tolist()[0] for word in expected]  # a word has the same hash anywhere


def test_random_texts_have_the_shingles_and_similarities_of_plain_python() -> None:
    generator = random.Random(5)
    alphabet = "aab cD  .é\u03012 7日_\n\u00ad"
    for _ in range(100):
        first, second = ("".join(generator.choices(alphabet, k=200)) for _ in range(2))
        sets = [shingles_of(words_of(text), 2) for text in (first, second)]
        assert [len(found) for found in sets] == [len(plain_shingles(text, 2)) for text in (first, second)]
        common, together = similarity_of(*sets)
        assert common / together == plain_similarity(first, second, 2)


def test_a_long_text_has_the_same_words_block_by_block(monkeypatch: pytest.MonkeyPatch) -> None:
    text = " ".join(TEXTS) * 20
    whole = words_of(text)
    monkeypatch.setattr(signatures, "_BLOCK_CHARACTERS", 5100)
    assert (words_of(text) == whole).all()
    assert len(words_of("x" * 100_000)) == 10  # a word without end is cut after two blocks


def test_the_exact_hash_ignores_white_space_and_composition_alone() -> None:
    assert exact_hash(" caf\u00e9\n\nnoir ") == exact_hash("cafe\u0301 noir")
    assert len({exact_hash(text) for text in ("a b", "A b", "a, b", "ab", "a 1", "a 2", "")}) == 7


def test_many_combining_marks_in_a_row_take_linear_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Normalization alone would take minutes."""
    text = "one twé" + "\u0316\u0301" * 100_000 + " three"
    runs = normalized_runs(monkeypatch)
    assert words_of(text).tolist() == words_of("one twe three").tolist()
    assert exact_hash(text) != exact_hash("one twe three")
    assert len(runs) == 2
    assert max(runs) <= 31  # of the decomposed é, one more


def test_shorter_texts_have_no_shingles() -> None:
    assert len(shingles_of(words_of("one two three four"), 5)) == 0
    assert len(shingles_of(words_of("one two three four five"), 5)) == 1


def test_minhash_estimates_similarity_without_bias() -> None:
    """The standard deviation of the estimate from k hashes is sqrt(J (1 - J) / k)."""
    settings = DuplicatesSpec(step="duplicates", bands=16, rows=8)
    generator = np.random.default_rng(0)
    for similarity in (0.5, 0.8, 0.9):
        pairs, size = 400, 300
        common = round(2 * size * similarity / (1 + similarity))
        sets = generator.integers(0, 2**64, size=(2 * pairs, size), dtype=np.uint64)
        sets[pairs:, :common] = sets[:pairs, :common]
        exact = common / (2 * size - common)
        signatures = minhash(list(sets), settings)
        deviation = np.sqrt(exact * (1 - exact) / 128)
        for estimates in (
            (signatures[:pairs] == signatures[pairs:]).mean(axis=1),
            sketch_similarity(signatures[:pairs].astype(np.uint8), signatures[pairs:].astype(np.uint8)),
        ):
            assert abs(estimates.mean() - exact) < 4 * deviation / np.sqrt(pairs)
            assert 0.75 * deviation < estimates.std() < 1.25 * deviation
        keys = band_keys(signatures, settings)
        compared = (keys[:pairs] == keys[pairs:]).any(axis=1).mean()
        expected = settings.recall_at(exact)
        assert abs(compared - expected) < 0.02 + 4 * np.sqrt(expected * (1 - expected) / pairs)


def test_hashes_are_the_same_on_every_machine() -> None:
    """Files of signatures are used by later versions, which raise VERSION if one of these values changes."""
    words = words_of("The quick brown fox jumps over 13 lazy dogs in Zürich")
    settings = DuplicatesSpec(step="duplicates")
    signature = minhash([shingles_of(words, 5)], settings)
    assert exact_hash("one two").hex() == "7689d1ceb0c156d213d3370ce8c62d22"
    assert words_hash(words).hex() == "74ecef13898b8893284780ba0732c896"
    assert signature[0, :4].tolist() == [3323611332, 3247870803, 3363115717, 2824948388]
    assert band_keys(signature, settings)[0, :2].tolist() == [
        9655975263329696022,
        1783564588551943569,
    ]
