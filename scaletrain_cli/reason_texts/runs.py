"""The texts of the verbs that create, show, prune and delete runs."""

from scaletrain_cli.reasons import Texts

_OTHER_ID = ("Use another run id",)
_EXPORT = ("Export the value first",)

TEXTS: Texts = {
    # ---- submit ----------------------------------------------------------------------------------------------------
    "not-runnable": "{file} can be planned, but not run by this version",
    "invalid-id": "run id {id!r} is invalid: use at most 128 letters, digits, '.', '_' and '-', with no leading dot",
    "other-spec": ("run {run} exists with another spec: {differences}", *_OTHER_ID),
    "other-beginning": ("run {run} exists and began in another way, or from another checkpoint", *_OTHER_ID),
    "other-code": (
        "run {run} exists with other code: it has {before}, not {given}",
        "Use another run id, or give the run the new code with `scaletrain resume {run} --new-code`",
    ),
    "not-created": "the run directory {folder} cannot be created: {said}",
    "secret-not-set": ("secret_env names {names:list}, which is not set here", *_EXPORT),
    "output-format": ("--output {requested}: jobs of {scheduler} have the format {format}", "Use {format} or json"),
    "root-not-writable": ("the runs root {folder} is not writable: {said}", "$SCALETRAIN_RUNS moves it"),
    # ---- evaluation ------------------------------------------------------------------------------------------------
    "evaluation-without-tasks": (
        "the spec of {run} has no evaluation.tasks, so that there is nothing to run on its checkpoints",
        "Set evaluation.tasks with `scaletrain resume {run} --set`, or in the spec of the next run",
    ),
    "checkpoints-unseen": (
        "the checkpoints of {run} are on a volume of its cluster that this machine does not see",
        "Run the command on a machine or in a pod that mounts it",
    ),
    "evaluation-without-checkpoint": "{run} has no checkpoint of step {step}; it has the steps {steps:list}",
    "evaluation-does-not-fit": (
        "an evaluation needs {weight_bytes:bytes} for the weights, and {gpu} has {capacity_bytes:bytes}",
        "Set evaluation.job.cluster.gpu to a device with more memory",
    ),
    "evaluation-not-submitted": (
        "no evaluation of {run} could be submitted: {error}",
        "`scaletrain evaluation submit {run} --follow` submits them from another machine",
    ),
    "evaluations-left": (
        "{run} has ended before evaluations of the steps {steps:list} were submitted",
        "Run `scaletrain evaluation submit {run}`",
    ),
    # ---- logs ------------------------------------------------------------------------------------------------------
    "no-such-attempt": "{run} has no attempt {attempt}; it has the attempts 1 to {last}",
    "no-attempts": "{run} has no attempt {attempt}; none has started",
    "no-such-rank": "attempt {attempt} of {run} has no rank {rank}; it has 0 to {last}",
    # ---- drill -----------------------------------------------------------------------------------------------------
    "too-few-steps": "--steps {steps}: a drill needs at least {least}, for four checkpoints",
    # ---- checkpoint prune ------------------------------------------------------------------------------------------
    "prune-active": (
        "{run} is or may be active; an active run prunes its checkpoints itself",
        "Set checkpoint.keep, or wait until the run has ended",
    ),
    "prune-nothing": "{run} has no checkpoint in {folder}",
    "prune-none-valid": (
        "no checkpoint of {run} is valid, so none was deleted",
        "`scaletrain checkpoint verify {run}` lists what is wrong with each",
    ),
    # ---- rm --------------------------------------------------------------------------------------------------------
    "is-link": "{folder} is a symbolic link, not a run directory; nothing was deleted",
    "replaced": "{folder} was replaced by another folder; nothing was deleted",
    "active": ("{run} is {state}", "Cancel it first: `scaletrain cancel {run}`"),
    "maybe-active": ("{run} may be active: {detail}", "Delete it where its state is known"),
    "state-unknown": (
        "{run} was not deleted, because it may be active: {cause}",
        "If its job no longer exists, delete the folder {folder} yourself",
    ),
    "no-checkpoint-folder": (
        "{folder} is not a folder of checkpoints",
        "Delete it yourself, or leave out --checkpoints",
    ),
    "checkpoints-of-other-user": (
        "{folder} belongs to another user; nothing was deleted",
        "Leave out --checkpoints to keep it",
    ),
    "checkpoints-left": (
        "{names:list} in {folder} cannot be deleted; the run still exists, without its other checkpoints",
        "Check the owner and the permissions",
    ),
    "files-left": (
        "{run} is no longer a run, but not all of its files can be deleted: {file}: {said}",
        "Correct the permissions and delete {folder} yourself",
    ),
}
