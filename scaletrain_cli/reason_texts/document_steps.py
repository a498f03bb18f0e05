"""The texts of the steps that prepare documents: a column that is not there, and evaluation files."""

from scaletrain_cli.reasons import Texts

TEXTS: Texts = {
    "column-missing": (
        "the row has no column {column}, which data.prepare with step: score reads; it has {columns:list}",
        "Change the column, or limit the step to the sources that have it with only",
    ),
    "column-not-number": "the column {column} must be a number, and is {kind}",
    "files-missing": (
        "data.prepare with step: contamination: {pattern} matches no file",
        "Check the path of the evaluation files",
    ),
    "file-unreadable": "{file}: cannot be read: {error}",
    "file-format": "{file}: must be a .txt or .jsonl file, which may be compressed with gzip (.gz)",
    "item-not-object": "{file}:{line}: each line must be a JSON object",
    "item-without-fields": (
        "{file}:{line}: the row has none of the fields {fields:list}; it has {columns:list}",
        "Set fields to the columns with the text of the evaluation",
    ),
    "item-not-text": "{file}:{line}: the field {field} must be text or a list of texts",
    "no-items": (
        "data.prepare with step: contamination: no item of the evaluation files has {words} words",
        "Lower min_item_words, or set fields to the columns with the text",
    ),
    "no-bad-words": "{file}: has no words, which bad_words of step: quality, rules: c4 reads",
    "placeholder-matches": (
        "data.prepare with step: identifiers: the placeholder {placeholder} would be replaced itself",
        "Use a placeholder that is no identifier, such as <EMAIL>",
    ),
}
