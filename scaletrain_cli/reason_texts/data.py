"""The texts of rows for fine-tuning: their columns, their chat template, and their place in the loss."""

from scaletrain_cli.reasons import Texts

_FORMATS = ("Set data.format and data.fields, or rename the columns",)
_TEMPLATE = ("Set data.chat_template to a Jinja file, or use a tokenizer with a chat template",)
_LACKS = (
    "Use a chat template that writes it, with data.chat_template",
    "Remove it from the rows, or set data.on_bad: skip to leave out such rows",
)
_MARKERS = (
    "Use a template that marks the assistant's text with {{% generation %}} and {{% endgeneration %}}, or "
    "data.loss_on: last_assistant",
)

TEXTS: Texts = {
    "row": ("{where}: {problem}", "Set data.format and data.fields, or repair the row"),
    "row-and-remedy": ("{where}: {problem}", "{remedy}"),
    "bad-document": ("{where}: {problem}", "Correct the file, or set data.on_bad: skip to leave such documents out"),
    "no-usable-document": (
        "no document at the beginning of the files of source {source} can be used; the first one: {where}: {problem}",
        "Correct the source or its settings",
    ),
    "no-documents": ("the files of source {source} have no document", "Correct the path of the source"),
    "image-unreadable": (
        "{place}: the image cannot be decoded: {problem}",
        "Start a new run with data.on_bad: skip, which decodes all images first and leaves such ones out",
    ),
    "image-missing": (
        "{place}: there is no such file",
        "Set data.images.folder to the folder that the paths of rows begin in",
        "Set data.on_bad: skip to leave out rows with bad images",
    ),
    "requires-images": ("{option} is for images, and the spec trains on text or rows", "Remove the option"),
    "validation-or-step": "--validation and --step exclude each other: steps read the training split",
    "images-without-page": ("--html is for reports of text", "Use --json for the whole report of images"),
    "of-batch": (
        "batch {batch:whole}: {cause}",
        "Or resume without this batch: add [{batch}, {batch}] to data.skip, as in scaletrain resume RUN --set "
        "'data.skip=[[{batch}, {batch}]]'; the image comes again in each pass over its source",
    ),
    "skips-trained-batches": (
        "data.skip changes which batches the run was trained on, up to batch {batch:whole} of its checkpoint",
        "Keep the ranges of data.skip as they are up to that batch, and add later ones",
    ),
    "torchvision-absent": (
        "data.images.decoder = torchvision: torchvision cannot be imported: {error}",
        "Install the torchvision that belongs to this torch, or set data.images.decoder: pillow",
    ),
    "mixing-odd-micro-batch": (
        "training.micro_batch_size = {given}: it must be even, because mixup and CutMix mix pairs of images of a "
        "micro-batch",
        "Set an even number, or mixup and cutmix in data.images.augment to 0",
    ),
    "channels-not-allowed": (
        "model.num_channels = {given}: images are read with 1 channel (gray) or 3 (RGB)",
        "Set num_channels to 1 or 3",
    ),
    "caption-tokenizer-unreadable": (
        "{path} cannot be read as a tokenizer: {error}",
        "Set data.tokenizer.path to a tokenizer.json",
    ),
    "caption-tokenizer-differs": (
        "{checkpoint} was trained on captions of another tokenizer than {path} is now: SHA-256 {saved}, now {found}",
        "Restore the tokenizer.json that data.tokenizer.path names, or start a new run",
    ),
    "caption-token-absent": (
        "{path} has no token {token}, which begins, ends or pads captions",
        "Put the tokenizer_config.json of the tokenizer beside it, which names its tokens, or use CLIP's tokenizer",
    ),
    "caption-vocabulary-too-large": (
        "{path} has {found:whole} tokens and model.text_config.vocab_size is {vocab_size:whole}",
        "Set the tokenizer of the model, or a larger vocab_size",
    ),
    "caption-end-not-largest": (
        "{path} ends captions with {token}, number {id}, and with model.text_config.eos_token_id = 2, as in configs "
        "before transformers 4.31, the model takes the largest token, number {expected}, as the end",
        "Use a tokenizer whose end token is its largest, and is not number 2",
        "Use the tokenizer of the model",
    ),
    "caption-end-differs": (
        "{path} ends captions with {token}, number {id}, and with model.text_config.eos_token_id = {eos_token_id} the "
        "model looks for number {expected}",
        "Set model.text_config.eos_token_id to {id}, or use the tokenizer of the model",
    ),
    "nothing-usable": (
        "no document of source {source} is left: {removed:whole} of {documents:whole} cannot be used, the first one: "
        "{place}: {problem}",
        "Correct the source or its settings",
    ),
    "nothing-left": (
        "no document of source {source} is left: the rule {rule} of the step {step} removed {removed:whole} of "
        "{documents:whole}",
        "Change the step in data.prepare, or list the other sources in its key only",
    ),
    "bad-documents": (
        "{place}: {problem}. {documents:whole} documents were left out of the prepared data",
        "Correct the files, or set data.on_bad: skip",
    ),
    "folder-of-another-user": (
        "{folder} was made by {owner}, so that no data are prepared there",
        "Remove it, or ask {owner} to remove it",
    ),
    "file-changed": ("{path} has changed while it was prepared", "Run the command again"),
    "file-gone": ("{path} was listed, and cannot be read any more: {error}", "Run the command again"),
    "step-on-tokens": (
        "the step {step} needs text, and {source:source} holds tokens",
        "List the other sources in the key only of the step",
    ),
    "tokens-beside-text": ("{source:source} holds tokens in {tokens} and text in {text}", "Make two sources of them"),
    "tokens-without-tokenizer": (
        "{source:source} holds tokens, so no tokenizer can be trained for it",
        "Set data.tokenizer to the tokenizer that made the tokens, with kind: file",
    ),
    "epochs-exceed-run": (
        "data.sources: the epochs of {sources} take {taken:whole} samples and the run has {samples:whole}, so that "
        "none are left for the sources with a weight",
        "Set fewer epochs, more training.steps, or epochs for every source",
    ),
    "run-not-prepared": (
        "{paths} is not prepared below {folder}, or has changed since it was",
        "Run `scaletrain resume {run}`, which prepares it first",
    ),
    "dataset-gone": (
        "the prepared data {folder} of the run are gone or were replaced, and {cause}",
        "Restore the folder, or the sources, and run `scaletrain resume {run}`, which prepares them again",
    ),
    "tokenizers-differ": (
        "data.sources: {first} and {second} were prepared with different tokenizers",
        "Prepare all sources with the same data.tokenizer",
    ),
    "source-gone": (
        "the run was trained on the source {source}, which data.sources no longer names",
        "Keep the source, with weight 0 if no more samples are to come from it",
    ),
    "shards-missing": ("{folder} lacks tokens that were written before", "Prepare the data again"),
    "worker-killed": (
        "a worker process was killed, perhaps for its memory",
        "Use fewer workers, and run the command again",
    ),
    "task-failed": "{task}: {error}",
    # ---- the columns of a row --------------------------------------------------------------------------------------
    "not-an-object": "each row must be a JSON object",
    "git-lfs-pointer": ("it is a pointer of Git LFS, and not the file", "Run git lfs pull"),
    "json-is-gzip": ("the file is compressed with gzip", "Add .gz to its name"),
    "json-is-utf-16": ("the file is UTF-16", "Convert it: iconv -f UTF-16 -t UTF-8"),
    "json-has-nul": ("the line has NUL bytes, which JSON cannot have", "Write the file again, or remove them"),
    "json-over-lines": ("a JSON value spans several lines", "Write one object per line, as jq -c does"),
    "json-single-quotes": (
        "texts are in single quotes, as Python prints them, and JSON has double quotes",
        "Write it with json.dumps",
    ),
    "json-trailing-comma": ("a comma follows the last value, which JSON does not have", "Remove it"),
    "json-cut": ("the JSON ends too early", "Write the line again; the file may be incomplete"),
    "json-invalid": ("it is not JSON: {error}", "Correct it"),
    "format-unknown": ("the columns {columns:list} fit no format of rows; it needs {needed:or}", *_FORMATS),
    "columns-missing": ("format {format} needs the columns {missing:list}; the row has {columns:list}", *_FORMATS),
    "format-without-images": (
        "rows of the format {format} have no place for an image; llava reads {known:or}",
        "Write conversations with <image>, or a part of type image, for each image",
    ),
    "parquet-columns": ("has no columns {needed:or}", *_FORMATS),
    "column-not-text": "the column {column} must be text",
    "column-not-messages": "the column {column} must be a list of messages, each with a role and content",
    "column-neither": "the column {column} must be text or a list of messages",
    "no-messages": "the column {column} has no message",
    "two-system-texts": (
        "the column {column} has another system text than the first message",
        "Remove one of them, or set data.fields.system to a column that the rows do not have",
    ),
    "history": "the column {column} must be a list of pairs of texts: what was asked, and the answer",
    "template-variables": "the column {column} must be an object, or its JSON text",
    "no-assistant": (
        "no message has the role assistant; the roles {roles:list} are not known",
        "Set data.fields.roles, as in {{{roles[0]}: assistant}}",
    ),
    "columns-differ": "the columns {columns:list} must all be text, or all be lists of messages",
    "reasoning": "message {number}: the reasoning must be text",
    "message": "message {number} of the column {column} must have a role and content: text, a list of text parts, or "
    "tool_calls",
    "sharegpt-role": (
        "message {number} has from: {role}, which must be one of {known:list}",
        "Set data.fields.roles, as in {{{role}: assistant}}",
    ),
    "function-call": "message {number}: a call must be JSON with name and arguments",
    "part": "message {number} has a part of type {type}; only text can be trained on",
    "no-image-token": (
        "data.tokenizer: the id {id} of model.image_token_index is not one token of the tokenizer; {mark} has the id "
        "{usual}",
        "Add the image token to tokenizer.json as an added token, and set model.image_token_index to its id",
    ),
    "bad-image": (
        "{where}: {problem}",
        "Replace the image, or set data.on_bad: skip to leave out rows with bad images",
    ),
    "prepared-with-other-images": (
        "{folder} has rows with {found} tokens for an image, with the id {found_id}, and the model needs {count} with "
        "the id {id}",
        "Set data.source to the rows themselves, so that they are prepared for this model",
    ),
    "bad-images-left-out": (
        "{folder} lacks {rows} rows with bad images, the first at {place}",
        "Set data.on_bad: skip, or replace the images and set data.source to the rows themselves",
    ),
    "image-column": "the column {column} must be the path of an image, its bytes, or bytes and path, or a list of "
    "these",
    "image-marks": (
        "it has {marks} places of images in its text and {images} images",
        "Write <image>, or a part of type image, for each image",
    ),
    "image-tokens": (
        "its text has {found} image tokens and the row {images} images",
        "Write the image token only where an image belongs, and check that the chat template writes one for each",
    ),
    "tools": "the column {column} must be a list of JSON schemas, or its JSON text",
    "weight": "the weight {weight} must be 0, or a number from 1e-6 to 1e6",
    "weight-of-pair": "a preference pair has no weight; its column {column} must be 1 or left out",
    "weight-role": "message {number} has a weight and the role {role}; only messages of the assistant have one",
    "weight-in-answer": "message {number} has a weight, which only the messages of the format messages have",
    "completion-role": (
        "message {number} of the column {column} has the role {role}; an answer consists of messages of the assistant",
        "Use the format messages",
    ),
    "no-common-prompt": ("chosen and rejected have no common prompt", "Add a column prompt"),
    "no-rows": "{source} holds no rows",
    # ---- the chat template -----------------------------------------------------------------------------------------
    "template-missing": ("the tokenizer {tokenizer} has no chat template, which conversations need", *_TEMPLATE),
    "template-no-default": (
        "the tokenizer {tokenizer} has the chat templates {names:list} and none with the name default, which "
        "conversations need",
        *_TEMPLATE,
    ),
    "template-unreadable": ("the chat template in {path} cannot be read: {error}", *_TEMPLATE),
    "template-invalid": "the chat template is not valid: line {line}: {error}",
    "template-failed": "the chat template cannot render the row: {error}",
    "template-rewrites-history": (
        "the chat template writes message {number} in another way once other messages follow, so that the assistant's "
        "turns in the text are not those that it would have generated",
        *_MARKERS,
    ),
    "template-prompt-differs": (
        "the chat template does not begin message {number} of the assistant with its generation prompt {prompt!r}, so "
        "that the answer cannot be told from the prompt",
        "Use a template that marks the assistant's text with {{% generation %}} and {{% endgeneration %}}",
    ),
    "template-without-prompt": (
        "the chat template has no add_generation_prompt, and puts {before!r} before the answer of message {number}, "
        "so that the answer cannot be told from the prompt",
        "Use a template that marks the assistant's text with {{% generation %}} and {{% endgeneration %}}",
    ),
    "template-marks-nothing": "the chat template marks no text with {{% generation %}}, although message {number} is "
    "of the assistant",
    "template-marks-differ": (
        "the chat template marks {found} texts with {{% generation %}}, and the messages of the assistant cannot be "
        "told among them",
        "Use data.loss_on: assistant and no weights of messages",
    ),
    "template-has-no-variable": (
        "data.chat_template_kwargs.{name}: the chat template has no such variable; it reads {known:list}",
        "Remove it",
    ),
    "template-lacks-content": ("the chat template does not write the text of message {number}: {text!r}", *_LACKS),
    "template-lacks-call": ("the chat template does not write the call of message {number}: {text!r}", *_LACKS),
    "template-lacks-tool": (
        "the chat template does not describe the tools of the row: {text!r}",
        "Use a chat template that writes them",
        "Set data.fields.tools to a column that the rows do not have",
    ),
    "turn-without-end": (
        "the chat template ends the turn {text!r} of the assistant with no token that ends turns, so that the model "
        "would not learn to stop",
        "Write the tokenizer's eos_token after each answer in the template",
        "If the next role's token ends a turn, its id must be an eos_token_id in generation_config.json",
    ),
    "turn-end-within": (
        "the chat template ends turns of the assistant with {token}, which also stands within a turn and is no "
        "eos_token_id of the tokenizer, config.json or generation_config.json",
        "Use the template of the model, or data.loss_on: last_assistant",
        "Add its id to generation_config.json",
    ),
    # ---- tokens ----------------------------------------------------------------------------------------------------
    "prompt-not-a-prefix": (
        "the tokens of the prompt are not the first tokens of prompt and answer: a token spans their border, at "
        "{around!r}",
        "Move the spaces from the end of the prompt to the beginning of the answer",
    ),
    "row-too-long": (
        "the row has {tokens} tokens and model.seq_len is {seq_len}",
        "Set data.truncation to keep_start, keep_end or drop, or use a longer model.seq_len",
    ),
    "tokenizer-without-end": (
        "{tokenizer} names no eos_token, which ends each answer",
        "Set eos_token in its tokenizer_config.json",
    ),
    "nothing-to-train-on": (
        "no row of {source} has a token in the loss: {rows} rows, {dropped} of them without one in the first "
        "{seq_len} tokens, {too_long} left out for their length, and {unusable} that cannot be used",
        "If the answers come later, use a longer model.seq_len or data.truncation: keep_end",
        "If the rows have no answers, see them with scaletrain data show",
    ),
    # ---- prepared data ---------------------------------------------------------------------------------------------
    "prepared-for-other-length": (
        "{folder} holds rows of {found} tokens and model.seq_len is {seq_len}",
        "Prepare the data again",
    ),
    "prepared-without-setting": (
        "{folder} holds prepared rows, on which data.{key} = {value} has no effect",
        "Remove data.{key}, or prepare the data again",
    ),
    "prepared-for-other-objective": (
        "{folder} holds {found} and training.objective is {objective}",
        "Prepare the data again",
    ),
    "no-source-to-show": (
        "--source {source}: no source of rows has this name; sources: {names:list}",
        "--source is for rows of a spec, without --step",
    ),
    "validation-rows-of-prepared": (
        "is a prepared dataset, whose rows for validation are those that it was prepared with",
        "Remove validation_source or validation_path, or give the rows themselves as the source",
    ),
    "no-last-turn": (
        "data.loss_on = last_assistant: the rows have the format {format}, which has no turns",
        "Set it to assistant or all",
    ),
    "prepared-not-shown": (
        "data.source = {source} is prepared data, and the rows are shown from the files that it was made from",
        "Set data.source to these files",
    ),
    "nothing-to-show": (
        "training.objective is causal_lm, which reads text as it is and not rows",
        "Use --step to show the samples of a step",
    ),
    "requires-step": ("{option} selects samples of a step", "Give --step"),
    "row-or-step": ("--row and --step cannot be used together", "Give one of them"),
    "set-requires-spec": ("--set changes a spec file, and {target} is none", "Remove --set"),
    "not-prepared": (
        "the data of this spec are not prepared below {root}, or have changed since",
        "Run `scaletrain data prepare`",
    ),
    "rank-out-of-range": "rank {rank} is none of the {ranks} ranks of the layout, counted from 0",
    "micro-batch-out-of-range": "micro-batch {number} is none of the {count} of a step of the layout",
    "step-out-of-range": "step {step} is none of the {steps} of the run",
    "row-out-of-range": "data.source has {rows} rows; there is no row {row}",
}
