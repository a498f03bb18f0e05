"""The texts of the local back end."""

from scaletrain_cli.reasons import Texts

TEXTS: Texts = {
    # ---- submit and cancel -----------------------------------------------------------------------------------------
    "unfit-machine": ("this machine cannot run the job: {problems:list}", "Change cluster.gpus_per_node"),
    "no-queue": "this machine has no queue",
    "shared-gpus": (
        "--max-concurrent {requested}: local runs do not wait for free GPUs of this machine, and would share them",
        "Leave the option out to run them one after the other, or use cluster.scheduler = slurm",
    ),
    "started-elsewhere": ("{run} was started on {host}", "Cancel it on {host}"),
    # ---- the job of a run ------------------------------------------------------------------------------------------
    "never-started": "never started",
    "job-elsewhere": "was started on {host}; its state can only be queried there",
    "waits-for-run": "waits for {run}, the run before it in its sweep",
    "supervisor-running": "the supervisor is running",
    "agent-stopping": "the supervisor has ended; the node agent is stopping its ranks",
    "no-process": "no process is left",
    # ---- the supervisor --------------------------------------------------------------------------------------------
    "supervisor-not-started": "the supervisor did not start: {said}",
    "supervisor-exited": "the supervisor did not start: it exited with code {exit_code}",
    "supervisor-timed-out": ("supervisor {pid} did not start within {seconds:.0f} s", "See {folder}"),
    "supervisor-exists": "{run} already has a supervisor",
    "supervisor-failed": "the supervisor cannot continue: {error}. No attempt follows; correct that, then `scaletrain "
    "resume`",
    "supervisor-stopped": "the supervisor was stopped",
}
