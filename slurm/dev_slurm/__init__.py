"""The parts of slurm/dev_cluster.py."""
