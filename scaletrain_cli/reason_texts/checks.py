"""The texts of the checks of files, code and credentials that a run spec refers to (docs/checks.md)."""

from scaletrain_cli.reasons import Text

_SOURCES = ("Set it to python-stdlib, a prepared dataset, or a path or glob of text files",)
_PREPARE = ("Prepare it again with `scaletrain data prepare`",)
_MORE_TEXT = ("Add text, or use a shorter model.seq_len",)
_TOKENIZER = ("Set it to the tokenizer.json of a Hugging Face tokenizer",)
_WEIGHTS = ("Set it to a folder with Hugging Face *.safetensors files",)
_MODULE = ("Commit its file, or set code.path and code.import_root to where it is",)

TEXTS: dict[str, Text] = {
    "spec-unusable": Text("the run spec refers to {problems:of resource} that the run could not use"),
    "node-lacks": Text("this node lacks what the run spec refers to"),
    # ---- notes: what is not checked ------------------------------------------------------------------------------
    "not-checked": Text(
        "not checked here: {keys:list}; looked for {place}. Each node checks it before it starts a rank"
    ),
    "remote-not-checked": Text(
        "not checked here: {keys:list}. The preparation of the data checks it before any GPU is used"
    ),
    "dataset-setting-unknown": Text(
        "not checked: data.source = {source} holds prepared rows that do not record with which settings they were "
        "made: {settings:list}",
        ("Remove the settings, or prepare the data again",),
    ),
    "files-not-read": Text("{key} = {source}: these files are not read: {kinds:list}"),
    # ---- advice of the plan on sources -------------------------------------------------------------------------------
    "source-repeated": Text(
        "is read more than {most:g} times. Repeated text is almost as good as new up to {most:g} epochs "
        "(arXiv 2305.16264)",
        ("Add text, give the source less weight, or train on fewer tokens",),
    ),
    "source-part-used": Text("is not read to its end: the run uses a part of it"),
    "source-unused": Text("is never read: its weight is 0 in all stages", ("Remove it, or give it a weight",)),
    "dataset-too-small": Text(
        "has too little text to train on: its prepared data hold fewer tokens than one sequence of {length}",
        ("Add text, use a shorter model.seq_len, or remove the source",),
    ),
    "source-too-small": Text("has too little text for one sequence", ("Add text, or use a shorter model.seq_len",)),
    # ---- evaluation.tasks ------------------------------------------------------------------------------------------
    "no-folder": Text("there is no such folder", ("Create it, or correct the path",)),
    "no-program": Text(
        "is not on PATH", ("Install lm_eval[hf] in an environment on PATH, or set the path of its program",)
    ),
    # ---- data.source -----------------------------------------------------------------------------------------------
    "no-source": Text("{why}", _SOURCES),
    "source-file": Text("{why}", ("Repair the file, or leave it out of the source",)),
    "source-other-format": Text("{why}", ("Set it to the format of the files, or correct the path of the source",)),
    "source-format": Text("{where}: {problem}", ("Set it to the format of the files, or repair the file",)),
    "source-format-of-name": Text(
        "{where}: {problem}",
        ("Repair the file, or set the format of the source, which the name of the file says otherwise",),
    ),
    "source-field": Text("{where}: {problem}", ("Set it to the column with the text",)),
    "only-source-field": Text(
        "{where}: {problem}",
        ("Name the column with the text: data.sources: [{{name: NAME, path: {path}, field: COLUMN}}]",),
    ),
    "source-column": Text(
        "{where}: {problem}", ("Set it to a column of the source, or leave the source out with the key only",)
    ),
    "source-document": Text("{where}: {problem}", ("Repair the file, or set data.on_bad: skip",)),
    "source-damaged": Text("{where}: {problem}", ("Repair the file, or leave it out of the source",)),
    "source-without-documents": Text(
        "{where}: {problem}", ("No document that was looked at can be read: repair the file, or leave it out",)
    ),
    "row-without-image": Text(
        "{where}: there is no image {path}", ("Set data.images.folder to the folder that the paths of rows begin in",)
    ),
    "no-text": Text("holds no text", _MORE_TEXT),
    "too-little-text": Text("holds {bytes} bytes, too few for one sequence of {seq_len} tokens", _MORE_TEXT),
    "no-pyarrow": Text("reading parquet files requires pyarrow", ("Run pip install pyarrow",)),
    "dataset-incomplete": Text("is not a complete prepared dataset: {said}", _PREPARE),
    "dataset-unreadable": Text("its dataset.json cannot be read", _PREPARE),
    "dataset-size": Text("{file} holds {tokens} tokens, and dataset.json says {expected}", _PREPARE),
    "dataset-vocabulary": Text("has {tokens} token ids, and model.vocab_size is {vocab_size}", _PREPARE),
    "dataset-objective": Text("was prepared for objective {found}, and training.objective is {objective}", _PREPARE),
    "dataset-length": Text("holds rows of {found} tokens, and model.seq_len is {seq_len}", _PREPARE),
    "dataset-packing": Text(
        "was prepared with packing {found}, and data.packing is {packing}, with which the run is planned", _PREPARE
    ),
    "dataset-setting": Text(
        "was prepared with {key} {found}, and data.{key} is {value}, which has no effect on prepared rows",
        ("Remove data.{key}, or prepare the data again",),
    ),
    "dataset-too-short": Text("holds {tokens} tokens to train on, fewer than one sequence of {seq_len}", _PREPARE),
    # ---- data.tokenizer.path ---------------------------------------------------------------------------------------
    "cache-unusable": Text(
        "the cache of remote data cannot be used: {path}: {error}",
        ("Set it to a folder on the nodes that you may write to",),
    ),
    "tokenizer-size": Text("must not exceed model.vocab_size = {vocab_size}, since a tokenizer is trained"),
    "trained-image-token": Text(
        "must be {id}, the id of {mark} in a tokenizer that is trained on the rows",
        ("Set it to {id}, or set data.tokenizer.path to a tokenizer with the image token",),
    ),
    "tokenizer-missing": Text("cannot be read: No such file or directory", _TOKENIZER),
    "tokenizer-unreadable": Text("cannot be read: {said}", _TOKENIZER),
    "tokenizer-invalid": Text("is not a tokenizer.json of Hugging Face tokenizers", _TOKENIZER),
    "tokenizer-no-end": Text("has no end-of-text token; one of {tokens:list} is required", _TOKENIZER),
    "tokenizer-vocabulary": Text("has token ids up to {largest}, and model.vocab_size is {vocab_size}", _TOKENIZER),
    # ---- data.chat_template ----------------------------------------------------------------------------------------
    "template-missing": Text("cannot be read: No such file or directory", ("Set it to a Jinja file",)),
    # ---- data.images -----------------------------------------------------------------------------------------------
    "classes-unreadable": Text("cannot be read: {said}", ("Set it to a file with one class name per line",)),
    "classes-differ": Text(
        "has {names} names, and model.num_labels is {labels}", ("Set model.num_labels to the number of classes",)
    ),
    # ---- model.weights ---------------------------------------------------------------------------------------------
    "weights-missing": Text("does not exist", _WEIGHTS),
    "weights-no-folder": Text("is not a folder", _WEIGHTS),
    "weights-no-files": Text("holds neither model.safetensors nor model.safetensors.index.json", _WEIGHTS),
    "weights-incomplete": Text("lacks {files:list}, which its index names", _WEIGHTS),
    "weights-unreadable": Text("cannot be read: {said}", _WEIGHTS),
    "weights-index": Text("its index cannot be read", _WEIGHTS),
    "weights-pointer": Text("{file} is a pointer of Git LFS, and not the file", ("Run git lfs pull",)),
    "weights-file": Text("{file} is not a safetensors file, or is truncated", _WEIGHTS),
    "weights-file-size": Text("{file} holds {bytes} bytes, and its header says {expected}", _WEIGHTS),
    "weights-differ": Text(
        "{count:of tensor} differ from those of the spec's model: {shown:list}",
        ("Set model.hf_config to the config.json of these weights, or use the weights of this model",),
    ),
    "weights-other-model": Text(
        "has {tensors:of tensor} and none of those of the spec's model",
        ("Set model.hf_config to the config.json of these weights, or use other weights",),
    ),
    "weights-config-unusable": Text("{why}", ("Use other weights",)),
    "weights-config-differs": Text("its config.json has {setting}, and {difference}", ("{remedy}",)),
    # ---- model.adapter.weights -------------------------------------------------------------------------------------
    "adapter-missing": Text("{folder} does not exist", ("Set it to the folder of a PEFT adapter",)),
    "adapter-tensors-differ": Text(
        "{count:of tensor} differ from the adapter of the spec: {shown:list}",
        ("Set model.adapter to the rank and targets of this adapter, or use another one",),
    ),
    "adapter-unreadable": Text("cannot be read: {said}", ("Set it to a folder that PEFT wrote",)),
    "adapter-unsupported": Text(
        "its adapter_config.json has {keys:list}, which the adapters of this engine do not have",
        (
            "Merge it into its base model where PEFT is installed, set model.weights to the result, and remove "
            "model.adapter.weights",
            'python -c "import peft, sys; peft.AutoPeftModelForCausalLM.from_pretrained(sys.argv[1]).merge_and_unload()'
            '.save_pretrained(sys.argv[2])" {folder} merged',
        ),
    ),
    "adapter-differs": Text(
        "its adapter_config.json has {theirs} = {value}, which differs from model.adapter.{key}",
        ("Set model.adapter.{key}: {value}",),
    ),
    # ---- code ------------------------------------------------------------------------------------------------------
    "no-import-root": Text("the snapshot of {path} has no such folder", ("Name one that git does not ignore",)),
    "command-not-found": Text("there is no such program on PATH", ("Install it, or give its path",)),
    "command-not-found-here": Text(
        "code.command: there is no program {program} on PATH here; the nodes, which were not checked, must have it"
    ),
    "command-not-kept": Text("the snapshot of {path} has no such file", ("Name one that git does not ignore",)),
    "command-file-not-kept": Text(
        "the file is in the working tree, and not in the snapshot of {path}",
        ("Remove it from .gitignore and .scaletrainignore",),
    ),
    "engine-not-installed": Text("it is not installed", _MODULE),
    "engine-not-kept": Text("the snapshot of {path} holds no such module, and it is not installed", _MODULE),
    "engine-is-file": Text("it is the name of a file, and a module is required", ("Set code.engine to {module}",)),
    # ---- the snapshot of code.path ---------------------------------------------------------------------------------
    "code-not-kept": Text("the code cannot be stored with the run"),
    "code-no-folder": Text("is not a folder here", ("Set it to a folder of a git working tree",)),
    "code-no-git": Text("requires git, which is not installed here", ("Install git, or remove code.path",)),
    "code-git-failed": Text("git {command} failed: {said}"),
    "code-of-other-user": Text(
        "git {command} failed: {said}",
        ("It belongs to another user. If you trust it: git config --global --add safe.directory FOLDER",),
    ),
    "code-no-repository": Text(
        "git {command} failed: {said}", ("Make it a git working tree with one commit (git init, git add, git commit)",)
    ),
    "code-not-storable": Text(
        "contains what a snapshot cannot store: {files:list}", ("Name it in {ignore_file} if the run does not need it",)
    ),
    "code-uncommitted": Text(
        "has {count:of uncommitted file}: {files:list}", ("Commit or stash them, or set code.uncommitted: patch",)
    ),
    "code-secrets-tracked": Text(
        "git tracks {files:list}",
        (
            "Name it in {ignore_file} if the run does not need it, commit changes that remove a secret, or name it as "
            "!PATH in {ignore_file} if everybody who reads the run may read it",
        ),
    ),
    "code-secrets-left-out": Text(
        "code.path: the snapshot is without {files:list}",
        ("Name it as !PATH in {ignore_file} if the run needs it and everybody who reads the run may read it",),
    ),
    "code-empty": Text("has no file that git tracks or would add", ("Set it to the folder of your code",)),
    "code-packed-broken": Text("has a packed snapshot that cannot be read: {said}", ("Send it again",)),
    "code-packed-changed": Text("has a packed snapshot whose files differ from its listing", ("Send it again",)),
    "code-too-large": Text(
        "is {max_bytes:,} bytes, and {files:of file} of {folder} take {bytes:,}; the largest are {largest:list}",
        ("Name what a run does not need in {ignore_file}, or increase it",),
    ),
    # ---- checkpoint.dir, secrets, trackers -------------------------------------------------------------------------
    "checkpoints-no-folder": Text("{folder} is not a folder", ("Name a folder",)),
    "checkpoints-not-writable": Text(
        "this user may not write to {folder}", ("Name a folder that you can write to, or request the permission",)
    ),
    "secret-not-set": Text("is not set here", ("Export it before submitting",)),
    "tracker-not-installed": Text(
        "{tracker} is not installed here", ("Run {command}, or remove {tracker} from tracking",)
    ),
    "notify-not-set": Text("{name} is not set for the run", ("{hint}",)),
    "notify-not-a-url": Text("{name} is {problem}", ("Set it to the URL of the webhook",)),
    "notify-no-command": Text("{program} is not found", ("Give the path of a program, or install it",)),
    "no-wandb-key": Text(
        "the run has no API key for Weights & Biases",
        ("{login}; or set it to offline and upload the files later with `wandb sync`",),
    ),
}
