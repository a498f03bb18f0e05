import pytest

from tests.spec.samples import SPEC, error, load, problems


@pytest.mark.parametrize(
    ("line", "expected"),
    [("lr: 3e-4", 3e-4), ("lr: 3.0e-4", 3e-4), ("lr: 1E-3", 1e-3), ("lr: 0.001", 1e-3), ("lr: 1", 1.0)],
)
def test_a_learning_rate_is_a_number_in_any_notation(line: str, expected: float) -> None:
    assert load(f"{SPEC}  optimizer: {{{line}}}\n").training.optimizer.lr == expected


@pytest.mark.parametrize(
    ("word", "expected"),
    [("yes", True), ("no", False), ("on", True), ("off", False), ("True", True), ("FALSE", False), ("true", True)],
)
def test_a_boolean_accepts_the_words_of_yaml_1_1(word: str, expected: bool) -> None:
    assert load(f"{SPEC}  compile: {word}\n").training.compile is expected


@pytest.mark.parametrize("word", ["no", "on", "y", "12:30:00", "2024-01-01", "1e5", "null_", "~a", "0x"])
def test_a_name_that_looks_like_another_type_stays_text_or_is_rejected(word: str) -> None:
    text = SPEC.replace("name: sample", f"name: {word}")
    if word == "1e5":
        assert [one.message for one in problems(text)] == ["must be text."]
    else:
        assert load(text).name == word


def test_an_anchored_true_is_not_the_number_1() -> None:
    text = f"{SPEC}  compile: &yes true\nevaluation: {{every: *yes}}\n"
    assert [(one.key, one.message) for one in problems(text)] == [("evaluation.every", "must be a whole number.")]


def test_anchors_aliases_and_merge_keys_work() -> None:
    text = SPEC.replace("hidden_size: 64", "hidden_size: &width 64").replace("seq_len: 32", "seq_len: *width")
    text += "evaluation: &often {every: 3}\n"
    assert load(text).model.seq_len == 64
    keys = {one.key for one in problems(text + "guard: {<<: *often}\n")}
    assert keys == {"guard.every"}


@pytest.mark.parametrize("section", ["layout:", "layout: {}", "layout: ~", "layout:\n  # zero_stage: 3", "env:"])
def test_a_section_without_keys_has_its_defaults(section: str) -> None:
    assert load(f"{SPEC}{section}\n") == load(SPEC)


def test_a_byte_order_mark_and_windows_line_ends_are_accepted() -> None:
    assert load(("\ufeff" + SPEC).replace("\n", "\r\n")) == load(SPEC)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "run.yaml: a run spec is a mapping of sections. Start with `schema: scaletrain/v1`"),
        ("# nothing\n", "run.yaml: a run spec is a mapping of sections."),
        ("- a\n", "run.yaml: a run spec is a mapping of sections."),
        ("just words", "run.yaml: a run spec is a mapping of sections."),
        ("a: 1\n\tb: 2\n", "run.yaml:2: while scanning for the next token found character '\\t'"),
        (f"{SPEC}name: again\n", 'run.yaml:18: while constructing a mapping found duplicate key "name"'),
        (f"{SPEC}---\na: 1\n", "run.yaml:18: expected a single document in the stream but found another document."),
        (f"{SPEC}a: *nowhere\n", "run.yaml:18: found undefined alias 'nowhere'."),
        (f"{SPEC}a: 1\nb: 2026-13-45\n", "run.yaml:19: month must be in 1..12."),
        (f"{SPEC}a: {'9' * 5000}\n", "run.yaml:18: contains a number of more than 4300 digits."),
        (SPEC.replace("name: sample", "name: !!binary aGk="), "name: is binary (!!binary), and must be text."),
        (f"{SPEC}a: [1\n", "run.yaml:19: while parsing a flow sequence"),
        (f"{SPEC}a: \x07\n", "run.yaml:18: contains a character that YAML forbids"),
        (f"{SPEC}a: 2020-99-99\n", "month must be in 1..12."),
        (f"{SPEC}a: {'[' * 500_000}\n", "is nested too deeply."),
        (f"{SPEC}a:\n  {'- ' * 400_000}\n", "is nested too deeply."),
        (f"{SPEC}a: {'{b: ' * 50}1{'}' * 50}\n", "run.yaml:18: is nested too deeply."),
        ("a: &a [*a]\n", "an alias stands within"),
        ("a: &a\n  b: *a\n", "an alias stands within"),
    ],
)
def test_invalid_yaml_is_rejected_with_its_line(text: str, expected: str) -> None:
    assert expected in str(error(text))


def test_a_yaml_bomb_is_rejected_before_it_is_expanded() -> None:
    levels = "\n".join(f"l{n}: &l{n} [{', '.join([f'*l{n - 1}'] * 10)}]" for n in range(1, 12))
    assert "contains too many values for a run spec." in str(error(f"l0: &l0 [1, 2]\n{levels}\n"))


def test_surrogate_pairs_are_joined() -> None:
    assert load(SPEC.replace("name: sample", 'name: "\\ud83d\\ude00"')).name == "\U0001f600"
    assert {one.key for one in problems(f'{SPEC}"\\ud83d\\ude00": 1\n')} == {"\\U0001f600"}
    assert {one.key for one in problems(f'{SPEC}"\\ud83d": 1\n')} == {"\\\\ud83d"}


@pytest.mark.parametrize("value", ["!!python/object:os.system 3", "!mine 3", "!!binary aGVsbG8=", "!!set {a, b}"])
def test_yaml_tags_create_plain_data_only(value: str) -> None:
    assert {one.key for one in problems(f"{SPEC}x: {value}\n")} == {"x"}
