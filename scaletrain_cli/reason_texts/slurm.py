"""The texts of the Slurm back end."""

from __future__ import annotations

from scaletrain_cli.reasons import Text

TEXTS: dict[str, Text] = {
    # ---- restart decisions -----------------------------------------------------------------------------------------
    "job-being-ended": Text("Slurm is ending the job, and it alone decides whether the job is queued again"),
    "job-not-requeued": Text(
        "Slurm did not requeue the job (the log of the job shows why); `scaletrain resume` continues the run"
    ),
}
