"""How a model is cut over ranks: the mesh, tensor, sequence, expert and pipeline parallelism. Knows no data and no optimizer."""
