"""The steps of ``data.prepare`` that look at one document at a time: what each changes or removes, and its limits.

The defaults of the quality rules are those of their papers. ``null`` turns a limit off.
"""

from collections.abc import Collection, Iterator, Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag

from scaletrain_cli.spec.quantities import Matching, Share, SomeShare, Text, Whole, WholeOrZero, not_a_switch
from scaletrain_cli.spec.section import LEFT_OUT, Section
from scaletrain_cli.text import did_you_mean

# From nothing to everything, both included: a share of the lines, of the words or of the characters of a document.
_Hundred = Annotated[int, Field(strict=True, ge=1, le=100)]
Number = Annotated[float, BeforeValidator(not_a_switch), Field(ge=-1e12, le=1e12)]
Language = Annotated[str, Matching(r"[a-z]{2,3}", 3, "must be a language code of ISO 639, such as en")]
# What py3langid 0.4 tells apart; zxx is no language. A test compares.
LANGUAGES = (
    "ace af am an ar ary arz as az ba bcl be bg bn br bs ca crh cs cy da de dz el en eo es et eu ext fa fi fo fr "
    "fuv fy ga gcf gcr gd gl gom grc gu gug guw ha hbo he hi hr ht hu hy id ig is it ja jv ka kab kik kk km kn ko "
    "ku ky la lb lg lij ln lo lt ltg lv mg mk ml mn mr ms mt my ne nl nn no nso oc om or pa pcm pl ps pt qu ro ru "
    "rw sa sdh se si sk sl sn so sq sr st sv sw ta te tg th tk tl tr tt ug uk ur uz uzs vec vi vo wa wuu xh yo "
    "yue zh zu zxx"
).split()
_Texts = Annotated[tuple[Text, ...], Field(min_length=1, max_length=1000)]


class PreparationStep(Section):
    """The base of all steps: the sources that a step applies to."""

    only: _Texts | None = Field(default=None, description="names of sources that the step applies to; null: all")

    def _ineffective(self, setting: str, *keys: str) -> Iterator[tuple[str, str]]:
        """Yield (key, message) for each of ``keys`` that differs from its default although ``setting`` ignores it."""
        for key in keys:
            if getattr(self, key) != type(self).model_fields[key].default:
                yield key, f"has no effect with {setting}. Remove it."


class NormalizationSpec(PreparationStep):
    """One form for the same text: line ends are ``\\n``, and invisible characters that carry no text are removed."""

    step: Literal["normalization"]
    unicode: Literal["NFC", "NFKC", "none"] = Field(
        default="NFC",
        description="Unicode normalization form. NFKC also replaces ligatures, full-width letters and "
        "superscripts; none: leave as it is",
    )
    control_characters: Literal["remove", "space", "keep"] = Field(
        default="remove",
        description="control characters other than line ends and tabs, and code points that Unicode excludes from text",
    )
    zero_width: Literal["remove", "keep"] = Field(
        default="remove",
        description="byte order marks, zero-width spaces, word joiners and soft hyphens; joiners within words stay",
    )
    line_ends: Literal["lf", "keep"] = Field(default="lf", description="lf: replace CR LF, CR, NEL, LS and PS by LF")


class LanguageSpec(PreparationStep):
    """Keep documents in some languages, by the most likely language of their beginning."""

    step: Literal["language"]
    keep: Annotated[tuple[Language, ...], Field(min_length=1, max_length=200)] = Field(
        description="codes of ISO 639; documents in other languages are removed"
    )
    min_probability: Share = Field(default=0.65, description="least probability of the most likely language")
    model: Literal["py3langid"] = Field(default="py3langid", description="142 languages, installed with the extra data")
    characters: Whole = Field(
        default=2000, description="number of characters at the beginning that decide the language"
    )

    def inconsistencies(self) -> Iterator[tuple[str, str]]:
        for language in self.keep:
            if language not in LANGUAGES:
                guess = did_you_mean(language, LANGUAGES)
                yield "keep", f"{language} is no language of {self.model}. {guess}Use some of {', '.join(LANGUAGES)}."


class _QualitySpec(PreparationStep):
    step: Literal["quality"]


