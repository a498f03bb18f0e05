"""The texts of the node agent: why it ended an attempt, from its own observation of ranks and node."""

from scaletrain_cli.reasons import Texts

TEXTS: Texts = {
    # How a rank ended that could not state it itself.
    "killed-for-memory": "rank {rank} was killed by the kernel: the host, or the job's memory limit, was out of memory",
    "aborted": "rank {rank} ended with {signal}; the end of {log} has the cause",
    "disk-full": "rank {rank} failed and {folder} has no space left: {error}",
    "hung": "no progress for {silent_seconds:seconds}, or on another node. Stacks: {stacks}",
    # What a start waits for.
    "start-waits": "no step yet; on {node} in the phase {phase} for {seconds:seconds}: rank {ranks:list}; ended as "
    "hung after {limit:seconds} of it",
    "start-waits-for-nodes": "no step yet; {joined} of {of} node agents have started, without {absent:list}; on {node} "
    "in the phase {phase} for {seconds:seconds}: rank {ranks:list}; ended as hung after {limit:seconds} of it",
    # A command beside the ranks.
    "exec-no-attempt": (
        "no attempt of {run} runs on node {node_rank} now: it is starting, or between two attempts",
        "Repeat the command; `scaletrain status {run}` shows the attempts.",
    ),
    "exec-no-rank": "rank {rank} does not run on {node} now",
    "exec-failed": "the command could not be run on the node: {error}",
    # Views for another machine.
    "view-no-directory": "there is no run directory {folder} on the volume: no pod has written to it yet",
    "view-other-run": "{folder} on the volume is another run with the same name",
    "view-other-revision": "{folder} on the volume has revision {found} of the run, and no pod of revision {wanted} "
    "has started yet",
    "view-failed": "the run directory could not be read: {error}",
    "port-not-open": "port {port} of the node refuses the connection: {error}",
    # Why no rank was started: the job and the run directory.
    "parent-ended": "the parent process {pid} has ended; no rank is started",
    "job-exists": "{run} has a job already",
    "job-failed": "the job cannot continue: {error}. No attempt follows; correct that, then `scaletrain resume`",
    "no-free-port": "no TCP port between {first} and {last} is free on this machine",
    "run-missing": ("{path} does not exist on {host}", "Check that its file system is mounted there."),
    "run-unwritable": "the run directory {path} cannot be written on {host}: {error}",
    "attempt-missing": (
        "{path} has no attempt {attempt}",
        "Check that the nodes and the launcher share this directory.",
    ),
    "secrets-missing": "{path} does not hold {names:list}, named in secret_env",
    # Why no rank was started: the user's code.
    "code-differs": (
        "the code in {folder} differs from what was submitted ({code}): {files:list}",
        "Submit it as a new run.",
    ),
    "code-differs-in-image": (
        "the code in {folder} differs from what was submitted ({code}): {files:list}",
        "Put the submitted tree into {folder}.",
    ),
    "code-list-unreadable": "the list of the files of the run's code cannot be read: {error}",
    "code-list-differs": ("{path} differs from what was submitted", "Restore it, or submit a new run."),
    "code-archive-differs": ("{path} differs from the archive that was submitted: {error}", "Submit it as a new run."),
    "code-not-unpacked": "the run's code cannot be unpacked from {path}: {error}",
    "code-folder-not-private": (
        "{folder} exists and is not private to this user; no code is unpacked there",
        "Remove it, or set TMPDIR.",
    ),
    # Why no rank was started: the node.
    "unfit": "{problems}",  # several of those below
    "too-few-gpus": "{found:of GPU} ({source}), but the plan needs {planned} per node",
    "host-memory-short": "{free_bytes:bytes} of host memory are free for this job, but the copy that checkpoints are "
    "written from and the offloaded states take {needed_bytes:bytes}",
    "driver-failed": "{error}",
    "gpu-memory-broken": "GPU {gpu} has broken memory that its spare rows cannot replace (remapped row failure)",
    "gpu-needs-reset": "GPU {gpu} has broken memory and needs a reset to take it out of use",
    "gpu-in-use": "GPU {gpu} has {free_bytes:bytes} free of {memory_bytes:bytes}, and {processes:of "
    "process/processes} use it; the plan needs {needed_bytes:bytes}",
    "gpu-too-small": "GPU {gpu} is a {name} with {memory_bytes:bytes}; the plan needs {needed_bytes:bytes}",
    # Notes about a node that may run ranks.
    "gpu-ecc-errors": "GPU {gpu} has had {errors:of uncorrected ECC error} since its driver was loaded",
    "gpu-clocks-limited": "the clocks of GPU {gpu} are held down by {cause}",
    "other-version": "the installed scaletrain is {installed}, but the run was made with {submitted}: another "
    "version, image or checkout",
    "few-cores": (
        "{ranks} ranks share {cores:of CPU core}: kernels are launched, data read and checkpoints written late",
        "Request more with cluster.cpus_per_gpu.",
    ),
    "shm-small": (
        "{folder} has {free_bytes:bytes} free; NCCL may need {needed_bytes:bytes}, and then fails with 'No space left "
        "on device'",
        "Increase it (cluster.kubernetes.shm_size, docker --shm-size).",
    ),
    "clock-ahead": "the clock is {seconds:.0f} s ahead of that of the run directory's file system: times in logs are "
    "wrong",
    "clock-behind": "the clock is {seconds:.0f} s behind that of the run directory's file system: times in logs are "
    "wrong",
    "stopped-in-fetch": "stopped before any rank was started, while files of the hub were fetched",
    "lost-in-fetch": "node {node_rank} has reported no progress for {seconds:seconds} while files of the hub were "
    "fetched",
}
