"""The launcher: submission, back ends, node agent, restarts, resumption, status and logs of runs.

It imports the run directory and the spec, but neither the engine, which it starts as a process, nor the user interface.
"""
