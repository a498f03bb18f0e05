"""One object per training framework: its memory, time, pipeline and search rules. registry.py finds them by name."""
