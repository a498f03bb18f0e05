"""The training state of a rank as pieces of named matrices, which any layout can be put together from."""
