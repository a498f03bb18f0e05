"""The training engine: the only package that imports torch and DeepSpeed. A process of its own.

One process is one rank. It reads run.json, trains, and tells the outside what happened through the run directory and
its exit code.
"""