class GopherQualitySpec(_QualitySpec):
    """The quality rules of Gopher (arXiv 2112.11446, appendix A.1.1). A word is a text between whitespace."""

    rules: Literal["gopher_quality"]
    min_words: WholeOrZero | None = Field(default=50, description="words with a letter or a digit")
    max_words: Whole | None = Field(default=100_000, description="words, as for min_words")
    min_mean_word_length: Number | None = Field(default=3.0, description="characters, with adjacent punctuation")
    max_mean_word_length: Number | None = Field(default=10.0, description="characters, as for min_mean_word_length")
    max_hashes_per_word: Number | None = Field(default=0.1, description="hash signs per word")
    max_ellipses_per_word: Number | None = Field(default=0.1, description="ellipses per word")
    max_bullet_lines: Share | None = Field(default=0.9, description="share of the lines that begin with a bullet")
    max_ellipsis_lines: Share | None = Field(default=0.3, description="share of the lines that end with an ellipsis")
    min_alphabetic_words: Share | None = Field(default=0.8, description="share of the words with a letter")
    min_stop_words: WholeOrZero | None = Field(default=2, description="number of different stop words")
    stop_words: _Texts = Field(
        default=("the", "be", "to", "of", "and", "that", "have", "with"), description="words that min_stop_words counts"
    )
    bullets: _Texts = Field(
        default=("•", "‣", "▪", "◦", "●", "-", "*"), description="what a bullet is, at the beginning of a line"
    )

    def inconsistencies(self) -> Iterator[tuple[str, str]]:
        for low, high in (("min_words", "max_words"), ("min_mean_word_length", "max_mean_word_length")):
            least, most = getattr(self, low), getattr(self, high)
            if least is not None and most is not None and least > most:
                yield low, f"must be at most {high}, which is {most}."
        if self.min_stop_words is not None and self.min_stop_words > len(set(self.stop_words)):
            yield "min_stop_words", f"must be at most {len(set(self.stop_words))}, the number of stop_words."


class GopherRepetitionSpec(_QualitySpec):
    """The repetition rules of Gopher (arXiv 2112.11446, table A1). Whitespace around words and lines does not count."""

    rules: Literal["gopher_repetition"]
    max_duplicate_lines: Share | None = Field(default=0.30, description="share of the lines that occurred before")
    max_duplicate_paragraphs: Share | None = Field(
        default=0.30, description="share of the paragraphs that occurred before"
    )
    max_duplicate_line_characters: Share | None = Field(
        default=0.20, description="share of the characters in such lines"
    )
    max_duplicate_paragraph_characters: Share | None = Field(
        default=0.20, description="share of the characters in such paragraphs"
    )
    max_top_2gram: Share | None = Field(
        default=0.20, description="share of the characters in the pair of words that occurs most often"
    )
    max_top_3gram: Share | None = Field(default=0.18, description="the same for 3 words in a row")
    max_top_4gram: Share | None = Field(default=0.16, description="the same for 4 words in a row")
    max_duplicate_5grams: Share | None = Field(
        default=0.15, description="share of the characters in sequences of 5 words that occurred before"
    )
    max_duplicate_6grams: Share | None = Field(default=0.14, description="the same for 6 words")
    max_duplicate_7grams: Share | None = Field(default=0.13, description="the same for 7 words")
    max_duplicate_8grams: Share | None = Field(default=0.12, description="the same for 8 words")
    max_duplicate_9grams: Share | None = Field(default=0.11, description="the same for 9 words")
    max_duplicate_10grams: Share | None = Field(default=0.10, description="the same for 10 words")


class C4Spec(_QualitySpec):
    """The rules of C4 (JMLR 21/140, section 2.2): they drop lines, and whole documents."""

    rules: Literal["c4"]
    end_marks: _Texts | None = Field(
        default=(".", "!", "?", '"', "'", "”", "’"),
        description="a line must end with one of these, and not with an ellipsis; null: with anything",
    )
    min_words_per_line: WholeOrZero | None = Field(default=3, description="a line of fewer words is dropped")
    max_word_length: Whole | None = Field(default=1000, description="characters; a line with a longer word is dropped")
    line_phrases: tuple[Text, ...] = Field(
        default=(
            "javascript",
            "terms of use",
            "privacy policy",
            "cookie policy",
            "uses cookies",
            "use of cookies",
            "use cookies",
        ),
        max_length=1000,
        description="a line with one of these is dropped, in any case",
    )
    document_phrases: tuple[Text, ...] = Field(
        default=("lorem ipsum", "{"),
        max_length=1000,
        description="a document with one of these is removed, in any case",
    )
    bad_words: Text | None = Field(
        default=None,
        description="file with a word or phrase on each line; a document with one of them is removed, in any case",
    )
    remove_citations: Annotated[bool, Field(strict=True)] = Field(
        default=True, description="remove [1], [edit] and [citation needed] from lines"
    )
    min_sentences: WholeOrZero | None = Field(default=5, description="sentences in the lines that are left")
    min_paragraphs: WholeOrZero | None = Field(default=None, description="lines of min_paragraph_length; 3 in mC4")
    min_paragraph_length: Whole = Field(default=200, description="characters; has an effect with min_paragraphs")

    def inconsistencies(self) -> Iterator[tuple[str, str]]:
        if self.min_paragraphs is None:
            yield from self._ineffective("min_paragraphs: null", "min_paragraph_length")


