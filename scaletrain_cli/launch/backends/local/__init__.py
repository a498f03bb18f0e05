"""The local back end: a supervisor process on this machine starts the node agent and its restarts."""
