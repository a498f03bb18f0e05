"""The texts about the preparation of a run's data before its gang starts."""

from scaletrain_cli.reasons import Texts

TEXTS: Texts = {
    "unknown-choice": "--prepare {given} must be one of {choices:list}",
    "is-prepared": "the data are prepared",
    "here": "the data are prepared on this machine first: about {seconds:seconds} with {workers:of worker}",
    "here-as-chosen": "the data are prepared on this machine first, as --prepare now asks for",
    "only-here": "the data are not prepared: this is done first, on this machine",
    "by-user": ("the data must be prepared below the runs root of the nodes", "Run scaletrain data prepare there"),
    "by-the-job": "the pod of the run prepares the data itself, on its own volume, each time it starts",
    "by-the-job-alone": (
        "the pod of the run prepares the data itself, on its own volume (cluster.kubernetes.runs.per_pod)",
        "Leave out --prepare and --submit, or name a claim in cluster.kubernetes.runs.claim",
    ),
    "job-to-count": "the data are prepared by {job}, and counted in steps before the run is planned",
    "job-before": "the data are prepared on the nodes' volume by a job of {tasks:of task} on CPU nodes, if they are "
    "not yet; the training job is created when it has ended",
    "not-here": (
        "the data of a run on {scheduler} cannot be prepared on this machine, which does not see the runs root of the "
        "nodes",
        "Use --prepare job",
    ),
    "unseen-path": "{path} is {place}",
    "no-packages": "{names:list} not installed here",
    "job": "the data are prepared by a job of {tasks:of task}, and the training job waits for it: it would take about "
    "{seconds:seconds} here with {workers:of worker}",
    "job-as-chosen": "the data are prepared by a job of {tasks:of task}, and the training job waits for it, as "
    "--prepare job asks for",
    "job-unseen": "the data are prepared by a job of {tasks:of task}, and the training job waits for it, since they "
    "cannot be read here: {cause}",
    "no-job": ("{scheduler} cannot run a preparation job", "Use --prepare now, or run scaletrain data prepare before"),
    "nothing-to-queue": (
        "{scheduler} cannot run a preparation job",
        "Run the command without --submit, which prepares the data on this machine",
    ),
    "unseen-here": ("the data cannot be prepared on this machine: {cause}", "Use --prepare job"),
    "failed": (
        "the data could not be prepared: {cause}",
        "Correct the cause, then run scaletrain resume {run}, which prepares the data again; --set changes keys of "
        "data, as long as the run has trained nothing",
    ),
    "job-failed": (
        "the preparation job {job} ended without preparing the data",
        "Read its logs in {folder}, then run scaletrain resume {run}, which prepares the data again",
    ),
    "epochs-counted": "{epochs:of epoch} of {samples:whole} {unit} = {steps:of step} of {batch:whole}",
    "epochs-counted-less-validation": "{epochs:of epoch} of {samples:whole} {unit} = {steps:of step} of "
    "{batch:whole}; {held_back:whole} more are held back for validation",
    "epochs-estimated": "{epochs:of epoch} of about {samples:whole} {unit} = about {steps:of step} of {batch:whole}; "
    "they are counted when the data are prepared",
    "epochs-of-sources": "{counted}; the run reads {passes:list}",
    "epochs-uncounted": "the epochs of the run cannot be counted in steps",
    "epochs-not-counted": (
        "training.epochs = {epochs:number} is not counted in steps yet, which are needed here",
        "Set training.steps",
    ),
    "epochs-not-prepared": (
        "epochs are counted in the prepared data, and these data are not prepared before the run is planned: {why}",
        "Run scaletrain data prepare {spec} first where the data can be read, or set training.steps",
    ),
    "epochs-out-of-sight": (
        "epochs are counted in the prepared data, which this machine cannot see with cluster.scheduler = {scheduler}",
        "scaletrain submit counts them, where a job prepares the data before the run; here set training.steps",
    ),
    "epochs-not-estimated": (
        "epochs are counted in the prepared data; these are not prepared, and their size cannot be estimated on this "
        "machine",
        "Run scaletrain data prepare {spec} first, or set training.steps",
    ),
    "epochs-estimate-misfit": (
        "epochs are about {steps:of step} by an estimate, which other settings do not fit: {cause}",
        "Run scaletrain data prepare {spec} to count them, or correct these settings",
    ),
    "epochs-too-many": ("these would be {steps:whole} steps, and a run has at most {most:whole}", "Set fewer epochs"),
    "waiting": (
        "the training job waits for the preparation job {job}",
        "Read the progress of the preparation in {folder}",
    ),
}