class FineWebSpec(_QualitySpec):
    """The rules that FineWeb adds to those of Gopher and C4 (arXiv 2406.17557, section 3.6)."""

    rules: Literal["fineweb"]
    min_punctuated_lines: Share | None = Field(
        default=0.12, description="a document is removed if this share of its lines, or less, ends with punctuation"
    )
    max_duplicate_line_characters: SomeShare | None = Field(
        default=0.1, description="removed from this share on; 0.1 in the paper, 0.01 in the published pipeline"
    )
    max_short_lines: SomeShare | None = Field(default=0.67, description="removed from this share on")
    short_line_length: Whole = Field(default=30, description="a line of fewer characters is short")
    max_newlines_per_word: Number | None = Field(
        default=None, description="0.3 in the published pipeline, not in the paper"
    )


class ScoreSpec(PreparationStep):
    """Keep documents by a number in a column of their rows, such as the score of a classifier."""

    step: Literal["score"]
    column: Text = Field(description="column with the number")
    min: Number | None = Field(default=None, description="documents with a smaller number are removed")
    max: Number | None = Field(default=None, description="documents with a larger number are removed")

    def inconsistencies(self) -> Iterator[tuple[str, str]]:
        if self.min is None and self.max is None:
            yield "min", "is required unless max is given."
        elif self.min is not None and self.max is not None and self.min > self.max:
            yield "min", f"must be at most max, which is {self.max}."


class ContaminationSpec(PreparationStep):
    """Remove texts of evaluation files: sequences of words that occur in both (GPT-3, arXiv 2005.14165, appendix C)."""

    step: Literal["contamination"]
    files: Annotated[_Texts, Field(description="txt or jsonl files or globs; a line of a jsonl file is one item")]
    fields: _Texts = Field(default=("text",), description="columns of jsonl files; each is an item of its own")
    ngram: _Hundred = Field(default=13, description="words; shorter items match as a whole")
    min_item_words: Whole = Field(default=8, description="shorter items are left out: they occur everywhere")
    action: Literal["cut", "drop"] = Field(
        default="cut", description="cut: remove the match with its surroundings; drop: remove the document"
    )
    margin: WholeOrZero = Field(default=200, description="characters that are cut on each side of a match")
    min_piece: WholeOrZero = Field(default=200, description="shorter pieces between cuts are removed too")
    max_pieces: Whole = Field(default=10, description="a document that is cut into more pieces is removed")
    min_matching_share: Share | None = Field(
        default=None,
        description="drop only documents with at least this share of matching n-grams (PaLM: 0.7 with ngram: 8); "
        "null: any match",
    )

    def inconsistencies(self) -> Iterator[tuple[str, str]]:
        if self.action == "drop":
            yield from self._ineffective("action: drop", "margin", "min_piece", "max_pieces")
        else:
            yield from self._ineffective("action: cut", "min_matching_share")
        if self.min_item_words > self.ngram:
            yield "min_item_words", f"must be at most ngram, which is {self.ngram}."


class DuplicatesSpec(PreparationStep):
    """Keep one of all documents that are the same, or nearly the same: the first in the order of the sources.

    Near duplicates have at least ``similarity`` of their sequences of words in common (Jaccard, verified exactly). The
    pairs to verify are found by MinHash: one of similarity s with probability 1 - (1 - s^rows)^bands.
    """

    step: Literal["duplicates"]
    exact: bool = Field(default=True, description="texts that differ in white space and Unicode composition alone")
    near: bool = Field(default=True, description="texts that share most sequences of words, without case and marks")
    similarity: Annotated[float, BeforeValidator(not_a_switch), Field(ge=0.3, le=1)] = Field(
        default=0.8, description="least Jaccard similarity of near duplicates"
    )
    ngram: _Hundred = Field(default=5, description="words of a sequence; shorter texts are compared exactly")
    bands: Annotated[int, Field(strict=True, ge=1, le=1000)] = Field(
        default=20, description="more bands find more pairs, and need more space"
    )
    rows: _Hundred = Field(default=8, description="hashes of a band; more find fewer pairs of low similarity")
    across_sources: bool = Field(default=True, description="false: duplicates are removed within each source alone")

    def inconsistencies(self) -> Iterator[tuple[str, str]]:
        if not self.exact and not self.near:
            yield "exact", "must be true unless near is, or the step removes nothing."
        if not self.near:
            yield from self._ineffective("near: false", "similarity", "ngram", "bands", "rows")
        else:
            recall = self.recall_at(self.similarity)
            if recall < 0.5:
                yield (
                    "bands",
                    f"with {self.rows} rows find {recall:.0%} of the pairs of similarity {self.similarity:g}. Use more "
                    "bands or fewer rows.",
                )

    def recall_at(self, similarity: float) -> float:
        """Return the probability that two documents of a Jaccard similarity are compared: 1 - (1 - s^rows)^bands."""
        return float(1 - (1 - similarity**self.rows) ** self.bands)


