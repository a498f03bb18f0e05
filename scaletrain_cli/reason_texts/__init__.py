"""The English of every reason code: one table per package, each to be read from top to bottom."""
