"""The texts of the checks of files, code and credentials that a run spec refers to (docs/checks.md)."""

from scaletrain_cli.reasons import Texts

_SOURCES = ("Set it to python-stdlib, a prepared dataset, or a path or glob of text files",)
_PREPARE = ("Prepare it again with `scaletrain data prepare`",)
_MORE_TEXT = ("Add text, or use a shorter model.seq_len",)
_TOKENIZER = ("Set it to the tokenizer.json of a Hugging Face tokenizer",)
_WEIGHTS = ("Set it to a folder with Hugging Face *.safetensors files",)
_MODULE = ("Commit its file, or set code.path and code.import_root to where it is",)

TEXTS: Texts = {
    "spec-unusable": "the run spec refers to {problems:of resource} that the run could not use",
    "node-lacks": "this node lacks what the run spec refers to",
    # ---- notes: what is not checked ------------------------------------------------------------------------------
    "not-checked": "not checked here: {keys:list}; looked for {place}. Each node checks it before it starts a rank",
    "remote-not-checked": "not checked here: {keys:list}. The preparation of the data checks it before any GPU is used",
    "dataset-setting-unknown": (
        "not checked: data.source = {source} holds prepared rows that do not record with which settings they were "
        "made: {settings:list}",
        "Remove the settings, or prepare the data again",
    ),
    "files-not-read": "{key} = {source}: these files are not read: {kinds:list}",
    # ---- advice of the plan on sources -------------------------------------------------------------------------------
    "source-repeated": (
        "is read more than {most:g} times. Repeated text is almost as good as new up to {most:g} epochs (arXiv "
        "2305.16264)",
        "Add text, give the source less weight, or train on fewer tokens",
    ),
    "source-part-used": "is not read to its end: the run uses a part of it",
    "source-unused": ("is never read: its weight is 0 in all stages", "Remove it, or give it a weight"),
    "dataset-too-small": (
        "has too little text to train on: its prepared data hold fewer tokens than one sequence of {length}",
        "Add text, use a shorter model.seq_len, or remove the source",
    ),
    "source-too-small": ("has too little text for one sequence", "Add text, or use a shorter model.seq_len"),
    # ---- evaluation.tasks ------------------------------------------------------------------------------------------
    "no-folder": ("there is no such folder", "Create it, or correct the path"),
    "no-program": ("is not on PATH", "Install lm_eval[hf] in an environment on PATH, or set the path of its program"),
    # ---- data.source -----------------------------------------------------------------------------------------------
    "no-source": ("{why}", *_SOURCES),
    "source-file": ("{why}", "Repair the file, or leave it out of the source"),
    "source-other-format": ("{why}", "Set it to the format of the files, or correct the path of the source"),
    "source-format": ("{where}: {problem}", "Set it to the format of the files, or repair the file"),
    "source-format-of-name": (
        "{where}: {problem}",
        "Repair the file, or set the format of the source, which the name of the file says otherwise",
    ),
    "source-field": ("{where}: {problem}", "Set it to the column with the text"),
    "only-source-field": (
        "{where}: {problem}",
        "Name the column with the text: data.sources: [{{name: NAME, path: {path}, field: COLUMN}}]",
    ),
    "source-column": (
        "{where}: {problem}",
        "Set it to a column of the source, or leave the source out with the key only",
    ),
    "source-document": ("{where}: {problem}", "Repair the file, or set data.on_bad: skip"),
    "source-damaged": ("{where}: {problem}", "Repair the file, or leave it out of the source"),
    "source-without-documents": (
        "{where}: {problem}",
        "No document that was looked at can be read: repair the file, or leave it out",
    ),
    "row-without-image": (
        "{where}: there is no image {path}",
        "Set data.images.folder to the folder that the paths of rows begin in",
    ),
    "no-text": ("holds no text", *_MORE_TEXT),
    "too-little-text": ("holds {bytes} bytes, too few for one sequence of {seq_len} tokens", *_MORE_TEXT),
    "no-pyarrow": ("reading parquet files requires pyarrow", "Run pip install pyarrow"),
    "dataset-incomplete": ("is not a complete prepared dataset: {said}", *_PREPARE),
    "dataset-unreadable": ("its dataset.json cannot be read", *_PREPARE),
    "dataset-size": ("{file} holds {tokens} tokens, and dataset.json says {expected}", *_PREPARE),
    "dataset-vocabulary": ("has {tokens} token ids, and model.vocab_size is {vocab_size}", *_PREPARE),
    "dataset-objective": ("was prepared for objective {found}, and training.objective is {objective}", *_PREPARE),
    "dataset-length": ("holds rows of {found} tokens, and model.seq_len is {seq_len}", *_PREPARE),
    "dataset-packing": (
        "was prepared with packing {found}, and data.packing is {packing}, with which the run is planned",
        *_PREPARE,
    ),
    "dataset-setting": (
        "was prepared with {key} {found}, and data.{key} is {value}, which has no effect on prepared rows",
        "Remove data.{key}, or prepare the data again",
    ),
    "dataset-too-short": ("holds {tokens} tokens to train on, fewer than one sequence of {seq_len}", *_PREPARE),
    # ---- data.tokenizer.path ---------------------------------------------------------------------------------------
    "cache-unusable": (
        "the cache of remote data cannot be used: {path}: {error}",
        "Set it to a folder on the nodes that you may write to",
    ),
    "tokenizer-size": "must not exceed model.vocab_size = {vocab_size}, since a tokenizer is trained",
    "trained-image-token": (
        "must be {id}, the id of {mark} in a tokenizer that is trained on the rows",
        "Set it to {id}, or set data.tokenizer.path to a tokenizer with the image token",
    ),
    "tokenizer-missing": ("cannot be read: No such file or directory", *_TOKENIZER),
    "tokenizer-unreadable": ("cannot be read: {said}", *_TOKENIZER),
    "tokenizer-invalid": ("is not a tokenizer.json of Hugging Face tokenizers", *_TOKENIZER),
    "tokenizer-no-end": ("has no end-of-text token; one of {tokens:list} is required", *_TOKENIZER),
    "tokenizer-vocabulary": ("has token ids up to {largest}, and model.vocab_size is {vocab_size}", *_TOKENIZER),
    # ---- data.chat_template ----------------------------------------------------------------------------------------
    "template-missing": ("cannot be read: No such file or directory", "Set it to a Jinja file"),
    # ---- data.images -----------------------------------------------------------------------------------------------
    "classes-unreadable": ("cannot be read: {said}", "Set it to a file with one class name per line"),
    "classes-differ": (
        "has {names} names, and model.num_labels is {labels}",
        "Set model.num_labels to the number of classes",
    ),
    # ---- model.weights ---------------------------------------------------------------------------------------------
    "weights-missing": ("does not exist", *_WEIGHTS),
    "weights-no-folder": ("is not a folder", *_WEIGHTS),
    "weights-no-files": ("holds neither model.safetensors nor model.safetensors.index.json", *_WEIGHTS),
    "weights-incomplete": ("lacks {files:list}, which its index names", *_WEIGHTS),
    "weights-unreadable": ("cannot be read: {said}", *_WEIGHTS),
    "weights-index": ("its index cannot be read", *_WEIGHTS),
    "weights-pointer": ("{file} is a pointer of Git LFS, and not the file", "Run git lfs pull"),
    "weights-file": ("{file} is not a safetensors file, or is truncated", *_WEIGHTS),
    "weights-file-size": ("{file} holds {bytes} bytes, and its header says {expected}", *_WEIGHTS),
    "weights-differ": (
        "{count:of tensor} differ from those of the spec's model: {shown:list}",
        "Set model.hf_config to the config.json of these weights, or use the weights of this model",
    ),
    "weights-other-model": (
        "has {tensors:of tensor} and none of those of the spec's model",
        "Set model.hf_config to the config.json of these weights, or use other weights",
    ),
    "weights-config-unusable": ("{why}", "Use other weights"),
    "weights-config-differs": ("its config.json has {setting}, and {difference}", "{remedy}"),
    # ---- model.adapter.weights -------------------------------------------------------------------------------------
    "adapter-missing": ("{folder} does not exist", "Set it to the folder of a PEFT adapter"),
    "adapter-tensors-differ": (
        "{count:of tensor} differ from the adapter of the spec: {shown:list}",
        "Set model.adapter to the rank and targets of this adapter, or use another one",
    ),
    "adapter-unreadable": ("cannot be read: {said}", "Set it to a folder that PEFT wrote"),
    "adapter-unsupported": (
        "its adapter_config.json has {keys:list}, which the adapters of this engine do not have",
        "Merge it into its base model where PEFT is installed, set model.weights to the result, and remove "
        "model.adapter.weights",
        'python -c "import peft, sys; '
        'peft.AutoPeftModelForCausalLM.from_pretrained(sys.argv[1]).merge_and_unload().save_pretrained(sys.argv[2])" '
        "{folder} merged",
    ),
    "adapter-differs": (
        "its adapter_config.json has {theirs} = {value}, which differs from model.adapter.{key}",
        "Set model.adapter.{key}: {value}",
    ),
    # ---- code ------------------------------------------------------------------------------------------------------
    "no-import-root": ("the snapshot of {path} has no such folder", "Name one that git does not ignore"),
    "command-not-found": ("there is no such program on PATH", "Install it, or give its path"),
    "command-not-found-here": "code.command: there is no program {program} on PATH here; the nodes, which were not "
    "checked, must have it",
    "command-not-kept": ("the snapshot of {path} has no such file", "Name one that git does not ignore"),
    "command-file-not-kept": (
        "the file is in the working tree, and not in the snapshot of {path}",
        "Remove it from .gitignore and .scaletrainignore",
    ),
    "engine-not-installed": ("it is not installed", *_MODULE),
    "engine-not-kept": ("the snapshot of {path} holds no such module, and it is not installed", *_MODULE),
    "engine-is-file": ("it is the name of a file, and a module is required", "Set code.engine to {module}"),
    # ---- the snapshot of code.path ---------------------------------------------------------------------------------
    "code-not-kept": "the code cannot be stored with the run",
    "code-no-folder": ("is not a folder here", "Set it to a folder of a git working tree"),
    "code-no-git": ("requires git, which is not installed here", "Install git, or remove code.path"),
    "code-git-failed": "git {command} failed: {said}",
    "code-of-other-user": (
        "git {command} failed: {said}",
        "It belongs to another user. If you trust it: git config --global --add safe.directory FOLDER",
    ),
    "code-no-repository": (
        "git {command} failed: {said}",
        "Make it a git working tree with one commit (git init, git add, git commit)",
    ),
    "code-not-storable": (
        "contains what a snapshot cannot store: {files:list}",
        "Name it in {ignore_file} if the run does not need it",
    ),
    "code-uncommitted": (
        "has {count:of uncommitted file}: {files:list}",
        "Commit or stash them, or set code.uncommitted: patch",
    ),
    "code-secrets-tracked": (
        "git tracks {files:list}",
        "Name it in {ignore_file} if the run does not need it, commit changes that remove a secret, or name it as "
        "!PATH in {ignore_file} if everybody who reads the run may read it",
    ),
    "code-secrets-left-out": (
        "code.path: the snapshot is without {files:list}",
        "Name it as !PATH in {ignore_file} if the run needs it and everybody who reads the run may read it",
    ),
    "code-empty": ("has no file that git tracks or would add", "Set it to the folder of your code"),
    "code-packed-broken": ("has a packed snapshot that cannot be read: {said}", "Send it again"),
    "code-packed-changed": ("has a packed snapshot whose files differ from its listing", "Send it again"),
    "code-too-large": (
        "is {max_bytes:,} bytes, and {files:of file} of {folder} take {bytes:,}; the largest are {largest:list}",
        "Name what a run does not need in {ignore_file}, or increase it",
    ),
    # ---- checkpoint.dir, secrets, trackers -------------------------------------------------------------------------
    "checkpoints-no-folder": ("{folder} is not a folder", "Name a folder"),
    "checkpoints-not-writable": (
        "this user may not write to {folder}",
        "Name a folder that you can write to, or request the permission",
    ),
    "secret-not-set": ("is not set here", "Export it before submitting"),
    "tracker-not-installed": ("{tracker} is not installed here", "Run {command}, or remove {tracker} from tracking"),
    "notify-not-set": ("{name} is not set for the run", "{hint}"),
    "notify-not-a-url": ("{name} is {problem}", "Set it to the URL of the webhook"),
    "notify-no-command": ("{program} is not found", "Give the path of a program, or install it"),
    "no-wandb-key": (
        "the run has no API key for Weights & Biases",
        "{login}; or set it to offline and upload the files later with `wandb sync`",
    ),
}