IDENTIFIERS = ("email", "ip", "phone", "key")
Identifier = Literal["email", "ip", "phone", "key"]


class PlaceholdersSpec(Section):
    """The texts that replace identifiers."""

    email: Text = Field(default="<EMAIL>", description="of a mail address")
    ip: Text = Field(default="<IP_ADDRESS>", description="of a public IP address")
    phone: Text = Field(default="<PHONE_NUMBER>", description="of a phone number")
    key: Text = Field(default="<KEY>", description="of a secret key or token")


class IdentifiersSpec(PreparationStep):
    """Replace what identifies a person or gives access: mail and public IP addresses, phone numbers, secret keys."""

    step: Literal["identifiers"]
    replace: Annotated[tuple[Identifier, ...], Field(min_length=1, max_length=4)] = Field(
        default=("email", "ip", "key"), description="what is replaced; phone numbers are found least reliably"
    )
    placeholders: PlaceholdersSpec = LEFT_OUT


# By the key step, and those of step: quality by the key rules; duplicates looks at all documents.
STEPS: dict[str, type[PreparationStep]] = {
    "normalization": NormalizationSpec,
    "language": LanguageSpec,
    "score": ScoreSpec,
    "contamination": ContaminationSpec,
    "identifiers": IdentifiersSpec,
}
QUALITY_RULES: dict[str, type[PreparationStep]] = {
    "gopher_quality": GopherQualitySpec,
    "gopher_repetition": GopherRepetitionSpec,
    "c4": C4Spec,
    "fineweb": FineWebSpec,
}


def _step(step: Any) -> str | None:
    name, rules = (
        (step.get("step"), step.get("rules"))
        if isinstance(step, dict)
        else (getattr(step, "step", None), getattr(step, "rules", None))
    )
    if name == "quality":
        return rules if isinstance(rules, str) and rules in QUALITY_RULES else None
    return name if isinstance(name, str) and (name in STEPS or name == "duplicates") else None


# One step of data.prepare, by its keys step and rules.
AnyStep = Annotated[
    Annotated[NormalizationSpec, Tag("normalization")]
    | Annotated[LanguageSpec, Tag("language")]
    | Annotated[GopherQualitySpec, Tag("gopher_quality")]
    | Annotated[GopherRepetitionSpec, Tag("gopher_repetition")]
    | Annotated[C4Spec, Tag("c4")]
    | Annotated[FineWebSpec, Tag("fineweb")]
    | Annotated[ScoreSpec, Tag("score")]
    | Annotated[DuplicatesSpec, Tag("duplicates")]
    | Annotated[ContaminationSpec, Tag("contamination")]
    | Annotated[IdentifiersSpec, Tag("identifiers")],
    Discriminator(
        _step,
        custom_error_type="step_name",
        custom_error_message="must have `step`: normalization, language, quality, score, duplicates, contamination or "
        "identifiers; quality also `rules`: gopher_quality, gopher_repetition, c4 or fineweb",
    ),
]


def preparation_inconsistencies(
    steps: Sequence[PreparationStep], sources: Collection[str]
) -> Iterator[tuple[str, str]]:
    """Yield (key, message) for each setting of steps that contradicts another one, or names no source.

    Keys are relative to the list of steps: ``2.min_words``.
    """
    distinct = len(set(sources)) == len(sources)  # else a name is wrong, and with it those that refer to it
    for number, step in enumerate(steps):
        yield from ((f"{number}.{key}", message) for key, message in step.inconsistencies())
        for name in step.only or ():
            if name not in sources and distinct:
                guess = did_you_mean(name, sources)
                yield f"{number}.only", f"{name} is no source. {guess}Sources: {', '.join(sorted(sources))}."
