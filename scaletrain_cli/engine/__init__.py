"""The training engine: the only package that imports torch and DeepSpeed.

One process is one rank. It reads run.json, trains, and reports through the run directory and its exit code.
"""
