"""The texts of tokenizers of other libraries that cannot be used."""

from scaletrain_cli.reasons import Texts

_OTHER = ("Use a tokenizer.json of this tokenizer with kind: file",)

TEXTS: Texts = {
    "unusable": "data.tokenizer.path = {path}: {problem}",
    "file-unreadable": "{path} is not JSON that can be read: {error}",
    "files-not-valid": "tokenizer_config.json and the files of special tokens beside it are not valid: {error}",
    "id-differs": (
        "tokenizer_config.json or added_tokens.json states {token} as token {stated}, but it gets the id {id}",
        "Save the tokenizer with transformers, so that its tokenizer.json has the token with the id of the weights",
    ),
    "setting-differs": (
        "tokenizer_config.json has {key} = {given}; with this tokenizer.json only {allowed} gives the same tokens in "
        "transformers 4 and 5",
        "Set {key} to {allowed}, or state what you want in tokenizer.json itself",
    ),
    "class-differs": (
        "the files beside tokenizer.json have the class {class}, with which transformers 4, 5 or both may split texts "
        "in another way than tokenizer.json says",
        "Keep the tokens of tokenizer.json with data.tokenizer.tokenizer_class: PreTrainedTokenizerFast, which exports "
        "state, or take those of the installed transformers by "
        "AutoTokenizer.from_pretrained('{folder}').save_pretrained(FOLDER) and data.tokenizer.path: FOLDER/"
        "tokenizer.json",
    ),
    "library-differs": (
        "has the tokens of the library sentencepiece, and AutoTokenizer has those of the class that the files beside "
        "it state, {class}",
        "Write a tokenizer.json by AutoTokenizer.from_pretrained('{folder}').save_pretrained('{folder}'), and use it "
        "with data.tokenizer.kind: file",
    ),
    "ids-differ": ("gives other tokens as a tokenizer.json than {library} does, for {text}", *_OTHER),
    "not-sentencepiece": "is no model of SentencePiece: {error}",
    "spaces": "is a SentencePiece model with spaces at the end of words, spaces that stay, or unused pieces",
    "model-type": "is a SentencePiece model of type {type}; convertible are 1 (unigram) and 2 (BPE)",
    "not-tiktoken": "line {line} of a tiktoken file must have a token in base64 and its rank",
    "tiktoken-incomplete": "a tiktoken file must have all single bytes, and each rank once",
    "special-id-taken": "the id {id} of the special token {token} is that of another token",
    "pattern-invalid": "data.tokenizer.pattern is not valid: {error}",
}
