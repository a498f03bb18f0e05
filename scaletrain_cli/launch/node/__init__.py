"""The agent on each node of a job: it starts the ranks, watches them and records how they ended."""
