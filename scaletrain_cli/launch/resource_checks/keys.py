"""The table of docs/checks.md: each key of a run spec that refers to an external resource, and its check."""

from __future__ import annotations

from dataclasses import dataclass

_FILES = "scaletrain_cli.launch.resource_checks.files:"
_WEIGHTS = "scaletrain_cli.launch.resource_checks.weights:"
_SOURCES = "scaletrain_cli.launch.resource_checks.sources:"
_CHECKS = "scaletrain_cli.launch.resource_checks.checks:"
_SLURM_FILES = "scaletrain_cli.launch.backends.slurm.backend:SlurmBackend"
_NODE = "the node agent"
_SLURM = "scaletrain_cli.launch.backends.slurm.preflight:check_site"
_SBATCH = "scaletrain_cli.launch.backends.slurm.preflight:check_job"
_KUBERNETES = "scaletrain_cli.launch.backends.kubernetes.preflight:check"
_EXISTENCE = "scaletrain_cli.launch.backends.kubernetes.preflight:"
_CAPACITY = "scaletrain_cli.launch.backends.kubernetes.capacity:"
_API = "the API server, which validates each object"
_PLACED = "`status` and `explain`, from the pods' events"
_LOAD, _PLAN, _SUBMIT, _SCHEDULER = "load", "plan", "submit", "submit (queries the scheduler)"


@dataclass(frozen=True)
class ExternalKey:
    """One key (``*`` stands for a name or an index) and the resource that it refers to.

    ``when``: ``load`` is every verb that reads the spec; ``plan`` every verb that plans; ``submit`` is validate,
    submit, submit --dry-run, train, resume and each node; ``submit (queries the scheduler)`` is submit and
    resume. ``instead`` says where it cannot be checked, and what checks it there. ``by`` is the code, as MODULE:NAME.
    """

    key: str
    names: str
    checked: str
    when: str
    instead: str
    by: str


def _row(key: str, names: str, checked: str, when: str, by: str, instead: str = "") -> ExternalKey:
    return ExternalKey(key, names, checked, when, instead, by)


_PREPARATION_JOB = "scaletrain_cli.launch.backends.kubernetes.preparation:look"
_K8S, _SL = "cluster.kubernetes.", "cluster.slurm."
_FIRST_USE = "its first use. Training continues without it, with the event tracker-off"
_NEVER_BEFORE = "never before the start"
_EVALUATION = "what only the nodes have: the evaluation, which records a failed task and runs the others"
_UNSEEN = "paths that only the nodes have: the node agent"
_PREPARATION = "the preparation of the data, before any GPU is used"


