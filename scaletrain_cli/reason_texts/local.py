"""The texts of the local back end."""

from scaletrain_cli.reasons import Text

TEXTS: dict[str, Text] = {
    # ---- submit and cancel -----------------------------------------------------------------------------------------
    "unfit-machine": Text("this machine cannot run the job: {problems:list}", ("Change cluster.gpus_per_node",)),
    "no-queue": Text("this machine has no queue"),
    "shared-gpus": Text(
        "--max-concurrent {requested}: local runs all use the GPUs of this machine from GPU 0 on, and would share them",
        ("Leave the option out to run them one after the other, or use cluster.scheduler = slurm",),
    ),
    "started-elsewhere": Text("{run} was started on {host}", ("Cancel it on {host}",)),
    # ---- the job of a run ------------------------------------------------------------------------------------------
    "never-started": Text("never started"),
    "job-elsewhere": Text("was started on {host}; its state can only be queried there"),
    "waits-for-run": Text("waits for {run}, the run before it in its sweep"),
    "supervisor-running": Text("the supervisor is running"),
    "agent-stopping": Text("the supervisor has ended; the node agent is stopping its ranks"),
    "no-process": Text("no process is left"),
    # ---- the supervisor --------------------------------------------------------------------------------------------
    "supervisor-not-started": Text("the supervisor did not start: {said}"),
    "supervisor-exited": Text("the supervisor did not start: it exited with code {exit_code}"),
    "supervisor-timed-out": Text("supervisor {pid} did not start within {seconds:.0f} s", ("See {folder}",)),
    "supervisor-exists": Text("{run} already has a supervisor"),
    "supervisor-failed": Text(
        "the supervisor cannot continue: {error}. No attempt follows; correct that, then `scaletrain resume`"
    ),
    "supervisor-stopped": Text("the supervisor was stopped; `scaletrain resume` continues the run"),
}
