"""Telemetry: measured values of ranks, GPUs, nodes and layers over time, in one small binary file per node.

``series`` writes and reads one file, ``segments`` defines its format, ``run`` reads all files of an attempt. Standard
library only: the node agent and verbs that only read import it.
"""