EXTERNAL_KEYS: tuple[ExternalKey, ...] = (
    _row("model.preset", "a preset of this package", "known", _LOAD, "scaletrain_cli.spec.loading:load_spec"),
    _row(
        "model.hf_config",
        "a Hugging Face config.json, local or on the hub",
        "is readable; keys that change the model are used or refused by name, others are ignored",
        _LOAD,
        "scaletrain_cli.spec.hugging_face:from_hugging_face",
    ),
    _row(
        "model.weights",
        "a folder of *.safetensors, or a model of the hub",
        "exists, is readable, every file is complete; config.json agrees with the spec; by the headers of the files, "
        "also on the hub: names, shapes and types of all tensors",
        _SUBMIT,
        f"{_WEIGHTS}weights_problems",
        f"{_UNSEEN}; a head that is a copy of a tied embedding: each rank before it loads the tensors",
    ),
    _row(
        "model.vision_weights",
        "a folder of *.safetensors of a CLIP, of its image tower or of a LLaVA, or such a model of the hub",
        "exists, is readable, every file is complete; config.json agrees with model.vision_config; by the headers of "
        "the files, also on the hub: names, shapes and types of the tensors of the image tower",
        _SUBMIT,
        f"{_WEIGHTS}weights_problems",
        _UNSEEN,
    ),
    _row(
        "model.text_weights",
        "a folder of *.safetensors of a language model, or such a model of the hub",
        "exists, is readable, every file is complete; config.json agrees with model.text_config; by the headers of the "
        "files, also on the hub: names, shapes and types of all tensors; embedding and head may have fewer rows",
        _SUBMIT,
        f"{_WEIGHTS}weights_problems",
        f"{_UNSEEN}; a head that is a copy of a tied embedding: each rank before it loads the tensors",
    ),
    _row(
        "model.adapter.weights",
        "a folder of a PEFT adapter, or an adapter of the hub",
        "both files are readable and complete; rank, alpha, rsLoRA and DoRA agree with the spec; names and shapes of "
        "all factors",
        _SUBMIT,
        f"{_WEIGHTS}adapter_problems",
        _UNSEEN,
    ),
    _row(
        "data.source",
        "files, here, on the hub or in an object store, or a prepared dataset",
        "as data.sources.*.path; for fine-tuning: exist, are readable, of a known format; the beginning of some is "
        "decoded and has the columns of data.format; prepared rows have the settings of the spec (a note if "
        "unrecorded; not after the first checkpoint); for images: files of one format, with no more classes than "
        "model.num_labels where their names are known",
        _SUBMIT,
        f"{_FILES}row_problems",
        f"{_UNSEEN}; every document, and the content of files on the hub: {_PREPARATION}",
    ),
    _row(
        "data.sources.*.path",
        "files of text or images, here, on the hub or in an object store, or a prepared dataset",
        "exist, are readable, of a known format; the first documents of some decode and have the field and the columns "
        "that data.prepare reads; prepared data are complete and fit model.vocab_size; images as data.source, and all "
        "sources have the same classes",
        _SUBMIT,
        f"{_SOURCES}check_text",
        f"{_UNSEEN}; without credentials or network here, and every document: {_PREPARATION}",
    ),
    _row(
        "data.prepare.*.files.*",
        "evaluation files, for step: contamination",
        "exist, are readable; their first items decode and have one of the fields",
        _SUBMIT,
        f"{_SOURCES}check_text",
        f"paths that only the nodes have, and all items: {_PREPARATION}",
    ),
    _row(
        "data.prepare.*.bad_words",
        "a list of words, for rules: c4",
        "exists, is text, has words",
        _SUBMIT,
        f"{_SOURCES}check_text",
        f"paths that only the nodes have: {_PREPARATION}",
    ),
    _row(
        "data.tokenizer.path",
        "a tokenizer.json, local or on the hub, or a file of SentencePiece or tiktoken",
        "exists, is of its kind, has a model and an end-of-text token; no id beyond model.vocab_size",
        _SUBMIT,
        f"{_FILES}tokenizer_problems",
        _UNSEEN,
    ),
    _row(
        "data.cache.path",
        "a folder for blocks of prepared data in an object store; null: TMPDIR",
        "with such data: can be created, is private to the user, and can be written",
        _SUBMIT,
        f"{_SOURCES}cache_problems",
        f"other machines than this one: {_NODE} of each",
    ),
    _row(
        "data.chat_template",
        "a Jinja file, local or on the hub",
        "exists, is readable",
        _SUBMIT,
        f"{_FILES}template_problems",
        f"{_UNSEEN}; its syntax: {_PREPARATION}",
    ),
    _row(
        "data.images.classes",
        "a file with the names of the classes",
        "exists, is readable, has model.num_labels names",
        _SUBMIT,
        f"{_FILES}class_file_problems",
        _UNSEEN,
    ),
    _row(
        "data.images.folder",
        "the folder of the images that rows name",
        "exists",
        _SUBMIT,
        f"{_FILES}image_folder_problems",
        f"{_UNSEEN}; the images: {_PREPARATION}",
    ),
    _row(
        "code.path",
        "a folder of a git working tree",
        "exists, is in a git working tree, within max_size, has no submodules",
        _SUBMIT,
        "scaletrain_cli.launch.code:take_snapshot",
        "validate does not read the tree; on the nodes every file is compared (launch/node/code.py)",
    ),
    _row(
        "code.engine",
        "a Python module",
        "in the snapshot of code.path, or installed",
        _SUBMIT,
        f"{_CHECKS}engine_problems",
        f"validate does not read the tree; modules installed at {_UNSEEN}",
    ),
    _row(
        "code.command.*",
        "a program and its files",
        "a program in the snapshot of code.path or on PATH; no script of the working tree that the snapshot lacks",
        _SUBMIT,
        f"{_CHECKS}command_problems",
        f"a program on PATH of other machines, and one in an image: {_NODE}",
    ),
    _row(
        "code.import_root",
        "a folder below code.path",
        "exists in the snapshot",
        _SUBMIT,
        f"{_CHECKS}engine_problems",
        "validate does not read the tree",
    ),
    _row(
        "code.on_nodes",
        "a folder of the image or a volume",
        "nothing: only the nodes have it",
        "never before the start",
        "scaletrain_cli.launch.node.code:place_code",
        f"every file is compared with what was submitted by {_NODE}",
    ),
    _row(
        "checkpoint.dir",
        "a folder for checkpoints",
        "a folder that this user can write to or create; space for a checkpoint",
        _SUBMIT,
        f"{_CHECKS}checkpoint_problems",
        _UNSEEN,
    ),
    _row(
        "checkpoint.mirror.to",
        "a place in an object store, or a folder of another file system",
        "a small object can be written and deleted there; a folder: this user can write to it, outside the runs root",
        _SUBMIT,
        "scaletrain_cli.launch.resource_checks.mirror:check_mirror",
        "without credentials, network or the extra remote here (a note), and paths that only the nodes have: the "
        "mirroring process, which reports a finding while the run trains",
    ),
    _row(
        "secret_env.*",
        "a variable of the submitter's environment",
        "set",
        _SUBMIT,
        f"{_CHECKS}secret_problems",
        "Kubernetes: cluster.kubernetes.secrets names the Secret that has it",
    ),
    _row(
        "notify.*.webhook",
        "an environment variable with the URL of a webhook",
        "set, or in secret_env of the run; an http or https URL",
        _SUBMIT,
        f"{_CHECKS}notify_problems",
        "whether the receiver accepts it: `scaletrain notify test`",
    ),
    _row(
        "notify.*.command.*",
        "a program and its arguments",
        "local: the program is on PATH",
        _SUBMIT,
        f"{_CHECKS}notify_problems",
        "other machines: its first use. Training continues without it",
    ),
    _row(
        "tracking.wandb.project",
        "a project of Weights & Biases",
        "wandb is installed; with mode: online, a key exists: WANDB_API_KEY, or an entry in .netrc",
        _SUBMIT,
        f"{_CHECKS}wandb_problems",
        f"validity of the key: {_FIRST_USE}",
    ),
    _row(
        "tracking.wandb.entity",
        "a team of Weights & Biases",
        "-",
        _NEVER_BEFORE,
        f"{_CHECKS}wandb_problems",
        _FIRST_USE,
    ),
    _row(
        "tracking.mlflow.uri",
        "an MLflow server, or a database",
        "mlflow is installed",
        _SUBMIT,
        f"{_CHECKS}tracker_problems",
        f"whether the server responds: {_FIRST_USE}",
    ),
    _row(
        "tracking.mlflow.experiment",
        "an experiment there",
        "nothing: it is created",
        "never",
        f"{_CHECKS}tracker_problems",
    ),
    _row(
        "tracking.tensorboard.dir",
        "a folder",
        "tensorboard is installed; the folder is created",
        _SUBMIT,
        f"{_CHECKS}tracker_problems",
        f"whether the folder is writable: {_FIRST_USE}",
    ),
    _row(
        "tracking.prometheus.textfile",
        "a folder",
        "nothing: it is created",
        "never",
        f"{_CHECKS}tracker_problems",
        f"whether the folder is writable: {_FIRST_USE}",
    ),
    _row(
        "tracking.prometheus.address",
        "an address of the node of rank 0, for its port",
        "nothing: only that node knows its own, and which ports are in use",
        "never",
        f"{_CHECKS}tracker_problems",
        f"whether the port can be opened: {_FIRST_USE}",
    ),
    _row(
        "evaluation.tasks.*.source",
        "files with text",
        "exist, are readable, of a known format",
        _SUBMIT,
        f"{_FILES}evaluation_problems",
        _EVALUATION,
    ),
    _row(
        "evaluation.tasks.*.include_path",
        "a folder with task files of lm-evaluation-harness",
        "exists",
        _SUBMIT,
        f"{_FILES}evaluation_problems",
        _EVALUATION,
    ),
    _row(
        "evaluation.tasks.*.command.*",
        "the program of lm-evaluation-harness",
        "local: is on PATH",
        _SUBMIT,
        f"{_FILES}evaluation_problems",
        _EVALUATION,
    ),
    _row(
        "evaluation.zero_shot.source",
        "labeled images, here, on the hub or in an object store, or an index of them",
        "exist, are readable, of one format; their classes have names",
        _SUBMIT,
        "scaletrain_cli.launch.resource_checks.images:zero_shot_problems",
        f"{_UNSEEN}; every image, and the content of files on the hub: {_PREPARATION}",
    ),
    _row(
        "evaluation.zero_shot.classes",
        "a file with the names of the classes",
        "exists, is readable, has a name in each line",
        _SUBMIT,
        "scaletrain_cli.launch.resource_checks.images:zero_shot_problems",
        _UNSEEN,
    ),
    _row("cluster.gpu", "an accelerator of the catalogue", "known", _PLAN, "scaletrain_cli.plan:make_plan"),
    _row("cluster.gpu.name", "nothing: a table of its own", "-", _LOAD, "scaletrain_cli.spec.loading:load_spec"),
    _row(
        "cluster.gpus_per_node",
        "devices of the nodes",
        "local: this machine has as many. Slurm, Kubernetes: such nodes exist",
        "submit (queries the scheduler)",
        "scaletrain_cli.launch.node.inspection:problems_of_node",
        f"count, model and free memory: {_NODE}, exit 5",
    ),
    _row("cluster.network", "a network of the catalogue", "known", _PLAN, "scaletrain_cli.plan:make_plan"),
    _row(f"{_SL}partition", "a partition", "exists, accepts jobs, admits this one", _SCHEDULER, _SLURM),
    _row(f"{_SL}account", "an account", "one that the user may charge", _SCHEDULER, _SLURM, "no accounting: sbatch"),
    _row(f"{_SL}qos", "a QOS", "one that the user may use", _SCHEDULER, _SLURM, "no accounting: sbatch"),
    _row(f"{_SL}reservation", "a reservation", "exists, for this user", _SCHEDULER, _SLURM, "hidden ones: sbatch"),
    _row(f"{_SL}constraint", "node features", "nodes have them", _SCHEDULER, _SBATCH, "sbatch --test-only checks it"),
    _row(f"{_SL}exclude", "nodes", "enough other nodes remain", _SCHEDULER, _SLURM),
    _row(f"{_SL}nodelist", "nodes", "exist, in the partition", _SCHEDULER, _SLURM),
    _row(f"{_SL}licenses", "licenses", "exists", _SCHEDULER, _SBATCH, "sbatch --test-only checks it"),
    _row(f"{_SL}gres_type", "a type of GPU", "enough nodes have it", _SCHEDULER, _SLURM),
    _row(f"{_SL}memory_per_node", "memory of the nodes", "enough nodes have it", _SCHEDULER, _SLURM),
    _row(
        f"{_SL}modules.*",
        "an environment module of the nodes",
        "nothing: login nodes may have others",
        "never before the start",
        "scaletrain_cli.launch.backends.slurm.script:module_lines",
        "the job script loads it before anything else and ends the job if that fails",
    ),
    _row(
        f"{_SL}activate",
        "a script of the nodes",
        "exists, if its file system is visible here",
        _SUBMIT,
        _SLURM_FILES,
        "the job script sources it before anything else and ends the job if that fails",
    ),
    _row(
        f"{_SL}container.image",
        "an image",
        "a file: exists, if its file system is visible here",
        _SUBMIT,
        _SLURM_FILES,
        "a name in a registry: srun or apptainer on the nodes",
    ),
    _row(
        f"{_SL}container.mounts.*",
        "folders of the nodes",
        "exist, if their file system is visible here",
        _SUBMIT,
        _SLURM_FILES,
        "srun or apptainer on the nodes",
    ),
    _row(
        f"{_SL}container.python",
        "an interpreter of the image",
        "nothing: only the image has it",
        "never before the start",
        "scaletrain_cli.launch.backends.slurm.script:agent_words",
        "srun on the nodes",
    ),
    _row(
        f"{_SL}preparation.partition",
        "a partition",
        "exists, accepts the job: sbatch, before the run is queued",
        _SCHEDULER,
        "scaletrain_cli.launch.backends.slurm.preparation:submit_preparation",
    ),
    _row(f"{_SL}extra.*", "what the option refers to", "accepted", _SCHEDULER, _SBATCH, "sbatch --test-only checks it"),
    _row(
        f"{_K8S}context",
        "a context of the kubeconfig",
        "exists",
        _SCHEDULER,
        "scaletrain_cli.launch.backends.kubernetes.api:connect",
    ),
    _row(f"{_K8S}namespace", "a namespace", "exists", _SCHEDULER, _KUBERNETES, f"no permission to read it: {_API}"),
    _row(
        f"{_K8S}backend",
        "the kind of object",
        "the cluster serves it",
        _SCHEDULER,
        _KUBERNETES,
    ),
    _row(
        f"{_K8S}queue",
        "a LocalQueue, or Volcano's queue",
        "exists, is active, has a quota that can hold the run",
        _SCHEDULER,
        f"{_CAPACITY}queue_capacity",
        "no permission to read it: a warning",
    ),
    _row(f"{_K8S}priority", "a priority class of the queue", "exists", _SCHEDULER, f"{_EXISTENCE}priority"),
    _row(f"{_K8S}pod_priority", "a PriorityClass", "exists", _SCHEDULER, f"{_EXISTENCE}pod_priority"),
    _row(
        f"{_K8S}image",
        "an image in a registry",
        "set; a warning if it is not named by digest",
        _SCHEDULER,
        _KUBERNETES,
        f"only the nodes pull it: {_PLACED}",
    ),
    _row(
        f"{_K8S}pull_secrets.*",
        "a Secret",
        "exists",
        _SCHEDULER,
        f"{_EXISTENCE}secrets",
        "no permission to read it: a warning",
    ),
    _row(f"{_K8S}service_account", "a ServiceAccount", "exists", _SCHEDULER, f"{_EXISTENCE}service_account"),
    _row(
        f"{_K8S}runs.claim",
        "a PersistentVolumeClaim",
        "exists, is bound, ReadWriteMany",
        _SCHEDULER,
        f"{_EXISTENCE}claims",
    ),
    _row(
        f"{_K8S}code_store",
        "a place in object storage",
        "can be written, if no ConfigMap can hold the code",
        "at the submission, before the job is requested",
        "scaletrain_cli.launch.backends.kubernetes.code_store:upload_code",
        "pod 0 fetches it, and each node compares every file with the list in the ConfigMap",
    ),
    _row(f"{_K8S}runs.path", "nothing: a path in the pods", "-", _LOAD, "scaletrain_cli.spec.loading:load_spec"),
    _row(
        f"{_K8S}runs.sub_path",
        "a folder of the volume",
        "nothing: only the nodes have it",
        "never before the start",
        "scaletrain_cli.launch.backends.kubernetes.pod_agent:run_pod",
        "the kubelet creates it; pod 0 creates the run directory in it",
    ),
    _row(f"{_K8S}volumes.*.claim", "a PersistentVolumeClaim", "exists, is bound", _SCHEDULER, f"{_EXISTENCE}claims"),
    _row(f"{_K8S}volumes.*.path", "nothing: a path in the pods", "-", _LOAD, "scaletrain_cli.spec.loading:load_spec"),
    _row(
        f"{_K8S}volumes.*.sub_path",
        "a folder of the volume",
        "nothing: only the nodes have it",
        "never before the start",
        f"{_CHECKS}check_on_node",
        f"what the spec refers to below it: {_NODE}",
    ),
    _row(
        f"{_K8S}secrets.*.secret",
        "a Secret",
        "exists",
        _SCHEDULER,
        f"{_EXISTENCE}secrets",
        "no permission to read it: a warning",
    ),
    _row(
        f"{_K8S}secrets.*.key",
        "a key of it",
        "exists",
        _SCHEDULER,
        f"{_EXISTENCE}secrets",
        "no permission to read it: a warning",
    ),
    _row(f"{_K8S}gpu_resource", "a device plugin", "enough nodes offer it", _SCHEDULER, f"{_CAPACITY}node_capacity"),
    _row(f"{_K8S}rdma_resource", "a device plugin", "enough nodes offer it", _SCHEDULER, f"{_CAPACITY}node_capacity"),
    _row(f"{_K8S}gpu_product", "a label of nodes", "enough nodes have it", _SCHEDULER, f"{_CAPACITY}node_capacity"),
    _row(f"{_K8S}node_selector.*", "a label of nodes", "enough nodes have it", _SCHEDULER, f"{_CAPACITY}node_capacity"),
    _row(f"{_K8S}tolerations.*.key", "a taint", "nothing: one that no node has is harmless", "never", _KUBERNETES),
    _row(f"{_K8S}tolerations.*.value", "a taint's value", "nothing, as for the key", "never", _KUBERNETES),
    _row(
        f"{_K8S}preparation.queue",
        "a LocalQueue",
        "nothing",
        "never",
        _PREPARATION_JOB,
        "`status` and `explain`: the Job waits in a queue",
    ),
    _row(
        f"{_K8S}preparation.node_selector.*",
        "a label of nodes",
        "nothing",
        "never",
        _PREPARATION_JOB,
        "`status` and `explain`, from the scheduler's message",
    ),
    _row(f"{_K8S}preparation.tolerations.*.key", "a taint", "nothing", "never", _PREPARATION_JOB),
    _row(f"{_K8S}preparation.tolerations.*.value", "a taint's value", "nothing", "never", _PREPARATION_JOB),
    _row(
        f"{_K8S}topology.key",
        "a label of nodes",
        "accepted by the queue's admission",
        _SCHEDULER,
        _KUBERNETES,
        _PLACED,
    ),
)
