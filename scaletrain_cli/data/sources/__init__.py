"""The documents of a source: its files, their formats, and their partition into parts that are read independently."""
