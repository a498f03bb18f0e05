"""The Slurm back end: batch scripts, and what Slurm's commands report."""
