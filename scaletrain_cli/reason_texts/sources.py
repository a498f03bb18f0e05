"""The texts of documents and files of a data source that cannot be read."""

from scaletrain_cli.reasons import Texts

_FIELD = ("Set the field of the source to the column with the text",)

TEXTS: Texts = {
    # ---- a document ------------------------------------------------------------------------------------------------
    "utf-16": "is UTF-16 text, and must be UTF-8, as iconv -f UTF-16 -t UTF-8 writes it",
    "not-utf-8": "is not UTF-8 text: {replaced:whole} of {characters:whole} characters cannot be decoded",
    "binary": "contains NUL bytes, so it is not text",
    "too-long": "is longer than {bytes:gib}, the most that a document may have",
    "not-json": "is not JSON: {error} (character {character:whole} of the line)",
    "json-unreadable": "is not JSON that can be read: {error}",
    "not-an-object": "must be a JSON object",
    "no-field": ("has no field {field}; it has {columns:list}", *_FIELD),
    "no-column": (
        "has no column {column}; it has {columns:list}",
        "Correct the column of the step, or list the sources that have it in its key only",
    ),
    "not-text": ("the field {field} must be text, not {type}", *_FIELD),
    "empty": "has no text",
    "id-outside-vocabulary": (
        "has the token {id:whole}, and the tokenizer has {size:whole} tokens",
        "Set data.tokenizer to the tokenizer that made the tokens",
    ),
    "no-end-of-text": (
        "has no end-of-text token ({end_of_text}) within {tokens:whole} tokens",
        "Set data.tokenizer to the tokenizer that made the tokens",
    ),
    # ---- a file ----------------------------------------------------------------------------------------------------
    "damaged": "is not a complete {compression} file: {error}",
    "table-damaged": "cannot be read as a table: {error}",
    "megatron-old": (
        "is an index of the format TNTIDX, which Megatron-LM no longer reads",
        "Prepare the data again with Megatron-LM's tools/preprocess_data.py",
    ),
    "megatron-not-an-index": "is not an index of Megatron-LM (MMIDIDX)",
    "megatron-unknown": "has version {version} and type {dtype}; readable are version 1 and integers of 1 to 8 bytes",
    "megatron-inconsistent": "has an index that contradicts itself",
    "size-differs": "has {bytes:whole} bytes instead of {expected:whole}",
    "ends-early": "ends before the tokens that it should have",
    "npy-with-header": ("is a NumPy file", "Set the format of the source to npy"),
    "npy-without-header": (
        "has no NumPy header",
        "Set the format of the source to raw_uint16 or raw_uint32, if it has bare numbers",
    ),
    "npy-damaged": "cannot be read as a NumPy file: {error}",
    "npy-shape": "must have one dimension of integers, not {dimensions} of {dtype}",
    "library-missing": ("the library {module} is missing", "{command}"),
}
