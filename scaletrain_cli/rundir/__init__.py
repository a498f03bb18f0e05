"""The run directory: its paths, record, events, metrics and checkpoint manifests.

The interface between the launcher and the engine. Standard library and spec/plan types only: every verb
reads a run with no server running, and neither torch nor a scheduler installed.
"""
