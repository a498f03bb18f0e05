import sys

import pytest

from scaletrain_cli.data.steps import Kept, Removed, language
from scaletrain_cli.data.steps.language import Language
from scaletrain_cli.errors import MissingPackageError
from scaletrain_cli.spec.preparation import LANGUAGES
from tests.data.steps.sections import run, step

SENTENCES = {
    "en": "The weather was bad yesterday, so we stayed at home and read the newspaper.",
    "de": "Das Wetter war gestern schlecht, deshalb blieben wir zu Hause und lasen die Zeitung.",
    "fr": "Il faisait mauvais hier, alors nous sommes restés à la maison et avons lu le journal.",
    "es": "Ayer hacía mal tiempo, así que nos quedamos en casa y leímos el periódico.",
    "it": "Ieri il tempo era brutto, quindi siamo rimasti a casa e abbiamo letto il giornale.",
    "pt": "Ontem o tempo estava ruim, então ficamos em casa e lemos o jornal.",
    "nl": "Het weer was gisteren slecht, dus bleven we thuis en lazen we de krant.",
    "sv": "Vädret var dåligt i går, så vi stannade hemma och läste tidningen.",
    "pl": "Wczoraj pogoda była zła, więc zostaliśmy w domu i czytaliśmy gazetę.",
    "cs": "Včera bylo špatné počasí, a tak jsme zůstali doma a četli noviny.",
    "fi": "Eilen sää oli huono, joten jäimme kotiin ja luimme sanomalehteä.",
    "hu": "Tegnap rossz idő volt, ezért otthon maradtunk és újságot olvastunk.",
    "tr": "Dün hava kötüydü, bu yüzden evde kaldık ve gazete okuduk.",
    "ru": "Вчера была плохая погода, поэтому мы остались дома и читали газету.",
    "uk": "Учора була погана погода, тому ми залишилися вдома й читали газету.",
    "el": "Χθες ο καιρός ήταν κακός, γι' αυτό μείναμε στο σπίτι και διαβάσαμε εφημερίδα.",
    "ar": "كان الطقس سيئا أمس، لذلك بقينا في البيت وقرأنا الجريدة.",
    "he": "אתמול מזג האוויר היה גרוע, ולכן נשארנו בבית וקראנו עיתון.",
    "hi": "कल मौसम खराब था, इसलिए हम घर पर रहे और अखबार पढ़ा।",
    "ja": "昨日は天気が悪かったので、家にいて新聞を読みました。",
    "ko": "어제는 날씨가 나빠서 집에서 신문을 읽었습니다.",
    "zh": "昨天天气不好，所以我们待在家里看报纸。",
    "th": "เมื่อวานอากาศไม่ดี เราจึงอยู่บ้านและอ่านหนังสือพิมพ์",
    "vi": "Hôm qua thời tiết xấu nên chúng tôi ở nhà và đọc báo.",
}


@pytest.fixture(scope="module")
def english() -> Language:
    built = step("language", keep=["en"])
    assert isinstance(built, Language)
    return built


def test_labeled_sentences_of_24_languages_are_recognized(english: Language) -> None:
    assert {language: english.classify(3 * text)[0] for language, text in SENTENCES.items()} == {
        language: language for language in SENTENCES
    }
    right = [english.classify(text)[0] == language for language, text in SENTENCES.items()]
    print(f"recognized single sentences: {sum(right)} of {len(right)}")
    assert sum(right) >= 23


def test_a_document_needs_a_kept_language_that_is_likely_enough(english: Language) -> None:
    text = 5 * SENTENCES["en"]
    assert run(english, text) == Kept(text, {"language.en": 1})
    assert run(english, 5 * SENTENCES["de"]) == Removed("language.keep", "de", "en")
    both = step("language", keep=["de", "fr"], min_probability=1)
    assert run(both, text) == Removed("language.keep", "en", "de, fr")
    unlikely = run(both, SENTENCES["de"])
    assert isinstance(unlikely, Removed)
    assert (unlikely.rule, unlikely.limit) == ("language.min_probability", 1)
    assert 0.5 < float(unlikely.measured) < 1


def test_a_text_without_letters_is_of_no_language(english: Language) -> None:
    for text in ("", " \n", "12 34 56", "!?"):
        assert isinstance(run(english, text), Removed)
        assert english.classify(text)[1] < 0.3


def test_the_language_is_that_of_the_beginning(english: Language) -> None:
    assert english.spec.characters == 2000
    english_part = 40 * SENTENCES["en"]
    assert english.classify(english_part + 400 * SENTENCES["ru"]) == english.classify(english_part)


def test_the_spec_knows_the_languages_of_the_model(english: Language) -> None:
    assert sorted(english.identifier.labels) == sorted(LANGUAGES)


def test_the_missing_package_is_named_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "py3langid", None)
    monkeypatch.setattr(language, "_load", language._load.__wrapped__)  # which is kept once it is loaded
    with pytest.raises(MissingPackageError, match=r"step: language needs py3langid .*\[data\]"):
        step("language", keep=["en"])
