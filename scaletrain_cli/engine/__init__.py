"""The training engine: the only room with torch and deepspeed. Started as a process, imported by nobody.

One process is one rank. It reads run.json, trains, and tells the outside what happened through the run directory and
its exit code.
"""
