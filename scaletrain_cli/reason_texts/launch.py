"""The texts of the launcher: exits of attempts, restart decisions, states of a run, refusals."""

from scaletrain_cli.reasons import Texts

_RESUME = "scaletrain resume {run}"
_CONTINUE = "scaletrain resume {run} continues it"
_LONGER_TIME = (
    "A longer limit costs fewer restarts: `scaletrain resume {run} --set cluster.slurm.time=...`, after "
    "`scaletrain cancel {run}` if the job is queued again",
)
_MORE_MEMORY = (
    "Request more (Slurm: cluster.slurm.memory_per_node; Kubernetes: cluster.kubernetes.memory_per_node; a local run "
    "has what ulimit and the control group of its shell allow). `scaletrain plan` shows how much of it checkpoints and "
    "offloading use",
)
_OWN_SPACE = (
    "Free space on the file system of its checkpoints: scaletrain checkpoint prune {run} --keep 1 deletes all but the "
    "newest of this run. On resume, --set checkpoint.keep=1 keeps fewer, and --set checkpoint.dir=... uses another "
    "file system, once the folder of the run was copied there"
)
_FREE_SPACE = ("Free some space, or set checkpoint.dir to another file system",)
_LOST_NODE = ("scaletrain nodes list shows which nodes are excluded, and why", "Ask the administrator about that node")

