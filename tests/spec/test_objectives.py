import pytest

from tests.spec.samples import SPEC, load, problem

DPO = ("training.objective=dpo", "data.source=python-docstrings")


@pytest.mark.parametrize(
    ("settings", "key", "why"),
    [
        (("training.label_smoothing=0.1",), "training.label_smoothing", "training.dpo.label_smoothing"),
        (("training.cross_entropy=liger",), "training.cross_entropy", "auto, whole or chunked"),
        (("training.dpo={loss: robust, label_smoothing: 0.5}",), "training.dpo.label_smoothing", "below 0.5"),
        (("model.hidden_dropout=0.1",), "model.hidden_dropout", "no dropout"),
        (("model.attention_dropout=0.1",), "model.attention_dropout", "no dropout"),
    ],
)
def test_settings_that_preference_pairs_cannot_have_are_errors(settings: tuple[str, ...], key: str, why: str) -> None:
    found = problem(SPEC, *DPO, *settings)
    assert key in found
    assert why in found


def test_a_preference_pair_counts_as_two_sequences_of_tokens() -> None:
    text = load(SPEC)
    pairs = load(SPEC, *DPO)
    assert (text.samples, pairs.samples) == ("sequences", "pairs")
    assert pairs.units_per_sample == 2 * text.units_per_sample == 2 * text.transformer.seq_len
