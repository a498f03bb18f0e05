"""The Slurm back end: the batch script, and parsers of the output of Slurm's commands."""
