"""--vary: the sets of overrides of a setting."""

import pytest

from scaletrain_cli.errors import UsageError
from scaletrain_cli.spec.source import variants


def test_each_value_is_an_override() -> None:
    assert variants(["layout.zero_stage=1, 2,3"]) == [
        ("layout.zero_stage=1",),
        ("layout.zero_stage=2",),
        ("layout.zero_stage=3",),
    ]
    assert variants([]) == [()]


def test_several_settings_are_combined() -> None:
    assert variants(["a=1,2", "b=x"]) == [("a=1", "b=x"), ("a=2", "b=x")]


def test_commas_within_a_value_do_not_split_it() -> None:
    assert variants(["model={preset: a, seq_len: 8},{preset: b}"]) == [
        ("model={preset: a, seq_len: 8}",),
        ("model={preset: b}",),
    ]
    assert variants(["name='a,b',c"]) == [("name='a,b'",), ("name=c",)]


@pytest.mark.parametrize("setting", ["", "layout.zero_stage", "=1", "a=", "a=1,,2"])
def test_an_invalid_setting_is_rejected(setting: str) -> None:
    with pytest.raises(UsageError, match="--vary"):
        variants([setting])


def test_too_many_variants_are_rejected() -> None:
    with pytest.raises(UsageError, match="more than 24 variants"):
        variants(["a=1,2,3,4,5,6,7,8,9", "b=1,2,3"])
    with pytest.raises(UsageError, match="more than 24 variants"):
        variants(["a=1,2,3,4"] * 40)
