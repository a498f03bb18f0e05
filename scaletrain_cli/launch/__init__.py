"""From a plan to running ranks and back: submission, schedulers, node agent, restarts, resumption, status and logs.

Knows the run directory and the spec; never the engine, which it starts as a process, nor how anything is shown.
"""