TEXTS: Texts = {
    # ---- profiles of a living run ----------------------------------------------------------------------------------
    "profile-own-program": "the run trains with a program of its own (code.engine or code.command), and only the "
    "built-in engine serves profiles",
    "profile-not-running": (
        "{run} does not train; its state is {state}",
        "`scaletrain profile {run} --show` shows its newest profile.",
    ),
    "profile-unmounted": (
        "the run directory that the ranks use is on a volume that is not mounted here, at {folder}",
        "Run the command where it is mounted, or create an empty file `profile` in it from a pod.",
    ),
    "profile-waiting": (
        "another request waits for the run to take it: {path}",
        "Repeat the command in a few seconds, or remove the file.",
    ),
    "profile-later": "the run is {state}; it is profiled once it trains",
    "profile-not-reached": "the attempt ended before step {step}",
    "profile-replaced": "another request replaced this one before the run took it",
    "profile-run-ended": "{run} ended before it was profiled",
    "profile-timeout": (
        "no profile within {seconds:seconds}",
        "`scaletrain status {run}` shows whether the run trains, and `scaletrain profile {run} --show` the newest "
        "profile.",
    ),
    "profile-none": ("{run} has no profile", "`scaletrain profile {run}` makes one while the run trains."),
    # ---- sessions on a node of a running run -----------------------------------------------------------------------
    "no-session": (
        "`scaletrain exec`, `shell` and `port-forward` are not implemented for {scheduler}",
        "Use the tools of that scheduler.",
    ),
    "session-not-running": (
        "{run} does not run; its state is {state}",
        "`scaletrain status {run}` shows when it does.",
    ),
    "session-unknown": "the scheduler does not say whether {run} runs: {why}",
    "session-no-node": (
        "{run} has no node {node}; its nodes are {names:list}",
        "Give a name, or a number from 0 to {last}.",
    ),
    "session-no-node-number": ("{run} has no node {node}", "Give a number from 0 to {last}."),
    "session-no-rank": ("the run has no rank {rank}", "Give a number from 0 to {last}."),
    "session-no-terminal": (
        "a shell needs a terminal as standard input and output",
        "`scaletrain exec {run} -- COMMAND` runs a command without one.",
    ),
    "session-no-command": "{command} was not found in PATH, and it is needed to reach the node",
    "session-lost": "the connection to {node} ended: {command} ended with exit code {exit_code}, for the reason that "
    "it printed",
    "session-damaged": "what arrives from {node} is not a session: {error}",
    # ---- views of a run whose files are on a volume of its cluster -------------------------------------------------
    "no-view": "{scheduler} offers no way to the files of a run",
    "view-place": "the files of {run}",
    "view-failed": "{error}",
    "view-said": "{why}: {said}",
    "view-now": "the files of the run can be read now",
    "view-unread": "the files of {run} are on a volume of its cluster and were not read: {why}. Shown is what the "
    "cluster reports",
    "view-not-seen": "not seen: the files of the run are on a volume of its cluster that this machine does not see",
    "sent-job-old": (
        "the machine that shows this has not reported the state of the job for {seconds:seconds}",
        "Check whether the scheduler answers there",
    ),
    "port-invalid": "{given}: must be [LOCAL:]REMOTE with ports from 1 to 65535, such as 6006 or 8080:80",
    "port-in-use": (
        "port {port} of this machine cannot be used: {error}",
        "Choose another one: LOCAL:REMOTE, or 0:REMOTE.",
    ),
    # ---- exit classification: what the records of nodes and ranks show ---------------------------------------------
    "calibration-few-steps": "{run} has {steps:of measured step} after the first ones of its latest attempt; a "
    "calibration needs {needed}",
    "calibration-not-written": "{path}: the measurement cannot be written: {why}",
    "all-ranks-finished": "every rank finished",
    "finished-then": "the run recorded its last step as finished; afterwards: {end}",
    "all-ranks-saved": "the ranks stopped, and the latest checkpoint is at step {step}",
    "stopped-unsaved": "the ranks stopped before there was a checkpoint",
    "programs-ended": "the programs of code.command ended within the grace period",
    "rank-failed": "rank {rank} on {node}: {failure}",
    "node-reported": "{node}: {failure}",
    "rank-exited": "rank {rank} on {node} ended with exit code {exit_code}",
    "rank-killed": "rank {rank} on {node} was ended by {signal}",
    "rank-not-killed": "rank {rank} on {node} could not be killed; the node needs attention",
    "rank-out-of-grace": "rank {rank} on {node} had not saved its state when the grace period ended",
    "node-exited": "{node} ended with exit code {exit_code}",
    # A hang, and the rank that it is due to.
    "hung": "no progress for {silent_seconds:seconds}: {finding}. Stacks: {stacks}",
    "hang-not-entered": "rank {rank} on {node} did not enter the {collective}, in step {step}: it {doing} (phase: "
    "{phase}). Ranks that wait in it: {waiting:list}",
    "hang-silent-node": "{nodes:list} did not report (the agent or the machine is stopped or lost), and its ranks "
    "{ranks:list} are missing in the {collective}, in step {step}. Ranks that wait in it: {waiting:list}",
    "hang-entered-by-all": "all ranks have entered the {collective}, in step {step}, which does not end: the network "
    "between {nodes:list}, or a device",
    "hang-node-cut-off": "{node} is cut off: data between it and {peers:list} are not acknowledged. All ranks have "
    "entered the {collective}, in step {step}",
    "hang-link-cut": "data between {nodes:list} are not acknowledged. All ranks have entered the {collective}, in step "
    "{step}",
    "hang-cycle": "ranks {ranks:list} wait for each other, as if they called collectives in different orders: "
    "{places:list}",
    "hang-unresponsive": "rank {rank} on {node} in step {step} {doing} (phase: {phase})",
    "hang-behind": "rank {rank} on {node} is behind: in step {step} ({phase}) while rank {ahead} is in step "
    "{ahead_step} ({ahead_phase})",
    "hang-no-suspect": "no rank stands out: all responded from step {step} ({phase})",
    "rank-stopped": "does not respond: stopped by a signal (state T)",
    "rank-traced": "does not respond: stopped by a debugger (state t)",
    "rank-in-kernel": "does not respond: waits in the kernel for a disk, network file system or driver (state D)",
    "rank-busy": "does not respond: runs code outside Python (state R)",
    "rank-unresponsive": "does not respond: state {state}",
    "rank-in-function": "runs {function}",
    "rank-without-position": "responds",
    "nodes-lost": "lost without reporting an exit status: {nodes:list}",
    "nodes-ended-with-job": "ended with the job before reporting an exit status: {nodes:list}",
    "nodes-never-started": "the node agent reported no start: {nodes:list}",
    "unnamed-nodes-never-started": "the node agent reported no start: {count:of node}",
    "no-agent-started": "no node agent could start (exit code {exit_code}); see its log",
    "no-space-for-record": "the disk was full when an agent wrote its record; {then}",
    "one-and-another": "{first}, and {second}",
    "one-then-another": "{first}; then {then}",
    "cancelled-with": "cancelled; {end}",
    "out-of-time": "the time limit was reached; {end}",
    # ---- restart decisions -----------------------------------------------------------------------------------------
    "restart-free": "{exit_reason}: restarted, not counted against a budget",
    "restart-unlimited": "{exit_reason}: restart {used} (restarts.{budget})",
    "restart-counted": "{exit_reason}: restart {used} of {allowed} (restarts.{budget})",
    "stop-done": "the run is done",
    "stop-cancelled": "the run was cancelled",
    "stop-superseded": "the run continues in {run_dir} on {host}, from its mirror",
    "stop-cancelled-before-start": "the run was cancelled before the attempt began",
    "stop-before-start": "the job was stopped before an attempt began",
    "job-stopped": "the job was stopped",
    "stop-idle": "the run did nothing; `scaletrain resume` continues it",
    "stop-no-retry": "exit code {exit_code} means that a retry cannot help",
    "stop-budget-used-up": "{exit_reason}: restarts.{budget} = {allowed} is used up",
    "stop-no-progress": "{attempts} failed attempts in a row committed no newer checkpoint",
    "stop-no-progress-preempted": "{attempts} preempted attempts in a row made no progress: cluster.grace_seconds, "
    "the time limit or the time between preemptions is too short to start up, or a program exits with 75 by itself. "
    "Correct that, then `scaletrain resume`",
    "stop-caches": (
        "{attempts} attempts could not fetch the files of the hub for the same reason, so another node is not tried: "
        "{failure}",
        "Correct the cause, then `scaletrain resume`",
    ),
    "watcher-gone": "the process that watched the attempt is gone",
    # ---- exit reasons: what each means, and what to do -------------------------------------------------------------
    "exit-done": "attempt {attempt} ended: the run is done",
    "exit-cancelled": ("attempt {attempt} ended: the run was cancelled", f"{_RESUME} continues it"),
    "exit-preempted": "attempt {attempt} ended: preempted; all ranks saved a checkpoint and exited",
    "exit-time-limit": (
        "attempt {attempt} ended: the time limit was reached; all ranks saved a checkpoint before it",
        *_LONGER_TIME,
    ),
    "exit-resize": (
        "attempt {attempt} ended: it was stopped at a checkpoint to restart on more nodes",
        "cluster.nodes.grow: false keeps a run on the nodes that it has, until it is preempted",
    ),
    "exit-idle": (
        "attempt {attempt} ended: the run did nothing for cluster.idle_timeout, and its nodes were released",
        f"{_RESUME} continues it",
        f"{_RESUME} --set cluster.idle_timeout=2h allows more time; =null allows any",
        "scaletrain logs {run} shows what the ranks printed last, which may be what they waited for",
    ),
    "exit-out-of-grace": (
        "attempt {attempt} ended: the grace period expired before all ranks had saved; the latest committed "
        "checkpoint will be used",
        "Set cluster.grace_seconds to more than a step and a save take, and raise the limit of the site with it "
        "(Slurm: GraceTime, KillWait; Kubernetes: terminationGracePeriodSeconds)",
        "Save more often (checkpoint.every), so that less is lost where no grace period is long enough",
    ),
    "exit-node": ("attempt {attempt} lost a node: its agent ended without reporting an exit status", *_LOST_NODE),
    "exit-wrong-nodes": (
        "attempt {attempt} ended: a node is not what was planned",
        "Request the right nodes: cluster.gpu, cluster.gpus_per_node, or the constraints of the scheduler",
        "scaletrain nodes list shows which nodes are excluded now",
    ),
    "exit-hardware": (
        "attempt {attempt} ended: a device failed; no program can cause this",
        "Have the node drained and the device tested; runs exclude the node for a week (scaletrain nodes list)",
    ),
    "exit-hang": (
        "attempt {attempt} hung: a rank made no progress, and the others waited for it in a collective",
        "Read the stacks: what the named rank does is the cause; the other ranks wait for it",
        "If a step really takes that long, set guard.hang in the spec",
    ),
    "exit-communication": (
        "attempt {attempt} ended: ranks lost their connections, and no rank reported why it ended; the network "
        "failed, or a node did",
        "If it happens again on the same nodes, see scaletrain nodes list and tell the administrator",
        "`--set env.NCCL_DEBUG=INFO` on resume makes NCCL print which interface and peer it loses",
    ),
    "exit-crash": (
        "attempt {attempt} ended: the program failed",
        "scaletrain logs {run} shows what the ranks printed",
        "Fix the cause, then " + _RESUME,
    ),
    "exit-killed": (
        "attempt {attempt} ended: a rank was killed from outside, not by the kernel, the agent or a signal of the "
        "scheduler",
        "Find out who can do that: an administrator, a clean-up job, a limit on the processes of a login session",
    ),
    "exit-oom": (
        "attempt {attempt} ended: a device ran out of memory",
        "scaletrain status {run} compares the measured memory with the plan; the memory folder of the attempt shows "
        "what held it",
        "Use less: `scaletrain resume {run} --set training.micro_batch_size=1`, or layout.activation_checkpointing, "
        "layout.zero_stage; `scaletrain plan SPEC` shows the size first",
    ),
    "exit-host-oom": (
        "attempt {attempt} ended: a rank had no more host memory, on its node or within the limit of its job",
        *_MORE_MEMORY,
    ),
    "exit-nan": (
        "attempt {attempt} ended: the loss or a gradient was not finite; no optimizer step was taken with it",
        "`scaletrain diagnose {run}` names likely causes. Usual ones: the learning rate, the warm-up, fp16 where bf16 "
        "would do, odd samples",
        f"{_RESUME} --set training.optimizer.lr=... continues it at a lower rate; with --set guard.nan=rollback it "
        "skips the batches that a clean checkpoint has not seen",
    ),
    "exit-spike": (
        "attempt {attempt} ended: the loss left its range again after every allowed roll-back",
        "The events name the skipped ranges of data: check them",
        f"Lower the learning rate or the limit of the gradient norm: {_RESUME} --set training.optimizer.lr=... "
        "--set training.gradient_clipping=...",
    ),
    "exit-disk-full": (
        "attempt {attempt} ended: there was no space for a checkpoint",
        _OWN_SPACE,
        f"{_RESUME} continues it once there is space",
    ),
    "exit-unreadable": (
        "attempt {attempt} ended: no node of the job could read a checkpoint",
        "Check the file system that holds the checkpoints (mounted, responding, owner and permissions of the files); "
        "no single node is at fault, so none is excluded",
        "scaletrain checkpoint verify {run} names the files that cannot be read",
        _RESUME + " continues the run once they can be read",
    ),
    "exit-data": (
        "attempt {attempt} ended: the training data differ from what was prepared; no step was trained on them",
        "Restore the file that the message names from a copy; or delete the folder of the dataset and prepare the "
        "same data again: scaletrain data prepare SPEC",
        "If it happens again with other chunks, test the memory and the disks of that node",
        _RESUME + " then continues the run",
        "If the message names an image and its batch B, "
        + _RESUME
        + " --set 'data.skip=[[B, B]]' continues without this batch",
    ),
    "exit-usage": (
        "attempt {attempt} ended: the spec, the data or the installation is wrong; a retry would not help",
        "Fix what the message says, then submit or resume",
    ),
    # ---- what a scheduler reports as the cause of the end of a whole job -------------------------------------------
    "job-cancelled": "its job was cancelled",
    "job-preempted": "its job was preempted",
    "job-time-limit": "its job reached its time limit",
    "job-host-oom": "its job exceeded its memory limit",
    "job-node": "its job lost a node",
    "exit-by-scheduler-cancelled": (
        "attempt {attempt} ended: its job was cancelled ({detail})",
        f"{_RESUME} continues the run",
    ),
    "exit-by-scheduler-preempted": "attempt {attempt} ended: its job was preempted ({detail})",
    "exit-by-scheduler-time-limit": (
        "attempt {attempt} ended: its job reached its time limit ({detail})",
        *_LONGER_TIME,
    ),
    "exit-by-scheduler-host-oom": (
        "attempt {attempt} ended: its job exceeded its memory limit ({detail})",
        *_MORE_MEMORY,
    ),
    "exit-by-scheduler-node": ("attempt {attempt} ended: its job lost a node ({detail})", *_LOST_NODE),
    # ---- attempts without a recorded end ---------------------------------------------------------------------------
    "attempt-unknown": "whether attempt {attempt} still runs is not known: {detail}",
    "attempt-running": "attempt {attempt} is running; {scheduler} reports: {detail}",
    "attempt-not-over": "attempt {attempt} has reported no end, and its job is not over; {scheduler} reports: {detail}",
    "unreported-end": (
        "attempt {attempt} ended without reporting an exit status: {cause}",
        "scaletrain logs {run} shows what the ranks printed last",
        _CONTINUE,
    ),
    "unreported-end-of-job": (
        "attempt {attempt} ended without reporting an exit status: {cause}; {scheduler} reports: {detail}",
        "scaletrain logs {run} shows what the ranks printed last",
        _CONTINUE,
    ),
    "unreported-read-only": (
        "attempt {attempt} ended without reporting an exit status: the file system of {folder} is read-only; "
        "{scheduler} reports: {detail}",
        "Have the file system checked, and mounted for writing",
        _CONTINUE,
    ),
    "disk-is-full": "the file system of {folder} is full",
    "disk-was-full": "the end could not be recorded, because the file system of {folder} was full",
    "unreported-disk-full": (
        "attempt {attempt} ended without reporting an exit status: {cause}; {scheduler} reports: {detail}",
        _OWN_SPACE,
        "scaletrain logs {run} shows what the ranks printed last",
        _CONTINUE,
    ),
    "unreported-unknown": (
        "attempt {attempt} ended without reporting an exit status, and the cause is not known; {scheduler} reports: "
        "{detail}",
        "scaletrain logs {run} shows what the ranks printed last",
        _CONTINUE,
    ),
    # ---- states of a run -------------------------------------------------------------------------------------------
    "job-detail": "{detail}",
    "no-attempt": "no attempt began",
    "job-without-attempt": "{detail}; no attempt began",
    "job-without-attempt-see-log": "{detail}; no attempt began; see {log} in the run directory",
    "attempt-ended": "attempt {attempt} ended with exit code {exit_code}: {end}",
    "attempt-ended-decided": "attempt {attempt} ended with exit code {exit_code}: {end}; {decision}",
    "attempt-ended-maybe-followed": "{end}. Whether another attempt follows is not known: {detail}",
    "attempt-ended-job-active": "{end}. {scheduler} reports: {detail}",
    "attempt-ended-job-gone": "{end}. But the job is gone, so the restart will not happen; `scaletrain resume` "
    "continues the run",
    "attempt-ended-job-failed": "{detail}. Before that, {end}",
    "attempt-ended-with-job": "{end}. The job is over, so no attempt follows; `scaletrain resume` continues the run",
    "unreachable": (
        "node {node} cannot reach the first node at {address}, port {port}: {error}; the ranks wait for it",
        "Check the name, the firewall between the nodes, and the network interface: NCCL_SOCKET_IFNAME and "
        "GLOO_SOCKET_IFNAME in env choose another one.",
    ),
    "straggler": "rank {rank} computes {seconds:seconds} per step before it waits, the other ranks "
    "{others_seconds:seconds}",
    "idle": (
        "the {what} of the run have done nothing for {seconds:seconds}; unless they do, its ranks save and exit in "
        "{left:seconds} (cluster.idle_timeout = {timeout:seconds})",
        "Let the run do its work, or release its nodes: `scaletrain cancel {run}`",
        "scaletrain logs {run} shows what the ranks printed last, which may be what they wait for",
    ),
    "ended-idle": "the {what} of the run did nothing for {seconds:seconds}, the time of cluster.idle_timeout",
    "lost-before-attempt": "its job ended before an attempt began: {detail}",
    # ---- explain: a run without an ended attempt -------------------------------------------------------------------
    "state-unknown": (
        "whether {what} of {run} is queued, running or over is not known",
        "Run `scaletrain explain {run}` again once the scheduler answers",
        "scaletrain doctor",
    ),
    "queued": "the job has not started",
    "suspended": (
        "job {job} is suspended: its processes are stopped",
        "The job continues once the scheduler, or the user who suspended it, resumes it",
    ),
    "ending": (
        "job {job} is ending; some of its processes still exist",
        "Run `scaletrain status {run}` again: the end is known once the last process is gone",
    ),
    "running": ("attempt {attempt} is running", "scaletrain logs {run} --follow"),
    "job-running": ("the job is running", "scaletrain logs {run} --follow"),
    "never-began": ("the job ended before an attempt began", f"{_RESUME} submits it again"),
    # ---- explain: evidence -----------------------------------------------------------------------------------------
    "steps-logged": "step {step} of {total}",
    "last-line-age": "the last line was written {age:seconds} ago",
    "no-checkpoint": "no checkpoint was committed; {logged:of step} logged",
    "newest-checkpoint": "the newest checkpoint is of step {step}; {logged:of step} logged",
    "failure-of": "{who}: {failure}",
    "more-failures": "and {count} more",
    "memory-by-part": "memory of each part, beside the plan",
    "raised-finding": "diagnosed while it trained ({severity}): {finding}; see `scaletrain diagnose {run}`",
    "earlier-attempts": "{attempts:list}; {lost:of step} trained twice so far",
    "resumed-from-copies": "{resumed:of attempt} resumed from a copy in host memory, the last one at step "
    "{step:whole}; the checkpoint on disk was of step {saved:whole}",
    "follows": "another attempt follows",
    "follows-not": "no attempt follows unless the run is resumed",
    "follows-unknown": "whether another attempt follows is not known: {detail}",
    "follows-not-job-over": "no attempt follows, since the job is over: {detail}",
    "decided": "{decision}; {follows}",
    "continue": ("the latest valid checkpoint is used", _CONTINUE),
    # ---- job arrays ------------------------------------------------------------------------------------------------
    "no-arrays": ("--array: {scheduler} has no job arrays here", "Leave it out: each run then has a job."),
    "array-not-prepared": (
        "--array: the data of the sweep are not prepared, and the tasks of an array wait for no job",
        "Prepare them first: --prepare now",
    ),
    "array-partly-submitted": (
        "--array: some runs of the sweep {sweep} were submitted before, and others not",
        "Submit it without --array: each of the others then gets a job of its own",
    ),
    # ---- cancel ----------------------------------------------------------------------------------------------------
    "no-force": ("--force has no effect on {scheduler}, where {run} is", "Remove the option"),
    # ---- resume ----------------------------------------------------------------------------------------------------
    "resume-finished": (
        "{run} has finished; there is nothing to resume",
        "Give it more steps: `scaletrain resume {run} --set training.steps=...`",
    ),
    "resume-stopped-early": (
        "{run} has stopped early, and would stop again at once",
        "Add --set training.early_stopping.patience=0, or a greater one than before",
    ),
    "resume-too-few-steps": (
        "gives {steps:of step}, and the run has trained {step}",
        "Set more than {step}; `scaletrain resume RUN --branch NEW_ID --at STEP` continues an earlier checkpoint as a "
        "new run",
    ),
    "resume-stage-moves": (
        "is a share of the steps of the run, and with {steps} of them the stage would begin at step {now} instead of "
        "{was}",
        "Give the step: --set data.stages.{stage}.start={was}, or another one",
    ),
    "resume-epochs-move": (
        "sets the share of the source by the length of the run, which would be {now} steps instead of {was}",
        "Give the share: --set data.sources.{source}.epochs=null --set data.sources.{source}.weight=..., as the event "
        "`mixture` of the run shows it",
    ),
    "resume-mean-has-begun": (
        "would move the last quarter of the run, and the mean of its weights (training.averaging.name: checkpoints) "
        "begins at step {first}",
        "Branch from a checkpoint before step {first}: `scaletrain resume RUN --branch NEW_ID --at STEP`",
    ),
    "resume-unknown": ("whether {run} is still running is not known: {detail}", "Resume it once that is known"),
    "resume-active": ("{run} is still active: {detail}", "Wait for it, or run `scaletrain cancel {run}` first"),
    "resized": "job {job} got nodes for {nodes} of the sizes {sizes:list}; the attempt before had {before}",
    "asked-to-grow": "stopped at a checkpoint to restart on {nodes:of node} instead of {before}: the restart takes "
    "about {cost:seconds}, and saves {gain:seconds}",
    "resume-resized-meanwhile": (
        "{run} was resized by another command in the meantime",
        "Check its status, then resume it",
    ),
    "resume-has-checkpoint": (
        "{checkpoint} is valid, so there is no reason to start from scratch",
        "Resume without that option, or submit a new run",
    ),
    "resume-checkpoints-invalid": (
        "{run} trained up to step {step}, and no checkpoint of it can be loaded: {passed_over}",
        "Restore the files, or train from the start with --from-scratch",
    ),
    "resume-checkpoints-gone": (
        "{run} trained up to step {step}, and none of its checkpoints exists any more",
        "Restore the files, or train from the start with --from-scratch",
    ),
    "resume-unseen": (
        "the pods of {run} wrote its checkpoints to a volume that is not visible here, and its attempts would not see "
        "them on {scheduler}",
        "Resume it on its present cluster, or train from the start with --from-scratch",
    ),
    "resume-unseen-mirrored": (
        "the pods of {run} wrote its checkpoints to a volume that is not visible here, and its attempts would not see "
        "them on {scheduler}",
        "Resume it from its mirror: add --from-mirror {place}",
    ),
    "resume-layout-fixed": (
        "{run} cannot continue in another layout: {optimizer} keeps its states quantized in blocks that follow the "
        "layout, and cutting them again would change them",
        "Resume it on as many GPUs and in the same layout",
    ),
    # ---- branches --------------------------------------------------------------------------------------------------
    "branch-no-checkpoint": "{run} has no valid checkpoint in {folder} to branch from",
    "branch-other-steps": (
        "{run} has no checkpoint of step {step}; there are those of steps {steps:list}",
        "Set --at to one of them",
    ),
    "branch-checkpoint-invalid": ("the checkpoint of step {step} is not valid: {problems}", "Set --at to another step"),
    "branch-checkpoint-gone": (
        "{run} has deleted its checkpoint of step {step} meanwhile: {path}",
        "Set --at to another step; checkpoint.keep and checkpoint.keep_every decide which ones remain",
    ),
    "branch-complete": (
        "the checkpoint of step {step} of {run} is the last of {steps:of step}",
        "Add --set training.steps=...",
    ),
    "branch-folder-used": ("{folder} of the new run has checkpoints already", "Use another id, or delete that folder"),
    "branch-unseen": (
        "the pods of {run} write its checkpoints to a volume that is not visible here, so that no run can begin from "
        "one",
        "Bring it here first: `scaletrain resume {run} --from-mirror URL` on a cluster with a shared run directory",
    ),
    "resume-another-run": "{run} would no longer be the same run",
    "resume-no-code": ("{run} has no code of yours to take again", "Name it: --set code.path=FOLDER"),
    "resume-keeps-code": ("was {before}, and a run keeps its code", "Leave it as it is"),
    "resume-keeps-checkpoints": (
        "the checkpoints of the run are in {before}",
        "Copy the folder of the run there first, or leave it as it is",
    ),
    "resume-fixed-batch": (
        "{problem}; a resumed run keeps its global batch size",
        "Use a number of nodes that divides it",
    ),
    "resume-pinned": ("is pinned; with auto the planner finds a layout", "Add --set {key}=auto"),
    "resume-pinned-together": (
        "is pinned; with auto for each of {keys:list} the planner finds a layout",
        "Add --set {key}=auto",
    ),
    "resume-fixed-key": (
        "was {before}, and what is trained cannot change",
        "A resumed run may change {allowed}, and all of data until its first step; submit a new run for anything else",
    ),
    "resume-source-removed": (
        "{source} is missing, and samples or the tokenizer of the run so far come from it",
        "Keep it with weight: 0",
    ),
    "resume-source-and-tokenizer": (
        "{source} is new, and the tokenizer of the run was trained on the other sources",
        "Prepare it with the tokenizer.json of the run's datasets and give its folder as the path",
    ),
    "resume-source-and-reference": (
        "{source} is new, and the weights are no longer those of the reference",
        "Submit a new run",
    ),
    "resume-source-and-duplicates": (
        "{source} is new, and data.prepare.{step} would remove other documents of the sources before it",
        "Prepare it on its own and give the folder of its dataset as the path",
    ),
    # ---- excluded nodes --------------------------------------------------------------------------------------------
    "nodes-not-excluded": "the job needs {needed} of {usable:of usable node}, or names these nodes itself",
    # ---- sweeps ----------------------------------------------------------------------------------------------------
    "sweep-not-submitted": "{run} ({overrides:list}) could not be submitted, so none is submitted: {cause}",
    "sweep-unanswered": (
        "{run} ({overrides:list}) could not be submitted, so none is submitted: {cause}; whether {run} has a job is "
        "not known",
        "Check it with `scaletrain status {run}`",
    ),
    "sweep-partly-submitted": (
        "{why}; these runs could not be cancelled again: {runs:list}",
        "Cancel each with `scaletrain cancel`",
    ),
    "cluster-not-reported": "{scheduler} reports nothing about its nodes",
    # ---- before a submission ---------------------------------------------------------------------------------------
    "not-implemented": ("{option} is not implemented for {scheduler}", "Remove the option"),
    "no-foreground": "jobs of {scheduler} cannot run in the foreground",
    "start-unknown": "{scheduler} does not estimate when a job starts",
    "runs-root-local": (
        "the runs root {folder} is on {file_system}, which other nodes see only if this machine exports it",
        "Put it on a file system that all nodes share ($SCALETRAIN_RUNS), or test the nodes with --probe",
    ),
    "runs-root-unprotected": (
        "every user of this machine can rename and replace the runs in {folder}",
        "Run `chmod o-w,+t {folder}`",
    ),
    "no-new-datasets": "only data that are already prepared can be used: {cause}",
    "nothing-can-be-saved": "the run could not save a checkpoint; nothing was submitted",
    "disk-too-small": ("{folder} has {free:bytes} free, and one checkpoint takes {needed:bytes}", *_FREE_SPACE),
    "disk-too-small-of-runs": (
        "{folder} has {free:bytes} free, and one checkpoint of each of {runs} runs takes {needed:bytes}",
        *_FREE_SPACE,
    ),
    "disk-space-low": "{folder} has {free:bytes} free, and the next {checkpoints:of checkpoint} (checkpoint.keep, and "
    "the one being written) take {needed:bytes}",
    "disk-space-low-of-runs": "{folder} has {free:bytes} free, and the next {checkpoints:of checkpoint} of each of "
    "{runs} runs (checkpoint.keep, and the one being written) take {needed:bytes}",
    # ---- drills ----------------------------------------------------------------------------------------------------
    "drill-not-finished": "the run did not finish; its state is {state}: {why}",
    "drill-attempts": "it took {attempts:of attempt} instead of {expected} ({ends:list})",
    "drill-steps-lost": "{steps:of step} lost despite the warning",
    "drill-damage-not-reported": "the damaged file was not reported",
    "drill-not-rolled-back": "it did not roll back to before the spike",
    "drill-resumed": "it did not restart without a resume",
    "drill-exit-code": "it stopped with exit code {exit_code} instead of {expected}",
    "drill-differs": "it does not match the undisturbed run: {difference}",
    "drill-match-bitwise": "bit for bit",
    "drill-match-bitwise-with-files": "bit for bit, checkpoint files too",
    "drill-match-no-steps": "no step was logged",
    "drill-match-until-step": "different from step {step} on; relative difference of the final loss: "
    "{loss_difference:.1e}",
    "drill-match-not-finite": "the final loss is {loss:number} instead of {expected:number}",
    "drill-match-number-of-steps": "{steps:of step} logged instead of {expected}; relative difference of the final "
    "loss: {loss_difference:.1e}",
}
