"""The texts of tokenizers of other libraries that cannot be used."""

from __future__ import annotations

from scaletrain_cli.reasons import Text

_OTHER = ("Use a tokenizer.json of this tokenizer with kind: file",)

TEXTS: dict[str, Text] = {
    "unusable": Text("data.tokenizer.path = {path}: {problem}"),
    "ids-differ": Text("gives other tokens as a tokenizer.json than {library} does, for {text}", _OTHER),
    "not-sentencepiece": Text("is no model of SentencePiece: {error}"),
    "spaces": Text("is a SentencePiece model with spaces at the end of words, spaces that stay, or unused pieces"),
    "model-type": Text("is a SentencePiece model of type {type}; convertible are 1 (unigram) and 2 (BPE)"),
    "not-tiktoken": Text("line {line} of a tiktoken file must have a token in base64 and its rank"),
    "tiktoken-incomplete": Text("a tiktoken file must have all single bytes, and each rank once"),
    "special-id-taken": Text("the id {id} of the special token {token} is that of another token"),
    "pattern-invalid": Text("data.tokenizer.pattern is not valid: {error}"),
}
